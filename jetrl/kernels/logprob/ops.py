"""Log-probs and entropy from hidden states: one function for sampler and learner. Definitions: `reference.py`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from jetrl.kernels import reference
from jetrl.kernels.dispatch import backend_of
from jetrl.kernels.logprob.truncation import Support
from jetrl.kernels.update.gradient import Gradient

# What a GPU's backend holds at once, with which the prediction of memory counts, too.
LOGIT_ELEMENTS = 1 << 29  # FP32 logits in the backward pass: 2 GB; the order of dW's sums depends on it
FORWARD_ELEMENTS = 1 << 27  # in the forward pass, which is where most memory is in use: 0.5 GB
KEPT_BYTES = 5 << 29  # of a micro-batch's softmax residuals, until its backward pass: 8,192 rows of 151,936


def head_logits(hidden: Tensor, prepared_head: Any) -> Tensor:
    """`hidden` [T, D] by the prepared lm_head [V, D] -> FP32 logits [T, V], one rounding."""
    return backend_of(hidden).head_logits(hidden, prepared_head)


def logprobs(logits: Tensor, targets: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
    """Log-prob of `targets` [T] under softmax(logits / temperature), FP32 [T]; temperature a number or FP32 [T]."""
    if not isinstance(temperature, Tensor):
        temperature = torch.full(targets.shape, temperature, dtype=torch.float32, device=logits.device)
    return backend_of(logits).logprobs(logits, targets, temperature)


def draw(logits: Tensor, temperature: Tensor, keys: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`engine.sampler`'s draw from untruncated distributions, on the GPU, without waiting for the host.

    `logits` [B, V] FP32; `temperature` FP32 [B], 0 for the first maximum; `keys` int64 [B], the bits of the uint64
    stream keys; `positions` int64 [B]. Returns tokens int64 [B], their log-probs FP32 [B] and the maxima FP32 [B].
    """
    return backend_of(logits).sample(logits, temperature, keys, positions)


def exp_weights(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.exp_weights` by the backend of the device."""
    return backend_of(logits).exp_weights(logits)


def log_softmax(logits: Tensor) -> Tensor:
    """Log-probs of the whole vocabulary, FP32 [T, V], each equal to what `logprobs` gives for that token."""
    _, top, total = exp_weights(logits)
    log_total = reference.log_total(total)[:, None]
    return (logits.to(torch.float64) - top[:, None].to(torch.float64) - log_total).to(torch.float32)


def scaled(logits: Tensor, temperature: float | Tensor) -> Tensor:
    """`logits / temperature`, one FP32 division per value (a reciprocal would round twice)."""
    if isinstance(temperature, Tensor):
        return logits / temperature.to(torch.float32)[:, None]
    # the divisor is a tensor: for a Python number, torch may multiply by its reciprocal
    return logits if temperature == 1.0 else logits / torch.tensor(temperature, dtype=torch.float32)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, master: Tensor, gradient: Gradient, weight: Tensor, prepared: Any, targets: Tensor,
        temperature: Tensor, keep: bool, support: Support | None,
    ) -> tuple[Tensor, Tensor]:
        ctx.gradient, ctx.support = gradient, support
        ctx.set_materialize_grads(False)
        logprobs, entropies, *kept = backend_of(hidden).logprob_entropy(
            hidden, prepared, targets, temperature, keep, support
        )
        ctx.save_for_backward(hidden, weight, targets, temperature, *kept)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprob: Tensor | None, grad_entropy: Tensor | None) -> tuple[Any, ...]:
        hidden, weight, targets, temperature, statistics, residual = ctx.saved_tensors
        if grad_logprob is None:
            grad_logprob = torch.zeros_like(temperature)
        # contiguous: the gradient of a sum is one number with stride 0, and kernels index rows from the first address
        grad = dw = None
        if ctx.needs_input_grad[1]:
            grad = ctx.gradient.place()
            if grad is None:
                grad = dw = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        support = ctx.support and Support(ctx.support.truncation, targets, ctx.support.sets)
        dh = backend_of(hidden).logprob_backward(
            grad_logprob.contiguous(), None if grad_entropy is None else grad_entropy.contiguous(), hidden, weight,
            targets, temperature, statistics, residual, grad, support,
        )
        if grad is not None and dw is None:
            ctx.gradient.done()
        return dh, None if dw is None else dw.to(ctx.gradient.dtype), *[None] * 7


def token_logprobs(
    hidden: Tensor, gradient: Gradient, weight: Tensor, prepared: Any, targets: Tensor, temperature: float,
    keep: bool = True, support: Support | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-prob of `targets` [T] and entropy, FP32 [T] each, from `hidden` [T, D]; FP32 logits are made in chunks.

    `prepared` is the GEMM operand of the published head `weight` [V, D]; its gradient goes to `gradient`. `keep`: a
    backend may hold `p - onehot` [T, V] in BF16 until the backward pass, up to a bound of its own, and need no logits
    there. Of no use if the entropy has a gradient, which is of another form. `support`: both are of what it leaves of
    each row's distribution; it holds the sets afterwards.
    """
    temp = torch.full(targets.shape, temperature, dtype=torch.float32, device=hidden.device)
    keep = keep and torch.is_grad_enabled() and (hidden.requires_grad or gradient.param.requires_grad)
    return _TokenLogprobs.apply(hidden, gradient.param, gradient, weight, prepared, targets, temp, keep, support)
