"""Which rows of a matrix a rank owns, and how whole matrices are made from the ranks' rows.

A matrix [N, K] is cut along its rows by whole blocks of 128, which restart at every section of a fused matrix (the
quantizer's blocks). Of B blocks, rank r of n owns those from `r * c` to `(r + 1) * c`, c = ceil(B / n), as
`torch.chunk` cuts; the last ranks may own fewer or none. So no block straddles ranks: a rank quantizes its rows alone,
to the bits that the whole matrix would have there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from jetrl.kernels.qtensor import QTensor, blocks_of, room_for_codes
from jetrl.kernels.quantize.ops import quantize_weight
from jetrl.parallel.world import World
from jetrl.precision.formats import BLOCK


class Part(NamedTuple):
    """What a rank holds of a tensor: the rows from `start` on of a whole with shape `size`; perhaps no rows, or all."""

    value: Tensor
    size: tuple[int, ...]
    start: int


@dataclass(frozen=True, slots=True)
class Shard:
    """How a matrix with these `sections` of rows is spread over `world`, the replicas: `rows` and `blocks` of each."""

    world: World
    sections: tuple[int, ...]
    rows: tuple[int, ...]
    blocks: tuple[int, ...]

    def __deepcopy__(self, memo: Any) -> Shard:
        """A copy of a model belongs to the same ranks."""
        return self

    @property
    def split(self) -> bool:
        """Whether other ranks own rows too (or could)."""
        return not self.world.alone

    @property
    def num_rows(self) -> int:
        """Rows of the whole matrix."""
        return sum(self.sections)

    def parts(self, rank: int) -> tuple[int, ...]:
        """A rank's rows as sections of their own: each begins where a block of the whole matrix begins."""
        start, edge, found = sum(self.rows[:rank]), 0, []
        stop = start + self.rows[rank]
        for size in self.sections:
            found.append(min(stop, edge + size) - max(start, edge))
            edge += size
        return tuple(size for size in found if size > 0)

    @property
    def start(self) -> int:
        """The first of this rank's rows."""
        return sum(self.rows[: self.world.rank])

    def own(self, whole: Tensor) -> Tensor:
        """This rank's rows of a whole matrix, as a view."""
        return whole.narrow(0, self.start, self.rows[self.world.rank])


def shard(sections: tuple[int, ...], world: World) -> Shard:
    """The cut of a matrix with these sections of rows."""
    blocks = blocks_of(sections)
    share = -(-len(blocks) // world.size)
    cuts = [blocks[r * share : (r + 1) * share] for r in range(world.size)]
    rows = tuple(cut[-1][1] - cut[0][0] if cut else 0 for cut in cuts)
    return Shard(world, sections, rows, tuple(len(cut) for cut in cuts))


def gathered(cut: Shard, held: Tensor | None, local: Tensor, dtype: torch.dtype) -> Tensor:
    """The whole matrix in `dtype` from each rank's `local` rows, in the memory of `held` if it fits. Collective."""
    shape = (cut.num_rows, *local.shape[1:])
    if held is None or (held.shape, held.dtype, held.device) != (shape, dtype, local.device):
        held = torch.empty(shape, dtype=dtype, device=local.device)
    cut.own(held).copy_(local)
    cut.world.gather_rows(held, cut.rows)
    return held


def gathered_codes(
    cut: Shard, held: QTensor | None, local: Tensor, pow2: bool, dtype: torch.dtype | None = None
) -> QTensor:
    """`quantize_weight` of the whole matrix from each rank's `local` rows, in the memory of `held`. Collective.

    A rank quantizes its own rows in their place; codes and scales of the others arrive as bytes.
    """
    width, groups = local.shape[1], -(-local.shape[1] // BLOCK)
    if held is None:
        held = room_for_codes(cut.sections, width, local.device)
    first, count = sum(cut.blocks[: cut.world.rank]), cut.blocks[cut.world.rank]
    if count:
        parts = cut.parts(cut.world.rank)
        place = QTensor(cut.own(held.codes), held.scale.narrow(0, first, count), "128x128", parts, (width,))
        quantize_weight(local, parts, pow2, place, dtype)
    padded = held.codes.as_strided((cut.num_rows, groups * BLOCK), (groups * BLOCK, 1))
    cut.world.gather_rows(padded, cut.rows)
    cut.world.gather_rows(held.scale, cut.blocks)
    return held
