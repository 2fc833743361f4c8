"""What a study knows of each run between two calls: OUT/state/NAME.json, written whole or not at all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jetrl import __version__
from jetrl.errors import UserError
from jetrl.report.files import parse_row, write_whole
from jetrl.report.recorder import ENV_FILE, METRICS_FILE
from jetrl.untrusted import json_file
from jetrl_study.plan import Planned

DONE = ("finished", "non-finite")  # a run that diverged is a result too
FAILED_FOLDER = "failed"  # in a run folder: what a run leaves that NaN or infinity has ended


def is_done(run: Mapping[str, Any]) -> bool:
    """Whether a run, as study.json has it, has a result."""
    return run["status"] in DONE


@dataclass(frozen=True, slots=True)
class State:
    """`status`: new, started, or one of `DONE`."""

    status: str
    digest: str
    step: int = 0

    @property
    def done(self) -> bool:
        return self.status in DONE


def read_state(out: Path, run: Planned) -> State:
    """The state of a run; a new one if it has no folder, because it never began or because the user has removed it.
    UserError if its folder is of another study, or of other settings of this one."""
    path = _path(out, run)
    if not path.exists() or not run_folder(out, run).exists():
        return State("new", run.digest)
    try:
        data = json_file(path)
        state = State(str(data["status"]), str(data["digest"]), int(data.get("step", 0)))
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} cannot be read ({error}). Remove it and {out / 'runs' / run.name}.") from error
    if state.digest == run.digest:
        return state
    raise UserError(
        f"{run_folder(out, run)} was made with other settings; its config.toml has them. Give another --out, or remove "
        "this folder to make the run again."
    )


def begun_seeds(out: Path) -> set[int]:
    """The seeds of the runs that were begun in this study's folder."""
    names = [path.name.rpartition("-s")[2] for path in (out / "runs").glob("*-s*")]
    return {int(name) for name in names if name.isdecimal()}


def kept_threads(out: Path, wanted: int | None, default: int) -> int:
    """The threads of a run in this study's folder: those with which it was begun, as a warm start belongs to a number
    of threads and all arms of a seed are to share it. UserError if others are wanted."""
    path = out / "state" / "threads.json"
    kept = read_if_there(path)
    if kept is None:
        kept = wanted or default
        _write(path, kept)
    if wanted not in (None, kept):
        raise UserError(
            f"--threads {wanted}: {out} was begun with {kept}, and a warm start belongs to a number of threads. Leave "
            "--threads out, or give another --out."
        )
    return int(kept)


# Versions in which equal settings compute the same, to the bit, and write the same form of study.json.
SAME_BITS = ("0.1.0", "0.2.0")


def same_bits(version: object) -> bool:
    """Whether runs of that version of jetrl may stand beside runs of this one."""
    return version == __version__ or (version in SAME_BITS and __version__ in SAME_BITS)


def require_version(out: Path) -> None:
    """UserError if this study's folder was begun with a version of jetrl that has other bits, or may have: its warm
    starts and runs may be others where settings are equal."""
    path = _version_path(out)
    if (kept := read_if_there(path)) is not None and not same_bits(kept):
        raise UserError(
            f"{out} was begun with jetrl {kept}, and this is {__version__}: equal settings may compute something else, "
            f"and arms are to differ in nothing but theirs. Use jetrl {kept} here, or give another --out."
        )


def write_version(out: Path) -> None:
    """Note the version with which the folder is begun."""
    _write(_version_path(out), __version__)


def commits_of(folder: Path) -> list[str]:
    """The commits of jetrl that have worked on a run, in order, from its env.json; an installed package has none."""
    path = folder / ENV_FILE
    first = read_if_there(path) or {}
    return [name for one in (first, *first.get("resumed", [])) if (name := commit_name(one))]


def commit_name(environment: Mapping[str, Any]) -> str:
    """The commit in an environment (`report.environment`), shortened; empty if there is none."""
    commit = environment.get("git_commit")
    return f"{commit[:10]}{' + changes' if environment.get('git_dirty') else ''}" if commit else ""


def write_state(out: Path, run: Planned, status: str, step: int = 0) -> None:
    """Note where a run is."""
    _write(_path(out, run), {"status": status, "digest": run.digest, "step": step})


def read_if_there(path: Path) -> Any:
    """A JSON file's content; None if there is no file. UserError if it is damaged."""
    try:
        return json_file(path)
    except FileNotFoundError:
        return None
    except (ValueError, OSError) as error:
        raise UserError(f"{path} cannot be read ({error}). Remove it.") from error


def _write(path: Path, value: Any) -> None:
    write_whole(path, json.dumps(value) + "\n")


def run_folder(out: Path, run: Planned) -> Path:
    return out / "runs" / run.name


def step_of(folder: Path) -> int:
    """The last step that a run has recorded; -1 before its first row. Reads only the end of the file."""
    path = folder / METRICS_FILE
    if not path.exists():
        return -1
    with path.open("rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - (1 << 16)))
        rows = [parse_row(line) for line in file.read().splitlines()]
    steps = [row["step"] for row in rows if row is not None]
    return int(steps[-1]) if steps else -1


def non_finite_step(folder: Path) -> int | None:
    """The step at which NaN or infinity ended the run; None if it did not."""
    found = sorted((folder / FAILED_FOLDER).glob("step_*"))
    return int(found[-1].name.removeprefix("step_")) if found else None


def drop_checkpoints(folder: Path) -> None:
    """A finished run's checkpoints take most of its space, and nothing reads them any more."""
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    shutil.rmtree(folder / FAILED_FOLDER / "weights", ignore_errors=True)


def _version_path(out: Path) -> Path:
    return out / "state" / "version.json"


def _path(out: Path, run: Planned) -> Path:
    return out / "state" / f"{run.name}.json"
