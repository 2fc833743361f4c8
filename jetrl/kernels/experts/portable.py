"""Grouped GEMMs in plain Triton: each row by its expert's matrix with the bits of the dense kernels.

A program finds its expert from where groups begin and end (`PaddedGroups`), which it reads on the device, so the host
waits for no count. Tiles begin where groups do, and rows of padding are neither read nor written. In forward passes a
tile has as many rows as the dense kernel takes for few rows, or for many: its bits are the same (`kernels.tiles`).

Legend: `R` rows, `E` experts, `N`, `K` output and reduction size of an expert's matrix; a prime marks a padded size.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels take pointers and compile-time numbers, for which there are no types)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.kernels import launch, tiles
from jetrl.kernels.experts.operands import PreparedExperts
from jetrl.kernels.experts.route import PaddedGroups
from jetrl.kernels.gemm.operands import PreparedFP8, gather, left_operand
from jetrl.kernels.gemm.portable import chain
from jetrl.kernels.gemm.portable_fp8 import product
from jetrl.kernels.launch import begin
from jetrl.kernels.qtensor import QTensor
from jetrl.precision.formats import BLOCK

_GROUP = tl.constexpr(BLOCK)
_OUT = 64  # rows and columns of a tile of a weight gradient


@triton.jit
def _rows_of(number, starts, ends, E, EB: tl.constexpr, ROWS: tl.constexpr):
    """The expert whose rows tile `number` has, their first, and where the expert's end; E beyond the last tile."""
    expert = tl.arange(0, EB)
    start = tl.load(starts + expert, mask=expert < E, other=0)
    end = tl.load(ends + expert, mask=expert < E, other=0)
    count = tl.cdiv(end - start, ROWS)
    upto = tl.cumsum(count, axis=0)
    mine = tl.sum(((upto <= number) & (expert < E)).to(tl.int32), axis=0)
    here = expert == mine
    before = tl.sum(tl.where(here, upto - count, 0), axis=0)
    first = tl.sum(tl.where(here, start, 0), axis=0) + (number - before) * ROWS
    return mine, first, tl.sum(tl.where(here, end, 0), axis=0)


@triton.jit(do_not_specialize=["count", "E"])
def _grouped_kernel(
    x, w, starts, ends, out, count, n, k, E, x_stride, w_matrix, w_col, w_step, out_stride, EB: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr,
    PDL: tl.constexpr,
):
    """A tile of an expert's rows by its matrix, whose columns (of the output) are `w_col` apart."""
    begin(PDL)
    number, across = tl.program_id(0) % count, tl.program_id(0) // count
    expert, first, stop = _rows_of(number, starts, ends, E, EB, ROWS)
    if expert < E:
        row, col, step = first + tl.arange(0, ROWS), across * COLS + tl.arange(0, COLS), tl.arange(0, STEP)
        there = tl.minimum(col, n - 1).to(tl.int64)
        at_x = x + row.to(tl.int64)[:, None] * x_stride + step[None, :]
        at_w = w + expert.to(tl.int64) * w_matrix + there[None, :] * w_col + step[:, None] * w_step
        real = row < stop
        acc = chain(at_x, at_w, real, k, w_step, ROWS, COLS, STEP, STAGES, EVEN)
        to = out + row.to(tl.int64)[:, None] * out_stride + col[None, :]
        tl.store(to, acc.to(out.dtype.element_ty), mask=real[:, None] & (col < n)[None, :])


@triton.jit(do_not_specialize=["count", "E", "a_scale_stride"])
def _grouped_fp8_kernel(
    a, b, a_scale, b_scale, starts, ends, out, count, n, groups, E, a_stride, b_matrix, b_stride, a_scale_stride,
    b_scale_matrix, b_scale_row, b_scale_step, out_stride, EB: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):
    """The same of codes: `gemm.portable_fp8`'s tile."""
    begin(PDL)
    number, across = tl.program_id(0) % count, tl.program_id(0) // count
    expert, first, stop = _rows_of(number, starts, ends, E, EB, ROWS)
    if expert < E:
        row, col, code = first + tl.arange(0, ROWS), across * COLS + tl.arange(0, COLS), tl.arange(0, _GROUP)
        there, matrix = tl.minimum(col, n - 1).to(tl.int64), expert.to(tl.int64)
        at_a = a + row.to(tl.int64)[:, None] * a_stride + code[None, :]
        at_b = b + matrix * b_matrix + there[None, :] * b_stride + code[:, None]
        unit = b_scale + matrix * b_scale_matrix + across * COLS // _GROUP * b_scale_row
        real = row < stop
        acc = product(
            at_a, at_b, a_scale + row, unit, real, a_scale_stride, b_scale_step, groups, ROWS, COLS, STAGES, True
        )
        to = out + row.to(tl.int64)[:, None] * out_stride + col[None, :]
        tl.store(to, acc.to(out.dtype.element_ty), mask=real[:, None] & (col < n)[None, :])


