"""The benchmark of waits for checkpoints: what the rows of a run say, and a run of a tiny model both ways."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import checkpoint_stall
import pytest


def test_rows_are_summed_up() -> None:
    row = {"time/step": 2.0}
    found = checkpoint_stall.summary([
        row, {"time/step": 5.0, "time/checkpoint": 1.0, "perf/checkpoint_beside_s": 3.0}, row,
        {"time/step": 4.0, "time/checkpoint": 1.5, "perf/checkpoint_beside_s": 5.0}, row,
    ], checkpoints=2)
    assert found == {
        "stall s": 2.5, "share": pytest.approx(2.5 / 15), "write s": 4.0, "step s": 2.0, "checkpoints": 2
    }
    waited = checkpoint_stall.summary([row, row, {"time/step": 4.0, "time/checkpoint": 3.0}], checkpoints=2)
    assert waited["write s"] == 1.5


@pytest.mark.slow
def test_a_tiny_shape_runs_both_ways(tmp_path: Path) -> None:
    command = [
        sys.executable, checkpoint_stall.__file__, "--shape", "tiny", "--device", "cpu", "--steps", "2", "--every", "1",
        "--rounds", "1", "--tokens", "200", "--response", "8", "--folder", str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-2].split()[:2] == ["tiny", "on"] and lines[-1].split()[:2] == ["tiny", "off"]
    assert not list(tmp_path.iterdir())
