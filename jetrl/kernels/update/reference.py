"""Sums of squares, of gradients and of digests on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from jetrl.kernels.update.digest import MULTIPLIER, OFFSET, Words
from jetrl.kernels.update.squares import ROW

_SUMS, _USUAL = 1 << 22, 1 << 20  # of digests, made at once; places whose factors are kept


def row_squares(x: Tensor, out: Tensor) -> None:
    """`kernels.update.squares.row_squares`, a few million elements at a time."""
    for i, part in enumerate(torch.split(x.reshape(-1), ROW * 1024)):
        rows = torch.nn.functional.pad(part.double().square_(), (0, -len(part) % ROW)).view(-1, ROW)
        out[i * 1024 : i * 1024 + len(rows)] = rows.sum(1)


def add_in_order(total: Tensor, parts: Tensor, first: bool) -> None:
    """`kernels.update.sums.add_in_order`; `first`: what `total` holds does not count."""
    if first:
        total.copy_(parts[0])
        parts = parts[1:]
    for part in parts:
        total.add_(part)


def sum_of_two(x: Tensor, y: Tensor) -> Tensor:
    """`x + y` in FP32."""
    return x.to(torch.float32) + y.to(torch.float32)


def digests(words: Sequence[Words]) -> Tensor:
    """`kernels.update.digest.digests`, one tensor after another."""
    return torch.stack([_digest(one) for one in words])


def _digest(words: Words) -> Tensor:
    bits, fold = words.bits, words.fold
    columns = bits.shape[1] // fold
    step, total = max(1, _SUMS // max(1, columns)), torch.zeros((), dtype=torch.int64, device=bits.device)
    for first in range(0, len(bits), step):
        sums = bits[first : first + step].view(-1, fold, columns).sum(1, dtype=torch.int64)
        total += (sums.view(-1) * _odd((words.start + first) * columns, sums.numel(), bits.device)).sum()
    return total


def _odd(first: int, count: int, device: torch.device) -> Tensor:
    """The factors of so many places, from `first` on."""
    if first + count <= _USUAL:
        return _usual(device)[first : first + count]
    place = torch.arange(first, first + count, dtype=torch.int64, device=device)
    return (place * MULTIPLIER + OFFSET) | 1


@cache
def _usual(device: torch.device) -> Tensor:
    """Those of the first places, which are all of most matrices'."""
    return (torch.arange(_USUAL, dtype=torch.int64, device=device) * MULTIPLIER + OFFSET) | 1
