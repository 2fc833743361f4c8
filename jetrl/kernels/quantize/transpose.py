"""FP8 codes of a weight turned by 90 degrees, as dgrad reads them.

Legend: `N`, `K` weight rows and columns.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels take pointers and compile-time numbers, for which there are no types)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.kernels.quantize.triton import has_gaps, padded
from jetrl.precision.formats import BLOCK


@triton.jit
def _word_of_four(at, row, x_stride, last_row, inside):
    mask = (row < last_row)[:, None] & inside[None, :]
    return tl.load(at + row[:, None] * x_stride, mask=mask, other=0).to(tl.uint32, bitcast=True)


@triton.jit
def _store_turned(out, word, cols, num_cols, to, out_stride):
    out_at = out + cols[:, None] * out_stride + to[None, :]
    tl.store(out_at, tl.trans(word.to(tl.int32, bitcast=True)), mask=(cols < num_cols)[:, None])


@triton.jit(do_not_specialize=["first_row", "last_row"])
def _transpose_kernel(x, out, first_row, last_row, out_first, num_cols, x_stride, out_stride):
    """One section of bytes [rows, cols] -> [cols, out_first + rows]; columns of a short last block become zeros.

    `x`, whose rows are whole blocks, and `out` are words of four bytes, and so are strides and `out_first`. A thread
    turns words of four rows into words of four columns: a quarter of the bytes' steps through shared memory.
    """
    four = tl.program_id(0).to(tl.int64) * 32 + tl.arange(0, 32)
    words = tl.program_id(1).to(tl.int64) * 32 + tl.arange(0, 32)
    at, row, cols, inside = x + words[None, :], first_row + four * 4, words * 4, words < x_stride
    a = _word_of_four(at, row, x_stride, last_row, inside)
    b = _word_of_four(at, row + 1, x_stride, last_row, inside)
    c = _word_of_four(at, row + 2, x_stride, last_row, inside)
    d = _word_of_four(at, row + 3, x_stride, last_row, inside)
    ab = (a & 0x00FF00FF) | ((b & 0x00FF00FF) << 8)  # bytes 0 and 2 of a word: a0 b0 a2 b2, the first the lowest
    cd = (c & 0x00FF00FF) | ((d & 0x00FF00FF) << 8)
    to = out_first + four
    _store_turned(out, (ab & 0xFFFF) | (cd << 16), cols, num_cols, to, out_stride)
    _store_turned(out, (ab >> 16) | (cd & 0xFFFF0000), cols + 2, num_cols, to, out_stride)
    ab = ((a >> 8) & 0x00FF00FF) | (b & 0xFF00FF00)  # a1 b1 a3 b3
    cd = ((c >> 8) & 0x00FF00FF) | (d & 0xFF00FF00)
    _store_turned(out, (ab & 0xFFFF) | (cd << 16), cols + 1, num_cols, to, out_stride)
    _store_turned(out, (ab >> 16) | (cd & 0xFFFF0000), cols + 3, num_cols, to, out_stride)


def transpose_codes(codes: Tensor, sections: tuple[int, ...], out: Tensor | None = None) -> Tensor:
    """E4M3 [N, K] -> [K, N'] with every section of rows padded to whole blocks with zeros: the dgrad operand."""
    width = sum(padded(size) for size in sections)
    if out is None:
        out = torch.empty(codes.shape[1], width, dtype=codes.dtype, device=codes.device)
    assert out.shape == (codes.shape[1], width) and out.is_contiguous() and codes.stride(0) == padded(codes.shape[1])
    source = codes.as_strided((codes.shape[0], codes.stride(0)), (codes.stride(0), 1)).view(torch.int32)
    turned = out.view(torch.int32)
    start = first = 0
    for size in sections if has_gaps(sections) else (codes.shape[0],):  # as in `quantize_weight`
        grid = (triton.cdiv(size, BLOCK), triton.cdiv(codes.shape[1], BLOCK))
        _transpose_kernel[grid](
            source, turned, start, start + size, first // 4, codes.shape[1], source.stride(0), turned.stride(0),
            num_warps=4,
        )
        start, first = start + size, first + padded(size)
    return out
