"""What a run leaves on disk: `metrics.jsonl`, `samples.jsonl`, `heldout.jsonl`, `eval_samples.jsonl`, `env.json` and
`config.toml`.

Every row is one `write` call of one line, so that a killed run loses at most its last line. `Recorder` cuts such a torn
line on resume; the readers skip it. Numbers that JSON does not have (NaN, infinities) are kept as strings.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from jetrl.errors import Notice, UserError
from jetrl.report.channel import Channel
from jetrl.report.environment import describe_environment
from jetrl.report.files import (
    MOST_ROWS_BYTES,
    cut_torn_line,
    disk_errors,
    keep_rows,
    line_of,
    lock,
    read_rows,
    replace_row,
    write_whole,
)
from jetrl.report.track import evenly, table_rows
from jetrl.untrusted import inside, json_file, refuse_link

if TYPE_CHECKING:  # the command line's help needs no numpy
    from jetrl.types import Advantage, Group, Prompt, Segment, Trajectory

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
HELD_OUT_FILE = "heldout.jsonl"  # each evaluation problem by problem, for paired comparisons of runs
EVAL_SAMPLES_FILE = "eval_samples.jsonl"  # some completions of each evaluation, for people to read
ENV_FILE = "env.json"
CONFIG_FILE = "config.toml"
ROW_FILES = (METRICS_FILE, SAMPLES_FILE, HELD_OUT_FILE, EVAL_SAMPLES_FILE)  # one row a line, each with a step
SAMPLE_KEYS = ("prompt", "answer", "completion", "tokens", "logprobs", "reward", "advantage", "finish_reason")
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class Recorder:
    """Writes one run folder. Pass `resume=True` to continue a folder that holds rows, then call `drop_after`."""

    def __init__(self, run_dir: Path | str, resume: bool = False) -> None:
        self.run_dir = Path(run_dir)
        self.resume = resume
        self.trackers: list[Channel] = []  # each row goes to them too
        self.tracked_samples = 0  # rows of a table of samples that they get
        metrics, samples, *rest = (self.run_dir / name for name in ROW_FILES)
        with disk_errors(self.run_dir):
            self.run_dir.mkdir(parents=True, exist_ok=True)
        self._lock = lock(self.run_dir)
        if not resume and metrics.exists() and metrics.stat().st_size > 0:
            raise UserError(
                f"{self.run_dir} already holds a run ({len(read_metrics(self.run_dir))} rows in {METRICS_FILE}). "
                "Continue it (checkpoint.resume=auto), choose another name=..., or delete the folder."
            )
        for path in (metrics, samples, *rest):
            if resume:
                cut_torn_line(path)
            elif path.exists() and path.stat().st_size > 0:
                refuse_link(path).write_bytes(b"")  # without metrics: from a run that died before its first row
        self._metrics = self._open(metrics)
        self._samples = self._open(samples)
        rows = read_metrics(self.run_dir) if resume else []
        self.last_step = int(rows[-1]["step"]) if rows else -1

    def _open(self, path: Path) -> int:
        with disk_errors(path):
            return os.open(refuse_link(path), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def drop_after(self, step: int, first: int = 0) -> None:
        """Remove the rows of all files with a step past `step`, that of the checkpoint from which the run resumes.

        Warns of rows that are missing and cannot be made again: of the metrics from step `first` up to there, and of
        evaluations that the metrics have.
        """
        self._shut()
        kept = {
            name: keep_rows(self.run_dir / name, lambda row: row["step"] <= step)
            for name in ROW_FILES
            if (self.run_dir / name).exists()  # a run of an earlier version has fewer
        }
        self._metrics = self._open(self.run_dir / METRICS_FILE)
        self._samples = self._open(self.run_dir / SAMPLES_FILE)
        self.last_step = min(self.last_step, step)
        evaluated = {r["step"] for r in read_metrics(self.run_dir) if any(key.startswith("eval/") for key in r)}
        for name, wanted in ((METRICS_FILE, set(range(first, step + 1))), (HELD_OUT_FILE, evaluated)):
            if lost := sorted(wanted - kept.get(name, wanted)):
                shown = ", ".join(map(str, lost[:5])) + (", ..." if len(lost) > 5 else "")
                warnings.warn(
                    f"{self.run_dir / name} lacks the rows of steps {shown} before the checkpoint of step {step}. "
                    "They are lost; training continues from the checkpoint.", Notice, stacklevel=2,
                )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the row of `step`: flat keys, plain numbers. One row per step, in order (step 0: before training)."""
        assert step > self.last_step, f"row of step {step} after that of step {self.last_step}"
        row: dict[str, Any] = {"step": step}
        row.update((key, _encode(value)) for key, value in metrics.items() if key != "step")
        self._append(self._metrics, METRICS_FILE, [line_of(row)])
        self.last_step = step
        for tracker in self.trackers:
            tracker.log(step, {key: value for key, value in metrics.items() if key != "step"})

    def last_row(self) -> dict[str, Any]:
        """The last row of the metrics; empty where there is none."""
        rows = read_metrics(self.run_dir)
        return rows[-1] if rows else {}

    def amend(self, metrics: Mapping[str, float], tracked: bool = True) -> None:
        """Add to the last row what it lacks: an evaluation that was given up, the end of a run. Times add up. What is
        not `tracked` goes to no tracker, where the step is logged already."""
        row = self.last_row()
        assert row.get("step") == self.last_step, "no row to amend"
        times = {k: v + row.get(k, 0.0) for k, v in metrics.items() if k.startswith("time/")}
        file, self._metrics = self._metrics, -1
        os.close(file)
        replace_row(self.run_dir / METRICS_FILE, {k: _encode(v) for k, v in {**row, **metrics, **times}.items()})
        self._metrics = self._open(self.run_dir / METRICS_FILE)
        for tracker in self.trackers if tracked else ():
            tracker.log(self.last_step, metrics)

    def write_held_out(self, step: int, row: Mapping[str, Any] | None) -> None:
        """Append the evaluation of `step`: `task`, `problems` (numbers in the held-out set) and their `rewards`, None
        where a completion is not scored.

        Row None: there was none. A run that was killed after the step's row and before this one repeats the step, as
        its checkpoint comes after both; the reader takes the last row of a step.
        """
        if row is None:
            return
        rewards = [[_encode(value) for value in values] for values in row["rewards"]]
        self._append_once(HELD_OUT_FILE, [line_of({"step": step, **row, "rewards": rewards})])

    def write_eval_samples(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append some completions of the evaluation of `step`: rows as those of samples.jsonl."""
        lines = sample_lines(step, rows)
        self._append_once(EVAL_SAMPLES_FILE, lines)
        self._track_samples("eval_samples", step, lines)

    def _append_once(self, name: str, lines: Sequence[bytes]) -> None:
        """Append to a file that is not kept open; it is made with its first line."""
        if not lines:
            return
        file = self._open(self.run_dir / name)
        try:
            self._append(file, name, lines)
        finally:
            os.close(file)

    def write_samples(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append sample rows of `step` (see `group_rows`, `failed_rows`); each holds all of `SAMPLE_KEYS`."""
        self.append_samples(sample_lines(step, rows))

    def append_samples(self, lines: Iterable[bytes]) -> None:
        """Append lines that `sample_lines` has made, here or on another rank."""
        lines = list(lines)
        self._append(self._samples, SAMPLES_FILE, lines)
        self._track_samples("samples", self.last_step, lines)

    def _track_samples(self, table: str, step: int, lines: Sequence[bytes]) -> None:
        """Send some of these lines, evenly over all, to the trackers as a table: `samples`, or `eval_samples`."""
        chosen = evenly(lines, self.tracked_samples)
        for tracker in self.trackers if chosen else ():
            tracker.samples(table, step, lambda: table_rows(chosen))

    def write_config(self, text: str) -> None:
        """Write the resolved config, as the caller rendered it."""
        write_whole(self.run_dir / CONFIG_FILE, text)

    def write_environment(self, command: Sequence[str], extra: Mapping[str, Any] | None = None) -> None:
        """Write `env.json`. On resume the first entry stays and the new one joins its list `resumed`."""
        environment = {**describe_environment(command), **(extra or {})}
        path = self.run_dir / ENV_FILE
        if self.resume and path.exists():
            try:
                first = dict(json_file(inside(self.run_dir, ENV_FILE)))
            except (ValueError, TypeError):  # only a record: a damaged one does not stop a run
                first = dict(environment)
            first.setdefault("resumed", []).append({"after_step": self.last_step, **environment})
            environment = first
        write_whole(self.run_dir / ENV_FILE, json.dumps(environment, indent=2) + "\n")

    def _append(self, file: int, name: str, lines: Iterable[bytes]) -> None:
        for data in lines:
            with disk_errors(self.run_dir / name):
                while data:
                    data = data[os.write(file, data) :]

    def close(self, failed: bool = False) -> None:
        """Close both files, then the trackers (as those of a failed run if so); further writes are errors."""
        self._shut()
        while self.trackers:
            self.trackers.pop().close(failed)
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)

    def _shut(self) -> None:
        """Close the files of rows. A number that is closed is forgotten first: it may be another file's by then."""
        files, self._metrics, self._samples = (self._metrics, self._samples), -1, -1
        for file in files:
            if file >= 0:
                os.close(file)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(failed=kind is not None)


