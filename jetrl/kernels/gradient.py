"""The type in which a master weight's gradient is handed over and accumulated over micro-batches."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from jetrl.errors import UserError


def grad_dtype(master: Tensor) -> torch.dtype:
    """The type of `master.grad`: its own, unless `accumulate_in` has set another."""
    return getattr(master, "grad_dtype", None) or master.dtype


def accumulate_in(module: nn.Module, dtype: torch.dtype) -> None:
    """Keep all parameters' gradients in `dtype`: FP32 under BF16 masters adds micro-batches up without rounding."""
    for param in module.parameters():
        if param.dtype == dtype:
            continue
        if not hasattr(param, "grad_dtype"):
            raise UserError(f"train.grad_dtype = {dtype} needs a newer torch than {torch.__version__}: upgrade it")
        param.grad_dtype = dtype
