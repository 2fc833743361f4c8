"""Sums of squares over rows of `ROW` elements of a tensor, the first stage of the gradient norm."""

from __future__ import annotations

import torch
from torch import Tensor

from jetrl.kernels.dispatch import backend_of

ROW = 4096


def row_squares(x: Tensor, out: Tensor) -> None:
    """`out[i]` = sum of squares of elements `ROW * i` to `ROW * (i + 1)` of flattened `x`, in float64.

    `out` float64 [ceil(numel / ROW)]. Each sum has one order for any number of threads; the backend chooses it.
    """
    if out.dtype != torch.float64 or out.shape != (-(-x.numel() // ROW),):
        raise ValueError(f"row_squares of {x.numel()} elements needs float64 [{-(-x.numel() // ROW)}], got {out.shape}")
    backend_of(x).row_squares(x.contiguous(), out)
