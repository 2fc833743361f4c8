"""The FP8 GEMMs of `deepgemm` with torch's own `scaled_mm` (cuBLASLt): a second implementation, for comparison.

`hopper_scaled_mm` uses them in place of DeepGEMM's. Slower, and for some shapes a row's bits depend on the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, scaled_mm

from jetrl.kernels.gemm.operands import PreparedFP8, gather, left_operand, rows_to, whole_rows
from jetrl.kernels.qtensor import QTensor
from jetrl.kernels.update.triton import add_rounded

_ROWS = 16  # cuBLASLt takes multiples of this


def _outer_major(scale: Tensor) -> Tensor:
    """Scales [M, groups] as [M', groups], M' the padded rows, with column stride M' exactly."""
    rows, groups = scale.shape
    if scale.stride() == (1, rows) and rows % _ROWS == 0:
        return scale
    out = scale.new_ones(groups, -(-rows // _ROWS) * _ROWS).T
    out[:rows] = scale
    return out


def _block_scales(scale: Tensor) -> Tensor:
    """Scales [blocks(N), blocks(K)] as [blocks(K) up to a multiple of 4, blocks(N)], the first dimension contiguous."""
    out = scale.new_zeros(scale.shape[0], -(-scale.shape[1] // 4) * 4)
    out[:, : scale.shape[1]] = scale
    return out.T


def fp8_gemm(a: QTensor, b: PreparedFP8, out_dtype: torch.dtype) -> Tensor:
    """`deepgemm.fp8_gemm`: activations (1x128) by prepared weights (128x128)."""
    codes, weight = rows_to(left_operand(a, b), _ROWS), rows_to(b.codes, 128)
    y = scaled_mm(
        codes, weight.T, _outer_major(a.scale), ScalingType.BlockWise1x128, _block_scales(b.scale),
        ScalingType.BlockWise128x128, output_dtype=out_dtype,
    )
    return gather(y[: a.codes.shape[0]], b.rows)


def wgrad_gemm(dy_t: QTensor, x_t: QTensor) -> Tensor:
    """`deepgemm.wgrad_gemm`: groups of 128 tokens on both sides -> FP32 [N, K]."""
    if x_t.granularity == "128x128":
        return wgrad_rounded(dy_t, x_t).to(torch.float32)
    left, right = rows_to(whole_rows(dy_t.codes), _ROWS), rows_to(whole_rows(x_t.codes), _ROWS)
    dw = scaled_mm(
        left, right.T, _outer_major(dy_t.scale), ScalingType.BlockWise1x128, _outer_major(x_t.scale),
        ScalingType.BlockWise1x128, output_dtype=torch.float32,
    )
    return dw[: dy_t.codes.shape[0], : x_t.codes.shape[0]].contiguous()


def wgrad_rounded(dy_t: QTensor, x_t: QTensor) -> Tensor:
    """`deepgemm.wgrad_rounded`: `x_t` has a scale for each tile."""
    operand = PreparedFP8(whole_rows(x_t.codes), x_t.scale, x_t.row_sections, x_t.col_sections)
    return fp8_gemm(dy_t, operand, torch.bfloat16)


def wgrad_into(dy_t: QTensor, x_t: QTensor, grad: Tensor) -> None:
    """`kernels.gemm.ops.wgrad_into`, with the sum as a separate pass."""
    add_rounded(grad, wgrad_gemm(dy_t, x_t))
