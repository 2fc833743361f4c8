"""BF16 GEMMs in plain Triton, for any GPU from sm_80 on; gradients by torch's own matrix products.

An output of the forward pass is one chain of the tensor core over K from zero, 16 elements at a time, rounded once:
its bits depend neither on the number of rows nor on the tile (`kernels.tiles` says which tiles may be taken). Gradients
are outside parity; they are reproducible, in whatever order cuBLAS takes for their shape.

Legend: `M` rows (tokens), `N`, `K` output and reduction size.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels take pointers and compile-time numbers, for which there are no types)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.kernels import launch, tiles
from jetrl.kernels.gemm.operands import PreparedBF16
from jetrl.kernels.launch import begin
from jetrl.kernels.qtensor import QTensor
from jetrl.kernels.update.triton import add_rounded

_AT_ONCE = 1 << 26  # elements of an FP32 weight gradient that wait to be added: 256 MB
_BAND = tl.constexpr(8)  # rows of tiles that are computed together, so that they find the weight in the L2 cache


@triton.jit
def tile_of(number, m, n, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Row and column of a program's tile: down a band of rows, then the next column."""
    down, across = tl.cdiv(m, ROWS), tl.cdiv(n, COLS)
    first = number // (_BAND * across) * _BAND
    height = tl.minimum(down - first, _BAND)
    return first + number % (_BAND * across) % height, number % (_BAND * across) // height


@triton.jit
def chain(
    at_x, at_w, real, k, w_step, ROWS: tl.constexpr, COLS: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
    EVEN: tl.constexpr,
):
    """FP32 [ROWS, COLS] of `at_x` [ROWS, STEP] and `at_w` [STEP, COLS] and what follows along K, from zero; rows not
    `real` as zeros. `w_step` is between neighbours of K in the weight. EVEN: K is a multiple of STEP."""
    step = tl.arange(0, STEP)
    acc = tl.zeros((ROWS, COLS), tl.float32)
    for i in tl.range(0, tl.cdiv(k, STEP), num_stages=STAGES):
        if EVEN:
            a = tl.load(at_x + i * STEP, mask=real[:, None], other=0.0)
            b = tl.load(at_w + i * STEP * w_step)
        else:
            inside = i * STEP + step < k
            a = tl.load(at_x + i * STEP, mask=real[:, None] & inside[None, :], other=0.0)
            b = tl.load(at_w + i * STEP * w_step, mask=inside[:, None], other=0.0)
        acc = tl.dot(a, b, acc)
    return acc


@triton.jit(do_not_specialize=["m"])
def _gemm_kernel(
    x, w, out, m, n, k, x_stride, w_stride, out_stride, ROWS: tl.constexpr, COLS: tl.constexpr, STEP: tl.constexpr,
    STAGES: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):
    """A tile of `x @ w.T`."""
    begin(PDL)
    down, across = tile_of(tl.program_id(0), m, n, ROWS, COLS)
    row, col, step = down * ROWS + tl.arange(0, ROWS), across * COLS + tl.arange(0, COLS), tl.arange(0, STEP)
    at_x = x + row.to(tl.int64)[:, None] * x_stride + step[None, :]
    at_w = w + tl.minimum(col, n - 1).to(tl.int64)[None, :] * w_stride + step[:, None]
    real = row < m
    acc = chain(at_x, at_w, real, k, 1, ROWS, COLS, STEP, STAGES, EVEN)
    to = out + row.to(tl.int64)[:, None] * out_stride + col[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=real[:, None] & (col < n)[None, :])


def multiply(x: Tensor, w: Tensor, out: Tensor, tile: tiles.Gemm | None = None) -> None:
    """`out` [M, N] = `x` [M, K] @ `w` [N, K].T of BF16, FP32 sums rounded once to BF16 or FP32. `tile`: for tests."""
    (m, k), n = x.shape, w.shape[0]
    assert x.dtype == w.dtype == torch.bfloat16 and x.stride(1) == w.stride(1) == out.stride(1) == 1
    assert w.shape[1] == k and out.shape == (m, n) and k > 0
    if not m or not n:
        return
    t = tile or tiles.gemm(launch.CAPABILITY, m, n)
    _gemm_kernel[(triton.cdiv(m, t.rows) * triton.cdiv(n, t.cols),)](
        x, w, out, m, n, k, x.stride(0), w.stride(0), out.stride(0), ROWS=t.rows, COLS=t.cols, STEP=t.step,
        STAGES=t.stages, EVEN=k % t.step == 0, num_warps=t.warps, enable_fp_fusion=False, **launch.LAUNCH,
    )


def bf16_gemm(x: Tensor, w: PreparedBF16, out_dtype: torch.dtype) -> Tensor:
    """`x @ w.T`, FP32 accumulation in one order of K for any M, rounded once to `out_dtype` (BF16 or FP32)."""
    out = torch.empty(x.shape[0], w.size, dtype=out_dtype, device=x.device)
    multiply(x.contiguous(), w.weight[: w.size], out)
    return out


def coded_gemm(x: Tensor, codes: QTensor, w: PreparedBF16, out_dtype: torch.dtype) -> Tensor:
    """`bf16_gemm` by `w`, the values of `codes`."""
    return bf16_gemm(x, w, out_dtype)


def bf16_dgrad(dy: Tensor, w: Tensor) -> Tensor:
    """`dy @ w`, FP32 accumulation, rounded. Reproducible; gradients are not part of parity."""
    return dy @ w


def bf16_wgrad(dy: Tensor, x: Tensor) -> Tensor:
    """`dy.T @ x` in FP32."""
    return torch.mm(dy.T, x, out_dtype=torch.float32)


def bf16_wgrad_into(dy: Tensor, x: Tensor, grad: Tensor) -> None:
    """`kernels.gemm.ops.bf16_wgrad_into`: some rows of the gradient at a time, so that little memory waits for it."""
    rows = max(1, _AT_ONCE // x.shape[1])
    for first in range(0, grad.shape[0], rows):
        part = slice(first, first + rows)
        add_rounded(grad[part], bf16_wgrad(dy[:, part], x))
