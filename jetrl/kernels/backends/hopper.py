"""The hopper backend: Triton for memory-bound ops, DeepGEMM for GEMMs, FlashAttention-4 for attention.

It exports the names of `dispatch.OPS`. Elementwise ops, quantizers and log-probs are bit-equal to `reference` given the
same inputs; GEMMs and attention have their own order of sums, which depends only on the sizes of K and of the head.
Beyond `OPS` there are `dispatch.EXPERT_OPS` (outside `__all__`: `hopper_scaled_mm` has none) and `sample`, the draw on
the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jetrl.kernels.attention.advance import advance
from jetrl.kernels.attention.cache import round_heads, write_cache
from jetrl.kernels.attention.flash import (
    attend,
    attend_backward,
    attend_cached,
    attend_cached_quantize,
    attend_varlen,
)
from jetrl.kernels.attention.heads import qkv_norm_rope, qkv_norm_rope_backward
from jetrl.kernels.compiling.keys import settle_all
from jetrl.kernels.experts.deepgemm import grouped_bf16_dgrad as grouped_bf16_dgrad
from jetrl.kernels.experts.deepgemm import grouped_bf16_gemm as grouped_bf16_gemm
from jetrl.kernels.experts.deepgemm import grouped_bf16_wgrad_into as grouped_bf16_wgrad_into
from jetrl.kernels.experts.deepgemm import grouped_fp8_gemm as grouped_fp8_gemm
from jetrl.kernels.experts.deepgemm import grouped_wgrad_into as grouped_wgrad_into
from jetrl.kernels.experts.deepgemm import prepare_experts_bf16 as prepare_experts_bf16
from jetrl.kernels.experts.deepgemm import prepare_experts_fp8 as prepare_experts_fp8
from jetrl.kernels.experts.deepgemm import prepare_experts_fp8_t as prepare_experts_fp8_t
from jetrl.kernels.experts.few_tokens import group_quantize as group_quantize
from jetrl.kernels.experts.quantize import combine_backward_quantize as combine_backward_quantize
from jetrl.kernels.experts.quantize import dispatch_quantize_t as dispatch_quantize_t
from jetrl.kernels.experts.quantize import quantize_rows_t as quantize_rows_t
from jetrl.kernels.experts.quantize import swiglu_rows_backward_quantize as swiglu_rows_backward_quantize
from jetrl.kernels.experts.reference import route_backward as route_backward
from jetrl.kernels.experts.route import group as group
from jetrl.kernels.experts.route import route as route
from jetrl.kernels.experts.rows import combine as combine
from jetrl.kernels.experts.rows import combine_backward as combine_backward
from jetrl.kernels.experts.rows import dispatch as dispatch
from jetrl.kernels.experts.rows import dispatch_backward as dispatch_backward
from jetrl.kernels.experts.rows import dispatch_quantize as dispatch_quantize
from jetrl.kernels.experts.rows import swiglu_quantize_rows as swiglu_quantize_rows
from jetrl.kernels.experts.rows import swiglu_rows as swiglu_rows
from jetrl.kernels.experts.rows import swiglu_rows_backward as swiglu_rows_backward
from jetrl.kernels.gemm.deepgemm import (
    PreparedBF16,
    add_outer,
    bf16_gemm,
    coded_gemm,
    fp8_gemm,
    prepare_bf16,
    wgrad_gemm,
    wgrad_into,
    wgrad_rounded,
)
from jetrl.kernels.gemm.operands import prepare_fp8, prepare_fp8_t
from jetrl.kernels.logprob import ops as logprob_ops
from jetrl.kernels.logprob import triton as triton_logprob
from jetrl.kernels.logprob.triton import exp_weights, logprobs, sample
from jetrl.kernels.logprob.truncation import Support
from jetrl.kernels.pointwise.normed import add_rms_norm_kept, normed_t
from jetrl.kernels.pointwise.swiglu import swiglu, swiglu_backward, swiglu_backward_act, swiglu_quantize
from jetrl.kernels.pointwise.triton import (
    add,
    add_rms_norm,
    add_rms_norm_quantize,
    rms_norm,
    rms_norm_backward,
    rope,
    rope_backward,
)
from jetrl.kernels.quantize.triton import quantize_act, quantize_act_t, quantize_weight
from jetrl.kernels.update.triton import adamw_step_, add_in_order, add_rounded, row_squares, sum_of_two

settle_all()  # all kernels are loaded: from here on each is found on disk whoever has compiled it

__all__ = [
    "adamw_step_", "add", "add_in_order", "add_rms_norm", "add_rms_norm_kept", "add_rms_norm_quantize", "advance",
    "attend", "attend_backward", "attend_cached", "attend_cached_quantize", "attend_varlen", "bf16_dgrad",
    "bf16_gemm", "bf16_wgrad", "bf16_wgrad_into", "coded_gemm", "exp_weights", "fp8_gemm", "head_logits",
    "logprob_backward", "logprob_entropy", "logprobs", "normed_t", "prepare_bf16", "prepare_fp8", "prepare_fp8_t",
    "qkv_norm_rope",
    "qkv_norm_rope_backward", "quantize_act", "quantize_act_t", "quantize_weight", "rms_norm", "rms_norm_backward",
    "rope", "rope_backward", "round_heads", "row_squares", "sample", "sum_of_two", "swiglu", "swiglu_backward",
    "swiglu_backward_act", "swiglu_quantize", "wgrad_gemm", "wgrad_into", "wgrad_rounded", "write_cache",
]
_LOGIT_ELEMENTS, _FORWARD_ELEMENTS = logprob_ops.LOGIT_ELEMENTS, logprob_ops.FORWARD_ELEMENTS
KEPT_BYTES = logprob_ops.KEPT_BYTES


def bf16_dgrad(dy: Tensor, w: Tensor) -> Tensor:
    """`dy @ w`, FP32 accumulation, rounded. Reproducible; gradients are not part of parity."""
    return dy @ w


def bf16_wgrad(dy: Tensor, x: Tensor) -> Tensor:
    """`dy.T @ x` in FP32."""
    return torch.mm(dy.T, x, out_dtype=torch.float32)


def bf16_wgrad_into(dy: Tensor, x: Tensor, grad: Tensor) -> None:
    """`kernels.gemm.ops.bf16_wgrad_into`: in FP32 the GEMM adds; BF16 takes one more pass, and so one rounding."""
    if grad.dtype == torch.bfloat16 or grad.shape[0] % 8:  # TMA: rows of `dy` must be multiples of 16 bytes
        add_rounded(grad, bf16_wgrad(dy, x))
    else:
        add_outer(grad, dy, x.contiguous())


def split_fp32_into_bf16(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Three BF16 tensors whose sum is `x` (FP32) exactly: 8 of its 24 bits each, unless the last is below 2**-133."""
    high = x.to(torch.bfloat16)
    rest = x - high.to(torch.float32)
    middle = rest.to(torch.bfloat16)
    return high, middle, (rest - middle.to(torch.float32)).to(torch.bfloat16)


