"""The definition of every op of mixture-of-experts layers, and their CPU backend. Legend: `T` tokens, `E` experts, `k`
experts of a token, `R` rows (T * k on a CPU), `D` model, `F` an expert's feed-forward; in GEMMs `N, K`.

A token's forward result depends on that token alone: its logits choose its experts, each row meets one expert's
matrix by the bits of `reference.fp8_gemm` or `bf16_gemm`, and `combine` adds its k rows in the order of rank. Which
other rows lie in an expert's group, and where, changes nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from jetrl.kernels import reference as ref
from jetrl.kernels.experts.groups import Groups
from jetrl.kernels.qtensor import QTensor
from jetrl.kernels.quantize.reference import quantize_act
from jetrl.kernels.reference import PreparedBF16, PreparedFP8


def route(logits: Tensor, per_token: int, normalized: bool) -> tuple[Tensor, Tensor]:
    """`logits` [T, E] FP32 -> the chosen experts [T, k] int64, largest logit first, and their weights [T, k] FP32.

    Of equal logits the lower index comes first. With n_e the integers of `reference.exp_weights` (the numerators of
    the softmax), weight_j = n_j / sum over e of n_e, and `normalized` n_j / sum over the k chosen. Sums of integers
    are exact; the one float64 division is rounded to FP32. NaN or infinite logits give NaN weights.
    """
    chosen = logits.sort(dim=-1, descending=True, stable=True).indices[:, :per_token].contiguous()
    numerators, _, total = ref.exp_weights(logits)
    kept = numerators.gather(-1, chosen)
    total = kept.sum(-1) if normalized else total
    return chosen, (kept / total[:, None]).to(torch.float32)


def route_backward(d_weights: Tensor, logits: Tensor, chosen: Tensor, weights: Tensor, normalized: bool) -> Tensor:
    """Gradient of `route` for the logits [T, E], in FP32. With s_t = sum over j of weight_j * d_j:

        normalized:  dz_e = weight_j * (d_j - s)  where e is the j-th choice, 0 elsewhere
        else:        dz_e = p_e * (d_e - s)       p the softmax, d_e = 0 where e was not chosen

    The choice itself has no gradient.
    """
    mean = (weights * d_weights).sum(-1, keepdim=True)
    if normalized:
        return torch.zeros_like(logits).scatter_(-1, chosen, weights * (d_weights - mean))
    spread = torch.zeros_like(logits).scatter_(-1, chosen, d_weights)
    return torch.softmax(logits, -1) * (spread - mean)


class Choice(NamedTuple):
    """How `route_sigmoid` chooses and weighs k experts of a token."""

    per_token: int
    groups: int
    kept_groups: int
    normalized: bool
    scaling: float


def route_sigmoid(logits: Tensor, bias: Tensor, choice: Choice) -> tuple[Tensor, Tensor]:
    """`logits` [T, E] and `bias` [E], FP32 -> the chosen experts [T, k] int64, largest key first, and their weights.

        s_e = 1 / (1 + exp(-z_e))       `reference.sigmoid`, FP32
        b_e = s_e + bias_e              the key: one FP32 addition; of equal keys the lower index comes first
        g   = its two largest keys added in FP32: that of a group; the largest are kept, of equal ones the lower index
        w_j = f32(s_j / (sum of the s_j by rank + 1e-20) * scaling)    float64, rounded once; else f32(s_j * scaling)
    """
    s = ref.sigmoid(logits)
    keys = s + bias
    if choice.groups > 1:
        two = keys.unflatten(-1, (choice.groups, -1)).topk(min(2, keys.shape[-1] // choice.groups), -1).values
        best = two.sum(-1).sort(dim=-1, descending=True, stable=True).indices[:, : choice.kept_groups]
        kept = torch.zeros_like(two[..., 0], dtype=torch.bool).scatter_(1, best, True)
        keys = keys.masked_fill(~kept.repeat_interleave(keys.shape[-1] // choice.groups, 1), float("-inf"))
    chosen = keys.sort(dim=-1, descending=True, stable=True).indices[:, : choice.per_token].contiguous()
    w = s.gather(1, chosen).to(torch.float64)
    if choice.normalized:
        w = w / (_by_rank(w) + 1e-20)[:, None]
    return chosen, (w * choice.scaling).to(torch.float32)


def _by_rank(w: Tensor) -> Tensor:
    """The sum over a token's choices, from the first to the last."""
    total = w[:, 0]
    for j in range(1, w.shape[1]):
        total = total + w[:, j]
    return total


