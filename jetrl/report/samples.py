"""`choose_samples`: which part of `samples.jsonl` the report's sample browser shows, small enough for one page."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

MAX_SAMPLES = 400  # rows on the page, over all runs
MAX_TOKENS = 1500  # the policy's tokens in a row
MAX_CHARACTERS = 8000  # the environment's text in a row, without the prompt

Row = Mapping[str, Any]


def choose_samples(rows: Iterable[Row], max_rows: int) -> dict[str, Any]:
    """At most `max_rows` rows, evenly over the steps, including first and last, in whole groups where they fit.

    Returns `steps` (each with its groups) and the counts `kept`, `total` and `cut` (rows that lost tokens or text).
    """
    by_step: dict[int, dict[tuple[Any, ...], list[Row]]] = {}
    total = 0
    for row in rows:
        key = ("group", row["group"]) if "group" in row else (row["prompt"], row["answer"])
        by_step.setdefault(row["step"], {}).setdefault(key, []).append(row)
        total += 1
    groups = {step: list(by_step[step].values()) for step in sorted(by_step)}
    chosen: dict[int, list[list[Row]]] = {step: [] for step in _evenly(groups, max_rows)}
    left = max_rows
    for turn in range(max((len(groups[step]) for step in chosen), default=0)):
        for step in chosen:
            if turn < len(groups[step]) and left > 0 and (turn == 0 or len(groups[step][turn]) <= left):
                chosen[step].append(groups[step][turn][:left])
                left -= len(chosen[step][-1])
    payload = [{"step": step, "groups": [_group(group) for group in held]} for step, held in chosen.items() if held]
    cut = sum(_is_cut(row) for held in chosen.values() for group in held for row in group)
    return {"steps": payload, "kept": max_rows - left, "total": total, "cut": cut}


def sample_note(samples: Sequence[Mapping[str, Any]]) -> str:
    """What the page says about the choice, for the results of `choose_samples`; empty if there are no samples."""
    kept, total, cut = (sum(one[key] for one in samples) for key in ("kept", "total", "cut"))
    if not total:
        return ""
    note = f"All {total:,} recorded samples."
    if kept < total:
        note = f"{kept:,} of the {total:,} recorded samples, chosen evenly over the steps; all are in samples.jsonl."
    if cut:
        limits = f"{MAX_TOKENS:,} tokens of the policy or {MAX_CHARACTERS:,} characters of the environment"
        note += f" {cut:,} of them are cut after {limits}."
    return note


def _evenly(groups: Mapping[int, Sequence[Sequence[Row]]], max_rows: int) -> list[int]:
    """The steps to show: as many as there is room for, with one group each."""
    steps = list(groups)
    if not steps:
        return []
    largest = max(len(held[0]) for held in groups.values())
    wanted = min(len(steps), max(max_rows // largest, 1))
    return [steps[place] for place in sorted(set(np.linspace(0, len(steps) - 1, wanted).round().astype(int).tolist()))]


def _group(rows: Sequence[Row]) -> dict[str, Any]:
    prompt = rows[0]["prompt"]
    return {"prompt": prompt, "answer": rows[0]["answer"], "rows": [_sample(row, prompt) for row in rows]}


def _sample(row: Row, prompt: str) -> dict[str, Any]:
    """A row with short keys: n tokens, r reward, a advantage, f finish, e error, p own prompt; then as `_policy`."""
    sample = {"n": len(row["tokens"]), "r": finite(row["reward"]), "a": finite(row["advantage"])}
    sample["f"] = row["finish_reason"]
    if "error" in row:
        sample["e"] = row["error"]
    if row["prompt"] != prompt:  # an environment may begin each conversation in its own way
        sample["p"] = row["prompt"]
    if "turns" in row:
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
            characters_left = max(characters_left - len(turn["text"]), 0)
        turns.append({"by": turn["author"], "r": finite(turn.get("reward")), **one})
    return turns


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


def finite(value: float | None) -> float | None:
    """The value, or None for numbers that JSON does not have."""
    return value if value is not None and math.isfinite(value) else None
