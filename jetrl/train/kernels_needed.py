"""The kernels that a run will need: its rollout and its update in miniature, run under `kernels.backends.recorded`.

The miniature has the run's widths, vocabulary, precision and settings, one layer of each kind, and weights of zeros. It
goes through the same engine, packing, losses and optimizer as the run, so what these launch is what is found. Numbers
of rows are chosen by how compilers tell them apart: every size of a decode graph; prompts and micro-batches that are
multiples of 16, that are padded to one (the scales' columns), and others; below and above 4,096 rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import torch

from jetrl.config import Config
from jetrl.kernels.compiling import Job
from jetrl.kernels.dispatch import select
from jetrl.model.transformer import Transformer
from jetrl.rollout.engine import PagedEngine
from jetrl.rollout.graphs import padded_batch
from jetrl.spec import ModelSpec
from jetrl.train import setup
from jetrl.train.optim import set_lr
from jetrl.train.packing import packed, to_device
from jetrl.train.passes import estimate
from jetrl.train.publish import publish
from jetrl.train.step import Learner, forward_rows, update
from jetrl.types import Group, Problem, Prompt, Request, SamplingParams, Segment, Trajectory

_DIGEST = "in miniature"
_LOOKS = 4  # steps at each size: a decode graph of its own is captured when a size is asked for the third time


class _NoText:
    """The tokenizer of requests that only have tokens."""

    eos_token_id = None

    def decode(self, token_ids: list[int]) -> str:
        return ""


def find(emit: Callable[[Job], object], config: Config, spec: ModelSpec, device: int, trains: bool) -> None:
    """Send a job for every kernel that a run of this config launches; `trains`: its updates too."""
    from jetrl.kernels.backends.recorded import recording

    torch.cuda.set_device(device)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    select(config.kernels)
    most = config.rollout.max_tokens_per_step or 0
    with recording(emit, max(most, config.train.max_tokens_per_gpu if trains else 0)):
        run(config, spec, trains)


def run(config: Config, spec: ModelSpec, trains: bool) -> None:
    """The rollout and, if it `trains`, the updates of a run in miniature."""
    config, spec = reduced(config, spec)
    recipe = setup.recipe_of(config, spec)
    if trains:
        model = setup.build_model(config, spec, recipe, weights=False)
    else:
        model = Transformer(spec, recipe, master_dtype=None).to(config.device)
        zeros = ((name, torch.zeros(p.shape)) for name, p in list(model.named_parameters()))
        model.publish_values(zeros)
    if config.rollout.engine == "jetrl":
        roll_out(model, config)
    if trains:
        train(setup.build_learner(config, model), config)


def reduced(config: Config, spec: ModelSpec) -> tuple[Config, ModelSpec]:
    """The same with one layer of each kind: BF16 ones at the ends, with and without experts."""
    q = config.quant
    first, last = min(1, q.num_first_layers_in_bf16), min(1, q.num_last_layers_in_bf16)
    layers = first + last + (q.num_first_layers_in_bf16 + q.num_last_layers_in_bf16 < spec.num_layers)
    experts = spec.experts
    if experts is not None:
        kinds = [experts.in_layer(i) for i in range(spec.num_layers)]
        layers = max(layers, min(spec.num_layers, first + 1 + kinds[first:].index(True)) + last)
        if False in kinds:
            layers = max(layers, kinds.index(False) + 1)
        experts = replace(experts, dense_layers=tuple(i for i in experts.dense_layers if i < layers))
    quant = q.model_copy(update={"num_first_layers_in_bf16": first, "num_last_layers_in_bf16": last})
    return config.model_copy(update={"quant": quant}), replace(spec, num_layers=layers, experts=experts)


def row_counts(most: int) -> list[int]:
    """Numbers of rows of each kind up to `most`, as the module's text says."""
    small, large = (5, 13, 16), (4096 + 5, 4096 + 13, 4096 + 16)
    return sorted({n for n in (*small, *large, most) if n <= most})


