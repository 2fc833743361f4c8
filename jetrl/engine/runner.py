"""`ModelRunner`: a scheduler's plan -> `ForwardBatch` -> the model's forward -> drawn tokens. Owns the KV cache.

The forward is the one that the trainer calls; only the attention plan differs (pages instead of whole sequences).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from jetrl.engine.graphs.cache import GraphCache
from jetrl.engine.graphs.capture import Capture
from jetrl.engine.graphs.decode import DecodeGraphs, DecodeInputs
from jetrl.engine.graphs.drafts import DraftGraphs
from jetrl.engine.graphs.mixed import MixedGraphs
from jetrl.engine.plan import Plan
from jetrl.engine.rows import rows_for
from jetrl.engine.sampler import SamplingTable, check_finite, is_cut, sample_rows
from jetrl.engine.settings import EngineSettings
from jetrl.engine.sharing import Merge, served
from jetrl.engine.speculation.drafts import DraftIndex
from jetrl.engine.speculation.verify import Burst, Proposal, burst
from jetrl.engine.state_pool import StatePool, grid_of
from jetrl.precision.recipe import Recipe
from jetrl.spec import ModelSpec
from jetrl.types import ForwardBatch, PagedPlan, StateRows

_KEEP_SHARE = 0.1  # of a GPU's memory: where nothing else is set, a larger cache is freed when the engine rests


class Model(Protocol):
    """What the engine needs from a model; `model.transformer.Transformer` is one."""

    spec: ModelSpec
    recipe: Recipe
    dtype: torch.dtype

    @property
    def head_weight(self) -> Tensor: ...

    def __call__(self, batch: ForwardBatch) -> Tensor:
        """Final hidden states [T, D]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """FP32 logits [T, V]."""
        ...


Observe = Callable[[Plan], None]


