"""A norm's output again, in the codes that wgrad of the linear after it reads, from the stream and its `inv_rms`.

So neither the norm's output nor its codes along tokens are kept for the backward pass, nor is the output ever written.

Legend: `T` tokens, `D` row length. FP fusion is off, as in `quantize/triton.py`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels take pointers and compile-time numbers, for which there are no types)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.kernels.pointwise.triton import norm
from jetrl.kernels.qtensor import QTensor
from jetrl.kernels.quantize.triton import (
    _FLOOR_BITS,
    new_codes,
    new_scale,
    new_tile_scale,
    store_columns,
    to_bf16,
)
from jetrl.precision.formats import BLOCK


@triton.jit
def _normed_row(at, inverses, w, row, x_stride, num_rows, inside):
    """Every fourth row of a group: the norm's output, rounded, as FP32."""
    alive = row < num_rows
    v = tl.load(at + row[:, None] * x_stride, mask=alive[:, None] & inside[None, :], other=0.0).to(tl.float32)
    inv = tl.load(inverses + row, mask=alive, other=0.0)
    return to_bf16(to_bf16(v * inv[:, None]) * w[None, :])


@triton.jit(do_not_specialize=["num_rows"])  # one kernel for all lengths
def _normed_columns_kernel(
    x, inverses, weight, words_t, scale_t, num_rows, num_cols, x_stride, words_t_stride, scale_t_stride,
    FLOOR: tl.constexpr, POW2: tl.constexpr, TILE: tl.constexpr, C: tl.constexpr,
):
    """`quantize.triton._columns_kernel` of the norm's output."""
    group = tl.program_id(0).to(tl.int64)
    four = group * 32 + tl.arange(0, 32)
    cols = tl.program_id(1).to(tl.int64) * C + tl.arange(0, C)
    inside = cols < num_cols
    w = tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32)
    at, row = x + cols[None, :], four * 4
    a = _normed_row(at, inverses, w, row, x_stride, num_rows, inside)
    b = _normed_row(at, inverses, w, row + 1, x_stride, num_rows, inside)
    c = _normed_row(at, inverses, w, row + 2, x_stride, num_rows, inside)
    d = _normed_row(at, inverses, w, row + 3, x_stride, num_rows, inside)
    store_columns(
        a, b, c, d, words_t, scale_t, group, tl.program_id(1), cols, inside, words_t_stride, scale_t_stride,
        FLOOR, POW2, TILE, True,
    )


def add_rms_norm_kept(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, pow2: bool
) -> tuple[QTensor, Tensor, Tensor]:
    """`add_rms_norm_quantize`, and `inv_rms` of each row, FP32 [T], for `normed_t`."""
    inverses = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    y, total = norm(x, residual, weight, eps, True, pow2, inverses)
    assert isinstance(y, QTensor)
    return y, total, inverses


def normed_t(x: Tensor, inverses: Tensor, weight: Tensor, pow2: bool, tile: bool) -> QTensor:
    """`quantize_act_t(rms_norm(x, weight, eps), pow2, tile)`, given `inv_rms` of the rows of `x` [T, D], FP32 [T]."""
    (rows, cols), groups = x.shape, triton.cdiv(x.shape[0], BLOCK)
    assert x.dtype == torch.bfloat16 and weight.dtype in (x.dtype, torch.float32) and x.stride(1) == 1 and rows > 0
    assert inverses.shape == (rows,) and inverses.dtype == torch.float32 and inverses.is_contiguous()
    codes = new_codes(cols, rows, x.device)
    if tile:
        c, warps, scale = BLOCK, 8, new_tile_scale(cols, rows, x.device)
    else:
        c, warps, scale = 64, 4, new_scale(cols, groups, x.device)
    words = codes.as_strided((cols, codes.stride(0)), (codes.stride(0), 1)).view(torch.int32)
    _normed_columns_kernel[(groups, triton.cdiv(cols, c))](
        x, inverses, weight, words, scale, rows, cols, x.stride(0), words.stride(0),
        scale.stride(0) if tile else scale.stride(1),
        FLOOR=_FLOOR_BITS, POW2=pow2, TILE=tile, C=c, num_warps=warps, enable_fp_fusion=False,
    )
    return QTensor(codes, scale, "128x128" if tile else "1x128", (cols,), (rows,))
