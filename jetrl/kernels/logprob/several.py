"""Log-probs of several given tokens of each row, from the log-prob of one: no second pass over the vocabulary.

With z the logits, of which the log-prob of a token y is known, another token's is

    logprob_j = logprob_y + (z_j - z_y) / temperature        z_j = hidden . head_j

The logits of the few tokens are products in FP32 of the BF16 operands that the GEMM of the head reads, and only their
sums have another order than the GEMM's. So the op has one definition for all devices, in plain torch, by chunks of
rows. Letters: T rows, D size of the hidden states, V vocabulary, K tokens of a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from jetrl.kernels.logprob.ops import head_logits
from jetrl.kernels.update.gradient import Gradient

ELEMENTS = 1 << 26  # FP32 numbers of a chunk: of its rows of the head, or of its logits; 0.25 GB


@torch.no_grad()
def top_tokens(hidden: Tensor, prepared: Any, vocab: int, count: int) -> Tensor:
    """The `count` most probable of the first `vocab` tokens for each row of `hidden` [T, D], the most probable first:
    int64 [T, count]."""
    rows = max(1, ELEMENTS // vocab)
    parts = [head_logits(part, prepared)[:, :vocab].topk(count, dim=1).indices for part in hidden.split(rows)]
    return torch.cat(parts) if len(hidden) else torch.empty(0, count, dtype=torch.int64, device=hidden.device)


def several_logprobs(
    hidden: Tensor, gradient: Gradient, weight: Tensor, targets: Tensor, logprobs: Tensor, tokens: Tensor,
    temperature: float,
) -> Tensor:
    """Log-probs of `tokens` [T, K], FP32 [T, K], given `logprobs` [T] of `targets` [T], both at the temperature.

    Differentiable in `hidden` [T, D], in `logprobs` and in the published head `weight` [V, D], whose gradient is added
    where that of `ops.token_logprobs` will be: `logprobs` must be what that has made of the same rows, as its backward
    pass comes later and says when the gradient is complete. The gradient of `hidden` is rounded once.
    """
    return _SeveralLogprobs.apply(hidden, gradient.param, gradient, weight, targets, logprobs, tokens, temperature)


class _SeveralLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, master: Tensor, gradient: Gradient, weight: Tensor, targets: Tensor,
        logprobs: Tensor, tokens: Tensor, temperature: float,
    ) -> Tensor:
        ids = torch.cat([targets[:, None], tokens], dim=1)
        ctx.gradient, ctx.temperature = gradient, temperature
        ctx.save_for_backward(hidden, weight, ids)
        z = hidden.new_empty(ids.shape, dtype=torch.float32)
        for part in _chunks(ids, weight):
            z[part] = (weight[ids[part]].float() * hidden[part, None].float()).sum(-1)
        return logprobs[:, None] + (z[:, 1:] - z[:, :1]) / temperature

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        hidden, weight, ids = ctx.saved_tensors
        of_logprobs = grad.sum(1)
        dz = torch.cat([-of_logprobs[:, None], grad], dim=1) / ctx.temperature
        dh, dw, place = torch.empty_like(hidden), None, None
        if ctx.needs_input_grad[1]:
            place = ctx.gradient.place()
            if place is None:
                place = dw = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for part in _chunks(ids, weight):
            dh[part] = (dz[part, :, None] * weight[ids[part]].float()).sum(1)
            if place is not None:
                _add_rows(place, ids[part].flatten(), (dz[part, :, None] * hidden[part, None].float()).flatten(0, 1))
        return dh, None if dw is None else dw.to(ctx.gradient.dtype), None, None, None, of_logprobs, None, None


def _chunks(ids: Tensor, weight: Tensor) -> Iterator[slice]:
    rows = max(1, ELEMENTS // (ids.shape[1] * weight.shape[1]))
    return (slice(start, start + rows) for start in range(0, len(ids), rows))


def _add_rows(place: Tensor, ids: Tensor, rows: Tensor) -> None:
    """Add `rows` [N, D] to rows `ids` [N] of a gradient, in FP32, in the order of N."""
    if place.dtype == torch.float32:
        place.index_add_(0, ids, rows)
        return
    used, where = ids.unique(return_inverse=True)
    sums = torch.zeros(len(used), rows.shape[1], dtype=torch.float32, device=rows.device).index_add_(0, where, rows)
    place[used] = (place[used].float() + sums).to(place.dtype)
