"""Experiment trackers with one small interface: they receive each row of metrics.jsonl as it is written."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from jetrl.errors import UserError

_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow", "trackio": "trackio"}


class Tracker(Protocol):
    """One open tracker."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


def open_trackers(backends: Sequence[str], run_dir: Path, config: Mapping[str, Any]) -> list[Tracker]:
    """Open the trackers that `track.backends` names; UserError if the package of one is missing."""
    makers: dict[str, type[_TensorBoard] | type[_Logged] | type[_MLflow]] = {
        "tensorboard": _TensorBoard,
        "wandb": _Logged,
        "trackio": _Logged,
        "mlflow": _MLflow,
    }
    return [makers[name](name, run_dir, config) for name in backends]


def _module(tracker: str, module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"track.backends names {tracker}, which is not installed: pip install {_PACKAGES[tracker]}, or take it out."
        ) from error


class _TensorBoard:
    def __init__(self, name: str, run_dir: Path, config: Mapping[str, Any]) -> None:
        _module(name, "tensorboard")
        self._writer = _module(name, "torch.utils.tensorboard").SummaryWriter(str(run_dir / "tensorboard"))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        self._writer.close()


class _Logged:
    """wandb and trackio, which have the same interface."""

    def __init__(self, name: str, run_dir: Path, config: Mapping[str, Any]) -> None:
        self._module = _module(name, name)
        self._module.init(project="jetrl", name=run_dir.name, config=dict(config))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._module.log(dict(metrics), step=step)

    def close(self) -> None:
        self._module.finish()


class _MLflow:
    def __init__(self, name: str, run_dir: Path, config: Mapping[str, Any]) -> None:
        self._module = _module(name, name)
        self._module.set_experiment("jetrl")
        self._module.start_run(run_name=run_dir.name)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        # MLflow allows no @ in a name: eval/addition/avg@1 becomes eval/addition/avg_at_1
        self._module.log_metrics({k.replace("@", "_at_"): v for k, v in metrics.items()}, step=step)

    def close(self) -> None:
        self._module.end_run()
