"""How the gradients of master weights are kept: in which type, and whether backward passes add to them in place."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from jetrl.errors import UserError


def grad_dtype(master: Tensor) -> torch.dtype:
    """The type of `master.grad`: its own, unless `accumulate_in` has set another."""
    return getattr(master, "grad_dtype", None) or master.dtype


def accumulate_in(module: nn.Module, dtype: torch.dtype) -> None:
    """Keep all parameters' gradients in `dtype`; backward passes add those of matrices to `.grad` in place.

    With BF16 masters, FP32 gradients add up micro-batches without rounding to BF16. In place means that a matrix's
    gradient never passes through autograd, so its hooks and `torch.autograd.grad` do not work for these parameters.
    """
    for param in module.parameters():
        param.adds_in_place = True  # type: ignore[attr-defined]
        if param.dtype == dtype:
            continue
        if not hasattr(param, "grad_dtype"):
            raise UserError(f"train.grad_dtype = {dtype} needs a newer torch than {torch.__version__}: upgrade it")
        param.grad_dtype = dtype


def grad_in_place(master: Tensor) -> Tensor | None:
    """`master.grad` to add to, zeros if it did not exist; None where autograd accumulates it."""
    if not getattr(master, "adds_in_place", False):
        return None
    if master.grad is None:
        master.grad = torch.zeros(master.shape, dtype=grad_dtype(master), device=master.device)
    return master.grad
