"""What the FP8 backward pass of experts reads, as Triton kernels: codes of rows and of columns from one reading.

The columns' codes are an operand of wgrad. Codes [C, R] in name: in memory expert after expert, each [C, its padded
rows], which is what the k-grouped GEMM reads. Scales [C, R / 128] with columns next to each other. Rows of padding
count as zeros whatever they hold, and are never read. All codes, scales and gradients of rows are bit-equal to
`reference.py`.

Legend: `T` tokens, `k` experts of a token, `R` rows, `E` experts, `D` model, `F` feed-forward, `C` columns. FP fusion
is off, as in `quantize/triton.py`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels take pointers and compile-time numbers, for which there are no types)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.kernels.experts.route import PaddedGroups
from jetrl.kernels.pointwise.swiglu import swiglu_gradient
from jetrl.kernels.qtensor import QTensor
from jetrl.kernels.quantize.triton import (
    _FLOOR_BITS,
    abs_bits,
    new_codes,
    new_scale,
    padded,
    quotient,
    scale_from,
    store_columns,
    to_bf16,
)
from jetrl.precision.formats import BLOCK

Columns = tuple[Tensor, Tensor]  # codes, scales


@triton.jit
def _expert_of(starts, block, E, EB: tl.constexpr):
    """Where the rows of the expert begin whose block of 128 rows this is, and how many they are, in int64."""
    expert = tl.arange(0, EB)
    stops = tl.load(starts + 1 + expert, mask=expert < E, other=0x7FFFFFFF)
    mine = tl.sum((stops <= block * 128).to(tl.int32), axis=0)
    start = tl.load(starts + mine).to(tl.int64)
    return start, tl.load(starts + mine + 1).to(tl.int64) - start


@triton.jit
def _store_expert_columns(
    a, b, c, d, words_t, scale_t, start, size, block, cols, inside, C, scale_t_stride,
    FLOOR: tl.constexpr, POW2: tl.constexpr,
):
    """`store_columns` of one block of 128 rows, in the part of the result of the expert that `_expert_of` gives."""
    first = start // 128
    words = tl.multiple_of(size // 4, 32)  # of a column: so stores are of 16 bytes
    store_columns(
        a, b, c, d, words_t + tl.multiple_of(start // 4, 32) * C, scale_t + first * scale_t_stride, block - first, 0,
        cols, inside, words, scale_t_stride, FLOOR, POW2, False, True,
    )


@triton.jit
def _quarter(
    x, tokens, row_weights, row, cols, inside, x_stride, GATHER: tl.constexpr, WEIGHTED: tl.constexpr,
):
    """Every fourth row of a block, zeros in padding. GATHER: of its token. WEIGHTED: times its weight, rounded."""
    token = tl.load(tokens + row)
    real = token >= 0
    at = token.to(tl.int64) if GATHER else row
    v = tl.load(x + at[:, None] * x_stride + cols[None, :], mask=real[:, None] & inside[None, :], other=0.0)
    v = v.to(tl.float32)
    if WEIGHTED:
        v = to_bf16(v * tl.load(row_weights + row, mask=real, other=0.0)[:, None])
    return v


@triton.jit
def _store_rows(
    v, codes, scale, group, row, cols, written, codes_stride, scale_stride, FLOOR: tl.constexpr, POW2: tl.constexpr,
):
    """Codes and scales of one group of 128 columns of these rows."""
    s = scale_from(tl.max(abs_bits(v), axis=1), FLOOR, POW2)
    q = quotient(v, s[:, None], True).to(tl.float8e4nv)
    tl.store(codes + row[:, None] * codes_stride + cols[None, :], q, mask=(cols < written)[None, :])
    tl.store(scale + group.to(tl.int64) * scale_stride + row, s)


@triton.jit(do_not_specialize=["scale_stride"])
def _both_kernel(
    x, tokens, row_weights, starts, codes, scale, words_t, scale_t, E, C, section, x_stride, codes_stride,
    scale_stride, scale_t_stride, FLOOR: tl.constexpr, POW2: tl.constexpr, POW2_T: tl.constexpr, CB: tl.constexpr,
    EB: tl.constexpr, GATHER: tl.constexpr, WEIGHTED: tl.constexpr, ROWS: tl.constexpr,
):
    """128 rows of one expert, of CB columns, as codes along rows; ROWS: as codes along columns too (then CB is 128).

    `section` columns have groups of their own. GATHER takes the blocks of the same columns one after another: these
    columns of all tokens stay in the L2, where each is read k times.
    """
    block = tl.program_id(0 if GATHER else 1).to(tl.int64)
    group = tl.program_id(1 if GATHER else 0)
    if block * 128 < tl.load(starts + E):
        each = tl.cdiv(section, CB)
        mine = group // each
        cols = mine * section + (group - mine * each) * CB + tl.arange(0, CB)
        stop = (mine + 1) * section
        inside = cols < stop
        row = block * 128 + tl.arange(0, 32) * 4
        a = _quarter(x, tokens, row_weights, row, cols, inside, x_stride, GATHER, WEIGHTED)
        b = _quarter(x, tokens, row_weights, row + 1, cols, inside, x_stride, GATHER, WEIGHTED)
        c = _quarter(x, tokens, row_weights, row + 2, cols, inside, x_stride, GATHER, WEIGHTED)
        d = _quarter(x, tokens, row_weights, row + 3, cols, inside, x_stride, GATHER, WEIGHTED)
        start, size = _expert_of(starts, block, E, EB)  # while rows are on their way
        if ROWS:
            end = tl.where(stop < C, stop, codes_stride)  # zeros behind the last section
            _store_rows(a, codes, scale, group, row, cols, end, codes_stride, scale_stride, FLOOR, POW2)
            _store_rows(b, codes, scale, group, row + 1, cols, end, codes_stride, scale_stride, FLOOR, POW2)
            _store_rows(c, codes, scale, group, row + 2, cols, end, codes_stride, scale_stride, FLOOR, POW2)
            _store_rows(d, codes, scale, group, row + 3, cols, end, codes_stride, scale_stride, FLOOR, POW2)
        _store_expert_columns(
            a, b, c, d, words_t, scale_t, start, size, block, cols, inside, C, scale_t_stride, FLOOR, POW2_T
        )


@triton.jit
def _weights_kernel(
    dy, y, weights, rows, row_weights, d_weights, D, dy_stride, y_stride, K: tl.constexpr, B: tl.constexpr,
):
    """The gradients of a token's weights, and these weights in the order of rows."""
    token = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, B)
    inside = cols < D
    g = tl.load(dy + token * dy_stride + cols, mask=inside, other=0.0).to(tl.float32)
    row = tl.load(rows + token * K)
    v = tl.load(y + row * y_stride + cols, mask=inside, other=0.0)
    for j in tl.static_range(K):
        if j + 1 < K:  # the next row is on its way while this one is summed
            next_row = tl.load(rows + token * K + j + 1)
            ahead = tl.load(y + next_row * y_stride + cols, mask=inside, other=0.0)
        tl.store(row_weights + row, tl.load(weights + token * K + j))
        tl.store(d_weights + token * K + j, tl.sum(g * v.to(tl.float32), axis=0))
        if j + 1 < K:
            row, v = next_row, ahead


