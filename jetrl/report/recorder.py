"""What a run leaves on disk: `metrics.jsonl`, `samples.jsonl`, `env.json` and `config.toml`.

Every row is one `write` call of one line, so that a killed run loses at most its last line. `Recorder` cuts such a torn
line on resume; the readers pass over it. Numbers that JSON does not have (NaN, infinities) are kept as strings.
"""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from jetrl.errors import UserError
from jetrl.report.environment import describe_environment
from jetrl.report.track import Tracker
from jetrl.types import Group

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
ENV_FILE = "env.json"
CONFIG_FILE = "config.toml"
SAMPLE_KEYS = ("prompt", "answer", "completion", "tokens", "logprobs", "reward", "advantage", "finish_reason")
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class Recorder:
    """Writes one run folder. Give `resume=True` to go on with a folder that holds rows, then call `drop_after`."""

    def __init__(self, run_dir: Path | str, resume: bool = False) -> None:
        self.run_dir = Path(run_dir)
        self.resume = resume
        self.trackers: list[Tracker] = []  # each row goes to them as well
        metrics, samples = self.run_dir / METRICS_FILE, self.run_dir / SAMPLES_FILE
        with _disk_errors(self.run_dir):
            self.run_dir.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(self.run_dir)
        if not resume and metrics.exists() and metrics.stat().st_size > 0:
            raise UserError(
                f"{self.run_dir} already holds a run ({len(read_metrics(self.run_dir))} rows in {METRICS_FILE}). "
                "Go on with it (checkpoint.resume=auto), choose another name=..., or delete the folder."
            )
        for path in (metrics, samples):
            if resume:
                _cut_torn_line(path)
            elif path.exists() and path.stat().st_size > 0:
                path.write_bytes(b"")  # samples without metrics: of a run that died before its first step
        self._metrics = self._open(metrics)
        self._samples = self._open(samples)
        rows = read_metrics(self.run_dir) if resume else []
        self.last_step = int(rows[-1]["step"]) if rows else -1

    def _open(self, path: Path) -> int:
        with _disk_errors(path):
            return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def drop_after(self, step: int) -> None:
        """Remove the rows of both files with a step past `step`, that of the checkpoint from which the run goes on."""
        os.close(self._metrics)
        os.close(self._samples)
        for name in (METRICS_FILE, SAMPLES_FILE):
            _keep_rows(self.run_dir / name, lambda row: row["step"] <= step)
        self._metrics = self._open(self.run_dir / METRICS_FILE)
        self._samples = self._open(self.run_dir / SAMPLES_FILE)
        self.last_step = min(self.last_step, step)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the row of `step`: flat keys, plain numbers. One row a step, in order (step 0: before training)."""
        assert step > self.last_step, f"row of step {step} after that of step {self.last_step}"
        row: dict[str, Any] = {"step": step}
        row.update((key, _encode(key, value)) for key, value in metrics.items() if key != "step")
        self._append(self._metrics, METRICS_FILE, [row])
        self.last_step = step
        for tracker in self.trackers:
            tracker.log(step, {key: value for key, value in metrics.items() if key != "step"})

    def write_samples(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append sample rows of `step` (see `group_rows`); each holds all of `SAMPLE_KEYS`."""
        encoded = []
        for row in rows:
            missing = [key for key in SAMPLE_KEYS if key not in row]
            assert not missing, f"sample row without {missing}"
            assert len(row["tokens"]) == len(row["logprobs"]), "a sample needs one log-prob a token"
            logprobs = [_encode("logprobs", value) for value in row["logprobs"]]
            reward, advantage = (_encode(key, row[key]) for key in ("reward", "advantage"))
            encoded.append({"step": step, **row, "logprobs": logprobs, "reward": reward, "advantage": advantage})
        self._append(self._samples, SAMPLES_FILE, encoded)

    def write_config(self, text: str) -> None:
        """Write the resolved config, as the caller rendered it."""
        self._replace(CONFIG_FILE, text)

    def write_environment(self, command: Sequence[str], extra: Mapping[str, Any] | None = None) -> None:
        """Write `env.json`. On resume the first entry stays and the new one joins its list `resumed`."""
        environment = {**describe_environment(command), **(extra or {})}
        path = self.run_dir / ENV_FILE
        if self.resume and path.exists():
            try:
                first = dict(json.loads(path.read_text()))
            except (ValueError, TypeError):  # it is only a record: a damaged one does not stop a run
                first = dict(environment)
            first.setdefault("resumed", []).append({"after_step": self.last_step, **environment})
            environment = first
        self._replace(ENV_FILE, json.dumps(environment, indent=2) + "\n")

    def _append(self, file: int, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        for row in rows:
            line = json.dumps(row, ensure_ascii=False, allow_nan=False, separators=(", ", ": ")) + "\n"
            data = line.encode("utf-8", errors="replace")  # token strings may hold lone surrogates
            with _disk_errors(self.run_dir / name):
                while data:
                    data = data[os.write(file, data) :]

    def _replace(self, name: str, text: str) -> None:
        temporary = self.run_dir / f".{name}.tmp"
        with _disk_errors(self.run_dir / name):
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(self.run_dir / name)

    def close(self) -> None:
        """Close both files and the trackers; further writes are errors."""
        while self.trackers:
            self.trackers.pop().close()
        for file in (self._metrics, self._samples):
            if file >= 0:
                os.close(file)
        self._metrics = self._samples = -1
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _lock(run_dir: Path) -> int:
    """Hold the run folder for this process (the system lets go of it, however the process ends); its descriptor."""
    try:
        import fcntl
    except ImportError:  # not a Unix
        return -1
    with _disk_errors(run_dir):
        file = os.open(run_dir / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(file)
        if isinstance(error, BlockingIOError):
            raise UserError(f"Another process is writing {run_dir}. Wait, or choose another name.") from None
        return -1  # a file system without locks
    return file


def group_rows(groups: Iterable[Group], token_text: Callable[[int], str]) -> list[dict[str, Any]]:
    """Sample rows of scored groups; `token_text` decodes one token id. Chat prompts become `role: content` lines."""
    rows: list[dict[str, Any]] = []
    for group in groups:
        problem = group.prompt.problem
        prompt = problem.prompt
        if not isinstance(prompt, str):
            prompt = "\n".join(f"{message['role']}: {message['content']}" for message in prompt)
        for completion, reward, advantage in zip(group.completions, group.rewards, group.advantages, strict=True):
            rows.append(
                {
                    "group": group.prompt.index,
                    "prompt": prompt,
                    "answer": problem.answer,
                    "completion": completion.text,
                    "tokens": [token_text(token) for token in completion.tokens],
                    "logprobs": list(completion.logprobs),
                    "reward": reward,
                    "advantage": advantage,
                    "finish_reason": completion.finish_reason,
                }
            )
    return rows


def read_metrics(run_dir: Path | str) -> list[dict[str, Any]]:
    """The rows of a run, oldest first; a torn last line is left out. Raises `UserError` where there is no run."""
    path = Path(run_dir) / METRICS_FILE
    if not path.exists():
        raise UserError(f"{run_dir} has no {METRICS_FILE}, so it is no run folder. Give one, such as runs/<name>.")
    rows = [{key: _decode(value) for key, value in row.items()} for row in _read_rows(path)]
    if wrong := [row.get("step") for row in rows if not isinstance(row.get("step"), int)]:
        raise UserError(f"{path}: a row has the step {wrong[0]!r}. Remove that row.")
    return rows


def read_samples(run_dir: Path | str) -> Iterator[dict[str, Any]]:
    """The sample rows of a run, one at a time (the file may be large); none where the run kept no samples."""
    path = Path(run_dir) / SAMPLES_FILE
    if not path.exists():
        return
    for row in _read_rows(path):
        if missing := [key for key in SAMPLE_KEYS if key not in row]:
            raise UserError(f"{path}: a row lacks {', '.join(missing)}. Remove that row.")
        logprobs = [_decode(value) for value in row["logprobs"]]
        yield {**row, "logprobs": logprobs, "reward": _decode(row["reward"]), "advantage": _decode(row["advantage"])}


def _encode(key: str, value: Any) -> float | int | str | None:
    """A number as JSON has it. Zero-dimensional arrays and tensors count as numbers."""
    if value is None or isinstance(value, int):
        return value
    number = float(value)
    if math.isnan(number):
        return "NaN"
    if math.isinf(number):
        return "Infinity" if number > 0 else "-Infinity"
    return number


def _decode(value: Any) -> Any:
    return _NON_FINITE.get(value, value) if isinstance(value, str) else value


def _read_rows(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            row = _parse(line)
            if row is not None:
                yield row
            elif line.endswith(b"\n"):
                raise UserError(f"{path}, line {number}, is no row: {line[:80]!r}. Remove that line.")


def _parse(line: bytes) -> dict[str, Any] | None:
    """The row that a line holds, or None where the line is torn or foreign."""
    try:
        row = json.loads(line)
    except ValueError:  # of JSON or of UTF-8
        return None
    return row if isinstance(row, dict) and "step" in row else None


def _cut_torn_line(path: Path) -> None:
    """End the file after its last whole row. A whole row that lost only its newline gets it back."""
    if not path.exists():
        return
    with _disk_errors(path), path.open("rb+") as file:
        end = 0
        last = b""
        for line in file:
            end += len(line)
            last = line
        if last and not last.endswith(b"\n"):
            if _parse(last) is None:
                file.truncate(end - len(last))
            else:
                file.seek(end)
                file.write(b"\n")


def _keep_rows(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    with _disk_errors(path):
        with path.open("rb") as source, temporary.open("wb") as target:
            for line in source:
                row = _parse(line)
                if row is None:
                    raise UserError(f"{path} has a line that is no row: {line[:80]!r}. Remove that line.")
                if keep(row):
                    target.write(line)
        temporary.replace(path)


@contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    """Say a full disk or a folder that may not be written plainly; other errors pass."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            place = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
            free = shutil.disk_usage(place.parent if not place.is_dir() else place).free
            reason = "no space left" if error.errno == errno.ENOSPC else "disk quota used up"
            raise UserError(
                f"cannot write {path}: {reason} ({free / 2**20:.1f} MiB free). Free some space, or choose another "
                "output_dir; then go on with checkpoint.resume=auto."
            ) from error
        if error.errno in (errno.EACCES, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
            raise UserError(f"cannot write {path}: {error.strerror}. Choose another output_dir.") from error
        raise
