"""Operands as the GEMMs of a GPU read them. FP8: rows of whole blocks, zeros where a block is cut short.

Sizes that are not a multiple of 128 are padded here, codes and scales alike, never computed in another precision. If a
projection inside a fused weight ends in a partial block, its rows (fprop) or columns (dgrad) are spread to whole blocks
and the result is gathered again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from jetrl.kernels.qtensor import QTensor
from jetrl.kernels.quantize.transpose import transpose_codes
from jetrl.kernels.quantize.triton import has_gaps, padded


@dataclass(frozen=True, slots=True)
class PreparedFP8:
    """A weight as the GEMM reads it: `codes` [N', K'] E4M3 (a prime: padded), `scale` [blocks(N), blocks(K)] FP32."""

    codes: Tensor
    scale: Tensor
    rows: tuple[int, ...]  # sizes of the sections along N
    cols: tuple[int, ...]  # sizes of the sections along K


@dataclass(frozen=True, slots=True)
class PreparedBF16:
    """A BF16 weight [N', K] with `size` = N."""

    weight: Tensor
    size: int


def whole_rows(codes: Tensor) -> Tensor:
    """The same codes with the zero columns that end the last block: [R, C] as [R, row stride]."""
    assert codes.stride(1) == 1 and codes.stride(0) % 128 == 0, "codes must come from this backend's quantizers"
    return codes.as_strided((codes.shape[0], codes.stride(0)), (codes.stride(0), 1))


def spread(x: Tensor, sections: tuple[int, ...], dim: int) -> Tensor:
    """Sections of E4M3 `x` along `dim`, each padded with zeros to whole blocks."""
    shape = list(x.shape)
    shape[dim] = sum(padded(size) for size in sections)
    out = torch.zeros(shape, dtype=torch.uint8, device=x.device)
    start = first = 0
    for size in sections:
        out.narrow(dim, first, size).copy_(x.view(torch.uint8).narrow(dim, start, size))
        start, first = start + size, first + padded(size)
    return out.view(x.dtype)


def gather(y: Tensor, sections: tuple[int, ...]) -> Tensor:
    """The columns of `y` [M, N'] that are real, [M, N] contiguous."""
    size = sum(sections)
    if y.shape[1] == size:
        return y
    if not has_gaps(sections):
        return y[:, :size].contiguous()
    parts, first = [], 0
    for size in sections:
        parts.append(y[:, first : first + size])
        first += padded(size)
    return torch.cat(parts, 1)


def rows_to(codes: Tensor, multiple: int) -> Tensor:
    """`codes` with zero rows up to a multiple of `multiple`."""
    rest = -codes.shape[0] % multiple
    if not rest:
        return codes
    extra = torch.zeros(rest, codes.shape[1], dtype=torch.uint8, device=codes.device)
    return torch.cat([codes.view(torch.uint8), extra]).view(codes.dtype)


def left_operand(a: QTensor, b: PreparedFP8) -> Tensor:
    """The codes of activations [M, K'], laid out along K as `b` is."""
    assert a.col_sections == b.cols or (sum(a.col_sections) == sum(b.cols) and not has_gaps(b.cols)), "groups differ"
    return spread(a.codes, a.col_sections, 1) if has_gaps(a.col_sections) else whole_rows(a.codes)


def prepare_fp8(q: QTensor, held: PreparedFP8 | None = None) -> PreparedFP8:
    """The fprop operand of a weight [N, K]: its own codes, unless a section before the last ends within a block.

    With `held`, the operand keeps its addresses: captured graphs read it.
    """
    codes = whole_rows(q.codes)
    # 16: the rows of the result must be multiples of 16 bytes
    codes = spread(codes, q.row_sections, 0) if has_gaps(q.row_sections) else rows_to(codes, 16)
    if held is None:
        return PreparedFP8(codes, q.scale, q.row_sections, q.col_sections)
    keep(held.codes, codes)
    keep(held.scale, q.scale)
    return held


def keep(held: Tensor, fresh: Tensor) -> None:
    """Copy `fresh` to `held`, unless they are the same memory."""
    if held.data_ptr() != fresh.data_ptr():
        held.view(torch.uint8).copy_(fresh.view(torch.uint8))


def prepare_fp8_t(q: QTensor, held: PreparedFP8 | None = None) -> PreparedFP8:
    """The dgrad operand: codes and scales transposed, the sections now along K."""
    if held is not None and held.codes.shape[0] == q.codes.shape[1]:  # no rows of padding
        transpose_codes(q.codes, q.row_sections, held.codes)
        held.scale.copy_(q.scale.T)
        return held
    codes = rows_to(transpose_codes(q.codes, q.row_sections), 16)
    return PreparedFP8(codes, q.scale.T.contiguous(), q.col_sections, q.row_sections)


def prepare_bf16(w: Tensor, held: PreparedBF16 | None = None) -> PreparedBF16:
    """The BF16 operand: the weight itself; rows are padded to a multiple of 8, as the output's rows must be aligned.

    With `held`, the operand keeps its address: captured graphs read it.
    """
    if held is not None:
        if held.weight.data_ptr() != w.data_ptr():
            held.weight[: w.shape[0]].copy_(w)
        return held
    rest = -w.shape[0] % 8
    if w.shape[1] % 8:
        raise ValueError(f"BF16 GEMMs on a GPU need an input size that is a multiple of 8, got {w.shape[1]}")
    weight = w.contiguous() if not rest else torch.cat([w, w.new_zeros(rest, w.shape[1])])
    return PreparedBF16(weight, w.shape[0])
