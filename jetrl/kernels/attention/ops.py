"""Causal attention over packed sequences (training) or a paged cache (rollout), one reduction order for both.

Definition: `reference.py`.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from jetrl.kernels.dispatch import backend_of
from jetrl.kernels.pointwise import ops as pointwise
from jetrl.kernels.qtensor import QTensor
from jetrl.kernels.update.gradient import grad_dtype
from jetrl.types import PagedPlan, SharedKeys, VarlenPlan


def varlen_plan(cu_seqlens: Tensor, lengths: tuple[int, ...], stems: tuple[int, ...] = ()) -> VarlenPlan:
    """The plan of packed parts, of which part i goes on from part `stems[i]` (-1: from nothing; none: whole sequences).

    A stem comes before its parts and has no stem itself. The plan's tensors are on `cu_seqlens`' device.
    """
    if all(stem < 0 for stem in stems):
        return VarlenPlan(cu_seqlens, lengths)
    starts, device = [0, *accumulate(lengths)], cu_seqlens.device
    rows, own, ends = [], [], [0]
    later: list[tuple[list[Tensor], list[Tensor]]] = []
    seen = [0] * len(stems)
    for part, (stem, length) in enumerate(zip(stems, lengths, strict=True)):
        first = ends[-1]
        if stem >= 0:
            if stem >= part or stems[stem] >= 0:
                raise ValueError(f"part {part} cannot go on from part {stem}, which is later or has a stem itself")
            copied = torch.arange(starts[stem], starts[stem + 1])
            later += [([], [])] if seen[stem] == len(later) else []
            for held, values in zip(later[seen[stem]], (copied, copied - starts[stem] + first), strict=True):
                held.append(values)
            seen[stem] += 1
            rows.append(copied)
            first += lengths[stem]
        rows.append(torch.arange(starts[part], starts[part + 1]))
        own.append(torch.arange(first, first + length))
        ends.append(first + length)
    keys = SharedKeys(
        torch.cat(rows).to(device), torch.tensor(ends, dtype=torch.int32, device=device),
        tuple(end - start for start, end in zip(ends[:-1], ends[1:], strict=True)), torch.cat(own).to(device),
        tuple((torch.cat(of).to(device), torch.cat(places).to(device)) for of, places in later),
    )
    return VarlenPlan(cu_seqlens, lengths, keys)


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


class Heads(NamedTuple):
    """How q, k and v come of the fused projection: see `pointwise.ops.norm_rope`.

    `columns` [(N + 2G) * H], `order` [H]: where the columns that this reads are in a wider projection, and in which
    order those of a query or key head are, as are the weights of `norms`. None: they are the projection's own.
    """

    heads: tuple[int, int]
    head_dim: int
    norms: tuple[Tensor, Tensor] | None
    eps: float
    tables: tuple[Tensor, Tensor]
    positions: Tensor
    fp8_kv: bool
    columns: Tensor | None = None
    order: Tensor | None = None


class _HeadsAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, q_master: Tensor | None, k_master: Tensor | None, heads: Heads, plan: VarlenPlan,
        scale: float,
    ) -> Tensor:
        out, lse = backend_of(qkv).attend_varlen(*_made(qkv, heads), plan, scale, True)
        ctx.save_for_backward(qkv, out, lse)
        ctx.heads, ctx.plan, ctx.scale = heads, plan, scale
        ctx.dtypes = [grad_dtype(m) for m in (q_master, k_master) if m is not None]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        qkv, out, lse = ctx.saved_tensors
        ops, heads = backend_of(qkv), ctx.heads
        grads = ops.attend_backward(grad.contiguous(), *_made(qkv, heads), ctx.plan, ctx.scale, out, lse)
        d_qkv, d_norms = ops.qkv_norm_rope_backward(
            grads, _chosen(qkv, heads), heads.norms, heads.eps, heads.tables, heads.positions
        )
        if heads.columns is not None and heads.order is not None:  # each column is read once: nothing is added
            d_qkv = torch.zeros_like(qkv).index_copy_(1, heads.columns, d_qkv)
            d_norms = d_norms and tuple(torch.empty_like(d).index_copy_(0, heads.order, d) for d in d_norms)
        d_q, d_k = (d.to(t) for d, t in zip(d_norms, ctx.dtypes, strict=True)) if d_norms is not None else (None, None)
        return d_qkv, d_q, d_k, None, None, None


def _made(qkv: Tensor, of: Heads) -> tuple[Tensor, Tensor, Tensor]:
    return backend_of(qkv).qkv_norm_rope(
        _chosen(qkv, of), of.heads, of.head_dim, of.norms, of.eps, of.tables, of.positions, None, of.fp8_kv
    )


def _chosen(qkv: Tensor, of: Heads) -> Tensor:
    return qkv if of.columns is None else qkv.index_select(1, of.columns)


def attend_heads(
    qkv: Tensor, masters: tuple[Tensor, Tensor] | None, heads: Heads, plan: VarlenPlan, layer: int, scale: float
) -> Tensor:
    """`norm_rope_attend` with the same bits, which makes q, k and v again in the backward pass instead of keeping them.
    """
    q_master, k_master = masters or (None, None)
    return _HeadsAttention.apply(qkv, q_master, k_master, heads, plan, scale)


def norm_rope_attend(
    qkv: Tensor, masters: tuple[Tensor, Tensor] | None, heads: Heads, plan: VarlenPlan, layer: int, scale: float
) -> Tensor:
    """`attend(*pointwise.norm_rope(qkv, ...))`: `qkv` [T, (N + 2G) * H] -> [T, N, H], with gradients."""
    q, k, v = pointwise.norm_rope(
        qkv, heads.heads, heads.head_dim, masters, heads.norms, heads.eps, heads.tables, heads.positions, heads.fp8_kv
    )
    return attend(q, k, v, plan, layer, scale)


def attend_cached(q: Tensor, plan: PagedPlan, layer: int, scale: float) -> Tensor:
    """`attend` for a paged plan whose keys and values `pointwise.ops.qkv_norm_rope` has already put in the cache."""
    return backend_of(q).attend_cached(q, plan, layer, scale)


def attend_cached_quantize(q: Tensor, plan: PagedPlan, layer: int, scale: float, pow2: bool) -> QTensor:
    """`quantize_act` of the heads side by side, [T, N * H]; one kernel where there is one, the same bits."""
    return backend_of(q).attend_cached_quantize(q, plan, layer, scale, pow2)


def attend(q: Tensor, k: Tensor, v: Tensor, plan: VarlenPlan | PagedPlan, layer: int, scale: float) -> Tensor:
    """`q` [T, N, H], `k`, `v` [T, G, H] (after RoPE) -> [T, N, H], rounded once.

    `VarlenPlan`: each part attends to its stem and to itself, differentiable. `PagedPlan`: keys and values are written
    to the cache of `layer`, then each row attends to its sequence's keys up to its own position; no gradient.
    """
    if q.shape[1] % k.shape[1] or q.shape[2] != k.shape[2] or k.shape != v.shape:
        raise ValueError(f"attention shapes do not fit: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}")
    if isinstance(plan, VarlenPlan) and torch.is_grad_enabled():
        return _VarlenAttention.apply(q, k, v, plan, layer, scale)
    return backend_of(q).attend(q, k, v, plan, layer, scale)
