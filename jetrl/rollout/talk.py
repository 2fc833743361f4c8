"""`Talk`: a trajectory on its way, and what it asks of the engine: the rules of turns, of room and of how one ends.

A conversation mostly grows at its end. Where its history was changed, the next reply follows an earlier turn, or begins
anew: a branch (`jetrl.branches`), whose draws have a request id of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from jetrl.branches import Branch, in_order, stream_of
from jetrl.errors import UserError
from jetrl.rollout.requests import RolloutRequest, without_tokens
from jetrl.types import Completion, EndReason, Prompt, Reply, Request, Segment, Spans, Trajectory, token_ids


def spans_of(completion: Completion) -> Spans:
    """Which weights drew its tokens."""
    return completion.spans or ((0, completion.weight_version),)


@dataclass(slots=True)
class Talk:
    """A conversation, or a plain answer: then the environment says the prompt and is silent."""

    key: int
    prompt: Prompt
    asked: RolloutRequest
    segments: list[Segment] = field(default_factory=list)  # the environment's first one is the prompt
    num_turns: int = 0
    tokens: tuple[int, ...] = ()  # what the next request begins with: all segments, or those of the open branch
    flow: str = ""  # of its last turn
    forks: bool = False  # whether its history may change
    branches: list[int] = field(default_factory=list)  # the request ids of its branches
    stream: int = field(init=False)  # the request id of what is drawn next
    _turns: list[int] = field(default_factory=list)  # the places of the policy's segments
    _parents: list[int] = field(default_factory=list)  # of each segment: the place of the one that it follows
    _streams: list[int] = field(default_factory=list)
    _head: int = -1  # the place of the segment that the next one follows
    _elsewhere: int = 0  # tokens of the rows that are not the open one
    begins_branch: bool = False  # whether the next segment does

    def __post_init__(self) -> None:
        self.stream = self.key

    @property
    def length(self) -> int:
        """Tokens of all rows so far, that of an open branch included."""
        return len(self.tokens) + self._elsewhere

    def go_on_from(self, turn: int) -> None:
        """The next segment follows this turn of the policy, -1: none, it is a prompt anew. UserError where the history
        may not change."""
        if turn == self.num_turns - 1 and (not self._turns or self._turns[turn] == self._head):
            return
        if not self.forks:
            raise UserError(
                f"Problem {self.prompt.problem.id}: its conversation has changed its history, and rollout.overcommit "
                "carries over only those that do not. Set rollout.overcommit = 0, or environment.params.forks = false."
            )
        at = self._head = self._turns[turn] if turn >= 0 else -1
        path = []
        while at >= 0:
            path.append(at)
            at = self._parents[at]
        known = self.length
        self.tokens = tuple(t for place in reversed(path) for t in self.segments[place].tokens.tolist())
        self.begins_branch = self._head < 0 or self._head in self._parents
        self._elsewhere = known if self.begins_branch else known - len(self.tokens)
        if not self.begins_branch:
            self.stream = self._streams[self._head]

    def append(self, segment: Segment, tokens: tuple[int, ...]) -> None:
        """The next segment. `tokens`: its own, if a request is to begin with them."""
        self.tokens += tokens
        if self.begins_branch:
            self.stream, self.begins_branch = stream_of(self.key, self.tokens, self.branches), False
            self.branches.append(self.stream)
            segment = replace(segment, branch=Branch(self._head, self.stream))
        if self.forks:
            if segment.author == "policy":
                self._turns.append(len(self.segments))
            self._parents.append(self._head)
            self._streams.append(self.stream)
            self._head = len(self.segments)
        self.segments.append(segment)

    def in_order(self) -> tuple[Segment, ...]:
        """The segments in the order of their tree."""
        if not self.branches:
            return tuple(self.segments)
        order = in_order(self._parents)
        place = {old: new for new, old in enumerate(order)} | {-1: -1}
        found = (self.segments[old] for old in order)
        return tuple(s if s.branch is None else replace(s, branch=s.branch._replace(after=place[s.branch.after]))
                     for s in found)

    def heard(
        self, reply: Reply, opening: Callable[[tuple[int, ...]], np.ndarray] = token_ids
    ) -> tuple[EndReason, str] | None:
        """Append what the environment said; how the trajectory ends with it and by which mistake, if it does. UserError
        for a prompt without tokens."""
        if self.num_turns:
            assert self.segments[-1].author == "policy", f"two replies in a row to conversation {reply.key}"
            self.segments[-1] = replace(self.segments[-1], reward=reply.reward)
            if reply.after is not None and not reply.done and not reply.failure:
                self.go_on_from(reply.after)
        if end := self._end_after(reply):
            if not self.segments:  # it failed at once; a trajectory begins with its prompt
                tokens = token_ids(reply.tokens)
                self.append(Segment("environment", tokens, reply.text, messages=reply.messages), ())
            return end, reply.error or ("" if self.num_turns else "it was over before the first turn")
        if reply.tokens or self.begins_branch:
            tokens = token_ids(reply.tokens) if self.segments else opening(reply.tokens)
            self.append(
                Segment("environment", tokens, reply.text, messages=reply.messages, opened=reply.opened), reply.tokens
            )
        return None

    def _end_after(self, reply: Reply) -> EndReason | None:
        if reply.failure:
            return reply.failure
        if not self.num_turns:
            if not reply.done and not reply.tokens:
                raise without_tokens(self.prompt.problem, reply.text)
            return "error" if reply.done else None
        if reply.done:
            return "stop"
        if self.num_turns >= self.asked.max_turns:
            return "turns"
        return "length" if self.room <= len(reply.tokens) else None

    def said(self, completion: Completion, only: bool = False) -> None:
        """Append a turn of the policy; if it is the `only` one, no request will begin with its tokens."""
        spans, tokens = spans_of(completion), completion.tokens
        turn = Segment("policy", tokens, completion.text, completion.logprobs, spans=spans)
        self.append(turn, () if only else tuple(tokens.tolist()))
        self.num_turns += 1
        self.flow = completion.flow_digest

    @property
    def room(self) -> int:
        """Tokens that the trajectory may still take."""
        return self.asked.sampling.max_tokens - (self.length - len(self.segments[0].tokens))

    def turn(self) -> Request:
        """The request of a conversation's next turn."""
        most, longest = self.asked.max_turn_tokens, len(self.segments[0].tokens) + self.asked.sampling.max_tokens
        limit = self.room if most is None else min(most, self.room)
        return Request(self.stream, self.tokens, replace(self.asked.sampling, max_tokens=limit), longest)

    def trajectory(self, end: EndReason, error: str = "") -> Trajectory:
        """What it has become."""
        return Trajectory(self.in_order(), end, self.flow, error, self.key)
