"""Sessions: the history of a client's chats as a tree of exact tokens.

A chat call whose messages begin with a conversation that the server has answered goes on from that conversation's
tokens, as they were drawn: nothing that the policy said is ever encoded again. Only what follows its last turn is, by
the difference that the chat template writes. So a call is a turn below another turn, or the first of a new branch:

    root: prompt A -> turn 1 -> +tool result -> turn 2        row 0: all of it
                          \\-> +other result -> turn 3         row 1: the same beginning, not trained again
    root: prompt A with its history shortened -> turn 4       row 2

Rows are the paths from a root to a leaf, in the order in which their leaves were drawn. Each drawn token belongs to the
first row that has it, and is only context in others: a sum over rows counts it once.
"""

from __future__ import annotations

import json
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np

from jetrl.arrays import log_probs, token_ids
from jetrl.chat.fields import Message
from jetrl.errors import shown
from jetrl.serve.names import Names
from jetrl.serve.refusal import Refused

MOST_SESSIONS = 4096
_IDLE = 600.0  # seconds after which a session may have to make room for another
_CLOSED = 100_000  # ids of ended sessions that are remembered
_MOST_NAME = 200


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One answer of the policy. `before` [m] and `drawn` [n] are int32: the tokens between the turn before and this
    one (of a first turn: the prompt), and what was drawn, with its log-probs."""

    id: int  # of the request
    parent: Turn | None
    before: np.ndarray
    drawn: np.ndarray
    logprobs: np.ndarray
    stopped: bool
    version: int
    digest: str

    @property
    def path(self) -> list[Turn]:
        """From the first turn of its conversation to this one."""
        found: list[Turn] = []
        at: Turn | None = self
        while at is not None:
            found.append(at)
            at = at.parent
        return found[::-1]

    @property
    def tokens(self) -> list[int]:
        """All tokens up to its end."""
        return [t for turn in self.path for part in (turn.before, turn.drawn) for t in part.tolist()]


@dataclass(frozen=True, slots=True)
class Segment:
    """Neighbouring tokens of a row. `trained`: the policy drew them, and no earlier row has them."""

    turn: Turn
    by_policy: bool
    trained: bool


def said_of(message: Message) -> str:
    """A message as the key of what was said. Of the policy's: content and calls. Other keys that a client's library
    adds to an answer, and white space that it strips, do not make it another one."""
    if message["role"] != "assistant":
        return json.dumps(dict(message), sort_keys=True)
    called = message.get("tool_calls")
    functions = [call.get("function") for call in called if isinstance(call, Mapping)] if isinstance(
        called, list) else []
    calls = [[one.get("name"), one.get("arguments")] for one in functions if isinstance(one, Mapping)]
    return json.dumps([(message.get("content") or "").strip(), calls], sort_keys=True)


class Session:
    """One client's conversations. `names` counts its equal requests apart from those of others."""

    def __init__(self, id: str) -> None:
        self.id, self.names = id, Names(id)
        self.turns: list[Turn] = []
        self.reward: float | None = None
        self.used = time.monotonic()
        self.open_requests = 0
        self.worker: int | None = None  # the engine that has its pages (`serve/dealer.py`)
        self._known: dict[bytes, Turn] = {}  # by what was said up to the turn's end
        self._ids: dict[int, Turn] = {}
        self._numbers: dict[int, int] = {}
        self._ends: dict[int, dict[bytes, Turn]] = {}  # by length and digest of all tokens up to the turn's end

    def find(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> tuple[Turn, int] | None:
        """The turn with the longest conversation that `messages` go on from, and how many messages that is."""
        keys = list(session_keys(messages, variables))
        return next(
            ((self._known[keys[n - 1]], n) for n in range(len(messages) - 1, 0, -1)
             if messages[n - 1]["role"] == "assistant" and keys[n - 1] in self._known), None,
        )

    def find_tokens(self, prompt: Sequence[int]) -> Turn | None:
        """The turn with the most tokens that `prompt` begins with, for clients that send token ids."""
        row = np.array(prompt, dtype=np.int32)
        lengths = sorted((length for length in self._ends if length < len(row)), reverse=True)
        found = (self._ends[length].get(_digest(row[:length])) for length in lengths)
        return next((turn for turn in found if turn is not None), None)

    def add(
        self, turn: Turn, messages: Sequence[Message] = (), variables: Mapping[str, Any] | None = None,
        answer: Message | None = None,
    ) -> bool:
        """Note an answer, once: a request that was repeated had the same. `messages` led to `answer`; without them it
        is one of a plain completion, that nothing goes on from. Whether it is a new one."""
        new = turn.id not in self._ids
        if not new:
            turn = self._ids[turn.id]
        else:
            self._numbers[turn.id] = len(self.turns)
            self.turns.append(turn)
            self._ids[turn.id] = turn
            row = np.array(turn.tokens, dtype=np.int32)
            self._ends.setdefault(len(row), {}).setdefault(_digest(row), turn)
        if answer is not None:
            key = list(session_keys([*messages, answer], variables or {}))[-1]
            self._known.setdefault(key, turn)  # of two answers with one text, the first goes on
        return new

    def number_of(self, turn: Turn) -> int:
        """Its place in the order of the answers."""
        return self._numbers[turn.id]

    def behind(self, turn: Turn | None, messages: Sequence[Message], variables: Mapping[str, Any]) -> Sequence[Message]:
        """Those of the messages that follow the end of `turn`; None: all."""
        if turn is None:
            return messages
        keys = list(session_keys(messages, variables))
        return messages[next((n for n in range(len(keys), 0, -1) if self._known.get(keys[n - 1]) is turn), 0) :]

    def set_reward(self, value: Any) -> None:
        """The session's reward; see `reward_of`."""
        self.reward = reward_of(value, self.reward)

    def rows(self) -> list[list[Segment]]:
        """The paths from roots to leaves; each drawn token is trained in one of them."""
        parents = {turn.parent for turn in self.turns}
        seen: set[Turn] = set()
        found = []
        for leaf in self.turns:
            if leaf in parents:
                continue
            row = []
            for turn in leaf.path:
                row += [Segment(turn, False, False), Segment(turn, True, turn not in seen)]
                seen.add(turn)
            found.append(row)
        return found

    @property
    def num_forked(self) -> int:
        """Rows beyond the first."""
        return max(0, len(self.turns) - len({turn.parent for turn in self.turns} - {None}) - 1)

    def to_json(self) -> dict[str, Any]:
        """What `/sessions/ID/traces` gives."""
        return {
            "id": self.id, "reward": self.reward, "num_turns": len(self.turns), "num_forked": self.num_forked,
            "rows": [{"segments": [_segment(one) for one in row]} for row in self.rows()],
        }


def reward_of(value: Any, before: float | None) -> float:
    """A session's reward; `before`: the one that it has. Refused: a second one, and what is no finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise Refused(f"reward = {shown(value, 60)}: send a finite number.", param="reward")
    if before is not None:
        raise Refused("This session has a reward already.", 409, "reward", "second_reward")
    return float(value)


def session_keys(messages: Sequence[Message], variables: Mapping[str, Any]) -> list[bytes]:
    """A digest for each beginning of a conversation. Other tools or keywords make it another one."""
    at = blake2b(json.dumps(variables, sort_keys=True).encode(), digest_size=16).digest()
    found = []
    for message in messages:
        at = blake2b(at + said_of(message).encode(), digest_size=16).digest()
        found.append(at)
    return found


def _digest(row: np.ndarray) -> bytes:
    return blake2b(row.tobytes(), digest_size=16).digest()


def _segment(one: Segment) -> dict[str, Any]:
    turn = one.turn
    if not one.by_policy:
        return {"author": "environment", "tokens": turn.before.tolist(), "logprobs": None, "trained": False}
    return {
        "author": "policy", "tokens": turn.drawn.tolist(), "logprobs": turn.logprobs.tolist(), "trained": one.trained,
        "request_id": turn.id, "finish_reason": "stop" if turn.stopped else "length", "flow_digest": turn.digest,
        "weight_versions": [{"version": turn.version, "start": 0, "end": len(turn.drawn)}],
    }


def turn_of(
    id: int, parent: Turn | None, prompt: Sequence[int], done: Mapping[str, Any]
) -> Turn:
    """The turn of a finished request. `prompt`: all tokens before it, those of earlier turns included."""
    length = 0 if parent is None else len(parent.tokens)
    return Turn(
        id, parent, token_ids(list(prompt[length:])), token_ids(done["tokens"]), log_probs(done["logprobs"]),
        done["finish"] == "stop", done["version"], done["digest"],
    )


@dataclass(slots=True)
class Sessions:
    """The sessions of a server, by id. One that nobody has made begins with its first use."""

    most: int = MOST_SESSIONS
    on_end: Callable[[Session], object] = lambda session: None
    _open: OrderedDict[str, Session] = field(default_factory=OrderedDict)  # the least recently used first
    _closed: OrderedDict[str, None] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self._open)

    def use(self, id: str, make: bool = True) -> Session:
        """The session. Refused: an id that has ended (410), or that is not known where none may be made (404)."""
        if id in self._closed:
            raise Refused(f"Session {id} has ended.", 410, "session_id", "session_closed")
        session = self._open.get(id)
        if session is None:
            if not make:
                raise Refused(f"There is no session {id}.", 404, "session_id", "no_session")
            if not 0 < len(id) <= _MOST_NAME or not id.isprintable():
                raise Refused(f"session_id: 1 to {_MOST_NAME} printable characters.", param="session_id")
            self._make_room()
            session = self._open[id] = Session(id)
        self._open.move_to_end(id)
        session.used = time.monotonic()
        return session

    def close(self, id: str) -> Session:
        """End a session: its id is not taken again."""
        session = self.use(id, make=False)
        del self._open[id]
        self._closed[id] = None
        self.on_end(session)
        while len(self._closed) > _CLOSED:
            self._closed.popitem(last=False)
        return session

    def _make_room(self) -> None:
        if len(self._open) < self.most:
            return
        oldest = next((s for s in self._open.values() if not s.open_requests), None)
        if oldest is None or time.monotonic() - oldest.used < _IDLE:
            raise Refused(
                f"{self.most} sessions are open. End some (DELETE /sessions/ID), or try again later.", 429,
                code="too_many_sessions", retry_after=30,
            )
        self.close(oldest.id)
