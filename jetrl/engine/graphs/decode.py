"""Decode steps as CUDA graphs: one launch instead of a dozen per layer, which the host could not issue fast enough.

A graph is captured for batch sizes from a fixed list; smaller batches are padded with rows that write nothing to the
cache. A row's bits do not depend on the other rows, so padding changes none. Graphs hold the addresses of
weights and cache. Publishing writes new weights to the old addresses; code that moves either must drop the graphs.

Legend: `B` rows, of which the first `n` are real, `M` pages per sequence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from jetrl.engine.graphs.capture import Capture
from jetrl.engine.rows import PADDING, ZEROS
from jetrl.engine.sharing import SHARE_FROM, Merge, Sharing, chunk_size, find_sharing
from jetrl.kernels.attention.state import DecodeState, SharedPages, advance
from jetrl.kernels.logprob.ops import draw
from jetrl.types import ForwardBatch, PagedPlan, StateRows


def padded_batch(n: int) -> int:
    """The smallest captured size that holds `n` rows: powers of two to 16, then multiples of 16, from 256 on of 64."""
    if n <= 16:
        return 1 << (n - 1).bit_length()
    step = 16 if n <= 256 else 64
    return -(-n // step) * step


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


def choose(captured: Collection[GraphSize], need: GraphSize, times: int) -> GraphSize:
    """The graph for `need`, requested for the `times`-th time: its own, or a captured one with up to twice the rows.

    A capture costs as much as several steps. As a batch runs out, each size is needed once or twice: not worth it.
    """
    fits = [size for size in captured if size.holds(need) and size.rows <= 2 * need.rows]
    return min(fits) if fits and times < 3 and need not in captured else need


@dataclass(slots=True)
class _Graph:
    """A step with the tensors that it reads and writes. Its first run is a plain one, and compiles what it needs."""

    step: Callable[[], Tensor]  # gives logits [B, V] FP32
    batch: ForwardBatch  # held, because the graph reads its memory
    state: DecodeState
    temperature: Tensor  # [B] FP32
    graph: Any = None  # torch.cuda.CUDAGraph
    logits: Tensor | None = None  # of a replay, if tokens are drawn outside


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
    """Captures on first use of a batch size, then replays. Both methods give what plain steps give, bit for bit."""

    def __init__(self, model: Any, cache: Any, capture: Capture, max_steps: int, merge: Merge = "off") -> None:
        self.model, self.cache, self.capture, self.max_steps = model, cache, capture, max_steps
        self.device = capture.device
        self.merge, self.merged = merge, False  # in the last call
        self._heads = model.spec.num_heads // model.spec.num_kv_heads if merge != "off" else 1
        self.addresses = model.addresses()
        self._graphs: dict[GraphSize, _Graph] = {}
        self._asked: Counter[GraphSize] = Counter()

    @torch.no_grad()
    def run(self, step: DecodeInputs, steps: int) -> tuple[Tensor, Tensor, Tensor]:
        """`steps` steps, each from the tokens that the last one drew: tokens, log-probs and maxima [steps, n], on the
        host, which waits only here."""
        assert 1 <= steps <= self.max_steps
        held = self._ready(step, draws=True)
        for _ in range(steps):
            self._step(held, draws=True)
        n, state = len(step.tokens), held.state
        drawn = state.drawn[:, :steps, :n].to("cpu")
        return drawn[0], drawn[1].view(torch.float64).to(torch.float32), drawn[2].view(torch.float64).to(torch.float32)

    @torch.no_grad()
    def logits(self, step: DecodeInputs) -> Tensor:
        """One step without its draw: logits [n, V]."""
        held = self._ready(step, draws=False)
        return self._step(held, draws=False)[: len(step.tokens)]

    def _step(self, held: _Graph, draws: bool) -> Tensor:
        """One step; a graph's first is followed by its capture. Logits, which a replay that draws does not keep."""
        if held.graph is not None:
            held.graph.replay()
            return torch.empty(0) if held.logits is None else held.logits
        first = held.step()
        held.graph, logits = self.capture(held.step)
        # logits that nobody reads are not held, so the next graph can use their memory
        held.logits = None if draws else logits
        return first

    def _ready(self, step: DecodeInputs, draws: bool) -> _Graph:
        """The graph that fits, its inputs in place."""
        n, pages = step.block_table.shape
        sharing = self._sharing(step)
        width = max(32, 1 << (pages - 1).bit_length())  # a wide table costs nothing
        need = GraphSize(padded_batch(n), width, draws, sharing.room if sharing is not None else 0)
        self._asked[need] += 1
        self.merged = sharing is not None
        taken = choose(self._graphs.keys(), need, self._asked[need])
        if taken not in self._graphs:
            self._graphs[taken] = self._prepare(*taken)
        held, (size, width, _, room) = self._graphs[taken], taken
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
        held.state.integers.copy_(torch.from_numpy(integers), non_blocking=True)
        held.state.table.copy_(sent[:, :width])
        held.state.kv_lengths.copy_(sent[:, width])
        held.state.count.zero_()
        held.temperature.copy_(torch.from_numpy(temperature), non_blocking=True)
        assert isinstance(held.batch.plan, PagedPlan)
        if (rows := held.batch.plan.rows) is not None:
            assert step.row_reads is not None and step.row_writes is not None
            for target, column, none in ((rows.read, step.row_reads, ZEROS), (rows.write, step.row_writes, PADDING)):
                padded = np.full(size, none, dtype=np.int64)
                padded[:n] = column
                target.copy_(torch.from_numpy(padded), non_blocking=True)
        if sharing is not None:
            shared = held.batch.plan.shared
            targets = (shared.first, shared.members, shared.tiles)
            for target, values in zip(targets, sharing.padded(size, room), strict=True):
                target.copy_(torch.from_numpy(values), non_blocking=True)
        return held

    def _sharing(self, step: DecodeInputs) -> Sharing | None:
        """The first pages that are worth reading once for several sequences."""
        if self.merge == "off" or (self.merge == "auto" and len(step.tokens) < SHARE_FROM):
            return None
        found = find_sharing(step.block_table, step.positions, self.cache.page_size, chunk_size(self._heads))
        keys = self.cache.keys
        key_bytes = 2 * keys.shape[3] * keys.shape[4] * keys.element_size()
        return found if found.merges(self.merge, len(step.tokens), key_bytes) else None

    def _shared(self, size: int, room: int) -> SharedPages:
        """Room for `room` chunks of `size` sequences; nothing is shared yet."""
        none = Sharing(
            np.zeros(0, np.int32), np.zeros((0, chunk_size(self._heads)), np.int32), np.zeros(0, np.int32), 0
        )
        return SharedPages(*(torch.from_numpy(x).to(self.device) for x in none.padded(size, room)))

    def _prepare(self, size: int, width: int, draws: bool, chunks: int) -> _Graph:
        device = self.device
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

        def step() -> Tensor:  # without `self`, which would keep the cache from being freed
            logits = model.logits(model(batch))
            if plan.rows is not None:  # the next step reads what this one has written
                plan.rows.read.copy_(plan.rows.write)
            if draws:
                advance(state, *draw(logits, temperature, integers[3], integers[4]))
            return logits

        return _Graph(step, batch, state, temperature)


def _no_rows(size: int, device: torch.device) -> StateRows:
    """Of padding."""
    read, write = (torch.full((size,), row, dtype=torch.int64, device=device) for row in (ZEROS, PADDING))
    return StateRows(read, write)
