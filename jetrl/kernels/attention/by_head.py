"""Attention of the backend `hopper`, by the size of heads: FlashAttention-4 and the kernels with its bits (`flash.py`),
or for wide heads the portable kernels, in training and in rollouts alike.

Decode steps with FlashAttention-4's bits exist for its tiles of 128 keys; with heads of 256 it has tiles of 80, and no
pages. The log-sum-exp of a forward pass is for the backward pass of the same kernels: their bases differ.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from jetrl.kernels.attention import flash, portable
from jetrl.kernels.qtensor import QTensor
from jetrl.types import PagedPlan, VarlenPlan

WIDEST = 192  # of heads, by FlashAttention-4


def _of(q: Tensor) -> Any:
    return portable if q.shape[2] > WIDEST else flash


def attend_varlen(
    q: Tensor, k: Tensor, v: Tensor, plan: VarlenPlan, scale: float, need_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """See `flash` and `portable`."""
    return _of(q).attend_varlen(q, k, v, plan, scale, need_lse)  # type: ignore[no-any-return]


def attend_cached(q: Tensor, plan: PagedPlan, layer: int, scale: float) -> Tensor:
    """See `flash` and `portable`."""
    return _of(q).attend_cached(q, plan, layer, scale)  # type: ignore[no-any-return]


def attend_cached_quantize(q: Tensor, plan: PagedPlan, layer: int, scale: float, pow2: bool) -> QTensor:
    """See `flash` and `portable`."""
    return _of(q).attend_cached_quantize(q, plan, layer, scale, pow2)  # type: ignore[no-any-return]


def attend(q: Tensor, k: Tensor, v: Tensor, plan: VarlenPlan | PagedPlan, layer: int, scale: float) -> Tensor:
    """See `flash` and `portable`."""
    return _of(q).attend(q, k, v, plan, layer, scale)  # type: ignore[no-any-return]


def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, plan: VarlenPlan, scale: float,
    out: Tensor | None = None, lse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `flash` and `portable`."""
    return _of(q).attend_backward(grad, q, k, v, plan, scale, out, lse)  # type: ignore[no-any-return]
