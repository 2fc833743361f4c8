"""Trajectories -> packed batches, one for each optimizer update. RL and the warm start pack the same way.

Letters: T packed tokens of a micro-batch, B trajectories of a micro-batch, R rows that carry loss, P policy tokens of a
trajectory. Everything is decided by order, length and index: equal groups give equal batches on every machine.

Which trajectories make a micro-batch follows from lengths and prompts alone (`train.bins`), and all ranks know it. Each
makes the rows of those micro-batches that it computes: `own`.

Shared prompts: trajectories of a micro-batch with the same prompt are a family. Its first part, the stem, has the
prompt without its last token, once; then comes a part for each trajectory, from the prompt's last token on. That token
is repeated because its row carries a loss of each trajectory: so every loss row belongs to one trajectory, as it does
without sharing. A trajectory alone with its prompt, and a prompt of one token, have no stem.

A trajectory whose history was changed has a part for each of its rows (`jetrl.branches`), behind one another; all that
is said of a trajectory's loss rows is said of these together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jetrl.branches import rows_of
from jetrl.choices import MaskedSequences
from jetrl.errors import UserError
from jetrl.kernels.logprob.truncation import KeptSets
from jetrl.rl.losses import Denominators
from jetrl.train.batches import MicroBatch, PackedBatch
from jetrl.train.bins import bin_pack, families, share_bins, shared_rows
from jetrl.types import Advantage, Group, Segment, Trajectory

Own = Callable[[int], Sequence[int]]
"""Which of so many micro-batches of an update to make, ascending (`reduction.own_numbers`)."""


@dataclass(frozen=True, slots=True)
class _Sequence:
    """One trajectory on its way into a micro-batch. `index` is its number within the update."""

    index: int
    trajectory: Trajectory
    in_loss: bool


def pack(
    groups: Sequence[Group],
    *,
    max_tokens_per_gpu: int,
    flow_digest: str,
    weight_version: int,
    mask_truncated: bool = False,
    updates_per_step: int = 1,
    share_prompts: bool = False,
    own: Own = range,
    max_off_policy_steps: int = 0,
) -> list[PackedBatch]:
    """Pack groups, one `PackedBatch` an update, micro-batches of at most `max_tokens_per_gpu` tokens.

    - The groups are cut into `updates_per_step` runs of neighbours whose sizes differ by at most one; a group is never
      split. With fewer groups than updates (dynamic sampling may drop some) there are only as many updates as groups,
      and none for no groups.
    - `mask_truncated`: a trajectory that ran into a limit stays in the batch with loss mask 0.
    - `share_prompts`: trajectories of a micro-batch with the same prompt have its rows together, and are packed so that
      this helps (`share_bins`).
    - `own`: which micro-batches to make; the others are only counted.
    - `max_off_policy_steps`: with answers that are carried over, how many updates any token may be behind.
    - Advantages are NaN here; `fill` writes them.

    Raises UserError for a trajectory longer than `max_tokens_per_gpu`; ValueError for one of another precision flow or
    weight version than this trainer's (or beyond that bound), or in a micro-batch that is made with a log-prob that is
    no number. Tokens of older versions before a trajectory's last span are taken; `MicroBatch.versions` names them.
    """
    if updates_per_step < 1:
        raise UserError(f"rl.updates_per_step = {updates_per_step} must be at least 1")
    for group in groups:
        _check_group(group, flow_digest, weight_version, max_off_policy_steps)
    num_updates = min(updates_per_step, len(groups))
    batches = []
    for update in range(num_updates):
        start, end = (len(groups) * edge // num_updates for edge in (update, update + 1))
        trajectories = [t for group in groups[start:end] for t in group.trajectories]
        in_loss = [not (mask_truncated and t.truncated) for t in trajectories]
        bins = bin_pack([t.length for t in trajectories], max_tokens_per_gpu)
        if share_prompts:
            bins = share_bins(trajectories, bins, max_tokens_per_gpu)
        places = [group.prompt.index for group in groups[start:end] for _ in group.trajectories]
        for index in chain.from_iterable(bins[number] for number in own(len(bins))):
            _check_logprobs(trajectories[index], places[index])
        batch = packed(trajectories, in_loss, bins, flow_digest, weight_version, share_prompts, own)
        batches.append(replace(batch, prompts=tuple(places)))
    return batches


def pack_in_order(trajectories: Sequence[Trajectory], max_tokens_per_gpu: int, own: Own = range) -> PackedBatch:
    """One batch in the given order; a new micro-batch begins where the next trajectory does not fit (warm start)."""
    bins: list[list[int]] = [[]]
    used = 0
    for index, trajectory in enumerate(trajectories):
        if bins[-1] and used + trajectory.length > max_tokens_per_gpu:
            bins.append([])
            used = 0
        bins[-1].append(index)
        used += trajectory.length
    return packed(trajectories, [True] * len(trajectories), bins, "", 0, own=own)


def packed(
    trajectories: Sequence[Trajectory], in_loss: Sequence[bool], bins: Sequence[Sequence[int]], flow_digest: str,
    weight_version: int, share_prompts: bool = False, own: Own = range,
) -> PackedBatch:
    """The batch with a micro-batch for each of `bins` that is its `own`; they hold places in `trajectories`.

    Row t predicts token t + 1, so the policy's tokens at places a .. b of a trajectory are the targets of its rows
    a-1 .. b-1; the last row predicts nothing. Rows outside the loss hold NaN in the columns of the loss.
    """
    sequences = [_Sequence(i, t, kept) for i, (t, kept) in enumerate(zip(trajectories, in_loss, strict=True))]
    numbers, drawn = tuple(own(len(bins))), [t.num_policy_tokens for t in trajectories]
    counts = tuple(count if kept else 0 for count, kept in zip(drawn, in_loss, strict=True))
    return PackedBatch(
        micro_batches=tuple(
            _micro_batch([sequences[i] for i in bins[number]], share_prompts, weight_version) for number in numbers
        ),
        numbers=numbers,
        num_micro_batches=len(bins),
        num_sequences=len(sequences),
        num_loss_tokens=sum(counts),
        sequence_tokens=counts,
        flow_digest=flow_digest,
        weight_version=weight_version,
        num_masked_tokens=sum(drawn) - sum(counts),
        num_older_tokens=sum(s.trajectory.num_older(weight_version) for s in sequences if s.in_loss),
    )


def joined(parts: Sequence[PackedBatch]) -> PackedBatch:
    """One update from what each rank holds of it."""
    every = {n: m for part in parts for n, m in zip(part.numbers, part.micro_batches, strict=True)}
    assert len(every) == parts[0].num_micro_batches, (sorted(every), parts[0].num_micro_batches)
    numbers = tuple(sorted(every))
    return replace(parts[0], micro_batches=tuple(every[n] for n in numbers), numbers=numbers)


def with_behind(batch: PackedBatch, given: PackedBatch) -> PackedBatch:
    """One update of both; the micro-batches of `given`, as such, come behind the others."""
    micros = tuple(
        replace(m, given=True, sequence_ids=torch.where(m.sequence_ids < 0, -1, m.sequence_ids + batch.num_sequences))
        for m in given.micro_batches
    )
    return replace(
        batch, micro_batches=batch.micro_batches + micros,
        numbers=batch.numbers + tuple(batch.num_micro_batches + n for n in given.numbers),
        num_micro_batches=batch.num_micro_batches + given.num_micro_batches,
        num_sequences=batch.num_sequences + given.num_sequences,
        num_loss_tokens=batch.num_loss_tokens + given.num_loss_tokens,
        sequence_tokens=batch.sequence_tokens + given.sequence_tokens, prompts=batch.prompts + given.prompts,
    )


def denominators(
    batch: PackedBatch, max_response_length: int, masked_sequences: MaskedSequences = "drop"
) -> Denominators:
    """What the losses of all micro-batches of this update are divided by. Needs at least one loss token.

    `masked_sequences = "count"`: trajectories outside the loss count as if they were in it, with loss 0.

    An update in which every trajectory was truncated under `mask_truncated` has none: check `batch.num_loss_tokens`
    and skip it.
    """
    counts = batch.sequence_tokens
    return Denominators(
        num_loss_tokens=batch.num_loss_tokens,
        num_sequences=batch.num_sequences if masked_sequences == "count" else sum(count > 0 for count in counts),
        sequence_tokens=counts,
        max_response_length=max_response_length,
        masked_tokens=batch.num_masked_tokens if masked_sequences == "count" else 0,
    )


def rows_saved(batches: Sequence[PackedBatch]) -> dict[str, float]:
    """`perf/frac_rows_saved`: of the rows that whole trajectories would take in the micro-batches held, the share that
    sharing prompts saves; nothing where no prompt is shared."""
    packed_rows = whole_rows = 0
    for micro in chain.from_iterable(batch.micro_batches for batch in batches):
        stems = micro.stems or (-1,) * len(micro.lengths)
        are_stems = set(stems)
        packed_rows += sum(micro.lengths)
        whole_rows += sum(
            length + (micro.lengths[stem] if stem >= 0 else 0)
            for part, (stem, length) in enumerate(zip(stems, micro.lengths, strict=True)) if part not in are_stems
        )
    return {"perf/frac_rows_saved": 1 - packed_rows / whole_rows} if packed_rows < whole_rows else {}


def fill(
    batches: Sequence[PackedBatch], column: str, values: Sequence[Advantage | np.ndarray | None]
) -> list[PackedBatch]:
    """The batches with `column` (such as "advantages") set: one entry of `values` per trajectory, in packing order.

    An entry is one number for all policy tokens, or one for each of them; None outside the loss, and only there. Rows
    outside the loss hold NaN. Trajectories in no micro-batch that is held are passed by.
    """
    assert len(values) == sum(batch.num_sequences for batch in batches), "one entry a trajectory"
    filled, first = [], 0
    for batch in batches:
        columns = [_absent(len(m.tokens)) for m in batch.micro_batches]
        for number, sequence, rows in _loss_rows(batch):
            if not len(rows):
                continue
            value = values[first + sequence]
            assert value is not None, f"{column} of a trajectory in the loss was not computed"
            columns[number][rows] = value if isinstance(value, float) else torch.as_tensor(value, dtype=torch.float32)
        micros = [_with_column(m, column, c) for m, c in zip(batch.micro_batches, columns, strict=True)]
        filled.append(replace(batch, micro_batches=tuple(micros)))
        first += batch.num_sequences
    return filled


def with_rows(batch: PackedBatch, column: str, rows: Sequence[Tensor]) -> PackedBatch:
    """The batch with `column` set from what a pass computed: one tensor [R], or [R, K], per micro-batch that it holds.
    Integers stay int64, with 0 in other rows."""
    micros = []
    for micro, values in zip(batch.micro_batches, rows, strict=True):
        whole = _column_for(micro, values)
        whole[micro.loss_mask > 0] = values.to("cpu", whole.dtype)
        micros.append(_with_column(micro, column, whole))
    return replace(batch, micro_batches=tuple(micros))


def scattered(
    batches: Sequence[PackedBatch], column: str, found: Mapping[int, np.ndarray], empty: np.ndarray
) -> list[PackedBatch]:
    """The opposite of `held`: the batches with `column` set from an array [P, K] for each trajectory in the loss of a
    micro-batch that is held, by its place in packing order. `empty` [0, K] has the type."""
    filled, first = [], 0
    for batch in batches:
        columns = [_column_for(micro, torch.from_numpy(empty)) for micro in batch.micro_batches]
        for number, sequence, rows in _loss_rows(batch):
            if len(rows):
                columns[number][rows] = torch.from_numpy(found[first + sequence]).to(columns[number].dtype)
        micros = [_with_column(m, column, c) for m, c in zip(batch.micro_batches, columns, strict=True)]
        filled.append(replace(batch, micro_batches=tuple(micros)))
        first += batch.num_sequences
    return filled


def _column_for(micro: MicroBatch, values: Tensor) -> Tensor:
    """An empty column for rows with values of this kind."""
    shape = (len(micro.tokens), *values.shape[1:])
    if not values.is_floating_point():
        return torch.zeros(shape, dtype=torch.int64)
    return torch.full(shape, math.nan, dtype=torch.float32)


def held(batches: Sequence[PackedBatch], column: str) -> dict[int, np.ndarray]:
    """`column` as one array [P], or [P, K], for each trajectory in the loss of a micro-batch that is held, by its
    place in packing order."""
    found: dict[int, np.ndarray] = {}
    first = 0
    for batch in batches:
        for number, sequence, rows in _loss_rows(batch):
            if len(rows):
                found[first + sequence] = getattr(batch.micro_batches[number], column)[rows].numpy()
        first += batch.num_sequences
    return found


def by_trajectory(parts: Iterable[Mapping[int, np.ndarray]], lengths: Sequence[int]) -> list[np.ndarray | None]:
    """What ranks have `held` as one float64 array [P] per trajectory, in packing order; `lengths` are their numbers of
    policy tokens. None for trajectories outside the loss: nothing was computed for them."""
    found: list[np.ndarray | None] = [None] * len(lengths)
    for place, values in (entry for part in parts for entry in part.items()):
        assert len(values) == lengths[place], "all policy tokens of a trajectory are in the loss, or none"
        found[place] = values.astype(np.float64)
    return found


def to_device(micro_batch: MicroBatch, device: torch.device | str) -> MicroBatch:
    """The same micro-batch with its tensors on `device`."""
    values: dict[str, Any] = {entry.name: getattr(micro_batch, entry.name) for entry in fields(micro_batch)}
    values |= {name: value.to(device) for name, value in values.items() if isinstance(value, Tensor | KeptSets)}
    return MicroBatch(**values)


def _with_column(micro_batch: MicroBatch, column: str, values: Tensor) -> MicroBatch:
    changed: dict[str, Any] = {column: values}
    return replace(micro_batch, **changed)


def _loss_rows(batch: PackedBatch) -> Iterator[tuple[int, int, Tensor]]:
    """(micro-batch, number of the sequence, its loss rows within the micro-batch, those of all of its parts)."""
    for number, micro in enumerate(batch.micro_batches):
        edges, found = micro.cu_seqlens.tolist(), dict[int, list[Tensor]]()
        for start, end in zip(edges[:-1], edges[1:], strict=True):
            if (sequence := int(micro.sequence_ids[start])) >= 0:
                found.setdefault(sequence, []).append(start + micro.loss_mask[start:end].nonzero()[:, 0])
        yield from ((number, sequence, torch.cat(rows)) for sequence, rows in found.items())


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows of a micro-batch: tokens of `segments` from place `first` to `end`. `sequence` None: a stem's. The policy's
    tokens are in the loss from segment `own` on: those before are in that of another part of the trajectory."""

    segments: Sequence[Segment]
    first: int
    end: int
    stem: int
    sequence: _Sequence | None
    own: int = 0

    def tokens(self) -> list[np.ndarray]:
        """Its rows, in pieces of neighbours."""
        edges = accumulate((len(s.tokens) for s in self.segments), initial=0)
        return [s.tokens[max(self.first - edge, 0) : max(self.end - edge, 0)]
                for edge, s in zip(edges, self.segments, strict=False)]


