"""The teachers of a distillation: which one judges which row of the data."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jetrl.errors import UserError
from jetrl.model.transformer import Transformer
from jetrl.train.batches import MicroBatch, PackedBatch
from jetrl.train.teacher_server import Judged, TeacherServer
from jetrl.types import Group, Problem

REST = ""  # the name of `teacher.path`: of all rows that no other one judges


@dataclass(frozen=True, slots=True)
class Teachers:
    """Published models without masters, or servers that have them, by the value of the data's column that gives them a
    row; `REST` has all others. `column` None: there is one teacher."""

    models: Mapping[str, Transformer | TeacherServer]
    column: str | None = None

    @property
    def digest(self) -> str:
        """Names the values of all teachers; of one alone it is the digest of its base."""
        first = self.models[REST].base_digest
        assert first is not None, "read while it was hashed"
        if len(self.models) == 1:
            return first
        text = "\n".join(f"{name}={model.base_digest}" for name, model in sorted(self.models.items()))
        return hashlib.sha256(text.encode()).hexdigest()

    def name_of(self, problem: Problem) -> str:
        """The name of the teacher that judges a problem's answers."""
        value = REST if self.column is None else str(problem.extra.get(self.column, REST))
        return value if value in self.models else REST

    def names(self, groups: Sequence[Group]) -> list[str]:
        """The name of each trajectory's teacher, in packing order."""
        return [name for group in groups for name in [self.name_of(group.prompt.problem)] * len(group.trajectories)]


def with_rows_of(name: str, names: Sequence[str], batches: Sequence[PackedBatch]) -> list[PackedBatch]:
    """The batches with only those of the micro-batches held that have a trajectory of this teacher."""
    first, kept = 0, []
    for batch in batches:
        of_batch = names[first : first + batch.num_sequences]
        pairs = [
            (number, micro) for number, micro in zip(batch.numbers, batch.micro_batches, strict=True)
            if any(of_batch[i] == name for i in _sequences(micro))
        ]
        numbers, micros = zip(*pairs, strict=True) if pairs else ((), ())
        kept.append(replace(batch, numbers=tuple(numbers), micro_batches=tuple(micros)))
        first += batch.num_sequences
    return kept


def _sequences(micro: MicroBatch) -> list[int]:
    """The trajectories of a micro-batch, by their numbers in the update."""
    return [int(i) for i in micro.sequence_ids.unique() if i >= 0]


@dataclass(frozen=True, slots=True)
class Asked:
    """A row of a trajectory for a server: `tokens` [n], those of its prompt that it shares included. `places`: the row
    of each of its loss rows in the log-probs [n - 1] of these tokens. `trajectory`: its place in packing order."""

    trajectory: int
    tokens: np.ndarray
    places: np.ndarray


def asked_of(name: str, names: Sequence[str], batches: Sequence[PackedBatch]) -> list[Asked]:
    """The rows of this teacher's trajectories in the micro-batches held, as far as they have a loss, in the order of
    `packing.held`."""
    first, found = 0, list[Asked]()
    for batch in batches:
        for micro in batch.micro_batches:
            found += [row for row in _rows(micro, first) if names[row.trajectory] == name]
        first += batch.num_sequences
    return found


def _rows(micro: MicroBatch, first: int) -> Iterator[Asked]:
    edges, tokens = micro.cu_seqlens.tolist(), micro.tokens.numpy()
    for part, (start, end) in enumerate(zip(edges, edges[1:], strict=False)):
        places = micro.loss_mask[start:end].nonzero()[:, 0].numpy()
        if not len(places):
            continue
        stem = micro.stems[part] if micro.stems else -1
        before = tokens[edges[stem] : edges[stem + 1]] if stem >= 0 else tokens[:0]
        trajectory = first + int(micro.sequence_ids[start])
        yield Asked(trajectory, np.concatenate([before, tokens[start:end]]), places + len(before))


def server_judged(
    server: TeacherServer, name: str, names: Sequence[str], batches: Sequence[PackedBatch], top: int,
    vocab: int,
) -> dict[int, Judged]:
    """What the server says of the policy's tokens of its trajectories, [P] each by place, in the order of
    `packing.held`. UserError where the server does not answer, or names tokens beyond the policy's `vocab`."""
    rows, parts = asked_of(name, names, batches), dict[int, list[Judged]]()
    for row, found in zip(rows, server.judge([row.tokens for row in rows], top), strict=True):
        if top and len(found.top_tokens) and (most := int(found.top_tokens.max())) >= vocab:
            raise UserError(
                f"{server.key} = {server.url}: the token {most} is one of its most probable ones, and the policy has "
                f"{vocab}. Serve a teacher of the policy's own family, or set teacher.top_k = 0."
            )
        of_loss = Judged(*(column[row.places] for column in (found.logprobs, found.top_tokens, found.top_logprobs)))
        parts.setdefault(row.trajectory, []).append(of_loss)
    return {
        place: Judged(
            np.concatenate([one.logprobs for one in own]), np.concatenate([one.top_tokens for one in own]),
            np.concatenate([one.top_logprobs for one in own]),
        )
        for place, own in parts.items()
    }