def router_backward(d_logits: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """`experts.reference.router_backward`: `d_logits` in three parts, so BF16 GEMMs multiply exactly; sums are FP32."""
    parts = torch.cat(split_fp32_into_bf16(d_logits), 1)
    dw = torch.mm(parts.T, x, out_dtype=torch.float32).view(3, *w.shape)
    return parts @ w.repeat(3, 1), dw.sum(0)


def head_logits(hidden: Tensor, w: PreparedBF16) -> Tensor:
    return bf16_gemm(hidden, w, torch.float32)


def _rows_at_once(vocab: int, elements: int) -> int:
    """Rows of logits in a chunk: a multiple of 128, the GEMM's tile."""
    return max(128, elements // vocab // 128 * 128)


def logprob_entropy(
    hidden: Tensor, w: PreparedBF16, targets: Tensor, temperature: Tensor, keep: bool = False,
    support: Support | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Log-prob of each target and entropy, FP32 [T], by chunks of rows; `temperature` FP32 [T] divides the logits.
    `support` leaves tokens out of the rows' distributions.

    The third result is what `logprob_backward` reads for each row: entropy, maximum, log of the total, FP32 [3, T]. The
    fourth, with `keep`, is the residual `rounded(p - onehot)` of the first rows, as many as `KEPT_BYTES` hold.
    """
    out = torch.empty(4, hidden.shape[0], dtype=torch.float32, device=hidden.device)
    rows, kept = _rows_at_once(w.size, _FORWARD_ELEMENTS), None
    if keep and (fit := min(hidden.shape[0], KEPT_BYTES // (2 * w.weight.shape[0]))):
        kept = _new_residual(fit, w)
    for start in range(0, hidden.shape[0], rows):
        part = slice(start, start + rows)
        z = head_logits(hidden[part], w)
        if support is not None:
            support.restrict_(z, part, temperature[part])
        out[:, part] = triton_logprob.logprobs_and_statistics(z, targets[part], temperature[part])
        if kept is not None and start < len(kept):
            part, count = slice(start, min(start + rows, len(kept))), min(rows, len(kept) - start)
            triton_logprob.residual(z[:count], targets[part], temperature[part], out[1:, part], kept[part, : w.size])
        del z  # its memory is the next chunk's
    return out[0], out[1], out[1:], kept


def _new_residual(rows: int, w: PreparedBF16) -> Tensor:
    """Empty BF16 [rows, V'], V' the padded vocabulary of the head; padding is zero."""
    new = torch.empty if w.weight.shape[0] == w.size else torch.zeros
    return new(rows, w.weight.shape[0], dtype=torch.bfloat16, device=w.weight.device)


def logprob_backward(
    grad_logprob: Tensor, grad_entropy: Tensor | None, hidden: Tensor, weight: Tensor, targets: Tensor,
    temperature: Tensor, statistics: Tensor | None, residual: Tensor | None, d_weight: Tensor | None,
    support: Support | None = None,
) -> Tensor:
    """The gradient for hidden (rounded); the head weight's is added to `d_weight`. Definition: the reference backend's.

    Rows of `residual`, which `logprob_entropy` kept, need no logits; those of all other rows are made again in chunks.
    The chunks of the weight's gradient add up in FP32: in `d_weight` if the GEMM can write there, else in a separate
    matrix.
    """
    assert statistics is not None
    w = prepare_bf16(weight)
    vocab, count = weight.shape[0], hidden.shape[0]
    d_hidden, total = torch.empty_like(hidden), d_weight
    if d_weight is not None and (d_weight.dtype != torch.float32 or d_weight.shape != w.weight.shape):
        total = torch.zeros(w.weight.shape, dtype=torch.float32, device=weight.device)
    rows, first = _rows_at_once(vocab, _LOGIT_ELEMENTS), 0
    if residual is not None and grad_entropy is None:
        first = residual.shape[0]
        _head_gradient(residual, slice(0, first), grad_logprob, temperature, hidden, weight, d_hidden, total)
    for start in range(first, count, rows):
        part = slice(start, min(start + rows, count))
        z, inputs = head_logits(hidden[part], w), (targets[part], temperature[part], statistics[:, part])
        if support is not None:
            support.restrict_(z, part, temperature[part])
        if grad_entropy is None:
            made = _new_residual(part.stop - start, w)
            triton_logprob.residual(z, *inputs, made[:, :vocab])
            _head_gradient(made, part, grad_logprob, temperature, hidden, weight, d_hidden, total)
            del z, made
            continue
        dz = triton_logprob.dlogits(z, *inputs, grad_logprob[part], grad_entropy[part])
        torch.mm(dz, weight, out=d_hidden[part])
        if total is not None:
            whole = dz.as_strided((dz.shape[0], dz.stride(0)), (dz.stride(0), 1))  # with the zero columns of padding
            add_outer(total, whole, hidden[part].contiguous())
            del whole
        del z, dz
    if total is not None and total is not d_weight:
        assert d_weight is not None
        add_rounded(d_weight, total[:vocab])
    return d_hidden


def _head_gradient(
    residual: Tensor, part: slice, grad_logprob: Tensor, temperature: Tensor, hidden: Tensor, weight: Tensor,
    d_hidden: Tensor, total: Tensor | None,
) -> None:
    """Writes the rows `part` of `d_hidden` and adds to `total`, given `p - onehot` of these rows."""
    factor = (-grad_logprob[part] / temperature[part])[:, None]
    product = torch.mm(residual[:, : weight.shape[0]], weight, out_dtype=torch.float32)
    torch.mul(product, factor, out=d_hidden[part])  # in FP32, rounded on storing
    if total is not None:
        add_outer(total, residual, torch.mul(hidden[part], factor, out=torch.empty_like(hidden[part])))
