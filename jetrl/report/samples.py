"""Which part of `samples.jsonl` and `eval_samples.jsonl` the report's sample browser shows, small enough for one page.

`SampleFile` knows where each row of such a file is, and reads only those that are shown: the file may be far larger
than memory, and a run in progress asks for it again and again.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from jetrl.errors import UserError
from jetrl.report.files import lines_of, parse_row
from jetrl.report.recorder import decoded
from jetrl.untrusted import json_value

MAX_SAMPLES = 400  # rows on the page, over all runs
MAX_TOKENS = 1500  # the policy's tokens in a row
MAX_CHARACTERS = 8000  # the environment's text in a row, without the prompt; a rendered prompt
MAX_EXTRA = 300  # characters of what a reward logs about one completion
SHOWN_KEYS = ("prompt", "answer", "completion", "tokens", "logprobs", "reward", "finish_reason")
_START = re.compile(rb'\{"step": (\d+), (?:"task": ("(?:[^"\\]|\\.)*"), )?"group": (\d+)[,}]')

Row = Mapping[str, Any]
Item = TypeVar("Item")


def choose_samples(rows: Iterable[Row], max_rows: int) -> dict[str, Any]:
    """At most `max_rows` rows, evenly over the steps, including first and last, in whole groups where they fit.

    Returns `steps` (each with its groups) and the counts `kept`, `total` and `cut` (rows that lost tokens or text).
    """
    by_step: dict[int, dict[Hashable, list[Row]]] = {}
    total = 0
    for row in rows:
        by_step.setdefault(row["step"], {}).setdefault(_key(row), []).append(row)
        total += 1
    return _payload(_choose(by_step, max_rows), total)


class SampleFile:
    """The places of a file's rows by step and group. `choose` looks at what was added since it was last asked."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reset()

    def _reset(self) -> None:
        self._end = self._total = 0
        self._places: dict[int, dict[Hashable, list[tuple[int, int]]]] = {}  # (offset, length)
        self._kept: dict[int, int] = {}  # rows by step of which the place is known

    def choose(self, max_rows: int) -> dict[str, Any]:
        """As `choose_samples`. No file: no samples. UserError if a line is not a row."""
        self._update(max_rows)
        places = _choose(self._places, max_rows)
        if not places:
            return _payload({}, self._total)
        with self.path.open("rb") as file:
            rows = {step: [[self._row(file, *at) for at in group] for group in held] for step, held in places.items()}
        return _payload(rows, self._total)

    def _update(self, max_rows: int) -> None:
        size = self.path.stat().st_size if self.path.exists() else 0
        if size < self._end:  # rows past a checkpoint were dropped
            self._reset()
        if size == self._end:
            return
        for line in lines_of(self.path, self._end):
            if not line.endswith(b"\n") and parse_row(line) is None:
                break  # torn, or being written
            step, key = self._place(line)
            if self._kept.get(step, 0) < max_rows:  # no more are ever shown of a step
                self._kept[step] = self._kept.get(step, 0) + 1
                self._places.setdefault(step, {}).setdefault(key, []).append((self._end, len(line)))
            self._total += 1
            self._end += len(line)

    def _place(self, line: bytes) -> tuple[int, Hashable]:
        """Step and group, from the first characters of the line where they are as `Recorder` writes them."""
        if found := _START.match(line):
            return int(found[1]), (json_value(found[2] or b"null"), int(found[3]))
        row = parse_row(line)
        if row is None:
            raise UserError(f"{self.path} has a line that is not a row: {line[:80]!r}. Remove that line.")
        self._require(row)
        return row["step"], _key(row)

    def _row(self, file: Any, offset: int, length: int) -> Row:
        file.seek(offset)
        line = file.read(length)
        row = parse_row(line)
        if row is None:
            raise UserError(f"{self.path} has a line that is not a row: {line[:80]!r}. Remove that line.")
        self._require(row)
        try:
            return decoded(row)
        except (TypeError, AttributeError) as error:
            raise UserError(
                f"{self.path}: a row of step {row['step']} has an unexpected form ({error}). Remove it."
            ) from error

    def _require(self, row: Row) -> None:
        if missing := [key for key in SHOWN_KEYS if key not in row]:
            raise UserError(f"{self.path}: a row lacks {', '.join(missing)}. Remove that row.")


