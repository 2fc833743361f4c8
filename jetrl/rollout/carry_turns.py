"""`talk_on`: as `carry.roll_on`, for conversations with environments.

A conversation's place in a rollout is counted in tokens: those that the policy draws, and `wait` for each reply of its
environment, however long that takes by the clock. A reply that was due when the rollout began counts 0, as an update
lies in between. The rollout is cut at a horizon T in these tokens:

    remaining(conversation) = drawn tokens + wait * (replies asked for in this rollout), to its end
    at the cut, all that happens at up to T has happened: the policy's turn has drawn T - (place at its begin) tokens,
    or a reply that counts at a place beyond T is due, whether it has arrived or not.

So what a step learns from is a matter of what policy and environment said. What an engine drew beyond the horizon is
discarded; an environment that has answered beyond it is begun again and hears the same turns as before
(`CarriedConversations.bring`). Where a reply is due, the environment works on while the weights are updated.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from jetrl.parallel.world import ALONE, World
from jetrl.rollout.carry import Conversation, RolledOn, UnderWay, Work
from jetrl.rollout.requests import RolloutRequest
from jetrl.rollout.talk import Talk
from jetrl.types import (
    Completion,
    Conversations,
    EndReason,
    Engine,
    FinishReason,
    Problem,
    Prompt,
    Reply,
    Segment,
    StepReport,
    Trajectory,
    Unfinished,
)


class CarriedConversations(Conversations, Protocol):
    """Conversations that go on in a later rollout."""

    def hold(self, key: int) -> None:
        """`poll` gives no replies to this conversation until `go_on`; its environment works on."""

    def go_on(self, key: int) -> None:
        """The end of `hold`."""

    def bring(
        self, key: int, problem: Problem, segments: Sequence[Segment], due: bool, finish: FinishReason = "stop"
    ) -> None:
        """Conversation `key` is, or gets, where these are its segments, and is held there. `due`: the reply to the last
        of them is given when it goes on, even if it was given before; `finish`: how that turn ended. An environment
        that is elsewhere is begun again, and has to answer the same turns as before."""

    def keep_only(self, keys: Collection[int]) -> None:
        """Close the conversations that are held, other than these."""


def begin_talks(prompts: Sequence[Prompt], asked: RolloutRequest) -> list[UnderWay]:
    """New groups: `asked.count` conversations about each problem, with ids from `asked.first_id` on."""
    return [
        UnderWay(prompt, tuple(Conversation(asked.first_id + place * asked.count + i) for i in range(asked.count)))
        for place, prompt in enumerate(prompts)
    ]


def talk_on(
    engine: Engine, groups: Sequence[UnderWay], wanted: int, forced: Collection[int],
    conversations: CarriedConversations, asked: RolloutRequest, wait: int,
    on_step: Callable[[StepReport], None] | None = None, world: World = ALONE,
) -> RolledOn:
    """`carry.roll_on` for groups of conversations; `asked` says how long they may get. Those whose environment failed
    count as ended. A collective."""
    return _Talks(engine, groups, wanted, forced, on_step, world, conversations, asked, wait).rolled_on()


@dataclass(frozen=True, slots=True)
class _Mark:
    """From place `at` on a conversation has these `segments`, and the policy's `turn` has begun, or a reply is due."""

    at: int
    segments: int
    turn: Unfinished | None
    finish: FinishReason = "stop"  # of the turn before