@triton.jit
def _swiglu_loads(grad, gate_up, tokens, row, cols, inside, x_stride, F: tl.constexpr):
    """Every fourth row of a block: gate, up and the gradient, and where they are real."""
    mask = (tl.load(tokens + row) >= 0)[:, None] & inside[None, :]
    at = gate_up + row[:, None] * x_stride + cols[None, :]
    gate = tl.load(at, mask=mask, other=0.0)
    up = tl.load(at + F, mask=mask, other=0.0)
    return gate, up, tl.load(grad + row[:, None] * F + cols[None, :], mask=mask, other=0.0), mask


@triton.jit
def _swiglu_quarter(gate, up, g, mask, out, row, cols, F: tl.constexpr):
    """Writes both parts of the gradient, returns SwiGLU's output (rounded, as FP32)."""
    d_gate, d_up, y = swiglu_gradient(gate.to(tl.float32), up.to(tl.float32), g.to(tl.float32))
    to = out + row[:, None] * (2 * F) + cols[None, :]
    tl.store(to, d_gate.to(tl.bfloat16), mask=mask)
    tl.store(to + F, d_up.to(tl.bfloat16), mask=mask)
    return to_bf16(y)


@triton.jit
def _swiglu_backward_act_kernel(
    grad, gate_up, tokens, starts, out, words_t, scale_t, E, x_stride, scale_t_stride,
    F: tl.constexpr, FLOOR: tl.constexpr, POW2: tl.constexpr, CB: tl.constexpr, EB: tl.constexpr,
):
    """128 rows of one expert, of CB columns of gate and of up; `out` is left as it is in padding.

    All is read before anything is written: a load does not pass a store.
    """
    block = tl.program_id(1).to(tl.int64)
    if block * 128 < tl.load(starts + E):
        cols = tl.program_id(0) * CB + tl.arange(0, CB)
        inside = cols < F
        row = block * 128 + tl.arange(0, 32) * 4
        gate_a, up_a, g_a, real_a = _swiglu_loads(grad, gate_up, tokens, row, cols, inside, x_stride, F)
        gate_b, up_b, g_b, real_b = _swiglu_loads(grad, gate_up, tokens, row + 1, cols, inside, x_stride, F)
        gate_c, up_c, g_c, real_c = _swiglu_loads(grad, gate_up, tokens, row + 2, cols, inside, x_stride, F)
        gate_d, up_d, g_d, real_d = _swiglu_loads(grad, gate_up, tokens, row + 3, cols, inside, x_stride, F)
        start, size = _expert_of(starts, block, E, EB)
        a = _swiglu_quarter(gate_a, up_a, g_a, real_a, out, row, cols, F)
        b = _swiglu_quarter(gate_b, up_b, g_b, real_b, out, row + 1, cols, F)
        c = _swiglu_quarter(gate_c, up_c, g_c, real_c, out, row + 2, cols, F)
        d = _swiglu_quarter(gate_d, up_d, g_d, real_d, out, row + 3, cols, F)
        _store_expert_columns(
            a, b, c, d, words_t, scale_t, start, size, block, cols, inside, F, scale_t_stride, FLOOR, POW2
        )


