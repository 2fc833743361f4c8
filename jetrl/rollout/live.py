"""A trajectory on its way: its segments as they come, and what the next request of the engine begins with.

A conversation mostly grows at its end. Where its history was changed, the next reply follows an earlier turn, or begins
anew: a branch (`jetrl.branches`), whose draws have a request id of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from jetrl.branches import Branch, in_order, stream_of
from jetrl.types import Completion, Prompt, Segment


@dataclass(slots=True)
class Live:
    """`segments` are in the order in which they came; the environment's first one is the prompt. `tokens`: what the
    next request begins with. `length`: tokens of all rows so far, that of an open branch included."""

    key: int
    prompt: Prompt
    segments: list[Segment] = field(default_factory=list)
    tokens: tuple[int, ...] = ()
    length: int = 0
    last: Completion | None = None
    branches: list[int] = field(default_factory=list)  # the request ids of its branches
    stream: int = field(init=False)  # the request id of what is drawn next
    _turns: list[int] = field(default_factory=list)  # the places of the policy's segments
    _parents: list[int] = field(default_factory=list)
    _streams: list[int] = field(default_factory=list)
    _head: int = -1  # the place of the segment that the next one follows
    _open: bool = False  # whether the next one begins a branch

    def __post_init__(self) -> None:
        self.stream = self.key

    @property
    def num_turns(self) -> int:
        return len(self._turns)

    def go_on_from(self, turn: int) -> None:
        """The next segment follows this turn of the policy, -1: none, it is a prompt anew."""
        head = self._turns[turn] if turn >= 0 else -1
        if head == self._head:
            return
        path = []
        at = head
        while at >= 0:
            path.append(at)
            at = self._parents[at]
        self._head = head
        self.tokens = tuple(t for place in reversed(path) for t in self.segments[place].tokens.tolist())
        self._open = head < 0 or head in self._parents
        if self._open:
            self.length += len(self.tokens)
        else:
            self.stream = self._streams[head]

    @property
    def begins_branch(self) -> bool:
        """Whether the next segment does."""
        return self._open

    def append(self, segment: Segment, tokens: tuple[int, ...]) -> int:
        """The next segment; the request id of what follows it. `tokens`: its own, if a request is to begin with
        them."""
        self.tokens += tokens
        self.length += len(segment.tokens)
        if self._open:
            self.stream, self._open = stream_of(self.key, self.tokens, self.branches), False
            self.branches.append(self.stream)
            segment = replace(segment, branch=Branch(self._head, self.stream))
        if segment.author == "policy":
            self._turns.append(len(self.segments))
        self._parents.append(self._head)
        self._streams.append(self.stream)
        self._head = len(self.segments)
        self.segments.append(segment)
        return self.stream

    def in_order(self) -> tuple[Segment, ...]:
        """The segments in the order of their tree."""
        if not self.branches:
            return tuple(self.segments)
        order = in_order(self._parents)
        place = {old: new for new, old in enumerate(order)} | {-1: -1}
        found = (self.segments[old] for old in order)
        return tuple(s if s.branch is None else replace(s, branch=s.branch._replace(after=place[s.branch.after]))
                     for s in found)
