"""Decode steps as CUDA graphs: one launch instead of a dozen per layer, which the host could not issue fast enough.

A graph is captured for batch sizes from a fixed list; smaller batches are padded with rows that write nothing to the
cache. A row's bits do not depend on the other rows, so padding changes none.

Legend: `B` rows, of which the first `n` are real, `M` pages per sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from jetrl.engine.graphs.cache import GraphCache, HeldStep, own_or_larger, padded_batch
from jetrl.engine.rows import PADDING, ZEROS
from jetrl.engine.sharing import SHARE_FROM, Merge, Sharing, chunk_size, find_sharing, heads_of_a_key
from jetrl.kernels.attention.state import DecodeState, SharedPages, advance
from jetrl.kernels.logprob.ops import draw
from jetrl.types import ForwardBatch, PagedPlan, StateRows


class GraphSize(NamedTuple):
    """What a graph is captured for: rows, width of the page table, whether it draws its tokens itself, and for how many
    chunks of sequences it reads shared pages once (0: none)."""

    rows: int
    width: int
    draws: bool
    chunks: int = 0

    def holds(self, other: GraphSize) -> bool:
        alike = self.draws == other.draws and (self.chunks > 0) == (other.chunks > 0)
        return self.rows >= other.rows and self.width >= other.width and self.chunks >= other.chunks and alike


@dataclass(slots=True)
class _Inputs:
    """What a step reads and writes; the batch has views of the state."""

    batch: ForwardBatch
    state: DecodeState
    temperature: Tensor  # [B] FP32


_Held = HeldStep[GraphSize, _Inputs, Tensor | None]  # gives logits [B, V] FP32, where tokens are drawn outside


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """One decode step on the host: one new token of each of n sequences."""

    tokens: np.ndarray  # [n] int64
    positions: np.ndarray  # [n] int64
    slots: np.ndarray  # [n] int64
    keys: np.ndarray  # [n] uint64
    sample_positions: np.ndarray  # [n] int64
    temperature: np.ndarray  # [n] float32
    block_table: np.ndarray  # [n, M] int32
    row_reads: np.ndarray | None = None  # [n] int64, of states of sequences, where there are any
    row_writes: np.ndarray | None = None


class DecodeGraphs:
    """Decode steps as graphs of `graphs`. Both methods give what plain steps give, bit for bit."""

    def __init__(self, model: Any, cache: Any, graphs: GraphCache, max_steps: int, merge: Merge = "off") -> None:
        self.model, self.cache, self.graphs, self.max_steps = model, cache, graphs, max_steps
        self.device = graphs.device
        self.merge, self.merged = merge, False  # in the last call
        self._heads = heads_of_a_key(model.spec) if merge != "off" else 1
        graphs.drop(GraphSize)  # of another cache

    @torch.no_grad()
    def run(self, step: DecodeInputs, steps: int) -> tuple[Tensor, Tensor, Tensor]:
        """`steps` steps, each from the tokens that the last one drew: tokens, log-probs and maxima [steps, n], on the
        host, which waits only here."""
        assert 1 <= steps <= self.max_steps
        held = self._ready(step, draws=True)
        for _ in range(steps):
            self.graphs.run(held)
        n, state = len(step.tokens), held.inputs.state
        drawn = state.drawn[:, :steps, :n].to("cpu")
        return drawn[0], drawn[1].view(torch.float64).to(torch.float32), drawn[2].view(torch.float64).to(torch.float32)

    @torch.no_grad()
    def logits(self, step: DecodeInputs) -> Tensor:
        """One step without its draw: logits [n, V]."""
        logits = self.graphs.run(self._ready(step, draws=False))
        assert logits is not None
        return logits[: len(step.tokens)]

    def _ready(self, step: DecodeInputs, draws: bool) -> _Held:
        """The step that fits, its inputs in place."""
        n, pages = step.block_table.shape
        sharing = self._sharing(step)
        width = max(32, 1 << (pages - 1).bit_length())  # a wide table costs nothing
        need = GraphSize(padded_batch(n), width, draws, sharing.room if sharing is not None else 0)
        self.merged = sharing is not None
        held = self.graphs.held(self.graphs.choose(need, own_or_larger), self._prepare)
        inputs, (size, width, _, room) = held.inputs, held.size
        integers = np.zeros((5, size), dtype=np.int64)
        integers[2] = -1  # a padding row writes nothing
        columns = (step.tokens, step.positions, step.slots, step.keys.view(np.int64), step.sample_positions)
        for row, column in enumerate(columns):
            integers[row, :n] = column
        table = np.zeros((size, width + 1), dtype=np.int32)
        table[:, width] = 1  # and reads one key of page 0
        table[:n, :pages], table[:n, width] = step.block_table, step.positions + 1
        temperature = np.ones(size, dtype=np.float32)
        temperature[:n] = step.temperature
        sent = torch.from_numpy(table).to(self.device, non_blocking=True)
        inputs.state.integers.copy_(torch.from_numpy(integers), non_blocking=True)
        inputs.state.table.copy_(sent[:, :width])
        inputs.state.kv_lengths.copy_(sent[:, width])
        inputs.state.count.zero_()
        inputs.temperature.copy_(torch.from_numpy(temperature), non_blocking=True)
        assert isinstance(inputs.batch.plan, PagedPlan)
        if (rows := inputs.batch.plan.rows) is not None:
            assert step.row_reads is not None and step.row_writes is not None
            for target, column, none in ((rows.read, step.row_reads, ZEROS), (rows.write, step.row_writes, PADDING)):
                padded = np.full(size, none, dtype=np.int64)
                padded[:n] = column
                target.copy_(torch.from_numpy(padded), non_blocking=True)
        if sharing is not None:
            shared = inputs.batch.plan.shared
            targets = (shared.first, shared.members, shared.tiles)
            for target, values in zip(targets, sharing.padded(size, room), strict=True):
                target.copy_(torch.from_numpy(values), non_blocking=True)
        return held

    def _sharing(self, step: DecodeInputs) -> Sharing | None:
        """The first pages that are worth reading once for several sequences."""
        if self.merge == "off" or (self.merge == "auto" and len(step.tokens) < SHARE_FROM):
            return None
        found = find_sharing(step.block_table, step.positions, self.cache.page_size, chunk_size(self._heads))
        latent = self.model.spec.latent is not None
        return found if found.merges(self.merge, len(step.tokens), self.cache.key_bytes, latent) else None

    def _shared(self, size: int, room: int) -> SharedPages:
        """Room for `room` chunks of `size` sequences; nothing is shared yet."""
        none = Sharing(
            np.zeros(0, np.int32), np.zeros((0, chunk_size(self._heads)), np.int32), np.zeros(0, np.int32), 0
        )
        return SharedPages(*(torch.from_numpy(x).to(self.device) for x in none.padded(size, room)))

    def _prepare(self, of: GraphSize) -> _Held:
        device, (size, width, draws, chunks) = self.device, of
        state = DecodeState.empty(size, width, self.max_steps, self.cache.page_size, device)
        integers = state.integers
        plan = PagedPlan(
            cache=self.cache, cu_seqlens=torch.arange(size + 1, dtype=torch.int32, device=device),
            query_lengths=(1,) * size, kv_lengths=state.kv_lengths, kv_pages=(width,) * size,
            slots=integers[2], block_table=state.table, shared=self._shared(size, chunks) if chunks else None,
            rows=_no_rows(size, device) if self.cache.num_rows else None,
        )
        batch = ForwardBatch(integers[0], integers[1], plan, "rollout")
        temperature, model = torch.ones(size, dtype=torch.float32, device=device), self.model

        def step() -> Tensor | None:  # without `self`, which would keep the cache from being freed
            logits = model.logits(model(batch))
            if plan.rows is not None:  # the next step reads what this one has written
                plan.rows.read.copy_(plan.rows.write)
            if not draws:
                return logits  # type: ignore[no-any-return]
            advance(state, *draw(logits, temperature, integers[3], integers[4]))
            return None  # logits that nobody reads are not held, so the next graph can use their memory

        return HeldStep(of, _Inputs(batch, state, temperature), step)


def _no_rows(size: int, device: torch.device) -> StateRows:
    """Of padding."""
    read, write = (torch.full((size,), row, dtype=torch.int64, device=device) for row in (ZEROS, PADDING))
    return StateRows(read, write)
