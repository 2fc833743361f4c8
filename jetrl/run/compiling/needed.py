"""The kernels that a run will need: its rollout and its update in miniature, run under `kernels.compiling.recorded`.

The miniature has the run's widths, vocabulary, precision and settings, one layer of each kind, and weights of zeros. It
goes through the same engine, packing, losses and optimizer as the run, so what these launch is what is found. Numbers
of rows are chosen by how compilers tell them apart: every size of a decode graph; prompts and micro-batches of a few
rows, around 1,000 (a multiple of 64 among them), and above 4,096. Kernels do not depend on lengths otherwise.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise

import torch

from jetrl.config import Config
from jetrl.config.teacher import is_url
from jetrl.engine.engine import PagedEngine
from jetrl.engine.graphs.cache import padded_batch
from jetrl.engine.settings import EngineSettings
from jetrl.engine.sharing import served
from jetrl.engine.speculation.depth import DEPTHS
from jetrl.engine.speculation.speculator import Speculator, build_speculator
from jetrl.kernels.compiling.pool import Job
from jetrl.kernels.dispatch import select
from jetrl.kernels.support import PORTABLE
from jetrl.model.master import masters_of, values_for
from jetrl.model.sharding import fill, shard_model
from jetrl.model.transformer import Transformer
from jetrl.parallel.world import ALONE
from jetrl.precision.recipe import build_recipe, recipe_of
from jetrl.rl.losses import Stats
from jetrl.run import setup
from jetrl.run.own_parts import built_in
from jetrl.run.replay.keeping import codes_of
from jetrl.spec import ModelSpec
from jetrl.train.batches import MicroBatch, PackedBatch
from jetrl.train.calibration import shadow_of
from jetrl.train.digests import Digests
from jetrl.train.likelihood import fit, mean_loss
from jetrl.train.optim import build_optimizer
from jetrl.train.packing import packed
from jetrl.train.passes import estimate, logprob_pass
from jetrl.train.publish import publish
from jetrl.train.step import Learner, forward_rows, truncation_of, update
from jetrl.train.teachers import REST, Teachers
from jetrl.train.trainer import optimizer_step
from jetrl.types import (
    Group,
    Problem,
    Prompt,
    Request,
    SamplingParams,
    Segment,
    Trajectory,
    log_probs,
    token_ids,
)

_DIGEST = "in miniature"
_FEW_PROGRAMS = 32  # sequences times key/value heads up to which decode steps may run in parallel over keys
_MANY_KEYS = 4096  # tokens of a prompt, enough for its pages to be read once for all its samples
_OF_ATTENTION = (200,)  # tokens of two answers, which fit one tile of keys and take several of queries
_OF_ADAPTERS = (48, 200)  # rows for which A x comes as sums of chains, with both sizes of tiles after it
_LOOKS = 4  # steps at each size: a decode graph of its own is captured when a size is asked for the third time


class _NoText:
    """The tokenizer of requests that only have tokens."""

    eos_token_id = None

    def decode(self, token_ids: list[int]) -> str:
        return ""


def find(emit: Callable[[Job], object], config: Config, spec: ModelSpec, device: int, trains: bool) -> None:
    """Send a job for every kernel that a run of this config launches; `trains`: its updates too."""
    from jetrl.kernels.compiling.recorded import recording, spare_imports

    libraries = config.kernels != PORTABLE
    if libraries:
        spare_imports()
    torch.cuda.set_device(device)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    select(config.kernels)
    most = config.rollout.max_tokens_per_step or 0
    with recording(emit, max(most, config.train.max_tokens_per_gpu if trains else 0), libraries):
        run(config, spec, trains)


def run(config: Config, spec: ModelSpec, trains: bool) -> None:
    """The rollout and, if it `trains`, the updates of a run in miniature: these first, as their kernels take longest to
    compile."""
    config, spec = reduced(config, spec)
    recipe = recipe_of(config, spec)
    if trains:
        model = setup.build_model(config, spec, recipe, weights=False)
        train(setup.build_learner(config, model), config)
    else:
        model = Transformer(spec, recipe, master_dtype=None).to(config.device)
        zeros = ((name, torch.zeros(p.shape)) for name, p in list(model.named_parameters()))
        model.publish_values(zeros)
    if config.rollout.engine == "jetrl" and not config.supervised:
        roll_out(model, config)


def reduced(config: Config, spec: ModelSpec) -> tuple[Config, ModelSpec]:
    """The same with one layer of each kind: BF16 ones at the ends, with and without experts."""
    q = config.quant
    first, last = min(1, q.num_first_layers_in_bf16), min(1, q.num_last_layers_in_bf16)
    layers = first + last + (q.num_first_layers_in_bf16 + q.num_last_layers_in_bf16 < spec.num_layers)
    experts = spec.experts
    if experts is not None:
        kinds = [experts.in_layer(i) for i in range(spec.num_layers)]
        # the layer after experts begins with another kernel than the experts' own norm
        layers = max(layers, min(spec.num_layers, first + 2 + kinds[first:].index(True) + last))
        if False in kinds:
            layers = max(layers, kinds.index(False) + 1)
        experts = replace(experts, dense_layers=tuple(i for i in experts.dense_layers if i < layers))
    delta = spec.delta
    if delta is not None:  # in the run's precision a layer of each kind, whichever are in BF16
        inner = range(first, spec.num_layers - last)
        of_kind = [[i for i in inner if (i in delta.layers) is linear] for linear in (True, False)]
        layers = max(layers, *(found[0] + 1 + last for found in of_kind if found))
        delta = replace(delta, layers=tuple(i for i in delta.layers if i < layers))
    quant = q.model_copy(update={"num_first_layers_in_bf16": first, "num_last_layers_in_bf16": last})
    return config.model_copy(update={"quant": quant}), replace(spec, num_layers=layers, experts=experts, delta=delta)


def row_counts(most: int) -> list[int]:
    """Numbers of rows of each kind up to `most`, as the module's text says."""
    return sorted({n for n in (5, 16, 1040, 1088, 4101, most) if n <= most})


