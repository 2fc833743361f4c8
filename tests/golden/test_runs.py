"""The first step of a run with each option, before any update: samples, log-probs, rewards, advantages and the flow.

All of it is exact arithmetic, so it is equal on every machine. `runs.json` is of commit 107d9e3, from before engines,
conversations and algorithms were opened. Since 2026-11-25 what is outside the loss has null as its advantage, not 0;
all else in "drop, overlong, truncated" is as before. `runs.py` compares whole runs, on one machine.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from golden.runs import TINY, record_of
from tiny import tiny_run

GOLDEN = json.loads(Path(__file__).with_name("runs.json").read_text())


@pytest.mark.parametrize("name", GOLDEN)
def test_first_step(name: str, tmp_path: Path) -> None:
    found = record_of(tiny_run(tmp_path, {"eval.eval_interval": 0} | TINY[name] | {"train.steps": 1}))
    assert {"flow": found["flow"], "samples": found["samples"]["1"]} == GOLDEN[name]


def test_every_option_but_the_warm_start_is_here() -> None:
    """A warm start is an update: its bits depend on the machine."""
    assert set(GOLDEN) == set(TINY) - {"warm start"}
