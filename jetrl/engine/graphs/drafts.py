"""Decode steps with drafts as CUDA graphs: drafts, forward pass, draw and bookkeeping in one launch (`drafted`).

A graph also holds the addresses of the draft index.

Legend: `B` sequences with `J` = depth + 1 rows each, of which the first `n` are real; `M` pages per sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from jetrl.engine.graphs.cache import GraphCache, HeldStep, own_or_larger, padded_batch
from jetrl.engine.plan import Plan
from jetrl.engine.sampler import SamplingTable, is_cut, sample_rows
from jetrl.engine.speculation.drafts import DraftIndex
from jetrl.engine.speculation.verify import Burst, DraftState, Proposal, host_columns, propose, settle
from jetrl.kernels.logprob.ops import draw
from jetrl.types import ForwardBatch, PagedPlan


class DraftSize(NamedTuple):
    """What a graph is captured for: sequences, width of the page table, drafts of each, whether it draws itself."""

    rows: int
    width: int
    depth: int
    draws: bool

    def holds(self, other: DraftSize) -> bool:
        return self.rows >= other.rows and self.width >= other.width and self[2:] == other[2:]


@dataclass(slots=True)
class _Inputs:
    """What a step reads and writes."""

    state: DraftState
    temperature: Tensor  # [B] FP32


# gives logits [B * J, V] FP32 where tokens are drawn outside; the batch is held, because the graph reads its memory
_Held = HeldStep[DraftSize, _Inputs, tuple[Proposal, ForwardBatch, Tensor | None]]


class DraftGraphs:
    """Steps with drafts as graphs of `graphs`; the tokens and log-probs are those of plain steps."""

    def __init__(self, model: Any, cache: Any, index: DraftIndex, graphs: GraphCache, max_steps: int) -> None:
        self.model, self.cache, self.index, self.graphs, self.max_steps = model, cache, index, graphs, max_steps
        self.device = index.device
        graphs.drop(DraftSize)  # of another cache or index

    @torch.no_grad()
    def run(self, plan: Plan, table: SamplingTable, rows: np.ndarray, steps: int) -> Burst:
        """`steps` steps of a plan with drafts; the host waits only for the result. `table` as in `verify.burst`."""
        assert 1 <= steps <= self.max_steps
        cut = bool(is_cut(table, self.model.spec.vocab_size).any())
        held = self._ready(plan, table, rows, steps, draws=not cut)
        state = held.inputs.state
        for _ in range(steps):
            proposal, _, logits = self.graphs.run(held)
            if logits is not None:
                self._draw(state, proposal, logits, table)
        n = len(plan.tokens)
        return Burst.read(state.record[:steps, :, :n].cpu().numpy())

    def _draw(self, state: DraftState, step: Proposal, logits: Tensor, table: SamplingTable) -> None:
        """The draw of a step from truncated distributions, which no graph holds."""
        j, n = step.tokens.shape[1], len(table.key)
        positions = (step.positions[:n].cpu().numpy() + 1).reshape(-1)
        owner = np.repeat(np.arange(n), j)
        drawn, found = sample_rows(logits[: n * j], table.take(owner), positions)
        tokens, logprobs = torch.zeros_like(step.tokens), torch.zeros_like(step.tokens, dtype=torch.float32)
        tokens[:n], logprobs[:n] = drawn.view(n, j), found.view(n, j)
        settle(state, self.index, step, tokens, logprobs, torch.zeros_like(logprobs))

    def _ready(self, plan: Plan, table: SamplingTable, rows: np.ndarray, steps: int, draws: bool) -> _Held:
        """The step that fits, its inputs in place."""
        n, j = len(plan.tokens), plan.depth + 1
        pages = -(-(int(plan.positions.max()) + (steps + 1) * j) // self.cache.page_size)
        need = DraftSize(padded_batch(n), max(32, 1 << (pages - 1).bit_length()), plan.depth, draws)
        held = self.graphs.held(self.graphs.choose(need, own_or_larger), self._prepare)
        inputs, taken = held.inputs, held.size
        columns = np.zeros((5, taken.rows), dtype=np.int64)
        columns[4] = self.index.rows
        columns[:, :n] = host_columns(plan, table.key, rows)
        temperature = np.ones(taken.rows, dtype=np.float32)
        temperature[:n] = table.temperature
        wide = np.zeros((taken.rows, taken.width), dtype=np.int32)
        wide[:n, : plan.block_table.shape[1]] = plan.block_table
        inputs.state.columns.copy_(torch.from_numpy(columns), non_blocking=True)
        inputs.state.table.copy_(torch.from_numpy(wide), non_blocking=True)
        inputs.state.count.zero_()
        inputs.temperature.copy_(torch.from_numpy(temperature), non_blocking=True)
        return held

    def _inputs(self, size: DraftSize) -> tuple[DraftState, Tensor]:
        """State and temperatures that a graph of this size reads and writes."""
        state = DraftState.empty(
            size.rows, size.width, size.depth, self.max_steps, self.cache.page_size, self.index
        )
        return state, torch.ones(size.rows, dtype=torch.float32, device=self.device)

    def _prepare(self, size: DraftSize) -> _Held:
        (state, temperature), j = self._inputs(size), size.depth + 1
        starts = torch.arange(0, size.rows * j + 1, j, dtype=torch.int32, device=self.device)
        # without `self`, which would keep the cache from being freed
        step = partial(_step, self.model, self.cache, self.index, size, state, temperature, starts)
        return HeldStep(size, _Inputs(state, temperature), step)


def _step(
    model: Any, cache: Any, index: DraftIndex, size: DraftSize, state: DraftState, temperature: Tensor, starts: Tensor
) -> tuple[Proposal, ForwardBatch, Tensor | None]:
    """The step that a graph holds. `starts` int32 [B + 1] are the first rows of the sequences."""
    j, last = size.depth + 1, model.spec.max_position - 1

    def each(column: Tensor) -> Tensor:
        """A value of each sequence for each of its rows, contiguous: of one sequence, `flatten` makes no copy."""
        return column[:, None].expand(-1, j).flatten().contiguous()

    step = propose(state, index, size.depth)
    plan = PagedPlan(
        cache=cache, cu_seqlens=starts, query_lengths=(j,) * size.rows, kv_lengths=step.kv_lengths,
        kv_pages=(size.width,) * size.rows, slots=step.slots.flatten(), block_table=state.table,
    )
    # rows beyond a sequence's end are computed for nothing, but must have a place in the tables of RoPE
    batch = ForwardBatch(step.tokens.flatten(), step.positions.clamp_max(last).flatten(), plan, "rollout")
    logits = model.logits(model(batch))
    if not size.draws:
        return step, batch, logits
    drawn = draw(logits, each(temperature), each(state.columns[3]), (step.positions + 1).flatten())
    settle(state, index, step, *(x.view(size.rows, j) for x in drawn))
    return step, batch, None  # logits that nobody reads are not held, so the next graph can use their memory
