"""Which rows of a permuted batch belong to which expert: what grouped ops read."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Groups:
    """Where the rows of tokens lie in matrices [R, ...] that are grouped by expert; k rows of each token. Integers.

    `counts[e]` rows from `starts[e]` on are expert e's. What lies between groups, if a backend pads them, is no
    token's.
    """

    rows: Tensor  # [T, k] int64, the row of a token's j-th expert
    tokens: Tensor  # [R], the token of a row; -1 where it is none's
    starts: Tensor  # [E + 1]
    counts: Tensor  # [E]
