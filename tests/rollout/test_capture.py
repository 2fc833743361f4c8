"""How CUDA graphs are captured, with a stand-in for torch's part."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from jetrl.rollout.capture import Capture

GPU = torch.device("cuda")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked of torch.cuda, in order; a graph's pool included."""
    made: list[str] = []

    class Graph:
        def capture_begin(self, pool: object) -> None:
            made.append(f"begin {pool}")

        def capture_end(self) -> None:
            made.append("end")

    @contextmanager
    def stream(_: object):  # noqa: ANN202
        made.append("on its stream")
        yield

    fakes = {
        "graph_pool_handle": lambda: "pool", "Stream": lambda device: SimpleNamespace(wait_stream=lambda other: None),
        "current_stream": lambda device: None, "stream": stream, "CUDAGraph": Graph,
        "mem_get_info": lambda device: (3 << 30, 8 << 30), "synchronize": lambda device: None,
        "empty_cache": lambda: made.append("empty"),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return made


def test_all_graphs_share_a_pool_and_are_counted(calls: list[str]) -> None:
    capture = Capture(GPU)
    assert [capture(lambda: "found")[1], capture(lambda: 2)[1]] == ["found", 2]
    assert calls == ["on its stream", "begin pool", "end"] * 2
    number, seconds = capture.take()
    assert number == 2 and seconds > 0 and capture.take() == (0, 0.0)


def test_freed_memory_is_given_back_only_where_the_gpu_is_nearly_full(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 8 << 30))
    Capture(GPU)(lambda: None)
    assert calls == ["empty", "on its stream", "begin pool", "end"]


def test_an_error_within_ends_the_capture(calls: list[str]) -> None:
    capture = Capture(GPU)
    with pytest.raises(ZeroDivisionError):
        capture(lambda: 1 / 0)
    assert calls[-1] == "end" and capture.number == 0
