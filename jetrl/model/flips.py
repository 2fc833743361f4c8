"""How many codes of quantized weights a publish changes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from jetrl.model.linear import FlowLinear


class Flips:
    """Counts the weight codes that a publish changes; nothing waits for the device before `share`."""

    def __init__(self) -> None:
        self._codes, self._changed = 0, list[Tensor]()

    @contextmanager
    def watch(self, linear: FlowLinear) -> Iterator[None]:
        """Around its publish: one matrix of codes more in memory meanwhile. Codes of a frozen weight cannot change,
        and do not count."""
        held = linear.quantized if linear.holds("weight") else None
        before = None if held is None else held.codes.view(torch.uint8).clone()
        yield
        if before is not None and linear.quantized is not None:
            self._codes += before.numel()
            self._changed.append((before != linear.quantized.codes.view(torch.uint8)).sum())

    @property
    def share(self) -> float | None:
        """Of all codes of weights that train; None where there are none."""
        return int(torch.stack(self._changed).sum()) / self._codes if self._codes else None
