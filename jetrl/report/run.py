"""Reading run folders for the report: `load_run`, series of one metric, and the headline numbers."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jetrl.errors import UserError
from jetrl.moved import current
from jetrl.report.recorder import CONFIG_FILE, ENV_FILE, read_metrics
from jetrl.untrusted import json_value, require_shallow, text_inside

PARITY_KEY = "parity/logprob_abs_diff_max"
ROUTING_KEY = "parity/frac_routing_different"
THROUGHPUT_KEY = "perf/tokens_per_s_per_gpu"
_ACCURACY = re.compile(r"eval/.+/avg@\d+")
_REWARD = re.compile(r"reward/.+/mean")
# Rewards that are 1 for a right answer and 0 otherwise, so that their mean is an accuracy.
CORRECTNESS = frozenset((
    "jetrl.rewards.text:exact_match", "jetrl.rewards.text:last_integer", "jetrl.rewards.gsm8k:gsm8k_reward",
    "jetrl.rewards.mathematics:math_reward",
))
# Tasks whose own rewards are such, without `credit`.
_RIGHT_OR_WRONG = ("addition", "chain", "sorting", "tracking", "recurrence")
_ENVIRONMENTS = (None, "calculator", "retry", "tools")  # those that give the task's own reward
_TOTALS = ("time/step", "time/total")  # sums of the other phases, not phases themselves


@dataclass(frozen=True)
class Run:
    """The content of one run folder. `label` names it in pictures and is unique among the runs loaded together."""

    path: Path
    label: str
    rows: Sequence[Mapping[str, Any]]
    config: Mapping[str, Any]
    config_text: str
    env: Mapping[str, Any]

    def keys(self) -> list[str]:
        """The metrics of this run that hold numbers, in order of first appearance."""
        seen: dict[str, None] = {}
        for row in self.rows:
            for key, value in row.items():
                if key != "step" and isinstance(value, int | float):
                    seen.setdefault(key)
        return list(seen)

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Steps that have the metric, and its values."""
        pairs = [(int(row["step"]), float(row[key])) for row in self.rows if isinstance(row.get(key), int | float)]
        return [step for step, _ in pairs], [value for _, value in pairs]

    def accuracy_keys(self) -> list[str]:
        """Held-out accuracies, the run's first set first."""
        return [key for key in self.keys() if _ACCURACY.fullmatch(key)]

    def reward_keys(self) -> list[str]:
        """The mean rewards of single functions, `reward/NAME/mean`."""
        return [key for key in self.keys() if _REWARD.fullmatch(key)]

    @property
    def held_out(self) -> str:
        """What the mean held-out reward is called: "accuracy" only if a built-in reward says right or wrong."""
        task, environment = self.config.get("task", {}), self.config.get("environment", {}).get("name")
        if "name" not in task:
            return "accuracy"  # a folder without the config of its run
        reward = task.get("reward")
        if reward is None:
            exact = task["name"] in _RIGHT_OR_WRONG and task.get("params", {}).get("credit", "answer") == "answer"
            return "accuracy" if exact and environment in _ENVIRONMENTS else "reward"
        signal = self.config.get("rl", {}).get("signal", "reward")
        if signal != "reward" and not isinstance(reward, str):  # the function that decides, of several
            reward = next((name for name in reward if name.rpartition(":")[2] == signal), None)
        return "accuracy" if isinstance(reward, str) and current(reward) in CORRECTNESS else "reward"

    def phases(self) -> list[str]:
        """Names of the `time/*` phases without their sums."""
        return [key[5:] for key in self.keys() if key.startswith("time/") and key not in _TOTALS]

    @property
    def engine(self) -> str:
        """`rollout.engine`; runs of earlier versions had only jetrl's own."""
        return str(self.config.get("rollout", {}).get("engine", "jetrl"))

    @property
    def precision(self) -> str:
        return str(self.config.get("precision", "not recorded"))

    @property
    def model(self) -> str:
        """A short name of the model: its folder, or the sizes of one with random weights."""
        model = self.config.get("model", {})
        if model.get("path"):
            return Path(str(model["path"]).rstrip("/")).name
        arch = model.get("arch")
        if not arch:
            return "not recorded"
        sizes = f"{arch.get('num_hidden_layers', '?')} layers, width {arch.get('hidden_size', '?')}"
        return f"{arch.get('model_type', 'model')} from scratch ({sizes})"

    @property
    def on_gpu(self) -> bool:
        return self.config.get("device") != "cpu" and bool(self.env.get("gpu"))

    @property
    def hardware(self) -> str:
        """GPU (with count) or CPU."""
        if not self.on_gpu:
            return str(self.env.get("cpu", "not recorded"))
        count = int(self.env.get("gpu_count", 1))
        return f"{count} x {self.env['gpu']}" if count > 1 else str(self.env["gpu"])


