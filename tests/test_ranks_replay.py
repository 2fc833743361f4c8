"""Records of runs on several ranks: with sums in a fixed order, digests and rows are those of one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from ranks import run_ranks
from test_ranks_loop import rank_run
from tiny import tiny_run

from jetrl.run.replay import record
from jetrl.run.replay.checks import WHATS, replay

RUN: dict[str, Any] = {
    "train.steps": 2, "train.reduction": "fixed", "train.max_tokens_per_gpu": 64, "eval.eval_interval": 0,
}


def test_digests_of_two_ranks_are_those_of_one(tmp_path: Path) -> None:
    alone = tiny_run(tmp_path / "alone", RUN)
    run_ranks(rank_run, 2, tmp_path / "two", RUN, seconds=300.0)
    two = tmp_path / "two" / "runs" / "tiny"
    for step in (1, 2):
        mine, other = record.read(alone, step), record.read(two, step)
        assert (mine.ranks, other.ranks) == (1, 2) and len(mine.digests) > 100
        assert replace(other, ranks=1) == mine
    for what in WHATS:
        assert replay(two, 2, what).same
