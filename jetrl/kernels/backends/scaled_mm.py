"""The FP8 GEMMs of `deepgemm` by torch's own `scaled_mm` (cuBLASLt): a second implementation, for comparison.

`hopper_scaled_mm` puts them in the place of DeepGEMM's. Slower, and for some shapes a row's bits depend on the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, scaled_mm

from jetrl.kernels.backends.operands import PreparedFP8, gather, left_operand, rows_to, whole_rows
from jetrl.kernels.qtensor import QTensor


def _outer_major(scale: Tensor) -> Tensor:
    """Scales [M, groups] with column stride M exactly."""
    return scale if scale.stride() == (1, scale.shape[0]) else scale.T.contiguous().T


def _block_scales(scale: Tensor) -> Tensor:
    """Scales [blocks(N), blocks(K)] as [blocks(K) up to a multiple of 4, blocks(N)], the first dimension contiguous."""
    out = scale.new_zeros(scale.shape[0], -(-scale.shape[1] // 4) * 4)
    out[:, : scale.shape[1]] = scale
    return out.T


def fp8_gemm(a: QTensor, b: PreparedFP8, out_dtype: torch.dtype) -> Tensor:
    """`deepgemm.fp8_gemm`: activations (1x128) by prepared weights (128x128)."""
    codes, weight = left_operand(a, b), rows_to(b.codes, 128)
    y = scaled_mm(
        codes, weight.T, _outer_major(a.scale), ScalingType.BlockWise1x128, _block_scales(b.scale),
        ScalingType.BlockWise128x128, output_dtype=out_dtype,
    )  # fmt: skip
    return gather(y, b.rows)


def wgrad_gemm(dy_t: QTensor, x_t: QTensor) -> Tensor:
    """`deepgemm.wgrad_gemm`: groups of 128 tokens on both sides -> FP32 [N, K]."""
    return scaled_mm(
        whole_rows(dy_t.codes), whole_rows(x_t.codes).T, _outer_major(dy_t.scale), ScalingType.BlockWise1x128,
        _outer_major(x_t.scale), ScalingType.BlockWise1x128, output_dtype=torch.float32,
    )  # fmt: skip
