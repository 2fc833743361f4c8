"""The page of a server's sessions: each as a tree of turns, who wrote what, its reward (`jetrl serve --sessions`).

The folder holds `sessions.jsonl`, and `sessions.old.jsonl` for what was before. A line is an answer, a reward or an
end (`serve/session_log.py`). A turn whose beginning is no longer there is left out, and counted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jetrl.errors import UserError
from jetrl.report.files import lines_of
from jetrl.report.samples import sample
from jetrl.untrusted import inside, json_value

SESSIONS_FILE, OLD_FILE = "sessions.jsonl", "sessions.old.jsonl"
MAX_SESSIONS = 400  # on the page: those that were used last
PART = 50  # sessions that are listed at once

Event = dict[str, Any]


@dataclass(slots=True)
class Talk:
    """One session: its turns by number, in the order in which they were drawn."""

    id: str
    turns: dict[int, Event] = field(default_factory=dict)
    reward: float | None = None
    ended: bool = False
    first: float = 0.0  # seconds since 1970
    last: float = 0.0


@dataclass(frozen=True, slots=True)
class Read:
    """All sessions of a folder, the last used one last; `lost`: turns whose beginnings are gone."""

    talks: list[Talk]
    lost: int

    @property
    def rewards(self) -> list[float]:
        return [talk.reward for talk in self.talks if talk.reward is not None]

    def num_tokens(self) -> int:
        """All tokens that the policy drew."""
        return sum(len(turn["tokens"]) for talk in self.talks for turn in talk.turns.values())


def has_sessions(folder: Path) -> bool:
    """Whether a server has recorded its sessions there."""
    return any((Path(folder) / name).is_file() for name in (SESSIONS_FILE, OLD_FILE))


def read_sessions(folder: Path) -> Read:
    """The sessions of a folder. UserError for a line that is none of them; a torn last one is left out."""
    found: OrderedDict[tuple[str, str], Talk] = OrderedDict()
    lost = 0
    for name in (OLD_FILE, SESSIONS_FILE):
        path = inside(folder, name)
        for number, line in enumerate(lines_of(path) if path.exists() else (), start=1):
            event = _event(line)
            if event is None:
                if not line.endswith(b"\n"):  # of a server that was killed
                    continue
                raise UserError(f"{path}, line {number}, is not of a session: {line[:80]!r}. Remove that line.")
            talk = found.setdefault((event["server"], event["session"]), Talk(event["session"], first=event["time"]))
            found.move_to_end((event["server"], event["session"]))
            talk.last = event["time"]
            if "turn" in event:
                whole = event["after"] < 0 or event["after"] in talk.turns
                lost += not whole
                if whole:
                    talk.turns[event["turn"]] = event
            talk.reward = event.get("reward", talk.reward)
            talk.ended = talk.ended or event.get("ended") is True
    return Read([talk for talk in found.values() if talk.turns], lost)


_TYPES = {
    "turn": int, "after": int, "said": list, "read": str, "tokens": list, "logprobs": list, "text": str, "finish": str,
    "version": int,
}


def _event(line: bytes) -> Event | None:
    """The event of a line, checked: a file may be anyone's."""
    try:
        event = json_value(line)
    except ValueError:
        return None
    if not isinstance(event, dict) or type(event.get("time")) not in (int, float):
        return None
    if not all(isinstance(event.get(key), str) for key in ("server", "session")):
        return None
    if "turn" in event:
        good = all(type(event.get(key)) is kind for key, kind in _TYPES.items()) and all(
            isinstance(one, list) and len(one) == 2 and all(isinstance(text, str) for text in one)
            for one in event["said"]
        ) and all(isinstance(token, str) for token in event["tokens"]) and all(
            type(value) in (int, float) for value in event["logprobs"]
        ) and len(event["tokens"]) == len(event["logprobs"])
        return event if good else None
    return event if type(event.get("reward", 0.0)) in (int, float) else None


