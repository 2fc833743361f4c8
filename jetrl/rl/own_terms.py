"""The surrogate and the aggregation that a user wrote: their tensors, checked in every call (`own.py` has the rest)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

from jetrl.rl.own import call, described, refuse

if TYPE_CHECKING:
    from jetrl.rl.losses import Denominators
    from jetrl.rl.surrogate import Clip

_FAR = 20.0  # log-ratios above may overflow without the function's fault: the message then names the token


def _is_plain(found: Any) -> TypeGuard[Tensor]:
    """Whether it is a tensor with all its entries: not a masked, nested or sparse one."""
    return (
        isinstance(found, Tensor) and not found.is_nested and found.layout is torch.strided
        and not hasattr(found, "get_mask")
    )


def token_losses(name: str, log_ratio: Tensor, logprobs: Tensor, advantages: Tensor, clip: Clip) -> Tensor:
    """`rl.surrogate`: the loss of each token [T], from log-ratios and log-probs with gradient, and advantages."""
    key = "rl.surrogate"
    found = call(key, name, log_ratio, logprobs, advantages, clip)
    if not _is_plain(found) or found.shape != log_ratio.shape or not found.is_floating_point():
        refuse(key, name, f"returned {described(found)}; it must return a tensor of floats of the shape "
                           f"{tuple(log_ratio.shape)}, the loss of each token")
    if torch.is_grad_enabled() and logprobs.requires_grad and not found.requires_grad:
        refuse(key, name, "returned a tensor without a gradient; make it of log_ratio or logprobs, without detach() "
                           "on both, and not under torch.no_grad()")
    bad = ~found.detach().isfinite() & (log_ratio.detach().abs() <= _FAR) & logprobs.detach().isfinite()
    if bool(bad.any()):
        value, ratio, logprob, adv = (
            float(column.detach()[bad][0]) for column in (found, log_ratio, logprobs, advantages)
        )
        refuse(key, name, f"returned {value} for log_ratio {ratio:g}, log-prob {logprob:g} and advantage {adv:g}; it "
                           "must be finite")
    return found.to(logprobs.dtype)


def token_weights(name: str, sequence_ids: Tensor, denominators: Denominators) -> Tensor:
    """`rl.loss_agg`: the weight [T] of each loss token, float64."""
    key = "rl.loss_agg"
    found = call(key, name, sequence_ids, denominators)
    if not _is_plain(found) or found.shape != sequence_ids.shape:
        refuse(key, name, f"returned {described(found)}; it must return a tensor of the shape "
                           f"{tuple(sequence_ids.shape)}, the weight of each token")
    found = found.detach().double()
    if bool((~found.isfinite() | (found < 0)).any()):
        bad = found[~found.isfinite() | (found < 0)]
        refuse(key, name, f"returned a weight of {float(bad[0]):g}; weights must be finite and at least 0")
    return found