class ModelRunner:
    """Runs plans on `model`. `model_seconds` and `sample_seconds` add up until `reset_times`.

    `observe` hears of each plan before the model's forward pass; no step is in a CUDA graph then, nor one of several.
    """

    mixed_graphs = True  # a benchmark that compares turns them off

    def __init__(self, model: Model, settings: EngineSettings, observe: Observe | None = None) -> None:
        self.model, self.settings, self.page_size = model, settings, settings.page_size
        self.observe, self.cuda_graphs = observe, observe is None
        self.keep_bytes = settings.keep_bytes  # a larger cache is freed when the engine rests; None: by `_KEEP_SHARE`
        self.cache: StatePool | None = None
        self.decode_graphs: DecodeGraphs | None = None
        self.draft_graphs: DraftGraphs | None = None
        self.mixed: MixedGraphs | None = None
        self._graphs: GraphCache | None = None
        self.merged_calls = 0  # bursts that read shared pages once
        self.reset_times()

    @property
    def device(self) -> torch.device:
        return self.model.head_weight.device

    @property
    def num_rows(self) -> int:
        """Rows of the cache for states of sequences; 0: no layer has any."""
        return rows_for(self.settings.max_num_seqs) if grid_of(self.model.spec) else 0

    @property
    def graphs(self) -> GraphCache:
        """All steps of this runner that are graphs, in one memory pool."""
        if self._graphs is None:
            self._graphs = GraphCache(Capture(self.device), self.model)
        return self._graphs

    @property
    def on_graphs(self) -> bool:
        """Whether steps may be graphs."""
        return self.cuda_graphs and self.device.type == "cuda"

    def take_metrics(self) -> dict[str, float]:
        """Since the last call: graphs captured, their seconds, and the cache that stays on the GPU now; on a GPU."""
        if self.device.type != "cuda":
            return {}
        number, seconds = self.graphs.take()
        kept = 0 if self.cache is None else self.cache.num_bytes
        return {
            "perf/graph_captures": float(number), "perf/graph_capture_s": seconds,
            "perf/kv_cache_kept_gib": kept / 2**30,
        }

    def reset_times(self) -> None:
        self.model_seconds = self.sample_seconds = 0.0

    def reserve(self, num_pages: int) -> bool:
        """Give the cache `num_pages` pages. True: it is a new one, without content."""
        if self.cache is None or self.cache.num_pages != num_pages or self.cache.device != self.device:
            self.release()  # free the old one before the new one is allocated
            format = self.model.recipe.kv_cache
            self.cache = StatePool(
                self.model.spec, num_pages, self.page_size, self.model.dtype, self.device, format, self.num_rows,
                self.settings.drafts,
            )
            return True
        return False

    def release(self) -> None:
        """Free the cache's memory (the trainer may need it between two rollouts)."""
        self.cache = self.decode_graphs = self.draft_graphs = self.mixed = None
        if self._graphs is not None:
            self._graphs.clear()

    def give_back(self) -> None:
        """The engine rests: release a cache whose memory training needs. Another stays, with its graphs."""
        if self.cache is None or self.device.type != "cuda":
            return
        most = self.keep_bytes
        if most is None:
            most = int(_KEEP_SHARE * torch.cuda.get_device_properties(self.device).total_memory)
        if self.cache.num_bytes > most:
            self.release()
            torch.cuda.empty_cache()

    def weights_changed(self) -> None:
        """Drop the captured graphs if the weights have moved (publishing writes in place)."""
        if self._graphs is not None:
            self._graphs.check_addresses()

    def burst(self, plan: Plan, table: SamplingTable) -> int:
        """How many steps in a row this plan could run, each feeding the next on the device; 0: not by a decode graph.

        Untruncated distributions only: the plain path draws from truncated ones, step by step.
        """
        if not (self.on_graphs and plan.is_decode):
            return 0
        chosen = table.take(plan.sample_slots)
        return 1 if is_cut(chosen, self.model.spec.vocab_size).any() else self.settings.max_burst

    @torch.no_grad()
    def run(self, plan: Plan, table: SamplingTable, steps: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """`steps` forward passes, and in each a draw for every entry of the plan's `sample_*` columns.

        `table` has a row for each slot. Returns tokens [steps, S] int64 and log-probs [steps, S] float32 on the host.
        """
        assert self.cache is not None, "reserve() comes before run()"
        if self.observe is not None:
            self.observe(plan)
        if len(plan.copies):
            self.cache.copy_pages(self._put(plan.copies))
        if self.on_graphs and plan.is_decode:
            return self._decode(plan, table, steps)
        assert steps == 1, "only decode plans run for several steps"
        start = self._clock()
        hidden, places = self._hidden(plan)
        if not len(plan.sample_rows):
            self.model_seconds += self._clock() - start
            return np.empty((1, 0), dtype=np.int64), np.empty((1, 0), dtype=np.float32)
        rows, inverse = np.unique(plan.sample_rows, return_inverse=True)
        logits = self.model.logits(hidden[self._put(rows if places is None else places[rows])])
        between = self._clock()
        if not np.array_equal(rows, plan.sample_rows):  # samples of one prompt draw from one row of logits
            logits = logits[self._put(inverse)]
        tokens, logprobs = sample_rows(logits, table.take(plan.sample_slots), plan.sample_positions)
        result = tokens.cpu().numpy()[None], logprobs.cpu().numpy()[None]
        self.model_seconds += between - start
        self.sample_seconds += self._clock() - between
        return result

    def _hidden(self, plan: Plan) -> tuple[Tensor, np.ndarray | None]:
        """Hidden states of a step with prompts, and in which rows those of its tokens are, if not one by one."""
        # with states of sequences, only the device knows in a graph which rows of a step are whose
        if self.on_graphs and self.mixed_graphs and plan.row_reads is None:
            if self.mixed is None:
                self.mixed = MixedGraphs(self.model, self.cache, self.graphs)
            if (found := self.mixed.run(plan, self._slots(plan))) is not None:
                return found
        return self.model(self._batch(plan)), None

    def _decode(self, plan: Plan, table: SamplingTable, steps: int) -> tuple[np.ndarray, np.ndarray]:
        """`run` of steps in which every sequence computes and draws one token, as CUDA graphs."""
        start = self._clock()
        if (graphs := self.decode_graphs) is None:
            graphs = DecodeGraphs(self.model, self.cache, self.graphs, self.settings.max_burst, self._merge)
            self.decode_graphs = graphs
        chosen = table.take(plan.sample_slots)
        step = DecodeInputs(
            tokens=plan.tokens, positions=plan.positions, slots=self._slots(plan), keys=chosen.key,
            sample_positions=plan.sample_positions, temperature=chosen.temperature, block_table=plan.block_table,
            row_reads=plan.row_reads, row_writes=plan.row_writes,
        )
        if is_cut(chosen, self.model.spec.vocab_size).any():
            logits = graphs.logits(step)
            tokens, logprobs = sample_rows(logits, chosen, plan.sample_positions)
            result = tokens.cpu().numpy()[None], logprobs.cpu().numpy()[None]
        else:
            drawn, logprobs, maxima = graphs.run(step, steps)
            check_finite(maxima)
            result = drawn.numpy(), logprobs.numpy()
        self.merged_calls += graphs.merged
        self.model_seconds += self._clock() - start
        return result

    @torch.no_grad()
    def run_drafted(self, plan: Plan, table: SamplingTable, steps: int, index: DraftIndex, rows: np.ndarray) -> Burst:
        """`steps` steps of a decode plan with drafts, from `rows` [S] of `index`; `table` as in `run`."""
        assert self.cache is not None and plan.depth, "reserve() and extend() come before run_drafted()"
        start = self._clock()
        if len(plan.copies):
            self.cache.copy_pages(self._put(plan.copies))
        chosen = table.take(plan.sample_slots)
        # with states of sequences, only the device knows in a graph how many rows of each are drafts that count
        if self.on_graphs and plan.row_reads is None:
            if self.draft_graphs is None or self.draft_graphs.index is not index:
                self.draft_graphs = DraftGraphs(self.model, self.cache, index, self.graphs, self.settings.max_burst)
            found = self.draft_graphs.run(plan, chosen, rows, steps)
        else:
            compute, grid = partial(self._positions, plan, chosen, self._rows(plan)), grid_of(self.model.spec, True)
            found = burst(plan, chosen, index, rows, steps, self.page_size, compute, grid)
        check_finite(torch.from_numpy(found.maxima).amax(0))
        self.model_seconds += self._clock() - start
        return found

    def _positions(
        self, plan: Plan, table: SamplingTable, states: StateRows | None, step: Proposal, real: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Tokens and log-probs drawn at the `real` [B, J] positions of a step with drafts, in their order. The next
        step reads the `states` that this one leaves."""
        assert self.cache is not None
        counts = real.sum(1)
        some = counts > 0  # others are full
        kept = counts[some]
        starts, lengths = torch.zeros(len(kept) + 1, dtype=torch.int32), step.positions[some, 0] + kept
        starts[1:] = kept.cumsum(0)
        width = -(-int(lengths.max()) // self.page_size)
        paged = PagedPlan(
            cache=self.cache, cu_seqlens=starts.to(self.device), query_lengths=tuple(kept.tolist()),
            kv_lengths=lengths.to(torch.int32), kv_pages=tuple((-(-lengths // self.page_size)).tolist()),
            block_table=self._put(plan.block_table[some.cpu().numpy(), :width]), slots=step.slots[real],
            rows=None if states is None else StateRows(states.read[some], states.write[some]),
        )
        positions = step.positions[real]
        logits = self.model.logits(self.model(ForwardBatch(step.tokens[real], positions, paged, side="rollout")))
        if states is not None:
            states.read[some] = states.write[some]
        owner = torch.arange(len(counts), device=self.device)[:, None].expand_as(real)[real].cpu().numpy()
        return sample_rows(logits, table.take(owner), positions.cpu().numpy() + 1)

    @property
    def _merge(self) -> Merge:
        """When pages that sequences share are read once."""
        return self.settings.merge_prefix if served(self.model.spec, self.page_size) else "off"

    def _slots(self, plan: Plan) -> np.ndarray:
        """Cache slot of each new token [T] int64."""
        owner = np.repeat(np.arange(len(plan.counts)), plan.counts)
        pages = plan.block_table[owner, plan.positions // self.page_size].astype(np.int64)
        return pages * self.page_size + plan.positions % self.page_size

    def _batch(self, plan: Plan) -> ForwardBatch:
        """The plan's columns as tensors, with the cache slot of every new token."""
        assert self.cache is not None
        kv_lengths = plan.starts + plan.counts
        paged = PagedPlan(
            cache=self.cache,
            cu_seqlens=self._put(np.concatenate(([0], np.cumsum(plan.counts))).astype(np.int32)),
            query_lengths=tuple(plan.counts.tolist()),
            kv_lengths=self._put(kv_lengths.astype(np.int32)),
            kv_pages=tuple((-(-kv_lengths // self.page_size)).tolist()),
            block_table=self._put(plan.block_table),
            slots=self._put(self._slots(plan)),
            rows=self._rows(plan),
        )
        return ForwardBatch(self._put(plan.tokens), self._put(plan.positions), paged, side="rollout")

    def _rows(self, plan: Plan) -> StateRows | None:
        if plan.row_reads is None or plan.row_writes is None:
            return None
        return StateRows(self._put(plan.row_reads), self._put(plan.row_writes))

    def _put(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    def _clock(self) -> float:
        """Seconds, once the device has finished its work (a step waits for its tokens anyway)."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()
