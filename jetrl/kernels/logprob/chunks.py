"""Log-probs and their gradient on a GPU, by chunks of rows: the backend's GEMMs, kernels of `triton.py` in between."""

from __future__ import annotations

import torch
from torch import Tensor

from jetrl.kernels.dispatch import backend_of
from jetrl.kernels.gemm.operands import PreparedBF16
from jetrl.kernels.logprob import ops as logprob_ops
from jetrl.kernels.logprob import triton as triton_logprob
from jetrl.kernels.logprob.truncation import Support
from jetrl.kernels.update.triton import add_rounded

_LOGIT_ELEMENTS, _FORWARD_ELEMENTS = logprob_ops.LOGIT_ELEMENTS, logprob_ops.FORWARD_ELEMENTS
KEPT_BYTES = logprob_ops.KEPT_BYTES


def head_logits(hidden: Tensor, w: PreparedBF16) -> Tensor:
    return backend_of(hidden).bf16_gemm(hidden, w, torch.float32)


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
    w = backend_of(weight).prepare_bf16(weight)
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
            backend_of(total).bf16_wgrad_into(whole, hidden[part].contiguous(), total)
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
        scaled = torch.mul(hidden[part], factor, out=torch.empty_like(hidden[part]))
        backend_of(total).bf16_wgrad_into(residual, scaled, total)