@dataclass(slots=True)
class _Course:
    """A conversation in this rollout: where it was at which place. What is in `talk` may lie beyond the horizon."""

    talk: Talk
    marks: list[_Mark]
    due: int = 0  # where the reply counts that is due
    partial: Unfinished | None = None  # the turn under way, taken back from the engine
    end: Trajectory | None = None
    end_at: int = 0

    @property
    def now(self) -> _Mark:
        return self.marks[-1]

    def drawn_by(self, horizon: int) -> int:
        """Tokens that the policy drew in this rollout at places up to there."""
        places = [mark.at for mark in self.marks[1:]] + [self.end_at if self.end is not None else horizon]
        return sum(
            max(0, min(later, horizon) - mark.at)
            for mark, later in zip(self.marks, places, strict=True) if mark.turn is not None
        )

    def at(self, horizon: int) -> Conversation | Trajectory:
        """As it is when all that happens at places up to there has happened."""
        if self.end is not None and self.end_at <= horizon:
            return self.end
        mark = [mark for mark in self.marks if mark.at <= horizon][-1]
        segments = self.talk.segments[: mark.segments]
        flow = self.talk.flow if any(s.author == "policy" for s in segments) else ""
        if mark.turn is None:
            if segments:  # what the environment gave for the turn is a part of the reply
                segments[-1] = replace(segments[-1], reward=None)
            return Conversation(self.talk.key, tuple(segments), None, mark.finish, flow)
        count = len(mark.turn.tokens) + horizon - mark.at
        return Conversation(self.talk.key, tuple(segments), self._begun(mark, count), "stop", flow)

    def _begun(self, mark: _Mark, count: int) -> Unfinished:
        """The turn that began at a mark, when it had `count` tokens."""
        assert mark.turn is not None
        if count == len(mark.turn.tokens):
            return mark.turn
        if len(self.talk.segments) == mark.segments:
            assert self.partial is not None and len(self.partial.tokens) >= count, "a turn is short of the horizon"
            return self.partial.first(count)
        said = self.talk.segments[mark.segments]
        assert count < len(said.tokens), "a turn that has ended is under way"
        spans = tuple(span for span in said.spans if span[0] < count)
        return Unfinished(mark.turn.request, said.tokens[:count], said.logprobs[:count], spans)


