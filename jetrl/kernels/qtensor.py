"""`QTensor`: block-quantized codes with their scales. `value = code * scale`, always."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from jetrl.precision.formats import BLOCK

Granularity = Literal["1x128", "128x128"]


@dataclass(frozen=True, slots=True)
class QTensor:
    """A matrix [R, C] in E4M3 with one FP32 scale per block.

    `codes` [R, C] float8_e4m3fn. `scale` is [R, groups(C)] for `1x128` and [blocks(R), groups(C)] for `128x128`.
    Blocks restart at every section of `row_sections` / `col_sections` (the projections fused into one matrix; a plain
    matrix is one section), and the last block of a section may be smaller than 128.
    """

    codes: Tensor
    scale: Tensor
    granularity: Granularity
    row_sections: tuple[int, ...]
    col_sections: tuple[int, ...]

    def overwrite(self, other: QTensor) -> QTensor:
        """Copy `other`, which has the same shape and sections, into this one's memory."""
        assert (self.row_sections, self.col_sections) == (other.row_sections, other.col_sections)
        self.codes.view(torch.uint8).copy_(other.codes.view(torch.uint8))
        self.scale.copy_(other.scale)
        return self

    def row_blocks(self) -> list[tuple[int, int]]:
        """Start and stop of each block of rows."""
        return blocks_of(self.row_sections)

    def col_blocks(self) -> list[tuple[int, int]]:
        """Start and stop of each group of columns."""
        return blocks_of(self.col_sections)


def blocks_of(sections: tuple[int, ...]) -> list[tuple[int, int]]:
    """The blocks of at most 128 that tile consecutive sections, each section beginning a new block."""
    blocks, start = [], 0
    for size in sections:
        blocks += [(start + i, start + min(i + BLOCK, size)) for i in range(0, size, BLOCK)]
        start += size
    return blocks
