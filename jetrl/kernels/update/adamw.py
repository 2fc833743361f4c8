"""One AdamW step of one parameter, for masters and moments in BF16 or FP32. Definition: `reference.adamw_step_`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from jetrl.kernels.dispatch import backend_of

_FLOATS = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class AdamWStep:
    """The numbers of a step; `step` counts from 1. `factor` is what clipping multiplies the gradient by."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    step: int
    factor: float = 1.0


def adamw_step_(param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, numbers: AdamWStep) -> None:
    """Update `param` and both moments in place; all have one shape, each is BF16 or FP32.

    Everything is computed in FP32 and rounded once on storing, to nearest even. `grad` is read times `numbers.factor`,
    an FP32 product rounded to the gradient's type, and stays as it is. Source: arXiv 1711.05101, algorithm 2.
    """
    tensors = (param, grad, exp_avg, exp_avg_sq)
    if any(t.shape != param.shape or t.dtype not in _FLOATS or not t.is_contiguous() for t in tensors):
        raise ValueError(f"adamw: contiguous BF16 or FP32 of one shape, got {[(t.dtype, t.shape) for t in tensors]}")
    backend_of(param).adamw_step_(param, grad, exp_avg, exp_avg_sq, numbers)