class _Talks(Work):
    """One `talk_on` call, on one rank."""

    def __init__(
        self, engine: Engine, groups: Sequence[UnderWay], wanted: int, forced: Collection[int],
        on_step: Callable[[StepReport], None] | None, world: World, conversations: CarriedConversations,
        asked: RolloutRequest, wait: int,
    ) -> None:
        super().__init__(engine, groups, wanted, forced, on_step, world)
        self.conversations, self.asked, self.wait = conversations, asked, wait
        self.courses = {id: self._course(n) for id, n in self.live.items()}
        self.started = False

    def _course(self, n: int) -> _Course:
        one, prompt = self._conversation(n), self.groups[self.of_group[n][0]].prompt
        turns = [s for s in one.segments if s.author == "policy"]
        tokens = tuple(np.concatenate([s.tokens for s in one.segments]).tolist()) if one.segments else ()
        talk = Talk(one.id, prompt, self.asked, list(one.segments), len(turns), tokens, one.flow_digest)
        return _Course(talk, [_Mark(0, len(one.segments), one.turn, one.finish)])

    def _conversation(self, n: int) -> Conversation:
        one = self.begun[n]
        assert isinstance(one, Conversation)
        return one

    @property
    def most(self) -> int:
        return self.asked.sampling.max_tokens + self.wait * (self.asked.max_turns + 1)

    def start(self) -> None:
        self.started = True
        self.conversations.keep_only(self.live)
        for n in self.live.values():
            one = self._conversation(n)
            self.conversations.bring(one.id, self._problem(n), one.segments, one.turn is None, one.finish)
            self.conversations.go_on(one.id)
        self.add([one.turn for n in self.live.values() if (one := self._conversation(n)).turn is not None])

    def _problem(self, n: int) -> Any:
        return self.groups[self.of_group[n][0]].prompt.problem

    def abort(self) -> None:
        for id in self.courses:
            self.conversations.hold(id)
        self.engine.forget(list(self.courses))
        self.engine.collect()

    def far(self, reach: int) -> dict[int, bool]:
        drawn, found = self.engine.drawn(), {}
        for id in self.live:
            course = self.courses[id]
            if course.now.turn is None:
                found[id] = course.due > reach
            else:
                found[id] = course.now.at + drawn[id] - len(course.now.turn.tokens) >= reach
        return found

    def put_apart(self, horizon: int) -> None:
        ids = [id for id, far in self.far(horizon).items() if far]
        for one in self.engine.suspend([id for id in ids if self.courses[id].now.turn is not None]):
            self.courses[one.request.id].partial = one
        for id in ids:
            self.conversations.hold(id)
            self.apart[self.live.pop(id)] = self.courses[id]

    def step(self) -> bool:
        """Replies, then one step of the engine; whether a conversation has ended."""
        before, waits = self.finished, not self.engine.has_work
        replies = self.conversations.poll(waits)
        assert replies or not waits, f"{len(self.live)} conversations wait for replies, and the environment gives none"
        turns = [turn for reply in replies if (turn := self._hear(reply)) is not None]
        if turns:
            self.add(turns)
        report = StepReport(0, 0, 0, 0, 0)
        if self.engine.has_work:
            report = self.engine.step()
            for completion in self.engine.collect():
                self._say(completion)
        if self.on_step is not None:
            self.on_step(StepReport(
                report.step, report.running, report.waiting, self.finished, report.generated_tokens,
            ))
        return self.finished > before

    def _hear(self, reply: Reply) -> Unfinished | None:
        """The next turn of the policy, unless the conversation ends."""
        course = self.courses[reply.key]
        at = course.due
        if end := course.talk.heard(reply):
            self._end(course, at, *end)
            return None
        turn = Unfinished(course.talk.turn())
        course.marks.append(_Mark(at, len(course.talk.segments), turn))
        return turn

    def _say(self, completion: Completion) -> None:
        """Append a turn of the policy; the conversation ends, or the environment gets to see it."""
        course = self.courses[completion.request_id]
        turn = course.now.turn
        assert turn is not None
        at = course.now.at + len(completion.tokens) - len(turn.tokens)
        course.talk.said(completion)
        if completion.finish_reason == "length" and course.talk.room == 0:
            self._end(course, at, "length")
            return
        course.marks.append(_Mark(at, len(course.talk.segments), None, completion.finish_reason))
        course.due = at + self.wait
        self.conversations.act(course.talk.key, completion)

    def _end(self, course: _Course, at: int, end: EndReason, error: str = "") -> None:
        course.end, course.end_at = course.talk.trajectory(end, error), at
        n = self.live.pop(course.talk.key)
        self.ended[n], self.new[n] = course, at
        self.finished += 1
        self.conversations.hold(course.talk.key)
        self.engine.forget([course.talk.key])

    def num_new(self, n: int) -> int:
        return int(self.ended[n].end_at)

    def result(
        self, horizon: int, places: list[int], ended: Mapping[int, Any], apart: Mapping[int, Any]
    ) -> RolledOn:
        answers = [list(group.answers) for group in self.groups]
        drawn = 0
        courses: dict[int, _Course] = {**ended, **apart}
        for n, course in courses.items():
            place, i = self.of_group[n]
            answers[place][i] = course.at(horizon)
            drawn += course.drawn_by(horizon)
        if self.started:
            self.engine.forget(list(self.courses))
            for n in self.shares[self.world.rank]:
                place, i = self.of_group[n]
                self._leave(n, answers[place][i])
        homes = self._homes()
        after = [
            UnderWay(group.prompt, tuple(own), homes.get(place, group.home))
            for place, (group, own) in enumerate(zip(self.groups, answers, strict=True))
        ]
        return self.sorted_out(after, horizon, places, drawn)

    def _leave(self, n: int, answer: Any) -> None:
        """The environment of a conversation that this rank had: closed, or where the conversation is."""
        if isinstance(answer, Trajectory):
            assert answer.request_id is not None
            self.conversations.close(answer.request_id)
        else:
            self.conversations.bring(answer.id, self._problem(n), answer.segments, answer.turn is None, answer.finish)

    def _homes(self) -> dict[int, int]:
        """Of each group whose conversations one rank had, that rank."""
        ranks: dict[int, set[int]] = {}
        for rank, own in enumerate(self.shares):
            for n in own:
                ranks.setdefault(self.of_group[n][0], set()).add(rank)
        return {place: next(iter(own)) for place, own in ranks.items() if len(own) == 1}
