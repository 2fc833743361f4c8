"""CUDA graphs without a GPU: stand-ins for a step's memory, and for `jetrl.engine.graphs.capture.Capture`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from jetrl.engine.speculation.verify import Proposal


def tensors(found: Any) -> Iterator[Tensor]:
    """The tensors of a step's result, in a fixed order; of a batch none."""
    if isinstance(found, Tensor):
        yield found
    elif isinstance(found, tuple):
        for one in found:
            yield from tensors(one)
    elif isinstance(found, Proposal):
        yield from (getattr(found, f.name) for f in fields(found))


class Static:
    """A step whose results lie where those of its first run are, over what was there."""

    def __init__(self, step: Callable[[], Any]) -> None:
        self.step, self.found, self.runs = step, None, 0

    def __call__(self) -> Any:
        new = self.step()
        self.runs += 1
        if self.found is None:
            self.found = new
        for old, now in zip(tensors(self.found), tensors(new), strict=True):
            old.copy_(now)
        return self.found


class Replays:
    """A capture computes nothing; a replay runs the step."""

    device = torch.device("cpu")
    number = 0

    def __call__(self, step: Static) -> tuple[Any, Any]:
        assert step.runs == 1, "a step runs once before its capture"
        self.number += 1
        return SimpleNamespace(replay=step), step.found
