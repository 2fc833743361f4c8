"""Groups of completions -> packed batches, one for each optimizer update.

Letters: T packed tokens of a micro-batch, P prompt tokens, C completion tokens, B sequences of a micro-batch.
Everything is decided by order, length and index: equal groups give equal batches on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from jetrl.errors import UserError
from jetrl.rl.losses import Denominators
from jetrl.types import Completion, Group, MicroBatch, PackedBatch


@dataclass(frozen=True, slots=True)
class _Sequence:
    """One prompt with one completion, on its way into a micro-batch. `index` is its number within the update."""

    index: int
    prompt: tuple[int, ...]
    completion: Completion
    advantage: float
    in_loss: bool

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.completion.tokens)


def pack(
    groups: Sequence[Group],
    *,
    max_tokens_per_gpu: int,
    flow_digest: str,
    weight_version: int,
    mask_truncated: bool = False,
    updates_per_step: int = 1,
) -> list[PackedBatch]:
    """Pack scored groups, one `PackedBatch` an update, micro-batches of at most `max_tokens_per_gpu` tokens.

    - The groups are cut into `updates_per_step` runs of neighbours whose sizes differ by at most one; a group is never
      split. With fewer groups than updates (dynamic sampling may drop some) there are only as many updates as groups,
      and none for no groups.
    - Sequences go longest first, ties by number, into the first micro-batch with room (first-fit decreasing).
    - Row t predicts token t + 1, so a completion's tokens are the targets of rows P-1 .. P+C-2; the last row of a
      sequence predicts nothing and is masked. Rows outside the loss hold zeros.
    - `mask_truncated`: a completion that ran into the length limit stays in the batch with loss mask 0.

    Raises UserError for a sequence longer than `max_tokens_per_gpu`; ValueError for a completion of another precision
    flow or weight version than this trainer's, and for groups that lack advantages.
    """
    if updates_per_step < 1:
        raise UserError(f"rl.updates_per_step = {updates_per_step} must be at least 1")
    for group in groups:
        _check_group(group, flow_digest, weight_version)
    num_updates = min(updates_per_step, len(groups))
    batches = []
    for update in range(num_updates):
        start, end = (len(groups) * edge // num_updates for edge in (update, update + 1))
        sequences = _sequences(groups[start:end], mask_truncated)
        bins = bin_pack([sequence.length for sequence in sequences], max_tokens_per_gpu)
        micro_batches = tuple(_micro_batch([sequences[index] for index in chosen]) for chosen in bins)
        batches.append(
            PackedBatch(
                micro_batches=micro_batches,
                num_sequences=len(sequences),
                num_loss_tokens=sum(len(s.completion.tokens) for s in sequences if s.in_loss),
                flow_digest=flow_digest,
                weight_version=weight_version,
            )
        )
    return batches


def bin_pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """First-fit decreasing: indices of `lengths` in bins whose sums stay within `capacity`; indices ascend in a bin."""
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        if length > capacity:
            raise UserError(
                f"a sequence of {length} tokens (prompt and completion) does not fit train.max_tokens_per_gpu = "
                f"{capacity}; raise it to at least {length}, or lower task.max_prompt_length or "
                "rollout.max_response_length"
            )
        place = next((place for place, free in enumerate(room) if length <= free), len(bins))
        if place == len(bins):
            bins.append([])
            room.append(capacity)
        bins[place].append(index)
        room[place] -= length
    return [sorted(chosen) for chosen in bins]


def denominators(batch: PackedBatch, max_response_length: int) -> Denominators:
    """What the losses of all micro-batches of this update are divided by. Needs at least one loss token.

    An update in which every completion was truncated under `mask_truncated` has none: check `batch.num_loss_tokens`
    and skip it.
    """
    counts = [0] * batch.num_sequences
    for micro_batch in batch.micro_batches:
        edges = micro_batch.cu_seqlens.tolist()
        for start, end in zip(edges[:-1], edges[1:], strict=True):
            counts[int(micro_batch.sequence_ids[start])] = int(micro_batch.loss_mask[start:end].sum())
    assert sum(counts) == batch.num_loss_tokens, (sum(counts), batch.num_loss_tokens)
    return Denominators(
        num_loss_tokens=batch.num_loss_tokens,
        num_sequences=sum(count > 0 for count in counts),
        sequence_tokens=tuple(counts),
        max_response_length=max_response_length,
    )


def to_device(micro_batch: MicroBatch, device: torch.device | str) -> MicroBatch:
    """The same micro-batch with its tensors on `device`."""
    values: dict[str, Any] = {entry.name: getattr(micro_batch, entry.name) for entry in fields(micro_batch)}
    values |= {name: value.to(device) for name, value in values.items() if isinstance(value, Tensor)}
    return MicroBatch(**values)


def _sequences(groups: Sequence[Group], mask_truncated: bool) -> list[_Sequence]:
    sequences: list[_Sequence] = []
    for group in groups:
        for completion, advantage in zip(group.completions, group.advantages, strict=True):
            in_loss = not (mask_truncated and completion.finish_reason == "length")
            sequences.append(_Sequence(len(sequences), group.prompt.tokens, completion, advantage, in_loss))
    return sequences


def _micro_batch(sequences: Sequence[_Sequence]) -> MicroBatch:
    tokens: list[int] = []
    targets: list[int] = []
    positions: list[int] = []
    sequence_ids: list[int] = []
    edges = [0]
    for sequence in sequences:
        ids = sequence.prompt + sequence.completion.tokens
        tokens += ids
        targets += (*ids[1:], 0)
        positions += range(len(ids))
        sequence_ids += [sequence.index] * len(ids)
        edges.append(len(tokens))
    loss_mask, advantages, logprobs = (torch.zeros(len(tokens), dtype=torch.float32) for _ in range(3))
    for sequence, start in zip(sequences, edges[:-1], strict=True):
        if sequence.in_loss:
            first = start + len(sequence.prompt) - 1
            rows = slice(first, first + len(sequence.completion.tokens))
            loss_mask[rows] = 1.0
            advantages[rows] = sequence.advantage
            logprobs[rows] = torch.tensor(sequence.completion.logprobs, dtype=torch.float32)
    return MicroBatch(
        tokens=torch.tensor(tokens, dtype=torch.int64),
        positions=torch.tensor(positions, dtype=torch.int64),
        targets=torch.tensor(targets, dtype=torch.int64),
        loss_mask=loss_mask,
        advantages=advantages,
        rollout_logprobs=logprobs,
        sequence_ids=torch.tensor(sequence_ids, dtype=torch.int64),
        cu_seqlens=torch.tensor(edges, dtype=torch.int32),
        lengths=tuple(sequence.length for sequence in sequences),
    )


def _check_group(group: Group, flow_digest: str, weight_version: int) -> None:
    where = f"prompt {group.prompt.index}"
    if not group.prompt.tokens:
        raise ValueError(f"{where}: the prompt has no tokens, so nothing predicts the first token of a completion")
    if not group.completions or len(group.advantages) != len(group.completions):
        raise ValueError(f"{where}: {len(group.completions)} completions but {len(group.advantages)} advantages")
    for completion, advantage in zip(group.completions, group.advantages, strict=True):
        request = f"{where}, request {completion.request_id}"
        if completion.flow_digest != flow_digest:
            raise ValueError(
                f"{request}: sampled with precision flow {completion.flow_digest}, but the trainer's is {flow_digest}; "
                "the batch is refused"
            )
        if completion.weight_version != weight_version:
            raise ValueError(
                f"{request}: sampled with weights of version {completion.weight_version}, but the trainer holds "
                f"version {weight_version}; the batch is refused"
            )
        if not completion.tokens or len(completion.tokens) != len(completion.logprobs):
            raise ValueError(f"{request}: {len(completion.tokens)} tokens, {len(completion.logprobs)} log-probs")
        if not all(map(math.isfinite, (advantage, *completion.logprobs))):
            raise ValueError(f"{request}: its advantage ({advantage}) or one of its log-probs is NaN or infinite")