def route_sigmoid_backward(
    d_weights: Tensor, logits: Tensor, chosen: Tensor, weights: Tensor, choice: Choice
) -> Tensor:
    """Gradient of `route_sigmoid` for the logits [T, E], in FP32; 0 where an expert was not chosen. The choice itself,
    and so the bias, has none. With S the sum of the s_j:

        normalized:  ds_j = (scaling d_j - sum over i of w_i d_i) / S        else ds_j = scaling d_j
        dz_j = ds_j s_j (1 - s_j)
    """
    s = ref.sigmoid(logits.gather(1, chosen))
    ds = d_weights * choice.scaling
    if choice.normalized:
        ds = (ds - (weights * d_weights).sum(-1, keepdim=True)) / (s.sum(-1, keepdim=True) + 1e-20)
    return torch.zeros_like(logits).scatter_(-1, chosen, ds * s * (1.0 - s))


def router_backward(d_logits: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the router's GEMM from FP32 `d_logits` [T, E]: of x [T, D], rounded, and of w [E, D], FP32."""
    return (d_logits @ w.to(torch.float32)).to(x.dtype), d_logits.T @ x.to(torch.float32)


def group(chosen: Tensor, num_experts: int) -> Groups:
    """Rows for every choice [T, k]: expert after expert, within an expert in the order of tokens, without padding."""
    flat = chosen.reshape(-1)
    order = flat.argsort(stable=True)
    rows = torch.empty_like(order)
    rows[order] = torch.arange(len(order), device=order.device)
    counts = torch.bincount(flat, minlength=num_experts)
    starts = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
    return Groups(rows.view(chosen.shape), order // chosen.shape[1], starts, counts)


def rows_of(groups: Groups) -> list[tuple[int, slice]]:
    """The experts that have rows, with these."""
    starts, counts = groups.starts.tolist(), groups.counts.tolist()
    return [(e, slice(starts[e], starts[e] + n)) for e, n in enumerate(counts) if n]


# ---- rows there and back --------------------------------------------------------------------------------------------


def dispatch(x: Tensor, groups: Groups) -> Tensor:
    """`x` [T, D] -> [R, D], the token of each row."""
    return x[groups.tokens]


def dispatch_backward(d_rows: Tensor, groups: Groups) -> Tensor:
    """The gradient [T, D]: each token's k rows added in FP32 in the order of rank, rounded once."""
    total = d_rows[groups.rows[:, 0]].to(torch.float32)
    for j in range(1, groups.rows.shape[1]):
        total = total + d_rows[groups.rows[:, j]].to(torch.float32)
    return total.to(d_rows.dtype)


def combine(y: Tensor, weights: Tensor, groups: Groups, shared: Tensor | None = None) -> Tensor:
    """`rounded(((w_0 y_0 + w_1 y_1) + w_2 y_2) + ...)` [T, D] over a token's k rows of `y` [R, D], by rank, and then
    the row of `shared` [T, D].

    FP32 products and sums, each an operation of its own.
    """
    total = weights[:, :1] * y[groups.rows[:, 0]].to(torch.float32)
    for j in range(1, groups.rows.shape[1]):
        total = total + weights[:, j : j + 1] * y[groups.rows[:, j]].to(torch.float32)
    return (total if shared is None else total + shared.to(torch.float32)).to(y.dtype)


def combine_backward(dy: Tensor, y: Tensor, weights: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
    """Gradients of `combine`: of y [R, D], `rounded(w * dy)`, and of the weights [T, k], FP32 products and sums."""
    dy32, d_rows = dy.to(torch.float32), torch.zeros_like(y)
    d_weights = torch.empty_like(weights)
    for j in range(groups.rows.shape[1]):
        at = groups.rows[:, j]
        d_rows[at] = (weights[:, j : j + 1] * dy32).to(y.dtype)
        d_weights[:, j] = (dy32 * y[at].to(torch.float32)).sum(-1)
    return d_rows, d_weights


def gate_rows(x: Tensor, logits: Tensor) -> Tensor:
    """`rounded(x * sigmoid(logit))` of each row of `x` [T, D], `logits` [T, 1] FP32: `reference.sigmoid`, one FP32
    product."""
    return (x.to(torch.float32) * ref.sigmoid(logits)).to(x.dtype)


def swiglu_quantize_rows(gate_up: Tensor, groups: Groups, pow2: bool) -> QTensor:
    """`quantize_1x128(swiglu(gate_up))` of `gate_up` [R, 2F], in the rows that are tokens'."""
    return ref.quantize_1x128(ref.swiglu(gate_up), pow2)


def swiglu_rows(gate_up: Tensor, groups: Groups) -> Tensor:
    """`reference.swiglu` of `gate_up` [R, 2F], in the rows that are tokens'."""
    return ref.swiglu(gate_up)


def swiglu_rows_backward(grad: Tensor, gate_up: Tensor, groups: Groups) -> Tensor:
    """`reference.swiglu_backward` [R, 2F] of `grad` [R, F], in the rows that are tokens'."""
    return ref.swiglu_backward(grad, gate_up)


# ---- GEMMs of experts -----------------------------------------------------------------------------------------------


def expert_of(q: QTensor, expert: int, count: int) -> QTensor:
    """One expert's matrix of `count` that lie one below the other, as a view: its blocks begin with its rows."""
    sections = q.row_sections[: len(q.row_sections) // count]
    assert sections * count == q.row_sections, "the matrices of experts have the same sections"
    rows, blocks = q.codes.shape[0] // count, q.scale.shape[0] // count
    codes, scale = q.codes[expert * rows : (expert + 1) * rows], q.scale[expert * blocks : (expert + 1) * blocks]
    return QTensor(codes, scale, q.granularity, sections, q.col_sections)


def prepare_experts_fp8(q: QTensor, count: int, held: Any = None) -> list[PreparedFP8]:
    """The operands of `grouped_fp8_gemm`, expert by expert; `held`, one to overwrite, is for captured graphs."""
    return [PreparedFP8(expert_of(q, e, count)) for e in range(count)]


def prepare_experts_fp8_t(q: QTensor, count: int, held: Any = None) -> list[PreparedFP8]:
    """The same for dgrad: each expert's matrix transposed, with the same codes and blocks."""
    return [PreparedFP8(ref.transpose(expert_of(q, e, count))) for e in range(count)]


def prepare_experts_bf16(w: Tensor, count: int, held: Any = None) -> list[PreparedBF16]:
    """The operands of `grouped_bf16_gemm`, expert by expert."""
    return [PreparedBF16(part) for part in w.chunk(count)]


def grouped_fp8_gemm(a: QTensor, b: list[PreparedFP8], groups: Groups, out_dtype: torch.dtype) -> Tensor:
    """`reference.fp8_gemm` of each expert's rows of `a` [R, K] with its matrix [N, K] -> [R, N], rounded once."""
    out = torch.empty(a.codes.shape[0], b[0].values.shape[0], dtype=out_dtype)
    for expert, at in rows_of(groups):
        part = QTensor(a.codes[at], a.scale[at], "1x128", (at.stop - at.start,), a.col_sections)
        out[at] = ref.fp8_gemm(part, b[expert]).to(out_dtype)
    return out


def grouped_bf16_gemm(x: Tensor, w: list[PreparedBF16], groups: Groups, out_dtype: torch.dtype) -> Tensor:
    """`reference.bf16_gemm` of each expert's rows of `x` [R, K] with its matrix [N, K] -> [R, N], rounded once."""
    out = torch.empty(x.shape[0], w[0].values.shape[0], dtype=out_dtype)
    for expert, at in rows_of(groups):
        out[at] = ref.bf16_gemm(x[at], w[expert]).to(out_dtype)
    return out


def grouped_bf16_dgrad(dy: Tensor, w: Tensor, groups: Groups) -> Tensor:
    """`dy @ W_e` of each expert's rows, `w` [E * N, K] BF16, in FP32, rounded; reproducible, as `bf16_dgrad` is."""
    dx = torch.empty(dy.shape[0], w.shape[1], dtype=dy.dtype)
    matrices = w.chunk(len(groups.counts))
    for expert, at in rows_of(groups):
        dx[at] = (dy[at].to(torch.float32) @ matrices[expert].to(torch.float32)).to(dy.dtype)
    return dx


def quantize_rows_t(x: Tensor, groups: Groups, pow2: bool) -> tuple[Tensor, Tensor]:
    """`x` [R, C] along its rows: codes [C, R] of `x.T` and scales [C, B], one for each column and group of 128 rows.

    Groups restart with every expert, the last one of an expert may be smaller; experts without rows have none.
    """
    sections = tuple(n for n in groups.counts.tolist() if n)
    q = ref.quantize_1x128(x.T.contiguous(), pow2, sections)
    return q.codes, q.scale


def dispatch_quantize_t(x: Tensor, groups: Groups, pow2: bool) -> tuple[Tensor, Tensor]:
    """`quantize_rows_t` of the rows that `dispatch` makes of `x` [T, D]."""
    return quantize_rows_t(dispatch(x, groups), groups, pow2)


def combine_backward_quantize(
    dy: Tensor, y: Tensor, weights: Tensor, groups: Groups, pow2: bool, pow2_t: bool
) -> tuple[QTensor, tuple[Tensor, Tensor], Tensor]:
    """`combine_backward`, its rows [R, D] quantized along D (`pow2`) and along themselves (`pow2_t`)."""
    d_rows, d_weights = combine_backward(dy, y, weights, groups)
    return ref.quantize_1x128(d_rows, pow2), quantize_rows_t(d_rows, groups, pow2_t), d_weights


def swiglu_rows_backward_quantize(
    grad: Tensor, gate_up: Tensor, groups: Groups, pow2: bool, pow2_t: bool
) -> tuple[QTensor, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """`swiglu_rows_backward` [R, 2F], in sections of F, quantized along them (`pow2`) and along rows (`pow2_t`); and
    `swiglu_rows` [R, F] of the same `gate_up`, quantized along rows."""
    d, f = swiglu_rows_backward(grad, gate_up, groups), grad.shape[1]
    act_t = quantize_rows_t(swiglu_rows(gate_up, groups), groups, pow2_t)
    return ref.quantize_1x128(d, pow2, (f, f)), quantize_rows_t(d, groups, pow2_t), act_t


def grouped_wgrad_into(
    dy_t: tuple[Tensor, Tensor], x_t: tuple[Tensor, Tensor], groups: Groups, grad: Tensor
) -> None:
    """`grad_e = rounded(grad_e + dW_e)` with `dW_e = fp8_gemm` of an expert's rows, for `grad` [E * N, K] in place.

    Operands by `quantize_rows_t`: `dy_t` [N, R], `x_t` [K, R]. An expert without rows is left as it is.
    """
    block = 0
    matrices = grad.chunk(len(groups.counts))
    for expert, at in rows_of(groups):
        size = at.stop - at.start
        blocks = slice(block, block + -(-size // 128))
        block = blocks.stop
        dy, x = (QTensor(c[:, at], s[:, blocks], "1x128", (len(c),), (size,)) for c, s in (dy_t, x_t))
        matrices[expert].add_(ref.fp8_gemm(dy, x))  # BF16 plus FP32 is computed in FP32


def grouped_bf16_wgrad_into(dy: Tensor, x: Tensor, groups: Groups, grad: Tensor) -> None:
    """`grad_e = rounded(grad_e + dy_e.T @ x_e)` over each expert's rows, in FP32, for `grad` [E * N, K] in place."""
    matrices = grad.chunk(len(groups.counts))
    for expert, at in rows_of(groups):
        matrices[expert].add_(dy[at].to(torch.float32).T @ x[at].to(torch.float32))


def dispatch_quantize(x: Tensor, groups: Groups, pow2: bool) -> QTensor:
    q, at = quantize_act(x, pow2), groups.tokens
    return QTensor(q.codes.view(torch.uint8)[at].view(q.codes.dtype), q.scale[at], "1x128", (len(at),), q.col_sections)


def group_quantize(chosen: Tensor, x: Tensor, num_experts: int, pow2: bool) -> tuple[Groups, QTensor]:
    groups = group(chosen, num_experts)
    return groups, dispatch_quantize(x, groups, pow2)
