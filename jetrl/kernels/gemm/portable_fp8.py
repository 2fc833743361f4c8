"""FP8 GEMMs in plain Triton, for GPUs whose tensor cores multiply E4M3 (sm_89 and later).

For each group of 128 along K, in order: the tensor core adds up the products of codes from zero, and
`acc = acc + (sum * a_scale) * b_scale` in FP32, as in `reference.fp8_gemm`; how the tensor core rounds within a group
is its own. A row's bits depend neither on the number of rows nor on the tile (`kernels.tiles`).

Legend: `M` rows (tokens), `N`, `K` output and reduction size; a prime marks a padded size (see `operands`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels take pointers and compile-time numbers, for which there are no types)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.kernels import launch, tiles
from jetrl.kernels.gemm.operands import PreparedFP8, gather, left_operand, whole_rows
from jetrl.kernels.gemm.portable import tile_of
from jetrl.kernels.launch import begin
from jetrl.kernels.qtensor import QTensor
from jetrl.precision.formats import BLOCK

_GROUP = tl.constexpr(BLOCK)


@triton.jit
def product(
    at_a, at_b, a_scale, b_scale, real, a_scale_step, b_scale_step, groups, ROWS: tl.constexpr, COLS: tl.constexpr,
    STAGES: tl.constexpr, BLOCKS: tl.constexpr,
):
    """FP32 [ROWS, COLS] of codes at `at_a` [ROWS, 128] and `at_b` [128, COLS], rows not `real` as zeros; scales of a
    group are `..._step` after those of the group before. BLOCKS: one for all columns."""
    acc = tl.zeros((ROWS, COLS), tl.float32)
    for i in tl.range(0, groups, num_stages=STAGES):
        a = tl.load(at_a + i * _GROUP, mask=real[:, None], other=0.0)
        b = tl.load(at_b + i * _GROUP)
        one = tl.load(a_scale + i * a_scale_step, mask=real, other=0.0)
        other = tl.load(b_scale + i * b_scale_step)
        if BLOCKS:
            acc += tl.dot(a, b) * one[:, None] * other
        else:
            acc += tl.dot(a, b) * one[:, None] * other[None, :]
    return acc


@triton.jit(do_not_specialize=["m", "a_scale_stride"])
def _fp8_kernel(
    a, b, a_scale, b_scale, out, m, n, groups, a_stride, b_stride, a_scale_stride, b_scale_row, b_scale_step,
    out_stride, ROWS: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr, BLOCKS: tl.constexpr, ROUND: tl.constexpr,
    ADD: tl.constexpr, PDL: tl.constexpr,
):
    """A tile of `a @ b.T`. BLOCKS: `b` has a scale for 128 of its rows, else for each. ADD: to what `out` holds,
    perhaps after rounding to BF16 (ROUND)."""
    begin(PDL)
    down, across = tile_of(tl.program_id(0), m, n, ROWS, COLS)
    row, col, code = down * ROWS + tl.arange(0, ROWS), across * COLS + tl.arange(0, COLS), tl.arange(0, _GROUP)
    real, there = row < m, tl.minimum(col, n - 1)
    at_a = a + row.to(tl.int64)[:, None] * a_stride + code[None, :]
    at_b = b + there.to(tl.int64)[None, :] * b_stride + code[:, None]
    if BLOCKS:
        there = across * COLS // _GROUP
    acc = product(
        at_a, at_b, a_scale + row, b_scale + there * b_scale_row, real, a_scale_stride, b_scale_step, groups, ROWS,
        COLS, STAGES, BLOCKS,
    )
    to = out + row.to(tl.int64)[:, None] * out_stride + col[None, :]
    mask = real[:, None] & (col < n)[None, :]
    if ROUND:
        acc = acc.to(tl.bfloat16).to(tl.float32)
    if ADD:
        acc += tl.load(to, mask=mask, other=0.0).to(tl.float32)
    tl.store(to, acc.to(out.dtype.element_ty), mask=mask)


def multiply(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor, blocks: bool, add: bool = False,
    rounded: bool = False, tile: tiles.Gemm | None = None,
) -> None:
    """`out` [M, N] = `a` [M, K'] @ `b` [N, K'].T of codes, K' whole groups. `a_scale` [M, groups] MN-major; `b_scale`
    [blocks(N), groups] with `blocks`, else [N, groups]. `add`: to `out`, `rounded` to BF16 before."""
    (m, k), n = a.shape, b.shape[0]
    assert a.stride(1) == b.stride(1) == out.stride(1) == 1 and b.shape[1] == k and k % BLOCK == 0
    assert out.shape == (m, n) and a_scale.shape[1] == b_scale.shape[1] == k // BLOCK
    assert m == 1 or a_scale.stride(0) == 1
    if not m or not n:
        return
    rows, cols = (m, n) if blocks else (min(m, 128), 0)  # more scales need more registers: a small tile
    t = tile or tiles.gemm_fp8(launch.CAPABILITY, rows, cols)
    assert BLOCK % t.cols == 0, "a tile has one scale of a block"
    _fp8_kernel[(triton.cdiv(m, t.rows) * triton.cdiv(n, t.cols),)](
        a, b, a_scale, b_scale, out, m, n, k // BLOCK, a.stride(0), b.stride(0), a_scale.stride(1), b_scale.stride(0),
        b_scale.stride(1), out.stride(0), ROWS=t.rows, COLS=t.cols, STAGES=t.stages, BLOCKS=blocks, ROUND=rounded,
        ADD=add, num_warps=t.warps, enable_fp_fusion=False, **launch.LAUNCH,
    )


def fp8_gemm(a: QTensor, b: PreparedFP8, out_dtype: torch.dtype) -> Tensor:
    """`a @ b.T` of activations (1x128) and weights (128x128), rounded once to `out_dtype`."""
    codes = left_operand(a, b)
    out = torch.empty(codes.shape[0], b.codes.shape[0], dtype=out_dtype, device=codes.device)
    multiply(codes, a.scale, b.codes, b.scale, out, True)
    return gather(out, b.rows)


def _wgrad(dy_t: QTensor, x_t: QTensor, out: Tensor, add: bool, rounded: bool) -> None:
    tiled = x_t.granularity == "128x128"
    multiply(whole_rows(dy_t.codes), dy_t.scale, whole_rows(x_t.codes), x_t.scale, out, tiled, add, rounded)


def _empty(dy_t: QTensor, x_t: QTensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(dy_t.codes.shape[0], x_t.codes.shape[0], dtype=dtype, device=dy_t.codes.device)


def wgrad_gemm(dy_t: QTensor, x_t: QTensor) -> Tensor:
    """`gemm.ops.wgrad_gemm`: `dy_t` [N, T] by `x_t` [K, T], groups of 128 tokens on both sides -> FP32 [N, K]."""
    out = _empty(dy_t, x_t, torch.float32)
    _wgrad(dy_t, x_t, out, False, x_t.granularity == "128x128")
    return out


def wgrad_rounded(dy_t: QTensor, x_t: QTensor) -> Tensor:
    """`kernels.gemm.ops.wgrad_rounded`: [N, K] in BF16, one scale for 128x128 of `x_t`."""
    out = _empty(dy_t, x_t, torch.bfloat16)
    _wgrad(dy_t, x_t, out, False, False)
    return out


def wgrad_into(dy_t: QTensor, x_t: QTensor, grad: Tensor) -> None:
    """`kernels.gemm.ops.wgrad_into`: the kernel itself adds, in FP32, and rounds to the gradient's type."""
    _wgrad(dy_t, x_t, grad, True, x_t.granularity == "128x128")