def batch_counts(most: int, experts: bool) -> list[int]:
    """`row_counts`, and with `experts` the sizes from which groups get other tiles or programs; smaller ones decode."""
    return sorted({*row_counts(most), *(1 << n for n in range(4, 13) if experts and 1 << n <= most)})


def roll_out(model: Transformer, config: Config) -> None:
    """Sessions of the engine: every size of a decode step, prompts of all kinds, prompts next to decode steps, many
    keys, pages that samples share, drafts of every depth."""
    r, spec = config.rollout, model.spec
    longest = min(spec.max_position, config.task.max_prompt_length + r.max_response_length)
    params = SamplingParams(
        1, temperature=r.temperature, top_p=r.top_p, top_k=r.top_k, min_p=r.min_p, ignore_eos=True,
        logprobs=r.logprobs or "full",
    )
    engine = _engine(model, config)
    numbers = itertools.count(1)
    ask = partial(asked, spec.vocab_size, params, numbers)
    engine.generate(ask([(1, min(new, longest - 1)) for new in shrinking(r.max_num_seqs)]))
    most, counts = r.max_tokens_per_step or 0, set[int]()
    if model.recipe.lora is not None:
        counts = {n for n in _OF_ADAPTERS if n <= most}
    for rows in sorted({*counts, *batch_counts(most, spec.experts is not None)}):
        engine.generate(ask([(part, 1) for part in parts(rows, longest - 1)]))
    for running in {1, max(1, r.max_num_seqs - 1)}:  # decode steps with prompts next to them
        engine.add(ask([(1, min(6, longest - 1))] * running))
        engine.step()
        engine.step()
        engine.add(ask([(min(5, longest - 1), 1)], running))
        while engine.has_work:
            engine.step()
        engine.collect()
    for count in (2, 257, 513):  # prompts in one step
        engine.generate(ask([(min(5, longest - 1), 1)] * min(count, r.max_num_seqs)))
    same = ask([(min(5, longest - 1), 1)])[0]
    engine.generate([replace(same, id=i) for i in range(min(4, r.max_num_seqs))])  # samples of one prompt
    # evaluations draw from whole distributions, the most likely token
    engine.generate(asked(spec.vocab_size, SamplingParams(1, temperature=0.0, ignore_eos=True), numbers, [(1, 2)]))
    for count, keys in many_keys(spec.num_kv_heads, r.page_size or 0, longest - 3, r.max_num_seqs):
        engine.generate(ask([(keys, 3)] * count))
    if _merges(config, spec):
        same = ask([(max(1, min(_MANY_KEYS, longest - 3)), 3)])[0]
        for count in {min(17, r.max_num_seqs), r.max_num_seqs}:
            engine.generate([replace(same, id=i) for i in range(count)])
    engine.release()
    for depth in [] if r.speculate == "off" else [d for d in DEPTHS if 0 < d <= r.max_draft_tokens]:
        engine = _engine(model, config, build_speculator("on", depth, r.max_num_seqs))
        sizes = {padded_batch(n) for n in range(1, r.max_num_seqs + 1)} if spec.experts else {1, r.max_num_seqs}
        for count in sorted(min(size, r.max_num_seqs) for size in sizes):
            engine.generate(ask([(1, min(2 * depth + 2, longest - 1))] * count))
        engine.release()


