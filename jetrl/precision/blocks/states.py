"""What a sequence keeps of a block between two passes of the rollout: rows for each token, or one for the sequence.

A block declares it (`Block.states`), the engine allocates it (`engine.state_pool`), and the block's module reads and
writes it by name through the plan's cache. Training keeps none of it: it computes whole sequences.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from jetrl.precision.formats import BF16, FP32, Format


@dataclass(frozen=True, slots=True)
class PerToken:
    """A row [*shape] for each token, in pages that sequences with one beginning share.

    The row of a token depends on its sequence up to that token, and is written once, when the token is computed; that
    it is written again, with the same bits, after a draft that did not hold changes nothing.
    """

    shape: tuple[int, ...]
    format: Format = BF16  # BF16: in the model's dtype


@dataclass(frozen=True, slots=True)
class PerSequence:
    """One row [*shape] for a sequence, which a pass reads as it was before its first token and leaves as it is after
    its last; zeros before the first token of all.

    After n tokens the row must depend on these tokens alone, not on how passes divided them. From the row of n tokens a
    sequence can go on from any n' <= n with n' // grid == n // grid: at `grid` 1 from n alone, at 64 also from before
    tokens that the row has seen since the last multiple of 64, as they are computed and written again.

    The last `spare` of the first dimension are for going back alone: an engine without drafts leaves them out, and
    then the grid is 1. A block takes the first dimension from the tensor.
    """

    shape: tuple[int, ...]
    format: Format = FP32  # BF16: in the model's dtype
    grid: int = 1
    spare: int = 0

    def held(self, drafts: bool) -> PerSequence:
        """What an engine allocates that makes drafts, or makes none."""
        if drafts or not self.spare:
            return self
        return replace(self, shape=(self.shape[0] - self.spare, *self.shape[1:]), grid=1, spare=0)


State = PerToken | PerSequence
