"""Ops of mixture-of-experts layers with their gradients: checks, then the backend. Definitions: `reference.py`.

`group` gives every (token, rank) a row of the grouped matrices [R, ...], in which an expert's rows lie together
(`groups.Groups`). A backend may pad groups: R is then a bound that the host knows, and nobody waits for the counts.
`dispatch`, `swiglu` and the gradients fill padding with zeros, which change no scale and no sum; ops without gradients
may leave it as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from jetrl.kernels.dispatch import backend_of, experts_backend_of
from jetrl.kernels.experts.groups import Groups
from jetrl.kernels.experts.reference import Choice
from jetrl.kernels.qtensor import QTensor
from jetrl.kernels.update.gradient import Gradient


class _Router(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, master: Tensor, gradient: Gradient, weight: Tensor, operand: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.gradient = gradient
        return backend_of(x).bf16_gemm(x, operand, torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_logits: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        x, weight = ctx.saved_tensors
        dx, dw = backend_of(x).router_backward(d_logits.contiguous(), x, weight)
        given = ctx.gradient.add(lambda kept: kept.add_(dw), lambda: dw) if ctx.needs_input_grad[1] else None
        return dx, given, None, None, None


def router_logits(x: Tensor, gradient: Gradient, weight: Tensor, operand: Any) -> Tensor:
    """FP32 logits [T, E] of `x` [T, D] by the published `weight` [E, D], prepared as `operand`: BF16 in every recipe.

    The gradient of the logits stays FP32; the weight's goes to `gradient`.
    """
    if not torch.is_grad_enabled():
        return backend_of(x).bf16_gemm(x, operand, torch.float32)
    return _Router.apply(x, gradient.param, gradient, weight, operand)


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, per_token: int, normalized: bool) -> tuple[Tensor, Tensor]:
        chosen, weights = experts_backend_of(logits).route(logits, per_token, normalized)
        ctx.save_for_backward(logits, chosen, weights)
        ctx.normalized = normalized
        ctx.mark_non_differentiable(chosen)
        return chosen, weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Any, d_weights: Tensor) -> tuple[Tensor, None, None]:
        logits, chosen, weights = ctx.saved_tensors
        back = experts_backend_of(logits).route_backward
        return back(d_weights.contiguous(), logits, chosen, weights, ctx.normalized), None, None


def route(logits: Tensor, per_token: int, normalized: bool) -> tuple[Tensor, Tensor]:
    """`logits` [T, E] FP32 -> the `per_token` chosen experts [T, k] int64 by rank, and their weights [T, k] FP32."""
    if not 1 <= per_token <= logits.shape[-1]:
        raise ValueError(f"{per_token} experts for each token, of {logits.shape[-1]}")
    return _Route.apply(logits, per_token, normalized)


class _RouteSigmoid(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, bias: Tensor, choice: Choice) -> tuple[Tensor, Tensor]:
        chosen, weights = experts_backend_of(logits).route_sigmoid(logits, bias, choice)
        ctx.save_for_backward(logits, chosen, weights)
        ctx.choice = choice
        ctx.mark_non_differentiable(chosen)
        return chosen, weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Any, d_weights: Tensor) -> tuple[Tensor, None, None]:
        logits, chosen, weights = ctx.saved_tensors
        back = experts_backend_of(logits).route_sigmoid_backward
        return back(d_weights.contiguous(), logits, chosen, weights, ctx.choice), None, None


def route_sigmoid(logits: Tensor, bias: Tensor, choice: Choice) -> tuple[Tensor, Tensor]:
    """`route` as DeepSeek-V3 has it: `logits` [T, E] and `bias` [E], both FP32; the bias has no gradient."""
    experts, groups = logits.shape[-1], choice.groups
    if experts % groups or not choice.per_token <= experts // groups * choice.kept_groups:
        raise ValueError(f"{choice} of {experts} experts")
    return _RouteSigmoid.apply(logits, bias, choice)


def group(chosen: Tensor, num_experts: int) -> Groups:
    """Rows for the choices [T, k], expert after expert."""
    return experts_backend_of(chosen).group(chosen, num_experts)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: Groups) -> Tensor:
        ctx.groups = groups
        return experts_backend_of(x).dispatch(x, groups)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_rows: Tensor) -> tuple[Tensor, None]:
        return experts_backend_of(d_rows).dispatch_backward(d_rows.contiguous(), ctx.groups), None


def dispatch(x: Tensor, groups: Groups) -> Tensor:
    """A copy of a token's row for each of its experts: `x` [T, D] -> [R, D]."""
    return _Dispatch.apply(x, groups)