def _parts_of(sequence: _Sequence, first: int = 0, stem: int = -1) -> list[_Part]:
    """A trajectory's parts, one for each of its rows. The first one goes on from place `first` of a stem."""
    parts: list[_Part] = []
    for row in rows_of(sequence.trajectory.segments):
        start, behind = (0, -1) if parts else (first, stem)
        parts.append(_Part(row.segments, start, sum(len(s.tokens) for s in row.segments), behind, sequence, row.own))
    return parts


def _parts(sequences: Sequence[_Sequence], share_prompts: bool) -> list[_Part]:
    if not share_prompts:
        return [part for sequence in sequences for part in _parts_of(sequence)]
    parts: list[_Part] = []
    for members in families([s.trajectory for s in sequences]):
        family = [sequences[place] for place in members]
        shared, stem = shared_rows(family[0].trajectory) if len(family) > 1 else 0, -1
        if shared:
            stem = len(parts)
            parts.append(_Part(family[0].trajectory.segments, 0, shared, -1, None))
        parts += [part for sequence in family for part in _parts_of(sequence, shared, stem)]
    return parts


def _micro_batch(sequences: Sequence[_Sequence], share_prompts: bool, weight_version: int) -> MicroBatch:
    parts = _parts(sequences, share_prompts)
    lengths = [part.end - part.first for part in parts]
    edges = torch.tensor([0, *lengths]).cumsum(0)
    starts, count = edges[:-1], int(edges[-1])
    pieces = [piece for part in parts for piece in part.tokens()]
    tokens = torch.from_numpy(np.concatenate(pieces, dtype=np.int64))
    targets = tokens.roll(-1)
    targets[edges[1:] - 1] = 0
    loss_mask, advantages, logprobs = torch.zeros(count, dtype=torch.float32), _absent(count), _absent(count)
    mixed = any(s.in_loss and s.trajectory.num_older(weight_version) for s in sequences)
    versions = torch.full((count,), -1) if mixed else None
    for part, start in zip(parts, starts.tolist(), strict=True):
        first = start - part.first - 1
        for place, segment in enumerate(part.segments if part.sequence is not None and part.sequence.in_loss else ()):
            rows = slice(first, first + len(segment.tokens))
            if segment.author == "policy" and place >= part.own:
                loss_mask[rows] = 1.0
                if len(segment.logprobs):  # worked solutions of the warm start were not sampled
                    logprobs.numpy()[rows] = segment.logprobs
                if versions is not None:
                    versions.numpy()[rows] = segment.versions
            first = rows.stop
    ids = torch.tensor([-1 if part.sequence is None else part.sequence.index for part in parts])
    begins = starts - torch.tensor([part.first for part in parts])  # where position 0 of each would be
    stems = tuple(part.stem for part in parts)
    return MicroBatch(
        tokens=tokens,
        positions=torch.arange(count) - begins.repeat_interleave(edges.diff()),
        targets=targets,
        loss_mask=loss_mask,
        advantages=advantages,
        rollout_logprobs=logprobs,
        sequence_ids=ids.repeat_interleave(edges.diff()),
        cu_seqlens=edges.to(torch.int32),
        lengths=tuple(lengths),
        stems=stems if max(stems) >= 0 else (),
        versions=versions,
    )


