"""From run folders to `study.json`: the series of every run, failures by rule, and paired differences of arms.

The score of a held-out problem is the mean reward of its samples. Where all rewards are 0 or 1, the mean score is the
accuracy, and is called so.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jetrl import __version__
from jetrl.report.environment import describe_environment
from jetrl.report.files import write_whole
from jetrl.report.recorder import ENV_FILE, METRICS_FILE, read_held_out, read_metrics
from jetrl.report.text import counted
from jetrl.rl.mismatch import BY_POSITION
from jetrl_study.added import Added, by_origin
from jetrl_study.plan import Planned, Study
from jetrl_study.rules import RULES, failures
from jetrl_study.state import commits_of, is_done, non_finite_step, read_if_there, read_state, run_folder
from jetrl_study.statistics import LEVEL, MIN_SEEDS, RESAMPLES, paired_difference

SERIES = (
    "reward/mean", "policy/entropy", "policy/grad_norm", "policy/clip_frac_low", "policy/clip_frac_high",
    "policy/ratio_mean", "policy/logprob_abs_change_mean", "response_length/mean", "response_length/frac_truncated",
    "parity/logprob_abs_diff_mean", "parity/logprob_abs_diff_max", "parity/k3_kl", "parity/token_mult_prob_error",
    "parity/frac_tokens_different", "correction/frac_truncated", "correction/frac_rejected", "correction/frac_vetoed",
    "correction/effective_sample_size", "time/step", "time/rollout", "time/update",
)
Run = Mapping[str, Any]  # one of "runs" in study.json
# Left out of the seconds of training:
_NOT_TRAINING = ("time/warm start", "time/eval", "time/checkpoint", "time/report")
OUTCOMES = {"last": "the last evaluation", "mean": "the mean of all evaluations after the start"}


def collect(
    study: Study, out: Path, plan: Sequence[Planned], added: Mapping[str, Added] | None = None
) -> dict[str, Any]:
    """All that a study has found so far, as plain data for JSON. Runs in `added` (by name) are taken from there."""
    elsewhere = {run.name: added[run.name] for run in plan if added and run.name in added}
    own = {run.name: _run(out, run) for run in plan if run.name not in elsewhere}
    environments = [run.pop("environment") for run in own.values()]
    if not own:  # nothing was run here: this machine says nothing about the study
        environments = [one.origin["environment"] for one in elsewhere.values()]
    found = next((env for env in environments if env), None)
    runs = [own.get(run.name) or {**elsewhere[run.name].data, "added": True} for run in plan]
    against = _baselines(study, runs)
    differences = [d for other in against for d in _differences(study, runs, other)]
    notes = [*_notes(study, against, differences), *_of_commits(runs)]
    return {
        "study": {
            "name": study.name, "about": study.about, "recipe": study.recipe.stem, "seeds": list(study.seeds),
            "overrides": list(study.overrides), "against": against,
            "arms": [asdict(arm) for arm in study.arms], "steps": max(run.config.train.steps for run in plan),
        },
        "version": __version__, "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": (found or describe_environment([])) | {"command": f"jetrl study {study.name}"},
        **({"added": by_origin(elsewhere)} if elsewhere else {}),
        "score": "accuracy" if all(run["held_out"]["binary"] for run in runs) else "reward",
        "rules": RULES, "outcomes": OUTCOMES,
        "method": {"min_seeds": MIN_SEEDS, "resamples": RESAMPLES, "level": LEVEL},
        **({"notes": notes} if notes else {}),
        "runs": runs,
        "differences": differences,
    }


def write_json(data: Mapping[str, Any], path: Path) -> Path:
    """`data` as JSON, whole or not at all."""
    return write_whole(path, json.dumps(data, allow_nan=False, separators=(",", ":")) + "\n")


def _run(out: Path, run: Planned) -> dict[str, Any]:
    folder, state = run_folder(out, run), read_state(out, run)
    rows = read_metrics(folder) if (folder / METRICS_FILE).exists() else []
    held_out = _held_out(folder, {row["step"] for row in rows})
    series = {key: _series(rows, key) for key in SERIES}
    accuracy = held_out["steps"], held_out["mean"]
    broken = non_finite_step(folder) if state.status == "non-finite" else None
    found = failures(
        accuracy, _plain(series["policy/entropy"]), _plain(series["policy/grad_norm"]), broken
    )
    return {
        "arm": run.arm.name, "seed": run.seed, "status": state.status, "step": int(rows[-1]["step"]) if rows else -1,
        "digest": run.digest, "precision": run.config.precision, "engine": run.config.rollout.engine,
        "series": {key: value for key, value in series.items() if value["steps"]},
        "seconds": _seconds(rows), "by_position": _by_position(rows), "held_out": held_out,
        "failures": [asdict(failure) for failure in found],
        **({"commits": commits} if (commits := commits_of(folder)) else {}),
        "environment": read_if_there(folder / ENV_FILE),
    }


def _held_out(folder: Path, recorded: Set[int]) -> dict[str, Any]:
    """By evaluation: the mean score, the share of problems solved (with a score above 0.999), and each score. One whose
    step the metrics lack does not count: the run is being written or went with its machine. Neither does a reward that
    is no number, and a problem that has none is in no mean."""
    rows = read_held_out(folder) if folder.is_dir() else {}
    by_step = {step: _scores(rows[step]) for step in sorted(rows.keys() & recorded)}
    steps = [step for step, scores in by_step.items() if scores]
    each = [by_step[step] for step in steps]
    return {
        "steps": steps, "mean": [_short(fmean(one.values())) for one in each],
        "solved": [_short(fmean(score > 0.999 for score in one.values())) for one in each], "scores": each,
        "binary": all(value in (0, 1) for s in steps for rewards in rows[s]["rewards"] for value in _numbers(rewards)),
    }


def _scores(row: Mapping[str, Any]) -> dict[str, float]:
    """Mean reward of each problem that has one."""
    found = {str(p): _numbers(rewards) for p, rewards in zip(row["problems"], row["rewards"], strict=True)}
    return {p: float(f"{fmean(values):.6g}") for p, values in found.items() if values}


def _numbers(rewards: Sequence[float | None]) -> list[float]:
    return [value for value in rewards if value is not None and math.isfinite(value)]


def _series(rows: Sequence[Mapping[str, Any]], key: str) -> dict[str, list[Any]]:
    pairs = [(row["step"], _short(row[key])) for row in rows if isinstance(row.get(key), int | float)]
    return {"steps": [step for step, _ in pairs], "values": [value for _, value in pairs]}


def _plain(series: Mapping[str, list[Any]]) -> tuple[list[int], list[float]]:
    """A series without its gaps (values that are not finite)."""
    pairs = [(s, v) for s, v in zip(series["steps"], series["values"], strict=True) if v is not None]
    return [s for s, _ in pairs], [v for _, v in pairs]


def _seconds(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Seconds of training up to each step: without the warm start, evaluations and checkpoints."""
    steps, total, values = [], 0.0, []
    for row in rows:
        total += row.get("time/step", 0.0) - sum(row.get(key, 0.0) for key in _NOT_TRAINING)
        steps.append(row["step"])
        values.append(_short(total))
    return {"steps": steps, "values": values}


