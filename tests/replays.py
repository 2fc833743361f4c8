"""CUDA graphs without a GPU: stand-ins for a step's memory, and for `jetrl.engine.graphs.capture.Capture`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from jetrl.engine.graphs.cache import GraphCache
from jetrl.engine.graphs.mixed import MixedGraphs, MixedSize, _Held, _Inputs
from jetrl.engine.speculation.verify import Proposal
from jetrl.types import ForwardBatch, PagedPlan


def tensors(found: Any) -> Iterator[Tensor]:
    """The tensors of a step's result, in a fixed order; of a batch, and of None, none."""
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
    """A capture computes nothing; a replay runs the step. `room` is what `make_room` says."""

    device = torch.device("cpu")

    def __init__(self, room: bool = True) -> None:
        self.number, self.room = 0, room

    def make_room(self) -> bool:
        return self.room

    def __call__(self, step: Static) -> tuple[Any, Any]:
        assert step.runs == 1, "a step runs once before its capture"
        self.number += 1
        return SimpleNamespace(replay=step), step.found


def graph_cache(model: Any, capture: Any = None) -> GraphCache:
    """A cache of graphs whose replays run the step."""
    return GraphCache(capture or Replays(), model)


class Mixed(MixedGraphs):
    """Without a GPU. The CPU's attention takes the lengths of parts from the host, where a graph has bounds only."""

    def _prepare(self, size: MixedSize) -> _Held:
        held = super()._prepare(size)
        held.step = Static(lambda: self.model(self._batch_now(held.inputs, size)))
        return held

    def _batch_now(self, inputs: _Inputs, size: MixedSize) -> ForwardBatch:
        made = self._batch(inputs, size)
        assert isinstance(made.plan, PagedPlan)
        bounds, lengths = made.plan.query_lengths, tuple(inputs.starts.diff().tolist())
        assert all(0 < length <= bound for length, bound in zip(lengths, bounds, strict=True))
        plan = PagedPlan(
            made.plan.cache, made.plan.cu_seqlens, lengths, made.plan.kv_lengths, made.plan.kv_pages,
            made.plan.block_table, made.plan.slots,
        )
        return ForwardBatch(made.tokens, made.positions, plan, made.side)
