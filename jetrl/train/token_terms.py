"""Which token adds most to the loss of an update: for the metric `policy/max_token_share`, and for the message where a
loss is not finite.

A token is named as samples.jsonl has it: the prompt's `group`, the completion's number within the group, and the place
in the row's `tokens`, both from 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from jetrl.parallel.world import World
from jetrl.rl.losses import Terms
from jetrl.train.batches import MicroBatch, PackedBatch

SHARE = "policy/max_token_share"
OWNS = 0.5  # a token that makes more than this of an update owns it ...
MANY = 16  # ... where the update has at least so many


@dataclass(frozen=True, slots=True)
class Largest:
    """The largest term of an update. `value` is what it adds to the loss, `share` its part of the sum of all sizes."""

    term: str
    value: float
    share: float
    sequence: int
    place: int  # among the policy's tokens of its trajectory
    token: int
    log_ratio: float  # of its whole sequence; NaN without an old policy
    facts: Mapping[str, float]

    def named(self, batch: PackedBatch, whole: bool) -> str:
        """`the KL term of token 3 (id 17) of completion 0 of prompt 12 is inf (...)`. `whole`: `rl.ratio = "sequence"`.
        """
        where = f"sequence {self.sequence}"
        if batch.prompts:
            prompt = batch.prompts[self.sequence]
            where = f"completion {batch.prompts[: self.sequence].count(prompt)} of prompt {prompt}"
        known = [f"{name} {value:.6g}" for name, value in self.facts.items()]
        if whole and self.term == "policy" and not math.isnan(self.log_ratio):
            known.append(f"ratio of its {batch.sequence_tokens[self.sequence]} tokens exp({self.log_ratio:.6g})")
        return (
            f"the {self.term} term of token {self.place} (id {self.token}) of {where} is {self.value:.6g} "
            f"({', '.join(known)})"
        )


@dataclass(slots=True)
class TokenTerms:
    """Collects the largest token of each term and micro-batch; nothing waits for the device before `largest`."""

    _found: list[tuple[str, tuple[str, ...], Tensor]] = field(default_factory=list)

    @torch.no_grad()
    def add(
        self, terms: Terms, micro: MicroBatch, index: Tensor, facts: Mapping[str, Tensor | None],
        log_ratio: Tensor | None = None,
    ) -> None:
        """Terms [R] of the loss rows `index` [R]; `facts` [R] go into the message, None is left out."""
        ids, targets = micro.sequence_ids[index], micro.targets[index]
        given = {name: column for name, column in facts.items() if column is not None}
        for name, shares in terms.items() if len(index) else ():
            size = shares.abs().nan_to_num(math.inf, math.inf)
            here = size.argmax()[None]  # the first of equal ones
            own = ids == ids[here]
            before = own & (torch.arange(len(ids), device=ids.device) < here)
            ratio = size.new_tensor(math.nan) if log_ratio is None else (log_ratio.double() * own).sum()
            sums = torch.stack([size.sum(), before.sum().double(), ratio])
            row = [column.detach()[here].double() for column in (size, shares, ids, targets, *given.values())]
            self._found.append((name, tuple(given), torch.cat([sums, *row])))

    def largest(self, world: World) -> Largest | None:
        """That of all ranks; None where no term is other than 0. The first one, if several are not finite. Collective.
        """
        lines = torch.stack([row for _, _, row in self._found]).tolist() if self._found else []  # waits for the device
        own = [(name, keys, row) for (name, keys, _), row in zip(self._found, lines, strict=True)]
        rows = [entry for of_rank in world.gather(own) for entry in of_rank]
        total = math.fsum(row[0] for _, _, row in rows)
        if not total:
            return None
        name, keys, row = max(rows, key=lambda entry: (entry[2][3], -entry[2][5], -entry[2][1]))
        _, place, ratio, size, value, sequence, token, *facts = row
        share = size / total if math.isfinite(total) else 1.0
        known = dict(zip(keys, facts, strict=True))
        return Largest(name, value, share, int(sequence), int(place), int(token), ratio, known)


def owns(largest: Largest, batch: PackedBatch) -> bool:
    """Whether one token makes more than half of an update that has many."""
    return largest.share > OWNS and batch.num_loss_tokens >= MANY
