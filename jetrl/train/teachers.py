"""The teachers of a distillation: which one judges which row of the data."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from jetrl.model.transformer import Transformer
from jetrl.train.batches import MicroBatch, PackedBatch
from jetrl.types import Group, Problem

REST = ""  # the name of `teacher.path`: of all rows that no other one judges


@dataclass(frozen=True, slots=True)
class Teachers:
    """Published models without masters, by the value of the data's column that gives them a row; `REST` has all
    others. `column` None: there is one teacher."""

    models: Mapping[str, Transformer]
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