class NoRecorder(Recorder):
    """That of a rank whose run another one records: it writes nothing."""

    def __init__(self) -> None:
        self.run_dir = Path()  # which nothing is written to
        self.trackers, self.tracked_samples, self.last_step = [], 0, -1
        self._metrics = self._samples = self._lock = -1

    def drop_after(self, step: int, first: int = 0) -> None:
        pass

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        pass

    def write_held_out(self, step: int, row: Mapping[str, Any] | None) -> None:
        pass

    def write_eval_samples(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        pass

    def last_row(self) -> dict[str, Any]:
        return {}

    def amend(self, metrics: Mapping[str, float], tracked: bool = True) -> None:
        pass


def sample_lines(step: int, rows: Iterable[Mapping[str, Any]]) -> list[bytes]:
    """Sample rows of `step` as the lines of the samples' file."""
    lines = []
    for row in rows:
        missing = [key for key in SAMPLE_KEYS if key not in row]
        assert not missing, f"sample row without {missing}"
        for part in (row, *(turn for turn in row.get("turns", ()) if turn["author"] == "policy")):
            assert len(part["tokens"]) == len(part["logprobs"]), "a sample needs one log-prob a token"
        assert len(row.get("advantages", row["tokens"])) == len(row["tokens"]), "one advantage per token, or one"
        lines.append(line_of({"step": step, **_with_numbers(row, _encode)}))
    return lines


def write_samples(path: Path, rows: Iterable[Mapping[str, Any]], step: int = 0) -> Path:
    """Write sample rows to a file of their own, whole or not at all."""
    return write_whole(path, b"".join(sample_lines(step, rows)).decode("utf-8"))


Decode = Callable[[Sequence[int]], str]
"""The text of tokens, special ones included: what the policy read."""


def group_rows(
    groups: Iterable[Group], token_text: Callable[[int], str], decode: Decode | None = None
) -> list[dict[str, Any]]:
    """Sample rows of scored groups, one per trajectory; `token_text` decodes one token id, `decode` a text.

    With `decode`, the first row of a group has `prompt_rendered`, the prompt exactly as the policy read it; so has a
    later row with another prompt. The environment's turns have `rendered` likewise.
    A plain answer has the problem's prompt, chat messages as `role: content` lines. A conversation has the prompt that
    the policy saw, and `turns`: what followed, by author. If any trajectory of a group is a conversation, all are
    recorded as one. Where it is known, an environment's turn says whose messages it holds (`roles`, and for the prompt
    `prompt_roles`: role and first character of each), and a policy's which weights drew it (`versions`, as
    `Segment.spans`). A turn that begins a branch has `after`, the number of the turn that it follows (-1: none, it is a
    prompt anew). With an advantage for each token, these are `advantages` and `advantage` their mean. `advantage`
    is None where there is none: the trajectory was not learned from.
    """
    rows: list[dict[str, Any]] = []
    for group in groups:
        talk = any(_is_conversation(group.prompt, one) for one in group.trajectories)
        shown: tuple[int, ...] | None = None
        given = zip(group.trajectories, group.rewards, group.advantages, strict=True)
        for i, (trajectory, reward, advantage) in enumerate(given):
            row = _row(group.prompt, trajectory, token_text, talk, decode if _first(trajectory) != shown else None)
            shown = _first(trajectory)
            row |= _scores(reward, advantage) | _by_function(group, i)
            rows.append(row | _rendered_turns(row, trajectory, decode))
    return rows


def unscored_rows(
    groups: Iterable[Group], token_text: Callable[[int], str], decode: Decode | None = None, *, conversations: bool
) -> list[dict[str, Any]]:
    """Sample rows of trajectories that are not scored: no reward, no advantage, and `error`; what single functions gave
    is there."""
    rows = []
    for group in groups:
        for i, one in enumerate(group.trajectories):
            talk = conversations or _is_conversation(group.prompt, one)
            row = _row(group.prompt, one, token_text, talk, decode)
            row |= {"reward": None, "advantage": None, "error": one.error} | _by_function(group, i)
            rows.append(row | _rendered_turns(row, one, decode))
    return rows


def eval_rows(
    scored: Iterable[Group], unscored: Iterable[Group], failed: Iterable[tuple[Prompt, Trajectory]],
    token_text: Callable[[int], str], decode: Decode | None = None,
) -> list[dict[str, Any]]:
    """Sample rows of an evaluation, without advantages, in the order of the problems."""
    blank = [replace(group, advantages=(None,) * len(group.trajectories)) for group in scored]
    rows = group_rows(blank, token_text, decode) + unscored_rows(unscored, token_text, decode, conversations=False)
    rows += failed_rows(failed, token_text, decode)
    return sorted(rows, key=lambda row: int(row["group"]))


def _by_function(group: Group, place: int) -> dict[str, Any]:
    """`rewards` by function and `extra`, the columns that functions logged, where there are any."""
    rewards = {name: values[place] for name, values in group.scores.items()}
    extra = {name: values[place] for name, values in group.extra.items()}
    return ({"rewards": rewards} if rewards else {}) | ({"extra": extra} if extra else {})


def failed_rows(
    failed: Iterable[tuple[Prompt, Trajectory]], token_text: Callable[[int], str], decode: Decode | None = None
) -> list[dict[str, Any]]:
    """Sample rows of trajectories whose environment failed: no reward, no advantage, and `error`."""
    rows = []
    for prompt, trajectory in failed:
        row = _row(prompt, trajectory, token_text, True, decode)
        row |= {"reward": None, "advantage": None, "error": trajectory.error}
        rows.append(row | _rendered_turns(row, trajectory, decode))
    return rows


def _first(trajectory: Trajectory) -> tuple[int, ...]:
    """The prompt's tokens; none if the environment failed before it gave one."""
    return tuple(trajectory.segments[0].tokens.tolist()) if trajectory.segments else ()


def _rendered_turns(row: Mapping[str, Any], trajectory: Trajectory, decode: Decode | None) -> dict[str, Any]:
    """The row's turns, the environment's with what the policy read of them."""
    if decode is None or "turns" not in row:
        return {}
    pairs = zip(row["turns"], trajectory.segments[1:], strict=True)
    return {"turns": [t if s.author == "policy" else {**t, "rendered": decode(s.tokens.tolist())} for t, s in pairs]}


def _is_conversation(prompt: Prompt, trajectory: Trajectory) -> bool:
    """Whether there is more than the problem's own prompt and one answer of the policy."""
    later = trajectory.segments[1:]
    own = bool(prompt.problem.prompt) and _first(trajectory) == prompt.tokens
    return not own or [segment.author for segment in later] != ["policy"]


def _row(
    prompt: Prompt, trajectory: Trajectory, token_text: Callable[[int], str], conversation: bool,
    decode: Decode | None = None,
) -> dict[str, Any]:
    text, later = prompt.problem.prompt_text, trajectory.segments[1:]
    if conversation and trajectory.segments:  # none if the environment failed before it gave a prompt
        text = trajectory.segments[0].text
    row: dict[str, Any] = {
        "group": prompt.index,
        "prompt": text,
        "answer": prompt.problem.answer,
        "completion": "".join(segment.text for segment in later),
        "tokens": [token_text(token) for segment in trajectory.turns for token in segment.tokens.tolist()],
        "logprobs": [value for segment in trajectory.turns for value in segment.logprobs.tolist()],
        "reward": None,
        "advantage": None,
        "finish_reason": trajectory.end,
    }
    if decode is not None and _first(trajectory):
        row["prompt_rendered"] = decode(_first(trajectory))
    if conversation:
        row |= {f"prompt_{key}": said for one in trajectory.segments[:1] for key, said in _roles(one).items()}
        row["turns"] = [_turn(segment, token_text) for segment in later]
    return row


def _scores(reward: float, advantage: Advantage | None) -> dict[str, Any]:
    if isinstance(advantage, tuple):
        mean = math.fsum(advantage) / len(advantage)
        return {"reward": reward, "advantage": mean, "advantages": list(advantage)}
    return {"reward": reward, "advantage": advantage}


def _turn(segment: Segment, token_text: Callable[[int], str]) -> dict[str, Any]:
    turn: dict[str, Any] = {"author": segment.author, "text": segment.text}
    if segment.author == "policy":
        turn["tokens"] = [token_text(token) for token in segment.tokens.tolist()]
        turn["logprobs"] = segment.logprobs.tolist()
    if segment.branch is not None:
        turn["after"] = segment.branch.after - 1 if segment.branch.after > 0 else -1
    turn |= _roles(segment) | ({"versions": [list(span) for span in segment.spans]} if segment.spans else {})
    if segment.reward is not None:
        turn["reward"] = segment.reward
    return turn


def _roles(segment: Segment) -> dict[str, Any]:
    """`roles`: who said what in the text of an environment's turn, as [role, first character], message by message."""
    texts = [str(message.get("content") or "") for message in segment.messages]
    gap = len(segment.text) - sum(map(len, texts))
    if not texts or gap not in (0, len(texts) - 1):  # a text that is not its messages, with or without line breaks
        return {}
    starts = accumulate((len(text) + (gap > 0) for text in texts), initial=0)
    named = zip(segment.messages, starts, strict=False)
    return {"roles": [[str(message["role"]), start] for message, start in named]}


def read_metrics(run_dir: Path | str) -> list[dict[str, Any]]:
    """The rows of a run, oldest first; a torn last line is left out. Raises `UserError` if there is no run."""
    if not Path(run_dir).exists():
        raise UserError(f"{run_dir}: there is no such folder. Give a run folder, such as runs/<name>.")
    path = inside(Path(run_dir), METRICS_FILE)
    if not path.exists():
        raise UserError(f"{run_dir} has no {METRICS_FILE}, so it is not a run folder. Give one, such as runs/<name>.")
    rows = [{key: _decode(value) for key, value in row.items()} for row in read_rows(path, MOST_ROWS_BYTES)]
    if wrong := [row.get("step") for row in rows if type(row.get("step")) is not int]:
        raise UserError(f"{path}: a row has the step {wrong[0]!r}. Remove that row.")
    return rows


def read_samples(run_dir: Path | str) -> Iterator[dict[str, Any]]:
    """The sample rows of a run, one at a time (the file may be large); none if the run kept no samples."""
    yield from _read_samples(inside(Path(run_dir), SAMPLES_FILE))


def read_eval_samples(run_dir: Path | str) -> Iterator[dict[str, Any]]:
    """The completions that a run kept of its evaluations, as rows like those of `read_samples`; none if it kept none.

    Of a step that was repeated after a kill, both evaluations may be there: they are equal.
    """
    yield from _read_samples(inside(Path(run_dir), EVAL_SAMPLES_FILE))


def _read_samples(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    for row in read_rows(path):
        if missing := [key for key in SAMPLE_KEYS if key not in row]:
            raise UserError(f"{path}: a row lacks {', '.join(missing)}. Remove that row.")
        try:
            numbers = decoded(row)
        except (TypeError, AttributeError) as error:
            raise UserError(
                f"{path}: a row of step {row['step']} has an unexpected form ({error}). Remove it."
            ) from error
        yield numbers


def decoded(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of samples as it was before it became JSON."""
    return _with_numbers(row, _decode)


def read_held_out(run_dir: Path | str) -> dict[int, dict[str, Any]]:
    """By step, each evaluation problem by problem; empty if the run has none (or is of a version that kept none)."""
    path = inside(Path(run_dir), HELD_OUT_FILE)
    if not path.exists():
        return {}
    rows = list(read_rows(path, MOST_ROWS_BYTES))
    try:
        return {
            row["step"]: {**row, "rewards": [[_decode(value) for value in values] for values in row["rewards"]]}
            for row in rows
        }
    except (TypeError, KeyError) as error:
        raise UserError(f"{path}: a row has an unexpected form ({error!r}). Remove it.") from error


def _with_numbers(row: Mapping[str, Any], convert: Callable[[Any], Any]) -> dict[str, Any]:
    """The row with `convert` applied to its rewards, advantages and log-probs, those of its turns included."""
    changed = dict(row)
    for key in changed.keys() & {"reward", "advantage"}:
        changed[key] = convert(changed[key])
    if "rewards" in changed:
        changed["rewards"] = {name: convert(value) for name, value in changed["rewards"].items()}
    for key in changed.keys() & {"logprobs", "advantages"}:
        changed[key] = [convert(value) for value in changed[key]]
    if "turns" in changed:
        changed["turns"] = [_with_numbers(turn, convert) for turn in changed["turns"]]
    return changed


def _encode(value: Any) -> float | int | str | None:
    """A number as JSON writes it. Zero-dimensional arrays and tensors count as numbers."""
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
