"""The reference backend: the definitions of `kernels.reference` under the names of `dispatch.OPS`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jetrl.kernels import reference as ref
from jetrl.kernels.attention.reference import attend as attend
from jetrl.kernels.attention.reference import attend_backward as attend_backward
from jetrl.kernels.attention.reference import attend_cached as attend_cached
from jetrl.kernels.attention.reference import write_cache
from jetrl.kernels.attention.state import DecodeState
from jetrl.kernels.experts import reference as reference_moe
from jetrl.kernels.experts.groups import Groups
from jetrl.kernels.experts.reference import combine as combine
from jetrl.kernels.experts.reference import combine_backward as combine_backward
from jetrl.kernels.experts.reference import combine_backward_quantize as combine_backward_quantize
from jetrl.kernels.experts.reference import dispatch as dispatch
from jetrl.kernels.experts.reference import dispatch_backward as dispatch_backward
from jetrl.kernels.experts.reference import dispatch_quantize_t as dispatch_quantize_t
from jetrl.kernels.experts.reference import group as group
from jetrl.kernels.experts.reference import grouped_bf16_dgrad as grouped_bf16_dgrad
from jetrl.kernels.experts.reference import grouped_bf16_gemm as grouped_bf16_gemm
from jetrl.kernels.experts.reference import grouped_bf16_wgrad_into as grouped_bf16_wgrad_into
from jetrl.kernels.experts.reference import grouped_fp8_gemm as grouped_fp8_gemm
from jetrl.kernels.experts.reference import grouped_wgrad_into as grouped_wgrad_into
from jetrl.kernels.experts.reference import quantize_rows_t as quantize_rows_t
from jetrl.kernels.experts.reference import route as route
from jetrl.kernels.experts.reference import route_backward as route_backward
from jetrl.kernels.experts.reference import router_backward as router_backward
from jetrl.kernels.experts.reference import swiglu_quantize_rows as swiglu_quantize_rows
from jetrl.kernels.experts.reference import swiglu_rows as swiglu_rows
from jetrl.kernels.experts.reference import swiglu_rows_backward as swiglu_rows_backward
from jetrl.kernels.experts.reference import swiglu_rows_backward_quantize as swiglu_rows_backward_quantize
from jetrl.kernels.logprob.truncation import Support
from jetrl.kernels.qtensor import QTensor
from jetrl.kernels.reference import PreparedBF16, PreparedFP8, rms_norm, rope, swiglu, swiglu_backward
from jetrl.kernels.reference import adamw_step_ as adamw_step_
from jetrl.kernels.reference import add as add
from jetrl.kernels.reference import exp_weights as exp_weights
from jetrl.kernels.reference import round_heads as round_heads
from jetrl.kernels.update.squares import ROW
from jetrl.types import LayerCache, PagedPlan, VarlenPlan

__all__ = ["add", "advance", "attend", "attend_backward", "rms_norm", "rope", "swiglu", "swiglu_backward"]
_LOGIT_ELEMENTS = 1 << 22  # logits held at once

quantize_act = ref.quantize_1x128
swiglu_backward_act = ref.swiglu_backward_act


def quantize_act_t(x: Tensor, pow2: bool = False, tile: bool = False) -> QTensor:
    return ref.quantize_128x128(x.T.contiguous(), pow2) if tile else ref.quantize_128x1(x, pow2)


def quantize_weight(
    w: Tensor, pow2: bool = False, sections: tuple[int, ...] | None = None, out: QTensor | None = None,
    dtype: torch.dtype | None = None,
) -> QTensor:
    q = ref.quantize_128x128(w.to(dtype or w.dtype), pow2, sections)
    return q if out is None else out.overwrite(q)


def row_squares(x: Tensor, out: Tensor) -> None:
    """`kernels.update.squares.row_squares`, a few million elements at a time."""
    for i, part in enumerate(torch.split(x.reshape(-1), ROW * 1024)):
        rows = torch.nn.functional.pad(part.double().square_(), (0, -len(part) % ROW)).view(-1, ROW)
        out[i * 1024 : i * 1024 + len(rows)] = rows.sum(1)


def add_in_order(total: Tensor, parts: Tensor, first: bool) -> None:
    """`kernels.update.sums.add_in_order`; `first`: what `total` holds does not count."""
    if first:
        total.copy_(parts[0])
        parts = parts[1:]
    for part in parts:
        total.add_(part)


def advance(state: DecodeState, tokens: Tensor, logprobs: Tensor, maxima: Tensor) -> None:
    """`kernels.attention.state.advance`, plainly."""
    step = int(state.count)
    state.drawn[:, step] = torch.stack([tokens, *(x.double().view(torch.int64) for x in (logprobs, maxima))])
    inputs, positions, slots, _, sample_positions = state.integers
    alive = slots >= 0
    inputs.copy_(tokens)
    for column in (positions, sample_positions, state.kv_lengths):
        column += alive.to(column.dtype)
    block = (positions // state.page_size).clamp(max=state.table.shape[1] - 1)
    pages = state.table.gather(1, block[:, None])[:, 0].long()
    slots.copy_(torch.where(alive, pages * state.page_size + positions % state.page_size, slots))
    state.count.copy_((state.count + 1) % state.drawn.shape[1])


# `held`, an operand to overwrite, is for backends whose captured graphs hold addresses.
def prepare_fp8(q: QTensor, held: PreparedFP8 | None = None) -> PreparedFP8:
    return PreparedFP8(q)


def prepare_fp8_t(q: QTensor, held: PreparedFP8 | None = None) -> PreparedFP8:
    return PreparedFP8(ref.transpose(q))


def prepare_bf16(w: Tensor, held: PreparedBF16 | None = None) -> PreparedBF16:
    return PreparedBF16(w)


def prepare_experts_fp8(q: QTensor, count: int, held: Any = None) -> list[PreparedFP8]:
    return reference_moe.prepare_experts_fp8(q, count)


def prepare_experts_fp8_t(q: QTensor, count: int, held: Any = None) -> list[PreparedFP8]:
    return reference_moe.prepare_experts_fp8_t(q, count)


def prepare_experts_bf16(w: Tensor, count: int, held: Any = None) -> list[PreparedBF16]:
    return reference_moe.prepare_experts_bf16(w, count)


def dispatch_quantize(x: Tensor, groups: Groups, pow2: bool) -> QTensor:
    q, at = quantize_act(x, pow2), groups.tokens
    return QTensor(q.codes.view(torch.uint8)[at].view(q.codes.dtype), q.scale[at], "1x128", (len(at),), q.col_sections)


def group_quantize(chosen: Tensor, x: Tensor, num_experts: int, pow2: bool) -> tuple[Groups, QTensor]:
    groups = group(chosen, num_experts)
    return groups, dispatch_quantize(x, groups, pow2)


def fp8_gemm(a: QTensor, b: PreparedFP8, out_dtype: torch.dtype) -> Tensor:
    return ref.fp8_gemm(a, b).to(out_dtype)


wgrad_gemm = ref.wgrad


def wgrad_rounded(dy_t: QTensor, x_t: QTensor) -> Tensor:
    """`wgrad_gemm` with tiles as the BF16 values that it has."""
    return wgrad_gemm(dy_t, x_t).to(torch.bfloat16)


def sum_of_two(x: Tensor, y: Tensor) -> Tensor:
    """`x + y` in FP32."""
    return x.to(torch.float32) + y.to(torch.float32)


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


def rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, eps: float, more: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Gradients of `rms_norm` for x (rounded) and weight (FP32); they pass straight through the inner rounding.

    `more`, another gradient of x, is added to the first.
    """
    inv = ref.inv_rms(x, eps)
    g, n = grad.to(torch.float32), x.to(torch.float32) * inv
    gw = g * weight.to(torch.float32)
    dx = ((gw - n * (gw * n).mean(-1, keepdim=True)) * inv).to(x.dtype)
    return dx if more is None else add(dx, more), (g * n).flatten(0, -2).sum(0)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`r = rounded(x + residual)`; returns (`rms_norm(r)`, `r`)."""
    total = ref.add(x, residual)
    return ref.rms_norm(total, weight, eps), total


def add_rms_norm_quantize(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, pow2: bool
) -> tuple[QTensor, Tensor]:
    total = x if residual is None else add(x, residual)
    return quantize_act(rms_norm(total, weight, eps), pow2), total


def add_rms_norm_kept(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, pow2: bool
) -> tuple[QTensor, Tensor, Tensor]:
    """`add_rms_norm_quantize`, and `inv_rms` of each row, FP32 [T], for `normed_t`."""
    total = ref.add(x, residual)
    return quantize_act(rms_norm(total, weight, eps), pow2), total, ref.inv_rms(total, eps)[:, 0]


def normed_t(x: Tensor, inverses: Tensor, weight: Tensor, pow2: bool, tile: bool) -> QTensor:
    """`quantize_act_t(rms_norm(x, weight, eps), pow2, tile)`, given `inv_rms` of the rows of `x` [T, D], FP32 [T]."""
    normed = (x.to(torch.float32) * inverses[:, None]).to(x.dtype)
    return quantize_act_t((normed.to(torch.float32) * weight.to(torch.float32)).to(x.dtype), pow2, tile)


def swiglu_quantize(gate_up: Tensor, pow2: bool) -> QTensor:
    return quantize_act(swiglu(gate_up), pow2)


def qkv_norm_rope(
    qkv: Tensor, heads: tuple[int, int], head_dim: int, norms: tuple[Tensor, Tensor] | None, eps: float,
    tables: tuple[Tensor, Tensor], positions: Tensor, cache: tuple[LayerCache, Tensor] | None, fp8_kv: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    n, g = heads
    q, k, v = qkv.view(-1, n + 2 * g, head_dim).split((n, g, g), 1)
    if norms is not None:
        q, k = rms_norm(q, norms[0], eps), rms_norm(k, norms[1], eps)
    cos, sin = tables[0][positions], tables[1][positions]
    q, k, v = rope(q, cos, sin), rope(k, cos, sin), v.clone(memory_format=torch.contiguous_format)
    if cache is None:
        return (q, round_heads(k), round_heads(v)) if fp8_kv else (q, k, v)
    layer, slots = cache
    assert fp8_kv == (layer.scales is not None), "the cache has another format than the model's recipe"
    write_cache(k, v, slots, layer)
    return q, layer.keys, layer.values


def qkv_norm_rope_backward(
    grads: tuple[Tensor, Tensor, Tensor], qkv: Tensor, norms: tuple[Tensor, Tensor] | None, eps: float,
    tables: tuple[Tensor, Tensor], positions: Tensor,
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """Gradients of `qkv` (rounded) and of the norms' weights (FP32): those of the ops, one after another."""
    (dq, dk, dv), (_, n, h), d_norms = grads, grads[0].shape, None
    cos, sin = tables[0][positions], tables[1][positions]
    dq, dk = rope_backward(dq, cos, sin), rope_backward(dk, cos, sin)
    if norms is not None:
        q, k = qkv.view(len(qkv), -1, h)[:, : n + dk.shape[1]].split((n, dk.shape[1]), 1)
        (dq, d_q), (dk, d_k) = rms_norm_backward(dq, q, norms[0], eps), rms_norm_backward(dk, k, norms[1], eps)
        d_norms = (d_q, d_k)
    return torch.cat((dq, dk, dv), 1).flatten(1), d_norms


