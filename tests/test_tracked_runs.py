"""Whole runs with trackers: one that fails ends no run and loses no step; one that cannot be used is told at once."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny import numbers, tiny_config, tiny_run

from jetrl.errors import UserError
from jetrl.report.recorder import read_eval_samples, read_metrics
from jetrl.run import loop
from jetrl.run.loop import StopRequest, run


class Store:
    """The module `trackio`, or `wandb`: keeps what it gets, and fails from a step on."""

    def __init__(self, fails_from: int = 99, error: type[BaseException] = ConnectionError) -> None:
        self.fails_from, self.error = fails_from, error
        self.opened: list[dict[str, Any]] = []
        self.steps: list[int] = []
        self.tables: list[Any] = []
        self.evaluations: list[Any] = []

    def init(self, **given: Any) -> Any:
        self.opened.append(given)
        return SimpleNamespace(log=self.log, finish=lambda: None)

    def log(self, metrics: dict[str, Any], step: int) -> None:
        if step >= self.fails_from:
            raise self.error("503 from the tracking server")
        if tables := [table for name, table in metrics.items() if name in ("samples", "eval_samples")]:
            (self.evaluations if "eval_samples" in metrics else self.tables).append(*tables)
        else:
            self.steps.append(step)

    @staticmethod
    def Table(columns: list[str], data: list[list[Any]]) -> Any:
        return [dict(zip(columns, row, strict=True)) for row in data]


def test_a_tracker_that_fails_changes_nothing_in_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plain = tiny_run(tmp_path / "plain")
    for error in (ConnectionError, SystemExit):
        store = Store(fails_from=2, error=error)
        monkeypatch.setitem(sys.modules, "trackio", store)
        monkeypatch.setattr("jetrl.report.channel.Limits.pauses", ())
        capfd.readouterr()
        tracked = tiny_run(tmp_path / error.__name__, {"track.backends": ["trackio"]})
        assert numbers(tracked) == numbers(plain) and store.steps == [0, 1]
        told = [line for line in capfd.readouterr().out.splitlines() if "trackio" in line]
        assert any(f"lacks the rows of 3 steps (2, 3, 4) ({error.__name__}: 503" in line for line in told), told
        assert len(told) <= 2 and not any("permission" in line for line in told)


def test_rows_tables_and_config_reach_the_tracker_and_a_resumed_run_goes_on_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store = Store()
    monkeypatch.setitem(sys.modules, "trackio", store)
    changes = {"track.backends": ["trackio"], "track.project": "p", "track.num_samples": 3, "train.steps": 2}
    folder = tiny_run(tmp_path, changes)
    assert store.steps == [0, 1, 2] and [len(table) for table in store.tables] == [3, 3]
    assert {"completion", "reward", "prompt"} <= set(store.tables[0][0])
    assert [[row["step"] for row in table] for table in store.evaluations] == [[0] * 3, [2] * 3]
    kept = [row["completion"] for row in read_eval_samples(folder)]
    assert all(row["completion"] in kept and "advantage" not in row for row in store.evaluations[0])
    assert store.opened[0]["project"] == "p" and store.opened[0]["config"]["train"]["steps"] == 2
    again = tiny_run(tmp_path, changes | {"train.steps": 3, "checkpoint.resume": "auto"})
    assert again == folder and store.steps == [0, 1, 2, 3] and len(read_metrics(folder)) == 4
    assert store.opened[1]["name"] == store.opened[0]["name"] and store.opened[1]["resume"] == "allow"


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio", "tensorboard"])
def test_trackers_are_checked_before_anything_is_loaded(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(loop, "build", lambda *_, **__: pytest.fail("the model is loaded"))
    config = tiny_config(tmp_path, {"track.backends": [name]})
    with pytest.raises(UserError, match=f"track.backends names {name}"):
        run(config, tmp_path / "runs" / "tiny", ["test"], StopRequest())
    assert not (tmp_path / "runs").exists()
