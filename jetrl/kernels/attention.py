"""Causal attention over packed sequences (training) or a paged cache (rollout), one reduction order for both.

Definition: `reference_attention.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from jetrl.kernels.dispatch import backend_of
from jetrl.kernels.qtensor import QTensor
from jetrl.types import PagedPlan, VarlenPlan


class _VarlenAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: VarlenPlan, layer: int, scale: float) -> Tensor:
        out, lse = backend_of(q).attend_varlen(q, k, v, plan, scale, True)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.plan, ctx.scale = plan, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = backend_of(q).attend_backward(grad.contiguous(), q, k, v, ctx.plan, ctx.scale, out, lse)
        return dq, dk, dv, None, None, None


def attend_cached(q: Tensor, plan: PagedPlan, layer: int, scale: float) -> Tensor:
    """`attend` for a paged plan whose keys and values `pointwise.qkv_norm_rope` has already put in the cache."""
    return backend_of(q).attend_cached(q, plan, layer, scale)


def attend_cached_quantize(q: Tensor, plan: PagedPlan, layer: int, scale: float, pow2: bool) -> QTensor:
    """`quantize_act` of the heads side by side, [T, N * H]; one kernel where there is one, the same bits."""
    return backend_of(q).attend_cached_quantize(q, plan, layer, scale, pow2)


def attend(q: Tensor, k: Tensor, v: Tensor, plan: VarlenPlan | PagedPlan, layer: int, scale: float) -> Tensor:
    """`q` [T, N, H], `k`, `v` [T, G, H] (after RoPE) -> [T, N, H], rounded once.

    `VarlenPlan`: each sequence attends to itself, differentiable. `PagedPlan`: keys and values are written to the cache
    of `layer`, then each row attends to its sequence's keys up to its own position; no gradient.
    """
    if q.shape[1] % k.shape[1] or q.shape[2] != k.shape[2] or k.shape != v.shape:
        raise ValueError(f"attention shapes do not fit: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}")
    if isinstance(plan, VarlenPlan) and torch.is_grad_enabled():
        return _VarlenAttention.apply(q, k, v, plan, layer, scale)
    return backend_of(q).attend(q, k, v, plan, layer, scale)
