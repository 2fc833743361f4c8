"""The README picture: written, of the right size, and made of the numbers of the runs."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

from jetrl.errors import UserError
from jetrl.report.plots import plot_runs, running_mean, seconds_a_step
from jetrl.report.recorder import Recorder
from jetrl.report.run import load_runs


def drawn(monkeypatch: pytest.MonkeyPatch, folders: list[Path], out: Path) -> list:
    """The four panels of the figure that `plot_runs` saves."""
    from matplotlib.figure import Figure

    figures = []
    original = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (figures.append(self), original(self, *a, **k))[1])
    assert plot_runs(folders, out) == out
    return figures[0].axes


def test_panels_hold_the_runs_numbers(make_run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [make_run("exact", steps=30), make_run("gap", precision="fp8_rollout", steps=30, seed=1)]
    out = tmp_path / "pictures" / "runs.png"
    reward, accuracy, parity, phases = drawn(monkeypatch, folders, out)
    assert out.read_bytes().startswith(b"\x89PNG") and out.stat().st_size > 20_000
    runs = load_runs(folders)
    keys = ("reward/mean", "eval/addition/avg@1", "parity/logprob_abs_diff_max")
    for axis, key in zip((reward, accuracy, parity), keys, strict=True):
        for line, run in zip(axis.lines, runs, strict=True):
            assert (list(line.get_xdata()), list(line.get_ydata())) == run.series(key)
    assert [text.get_text() for text in parity.texts] == ["exact: exactly 0 in every step"]
    assert parity.get_yscale() == "symlog" and parity.get_ylim()[0] == 0
    ends = [max(bar.get_x() + bar.get_width() for bar in phases.patches if bar.get_y() > 0.5)]
    total = sum(seconds_a_step(runs[0], phase) for phase in runs[0].phases())
    assert ends[0] == pytest.approx(total)


def test_a_run_that_is_exact_throughout(make_run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, parity, _ = drawn(monkeypatch, [make_run("exact")], tmp_path / "p.png")
    assert [text.get_text() for text in parity.texts] == ["exactly 0 in every step"]


def test_a_bare_run_says_what_was_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Recorder(tmp_path / "bare") as recorder:
        recorder.write(1, {"reward/mean": 0.5})
    axes = drawn(monkeypatch, [tmp_path / "bare"], tmp_path / "p.png")
    assert [text.get_text() for axis in axes for text in axis.texts] == ["not measured"] * 3


def test_seconds_a_step_spreads_a_rare_phase(tmp_path: Path) -> None:
    with Recorder(tmp_path / "run") as recorder:
        recorder.write(0, {"time/eval": 6.0})
        for step in range(1, 5):
            recorder.write(step, {"time/rollout": 2.0, **({"time/eval": 2.0} if step == 4 else {})})
    (run,) = load_runs([tmp_path / "run"])
    assert (seconds_a_step(run, "eval"), seconds_a_step(run, "rollout")) == (2.0, 2.0)


def test_the_warm_start_is_no_part_of_a_step_and_every_name_has_a_part_that_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Recorder(tmp_path / "run") as recorder:
        recorder.write(0, {"time/warm start": 90.0})
        for step in range(1, 5):
            recorder.write(step, {"time/rollout": 2.0, "time/update": 1.0, "time/pack": 0.01, "time/publish": 0.02})
    *_, phases = drawn(monkeypatch, [tmp_path / "run"], tmp_path / "p.png")
    assert [text.get_text() for text in phases.get_legend().get_texts()] == ["rollout", "update", "other"]
    assert [bar.get_width() for bar in phases.patches] == pytest.approx([2.0, 1.0, 0.03])


def test_running_mean() -> None:
    assert running_mean([4.0, 4.0, 4.0], 0.7) == pytest.approx([4.0, 4.0, 4.0])
    assert running_mean([0.0, 1.0], 0.5) == pytest.approx([0.0, 1 / 1.5])
    means = running_mean([1.0, math.nan, 1.0], 0.5)
    assert means[0] == means[2] == 1.0 and math.isnan(means[1])


def test_missing_matplotlib_is_told(make_run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match="pip install matplotlib"):
        plot_runs([make_run("a")], tmp_path / "p.png")