@dataclass(frozen=True)
class Headline:
    """The numbers at the top of a report. None: not measured in this run."""

    steps: int
    accuracy_key: str | None
    accuracy_before: float | None
    accuracy_after: float | None
    parity_steps: int
    parity_nonzero_steps: int
    parity_max: float | None
    reward_last: float | None
    seconds: float | None  # without the warm start, which is cached for the next run
    warm_start_seconds: float | None
    tokens_per_s: float | None
    held_out: str = "accuracy"  # or "reward": what accuracy_before and accuracy_after are
    parity_missing: int = 0  # training steps that compared nothing, of a run that compares
    routing_mean: float | None = None  # share of routers with other experts on the two sides, over the measured steps


def held_out_name(names: Iterable[str]) -> str:
    """`Held-out accuracy`, or `Held-out reward` where one of the runs has no accuracy."""
    return f"Held-out {'accuracy' if set(names) <= {'accuracy'} else 'reward'}"


def headline(run: Run) -> Headline:
    """Accuracy at the first and last evaluation, largest parity gap, total time, median tokens/s per GPU."""
    accuracy_key = next(iter(run.accuracy_keys()), None)
    accuracy = run.series(accuracy_key)[1] if accuracy_key else []
    parity = run.series(PARITY_KEY)[1]
    gaps = [value for value in parity if value != 0.0]  # NaN is a gap too
    rewards = run.series("reward/mean")[1]
    throughput = sorted(value for value in run.series(THROUGHPUT_KEY)[1] if math.isfinite(value))
    recent = rewards[-10:]
    warm_start = sum(run.series("time/warm start")[1])
    routing = run.series(ROUTING_KEY)[1]
    return Headline(
        steps=max((int(row["step"]) for row in run.rows), default=0),
        accuracy_key=accuracy_key,
        accuracy_before=accuracy[0] if len(accuracy) > 1 else None,
        accuracy_after=accuracy[-1] if accuracy else None,
        parity_steps=len(parity),
        parity_nonzero_steps=len(gaps),
        parity_max=_largest(parity),
        reward_last=sum(recent) / len(recent) if recent else None,
        seconds=None if (total := _seconds(run)) is None else total - warm_start,
        warm_start_seconds=warm_start or None,
        tokens_per_s=throughput[len(throughput) // 2] if throughput else None,
        held_out=run.held_out,
        parity_missing=sum(int(row["step"]) > 0 for row in run.rows) - len(parity) if parity else 0,
        routing_mean=sum(routing) / len(routing) if routing else None,
    )


def _largest(values: Sequence[float]) -> float | None:
    if not values:
        return None
    return math.nan if any(math.isnan(value) for value in values) else max(values)


def _seconds(run: Run) -> float | None:
    keys = set(run.keys())
    for total in _TOTALS:
        if total in keys:
            return sum(run.series(total)[1])
    phases = run.phases()
    return sum(sum(run.series(f"time/{phase}")[1]) for phase in phases) if phases else None


def load_runs(run_dirs: Sequence[Path | str]) -> list[Run]:
    """Read run folders. Runs with the same name are labelled by folder, then by path."""
    if not run_dirs:
        raise UserError("no run folder given. Name at least one, such as runs/<name>.")
    paths = [Path(folder) for folder in run_dirs]
    loaded = [_load(path) for path in paths]
    for name in (lambda path: path.resolve().name, str):
        labels = [run.label for run in loaded]
        loaded = [
            Run(run.path, name(run.path), run.rows, run.config, run.config_text, run.env)
            if labels.count(run.label) > 1
            else run
            for run in loaded
        ]
    if len({run.label for run in loaded}) < len(loaded):
        raise UserError(f"the same run folder is given twice: {[str(path) for path in paths]}. Name each once.")
    return loaded


def _load(path: Path) -> Run:
    rows = read_metrics(path)
    if not rows:
        raise UserError(f"{path} holds no steps yet. Wait for the first step of the run, then try again.")
    text, recorded = text_inside(path, CONFIG_FILE), text_inside(path, ENV_FILE)
    try:
        config = tomllib.loads(text)
        env = json_value(recorded) if recorded else {}
        require_shallow(config)
        _require_form(config, env)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: {CONFIG_FILE} or {ENV_FILE} cannot be read ({error}). Fix or remove it.") from error
    label = str(config.get("name") or path.resolve().name)
    return Run(path=path, label=label, rows=rows, config=config, config_text=text, env=env)


def _require_form(config: Mapping[str, Any], env: Any) -> None:
    """ValueError for tables that the properties of `Run` could not read: the folder may be anyone's."""
    for name in ("task", "environment", "rollout", "model", "task.params", "model.arch"):  # sections first
        section, _, key = name.partition(".")
        value = config.get(section, {})
        if not isinstance(value.get(key, {}) if key else value, dict):
            raise ValueError(f"{name} must be a table")
    if not isinstance(env, dict):
        raise ValueError(f"{ENV_FILE} must hold a table")
    if type(count := env.get("gpu_count", 1)) is not int:
        raise ValueError(f"gpu_count must be a whole number, not {count!r}")
