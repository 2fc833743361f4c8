"""What a run keeps of a step so that it can be computed again: `replay/step_000123.safetensors` in its folder.

    tokens      every trajectory's; what the trajectories of a prompt share, once. uint16 where the ids fit, else int32
    logprobs    of the policy's tokens, float32
    advantages  where tokens have their own, float64
    digests     `train.digests`, uint64, in the order of their names in `rows`
    rows        JSON: step, weight version, groups with their rewards, trajectories with request ids and spans

So a token of the policy takes 6 or 8 bytes. The file has the SHA-256 of its arrays; it appears whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jetrl.branches import Branch
from jetrl.errors import UserError
from jetrl.types import Advantage, Group, Problem, Prompt, Segment, Trajectory
from jetrl.untrusted import fresh, inside, json_value, open_regular

FOLDER, _FORMAT = "replay", "jetrl replay 1"
_ARRAYS = ("tokens", "logprobs", "advantages", "digests", "rows")
_OF_GROUP = ("rewards", "signals", "sizes", "signal_sizes")
_MISSING = Problem("", "", "")


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A step. `version`: of the weights with which it began. `learnt`: what was packed, in order, with advantages;
    `others`: scored and not learned from; `left`: trajectories that failed or were not scored, by the prompt's place.
    Prompts hold only that place, segments no text. `digests`: by name, in the order of their computation.
    `made_with`: versions and device that may decide about bits."""

    step: int
    version: int
    flow_digest: str
    first_prompt: int
    next_prompt: int
    ranks: int
    learnt: tuple[Group, ...]
    others: tuple[Group, ...] = ()
    left: tuple[tuple[int, Trajectory], ...] = ()
    digests: Mapping[str, int] = field(default_factory=dict)
    made_with: Mapping[str, str] = field(default_factory=dict)

    def trajectories(self) -> Iterator[tuple[str, Trajectory]]:
        """Every trajectory, with words that name it."""
        for group in (*self.learnt, *self.others):
            for number, one in enumerate(group.trajectories):
                yield f"completion {number} of prompt {group.prompt.index}", one
        for place, one in self.left:
            yield f"a completion of prompt {place} that was not scored", one


class _Pool:
    """Rows of numbers behind one another; `shared` ones that were there before are not taken twice."""

    def __init__(self, dtype: type) -> None:
        self.parts: list[np.ndarray] = []
        self.length, self.dtype = 0, dtype
        self._known: dict[bytes, int] = {}

    def put(self, values: np.ndarray, shared: bool = False) -> int:
        key = values.tobytes() if shared else b""
        if shared and key in self._known:
            return self._known[key]
        at, self.length = self.length, self.length + len(values)
        self.parts.append(values)
        if shared:
            self._known[key] = at
        return at

    def whole(self) -> np.ndarray:
        return np.concatenate([np.zeros(0, self.dtype), *self.parts]).astype(self.dtype)


class _Written:
    """The arrays of a record while its rows are made."""

    def __init__(self) -> None:
        self.tokens, self.logprobs, self.advantages = _Pool(np.int32), _Pool(np.float32), _Pool(np.float64)

    def trajectory(self, one: Trajectory) -> dict[str, Any]:
        row: dict[str, Any] = {"id": one.request_id, "end": one.end, "segments": [*map(self._segment, one.segments)]}
        return row | ({"error": one.error} if one.error else {}) | {"flow": one.flow_digest}

    def _segment(self, one: Segment) -> list[Any]:
        drawn = one.author == "policy"
        at = self.tokens.put(one.tokens, shared=not drawn)
        return [int(drawn), at, len(one.tokens), self.logprobs.put(one.logprobs), len(one.logprobs),
                [list(span) for span in one.spans], one.reward, *([list(one.branch)] if one.branch else [])]

    def group(self, group: Group) -> dict[str, Any]:
        row: dict[str, Any] = {"prompt": group.prompt.index, **{key: list(getattr(group, key)) for key in _OF_GROUP}}
        row["scores"] = {name: list(values) for name, values in group.scores.items()}
        row["advantages"] = [self._advantage(value) for value in group.advantages]
        row["trajectories"] = [self.trajectory(one) for one in group.trajectories]
        return row

    def _advantage(self, value: Advantage | None) -> Any:
        if isinstance(value, tuple):
            return [self.advantages.put(np.array(value, np.float64)), len(value)]
        return value


