"""The certificate of several ranks: that N of them give what one gives, bit for bit.

Each rank runs the links of `parity` on its own device. Then, of random prompts with two samples each:

    e  a rollout that the ranks share = the same rollout by each rank alone (tokens and their log-probs)
    f  training forward of micro-batch i on rank i % N = the log-probs that some rank recorded at sampling
    g  one update by N ranks with train.reduction = "fixed" = the same update by one rank: metrics, masters, moments and
       published weights

For link g each rank makes the update a second time as one process would, on its own device, and compares the rows of
masters and moments that it owns, and all published rows, by 64-bit hashes. So what is promised of N ranks is compared
with what one process computes, on every device, and no more than one copy of the model is held at a time.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

import torch
from torch import Tensor

from jetrl.config import Config
from jetrl.config.rl import RLConfig
from jetrl.config.train import TrainConfig
from jetrl.engine.engine import PagedEngine
from jetrl.engine.settings import EngineSettings
from jetrl.errors import UserError
from jetrl.model.adapter import is_adapter
from jetrl.model.master import masters_of
from jetrl.model.shards import Shard
from jetrl.model.transformer import Transformer
from jetrl.model.weights import published_bytes
from jetrl.parallel.agreement import common, on_every_rank, same_everywhere, together
from jetrl.parallel.world import ALONE, World
from jetrl.parity.certificate import Certificate, certify
from jetrl.parity.model_under_test import Subject, told_if_not_finite
from jetrl.parity.rows import (
    LinkResult,
    NoText,
    Workload,
    check_sizes,
    fingerprint,
    learners_forward,
    page_size_on,
    prompts_of,
    published_bits,
    random_sequences,
    row_bits,
)
from jetrl.rollout.queue import Queues
from jetrl.rollout.requests import STEP_STRIDE, RolloutRequest
from jetrl.rollout.rollout import Rollout, roll_out
from jetrl.run.setup import build_learner
from jetrl.run.start import require_alike
from jetrl.train.batches import PackedBatch
from jetrl.train.packing import fill, pack, to_device
from jetrl.train.step import Learner, forward_batch, update
from jetrl.types import Problem, Prompt, SamplingParams, Trajectory, WeightSet

Masters = Literal["fp32", "bf16", "no"]
_FLOW = "certificate"  # in place of the flow's digest
_SAMPLES = 2  # of each prompt
_BYTES = {"fp32": 4 + 4 + 8, "bf16": 2 + 2 + 4}  # of a parameter: master, gradient, two moments
_SPARE = 4 << 30  # bytes for activations, CUDA and its libraries


def certified(
    world: World, find: Callable[[], Subject], work_on: Callable[[int], Workload], update: str,
    progress: Callable[[str], None],
) -> tuple[Certificate, str]:
    """`jetrl parity` on one rank or several: the certificate, and the model's formats in words. A collective.

    `find` may download; `work_on` gives the traffic for a page size; `update` is "", fp32, bf16 or no.
    """
    with together(world):
        check_sizes(work_on(1))  # before the model is read
        masters = _masters_of(update, world)
    subject = on_every_rank(world, find)
    require_alike(world, subject.config, model=subject.name)
    work = work_on(page_size_on(subject.config.device))
    if world.alone:
        with told_if_not_finite(subject.name):
            return certify(subject.published(), work, subject.name, progress), subject.formats
    return certify_ranks(subject, work, world, masters, progress), subject.formats


def _masters_of(update: str, world: World) -> Masters:
    if update and world.alone:
        raise UserError(f"--update {update} compares an update of several ranks with one rank's. Add --nproc 2.")
    for known in ("fp32", "bf16", "no"):
        if (update or "fp32") == known:
            return known
    raise UserError(f"--update {update}: give fp32, bf16 or no.")


def certify_ranks(
    subject: Subject, work: Workload, world: World, masters: Masters, progress: Callable[[str], None]
) -> Certificate:
    """All links; the same certificate on every rank. A collective.

    Link g holds the masters, gradients and moments of one process in this type, and is left out with "no". UserError if
    a GPU cannot hold them, or if the ranks hold different weights.
    """
    torch.use_deterministic_algorithms(True)  # as runs do
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    with together(world):
        if masters != "no":
            _require_memory(subject, masters)
        model = subject.published()
    same_everywhere(world, **{f"the model {subject.name}": fingerprint(model)})
    with together(world), told_if_not_finite(subject.name):
        certificate = certify(model, work, subject.name, progress)
    _free()  # the cache of link d
    links = [merged(world, link) for link in certificate.links]
    found, batch = rollout_links(model, work, world, progress)
    links += found
    del model
    _free()
    if masters != "no":
        progress(update_link.__doc__ or "")
        links.append(merged(world, update_link(subject, batch, training_of(subject.config, work, masters), world)))
    return replace(certificate, links=tuple(links), ranks=world.size)


@torch.no_grad()
def rollout_links(
    model: Transformer, work: Workload, world: World, progress: Callable[[str], None]
) -> tuple[list[LinkResult], PackedBatch]:
    """Links e and f, and the batch for link g. A collective."""
    progress(samples_link.__doc__ or "")
    rollout, samples = samples_link(model, work, world)
    samples = merged(world, samples)
    batch = packed(rollout, world.replicas.size)
    progress(logprobs_link.__doc__ or "")
    return [samples, merged(world, logprobs_link(model, batch, world))], batch


def merged(world: World, link: LinkResult) -> LinkResult:
    """One link of all ranks: its rows added up, the first difference with the rank that found it. A collective."""
    every = world.gather(link)
    first = next((f"rank {r}: {one.first_difference}" for r, one in enumerate(every) if one.first_difference), None)
    gaps = [one.max_abs_diff for one in every]
    return replace(
        link, rows=sum(one.rows for one in every), rows_different=sum(one.rows_different for one in every),
        max_abs_diff=None if None in gaps else max(gap for gap in gaps if gap is not None),
        seconds=max(one.seconds for one in every), first_difference=first,
    )


# ---- link e ---------------------------------------------------------------------------------------------------------


def samples_link(model: Transformer, work: Workload, world: World) -> tuple[Rollout, LinkResult]:
    """e: a rollout that the ranks share = the same one by each rank alone (log-probs of the drawn tokens)"""
    start, vocabulary = time.perf_counter(), model.spec.vocab_size
    tokens = prompts_of(random_sequences(model, work), work)
    prompts = [Prompt(i, Problem(str(i), "", ""), tuple(t)) for i, t in enumerate(tokens)]
    # every 32nd token ends an answer, so that lengths differ and ranks are free at different times
    sampling = SamplingParams(work.new_tokens, stop_token_ids=tuple(range(0, vocabulary, 32)), seed=work.seed)
    asked = RolloutRequest(sampling, _SAMPLES, STEP_STRIDE)
    number = len(prompts) * _SAMPLES
    slots = max(1, number // (3 * world.replicas.size))  # most of the work is shared as slots fall free
    shared = roll_out(_engine(model, work, slots), prompts, asked, queues=Queues(world, slots))
    alone = roll_out(_engine(model, work, number), prompts, asked)
    rows = different = 0
    worst, first = 0.0, None
    for place, (ours, own) in enumerate(zip(_trajectories(shared), _trajectories(alone), strict=True)):
        (a,), (b,) = ours.turns, own.turns
        told = list(zip(a.tokens.tolist(), a.logprobs.tolist(), strict=True))
        wanted = list(zip(b.tokens.tolist(), b.logprobs.tolist(), strict=True))
        unequal = [i for i in range(max(len(told), len(wanted))) if told[i : i + 1] != wanted[i : i + 1]]
        rows, different = rows + len(wanted), different + len(unequal)
        worst = max([worst, *(abs(x[1] - y[1]) for x, y in zip(told, wanted, strict=False) if x[0] == y[0])])
        if unequal and first is None:
            at = unequal[0]
            first = (
                f"sequence {place // _SAMPLES}, sample {place % _SAMPLES}, token {at}: shared "
                f"{_shown(told[at : at + 1])}, alone {_shown(wanted[at : at + 1])}"
            )
    return shared, _result(samples_link, rows, different, worst, start, first)


def _engine(model: Transformer, work: Workload, slots: int) -> PagedEngine:
    """An engine with room for `slots` sequences at once."""
    pages = -(-(work.max_prompt + work.new_tokens) // work.page_size) + 1
    settings = EngineSettings(
        page_size=work.page_size, max_num_seqs=slots, kv_cache_tokens=(slots + 1) * pages * work.page_size,
        max_tokens_per_step=work.step_tokens or max(work.chunk + slots, 8),
    )
    engine = PagedEngine(model, NoText(), _FLOW, settings)
    engine.load(WeightSet(0, _FLOW, {}))
    return engine


def _trajectories(rollout: Rollout) -> list[Trajectory]:
    return [t for group in rollout.groups for t in group.trajectories]


def _shown(drawn: list[tuple[int, float]]) -> str:
    return f"{drawn[0][0]} with log-prob {drawn[0][1]!r}" if drawn else "nothing"


# ---- link f ---------------------------------------------------------------------------------------------------------


def packed(rollout: Rollout, size: int) -> PackedBatch:
    """One update's micro-batches, more than two for each of `size` ranks where the lengths allow it.

    The two samples of a prompt have advantages that do not cancel, even if they say the same.
    """
    lengths = [t.length for t in _trajectories(rollout)]
    most = max(*lengths, -(-sum(lengths) // (2 * size + 1)))
    (batch,) = pack(rollout.groups, max_tokens_per_gpu=most, flow_digest=_FLOW, weight_version=0)
    (filled,) = fill([batch], "advantages", [1.0 if i % _SAMPLES else -0.5 for i in range(len(lengths))])
    return filled


def logprobs_link(model: Transformer, batch: PackedBatch, world: World) -> LinkResult:
    """f: training forward of micro-batch i on rank i % N = sampling, on any rank (log-probs of the drawn tokens)"""
    start = time.perf_counter()
    rows = different = 0
    worst, first = 0.0, None
    for number in range(world.replicas.rank, len(batch.micro_batches), world.replicas.size):
        micro = to_device(batch.micro_batches[number], model.head_weight.device)
        index = micro.loss_mask.nonzero()[:, 0]
        hidden = learners_forward(model, forward_batch(micro))[index]
        trained = model.token_logprobs(hidden, micro.targets[index], 1.0)[0]
        sampled = micro.rollout_logprobs[index]
        unequal = (trained != sampled).nonzero()[:, 0].tolist()
        rows, different = rows + len(index), different + len(unequal)
        if unequal:
            worst = max(worst, float((trained - sampled).abs().max()))
            row = index[unequal[0]]
            first = first or (
                f"micro-batch {number}, trajectory {int(micro.sequence_ids[row])}, position "
                f"{int(micro.positions[row]) + 1}"
            )
    return _result(logprobs_link, rows, different, worst, start, first)


# ---- link g ---------------------------------------------------------------------------------------------------------


def training_of(config: Config, work: Workload, masters: Masters) -> Config:
    """A plain GRPO update with a step large enough to move BF16 weights."""
    dtype: Literal["float32", "bfloat16"] = "float32" if masters == "fp32" else "bfloat16"
    train = TrainConfig(
        lr=1e-3, reduction="fixed", master_dtype=dtype, grad_dtype=dtype, optimizer_dtype=dtype,
        activation_checkpointing=True,
    )
    sampling = config.rollout.model_copy(update={"temperature": 1.0, "max_response_length": work.new_tokens})
    return config.model_copy(update={"rl": RLConfig(), "train": train, "rollout": sampling})


@dataclass(frozen=True, slots=True)
class Updated:
    """A model after an update: metrics, and hashes on the host of this rank's rows of masters and moments, and of all
    published rows."""

    metrics: dict[str, float]
    own: dict[tuple[str, str], Tensor]  # by parameter and what it is
    cuts: dict[str, Shard | None]  # by parameter; None: whole
    published: dict[str, Tensor]
    moved: int  # published rows that the update has changed


def update_link(subject: Subject, batch: PackedBatch, config: Config, world: World) -> LinkResult:
    """g: an update by the ranks, train.reduction = fixed = by each rank alone (masters, moments, published weights)"""
    start = time.perf_counter()
    ranks, alone = _updated(subject, batch, config, world), _updated(subject, batch, config, ALONE)
    assert alone.moved, "the update has changed no published weight, so it shows nothing"
    rows = different = 0
    first = None
    for key, value in alone.metrics.items():
        rows += 1
        if ranks.metrics[key] != value:
            different += 1
            first = first or f"metric {key}: {ranks.metrics[key]!r} by the ranks, {value!r} alone"
    for name, found, wanted, offset in _pairs(ranks, alone, world.rank):
        assert len(found) == len(wanted), f"{name}: {len(found)} rows by the ranks, {len(wanted)} alone"
        unequal = (found != wanted).nonzero()[:, 0]
        rows, different = rows + len(wanted), different + len(unequal)
        if len(unequal):
            first = first or f"{name}, row {offset + int(unequal[0])}"
    return _result(update_link, rows, different, None if different else 0.0, start, first)


def _pairs(ranks: Updated, alone: Updated, rank: int) -> Iterator[tuple[str, Tensor, Tensor, int]]:
    """What is compared: name, rows by the ranks, the same rows alone, and the first one's number."""
    for (name, kind), whole in alone.own.items():
        cut, found = ranks.cuts[name], ranks.own.get((name, kind), whole[:0])  # no moments where a rank has no rows
        offset = 0 if cut is None else sum(cut.rows[:rank])
        yield f"{kind} of {name}", found, whole if cut is None else cut.own(whole), offset
    for name, whole in alone.published.items():
        yield f"published {name}", ranks.published[name], whole, 0


