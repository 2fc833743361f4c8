"""Weights of experts as the grouped GEMMs of a GPU read them: one operand for all experts of a layer.

Legend: `E` experts, `N`, `K` output and reduction size of an expert's matrix; a prime marks a padded size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from jetrl.kernels.experts.rows import transpose_matrices
from jetrl.kernels.gemm.operands import PreparedFP8, keep, spread, whole_rows
from jetrl.kernels.qtensor import QTensor
from jetrl.kernels.quantize.triton import has_gaps, padded

WIDTH = 64  # BF16 elements of a step along K


@dataclass(frozen=True, slots=True)
class PreparedExperts:
    """BF16 weights [E, N', K'] of matrices [N, K]."""

    weight: Tensor
    rows: int
    cols: int


def _require_multiple_of_8(cols: int) -> None:
    """Of K, which is the other matrix's N: rows of BF16 must be multiples of 16 bytes."""
    if cols % 8:
        raise ValueError(f"GEMMs of experts on a GPU need sizes that are multiples of 8, got {cols}")


def _experts(q: QTensor, count: int) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """Codes [E, N, K'], scales [E, blocks(N), blocks(K)] and the sections of one matrix."""
    _require_multiple_of_8(q.codes.shape[1])
    sections = q.row_sections[: len(q.row_sections) // count]
    assert sections * count == q.row_sections, "the matrices of experts have the same sections"
    return whole_rows(q.codes).unflatten(0, (count, -1)), q.scale.unflatten(0, (count, -1)), sections


def prepare_experts_fp8(q: QTensor, count: int, held: PreparedFP8 | None = None) -> PreparedFP8:
    """The operand of `grouped_fp8_gemm`: the weight's own codes, unless a section ends within a block.

    With `held`, the operand keeps its addresses: captured graphs read it.
    """
    codes, scale, sections = _experts(q, count)
    if has_gaps(sections):
        codes = spread(codes, sections, 1)
    elif rest := -codes.shape[1] % 16:  # the rows of the result must be multiples of 16 bytes
        codes = torch.nn.functional.pad(codes.view(torch.uint8), (0, 0, 0, rest)).view(codes.dtype)
    if held is None:
        return PreparedFP8(codes, scale, sections, q.col_sections)
    keep(held.codes, codes)
    keep(held.scale, scale)
    return held


def prepare_experts_fp8_t(q: QTensor, count: int, held: PreparedFP8 | None = None) -> PreparedFP8:
    """The dgrad operand: each matrix transposed, [E, K', N'], the sections now along its columns."""
    codes, scale, sections = _experts(q, count)
    codes = codes[:, :, : q.codes.shape[1]]
    if held is None:
        rows, width = padded(codes.shape[2], 16), sum(padded(size) for size in sections)
        make = torch.empty if rows == codes.shape[2] else torch.zeros
        out = make(count, rows, width, dtype=torch.uint8, device=codes.device).view(codes.dtype)
        held = PreparedFP8(out, torch.empty_like(scale.mT.contiguous()), q.col_sections, sections)
    transpose_matrices(codes, sections, held.codes)
    held.scale.copy_(scale.mT)
    return held


def prepare_experts_bf16(w: Tensor, count: int, held: PreparedExperts | None = None) -> PreparedExperts:
    """The operand of `grouped_bf16_gemm`: the weight itself, or a copy with whole steps along K."""
    _require_multiple_of_8(w.shape[1])
    matrices = w.unflatten(0, (count, -1))
    rows, cols = matrices.shape[1:]
    if held is None and not (rows % 8 or cols % WIDTH):
        return PreparedExperts(matrices, rows, cols)
    if held is None:
        size = (count, padded(rows, 8), padded(cols, WIDTH))
        held = PreparedExperts(torch.zeros(size, dtype=w.dtype, device=w.device), rows, cols)
    if held.weight.data_ptr() != w.data_ptr():
        held.weight[:, :rows, :cols].copy_(matrices)
    return held
