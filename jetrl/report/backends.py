"""The trackers that jetrl knows, with one interface (`report/channel.py`: `Backend`), and what each needs to be used.

A setting of `[track]` wins over the tracker's own environment variable, and that over jetrl's default. Packages are
imported only where a run names them.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import urlopen

import huggingface_hub

from jetrl.errors import UserError
from jetrl.report.channel import Backend, cause
from jetrl.untrusted import json_value

PROJECT = "jetrl"


@dataclass(frozen=True)
class Opening:
    """What a tracker is opened with. None: its own variable, else jetrl's default."""

    run_dir: Path
    run_name: str | None
    project: str | None
    entity: str | None
    group: str | None
    tags: Sequence[str]
    config: Mapping[str, Any]
    kept: Mapping[str, str]  # of `track.json`; empty for a new run
    fresh: str  # an id for a new run
    first: int  # the first step that may be logged: above 0 where a run goes on

    def name(self, variable: str = "") -> str | None:
        return _given(self.run_name, variable, self.run_dir.name)


def _given(setting: str | None, variable: str, default: str | None) -> str | None:
    """The setting; None, which leaves it to the library, if its variable is set; else the default."""
    return setting if setting is not None else None if os.environ.get(variable) else default


def _module(tracker: str, module: str, package: str = "") -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = (error.name or "").split(".")[0] in (module.split(".")[0], tracker, "")
        why = "is not installed" if missing else f"cannot be imported ({error})"
        raise UserError(
            f"track.backends names {tracker}, which {why}: pip install {package or tracker}, or remove it."
        ) from error