def _updated(subject: Subject, batch: PackedBatch, config: Config, world: World) -> Updated:
    """Build the model over `world`, update it once, publish. Nothing on the device is left of it."""
    model = subject.trained(config, world)
    before = published_bits(model)
    learner = build_learner(config, model, world)
    metrics = update(learner, [batch], config, 1)
    model.publish()
    after = published_bits(model)
    moved = sum(int((before[name] != rows).sum()) for name, rows in after.items())
    cuts = {name: master.shard for name, master in masters_of(model).items()}
    found = Updated(metrics, _own_rows(learner), cuts, after, moved)
    del model, learner
    _free()
    return found


def _free() -> None:
    """Give back the device memory of models that are gone. Engines and modules hold each other, so Python waits."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _own_rows(learner: Learner) -> dict[tuple[str, str], Tensor]:
    found: dict[tuple[str, str], Tensor] = {}
    for name, param in learner.model.named_parameters():
        found[name, "master"] = row_bits(param).cpu()
        for key, value in learner.optimizer.state.get(param, {}).items():
            if isinstance(value, Tensor) and value.shape == param.shape:
                found[name, key] = row_bits(value).cpu()
    return found


def _require_memory(subject: Subject, masters: Masters) -> None:
    """UserError if this rank's GPU cannot hold what one process would train."""
    if torch.device(subject.config.device).type != "cuda":
        return
    with torch.device("meta"):
        model, adapted = Transformer(subject.spec, subject.recipe, master_dtype=None), subject.recipe.lora is not None
    sizes = [prod(p.shape) for name, p in model.named_parameters() if is_adapter(name) or not adapted]
    have = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory

    def need(kind: str) -> int:
        on_their_way = 3 * 4 * max(sizes)  # gradients of one micro-batch
        return _BYTES[kind] * sum(sizes) + on_their_way + published_bytes(subject.spec, subject.recipe) + _SPARE

    if need(masters) > have:
        fits = "bf16" if need("bf16") <= have and masters != "bf16" else "no"
        raise common(UserError(
            f"--update {masters}: to compare with one process, each GPU must hold all masters, gradients and moments: "
            f"{need(masters) / 2**30:.0f} GiB of {have / 2**30:.0f}. Give --update {fits}"
            + (f" ({need('bf16') / 2**30:.0f} GiB)." if fits == "bf16" else ", which leaves the update out.")
        ))


def _result(
    link: Callable[..., object], rows: int, different: int, worst: float | None, start: float, first: str | None
) -> LinkResult:
    letter, _, description = (link.__doc__ or "").partition(": ")
    return LinkResult(letter, description, rows, different, worst, time.perf_counter() - start, first)
