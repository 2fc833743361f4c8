"""How CUDA graphs are captured, with a stand-in for torch's part."""

from __future__ import annotations

import gc
import itertools
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from jetrl.engine.graphs.capture import Capture

GPU = torch.device("cuda")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked of torch.cuda, in order; a graph's pool included."""
    made: list[str] = []

    class Graph:
        def capture_begin(self, pool: object, capture_error_mode: str) -> None:
            assert capture_error_mode == "thread_local", "other threads may use the GPU"
            made.append(f"begin {pool}")

        def capture_end(self) -> None:
            made.append("end")

    @contextmanager
    def stream(_: object):  # noqa: ANN202
        made.append("on its stream")
        yield

    pools = itertools.count(1)
    fakes = {
        "graph_pool_handle": lambda: f"pool {next(pools)}",
        "Stream": lambda device: SimpleNamespace(wait_stream=lambda other: None),
        "current_stream": lambda device: None, "stream": stream, "CUDAGraph": Graph,
        "mem_get_info": lambda device: (3 << 30, 8 << 30), "synchronize": lambda device: None,
        "empty_cache": lambda: made.append("empty"),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return made


def test_all_graphs_share_a_pool(calls: list[str]) -> None:
    capture = Capture(GPU)
    found = [capture(lambda: "found"), capture(lambda: 2)]
    assert [value for _, value in found] == ["found", 2]
    assert calls == ["on its stream", "begin pool 1", "end"] * 2


def test_a_pool_that_its_last_graph_has_left_is_not_used_again(calls: list[str]) -> None:
    capture = Capture(GPU)
    graphs = [capture(lambda: None)[0], capture(lambda: None)[0]]
    graphs.pop()
    graphs.append(capture(lambda: None)[0])
    graphs.clear()
    capture(lambda: None)
    assert [text for text in calls if "begin" in text] == ["begin pool 1"] * 3 + ["begin pool 2"]


@pytest.mark.parametrize("on", [True, False])
def test_the_collector_rests_within_a_capture(calls: list[str], on: bool) -> None:
    """It would destroy graphs of engines that are gone, which CUDA refuses while it captures."""
    was = gc.isenabled()
    try:
        (gc.enable if on else gc.disable)()
        assert not Capture(GPU)(gc.isenabled)[1]
        assert gc.isenabled() is on
    finally:
        (gc.enable if was else gc.disable)()


def test_freed_memory_is_given_back_only_where_the_gpu_is_nearly_full(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    capture = Capture(GPU)
    for free, asked, enough in ((3 << 30, [], True), (1 << 30, ["empty"], True), (1 << 20, ["empty"], False)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 8 << 30))
        assert capture.make_room() is enough and calls == asked
        calls.clear()


def test_an_error_within_ends_the_capture(calls: list[str]) -> None:
    capture = Capture(GPU)
    with pytest.raises(ZeroDivisionError):
        capture(lambda: 1 / 0)
    assert calls[-1] == "end" and not capture._alive
