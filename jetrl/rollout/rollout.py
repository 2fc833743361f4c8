"""`roll_out`: prompts in, trajectories out, for plain answers and for conversations with an environment alike.

A plain answer is a conversation of one turn whose environment is silent. Turns of one trajectory share one request id:
a token is a function of seed, id and position in the sequence, so it does not depend on how turns were scheduled. A
turn's request holds all tokens before it exactly as they were drawn or replied; text is never made into tokens again.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from jetrl.engine.limits import RefusedRequest
from jetrl.errors import UserError
from jetrl.parallel.agreement import MISTAKES, agree
from jetrl.rollout.queue import Abandoned, Everything, Queues, Source
from jetrl.rollout.requests import STEP_STRIDE, RolloutRequest
from jetrl.rollout.talk import Talk
from jetrl.types import (
    Completion,
    Conversations,
    EndReason,
    Engine,
    Group,
    Prompt,
    Reply,
    Request,
    StepReport,
    Trajectory,
    token_ids,
)


@dataclass(frozen=True, slots=True)
class RankPart:
    """What one rank did of a rollout: trajectories, tokens drawn, seconds at work, and seconds that it then waited for
    the slowest rank."""

    trajectories: int
    tokens: int
    busy: float
    idle: float

    def __add__(self, other: RankPart) -> RankPart:
        return RankPart(
            self.trajectories + other.trajectories, self.tokens + other.tokens, self.busy + other.busy,
            self.idle + other.idle,
        )


@dataclass(frozen=True)
class Rollout:
    """What came of the prompts: groups in their order, and apart from them the trajectories whose environment failed.

    A prompt all of whose trajectories failed has no group; `places` are those of the others. `parts` is what each rank
    did, empty for one process.
    """

    groups: list[Group]
    failed: list[tuple[Prompt, Trajectory]]
    with_environment: bool = False
    parts: tuple[RankPart, ...] = field(default=(), compare=False)
    places: tuple[int, ...] = ()


def roll_out(
    engine: Engine,
    prompts: Sequence[Prompt],
    asked: RolloutRequest,
    conversations: Conversations | None = None,
    on_step: Callable[[StepReport], None] | None = None,
    queues: Queues | None = None,
    on_group: Callable[[int, Group], None] | None = None,
) -> Rollout:
    """`asked.count` trajectories of each prompt, prompt by prompt.

    Engine steps go on while environments work; no conversation waits for the slowest. `on_step` hears after each round
    how many trajectories have ended, `on_group` of each group that has ended, by the place of its prompt; of several
    ranks the one that sampled all of it hears. UserError naming the problem if a prompt is empty or the engine refuses
    it. After any error the engine is left without work.

    With `queues`, the ranks of its world share the work, and every rank returns all of it (a collective): each calls
    this with the same prompts. A mistake on one rank is raised on all.
    """
    number = len(prompts) * asked.count
    if queues is None or queues.world.alone:
        ended = _run(engine, prompts, asked, conversations, on_step, Everything(number), on_group)
        parts: tuple[RankPart, ...] = ()
    else:
        ended, parts = _shared(engine, prompts, asked, conversations, on_step, queues, on_group)
    groups, failed, places = [], [], []
    for i, prompt in enumerate(prompts):
        own = [ended[n] for n in range(i * asked.count, (i + 1) * asked.count) if n in ended]
        assert len(own) == asked.count, "a trajectory has not ended"
        failed += [(prompt, t) for t in own if t.failed]
        if good := tuple(t for t in own if not t.failed):
            groups.append(Group(prompt, good))
            places.append(i)
    return Rollout(groups, failed, conversations is not None, parts, tuple(places))


def _run(
    engine: Engine, prompts: Sequence[Prompt], asked: RolloutRequest, conversations: Conversations | None,
    on_step: Callable[[StepReport], None] | None, source: Source, on_group: Callable[[int, Group], None] | None,
) -> dict[int, Trajectory]:
    """The trajectories that `source` gives, by number."""
    driver = _Driver(engine, prompts, asked, conversations, source, on_group)
    try:
        driver.run(on_step)
    except BaseException as error:
        try:
            driver.abort()
        except Exception as second:  # a broken engine, or one that a signal interrupted: what came first counts
            raise error from second
        raise
    return driver.ended


def _shared(
    engine: Engine, prompts: Sequence[Prompt], asked: RolloutRequest, conversations: Conversations | None,
    on_step: Callable[[StepReport], None] | None, queues: Queues, on_group: Callable[[int, Group], None] | None,
) -> tuple[dict[int, Trajectory], tuple[RankPart, ...]]:
    """This rank's part of the work, then everybody's."""
    start, most = time.perf_counter(), asked.sampling.max_tokens
    queue = queues.open([len(p.tokens) + most / 2 for p in prompts for _ in range(asked.count)], asked.count)
    own: dict[int, Trajectory] = {}
    mistake: BaseException | None = None
    if queue.rest and conversations is None:
        engine.expect([len(p.tokens) + most for p in prompts for _ in range(asked.count)])
    try:
        own = _run(engine, prompts, asked, conversations, on_step, queue, on_group)
    except MISTAKES as error:
        queue.fail()
        mistake = error
    except Abandoned:
        pass  # agree() tells by whom
    finally:
        engine.expect(())
    busy = time.perf_counter() - start
    agree(queues.world, mistake)
    data = pickle.dumps(own, pickle.HIGHEST_PROTOCOL)  # of this protocol, arrays are one buffer each
    replicas = queues.world.replicas
    packed = replicas.gather((data, busy))  # its own part need not be unpacked again
    found = [
        (own if rank == replicas.rank else pickle.loads(data), seconds) for rank, (data, seconds) in enumerate(packed)
    ]
    longest = max(seconds for _, seconds in found)
    parts = tuple(
        RankPart(len(one), sum(t.num_policy_tokens for t in one.values()), seconds, longest - seconds)
        for one, seconds in found
    )
    return {number: t for one, _ in found for number, t in one.items()}, parts


def rollout_stats(rollout: Rollout, seconds: float) -> dict[str, float]:
    """Lengths in policy tokens, share cut off, generated tokens a second; for conversations turns and failures; of
    several ranks how evenly they worked.

    Failed trajectories count in the speed and in their own numbers only. `seconds` are those of the slowest rank.
    """
    good = [t for g in rollout.groups for t in g.trajectories]
    drawn = sum(t.num_policy_tokens for t in good) + sum(t.num_policy_tokens for _, t in rollout.failed)
    stats = {"perf/tokens_per_s_per_gpu": drawn / max(seconds, 1e-9) / max(len(rollout.parts), 1)}
    stats |= _rank_stats(rollout.parts)
    if good:
        lengths = [t.num_policy_tokens for t in good]
        stats |= {
            "response_length/mean": sum(lengths) / len(good),
            "response_length/max": float(max(lengths)),
            "response_length/frac_truncated": sum(t.truncated for t in good) / len(good),
        }
    if not rollout.with_environment:
        return stats
    if good:
        turns = [len(t.turns) for t in good]
        stats |= {
            "environment/turns_mean": sum(turns) / len(good),
            "environment/turns_max": float(max(turns)),
            "environment/tokens_mean": sum(t.response_length - t.num_policy_tokens for t in good) / len(good),
            "environment/frac_max_turns": sum(t.end == "turns" for t in good) / len(good),
        }
    ends = [t.end for _, t in rollout.failed]
    return stats | {
        "environment/num_errors": float(ends.count("error")),
        "environment/num_timeouts": float(ends.count("timeout")),
    }


def merged_parts(rollouts: Sequence[Rollout]) -> tuple[RankPart, ...]:
    """What each rank did of several rollouts (the rounds of a step)."""
    return tuple(sum(of[1:], start=of[0]) for of in zip(*(r.parts for r in rollouts), strict=True))


def _rank_stats(parts: Sequence[RankPart]) -> dict[str, float]:
    """Seconds that ranks waited for the slowest one, and the share of that one in all tokens (1: an equal part)."""
    if not parts:
        return {}
    slowest = max(parts, key=lambda p: p.busy)
    tokens = sum(p.tokens for p in parts)
    return {
        "perf/rank_idle_mean_s": sum(p.idle for p in parts) / len(parts),
        "perf/rank_idle_max_s": max(p.idle for p in parts),
        "perf/slowest_rank_share": slowest.tokens * len(parts) / max(tokens, 1),
    }


class _Driver:
    """One `roll_out` call, on one rank."""

    def __init__(
        self, engine: Engine, prompts: Sequence[Prompt], asked: RolloutRequest, conversations: Conversations | None,
        source: Source, on_group: Callable[[int, Group], None] | None = None,
    ) -> None:
        number = len(prompts) * asked.count
        assert asked.first_id % STEP_STRIDE + number <= STEP_STRIDE, "more trajectories in a step than request ids"
        self.engine, self.prompts, self.asked, self.conversations = engine, prompts, asked, conversations
        self.source, self.on_group = source, on_group
        self.live: dict[int, Talk] = {}  # by key
        self.ended: dict[int, Trajectory] = {}  # by number
        self.started: set[int] = set()  # conversations that are to be closed
        self.resting: set[int] = set()  # those whose environment has a turn to answer
        self.branches: dict[int, int] = {}  # keys by the request ids of branches
        self.openings: dict[tuple[int, ...], np.ndarray] = {}  # one array for all trajectories of a prompt
        self.last = StepReport(0, 0, 0, 0, 0)
        self.steps_before = self.tokens_before = 0  # of engine sessions that are over

    def run(self, on_step: Callable[[StepReport], None] | None) -> None:
        """Rounds of new trajectories, replies, requests and one engine step, until every trajectory has ended."""
        while self.live or not self.source.empty:
            waiting = self.last.waiting if self.engine.has_work else 0
            replies = self._begin(self.source.take(len(self.live), len(self.resting), waiting))
            if not self.live:
                continue
            if self.conversations is not None:
                replies = self._poll(self.conversations)
            requests = [r for reply in replies if (r := self._take_reply(reply)) is not None]
            if requests:
                self._add(requests)
            if self.engine.has_work:
                self._count(self.engine.step())
                for completion in self.engine.collect():
                    self._take_completion(completion)
            report = self._report()
            if on_step is not None:
                on_step(report)

    def _begin(self, numbers: Sequence[int]) -> list[Reply]:
        """Start these trajectories. Of plain answers the prompt is there at once."""
        new = [
            Talk(self.asked.first_id + n, self.prompts[n // self.asked.count], self.asked, forks=True) for n in numbers
        ]
        self.live |= {one.key: one for one in new}
        if self.conversations is None:
            return [
                Reply(o.key, o.prompt.tokens, o.prompt.problem.prompt_text, opened=o.prompt.opened) for o in new
            ]
        for one in new:
            self.started.add(one.key)
            self.conversations.start(one.key, one.prompt.problem)
        return []

    def abort(self) -> None:
        """Leave nothing behind in engine and environment."""
        if self.conversations is not None:
            for key in sorted(self.started):
                self.conversations.close(key)
        self.engine.forget([*self.live, *self.branches])
        self.engine.collect()

    def _poll(self, conversations: Conversations) -> list[Reply]:
        wait = not self.engine.has_work
        replies = conversations.poll(wait)
        assert replies or not wait, f"{len(self.live)} conversations wait for replies, and the environment gives none"
        return replies

    def _add(self, requests: list[Request]) -> None:
        try:
            self.engine.add(requests)
        except RefusedRequest as error:
            problem = self._of(error.request_id).prompt.problem
            raise UserError(f"Problem {problem.id}: {error}") from error

    def _take_reply(self, reply: Reply) -> Request | None:
        """Append what the environment said; the request of the next turn, unless the trajectory ends here."""
        one = self.live[reply.key]
        self.resting.discard(reply.key)
        if end := one.heard(reply, self._opening):
            self._end(one, *end)
            return None
        if one.stream != one.key:
            self.branches[one.stream] = one.key
        return Request(one.key, one.tokens, self.asked.sampling) if self.conversations is None else one.turn()

    def _opening(self, tokens: tuple[int, ...]) -> np.ndarray:
        if tokens not in self.openings:
            self.openings[tokens] = token_ids(tokens)
        return self.openings[tokens]

    def _take_completion(self, completion: Completion) -> None:
        """Append a turn of the policy; the trajectory ends, or the environment gets to see it."""
        one = self._of(completion.request_id)
        one.said(completion, only=self.conversations is None)
        if self.conversations is None:
            self._end(one, completion.finish_reason)
        elif completion.finish_reason == "length" and one.room == 0:
            self._end(one, "length")
        else:
            self.resting.add(one.key)
            self.conversations.act(one.key, completion)

    def _of(self, request_id: int) -> Talk:
        return self.live[self.branches.get(request_id, request_id)]

    def _end(self, one: Talk, end: EndReason, error: str = "") -> None:
        number = one.key - self.asked.first_id
        self.ended[number] = one.trajectory(end, error)
        del self.live[one.key]
        if self.conversations is not None:
            self.started.remove(one.key)
            self.conversations.close(one.key)
            self.engine.forget([one.key, *one.branches])
            for stream in one.branches:
                self.branches.pop(stream, None)
        if self.on_group is not None:
            self._tell(number // self.asked.count, self.on_group)

    def _tell(self, place: int, on_group: Callable[[int, Group], None]) -> None:
        """Of a group whose last trajectory has ended."""
        count = self.asked.count
        own = [self.ended.get(number) for number in range(place * count, (place + 1) * count)]
        if None not in own and (good := tuple(t for t in own if t is not None and not t.failed)):
            on_group(place, Group(self.prompts[place], good))

    def _count(self, report: StepReport) -> None:
        """Note an engine's report. Its counts begin again when the engine was idle."""
        if report.step <= self.last.step or report.generated_tokens < self.last.generated_tokens:
            self.steps_before += self.last.step
            self.tokens_before += self.last.generated_tokens
        self.last = report

    def _report(self) -> StepReport:
        idle = not self.engine.has_work
        running, waiting = (0, 0) if idle else (self.last.running, self.last.waiting)
        steps, tokens = self.steps_before + self.last.step, self.tokens_before + self.last.generated_tokens
        return StepReport(steps, running, waiting, self.source.report(len(self.ended)), tokens)