def roll_out(model: Transformer, config: Config) -> None:
    """Sessions of the engine: every size of a decode step, prompts of all kinds, prompts next to decode steps."""
    r = config.rollout
    assert r.page_size is not None and r.max_tokens_per_step is not None, "resolve() has set both"
    engine = PagedEngine(
        model, _NoText(), _DIGEST, page_size=r.page_size, max_num_seqs=r.max_num_seqs,
        max_tokens_per_step=r.max_tokens_per_step,
    )
    engine.runner.max_burst = 1
    engine.load(publish(model, 0, _DIGEST))
    params = SamplingParams(
        1, temperature=r.temperature, top_p=r.top_p, top_k=r.top_k, min_p=r.min_p, ignore_eos=True
    )
    longest = min(model.spec.max_position, config.task.max_prompt_length + r.max_response_length)

    def asked(first: int, sizes: Sequence[tuple[int, int]]) -> list[Request]:
        vocabulary = model.spec.vocab_size
        return [
            Request(first + i, ((first + i) % vocabulary, *[0] * (prompt - 1)), replace(params, max_tokens=new))
            for i, (prompt, new) in enumerate(sizes)
        ]

    engine.generate(asked(0, [(1, min(new, longest - 1)) for new in shrinking(r.max_num_seqs)]))
    for rows in row_counts(r.max_tokens_per_step):
        engine.generate(asked(0, [(part, 1) for part in parts(rows, longest - 1)]))
    for running in {1, max(1, r.max_num_seqs - 1)}:  # decode steps with prompts next to them
        engine.add(asked(0, [(1, min(6, longest - 1))] * running))
        engine.step()
        engine.step()
        engine.add(asked(running, [(min(5, longest - 1), 1)]))
        while engine.has_work:
            engine.step()
        engine.collect()
    for count in (2, 65, 129):  # prompts in one step
        engine.generate(asked(0, [(min(5, longest - 1), 1)] * min(count, r.max_num_seqs)))
    same = asked(0, [(min(5, longest - 1), 1)])[0]
    engine.generate([replace(same, id=i) for i in range(min(4, r.max_num_seqs))])  # samples of one prompt
    engine.release()


def shrinking(most: int) -> list[int]:
    """New tokens of each of `most` sequences, so that a batch takes every size of a decode graph as it runs out."""
    sizes = sorted({padded_batch(n) for n in range(1, most + 1)}, reverse=True)
    return [2 + _LOOKS * sum(size >= number for size in sizes) for number in range(1, most + 1)]


def parts(total: int, most: int) -> list[int]:
    """`total` in parts of at most `most`."""
    return [most] * (total // most) + ([total % most] if total % most else [])


def train(learner: Learner, config: Config) -> None:
    """One update with a micro-batch of each kind, the passes before it, and publishing."""
    groups = list(groups_of(config, learner.model.spec))
    trajectories = [t for group in groups for t in group.trajectories]
    ends = list(accumulate((len(group.trajectories) for group in groups), initial=0))
    bins = [list(range(*ends)) for ends in pairwise(ends)]
    batch = packed(trajectories, [True] * len(trajectories), bins, _DIGEST, 0, config.train.share_prompts)
    reference = learner.model if config.rl.kl_coef else None
    _, batches, _ = estimate(groups, [batch], learner, reference, config, True)
    update(learner, batches, config, config.rl.critic_warmup_steps + 1)
    if config.sft.steps:  # its loss has no entropy
        micro = to_device(batch.micro_batches[0], learner.model.head_weight.device)
        forward_rows(learner.model, micro, 1.0).logprobs.sum().backward()
        set_lr(learner.optimizer, 0.0)
    learner.model.publish()


def groups_of(config: Config, spec: ModelSpec) -> Iterator[Group]:
    """Groups whose answers fill a micro-batch of each kind."""
    longest = min(spec.max_position, config.task.max_prompt_length + config.rollout.max_response_length)
    for number, total in enumerate(n for n in row_counts(config.train.max_tokens_per_gpu) if n >= 4):
        prompt = (number % spec.vocab_size,)
        answers = tuple(
            Trajectory(
                (
                    Segment("environment", prompt, ""),
                    Segment("policy", (0,) * (length - 1), "", (0.0,) * (length - 1)),
                ), "stop", 0, _DIGEST,
            )
            for length in halves(total, longest)
        )
        rewards = tuple(float(i % 2) for i in range(len(answers)))
        yield Group(Prompt(number, Problem(str(number), "", ""), prompt), answers, rewards)


def halves(total: int, most: int) -> list[int]:
    """At least two sizes, as even as possible, each at least 2 and at most `most`, of sum `total`."""
    count = max(2, -(-total // most))
    return [(total * (i + 1)) // count - total * i // count for i in range(count)]
