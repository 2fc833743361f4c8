"""Sums over the tokens of each sequence of a micro-batch, with the same bits in every run."""

from __future__ import annotations

import torch
from torch import Tensor


def per_sequence(values: Tensor, active: Tensor, sequence_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of `values` (0 where not active) and number of active tokens of each token's sequence, both [T] float64.

    A sequence must lie whole within the micro-batch; its rows need not be neighbours. `segment_reduce` sums each
    sequence by itself, without atomics, so the bits do not depend on a sequence's neighbours.
    """
    if values.numel() == 0:  # segment_reduce refuses it
        return values, values.clone()
    _, inverse, lengths = torch.unique(sequence_ids, return_inverse=True, return_counts=True)
    order = torch.argsort(inverse, stable=True)
    sums = torch.segment_reduce(values[order], "sum", lengths=lengths)
    counts = torch.segment_reduce(active.double()[order], "sum", lengths=lengths)
    return sums[inverse], counts[inverse]