class TensorBoard:
    """Event files in the run folder. A resumed run hides the steps past the one from which it goes on."""

    kept: Mapping[str, str] = {}

    @staticmethod
    def check() -> None:
        _module("tensorboard", "tensorboard")

    def __init__(self, opening: Opening) -> None:
        _module("tensorboard", "tensorboard")
        writer = _module("tensorboard", "torch.utils.tensorboard").SummaryWriter
        purge = opening.first or None
        self._writer = writer(str(opening.run_dir / "tensorboard"), purge_step=purge, flush_secs=30)
        if not purge:
            text = json.dumps(opening.config, indent=2, default=str)
            self._writer.add_text("config", _as_code(text), 0)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, step)

    def samples(self, table: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        parts = [
            f"**{key}**\n\n{_as_code(_text(value))}"
            for row in rows for key, value in row.items() if value is not None or is_score(key)
        ]
        self._writer.add_text(table, "\n\n".join(parts), step)

    def close(self, failed: bool) -> None:
        self._writer.close()


class Wandb:
    """Weights & Biases. The x-axis is our step, so that steps that a resume repeats are not refused."""

    @staticmethod
    def check() -> None:
        wandb = _module("wandb", "wandb")
        if os.environ.get("WANDB_MODE", "").lower() in ("offline", "disabled", "dryrun"):
            return
        settings = getattr(wandb.setup(), "settings", None)
        if getattr(settings, "_offline", False) or getattr(settings, "_noop", False):
            return  # as `wandb offline` has set it for this folder
        quiet = {"prompt": False} if "prompt" in inspect.signature(wandb.login).parameters else {"timeout": 1}
        why = ""
        try:
            logged_in = wandb.login(**quiet)
        except (wandb.errors.Error, OSError) as error:
            logged_in, why = False, f" ({cause(error)})"
        if not logged_in:
            raise UserError(
                f"track.backends names wandb, which is not logged in or cannot reach its server{why}: run wandb login, "
                "set WANDB_API_KEY, or record without a network: WANDB_MODE=offline."
            )

    def __init__(self, opening: Opening) -> None:
        wandb = self._wandb = _module("wandb", "wandb")
        own = os.environ.get("WANDB_RUN_ID")
        self._run = wandb.init(
            project=_given(opening.project, "WANDB_PROJECT", PROJECT), entity=opening.entity, group=opening.group,
            tags=list(opening.tags) or None, name=opening.name("WANDB_NAME"), config=dict(opening.config),
            id=own or opening.kept.get("id", opening.fresh), resume="allow", allow_val_change=True,
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self.kept: Mapping[str, str] = {"id": str(self._run.id)}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def samples(self, table: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        columns = list(rows[0])
        data = [[None if row[key] is None else row[key] for key in columns] for row in rows]
        self._run.log({"step": step, table: self._wandb.Table(columns=columns, data=data, allow_mixed_types=True)})

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class Trackio:
    """trackio: a folder of this machine, or a Space or server by its own variables."""

    @staticmethod
    def check() -> None:
        """A place elsewhere must answer now: trackio itself goes on without it, and keeps the rows in its folder."""
        trackio = _module("trackio", "trackio")
        space, server = (os.environ.get(name, "") for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"))
        try:
            if space:
                huggingface_hub.whoami()
            elif server:
                _require_server(server)
            elif folder := getattr(trackio, "TRACKIO_DIR", None):
                _require_writable(Path(folder))
        except Exception as error:
            where = f"the Space {space} (TRACKIO_SPACE_ID)" if space else (
                f"the server {_without_query(server)} (TRACKIO_SERVER_URL)" if server else "its folder (TRACKIO_DIR)"
            )
            raise UserError(
                f"track.backends names trackio, which cannot use {where}: {cause(error)}. Log in or correct the "
                "variable, or unset it: trackio then records in a folder on this machine."
            ) from error

    def __init__(self, opening: Opening) -> None:
        trackio = self._trackio = _module("trackio", "trackio")
        name = opening.kept.get("name") or opening.name() or opening.fresh
        options: dict[str, Any] = {"project": opening.project or PROJECT, "name": name, "config": dict(opening.config)}
        options |= {"group": opening.group} if opening.group else {}
        if opening.tags:
            options["config"]["tags"] = list(opening.tags)  # it knows no tags of its own
        self._run = trackio.init(**options, resume="allow" if opening.kept else "never")
        self.kept: Mapping[str, str] = {"name": name}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def samples(self, table: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        data = [[row[key] for key in rows[0]] for row in rows]
        self._run.log({table: self._trackio.Table(columns=list(rows[0]), data=data)}, step=step)

    def close(self, failed: bool) -> None:
        self._run.finish()


def _require_server(url: str) -> None:
    """ValueError or OSError unless it is the address of a server that answers, with a token for writing."""
    if not url.startswith(("http://", "https://")):
        raise ValueError("it must begin with http:// or https://")
    if "write_token=" not in urlsplit(url).query and not os.environ.get("TRACKIO_WRITE_TOKEN"):
        raise ValueError("it needs a token: set TRACKIO_WRITE_TOKEN, or add ?write_token=... to the address")
    try:
        with urlopen(_without_query(url), timeout=20):
            pass
    except HTTPError as error:
        if error.code >= 500:  # others are answers: a server may show its page to those only who are logged in
            raise


def _without_query(url: str) -> str:
    """The address without what follows its path: that may hold a token."""
    return urlsplit(url)._replace(query="", fragment="").geturl()


def _require_writable(folder: Path) -> None:
    """OSError unless files can be written into this folder, which may have to be made."""
    there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise PermissionError(f"{there} is not a folder that can be written to")


class MLflow:
    """MLflow, through its client, which knows no active run: the code of a reward may have one of its own.

    Limits of its stores: 100 parameters and 1,000 metrics a call, parameters of 500 characters (older servers), names
    of letters, digits and `_-./ `. A parameter cannot be changed, so a resumed run adds only what is new.
    """

    MAX_VALUE, MAX_KEY, PARAMS, METRICS = 500, 250, 100, 1000

    @staticmethod
    def check() -> None:
        mlflow = _module("mlflow", "mlflow")
        try:
            MLflow._client(mlflow).search_experiments(max_results=1)
        except Exception as error:
            raise UserError(
                f"track.backends names mlflow, whose store {mlflow.get_tracking_uri()} cannot be used "
                f"({cause(error)}): set MLFLOW_TRACKING_URI (a server, sqlite:///FILE, or a folder), or pip install "
                "mlflow, whose default store mlflow-skinny lacks."
            ) from error

    @staticmethod
    def _client(mlflow: Any) -> Any:
        return mlflow.MlflowClient()

    def __init__(self, opening: Opening) -> None:
        mlflow = self._mlflow = _module("mlflow", "mlflow")
        self._client_of_run = client = self._client(mlflow)
        run_id = os.environ.get("MLFLOW_RUN_ID") or opening.kept.get("run_id")
        if run_id is None:
            tags = {"mlflow.source.name": "jetrl"} | dict(_tag(tag) for tag in opening.tags)
            tags |= {"group": opening.group} if opening.group else {}
            name = opening.name("MLFLOW_RUN_NAME") or os.environ["MLFLOW_RUN_NAME"]
            run_id = client.create_run(self._experiment(opening), run_name=name, tags=tags).info.run_id
        else:
            self._go_on(str(run_id))
        self._id = str(run_id)
        self.kept: Mapping[str, str] = {"run_id": self._id}
        self._log_config(opening.config)

    def _go_on(self, run_id: str) -> None:
        try:
            self._client_of_run.get_run(run_id)
        except self._mlflow.exceptions.MlflowException as error:
            store = self._mlflow.get_tracking_uri()
            raise UserError(
                f"track.backends: mlflow has no run {run_id} in {store} ({cause(error)}). Set "
                "MLFLOW_TRACKING_URI to the store that has it, or remove track.json from the run folder for a new run."
            ) from error
        self._client_of_run.update_run(run_id, status="RUNNING")

    def _experiment(self, opening: Opening) -> str:
        """The id of the experiment: `track.project`, else MLflow's variables, else "jetrl"; made if it is new."""
        if opening.project is None and (known := os.environ.get("MLFLOW_EXPERIMENT_ID")):
            return known
        name = opening.project or os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
        found = self._client_of_run.get_experiment_by_name(name)
        return str(self._client_of_run.create_experiment(name) if found is None else found.experiment_id)

    def _log_config(self, config: Mapping[str, Any]) -> None:
        param, client = self._mlflow.entities.Param, self._client_of_run
        there = client.get_run(self._id).data.params
        new = [param(key, value) for key, value in self.params_of(config).items() if key not in there]
        for part in _parts(new, self.PARAMS):
            client.log_batch(self._id, params=part)
        client.log_dict(self._id, json_value(json.dumps(config, default=str)), "config.json")

    @classmethod
    def params_of(cls, config: Mapping[str, Any]) -> dict[str, str]:
        """The config by dotted keys, as texts within MLflow's limits."""
        flat: dict[str, str] = {}
        for key, value in _flatten(config):
            text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
            short = text if len(text) <= cls.MAX_VALUE else text[: cls.MAX_VALUE - 4] + " ..."
            flat[_allowed(key)[: cls.MAX_KEY]] = short
        return flat

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        # MLflow allows no @ in a name: eval/addition/avg@1 becomes eval/addition/avg_at_1
        metric, now = self._mlflow.entities.Metric, int(1000 * time.time())
        all_of = [metric(_allowed(key)[: self.MAX_KEY], value, now, step) for key, value in metrics.items()]
        for part in _parts(all_of, self.METRICS):
            self._client_of_run.log_batch(self._id, metrics=part)

    def samples(self, table: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        columns = list(rows[0])
        content = {"columns": columns, "data": [[row[key] for key in columns] for row in rows]}
        self._client_of_run.log_dict(self._id, content, f"{table}/step_{step:06d}.json")

    def close(self, failed: bool) -> None:
        self._client_of_run.set_terminated(self._id, "FAILED" if failed else "FINISHED")


BACKENDS: dict[str, Any] = {"tensorboard": TensorBoard, "wandb": Wandb, "mlflow": MLflow, "trackio": Trackio}
_: tuple[type[Backend], ...] = (TensorBoard, Wandb, MLflow, Trackio)  # each has the interface: checked by mypy


def _allowed(name: str) -> str:
    """A name with the characters that MLflow allows; keys that differ stay different for all metrics of jetrl."""
    return re.sub(r"[^\w\-./ ]", "_", name.replace("@", "_at_"))


def _tag(text: str) -> tuple[str, str]:
    """`key=value` as MLflow has it; a tag without a value is "true"."""
    key, _, value = text.partition("=")
    return key, value or "true"


def _flatten(config: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        elif value is not None:
            yield f"{prefix}{key}", value


def is_score(column: str) -> bool:
    """Whether None in this column of a table of samples means "not scored". Elsewhere it means that the row has no such
    thing: the prompt as rendered is kept for the first completion of a prompt only."""
    return column == "reward" or column.startswith("rewards/")


def _parts(items: Sequence[Any], size: int) -> Iterable[Sequence[Any]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def _text(value: Any) -> str:
    """The text of a value; None is a score that was not given (`is_score`)."""
    return "not scored" if value is None else value if isinstance(value, str) else json.dumps(value)


def _as_code(text: str) -> str:
    """A text as it is, in Markdown: indented, so that nothing in it is markup."""
    return "\n".join("    " + line for line in text.splitlines()) or "    "