def attend_cached_quantize(q: Tensor, plan: PagedPlan, layer: int, scale: float, pow2: bool) -> QTensor:
    return quantize_act(attend_cached(q, plan, layer, scale).flatten(1), pow2)


def attend_varlen(
    q: Tensor, k: Tensor, v: Tensor, plan: VarlenPlan, scale: float, need_lse: bool
) -> tuple[Tensor, Tensor | None]:
    return attend(q, k, v, plan, 0, scale), None


def logprobs(logits: Tensor, targets: Tensor, temperature: Tensor) -> Tensor:
    z = logits / temperature[:, None]
    _, top, total = ref.exp_weights(z)
    return ref.logprob(z, targets, top, total)


def rope_backward(grad: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The inverse rotation."""
    return ref.rope(grad, cos, -sin)


def head_logits(hidden: Tensor, w: PreparedBF16) -> Tensor:
    return ref.bf16_gemm(hidden, w)


def logprob_entropy(
    hidden: Tensor, w: PreparedBF16, targets: Tensor, temperature: Tensor, keep: bool = False,
    support: Support | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Log-prob of each target and entropy, FP32 [T], by chunks of rows; `temperature` FP32 [T] divides the logits.
    `support` leaves tokens out of the rows' distributions.

    The others are for `logprob_backward`: statistics of the rows and, with `keep`, what it would make again. Both None
    here, where that computes plain FP32 logits and their own sums.
    """
    logprobs, entropies = [], []
    rows = max(1, _LOGIT_ELEMENTS // w.values.shape[0])
    for start in range(0, max(1, len(hidden)), rows):  # without rows once, of no rows
        part = slice(start, start + rows)
        t, temp, z = targets[part], temperature[part], head_logits(hidden[part], w)
        if support is not None:
            support.restrict_(z, part, temp)
        z.div_(temp[:, None])
        weights, top, total = ref.exp_weights(z)
        logprobs.append(ref.logprob(z, t, top, total))
        entropies.append(ref.entropy(z, weights, top, total))
    return torch.cat(logprobs), torch.cat(entropies), None, None


def logprob_backward(
    grad_logprob: Tensor, grad_entropy: Tensor | None, hidden: Tensor, weight: Tensor, targets: Tensor,
    temperature: Tensor, statistics: Tensor | None, residual: Tensor | None, d_weight: Tensor | None,
    support: Support | None = None,
) -> Tensor:
    """The gradient for hidden (rounded); the head weight's is added to `d_weight`. Logits are recomputed in chunks.

    Without an entropy gradient, `r = rounded(p - onehot)` is free of the gradient, which is a factor for each row:

        f = -grad_logprob / temperature          dh = rounded(f * (r @ W))          dW = r.T @ rounded(f * h)

    With one, `dz = (grad_logprob * (onehot - p) - grad_entropy * p * (log p + H)) / temperature`, rounded;
    `dh = rounded(dz @ W)`, `dW = dz.T @ h`. "Rounded" is to the dtype of `hidden`, all else FP32.
    """
    w = weight.to(torch.float32)
    d_hidden, total = torch.empty_like(hidden), torch.zeros_like(w)
    rows = max(1, _LOGIT_ELEMENTS // w.shape[0])
    for start in range(0, hidden.shape[0], rows):
        part = slice(start, start + rows)
        h, temp = hidden[part].to(torch.float32), temperature[part, None]
        z = h @ w.T
        if support is not None:
            support.restrict_(z, part, temperature[part])
        logp = torch.log_softmax(z.div_(temp), -1)
        p = logp.exp()
        if grad_entropy is None:
            factor = -grad_logprob[part, None] / temp
            p.scatter_add_(1, targets[part, None], torch.full_like(factor, -1.0))
            p = p.to(hidden.dtype).to(torch.float32)
            d_hidden[part] = ((p @ w) * factor).to(hidden.dtype)
            if d_weight is not None:
                total.addmm_(p.T, (h * factor).to(hidden.dtype).to(torch.float32))
            continue
        dz = p * -grad_logprob[part, None]
        dz.scatter_add_(1, targets[part, None], grad_logprob[part, None])
        ent = -(p * logp).sum(-1, keepdim=True)
        dz.sub_(p * (logp + ent) * grad_entropy[part, None])
        dz = dz.div_(temp).to(hidden.dtype).to(torch.float32)
        d_hidden[part] = (dz @ w).to(hidden.dtype)
        if d_weight is not None:
            total.addmm_(dz.T, h)
    if d_weight is not None:
        d_weight.add_(total)
    return d_hidden
