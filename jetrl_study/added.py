"""Runs of a study that were finished elsewhere: `jetrl study --add` takes them from the study.json of that folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from rich.console import Console

from jetrl import __version__
from jetrl.errors import UserError
from jetrl.report.text import counted
from jetrl.untrusted import json_file
from jetrl_study.plan import Planned, Study
from jetrl_study.state import is_done, read_state, same_bits

RESULTS = "study.json"
_MOST_BYTES = 1 << 30  # it holds the score of each problem at each evaluation of each run
_REMEDY = "Copy it again, or leave it out."


@dataclass(frozen=True, slots=True)
class Added:
    """A run that is done elsewhere. `data`: its entry in `file`'s "runs". `origin`: "file", "environment" and "written"
    of the study.json of the folder in which it ran."""

    data: Mapping[str, Any]
    origin: Mapping[str, Any]


def read_added(
    paths: Sequence[Path], study: Study, plan: Sequence[Planned], out: Path, console: Console
) -> dict[str, Added]:
    """The runs of `plan` that are done in one of these files and not in `out`, by name; of equal ones the first. Tells
    what each file has. UserError for a file that is not of this study, or whose runs have other settings."""
    known = {(run.arm.name, run.seed): run for run in plan}
    found: dict[str, Added] = {}
    for path in paths:
        data = _checked(path, study)
        # The folder's own runs count as they are there now: one that was removed is to run again.
        runs = [run for run in data["runs"] if run.get("added")] if _same(path, out / RESULTS) else data["runs"]
        there = [run for run in runs if is_done(run)]
        done = [(known[place], run) for run in there if (place := (run["arm"], run["seed"])) in known]
        for planned, run in done:
            if planned.digest != run["digest"]:
                raise UserError(_other_settings(path, data, study, planned))
        new = {
            planned.name: Added(run, _origin(path, data, planned.name)) for planned, run in done
            if planned.name not in found and not read_state(out, planned).done
        }
        found |= new
        left_out = {
            "not done there": len(runs) - len(there), "of other arms or seeds": len(there) - len(done),
            "done already": len(done) - len(new),
        }
        rest = "".join(f", {count} {why}" for why, count in left_out.items() if count)
        console.print(f"Added from {path}: {counted(len(new), 'run')}{rest}", markup=False)
    return found


def _same(path: Path, other: Path) -> bool:
    return other.exists() and path.samefile(other)


def by_origin(added: Mapping[str, Added]) -> list[dict[str, Any]]:
    """What study.json keeps under "added": each origin, with the names of its runs."""
    found: list[dict[str, Any]] = []
    for name, one in added.items():
        entry = next((e for e in found if all(e[key] == value for key, value in one.origin.items())), None)
        if entry is None:
            found.append({**one.origin, "runs": [name]})
        else:
            entry["runs"].append(name)
    return found


def has_added(path: Path) -> bool:
    """Whether this study.json, if there is one that can be read, holds runs of other folders."""
    try:
        return path.is_file() and bool(read_json(path).get("added"))
    except UserError:
        return False  # it is written again


def added_seeds(path: Path, study: Study) -> set[int]:
    """The seeds of the runs of other folders that a folder's own study.json holds. UserError if it is of another study
    or version."""
    if not has_added(path):
        return set()
    return {run["seed"] for run in _checked(path, study)["runs"] if run.get("added")}


def read_json(path: Path) -> dict[str, Any]:
    """What `collect.write_json` wrote."""
    if path.is_dir():
        raise UserError(f"{path} is a folder. Give its study.json.")
    try:
        data = json_file(path, _MOST_BYTES, parse_constant=_not_json)
        if not isinstance(data, dict):
            raise ValueError(f"it holds {type(data).__name__}, no table")
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}). {_REMEDY}") from error
    except ValueError as error:
        raise UserError(f"{path} is not JSON that a study has written ({error}). {_REMEDY}") from error
    return data


def _not_json(constant: str) -> float:
    raise ValueError(f"it holds {constant}")


def _checked(path: Path, study: Study) -> dict[str, Any]:
    """The file's data. Its form is that of this version only, so the version is looked at before the form."""
    data = read_json(path)
    try:
        head = _Head.model_validate(data)
        if head.study.name != study.name:
            raise UserError(f"{path} is of the study {head.study.name}, and this one is {study.name}. Leave it out.")
        # The digest covers the settings and not the code: the same settings may have other bits in another version, and
        # the rules and series of its study.json may be others. A comparison of arms must not hold that difference.
        if not same_bits(head.version):
            raise UserError(
                f"{path} was written by jetrl {head.version}, and this is {__version__}: the same settings may compute "
                f"something else. Use jetrl {head.version} here, or leave the file out to make its runs again."
            )
        _File.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        why = first["msg"].removeprefix("Value error, ")
        problem = f"{path} is not a study.json of `jetrl study`, or it is damaged: {place}: {why}. {_REMEDY}"
        raise UserError(problem) from error
    return data