def _key(row: Row) -> Hashable:
    return (row.get("task"), row["group"]) if "group" in row else (row["prompt"], str(row["answer"]))


def _choose(
    by_step: Mapping[int, Mapping[Hashable, Sequence[Item]]], max_rows: int
) -> dict[int, list[Sequence[Item]]]:
    """At most `max_rows` items, evenly over the steps."""
    groups = {step: list(by_step[step].values()) for step in sorted(by_step)}
    chosen: dict[int, list[Sequence[Item]]] = {step: [] for step in _evenly(groups, max_rows)}
    left = max_rows
    for turn in range(max((len(groups[step]) for step in chosen), default=0)):
        for step in chosen:
            if turn < len(groups[step]) and left > 0 and (turn == 0 or len(groups[step][turn]) <= left):
                chosen[step].append(groups[step][turn][:left])
                left -= len(chosen[step][-1])
    return chosen


def _payload(chosen: Mapping[int, Sequence[Sequence[Row]]], total: int) -> dict[str, Any]:
    payload = [{"step": step, "groups": [_group(group) for group in held]} for step, held in chosen.items() if held]
    cut = sum(_is_cut(row) for held in chosen.values() for group in held for row in group)
    kept = sum(len(group) for held in chosen.values() for group in held)
    return {"steps": payload, "kept": kept, "total": total, "cut": cut}


def sample_note(
    samples: Sequence[Mapping[str, Any]], what: str = "recorded samples", file: str = "samples.jsonl"
) -> str:
    """What the page says about the choice, for the results of `choose_samples`; empty if there are no samples."""
    kept, total, cut = (sum(one[key] for one in samples) for key in ("kept", "total", "cut"))
    if not total:
        return ""
    note = f"All {total:,} {what}."
    if kept < total:
        note = f"{kept:,} of the {total:,} {what}, chosen evenly over the steps; all are in {file}."
    if cut:
        limits = f"{MAX_TOKENS:,} tokens of the policy or {MAX_CHARACTERS:,} characters of the environment"
        note += f" {cut:,} of them are cut after {limits}."
    return note


