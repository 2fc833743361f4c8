"""Decode steps as CUDA graphs: one launch instead of a dozen a layer, which the host could not issue fast enough.

A graph is captured for each batch size of a fixed list; smaller batches are padded with rows that write nothing to the
cache. A row's bits do not depend on the other rows (contract 3), so padding changes none. Graphs hold the addresses of
weights and cache. Publishing writes new weights to the old addresses; whoever moves either drops the graphs.

Legend: `B` rows, of which the first `n` are real, `M` pages of a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jetrl.kernels.logprob import draw
from jetrl.types import ForwardBatch, PagedPlan


def padded_batch(n: int) -> int:
    """The smallest captured size that holds `n` rows: powers of two to 16, then multiples of 16, from 256 of 64."""
    if n <= 16:
        return 1 << (n - 1).bit_length()
    step = 16 if n <= 256 else 64
    return -(-n // step) * step


@dataclass(frozen=True, slots=True)
class _Graph:
    """A captured step with the tensors that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    integers: Tensor  # [5, B] int64: tokens, positions, slots, stream keys, positions of the new tokens
    batch: ForwardBatch
    temperature: Tensor  # [B] FP32
    logits: Tensor  # [B, V] FP32
    drawn: tuple[Tensor, Tensor, Tensor]  # tokens, log-probs, maxima


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


class DecodeGraphs:
    """Captures on first use of a batch size, replays after. `run` gives what the plain step gives, bit for bit."""

    def __init__(self, model: Any, cache: Any, device: torch.device) -> None:
        self.model, self.cache, self.device = model, cache, device
        self.addresses = model.addresses()
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._pool: Any = None

    @torch.no_grad()
    def run(self, step: DecodeInputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Tokens [n], log-probs [n], maxima [n] of the untruncated draw, and the logits [n, V] for any other."""
        n, pages = step.block_table.shape
        size, width = padded_batch(n), max(32, 1 << (pages - 1).bit_length())  # a wider table costs nothing
        if (size, width) not in self._graphs:
            self._graphs[size, width] = self._capture(size, width)
        held = self._graphs[size, width]
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
        plan = held.batch.plan
        assert isinstance(plan, PagedPlan)
        sent = torch.from_numpy(table).to(self.device, non_blocking=True)
        held.integers.copy_(torch.from_numpy(integers), non_blocking=True)
        plan.block_table.copy_(sent[:, :width])
        plan.kv_lengths.copy_(sent[:, width])
        held.temperature.copy_(torch.from_numpy(temperature), non_blocking=True)
        held.graph.replay()
        tokens, logprobs, maxima = held.drawn
        return tokens[:n], logprobs[:n], maxima[:n], held.logits[:n]

    def _capture(self, size: int, width: int) -> _Graph:
        device = self.device
        integers = torch.zeros(5, size, dtype=torch.int64, device=device)
        integers[2] = -1
        page_size = self.cache.layer(0)[0].shape[1]
        plan = PagedPlan(
            cache=self.cache, cu_seqlens=torch.arange(size + 1, dtype=torch.int32, device=device),
            query_lengths=(1,) * size, kv_lengths=torch.ones(size, dtype=torch.int32, device=device),
            max_kv_length=width * page_size, slots=integers[2],
            block_table=torch.zeros(size, width, dtype=torch.int32, device=device),
        )  # fmt: skip
        batch = ForwardBatch(integers[0], integers[1], plan, "rollout")
        temperature = torch.ones(size, dtype=torch.float32, device=device)

        def step() -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
            logits = self.model.logits(self.model(batch))
            return logits, draw(logits, temperature, integers[3], integers[4])

        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):  # compiles what this batch size needs, outside of the capture
            step()
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits, drawn = step()
        self._pool = graph.pool()
        return _Graph(graph, integers, batch, temperature, logits, drawn)