@triton.jit
def _wgrad_kernel(
    dy, x, starts, ends, grad, n, k, dy_stride, x_stride, OUT: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
):
    """Adds a tile of `dy.T @ x` over one expert's rows to its gradient; an expert without rows is left alone."""
    expert = tl.program_id(2)
    start, stop = tl.load(starts + expert), tl.load(ends + expert)
    if start < stop:
        row, col, step = tl.arange(0, OUT), tl.arange(0, OUT), tl.arange(0, STEP)
        row, col = tl.program_id(1) * OUT + row, tl.program_id(0) * OUT + col
        acc = tl.zeros((OUT, OUT), tl.float32)
        for i in tl.range(0, tl.cdiv(stop - start, STEP), num_stages=STAGES):
            token = (start + i * STEP + step).to(tl.int64)
            real = (token < stop)[:, None]
            a = tl.load(dy + token[:, None] * dy_stride + row[None, :], mask=real & (row < n)[None, :], other=0.0)
            b = tl.load(x + token[:, None] * x_stride + col[None, :], mask=real & (col < k)[None, :], other=0.0)
            acc = tl.dot(tl.trans(a), b, acc)
        to = grad + (expert.to(tl.int64) * n + row)[:, None] * k + col[None, :]
        mask = (row < n)[:, None] & (col < k)[None, :]
        acc += tl.load(to, mask=mask, other=0.0).to(tl.float32)
        tl.store(to, acc.to(grad.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["dy_scale_stride", "x_scale_stride"])
def _wgrad_fp8_kernel(
    dy, x, dy_scale, x_scale, starts, sizes, grad, n, k, dy_scale_stride, x_scale_stride, OUT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The same of codes of columns, expert after expert [N, its padded rows] (`experts/quantize.py`)."""
    expert = tl.program_id(2)
    start, size = tl.load(starts + expert).to(tl.int64), tl.load(sizes + expert).to(tl.int64)
    if size > 0:
        row, col = tl.program_id(1) * OUT + tl.arange(0, OUT), tl.program_id(0) * OUT + tl.arange(0, OUT)
        code, block = tl.arange(0, _GROUP), start // _GROUP
        at_row, at_col = tl.minimum(row, n - 1), tl.minimum(col, k - 1)
        at_dy = dy + start * n + at_row[:, None] * size + code[None, :]
        at_x = x + start * k + at_col[None, :] * size + code[:, None]
        acc = product(
            at_dy, at_x, dy_scale + block * dy_scale_stride + at_row, x_scale + block * x_scale_stride + at_col,
            row < n, dy_scale_stride, x_scale_stride, (size // _GROUP).to(tl.int32), OUT, OUT, STAGES, False,
        )
        to = grad + (expert.to(tl.int64) * n + row)[:, None] * k + col[None, :]
        mask = (row < n)[:, None] & (col < k)[None, :]
        acc += tl.load(to, mask=mask, other=0.0).to(tl.float32)
        tl.store(to, acc.to(grad.dtype.element_ty), mask=mask)


def _tiles(groups: PaddedGroups, rows: int) -> int:
    """More tiles of so many rows no groups can need."""
    choices = groups.rows.numel()
    return min(len(groups.counts), choices) + choices // rows


def _mean(groups: PaddedGroups) -> int:
    """Rows of the mean expert: what the choice of a tile goes by."""
    return -(-groups.rows.numel() // len(groups.counts))


def _multiply(
    x: Tensor, w: Tensor, steps: tuple[int, int, int], size: tuple[int, int], groups: PaddedGroups, out: Tensor
) -> None:
    """`steps`: elements between matrices of `w`, columns of the output, and neighbours of K; `size` is (N, K)."""
    (n, k), experts = size, len(groups.counts)
    count = _tiles(groups, (t := tiles.gemm(launch.CAPABILITY, _mean(groups), n)).rows)
    if not count or not n:
        return
    _grouped_kernel[(count * triton.cdiv(n, t.cols),)](
        x, w, groups.starts, groups.ends, out, count, n, k, experts, x.stride(0), *steps, out.stride(0),
        EB=triton.next_power_of_2(experts), ROWS=t.rows, COLS=t.cols, STEP=t.step, STAGES=t.stages,
        EVEN=k % t.step == 0, num_warps=t.warps, enable_fp_fusion=False, **launch.LAUNCH,
    )


def grouped_bf16_gemm(x: Tensor, w: PreparedExperts, groups: PaddedGroups, out_dtype: torch.dtype) -> Tensor:
    """`experts.ops.grouped_bf16_gemm`: the bits of `gemm.portable.bf16_gemm` for each row with its expert's matrix."""
    x = x.contiguous()
    out = torch.empty(x.shape[0], w.rows, dtype=out_dtype, device=x.device)
    matrices = w.weight
    _multiply(x, matrices, (matrices.stride(0), matrices.stride(1), 1), (w.rows, w.cols), groups, out)
    return out


def grouped_bf16_dgrad(dy: Tensor, w: Tensor, groups: PaddedGroups) -> Tensor:
    """`kernels.experts.ops.grouped_bf16_dgrad`: FP32 sums in one order, rounded."""
    matrices, dy = w.unflatten(0, (len(groups.counts), -1)), dy.contiguous()
    n, k = matrices.shape[1:]
    dx = torch.empty(dy.shape[0], k, dtype=dy.dtype, device=dy.device)
    _multiply(dy, matrices, (matrices.stride(0), 1, matrices.stride(1)), (k, n), groups, dx)
    return dx


def grouped_fp8_gemm(a: QTensor, b: PreparedFP8, groups: PaddedGroups, out_dtype: torch.dtype) -> Tensor:
    """`kernels.experts.ops.grouped_fp8_gemm`: the bits of `gemm.portable_fp8.fp8_gemm` for each row."""
    codes, (experts, n, _) = left_operand(a, b), b.codes.shape
    out = torch.empty(codes.shape[0], n, dtype=out_dtype, device=codes.device)
    count = _tiles(groups, (t := tiles.gemm_fp8(launch.CAPABILITY, _mean(groups), n)).rows)
    if count and n:
        _grouped_fp8_kernel[(count * triton.cdiv(n, t.cols),)](
            codes, b.codes, a.scale, b.scale, groups.starts, groups.ends, out, count, n, codes.shape[1] // BLOCK,
            experts, codes.stride(0), b.codes.stride(0), b.codes.stride(1), a.scale.stride(1), *b.scale.stride(),
            out.stride(0), EB=triton.next_power_of_2(experts), ROWS=t.rows, COLS=t.cols, STAGES=t.stages,
            num_warps=t.warps, enable_fp_fusion=False, **launch.LAUNCH,
        )
    return gather(out, b.rows)


def grouped_wgrad_into(
    dy_t: tuple[Tensor, Tensor], x_t: tuple[Tensor, Tensor], groups: PaddedGroups, grad: Tensor
) -> None:
    """`experts.ops.grouped_wgrad_into`: the kernel itself adds, in FP32, and rounds to the gradient's type."""
    (n, rows), k, experts = dy_t[0].shape, len(x_t[0]), len(groups.counts)
    assert groups.block == BLOCK and dy_t[1].stride(0) == x_t[1].stride(0) == 1
    if rows:
        _wgrad_fp8_kernel[(triton.cdiv(k, _OUT), triton.cdiv(n, _OUT), experts)](
            dy_t[0], x_t[0], dy_t[1], x_t[1], groups.starts, groups.sizes, grad, n, k, dy_t[1].stride(1),
            x_t[1].stride(1), OUT=_OUT, STAGES=3, num_warps=8, enable_fp_fusion=False,
        )


def grouped_bf16_wgrad_into(dy: Tensor, x: Tensor, groups: PaddedGroups, grad: Tensor) -> None:
    """`experts.ops.grouped_bf16_wgrad_into`."""
    (rows, n), k, experts = dy.shape, x.shape[1], len(groups.counts)
    dy, x = dy.contiguous(), x.contiguous()
    if rows:
        _wgrad_kernel[(triton.cdiv(k, _OUT), triton.cdiv(n, _OUT), experts)](
            dy, x, groups.starts, groups.ends, grad, n, k, dy.stride(0), x.stride(0), OUT=_OUT, STEP=64, STAGES=3,
            num_warps=4, enable_fp_fusion=False,
        )
