"""`Talk`: a trajectory on its way, and what it asks of the engine: the rules of turns, of room and of how one ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

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
    tokens: tuple[int, ...] = ()  # what the next request begins with: all segments
    flow: str = ""  # of its last turn

    def heard(
        self, reply: Reply, opening: Callable[[tuple[int, ...]], np.ndarray] = token_ids
    ) -> tuple[EndReason, str] | None:
        """Append what the environment said; how the trajectory ends with it and by which mistake, if it does. UserError
        for a prompt without tokens."""
        if self.num_turns:
            assert self.segments[-1].author == "policy", f"two replies in a row to conversation {reply.key}"
            self.segments[-1] = replace(self.segments[-1], reward=reply.reward)
        if end := self._end_after(reply):
            if not self.segments:  # it failed at once; a trajectory begins with its prompt
                tokens = token_ids(reply.tokens)
                self.segments.append(Segment("environment", tokens, reply.text, messages=reply.messages))
            return end, reply.error or ("" if self.num_turns else "it was over before the first turn")
        if reply.tokens:
            tokens = token_ids(reply.tokens) if self.segments else opening(reply.tokens)
            self.segments.append(
                Segment("environment", tokens, reply.text, messages=reply.messages, opened=reply.opened)
            )
            self.tokens += reply.tokens
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
        self.segments.append(Segment(
            "policy", completion.tokens, completion.text, completion.logprobs, spans=spans_of(completion)
        ))
        self.num_turns += 1
        self.flow = completion.flow_digest
        self.tokens += () if only else tuple(completion.tokens.tolist())

    @property
    def room(self) -> int:
        """Tokens that the trajectory may still take."""
        return self.asked.sampling.max_tokens - (len(self.tokens) - len(self.segments[0].tokens))

    def turn(self) -> Request:
        """The request of a conversation's next turn."""
        most, longest = self.asked.max_turn_tokens, len(self.segments[0].tokens) + self.asked.sampling.max_tokens
        limit = self.room if most is None else min(most, self.room)
        return Request(self.key, self.tokens, replace(self.asked.sampling, max_tokens=limit), longest)

    def trajectory(self, end: EndReason, error: str = "") -> Trajectory:
        """What it has become."""
        return Trajectory(tuple(self.segments), end, self.flow, error, self.key)
