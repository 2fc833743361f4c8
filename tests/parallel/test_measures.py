"""Time in exchanges, by a clock on the host and by events on a device, and what ranks tell of themselves."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from jetrl.parallel import measures
from jetrl.parallel.measures import WAITS, Waits, rank_metrics
from jetrl.parallel.world import ALONE, World, collective


class FakeEvent:
    """A device's clock that moves by hand."""

    now = 0.0
    made = waited = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        FakeEvent.made += 1

    def record(self) -> None:
        self.at = FakeEvent.now

    def synchronize(self) -> None:
        FakeEvent.waited += 1

    def elapsed_time(self, end: FakeEvent) -> float:
        return end.at - self.at


class OnDevice:
    is_cuda = True


def test_the_host_waits_by_its_clock_and_only_where_it_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([10.0, 12.5, 20.0, 21.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks))
    waits = Waits()
    with waits.on():
        pass  # not counted: no tick is taken
    waits.start()
    with waits.on():
        pass
    with pytest.raises(KeyError), waits.on(torch.zeros(1)):
        raise KeyError
    assert waits.seconds() == 3.5
    with waits.on():
        pass  # the counting has ended


def test_the_device_waits_by_events_which_are_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    waits = Waits()
    moved: Any = OnDevice()
    for _ in range(3):
        waits.start()
        for milliseconds in (250.0, 0.0, 500.0):
            with waits.on(moved):
                FakeEvent.now += milliseconds
            FakeEvent.now += 4000.0  # it computes
        assert FakeEvent.waited < 4, "one wait for the device, at the end"
        assert waits.seconds() == 0.75
    assert (FakeEvent.made, FakeEvent.waited) == (6, 3)


def test_what_ranks_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rank_metrics(ALONE) == {}
    world = World(0, 2, 0)
    monkeypatch.setattr(World, "gather", lambda self, value: [value, (3.0, 80.0 if value[1] is not None else None)])
    monkeypatch.setattr(WAITS, "seconds", lambda: 1.0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert rank_metrics(world) == {"perf/communication_s": 2.0}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 100 * 2**30)
    assert rank_metrics(world) == {
        "perf/communication_s": 2.0, "perf/memory_peak_gib_max": 100.0, "perf/memory_peak_gib_mean": 90.0
    }


def test_every_collective_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measures.WAITS is WAITS
    WAITS.start()
    with collective("gather"):
        time.sleep(0.05)
    assert 0.04 < WAITS.seconds() < 2.0