def dispatch_quantize(x: Tensor, groups: Groups, pow2: bool) -> QTensor:
    """`quantize_act(dispatch(x, groups))`; each token is quantized once."""
    assert not torch.is_grad_enabled()
    return experts_backend_of(x).dispatch_quantize(x, groups, pow2)


def group_quantize(chosen: Tensor, x: Tensor, num_experts: int, pow2: bool) -> tuple[Groups, QTensor]:
    """`group`, then `dispatch_quantize`. A backend may leave `tokens` of the groups empty: for layers whose GEMMs are
    all FP8."""
    assert not torch.is_grad_enabled()
    return experts_backend_of(x).group_quantize(chosen, x, num_experts, pow2)


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, weights: Tensor, groups: Groups, shared: Tensor | None) -> Tensor:
        ctx.save_for_backward(y, weights)
        ctx.groups = groups
        return experts_backend_of(y).combine(y, weights, groups, shared)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None, Tensor | None]:
        y, weights = ctx.saved_tensors
        of_experts = experts_backend_of(y).combine_backward(dy.contiguous(), y, weights, ctx.groups)
        return *of_experts, None, dy if ctx.needs_input_grad[3] else None


def combine(y: Tensor, weights: Tensor, groups: Groups, shared: Tensor | None = None) -> Tensor:
    """Each token's rows of `y` [R, D], weighted [T, k] and added in FP32 by rank, then that of `shared` [T, D], rounded
    once -> [T, D]."""
    return _Combine.apply(y, weights, groups, shared)


class _GateRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, logits: Tensor) -> Tensor:
        ctx.save_for_backward(x, logits)
        return experts_backend_of(x).gate_rows(x, logits)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, logits = ctx.saved_tensors
        dy, sig = dy.to(torch.float32), logits.sigmoid()
        d_sig = (dy * x.to(torch.float32)).sum(-1, keepdim=True)
        return (dy * sig).to(x.dtype), d_sig * (sig * (1.0 - sig))


def gate_rows(x: Tensor, logits: Tensor) -> Tensor:
    """`x * sigmoid(logit)`, rounded once, of the rows of `x` [T, D]; `logits` [T, 1] FP32."""
    return _GateRows.apply(x, logits)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, groups: Groups) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.groups = groups
        return experts_backend_of(gate_up).swiglu_rows(gate_up, groups)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (gate_up,) = ctx.saved_tensors
        return experts_backend_of(grad).swiglu_rows_backward(grad.contiguous(), gate_up, ctx.groups), None


def swiglu(gate_up: Tensor, groups: Groups) -> Tensor:
    """`pointwise.ops.swiglu` of `gate_up` [R, 2F] -> [R, F] in the rows of tokens; padding is filled with zeros."""
    return _SwiGLU.apply(gate_up, groups)


def swiglu_quantize(gate_up: Tensor, groups: Groups, pow2: bool) -> QTensor:
    """`pointwise.ops.swiglu_quantize` of `gate_up` [R, 2F] in the rows of tokens; others may be left as they are."""
    assert not torch.is_grad_enabled()
    return experts_backend_of(gate_up).swiglu_quantize_rows(gate_up, groups, pow2)


# ---- GEMMs of experts -----------------------------------------------------------------------------------------------


def prepare_fp8(q: QTensor, count: int, held: Any = None) -> Any:
    """The operand of `grouped_fp8_gemm`: `count` matrices, one below the other. `held`: see `gemm.ops.prepare_fp8`."""
    return experts_backend_of(q.codes).prepare_experts_fp8(q, count, held)


def prepare_fp8_t(q: QTensor, count: int, held: Any = None) -> Any:
    """The same for dgrad: each matrix transposed."""
    return experts_backend_of(q.codes).prepare_experts_fp8_t(q, count, held)


