"""Trackers get every metric with its step; a missing package ends with the command that installs it."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from jetrl.errors import UserError
from jetrl.report.track import open_trackers

ROW = {"reward/mean": 0.5, "eval/addition/avg@1": 1.0}


class Calls(list):
    def __getattr__(self, name: str) -> Any:
        return lambda *a, **k: self.append((name, a, k))


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_logged(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    calls = Calls()
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(init=calls.init, log=calls.log, finish=calls.finish))
    (tracker,) = open_trackers([name], tmp_path / "run", {"seed": 1})
    tracker.log(3, ROW)
    tracker.close()
    assert calls == [
        ("init", (), {"project": "jetrl", "name": "run", "config": {"seed": 1}}),
        ("log", (ROW,), {"step": 3}),
        ("finish", (), {}),
    ]


def test_mlflow_names_hold_no_at_sign(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    calls = Calls()
    names = ("set_experiment", "start_run", "log_metrics", "end_run")
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(**{n: getattr(calls, n) for n in names}))
    (tracker,) = open_trackers(["mlflow"], tmp_path, {})
    tracker.log(7, ROW)
    assert calls[-1] == ("log_metrics", ({"reward/mean": 0.5, "eval/addition/avg_at_1": 1.0},), {"step": 7})


def test_missing_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match="pip install wandb"):
        open_trackers(["wandb"], tmp_path, {})
