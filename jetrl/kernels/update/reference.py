"""Sums of squares and of gradients on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from jetrl.kernels.update.squares import ROW


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