def row_of(talk: Talk) -> dict[str, Any]:
    """A session as a row of samples: the prompt of its first turn, then turns by author. A turn that follows another
    than the one before it says so (`after`), as in `recorder.group_rows`."""
    turns: list[dict[str, Any]] = []
    ends: dict[int, int] = {}  # place of each turn's answer
    heard: dict[tuple[int, str], int] = {}  # place of what others said behind a turn
    prompt, roles = "", list[list[Any]]()
    for number, turn in sorted(talk.turns.items()):
        text, said = _joined(turn["said"] or [["user", turn["read"]]])
        after = ends.get(turn["after"], -1)
        known = heard.get((after, text)) if after >= 0 else None
        if not ends:
            prompt, roles = text, said
        elif known is None:
            turns.append({"author": "environment", "text": text, "roles": said} | _follows(after, turns))
            heard[after, text] = len(turns) - 1
        turns.append({
            "author": "policy", "text": turn["text"], "tokens": turn["tokens"], "logprobs": turn["logprobs"],
            "versions": [[0, turn["version"]]],
        } | (_follows(known, turns) if known is not None else {}))
        ends[number] = len(turns) - 1
    last = talk.turns[max(talk.turns)]
    policy = [one for one in turns if one["author"] == "policy"]
    return {
        "prompt": prompt, "prompt_roles": roles, "answer": "", "completion": last["text"], "reward": talk.reward,
        "tokens": [token for one in policy for token in one["tokens"]],
        "logprobs": [value for one in policy for value in one["logprobs"]], "finish_reason": last["finish"],
        "turns": turns, "prompt_rendered": talk.turns[min(talk.turns)]["read"],
    }


def _joined(said: Sequence[Sequence[str]]) -> tuple[str, list[list[Any]]]:
    """Messages as one text, and role and first character of each."""
    text, roles = "", list[list[Any]]()
    for role, one in said:
        text += "\n" if roles else ""
        roles.append([role, len(text)])
        text += one
    return text, roles


def _follows(after: int, turns: Sequence[dict[str, Any]]) -> dict[str, int]:
    return {} if after == len(turns) - 1 else {"after": after}


def page_of(read: Read) -> tuple[list[dict[str, Any]], str]:
    """The sessions that the page shows, in parts, and what it says of the choice."""
    shown = read.talks[-MAX_SESSIONS:]
    parts = [
        {"step": f"{start + 1} to {min(start + PART, len(shown))}",
         "groups": [_group(talk) for talk in shown[start : start + PART]]}
        for start in range(0, len(shown), PART)
    ]
    note = "All recorded sessions, the last used one last."
    if len(shown) < len(read.talks):
        note = f"{len(shown):,} of the {len(read.talks):,} recorded sessions: those that were used last."
    if read.lost:
        note += f" {read.lost:,} turns are left out: their beginnings are no longer on disk."
    return parts, note


def _group(talk: Talk) -> dict[str, Any]:
    row = row_of(talk)
    shown = sample(row, row["prompt"], None) | {"id": talk.id, "when": _when(talk.first)}
    if not talk.ended:
        shown["open"] = True
    return {"prompt": row["prompt"], "answer": "", "rows": [shown]}


def _when(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return "unknown"


def tiles(read: Read) -> list[tuple[str, str, str]]:
    """Name, number and remark of what the head of the page says."""
    turns, rewards = sum(len(talk.turns) for talk in read.talks), read.rewards
    forks = sum(_num_forked(talk.turns.values()) for talk in read.talks)
    mean = f"{sum(rewards) / len(rewards):.3f}" if rewards else "none"
    return [
        ("Sessions", f"{len(read.talks):,}", f"{sum(not talk.ended for talk in read.talks):,} not ended"),
        ("Turns", f"{turns:,}", "1 fork" if forks == 1 else f"{forks:,} forks"),
        ("Drawn tokens", f"{read.num_tokens():,}", ""),
        ("Mean reward", mean, f"sessions with one: {len(rewards):,}"),
    ]


def _num_forked(turns: Iterable[Event]) -> int:
    """Turns that follow one that another has followed, and prompts anew."""
    followed = [turn["after"] for turn in turns]
    return len(followed) - len(set(followed))
