"""Gated DeltaNet and the gates of Qwen3.5's blocks, with gradients: defined in `reference.py` and `backward.py`.

Legend: `T` tokens, `C` channels, `W` width of the convolution, `Hk`, `dk` key heads and their size, `Hv`, `dv` those
of values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from jetrl.kernels.delta import backward as plain
from jetrl.kernels.delta.parts import DeltaState, HeadSizes, Parts
from jetrl.kernels.dispatch import backend_of
from jetrl.kernels.update.gradient import Gradient, grad_dtype


class _ConvHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, master: Tensor, gradient: Gradient, weight: Tensor, sizes: HeadSizes, parts: Parts
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        ctx.sizes, ctx.parts, ctx.gradient = sizes, parts, gradient
        return backend_of(x).conv_heads(x, weight, sizes, parts, None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dq, dk, dv = grads
        dx, dw = backend_of(x).conv_heads_backward((dq, dk, dv), x, weight, ctx.sizes, ctx.parts)
        given = ctx.gradient.add(lambda kept: kept.add_(dw), lambda: dw) if ctx.needs_input_grad[1] else None
        return dx, given, None, None, None, None


def conv_heads(
    x: Tensor, gradient: Gradient, weight: Tensor, sizes: HeadSizes, parts: Parts, state: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys [T, Hk, dk] and values [T, Hv, dv] of the projection `x` [T, C]: convolution with the published
    `weight` [C, W] (its own goes to `gradient`), SiLU, L2 norms. `state` [rows, R, C] as in `reference`."""
    if torch.is_grad_enabled():
        assert state is None, "gradients are those of packed sequences"
        return _ConvHeads.apply(x, gradient.param, gradient, weight, sizes, parts)
    return backend_of(x).conv_heads(x, weight, sizes, parts, state)


class _Gates(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, a_master: Tensor, dt_master: Tensor, a_log: Tensor, dt_bias: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(logits, a_log, dt_bias)
        ctx.dtypes = grad_dtype(a_master), grad_dtype(dt_master)
        return backend_of(logits).delta_gates(logits, a_log, dt_bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dg, dbeta = grads
        d_logits, d_a, d_dt = plain.gates_grads((dg, dbeta), *ctx.saved_tensors)
        return d_logits, d_a.to(ctx.dtypes[0]), d_dt.to(ctx.dtypes[1]), None, None


def delta_gates(
    logits: Tensor, masters: tuple[Tensor, Tensor], a_log: Tensor, dt_bias: Tensor
) -> tuple[Tensor, Tensor]:
    """Log-decays g and step sizes beta, FP32 [T, Hv], of `logits` [T, 2 Hv]; gradients of `a_log` and `dt_bias` go to
    `masters`."""
    if torch.is_grad_enabled():
        return _Gates.apply(logits, *masters, a_log, dt_bias)
    return backend_of(logits).delta_gates(logits, a_log, dt_bias)


class _DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, parts: Parts) -> Tensor:
        ctx.save_for_backward(q, k, v, g, beta)
        ctx.parts = parts
        return backend_of(q).delta_rule(q, k, v, g, beta, parts, None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, g, beta = ctx.saved_tensors
        return *backend_of(q).delta_rule_backward(grad, q, k, v, g, beta, ctx.parts), None


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, parts: Parts, kept: DeltaState | None = None
) -> Tensor:
    """The gated delta rule: `q`, `k` [T, Hk, dk], `v` [T, Hv, dv], `g`, `beta` FP32 [T, Hv] -> [T, Hv, dv], rounded.

    With `kept`, sequences go on from their states and leave new ones; without it, all begin, and it has gradients.
    """
    if torch.is_grad_enabled():
        assert kept is None, "gradients are those of packed sequences"
        return _DeltaRule.apply(q, k, v, g, beta, parts)
    return backend_of(q).delta_rule(q, k, v, g, beta, parts, kept)


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, master: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, gate, weight)
        ctx.eps, ctx.dtype = eps, grad_dtype(master)
        return backend_of(x).gated_norm(x, gate, weight, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, weight = ctx.saved_tensors
        dx, d_gate, dw = backend_of(x).gated_norm_backward(grad, x, gate, weight, ctx.eps)
        return dx, d_gate, dw.to(ctx.dtype), None, None


def gated_norm(x: Tensor, gate: Tensor, master: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of each head, times silu(gate): `x`, `gate` [T, Hv, dv] -> the same, rounded."""
    if torch.is_grad_enabled():
        return _GatedNorm.apply(x, gate, master, weight, eps)
    return backend_of(x).gated_norm(x, gate, weight, eps)


class _OutputGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor) -> Tensor:
        ctx.save_for_backward(x, gate)
        return backend_of(x).output_gate(x, gate)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, gate = ctx.saved_tensors
        dx, d_gate = backend_of(x).output_gate_backward(grad, x, gate)
        return dx, d_gate


def output_gate(x: Tensor, gate: Tensor) -> Tensor:
    """`x * sigmoid(gate)`, rounded once: what gated attention does to its heads [T, N, H]."""
    if torch.is_grad_enabled():
        return _OutputGate.apply(x, gate)
    return backend_of(x).output_gate(x, gate)
