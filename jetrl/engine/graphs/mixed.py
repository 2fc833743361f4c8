"""Short steps that compute prompts, as CUDA graphs: their kernels take less time than the host needs to launch them.

A step has sequences that decode, which come first, and then parts: chunks of prompts. A graph is captured for padded
numbers of both, of the parts' rows and of pages, once a size has been met `_CAPTURE_FROM` times; until then, and for
long or rare steps, the step runs plainly. It ends with the hidden states: which rows draw, and how, differs by step.

Padding rows write nothing to the cache. Those behind the decoding ones are sequences of one key; those at the end
belong to parts of their own that read page 0, so that no row has undefined numbers. A row's bits do not depend on the
other rows, so padding changes none.

Legend: `L` decoding sequences, `P` parts, `R` rows of the parts, `M` pages per sequence; all padded in a graph.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from jetrl.engine.graphs.cache import GraphCache, HeldStep, padded_batch
from jetrl.engine.plan import Plan
from jetrl.types import ForwardBatch, PagedPlan

_MOST_ROWS = 1024  # longer steps keep the device busy for longer than the host
_MOST_KEYS = 1 << 16  # of all parts: bounds the scratch in which pages of an FP8 cache are dequantized
_MOST_GRAPHS = 32
_CAPTURE_FROM = 3


class MixedSize(NamedTuple):
    """What a graph is captured for."""

    lead: int
    parts: int
    rows: int
    width: int

    @classmethod
    def of(cls, lead: int, lengths: np.ndarray, pages: int, page_size: int) -> MixedSize:
        """For `lead` decoding sequences and parts of these lengths; `pages` is the longest sequence's."""
        parts = 1 << len(lengths).bit_length()  # at least one part is padding, each with a row or more
        rows = -(-(int(lengths.sum()) + parts - len(lengths)) // 64) * 64
        width = max(32, pages, -(-rows // page_size))
        return cls(padded_batch(lead) if lead else 0, parts, rows, 1 << (width - 1).bit_length())

    def holds(self, other: MixedSize) -> bool:
        """Whether this graph computes such a step, with at most a quarter more rows."""
        fits = all(mine >= its for mine, its in zip(self, other, strict=True)) and bool(self.lead) == bool(other.lead)
        # every part that is padding needs a row
        return fits and self.rows >= other.rows + self.parts - other.parts and (
            self.lead + self.rows <= 1.25 * (other.lead + other.rows)
        )


def choose(captured: Collection[MixedSize], need: MixedSize, times: int, page_size: int) -> MixedSize | None:
    """The graph for `need`, which was met `times` times; None: a plain step."""
    if need in captured:
        return need
    if fits := [size for size in captured if size.holds(need)]:
        return min(fits, key=lambda size: (size.lead + size.rows, size))
    small = need.lead + need.rows <= _MOST_ROWS and need.parts * need.width * page_size <= _MOST_KEYS
    return need if small and times >= _CAPTURE_FROM and len(captured) < _MOST_GRAPHS else None


@dataclass(slots=True)
class _Inputs:
    """What a step reads."""

    columns: Tensor  # [3, L + R] int64: tokens, positions, slots
    starts: Tensor  # [L + P + 1] int32
    table: Tensor  # [L + P, M] int32
    lengths: Tensor  # [L + P] int32


_Held = HeldStep[MixedSize, _Inputs, Tensor]  # gives hidden states [L + R, D]


class MixedGraphs:
    """Steps that come again and again as graphs of `graphs`; hidden states are those of plain steps, bit for bit."""

    def __init__(self, model: Any, cache: Any, graphs: GraphCache) -> None:
        self.model, self.cache, self.graphs, self.device = model, cache, graphs, graphs.device
        graphs.drop(MixedSize)  # of another cache

    @torch.no_grad()
    def run(self, plan: Plan, slots: np.ndarray) -> tuple[Tensor, np.ndarray] | None:
        """Hidden states of the plan's tokens and others, and the rows [T] of its own; None if no graph serves it.

        `slots` [T] are the cache slots of its tokens.
        """
        lead = int(np.argmax(plan.counts != 1)) if (plan.counts != 1).any() else len(plan.counts)
        if lead == len(plan.counts):
            return None
        counts, page_size = plan.counts[lead:], self.cache.page_size
        need = MixedSize.of(lead, counts, plan.block_table.shape[1], page_size)
        taken = self.graphs.choose(need, partial(choose, page_size=page_size))
        if taken is None:
            return None
        held = self.graphs.held(taken, self._prepare)
        rows = np.arange(len(plan.tokens))
        rows[lead:] += taken.lead - lead
        self._fill(held.inputs, taken, plan, slots, rows, lead)
        return self.graphs.run(held), rows

    def _fill(
        self, inputs: _Inputs, size: MixedSize, plan: Plan, slots: np.ndarray, rows: np.ndarray, lead: int
    ) -> None:
        """The plan as inputs, padding around it."""
        number, total = len(plan.counts), size.lead + size.parts
        columns = np.zeros((3, size.lead + size.rows), dtype=np.int64)
        columns[2] = -1  # a padding row writes nothing
        for row, column in enumerate((plan.tokens, plan.positions, slots)):
            columns[row, rows] = column
        counts = np.ones(total, dtype=np.int64)
        own = np.arange(number)
        own[lead:] += size.lead - lead
        counts[own] = plan.counts
        counts[-1] += size.lead + size.rows - counts.sum()
        assert counts[-1] > 0 and own[-1] < total - 1, "no room for padding"
        lengths = counts.copy()  # a part that is padding sees its own rows, as keys of page 0
        lengths[own] = plan.starts + plan.counts
        table = np.zeros((total, size.width), dtype=np.int32)
        table[own, : plan.block_table.shape[1]] = plan.block_table
        starts = np.concatenate(([0], np.cumsum(counts)))
        for target, values in (
            (inputs.columns, columns), (inputs.starts, starts), (inputs.table, table), (inputs.lengths, lengths),
        ):
            target.copy_(torch.from_numpy(values.astype(np.int32) if target.dtype == torch.int32 else values))

    def _prepare(self, size: MixedSize) -> _Held:
        total, device = size.lead + size.parts, self.device
        starts, table, lengths = (
            torch.zeros(shape, dtype=torch.int32, device=device) for shape in (total + 1, (total, size.width), total)
        )
        columns = torch.zeros(3, size.lead + size.rows, dtype=torch.int64, device=device)
        inputs, model = _Inputs(columns, starts, table, lengths), self.model
        batch = self._batch(inputs, size)
        # without `self`, which would keep the cache from being freed
        return HeldStep(size, inputs, lambda: model(batch))

    def _batch(self, inputs: _Inputs, size: MixedSize) -> ForwardBatch:
        """The step that a graph holds. The lengths that the host knows of parts are bounds."""
        plan = PagedPlan(
            cache=self.cache, cu_seqlens=inputs.starts, query_lengths=(1,) * size.lead + (size.rows,) * size.parts,
            kv_lengths=inputs.lengths, kv_pages=(size.width,) * (size.lead + size.parts), slots=inputs.columns[2],
            block_table=inputs.table,
        )
        return ForwardBatch(inputs.columns[0], inputs.columns[1], plan, "rollout")