def _origin(path: Path, data: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Where a run of the file ran: a file that was itself made with --add says so."""
    before = next((entry for entry in data.get("added", []) if name in entry["runs"]), None)
    if before is not None:
        return {key: before[key] for key in ("file", "environment", "written")}
    # Every such file is called study.json: its folder tells them apart. The rest of the path is nobody else's business.
    file = "/".join(path.absolute().parts[-2:])
    return {"file": file, "environment": data["environment"], "written": data["written"]}


def _other_settings(path: Path, data: Mapping[str, Any], study: Study, run: Planned) -> str:
    arms = {one["name"]: [*one["overrides"], *_broken(one["break_exactness"])] for one in data["study"]["arms"]}
    there = [*data["study"]["overrides"], *arms.get(run.arm.name, [])]
    here = [*study.overrides, *run.arm.overrides, *_broken(run.arm.break_exactness)]
    only = [
        f"Only {where}: {', '.join(texts)}. " for where, texts in (
            ("there", [text for text in there if text not in here]),
            ("here", [text for text in here if text not in there]),
        ) if texts
    ]
    why = "".join(only) or "The overrides are equal, so the recipe, or jetrl itself, has changed. "
    return (
        f"{path}: its run {run.name} was made with other settings than this study has here. {why}"
        "Give the settings of that run here, or leave the file out to make its runs again."
    )


def _broken(ops: Sequence[str]) -> list[str]:
    return [f"break_exactness = {sorted(ops)}"] if ops else []


class _Shape(BaseModel):
    """What results, differences and page read of a study.json. Only checked: the data are used as they are."""

    model_config = ConfigDict(allow_inf_nan=False, strict=True)


def _rising(steps: list[int]) -> list[int]:
    if any(b <= a for a, b in pairwise(steps)):
        raise ValueError("steps do not rise")
    return steps


Step = Annotated[int, Field(ge=0, lt=1 << 40)]
Steps = Annotated[list[Step], AfterValidator(_rising)]
Number = Annotated[str, Field(pattern=r"^\d{1,12}$")]  # of a problem, or of a token


class _Series(_Shape):
    steps: Steps
    values: list[float | None]

    @model_validator(mode="after")
    def _paired(self) -> _Series:
        if len(self.steps) != len(self.values):
            raise ValueError(f"{len(self.steps)} steps and {len(self.values)} values")
        return self


class _HeldOut(_Shape):
    steps: Steps
    mean: list[float]
    solved: list[float]
    scores: list[Annotated[dict[Number, float], Field(min_length=1)]]
    binary: bool

    @model_validator(mode="after")
    def _paired(self) -> _HeldOut:
        if not len(self.steps) == len(self.mean) == len(self.solved) == len(self.scores):
            raise ValueError(f"{len(self.steps)} steps and {len(self.scores)} evaluations")
        if self.scores and not set.intersection(*map(set, self.scores)):  # a problem may lack a score now and then
            raise ValueError("its evaluations are of different problems")
        if self.binary and any(not 0 <= score <= 1 for one in self.scores for score in one.values()):
            raise ValueError("a score of rewards that are 0 or 1 is outside of that")
        return self


class _Failure(_Shape):
    rule: str
    step: int
    text: str
    recovered: bool


class _Run(_Shape):
    arm: str
    seed: int
    status: Literal["new", "started", "finished", "non-finite"]
    step: int
    digest: str
    series: dict[str, _Series]
    seconds: _Series
    by_position: dict[Number, float]
    held_out: _HeldOut
    failures: list[_Failure]
    commits: list[str] = []

    @model_validator(mode="after")
    def _complete(self) -> _Run:
        evaluated = self.held_out.steps
        if evaluated and not self.seconds.steps:
            raise ValueError("it has evaluations and no step")
        if self.status != "finished":
            return self  # NaN may come before the first evaluation
        if not evaluated:
            raise ValueError("it is done and has no evaluation")
        if evaluated[-1] != self.step:
            raise ValueError(f"it is finished at step {self.step}, and its last evaluation is of step {evaluated[-1]}")
        return self


class _Origin(_Shape):
    file: str
    environment: dict[str, Any]
    written: str
    runs: list[str]


class _Arm(_Shape):
    name: str
    overrides: list[str]
    break_exactness: list[str]


class _Name(_Shape):
    name: str


class _Study(_Name):
    overrides: list[str]
    arms: list[_Arm]


class _Head(_Shape):
    study: _Name
    version: str


class _File(_Shape):
    study: _Study
    written: str
    environment: dict[str, Any]
    runs: list[_Run]
    added: list[_Origin] = []
