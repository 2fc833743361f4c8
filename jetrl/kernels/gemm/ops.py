"""GEMMs in NT form, `a [M, K] @ b [N, K].T`: checks, then the backend. Definitions: `reference.py`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jetrl.kernels.dispatch import backend_of
from jetrl.kernels.qtensor import QTensor


def prepare_fp8(q: QTensor, held: Any = None) -> Any:
    """The weight operand of `fp8_gemm` for fprop, in whatever layout the backend reads; made once per publish.

    `held`, the operand made from an earlier value in the same memory, is overwritten where addresses matter (a GPU).
    """
    return backend_of(q.codes).prepare_fp8(q, held)


def prepare_fp8_t(q: QTensor, held: Any = None) -> Any:
    """The same for dgrad: the transposed codes and blocks."""
    return backend_of(q.codes).prepare_fp8_t(q, held)


def prepare_bf16(w: Tensor, held: Any = None) -> Any:
    """The weight operand of `bf16_gemm`."""
    return backend_of(w).prepare_bf16(w, held)


def fp8_gemm(a: QTensor, b: Any, out_dtype: torch.dtype) -> Tensor:
    """fprop and dgrad: activations (1x128) by prepared weights (128x128); FP32 accumulation, rounded to `out_dtype`."""
    return backend_of(a.codes).fp8_gemm(a, b, out_dtype)


def wgrad_rounded(dy_t: QTensor, x_t: QTensor) -> Tensor:
    """`wgrad_gemm` with tiles, as the BF16 values [N, K] to which it is rounded."""
    assert x_t.granularity == "128x128" and dy_t.codes.shape[1] == x_t.codes.shape[1]
    return backend_of(dy_t.codes).wgrad_rounded(dy_t, x_t)


def wgrad_gemm(dy_t: QTensor, x_t: QTensor) -> Tensor:
    """wgrad: `dy_t` [N, T] by `x_t` [K, T], both with groups of 128 tokens -> FP32 [N, K].

    `x_t` has a scale for each row, or for each tile of 128x128; then the result is rounded to BF16.
    """
    if dy_t.codes.shape[1] != x_t.codes.shape[1]:
        raise ValueError(f"token counts differ: {tuple(dy_t.codes.shape)} and {tuple(x_t.codes.shape)}")
    return backend_of(dy_t.codes).wgrad_gemm(dy_t, x_t)


def wgrad_into(dy_t: QTensor, x_t: QTensor, grad: Tensor) -> None:
    """`grad = rounded(grad + wgrad_gemm(dy_t, x_t))` in place: FP32 addition, `grad` [N, K] contiguous FP32 or BF16."""
    _check_wgrad(dy_t.codes.shape[1], x_t.codes.shape[1], (dy_t.codes.shape[0], x_t.codes.shape[0]), grad)
    backend_of(grad).wgrad_into(dy_t, x_t, grad)


def bf16_wgrad(dy: Tensor, x: Tensor) -> Tensor:
    """`dy.T @ x` of `dy` [T, N] and `x` [T, K] (BF16) -> FP32 [N, K]."""
    return backend_of(dy).bf16_wgrad(dy, x)


def bf16_wgrad_into(dy: Tensor, x: Tensor, grad: Tensor) -> None:
    """`grad = rounded(grad + dy.T @ x)` in place, like `wgrad_into`."""
    _check_wgrad(dy.shape[0], x.shape[0], (dy.shape[1], x.shape[1]), grad)
    backend_of(grad).bf16_wgrad_into(dy, x, grad)


def _check_wgrad(tokens: int, other: int, size: tuple[int, int], grad: Tensor) -> None:
    if tokens != other or grad.shape != size or not grad.is_contiguous():
        raise ValueError(
            f"a weight gradient {size} of {tokens} and {other} tokens cannot be added to {tuple(grad.shape)} with "
            f"strides {grad.stride()}"
        )


def bf16_gemm(x: Tensor, w: Any, out_dtype: torch.dtype) -> Tensor:
    """`x` [M, K] by prepared weights [N, K]; a row's bits never depend on the other rows."""
    return backend_of(x).bf16_gemm(x, w, out_dtype)


def coded_gemm(x: Tensor, codes: QTensor, w: Any, out_dtype: torch.dtype) -> Tensor:
    """`bf16_gemm` by `w`, which is made of the values of `codes` [N, K]: its bits, by whichever of the two is read."""
    return backend_of(x).coded_gemm(x, codes, w, out_dtype)
