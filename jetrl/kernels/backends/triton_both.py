"""Quantizers that write both orientations from one read: a GEMM's rows, and what the weight gradient reads.

Codes and scales are bit-equal to `reference.quantize_*` of the rows and of the transposed matrix. A program takes 128
rows (tokens) of 128 columns: whole groups of both orientations, and one tile. `swiglu_backward_quantize` makes the
matrix in the same kernel, so that SwiGLU's gradient and its output made again are never written in BF16.

Legend: `T` tokens, `C` columns (features), `F` feed-forward. FP fusion is off, as in `triton_quant`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels take pointers and compile-time numbers, for which there are no types)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.kernels.backends.triton_pointwise import sigmoid32
from jetrl.kernels.backends.triton_quant import (
    _FLOOR_BITS,
    abs_bits,
    encode,
    has_gaps,
    new_codes,
    new_scale,
    scale_from,
)
from jetrl.kernels.qtensor import QTensor, blocks_of
from jetrl.precision.formats import BLOCK

WARPS = {"both": 8, "swiglu": 16}  # of a tile of 128x128


@triton.jit
def encode_as(x, scale, POW2: tl.constexpr):
    """`encode`; by a power of two the product with the reciprocal is exact at once (NaN and infinity included)."""
    if POW2:
        codes = (x * tl.div_rn(1.0, scale)).to(tl.float8e4nv)
    else:
        codes = encode(x, scale)
    return codes.to(tl.uint8, bitcast=True)


@triton.jit
def _store_rows(
    v, codes, scale, rows, cols, group, num_rows, written, codes_stride, scale_stride,
    FLOOR: tl.constexpr, POW2: tl.constexpr,
):
    """One group of 128 columns, a scale for each row; `v` is 0 outside the matrix."""
    s = scale_from(tl.max(abs_bits(v), axis=1), FLOOR, POW2)
    alive = rows < num_rows
    mask = alive[:, None] & (cols < written)[None, :]
    tl.store(codes + rows[:, None] * codes_stride + cols[None, :], encode_as(v, s[:, None], POW2), mask=mask)
    tl.store(scale + group.to(tl.int64) * scale_stride + rows, s, mask=alive)


@triton.jit
def _store_transposed(
    v, codes, scale, rows, cols, block, group, num_cols, codes_stride, scale_stride,
    FLOOR: tl.constexpr, POW2: tl.constexpr, TILE: tl.constexpr,
):
    """128 tokens of 128 features, written [features, tokens]: a scale for the tile, or one for each feature."""
    inside = cols < num_cols
    top = tl.max(abs_bits(v), axis=0)
    if TILE:
        tile = scale_from(tl.max(top, axis=0), FLOOR, POW2)
        q = encode_as(v, tile, POW2)
        tl.store(scale + group.to(tl.int64) * scale_stride + block, tile)
    else:
        s = scale_from(top, FLOOR, POW2)
        q = encode_as(v, s[None, :], POW2)
        tl.store(scale + block * scale_stride + cols, s, mask=inside)
    tl.store(codes + cols.to(tl.int64)[:, None] * codes_stride + rows[None, :], tl.trans(q), mask=inside[:, None])


@triton.jit
def _both_kernel(
    x, codes, scale, codes_t, scale_t, num_rows, num_cols, written, x_stride, codes_stride, scale_stride,
    codes_t_stride, scale_t_stride, FLOOR: tl.constexpr, POW2: tl.constexpr, POW2_T: tl.constexpr, TILE: tl.constexpr,
):
    group, block = tl.program_id(0), tl.program_id(1).to(tl.int64)
    rows, cols = block * 128 + tl.arange(0, 128), group * 128 + tl.arange(0, 128)
    mask = (rows < num_rows)[:, None] & (cols < num_cols)[None, :]
    v = tl.load(x + rows[:, None] * x_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    _store_rows(v, codes, scale, rows, cols, group, num_rows, written, codes_stride, scale_stride, FLOOR, POW2)
    _store_transposed(
        v, codes_t, scale_t, rows, cols, block, group, num_cols, codes_t_stride, scale_t_stride, FLOOR, POW2_T, TILE
    )


@triton.jit
def _swiglu_backward_kernel(
    grad, gate_up, saved_scale, up_saved_scale, codes, up_codes, scale, up_scale, codes_t, up_codes_t, scale_t,
    up_scale_t, act_t, act_scale, num_rows, grad_stride, x_stride, saved_stride, codes_stride, scale_stride,
    codes_t_stride, scale_t_stride, act_stride, act_scale_stride, F: tl.constexpr, FLOOR: tl.constexpr,
    POW2: tl.constexpr, POW2_T: tl.constexpr, SAVED: tl.constexpr,
):
    """128 tokens of 128 columns of gate and of up: both parts of the gradient, and SwiGLU's output.

    SAVED: gate and up are codes with a scale for each row and group of columns.
    """
    group, block = tl.program_id(0), tl.program_id(1).to(tl.int64)
    rows, cols = block * 128 + tl.arange(0, 128), group * 128 + tl.arange(0, 128)
    mask = (rows < num_rows)[:, None] & (cols < F)[None, :]
    at = gate_up + rows[:, None] * x_stride + cols[None, :]
    gate = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(at + F, mask=mask, other=0.0).to(tl.float32)
    if SAVED:
        first = group.to(tl.int64) * saved_stride + rows
        s = tl.load(saved_scale + first, mask=rows < num_rows, other=0.0)
        s_up = tl.load(up_saved_scale + first, mask=rows < num_rows, other=0.0)
        gate = (gate * s[:, None]).to(tl.bfloat16).to(tl.float32)
        up = (up * s_up[:, None]).to(tl.bfloat16).to(tl.float32)
    g = tl.load(grad + rows[:, None] * grad_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    sig = sigmoid32(gate)
    act = (gate * sig * up).to(tl.bfloat16)
    d_gate = ((g * up) * (sig * (gate * (1.0 - sig) + 1.0))).to(tl.bfloat16)
    d_up = (g * (gate * sig)).to(tl.bfloat16)
    _store_transposed(
        act.to(tl.float32), act_t, act_scale, rows, cols, block, group, F, act_stride, act_scale_stride, FLOOR, POW2_T,
        True,
    )
    v = d_gate.to(tl.float32)
    _store_rows(v, codes, scale, rows, cols, group, num_rows, F, codes_stride, scale_stride, FLOOR, POW2)
    _store_transposed(
        v, codes_t, scale_t, rows, cols, block, group, F, codes_t_stride, scale_t_stride, FLOOR, POW2_T, False
    )
    v = d_up.to(tl.float32)
    _store_rows(v, up_codes, up_scale, rows, cols, group, num_rows, F, codes_stride, scale_stride, FLOOR, POW2)
    _store_transposed(
        v, up_codes_t, up_scale_t, rows, cols, block, group, F, codes_t_stride, scale_t_stride, FLOOR, POW2_T, False
    )


def _transposed(cols: int, rows: int, tile: bool, device: torch.device) -> QTensor:
    """Empty codes [C, T] with a scale for each row, or for each tile, and 128 tokens."""
    groups = triton.cdiv(rows, BLOCK)
    codes = new_codes(cols, rows, device)
    if not tile:
        return QTensor(codes, new_scale(cols, groups, device), "1x128", (cols,), (rows,))
    scale = torch.empty(triton.cdiv(cols, BLOCK), groups, dtype=torch.float32, device=device)
    return QTensor(codes, scale, "128x128", (cols,), (rows,))


def _scale_stride(q: QTensor) -> int:
    """From group to group of tokens where a row has its scale, from tile to tile of features where a tile has."""
    return q.scale.stride(0) if q.granularity == "128x128" else q.scale.stride(1)


def quantize_both(
    x: Tensor, pow2: bool, pow2_t: bool, tile: bool, sections: tuple[int, ...] | None = None
) -> tuple[QTensor, QTensor]:
    """`reference.quantize_both` of `x` [T, C], rows contiguous."""
    (rows, cols), sections = x.shape, sections or (x.shape[1],)
    assert x.stride(1) == 1 and rows > 0 and sum(sections) == cols
    q = QTensor(
        new_codes(rows, cols, x.device), new_scale(rows, len(blocks_of(sections)), x.device), "1x128", (rows,), sections
    )
    t = _transposed(cols, rows, tile, x.device)
    gaps = has_gaps(sections)
    assert not (tile and gaps), "tiles are for a plain matrix"
    codes, codes_t = q.codes.view(torch.uint8), t.codes.view(torch.uint8)
    start = group = 0
    for size in sections if gaps else (cols,):
        groups = triton.cdiv(size, BLOCK)
        _both_kernel[(groups, triton.cdiv(rows, BLOCK))](
            x[:, start:], codes[:, start:], q.scale[:, group:], codes_t[start:], t.scale if tile else t.scale[start:],
            rows, size, size if gaps else codes.stride(0), x.stride(0), codes.stride(0), q.scale.stride(1),
            codes_t.stride(0), _scale_stride(t), FLOOR=_FLOOR_BITS, POW2=pow2, POW2_T=pow2_t, TILE=tile,
            num_warps=WARPS["both"], enable_fp_fusion=False,
        )
        start, group = start + size, group + groups
    return q, t


def swiglu_backward_quantize(
    grad: Tensor, gate_up: Tensor | QTensor, pow2: bool, pow2_t: bool
) -> tuple[QTensor, QTensor, QTensor]:
    """`reference.swiglu_backward_quantize`, bit-equal."""
    (rows, f), device = grad.shape, grad.device
    saved, groups = isinstance(gate_up, QTensor), triton.cdiv(f, BLOCK)
    x, x_scale = (gate_up.codes, gate_up.scale) if isinstance(gate_up, QTensor) else (gate_up, grad)
    assert x.shape == (rows, 2 * f) and grad.stride(1) == x.stride(1) == 1 and rows > 0
    assert grad.dtype == torch.bfloat16 and (x_scale.shape == (rows, 2 * groups) if saved else x.dtype == grad.dtype)
    q = QTensor(new_codes(rows, 2 * f, device), new_scale(rows, 2 * groups, device), "1x128", (rows,), (f, f))
    t, act = _transposed(2 * f, rows, False, device), _transposed(f, rows, True, device)
    codes, codes_t, act_codes = (x.codes.view(torch.uint8) for x in (q, t, act))
    _swiglu_backward_kernel[(groups, triton.cdiv(rows, BLOCK))](
        grad, x, x_scale, x_scale[:, groups:] if saved else grad, codes, codes[:, f:], q.scale, q.scale[:, groups:],
        codes_t, codes_t[f:], t.scale, t.scale[f:], act_codes, act.scale, rows, grad.stride(0), x.stride(0),
        x_scale.stride(1), codes.stride(0), q.scale.stride(1), codes_t.stride(0), t.scale.stride(1),
        act_codes.stride(0), act.scale.stride(0), F=f, FLOOR=_FLOOR_BITS, POW2=pow2, POW2_T=pow2_t, SAVED=saved,
        num_warps=WARPS["swiglu"], enable_fp_fusion=False,
    )
    return q, t, act
