"""The benchmark of Gated DeltaNet: the bytes' time worked out by hand, and its small path on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import bench_delta
import pytest


def test_the_time_of_a_steps_bytes() -> None:
    """9B: 32 value heads of 46.7 KB a token, at 4.47 TB/s."""
    assert bench_delta.floor_ms(64, 32) == pytest.approx(64 * 32 * 46700 / 4.47e9, rel=1e-12)
    assert bench_delta.floor_ms(256, 32) == pytest.approx(0.0856, abs=1e-4)


def test_it_runs_without_a_gpu(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    bench_delta.main(["--tiny", "--out", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" ")[0] for line in lines] == [
        "packed", "backward", "plain", "conv", "norm", "plain-conv", "plain-norm", "decode", "general",
        "layer",
    ]
    assert all(float(line[22:].split()[0]) > 0 for line in lines)
    assert len(json.loads((tmp_path / "delta.json").read_text())["ms"]["layer decode 2"]) == bench_delta.ROUNDS
    bench_delta.main(["--tiny", "--only", "norm"])
    assert len(capsys.readouterr().out.splitlines()) == 2
