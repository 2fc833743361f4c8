"""The GEMMs of linears on a CPU: those of `kernels.reference`, rounded to what the caller asks for."""

from __future__ import annotations

import torch
from torch import Tensor

from jetrl.kernels import reference as ref
from jetrl.kernels.qtensor import QTensor
from jetrl.kernels.reference import PreparedBF16, PreparedFP8

wgrad_gemm = ref.wgrad


# `held`, an operand to overwrite, is for backends whose captured graphs hold addresses.
def prepare_fp8(q: QTensor, held: PreparedFP8 | None = None) -> PreparedFP8:
    return PreparedFP8(q)


def prepare_fp8_t(q: QTensor, held: PreparedFP8 | None = None) -> PreparedFP8:
    return PreparedFP8(ref.transpose(q))


def prepare_bf16(w: Tensor, held: PreparedBF16 | None = None) -> PreparedBF16:
    return PreparedBF16(w)


def fp8_gemm(a: QTensor, b: PreparedFP8, out_dtype: torch.dtype) -> Tensor:
    return ref.fp8_gemm(a, b).to(out_dtype)


def wgrad_rounded(dy_t: QTensor, x_t: QTensor) -> Tensor:
    """`wgrad_gemm` with tiles as the BF16 values that it has."""
    return wgrad_gemm(dy_t, x_t).to(torch.bfloat16)


def wgrad_into(dy_t: QTensor, x_t: QTensor, grad: Tensor) -> None:
    grad.add_(wgrad_gemm(dy_t, x_t))  # BF16 plus FP32 is computed in FP32


def bf16_gemm(x: Tensor, w: PreparedBF16, out_dtype: torch.dtype) -> Tensor:
    return ref.bf16_gemm(x, w).to(out_dtype)


def coded_gemm(x: Tensor, codes: QTensor, w: PreparedBF16, out_dtype: torch.dtype) -> Tensor:
    return bf16_gemm(x, w, out_dtype)


def bf16_dgrad(dy: Tensor, w: Tensor) -> Tensor:
    """`dy @ w` in FP32, rounded. Only reproducible, not batch-invariant: gradients are not part of parity."""
    return (dy.to(torch.float32) @ w.to(torch.float32)).to(dy.dtype)


def bf16_wgrad(dy: Tensor, x: Tensor) -> Tensor:
    return dy.to(torch.float32).T @ x.to(torch.float32)


def bf16_wgrad_into(dy: Tensor, x: Tensor, grad: Tensor) -> None:
    grad.add_(bf16_wgrad(dy, x))