def write(folder: Path, record: StepRecord) -> Path:
    """Write the record's file below the run folder; OSError as writing, and then no part of it is left."""
    made = _Written()
    rows = {
        "step": record.step, "version": record.version, "flow": record.flow_digest, "ranks": record.ranks,
        "first_prompt": record.first_prompt, "next_prompt": record.next_prompt,
        "learnt": [made.group(group) for group in record.learnt],
        "others": [made.group(group) for group in record.others],
        "left": [[place, made.trajectory(one)] for place, one in record.left],
        "digests": list(record.digests), "made_with": dict(record.made_with),
    }
    tokens = made.tokens.whole()
    arrays = {
        "tokens": tokens.astype(np.uint16) if tokens.max(initial=0) < 1 << 16 else tokens,
        "logprobs": made.logprobs.whole(), "advantages": made.advantages.whole(),
        "digests": np.array([*record.digests.values()], np.uint64),
        "rows": np.frombuffer(json.dumps(rows, separators=(",", ":")).encode(), np.uint8),
    }
    path = path_of(folder, record.step)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = fresh(path)
    try:
        save_file(arrays, temporary, metadata={"format": _FORMAT, "sha256": _hash(arrays)})
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def _hash(arrays: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name in _ARRAYS:
        digest.update(f"{name} {arrays[name].dtype} {len(arrays[name])}\n".encode())
        digest.update(np.ascontiguousarray(arrays[name]).data)
    return digest.hexdigest()


def path_of(run_dir: Path, step: int) -> Path:
    return run_dir / FOLDER / f"step_{step:06d}.safetensors"


def steps_of(run_dir: Path) -> list[int]:
    """The steps of which there are records, ascending."""
    found = []
    for path in (run_dir / FOLDER).glob("step_*.safetensors"):
        number = path.name.removeprefix("step_").removesuffix(".safetensors")
        if number.isascii() and number.isdigit() and path_of(run_dir, int(number)) == path:
            found.append(int(number))
    return sorted(found)


def read(run_dir: Path, step: int) -> StepRecord:
    """The record of a step. UserError where there is none, or where it is damaged."""
    path = inside(run_dir, str(path_of(run_dir, step).relative_to(run_dir)))
    if not path.is_file():
        raise UserError(_not_recorded(run_dir, step))
    try:
        open_regular(path).close()
        with safe_open(path, framework="numpy") as file:
            about = file.metadata() or {}
            if about.get("format") != _FORMAT:
                raise ValueError(f"its format is {about.get('format')!r}, and this version reads {_FORMAT!r}")
            arrays = {name: file.get_tensor(name) for name in _ARRAYS}
        if about.get("sha256") != _hash(arrays):
            raise ValueError("its content does not have the hash that was written with it")
        record = _Read(arrays).record()
        if record.step != step:
            raise ValueError(f"it is of step {record.step}")
        return record
    except (ValueError, TypeError, KeyError, IndexError, SafetensorError) as error:
        raise UserError(
            f"{path} cannot be read: {error}. It was damaged or changed: restore it, or take another step."
        ) from error


def _not_recorded(run_dir: Path, step: int) -> str:
    steps = steps_of(run_dir)
    if not steps:
        return (
            f"{run_dir} has no record of any step. Set checkpoint.replay_steps above 0 in the next run; this one's "
            "tokens were not kept."
        )
    return (
        f"{run_dir} has no record of step {step}: it keeps those of steps {ranges(steps)}. Take one of these, or raise "
        "checkpoint.replay_steps in the next run."
    )


def ranges(steps: Sequence[int]) -> str:
    """Ascending numbers in words: `1 to 4, 7`."""
    runs: list[list[int]] = []
    for step in steps:
        if runs and step == runs[-1][1] + 1:
            runs[-1][1] = step
        else:
            runs.append([step, step])
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in runs)


class _Read:
    """A record's rows made of its arrays."""

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self._tokens, self._logprobs = arrays["tokens"].astype(np.int32), arrays["logprobs"]
        self._advantages, self._digests = arrays["advantages"], arrays["digests"]
        self._rows = json_value(arrays["rows"].tobytes())

    def record(self) -> StepRecord:
        rows = self._rows
        return StepRecord(
            rows["step"], rows["version"], rows["flow"], rows["first_prompt"], rows["next_prompt"], rows["ranks"],
            tuple(map(self._group, rows["learnt"])), tuple(map(self._group, rows["others"])),
            tuple((place, self._trajectory(row)) for place, row in rows["left"]),
            dict(zip(rows["digests"], self._digests.tolist(), strict=True)), rows["made_with"],
        )

    def _group(self, row: Mapping[str, Any]) -> Group:
        trajectories = tuple(map(self._trajectory, row["trajectories"]))
        return Group(
            Prompt(row["prompt"], _MISSING, ()), trajectories, tuple(row["rewards"]),
            tuple(map(self._advantage, row["advantages"])),
            {name: tuple(values) for name, values in row["scores"].items()}, tuple(row["signals"]),
            sizes=tuple(row["sizes"]), signal_sizes=tuple(row["signal_sizes"]),
        )

    def _advantage(self, value: Any) -> Advantage | None:
        return tuple(_cut(self._advantages, *value).tolist()) if isinstance(value, list) else value

    def _trajectory(self, row: Mapping[str, Any]) -> Trajectory:
        segments = tuple(map(self._segment, row["segments"]))
        return Trajectory(segments, row["end"], row["flow"], row.get("error", ""), row["id"])

    def _segment(self, row: Sequence[Any]) -> Segment:
        drawn, at, count, first, logprobs, spans, reward, *branch = row
        return Segment(
            "policy" if drawn else "environment", _cut(self._tokens, at, count), "",
            _cut(self._logprobs, first, logprobs), reward, spans=tuple((start, version) for start, version in spans),
            branch=Branch(*branch[0]) if branch else None,
        )


def _cut(values: np.ndarray, at: int, count: int) -> np.ndarray:
    if not 0 <= at <= at + count <= len(values):
        raise ValueError(f"its rows name numbers {at} to {at + count} of {len(values)}")
    return values[at : at + count]
