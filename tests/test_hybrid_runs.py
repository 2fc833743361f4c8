"""Whole runs of a hybrid with Gated DeltaNet: ranks."""

from __future__ import annotations

from pathlib import Path

from ranks import run_ranks
from test_ranks_loop import FIXED, assert_same_run, rank_run
from tiny import HYBRID, numbers, tiny_run


def test_one_rank_and_two_are_the_same_run(tmp_path: Path) -> None:
    """FP8, a warm start, a reference policy: parity 0, and the bits of one process."""
    changes = FIXED | HYBRID | {
        "train.steps": 2, "rl.kl_coef": 0.01, "task.reward": f"{tmp_path}/one/reward.py:reward",
        "sft": {"steps": 2, "batch_size": 12, "lr": 1e-3, "cache_dir": str(tmp_path / "cache")},
    }
    alone = tiny_run(tmp_path / "one", changes)
    assert all(row["parity/logprob_abs_diff_max"] == 0.0 for row in numbers(alone)[1:])
    assert run_ranks(rank_run, 2, tmp_path / "two", changes) == [True, True]
    assert_same_run(tmp_path / "two" / "runs" / "tiny", alone)
