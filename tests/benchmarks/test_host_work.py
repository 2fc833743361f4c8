"""The host's work of one rank of several, in miniature: its parts, and bytes from the other ranks only."""

from __future__ import annotations

import argparse

import host_work
import pytest


@pytest.mark.parametrize("every", [False, True])
def test_parts_add_up_and_bytes_come_from_the_others(every: bool) -> None:
    args = argparse.Namespace(answers=8, tokens=64, prompt=16, micro_tokens=512, every=every)
    one, four = host_work.measured(1, args), host_work.measured(4, args)
    assert one["MB"] == 0 and four["MB"] > 3 * 8 * (64 + 16) * 8 / 2e6
    assert four["micro-batches"] > 2 * one["micro-batches"]
    parts = [four[part] for part in ("send", "receive", "reward", "plan", "rows")]
    assert four["host"] == pytest.approx(sum(parts)) and all(value >= 0 for value in parts)