def _new_columns(size: int, c: int, groups: PaddedGroups, device: torch.device) -> Columns:
    """Empty codes [C, R] and scales [R / 128, C] of columns."""
    assert groups.block == BLOCK, "groups for gradients have blocks of 128"
    assert size == len(groups.tokens) and size % BLOCK == 0
    codes = torch.empty(c, size, dtype=torch.float8_e4m3fn, device=device)
    return codes, torch.empty(size // BLOCK, padded(c, 4), dtype=torch.float32, device=device)[:, :c]


def _quantized(
    x: Tensor, groups: PaddedGroups, pow2: bool, sections: tuple[int, ...] | None = None, pow2_rows: bool = False,
    gather: bool = False, row_weights: Tensor | None = None,
) -> tuple[QTensor | None, Columns]:
    """Columns' codes of x [R, C] (`gather`: of x [T, C], by the token of each row); with `sections` rows' codes too."""
    assert x.dtype == torch.bfloat16 and x.stride(1) == 1 and len(set(sections or (0,))) == 1
    size, c, experts, device = len(groups.tokens), x.shape[1], len(groups.counts), x.device
    codes_t, scale_t = _new_columns(size, c, groups, device)
    section, q = (sections or (c,))[0], None
    block, warps, registers = (64, 4, 96) if sections is None else (BLOCK, 8, 128)
    if sections is not None:
        scale = new_scale(size, len(sections) * triton.cdiv(section, BLOCK), device)
        q = QTensor(new_codes(size, c, device), scale, "1x128", (size,), sections)
    codes, scale = (codes_t, scale_t) if q is None else (q.codes, q.scale)
    parts = c // section * triton.cdiv(section, block)
    if size:
        _both_kernel[(size // BLOCK, parts) if gather else (parts, size // BLOCK)](
            x, groups.tokens, scale_t if row_weights is None else row_weights, groups.starts, codes, scale,
            codes_t.view(torch.int32), scale_t, experts, c, section, x.stride(0), codes.stride(0), scale.stride(1),
            scale_t.stride(0), FLOOR=_FLOOR_BITS, POW2=pow2_rows, POW2_T=pow2, CB=block,
            EB=triton.next_power_of_2(experts), GATHER=gather, WEIGHTED=row_weights is not None,
            ROWS=sections is not None, num_warps=warps, maxnreg=registers, enable_fp_fusion=False,
        )
    return q, (codes_t, scale_t.T)


def quantize_rows_t(x: Tensor, groups: PaddedGroups, pow2: bool) -> Columns:
    """`reference.quantize_rows_t` of whole blocks: padding counts as zeros."""
    assert x.shape[0] == len(groups.tokens)
    return _quantized(x, groups, pow2)[1]


def dispatch_quantize_t(x: Tensor, groups: PaddedGroups, pow2: bool) -> Columns:
    """`reference.dispatch_quantize_t` of whole blocks."""
    return _quantized(x, groups, pow2, gather=True)[1]


def combine_backward_quantize(
    dy: Tensor, y: Tensor, weights: Tensor, groups: PaddedGroups, pow2: bool, pow2_t: bool
) -> tuple[QTensor, Columns, Tensor]:
    """`reference.combine_backward_quantize`: codes and scales bit-equal, zeros between groups; the weights' sums
    in the order of `rows.combine_backward`."""
    assert dy.stride(1) == 1 and y.stride(1) == 1 and weights.is_contiguous() and dy.dtype == y.dtype == torch.bfloat16
    (tokens, k), d = groups.rows.shape, y.shape[1]
    d_weights = torch.empty_like(weights)
    row_weights = torch.empty(len(groups.tokens), dtype=weights.dtype, device=dy.device)
    block = triton.next_power_of_2(d)
    if tokens:
        _weights_kernel[(tokens,)](
            dy, y, weights, groups.rows, row_weights, d_weights, d, dy.stride(0), y.stride(0), K=k, B=block,
            num_warps=4 if block <= 4096 else 8, enable_fp_fusion=False,
        )
    q, columns = _quantized(dy, groups, pow2_t, (d,), pow2, True, row_weights)
    assert q is not None
    return q, columns, d_weights


def swiglu_rows_backward_quantize(
    grad: Tensor, gate_up: Tensor, groups: PaddedGroups, pow2: bool, pow2_t: bool
) -> tuple[QTensor, Columns, Columns]:
    """`reference.swiglu_rows_backward_quantize`, bit-equal, with zeros between groups."""
    assert gate_up.dtype == grad.dtype == torch.bfloat16 and gate_up.stride(1) == 1 and grad.is_contiguous()
    (size, f), experts, device = grad.shape, len(groups.counts), grad.device
    assert gate_up.shape == (size, 2 * f)
    out = torch.empty(size, 2 * f, dtype=grad.dtype, device=device)
    codes, scale = _new_columns(size, f, groups, device)
    if size:
        _swiglu_backward_act_kernel[(triton.cdiv(f, 64), size // BLOCK)](
            grad, gate_up, groups.tokens, groups.starts, out, codes.view(torch.int32), scale, experts,
            gate_up.stride(0), scale.stride(0), F=f, FLOOR=_FLOOR_BITS, POW2=pow2_t, CB=64,
            EB=triton.next_power_of_2(experts), num_warps=8, maxnreg=128, enable_fp_fusion=False,
        )
    q, columns = _quantized(out, groups, pow2_t, (f, f), pow2)
    assert q is not None
    return q, columns, (codes, scale.T)