def _merges(config: Config, spec: ModelSpec) -> bool:
    """Whether samples of a prompt may share pages that decode steps read once."""
    r = config.rollout
    shares = r.group_size > 1 and r.page_size is not None and config.task.max_prompt_length >= r.page_size
    return r.merge_prefix != "off" and shares and served(spec, r.page_size or 0)


def _engine(model: Transformer, config: Config, speculator: Speculator | None = None) -> PagedEngine:
    """The run's engine, its weights loaded."""
    r = config.rollout
    assert r.page_size is not None and r.max_tokens_per_step is not None, "resolve() has set both"
    settings = EngineSettings(
        page_size=r.page_size, max_num_seqs=r.max_num_seqs, max_tokens_per_step=r.max_tokens_per_step,
        merge_prefix="on" if _merges(config, model.spec) else "off", max_burst=1,
    )
    engine = PagedEngine(model, _NoText(), _DIGEST, settings, speculator)
    engine.load(publish(model, 0, _DIGEST))
    return engine


def asked(
    vocabulary: int, params: SamplingParams, numbers: Iterator[int], sizes: Sequence[tuple[int, int]], first: int = 0
) -> list[Request]:
    """Requests with so many tokens of a prompt and new ones. Prompts begin with one of `numbers` each: none
    goes on from what the engine has kept of an earlier one."""
    return [
        Request(first + i, (n % vocabulary, n // vocabulary % vocabulary, *[0] * prompt)[:prompt],
                replace(params, max_tokens=new))
        for i, ((prompt, new), n) in enumerate(zip(sizes, numbers, strict=False))
    ]


def many_keys(groups: int, page: int, most: int, sequences: int) -> list[tuple[int, int]]:
    """How many sequences, with how many keys each: what decodes in parallel over keys has kernels by the number of
    sequences and by the width of the page table, a power of two."""
    counts = [1 << n for n in range(8) if (1 << n) * groups <= _FEW_PROGRAMS and 1 << n <= sequences]
    widths = [1 << n for n in range(5, 20) if page and page << (n - 1) < most]
    return [(count, min(width * page - 3, most)) for width in widths for count in counts]


def shrinking(most: int) -> list[int]:
    """New tokens of each of `most` sequences, so that a batch takes every size of a decode graph as it runs out."""
    sizes = sorted({padded_batch(n) for n in range(1, most + 1)}, reverse=True)
    return [2 + _LOOKS * sum(size >= number for size in sizes) for number in range(1, most + 1)]


def parts(total: int, most: int) -> list[int]:
    """`total` in parts of at most `most`."""
    return [most] * (total // most) + ([total % most] if total % most else [])


def train(learner: Learner, config: Config) -> None:
    """One update with a micro-batch of each kind, the passes before it, and publishing."""
    config = built_in(config)
    groups = list(groups_of(config, learner.model.spec))
    trajectories = [t for group in groups for t in group.trajectories]
    ends = list(accumulate((len(group.trajectories) for group in groups), initial=0))
    bins = [list(range(*ends)) for ends in pairwise(ends)]
    batch = packed(trajectories, [True] * len(trajectories), bins, _DIGEST, 0, config.train.share_prompts)
    if config.supervised:
        fit(learner, batch, config, 1)
        mean_loss(learner.model, batch)
        learner.model.publish()
        return
    reference = learner.model if config.rl.kl_coef else None
    # stands in for all teachers: their own shapes compile at first use
    here = config.teacher.path and any(not is_url(path) for path in (config.teacher.path, *config.teacher.paths))
    teacher = Teachers({REST: learner.model}) if here else None
    _, batches, _ = estimate(groups, [batch], learner, reference, config, True, teacher=teacher)
    update(learner, batches, config, config.rl.critic_warmup_steps + 1, seen=(seen := Digests()))
    if config.rl.updates_per_step > 1:  # the policy's noise, and sets that truncated distributions keep
        logprob_pass(learner.model, batch, config.rollout.temperature, truncation_of(config))
    if config.rl.clip == "calibrated":
        logprob_pass(shadow_of(learner.model), batch, config.rollout.temperature)
    if config.sft.steps:
        warm_start(learner.model, batch, config)
    learner.model.publish()
    seen.add_parts("published", codes_of(learner.model))


def warm_start(model: Transformer, batch: PackedBatch, config: Config) -> None:
    """A step of `run.sft`, which is in BF16 whatever the run's precision is."""
    with torch.device("meta"):
        student = Transformer(model.spec, build_recipe("bf16", model.spec.num_layers), dtype=model.dtype)
    shard_model(student, ALONE)
    fill(student, values_for(student, model), model.head_weight.device)
    student.to(model.head_weight.device).publish()
    fp32 = {"master_dtype": "float32", "optimizer_dtype": "float32", "offload_optimizer": False}
    masters = masters_of(student)
    optimizer = build_optimizer(masters, config.train.model_copy(update=fp32))

    def loss_of(micro: MicroBatch) -> tuple[torch.Tensor, Stats]:
        return forward_rows(student, micro, 1.0).logprobs.sum(), {}

    optimizer_step(
        list(masters.values()), optimizer, batch, loss_of, lr=0.0, max_grad_norm=config.train.max_grad_norm,
        reduction="fixed",
    )
    student.publish()


def groups_of(config: Config, spec: ModelSpec) -> Iterator[Group]:
    """Groups whose answers fill a micro-batch of each kind."""
    longest = min(spec.max_position, config.longest)
    counts = {*batch_counts(config.train.max_tokens_per_gpu, spec.experts is not None), *_OF_ATTENTION}
    for number, total in enumerate(n for n in sorted(counts) if 4 <= n <= config.train.max_tokens_per_gpu):
        prompt = (number % spec.vocab_size,)
        opening = Segment("environment", token_ids(prompt), "")
        answers = tuple(
            Trajectory((opening, _answer(length - 1)), "stop", _DIGEST) for length in halves(total, longest)
        )
        rewards = tuple(float(i % 2) for i in range(len(answers)))
        yield Group(Prompt(number, Problem(str(number), "", ""), prompt), answers, rewards)


def _answer(length: int) -> Segment:
    return Segment("policy", token_ids([0] * length), "", log_probs([0.0] * length), spans=((0, 0),))


def halves(total: int, most: int) -> list[int]:
    """At least two sizes, as even as possible, each at least 2 and at most `most`, of sum `total`."""
    count = max(2, -(-total // most))
    return [(total * (i + 1)) // count - total * i // count for i in range(count)]