def prepare_bf16(w: Tensor, count: int, held: Any = None) -> Any:
    """The operand of `grouped_bf16_gemm`."""
    return experts_backend_of(w).prepare_experts_bf16(w, count, held)


def grouped_fp8_gemm(a: QTensor, b: Any, groups: Groups, out_dtype: torch.dtype) -> Tensor:
    """Rows of `a` [R, K] (1x128) by their experts' matrices [N, K] (128x128) -> [R, N]: bits of `gemm.ops.fp8_gemm`."""
    return experts_backend_of(a.codes).grouped_fp8_gemm(a, b, groups, out_dtype)


def grouped_bf16_gemm(x: Tensor, w: Any, groups: Groups, out_dtype: torch.dtype) -> Tensor:
    """Each row of `x` [R, K] by its expert's matrix [N, K] -> [R, N]: the bits of `gemm.ops.bf16_gemm`."""
    return experts_backend_of(x).grouped_bf16_gemm(x, w, groups, out_dtype)


def grouped_bf16_dgrad(dy: Tensor, w: Tensor, groups: Groups) -> Tensor:
    """`dy` [R, N] by the experts' matrices `w` [E * N, K] -> [R, K], FP32 sums, rounded."""
    return experts_backend_of(dy).grouped_bf16_dgrad(dy, w, groups)


def quantize_rows_t(x: Tensor, groups: Groups, pow2: bool) -> tuple[Tensor, Tensor]:
    """Codes and scales of `x.T`, along rows, in groups of 128 that restart with every expert: an operand of wgrad."""
    return experts_backend_of(x).quantize_rows_t(x, groups, pow2)


def dispatch_quantize_t(x: Tensor, groups: Groups, pow2: bool) -> tuple[Tensor, Tensor]:
    """`quantize_rows_t(dispatch(x, groups))` of `x` [T, D]; no row is copied."""
    return experts_backend_of(x).dispatch_quantize_t(x, groups, pow2)


def combine_backward_quantize(
    dy: Tensor, y: Tensor, weights: Tensor, groups: Groups, pow2: bool, pow2_t: bool
) -> tuple[QTensor, tuple[Tensor, Tensor], Tensor]:
    """The gradient of `combine` for `y` [R, D] by `quantize_act` and by `quantize_rows_t`, and for the weights."""
    return experts_backend_of(dy).combine_backward_quantize(dy, y, weights, groups, pow2, pow2_t)


def swiglu_backward_quantize(
    grad: Tensor, gate_up: Tensor, groups: Groups, pow2: bool, pow2_t: bool
) -> tuple[QTensor, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The gradient of `swiglu` [R, 2F] by `quantize_act` (sections of F) and by `quantize_rows_t`, and its output
    [R, F] again by `quantize_rows_t`."""
    return experts_backend_of(grad).swiglu_rows_backward_quantize(grad, gate_up, groups, pow2, pow2_t)


def grouped_wgrad_into(
    dy_t: tuple[Tensor, Tensor], x_t: tuple[Tensor, Tensor], groups: Groups, grad: Tensor
) -> None:
    """`grad = rounded(grad + dW)` in place, expert by expert over its own rows; `grad` [E * N, K] FP32 or BF16."""
    _check_wgrad(len(dy_t[0]), len(x_t[0]), groups, grad)
    experts_backend_of(grad).grouped_wgrad_into(dy_t, x_t, groups, grad)


def grouped_bf16_wgrad_into(dy: Tensor, x: Tensor, groups: Groups, grad: Tensor) -> None:
    """The same for BF16 operands `dy` [R, N] and `x` [R, K]."""
    _check_wgrad(dy.shape[1], x.shape[1], groups, grad)
    experts_backend_of(grad).grouped_bf16_wgrad_into(dy, x, groups, grad)


def _check_wgrad(rows: int, columns: int, groups: Groups, grad: Tensor) -> None:
    size = (rows * len(groups.counts), columns)
    if grad.shape != size or not grad.is_contiguous():
        raise ValueError(
            f"a weight gradient {size} of {len(groups.counts)} experts cannot be added to {tuple(grad.shape)} with "
            f"strides {grad.stride()}"
        )
