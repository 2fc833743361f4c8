"""Which CUDA graph serves a batch: a capture is made for a size that stays, not for one that passes by."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from replays import graph_cache

from jetrl.engine.graphs.cache import HeldStep, own_or_larger, padded_batch
from jetrl.engine.graphs.decode import DecodeGraphs, DecodeInputs, GraphSize, _Inputs
from jetrl.engine.graphs.drafts import DraftGraphs, DraftSize
from jetrl.engine.graphs.mixed import MixedGraphs, MixedSize
from jetrl.engine.speculation.drafts import DraftIndex
from jetrl.kernels.attention.state import DecodeState
from jetrl.types import ForwardBatch, PagedPlan


@pytest.mark.parametrize(("n", "size"), [(1, 1), (3, 4), (16, 16), (17, 32), (255, 256), (256, 256), (257, 320)])
def test_sizes_hold_their_batch(n: int, size: int) -> None:
    assert padded_batch(n) == size


def test_the_first_demands_are_met_by_a_captured_graph_of_up_to_twice_the_rows() -> None:
    big, need = GraphSize(256, 32, True), GraphSize(240, 32, True)
    assert own_or_larger([], need, 1) == need, "nothing else is there"
    assert own_or_larger([big], need, 1) == big and own_or_larger([big], need, 2) == big
    assert own_or_larger([big], need, 3) == need, "asked for again and again: its own graph pays off"
    assert own_or_larger([big, need], need, 1) == need
    assert own_or_larger([big, GraphSize(272, 32, True)], need, 1) == big, "the smallest that holds it"


@pytest.mark.parametrize(
    "other",
    [GraphSize(128, 32, True), GraphSize(512, 32, True), GraphSize(256, 16, True), GraphSize(256, 32, False),
     GraphSize(256, 32, True, 8)],
)
def test_a_graph_that_does_not_fit_is_not_taken(other: GraphSize) -> None:
    """Too few rows, more than twice as many, too narrow a page table, no draws, shared pages where none are."""
    need = GraphSize(240, 32, True)
    assert own_or_larger([other], need, 1) == need


def test_a_wider_table_serves_a_narrower_one() -> None:
    wide = GraphSize(64, 64, True)
    assert own_or_larger([wide], GraphSize(64, 32, True), 1) == wide


def test_a_batch_that_runs_dry_captures_few_graphs() -> None:
    """256 sequences of ragged lengths that end one after another, 8 steps a look: each size is met about once."""
    captured: dict[GraphSize, None] = {}
    asked: dict[GraphSize, int] = {}
    for n in range(256, 15, -16):
        need = GraphSize(padded_batch(n), 32, True)
        asked[need] = asked.get(need, 0) + 1
        captured[own_or_larger(captured, need, asked[need])] = None
    assert [size.rows for size in captured] == [256, 112, 48, 16]


def test_room_for_more_chunks_serves_fewer_but_some() -> None:
    wide = GraphSize(64, 64, True, 8)
    assert own_or_larger([wide], GraphSize(64, 64, True, 4), 1) == wide
    for need in (GraphSize(64, 64, True, 16), GraphSize(64, 64, True)):
        assert own_or_larger([wide], need, 1) == need


class _Uncaptured(DecodeGraphs):
    """What a graph would read, without one."""

    def _prepare(self, of: GraphSize) -> Any:
        size, width, _, chunks = of
        state = DecodeState.empty(size, width, self.max_steps, 128, self.device)
        plan = PagedPlan(
            cache=None, cu_seqlens=torch.arange(size + 1), query_lengths=(1,) * size, kv_lengths=state.kv_lengths,
            kv_pages=(width,) * size, slots=state.integers[2], block_table=state.table,
            shared=self._shared(size, chunks) if chunks else None,
        )
        batch = ForwardBatch(state.integers[0], state.integers[1], plan, "rollout")
        step: Any = None
        return HeldStep(of, _Inputs(batch, state, torch.ones(size)), step)


def inputs(groups: list[int], pages: int) -> DecodeInputs:
    """Groups of so many samples, each of a prompt of `pages` pages of 128."""
    n = sum(groups)
    samples = [(g, i) for g, count in enumerate(groups) for i in range(count)]
    rows = [[*range(100 * g, 100 * g + pages), 5000 + 50 * g + i] for g, i in samples]
    position = np.full(n, 128 * pages + 7)
    return DecodeInputs(
        np.zeros(n, np.int64), position, position, np.zeros(n, np.uint64), position, np.ones(n, np.float32),
        np.array(rows, np.int32),
    )


def test_shared_pages_reach_the_graph_while_groups_shrink() -> None:
    spec = SimpleNamespace(num_heads=32, num_kv_heads=8, latent=None)
    cache = SimpleNamespace(key_bytes=2 * 8 * 128 * 2, page_size=128)
    model = SimpleNamespace(spec=spec, addresses=lambda: ())
    graphs = {mode: _Uncaptured(model, cache, graph_cache(model), 8, mode) for mode in ("auto", "on", "off")}
    rooms = []
    for groups in ([16] * 4, [16, 16, 16], [9, 16, 2], [16, 1], [3, 1, 1], [1, 1]):
        held = {mode: one._ready(inputs(groups, 64), True) for mode, one in graphs.items()}
        shared = {mode: one.inputs.batch.plan.shared for mode, one in held.items()}
        n, together = sum(groups), [g for g in groups if g > 1]
        assert shared["off"] is None and not graphs["off"].merged
        assert (shared["auto"] is not None) == graphs["auto"].merged == (n >= 48), "a measured win, or too few"
        assert graphs["on"].merged == bool(together)
        if not together:
            continue
        first, members, tiles = (getattr(shared["on"], name) for name in ("first", "members", "tiles"))
        rooms.append(len(members))
        assert len(first) == padded_batch(max(n, len(first))) and len(tiles) == len(members) >= len(together)
        ends = np.cumsum(groups)
        expected = [list(range(end - g, end)) for end, g in zip(ends, groups, strict=True) if g > 1]
        assert sorted([m for m in row if m >= 0] for row in members.tolist()[: len(together)]) == expected
        assert tiles.tolist() == [64] * len(together) + [0] * (len(tiles) - len(together))
        assert first.tolist() == [64 if g > 1 else 0 for g in groups for _ in range(g)] + [0] * (len(first) - n)
    assert rooms[0] == 4 and rooms[-1] < 4


class Cache:
    """Stands for a KV cache that nobody reads."""

    page_size, num_rows = 16, 0


def test_a_cache_is_free_as_soon_as_its_graphs_are_dropped() -> None:
    """And not when the garbage collector comes by, minutes later: the next cache, and training, need the memory."""
    index = DraftIndex(2, 64, torch.device("cpu"))
    model = SimpleNamespace(spec=SimpleNamespace(max_position=64), addresses=lambda: ())

    def decode(cache: Any) -> tuple[Any, Any]:
        return DecodeGraphs(model, cache, graph_cache(model), 8), GraphSize(4, 32, True)

    def mixed(cache: Any) -> tuple[Any, Any]:
        return MixedGraphs(model, cache, graph_cache(model)), MixedSize(4, 2, 64, 32)

    def drafts(cache: Any) -> tuple[Any, Any]:
        return DraftGraphs(model, cache, index, graph_cache(model), 8), DraftSize(4, 32, 2, True)

    gc.disable()
    try:
        for make in (decode, mixed, drafts):
            cache = Cache()
            (user, size), held = make(cache), weakref.ref(cache)
            graphs = user.graphs
            graphs.held(size, user._prepare)
            del cache, user
            assert held() is not None
            graphs.clear()
            assert held() is None, make.__name__
    finally:
        gc.enable()
