"""The sum of several gradients in one order: what the owner of a matrix's rows does with the lanes that arrive."""

from __future__ import annotations

import torch
from torch import Tensor

from jetrl.kernels.dispatch import backend_of


def add_in_order(total: Tensor | None, parts: Tensor) -> Tensor:
    """`((total + parts[0]) + parts[1]) + ...`, written into `total`; every sum is rounded to its type, FP32 or BF16.

    `parts` [S, ...] of one type, `total` [...] or None: then the sum begins with `parts[0]`, in new memory. Contiguous.
    """
    if total is None:
        total, first = torch.empty_like(parts[0]), True
    else:
        first = False
    if total.shape != parts.shape[1:] or total.dtype != parts.dtype or not len(parts):
        raise ValueError(f"a sum {list(total.shape)} {total.dtype} of parts {list(parts.shape)} {parts.dtype}")
    if parts.numel():
        backend_of(total).add_in_order(total, parts, first)
    return total
