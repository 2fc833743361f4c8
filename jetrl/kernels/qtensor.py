"""`QTensor`: block-quantized codes with their scales. `value = code * scale`, always."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

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

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def to(self, device: torch.device) -> QTensor:
        """Its codes and scales on a device, with the zeros behind each row."""
        rows, width = self.codes.shape
        padded = self.codes.as_strided((rows, max(width, self.codes.stride(0))), self.codes.stride())
        return replace(self, codes=padded.to(device)[:, :width], scale=self.scale.to(device))

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


class Coded(NamedTuple):
    """A matrix in BF16 and its codes: what a linear with adapters reads, which take the first, and its base the second.
    """

    values: Tensor
    codes: QTensor


class Reads(NamedTuple):
    """What a linear reads of its input: the values, and codes, with scales that are powers of two or not (None: none).
    """

    values: bool
    pow2: bool | None


def room_for_codes(sections: tuple[int, ...], width: int, device: torch.device) -> QTensor:
    """Zeros for the codes and scales of a weight. Rows end in zeros up to a whole block, as GPU kernels want them."""
    groups = -(-width // BLOCK)
    codes = torch.zeros(sum(sections), groups * BLOCK, dtype=torch.uint8, device=device)
    scale = torch.zeros(len(blocks_of(sections)), groups, dtype=torch.float32, device=device)
    return QTensor(codes.view(torch.float8_e4m3fn)[:, :width], scale, "128x128", sections, (width,))


def is_pow2(scale: Tensor) -> Tensor:
    """Which FP32 scales are powers of two."""
    return (scale.view(torch.int32) & 0x7FFFFF == 0) & (scale > 0)


def blocks_of(sections: tuple[int, ...]) -> list[tuple[int, int]]:
    """The blocks of at most 128 that tile consecutive sections, each section beginning a new block."""
    blocks, start = [], 0
    for size in sections:
        blocks += [(start + i, start + min(i + BLOCK, size)) for i in range(0, size, BLOCK)]
        start += size
    return blocks