def _evenly(groups: Mapping[int, Sequence[Sequence[Any]]], max_rows: int) -> list[int]:
    """The steps to show: as many as there is room for, with one group each."""
    steps = list(groups)
    if not steps:
        return []
    largest = max(len(held[0]) for held in groups.values())
    wanted = min(len(steps), max(max_rows // largest, 1))
    return [steps[place] for place in sorted(set(np.linspace(0, len(steps) - 1, wanted).round().astype(int).tolist()))]


def _group(rows: Sequence[Row]) -> dict[str, Any]:
    prompt, rendered = rows[0]["prompt"], rows[0].get("prompt_rendered")
    group = {"prompt": prompt, "answer": rows[0]["answer"], "rows": [sample(row, prompt, rendered) for row in rows]}
    if rows[0].get("task") is not None:
        group["task"] = rows[0]["task"]
    if rendered is not None:
        group["rendered"] = str(rendered)[:MAX_CHARACTERS]
    return group


def sample(row: Row, prompt: str, rendered: str | None) -> dict[str, Any]:
    """A row with short keys: n tokens, r reward, rs rewards by function, a advantage (if there is such a thing), x what
    a reward logged, f finish, e error, p own prompt, pr that as rendered; then as `_policy`. None: not scored."""
    sample = {"n": len(row["tokens"]), "r": finite(row["reward"]), "f": row["finish_reason"]}
    if "advantage" in row:
        sample["a"] = finite(row["advantage"])
    if row.get("rewards"):
        sample["rs"] = {str(name): finite(value) for name, value in row["rewards"].items()}
    if row.get("extra"):
        sample["x"] = {str(name): _brief(value) for name, value in row["extra"].items()}
    if row.get("prompt_rendered", rendered) != rendered:
        sample["pr"] = str(row["prompt_rendered"])[:MAX_CHARACTERS]
    if "error" in row:
        sample["e"] = row["error"]
    if row["prompt"] != prompt:  # an environment may begin each conversation in its own way
        sample["p"] = row["prompt"]
    if "turns" in row:
        if said := _said(row["prompt"], row.get("prompt_roles"), MAX_CHARACTERS):
            sample["pm"] = said
        return sample | {"turns": _turns(row)}
    return sample | _policy(row["tokens"], row["logprobs"], row.get("advantages"), row["completion"], MAX_TOKENS)


def _turns(row: Row) -> list[dict[str, Any]]:
    turns, start, tokens_left, characters_left = [], 0, MAX_TOKENS, MAX_CHARACTERS
    for turn in row["turns"]:
        if turn["author"] == "policy":
            end = start + len(turn["tokens"])
            advantages = row["advantages"][start:end] if "advantages" in row else None
            one = _policy(turn["tokens"], turn["logprobs"], advantages, turn["text"], tokens_left)
            tokens_left, start = max(tokens_left - len(turn["tokens"]), 0), end
        else:
            one = {"c": turn["text"][:characters_left], "n": len(turn["text"])}
            if said := _said(turn["text"], turn.get("roles"), characters_left):
                one["m"] = said
            characters_left = max(characters_left - len(turn["text"]), 0)
        if versions := _spans(turn.get("versions")):
            one["w"] = versions
        if type(turn.get("after")) is int:  # a branch: the number of the turn that it follows, -1 for the prompt
            one["after"] = turn["after"]
        turns.append({"by": turn["author"], "r": finite(turn.get("reward")), **one})
    return turns


def _said(text: str, roles: Any, most: int) -> list[list[Any]]:
    """[role, characters of the message that are shown], message by message; none where the row does not say."""
    known = _spans(roles, str)
    ends = [*(start for _, start in known[1:]), len(text)] if known else []
    return [[role, max(0, min(end, most) - start)] for (role, start), end in zip(known, ends, strict=True)]


def _spans(value: Any, first: type = int) -> list[list[Any]]:
    """Pairs of a file that may be anyone's: of `first` and a number; else none."""
    good = isinstance(value, list) and all(
        isinstance(one, list) and len(one) == 2 and type(one[0]) is first and type(one[1]) is int for one in value
    )
    return value if good else []


def _policy(
    tokens: Sequence[str], logprobs: Sequence[float], advantages: Sequence[float] | None, text: str, limit: int
) -> dict[str, Any]:
    """Text by the policy: t tokens, l log-probs, v advantages, n token count, c the text if the tokens differ."""
    one: dict[str, Any] = {"t": list(tokens[:limit]), "n": len(tokens)}
    one["l"] = [finite(round(float(value), 5)) for value in logprobs[:limit]]
    if advantages is not None:
        one["v"] = [finite(round(float(value), 5)) for value in advantages[:limit]]
    if text not in ("".join(tokens), "".join(tokens[:-1])):  # the last token may be the end of the sequence
        one["c"] = text
    return one


def _is_cut(row: Row) -> bool:
    theirs = sum(len(turn["text"]) for turn in row.get("turns", ()) if turn["author"] == "environment")
    return len(row["tokens"]) > MAX_TOKENS or theirs > MAX_CHARACTERS


def _brief(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_EXTRA else text[:MAX_EXTRA] + " ..."


def finite(value: Any) -> float | None:
    """The value, or None where there is none, and for numbers that JSON does not have."""
    return value if isinstance(value, int | float) and math.isfinite(value) else None