def _by_position(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """First token of a bucket -> mean |d| there, the mean over all steps that have the bucket."""
    found: dict[int, list[float]] = {}
    for row in rows:
        for key, value in row.items():
            if key.startswith(BY_POSITION):
                found.setdefault(int(key.removeprefix(BY_POSITION)), []).append(value)
    return {str(first): float(f"{np.mean(found[first]):.6g}") for first in sorted(found)}


def _baselines(study: Study, runs: Sequence[Run]) -> list[str]:
    """The arms that others are compared with: those of the study that have results. Where none of them has, the first
    arm with results stands in, if there is another one."""
    seen = {run["arm"] for run in runs if run["held_out"]["steps"]}
    shown = [arm.name for arm in study.arms if arm.name in seen]
    return [name for name in study.against if name in seen] or (shown[:1] if len(shown) > 1 else [])


def _notes(study: Study, against: Sequence[str], differences: Sequence[Mapping[str, Any]]) -> list[str]:
    """What a reader must know about the comparison."""
    if against and not set(against) & set(study.against):
        return [
            f"Arms are compared with {against[0]}, as {' and '.join(study.against)}, with which this study compares, "
            f"{'has' if len(study.against) == 1 else 'have'} no results here."
        ]
    if not differences:
        wanted = " or ".join(against or study.against)
        return [f"Nothing is compared yet: that needs results of {wanted} and of another arm with the same seed."]
    return []


def _of_commits(runs: Sequence[Run]) -> list[str]:
    """A note if several commits of jetrl made the runs, with the number of runs of each."""
    counts = Counter(commit for run in runs for commit in dict.fromkeys(run.get("commits", [])))
    if len(counts) < 2:
        return []
    each = ", ".join(f"{commit} ({counted(count, 'run')})" for commit, count in counts.items())
    return [f"Several commits of jetrl made these runs, and arms may differ by what changed between them: {each}."]


def _differences(study: Study, runs: Sequence[Run], other: str) -> list[dict[str, Any]]:
    """Every arm against `other`, on the seeds of which both runs are done. Where there is none: on those that have
    begun, up to the last evaluation that all of their runs have reached, and without a verdict."""
    by_arm: dict[str, dict[int, Run]] = {}
    for run in runs:
        if run["held_out"]["steps"]:
            by_arm.setdefault(run["arm"], {})[run["seed"]] = run
    found = []
    for arm in study.arms:
        mine, theirs = by_arm.get(arm.name, {}), by_arm.get(other, {})
        pairs, to_step = _compared([(mine[seed], theirs[seed]) for seed in sorted(mine.keys() & theirs.keys())])
        if arm.name == other or not pairs:
            continue
        for outcome in OUTCOMES:
            result = paired_difference(*scores(pairs, outcome, to_step))
            found.append({
                "arm": arm.name, "against": other, "outcome": outcome, "seeds": [run["seed"] for run, _ in pairs],
                "verdict": result.verdict if to_step is None else "not finished",
                **({} if to_step is None else {"to_step": to_step}),
                **{key: _rounded(value) for key, value in asdict(result).items()},
            })
    return found


def _compared(pairs: Sequence[tuple[Run, Run]]) -> tuple[list[tuple[Run, Run]], int | None]:
    """Those of `pairs` that are compared, and up to which step (None: to their end)."""
    done = [pair for pair in pairs if all(map(is_done, pair))]
    if done:
        return done, None
    begun = [pair for pair in pairs if all(is_done(run) or run["held_out"]["steps"][-1] > 0 for run in pair)]
    reached = [run["held_out"]["steps"][-1] for pair in begun for run in pair if not is_done(run)]
    return begun, min(reached, default=None)


def scores(
    pairs: Sequence[tuple[Run, Run]], outcome: str, to_step: int | None = None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Scores [S, P] of both sides on the problems that all these runs have, in evaluations up to `to_step`. A run that
    NaN ended early keeps its last evaluation for those that it did not reach."""
    steps = sorted({step for pair in pairs for run in pair for step in run["held_out"]["steps"]})
    steps = [step for step in steps if to_step is None or step <= to_step]
    after = [step for step in steps if step > 0] or steps
    problems = sorted(
        set.intersection(*(set(one) for pair in pairs for run in pair for one in run["held_out"]["scores"])),
        key=int,
    )

    def row(run: Run) -> NDArray[np.float64]:
        held = run["held_out"]
        wanted = steps[-1:] if outcome == "last" else after
        places = [max((i for i, s in enumerate(held["steps"]) if s <= step), default=0) for step in wanted]
        return np.mean([[held["scores"][place][p] for p in problems] for place in places], axis=0)

    return np.array([row(mine) for mine, _ in pairs]), np.array([row(theirs) for _, theirs in pairs])


def _rounded(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_rounded(one) for one in value]
    return round(value, 6) if isinstance(value, float) else value


def _short(value: float) -> float | None:
    """Six significant digits; None for what JSON does not have."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