def _absent(count: int) -> Tensor:
    """A column [T] in which nothing is there yet. A number that is read where none was written spoils the loss visibly.
    """
    return torch.full((count,), math.nan, dtype=torch.float32)


def _check_group(group: Group, flow_digest: str, weight_version: int, most_behind: int) -> None:
    where = f"prompt {group.prompt.index}"
    if not group.trajectories:
        raise ValueError(f"{where}: the group has no trajectories")
    for trajectory in group.trajectories:
        first = trajectory.segments[0]
        if first.author != "environment" or not len(first.tokens):
            raise ValueError(f"{where}: the prompt has no tokens, so nothing predicts the first token of a completion")
        if trajectory.flow_digest != flow_digest:
            raise ValueError(
                f"{where}: sampled with precision flow {trajectory.flow_digest}, but the trainer's is {flow_digest}; "
                "the batch is refused"
            )
        if most_behind:
            oldest = min((v for s in trajectory.turns for _, v in s.spans), default=weight_version)
            if oldest < weight_version - most_behind:
                raise ValueError(
                    f"{where}: some of its tokens were sampled with weights of version {oldest}, more than "
                    f"{most_behind} updates before the trainer's version {weight_version}; the batch is refused"
                )
        elif trajectory.weight_version != weight_version:
            raise ValueError(
                f"{where}: sampled with weights of version {trajectory.weight_version}, but the trainer holds "
                f"version {weight_version}; the batch is refused"
            )
        if newer := {v for s in trajectory.turns for _, v in s.spans if v > weight_version}:
            raise ValueError(
                f"{where}: some of its tokens were sampled with weights of version {min(newer)}, which are newer than "
                f"the trainer's version {weight_version}; the batch is refused"
            )
        if not all(s.spans for s in trajectory.turns):
            raise ValueError(f"{where}: a turn of the policy does not say which weights it was sampled with")
        for segment in trajectory.turns:
            if not len(segment.tokens) or len(segment.tokens) != len(segment.logprobs):
                raise ValueError(f"{where}: {len(segment.tokens)} tokens, {len(segment.logprobs)} log-probs")


def _check_logprobs(trajectory: Trajectory, place: int) -> None:
    if not all(np.isfinite(segment.logprobs).all() for segment in trajectory.turns):
        raise ValueError(f"prompt {place}: one of its log-probs is NaN or infinite")
