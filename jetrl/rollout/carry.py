"""`roll_on`: a rollout that ends when enough groups are complete; the others are given back, and go on in a later one.

Which groups are complete, and how far the others are, does not depend on how the engine schedules them, on how much
memory it has, or on how many ranks there are: a rollout is cut at a number of new tokens, its horizon. It is the
smallest number T such that enough groups are complete once each unfinished answer has drawn T more tokens. Every answer
is then at its end, or exactly T tokens further than before. What an engine has drawn beyond that is discarded: it was
never a part of the run, and is drawn again later, by newer weights.

    remaining(answer) = new tokens to its end (0: it has ended before)
    remaining(group)  = the most of its answers'
    T = the largest remaining(group) of the groups that are chosen: those that may not wait, and then those with the
        fewest remaining tokens, earlier ones first, until there are enough

A sequence draws one token in a decode step, so T is about the number of steps while all fit into the engine's slots.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from jetrl.engine.limits import RefusedRequest
from jetrl.errors import UserError
from jetrl.parallel.agreement import MISTAKES, agree
from jetrl.parallel.world import ALONE, World
from jetrl.rollout.requests import RolloutRequest, without_tokens
from jetrl.types import (
    Completion,
    EndReason,
    Engine,
    Group,
    Prompt,
    Request,
    Segment,
    Spans,
    StepReport,
    Trajectory,
    Unfinished,
    token_ids,
)

_LOOKS = 8  # times that ranks tell each other how far they are, if the longest answer decides


@dataclass(frozen=True, slots=True)
class UnderWay:
    """A group that has begun: of each answer what is there. Complete ones have trajectories alone."""

    prompt: Prompt
    answers: tuple[Unfinished | Trajectory, ...]

    @property
    def complete(self) -> bool:
        return all(isinstance(answer, Trajectory) for answer in self.answers)

    @property
    def spans(self) -> list[Spans]:
        """Of each answer."""
        return [a.spans if isinstance(a, Unfinished) else a.segments[-1].spans for a in self.answers]

    @property
    def oldest(self) -> int | None:
        """The version of the weights that drew its oldest token; None: nothing was drawn."""
        return min((spans[0][1] for spans in self.spans if spans), default=None)

    @property
    def group(self) -> Group:
        """The complete group."""
        answers = tuple(a for a in self.answers if isinstance(a, Trajectory))
        assert len(answers) == len(self.answers), "an answer has not ended"
        return Group(self.prompt, answers)


@dataclass(frozen=True, slots=True)
class RolledOn:
    """The groups that are complete and chosen, and those that stay under way; both in the order in which they began.
    `horizon`: the most new tokens of an answer; `drawn`: new tokens of all answers."""

    complete: tuple[UnderWay, ...]
    under_way: tuple[UnderWay, ...]
    horizon: int
    drawn: int


def begin(prompts: Sequence[Prompt], asked: RolloutRequest) -> list[UnderWay]:
    """New groups: `asked.count` answers to each prompt, with ids from `asked.first_id` on. UserError for a prompt
    without tokens."""
    for prompt in prompts:
        if not prompt.tokens:
            raise without_tokens(prompt.problem, prompt.problem.prompt_text)
    return [
        UnderWay(prompt, tuple(
            Unfinished(Request(asked.first_id + place * asked.count + i, prompt.tokens, asked.sampling))
            for i in range(asked.count)
        ))
        for place, prompt in enumerate(prompts)
    ]


def chosen(
    remaining: Mapping[int, int], number: int, wanted: int, forced: Collection[int] = ()
) -> tuple[int, list[int]] | None:
    """The horizon, and the groups that are complete by then, by place; None while it cannot be told.

    `remaining` new tokens of those of `number` groups whose answers have all ended. As more of them are known, the
    horizon gets no larger, and it is right once every other group is known to have more remaining.
    """
    if any(place not in remaining for place in forced):
        return None
    others = sorted((tokens, place) for place, tokens in remaining.items() if place not in forced)
    more = min(wanted, number) - len(forced)
    if len(others) < more:
        return None
    places = sorted([*forced, *(place for _, place in others[: max(more, 0)])])
    return max((remaining[place] for place in places), default=0), places


def roll_on(
    engine: Engine, groups: Sequence[UnderWay], wanted: int, forced: Collection[int] = (),
    on_step: Callable[[StepReport], None] | None = None, world: World = ALONE,
) -> RolledOn:
    """Let groups go on until `wanted` of them are complete (or all), and those at the places `forced` among them.

    The engine is idle before and after. UserError naming the problem if it refuses a request. `on_step` hears after
    each of its steps. With several ranks, each has a part of the answers, and every rank returns all: a collective,
    called with the same groups. A mistake on one rank is raised on all.
    """
    assert len(forced) <= wanted <= len(groups), "more groups must end than there are"
    work = _Work(engine, groups, wanted, forced, on_step, world)
    try:
        return work.run()
    except BaseException as error:
        try:
            engine.cancel(list(work.live))
            engine.collect()
        except Exception as second:  # a broken engine, or one that a signal interrupted: what came first counts
            raise error from second
        raise


class _Work:
    """One `roll_on` call, on one rank. Answers have numbers: those of group 0, then those of group 1, ..."""

    def __init__(
        self, engine: Engine, groups: Sequence[UnderWay], wanted: int, forced: Collection[int],
        on_step: Callable[[StepReport], None] | None, world: World,
    ) -> None:
        self.engine, self.groups, self.wanted, self.forced = engine, groups, wanted, frozenset(forced)
        self.on_step, self.world = on_step, world
        self.of_group = [(place, i) for place, group in enumerate(groups) for i in range(len(group.answers))]
        self.begun = {n: a for n, (place, i) in enumerate(self.of_group)
                      if isinstance(a := groups[place].answers[i], Unfinished)}
        self.live = {self.begun[n].request.id: n for n in self.own_answers()}  # by request id: what still runs here
        self.ended: dict[int, Completion] = {}  # of this rank, by number
        self.apart: dict[int, Unfinished] = {}  # of this rank, far enough
        self.new: dict[int, int] = {}  # new tokens of the answers that have ended, on any rank
        self.finished = 0

    def own_answers(self) -> list[int]:
        """This rank's: whole groups, as a prompt is computed once on a rank, each for the rank that has the fewest
        answers so far. Single answers where there are fewer groups than ranks."""
        by_group: dict[int, list[int]] = {}
        for n in self.begun:
            by_group.setdefault(self.of_group[n][0], []).append(n)
        if len(by_group) < self.world.size:
            return [*self.begun][self.world.rank :: self.world.size]
        given: list[list[int]] = [[] for _ in range(self.world.size)]
        for own in by_group.values():
            min(given, key=len).extend(own)
        return given[self.world.rank]

    def run(self) -> RolledOn:
        if self.world.alone:
            cut = self.to_the_cut()
            ended, apart = self.ended, self.apart
        else:
            cut, ended, apart = self.shared()
        return self.result(*cut, ended, apart)

    def start(self) -> None:
        self.add([self.begun[n] for n in self.live.values()])

    def add(self, unfinished: Sequence[Unfinished]) -> None:
        try:
            self.engine.resume(unfinished)
        except RefusedRequest as error:
            place, _ = self.of_group[self.live[error.request_id]]
            raise UserError(f"Problem {self.groups[place].prompt.problem.id}: {error}") from error

    def cut(self) -> tuple[int, list[int]] | None:
        """`chosen` of what is known."""
        remaining: dict[int, int] = {}
        unknown: set[int] = set()
        for n, (place, _) in enumerate(self.of_group):
            if n in self.begun and n not in self.new:
                unknown.add(place)
            else:
                remaining[place] = max(remaining.get(place, 0), self.new.get(n, 0))
        known = {place: tokens for place, tokens in remaining.items() if place not in unknown}
        return chosen(known, len(self.groups), self.wanted, self.forced)

    def to_the_cut(self) -> tuple[int, list[int]]:
        """Run until the horizon is known, and no answer is short of it. In one process."""
        cut = self.cut()
        if cut is not None:  # nobody has to draw anything
            return cut
        self.start()
        while self.live:
            if self.step():
                cut = self.cut()
            if cut is not None:
                self.put_apart(cut[0])
        assert cut is not None, "all answers have ended, and too few groups are complete"
        return cut

    def shared(self) -> tuple[tuple[int, list[int]], dict[int, Completion], dict[int, Unfinished]]:
        """The same by several ranks: each runs its answers up to a number of new tokens, then all tell which have
        ended, until that number is the horizon."""
        most = max((a.request.sampling.max_tokens for a in self.begun.values()), default=1)
        reach, cut = 0, self.cut()
        if cut is None:
            self.guarded(self.start)
        else:
            self.live = {}
        while cut is None or reach < cut[0]:
            reach = min(reach + -(-most // _LOOKS), cut[0] if cut is not None else most)
            self.guarded(partial(self.run_to, reach, cut[0] if cut is not None else None))
            for new in self.world.gather({n: self.num_new(n) for n in self.ended}):
                self.new |= new
            cut = self.cut()
            assert cut is not None or reach < most, "all answers have ended, and too few groups are complete"
        self.guarded(partial(self.put_apart, 0))
        data = pickle.dumps((self.ended, self.apart), pickle.HIGHEST_PROTOCOL)
        ended: dict[int, Completion] = {}
        apart: dict[int, Unfinished] = {}
        for part in self.world.gather(data):
            theirs = pickle.loads(part)
            ended, apart = ended | theirs[0], apart | theirs[1]
        return cut, ended, apart

    def guarded(self, work: Callable[[], None]) -> None:
        """What one rank does between two exchanges: its mistake is raised on all."""
        mistake: BaseException | None = None
        try:
            work()
        except MISTAKES as error:
            mistake = error
        agree(self.world, mistake)

    def run_to(self, reach: int, horizon: int | None) -> None:
        """Until no answer of this rank has fewer than `reach` new tokens; those beyond a known horizon stop."""
        while self.live:
            if horizon is not None:
                self.put_apart(horizon)
            elif all(self.far(reach).values()):
                return
            if self.live:
                self.step()

    def far(self, reach: int) -> dict[int, bool]:
        """Of each request that runs here, whether it has drawn as many new tokens."""
        drawn = self.engine.drawn()
        return {id: drawn[id] - len(self.begun[n].tokens) >= reach for id, n in self.live.items()}

    def put_apart(self, horizon: int) -> None:
        """Take those back that are far enough."""
        if not (ids := [id for id, far in self.far(horizon).items() if far]):
            return
        for one in self.engine.suspend(ids if len(ids) < len(self.live) else None):
            self.apart[self.live.pop(one.request.id)] = one

    def step(self) -> bool:
        """One step of the engine; whether an answer has ended."""
        report, before = self.engine.step(), self.finished
        for completion in self.engine.collect():
            n = self.live.pop(completion.request_id)
            self.ended[n] = completion
            self.new[n] = self.num_new(n)
            self.finished += 1
        if self.on_step is not None:
            self.on_step(StepReport(
                report.step, report.running, report.waiting, self.finished, report.generated_tokens,
            ))
        return self.finished > before

    def num_new(self, n: int) -> int:
        return len(self.ended[n].tokens) - len(self.begun[n].tokens)

    def result(
        self, horizon: int, places: list[int], ended: Mapping[int, Completion], apart: Mapping[int, Unfinished]
    ) -> RolledOn:
        """All answers at their ends, or `horizon` tokens further than before."""
        answers: list[list[Unfinished | Trajectory]] = [list(group.answers) for group in self.groups]
        drawn = 0
        for n, before in self.begun.items():
            place, i = self.of_group[n]
            had, prompt = len(before.tokens), self.groups[place].prompt
            if n in ended and len(ended[n].tokens) - had <= horizon:
                answers[place][i] = trajectory_of(prompt, ended[n])
                drawn += len(ended[n].tokens) - had
            elif horizon:
                whole = apart[n] if n in apart else _not_ended(before.request, ended[n])
                assert len(whole.tokens) >= had + horizon, "an answer is short of the horizon"
                answers[place][i] = whole.first(had + horizon)
                drawn += horizon
        after = [UnderWay(g.prompt, tuple(own)) for g, own in zip(self.groups, answers, strict=True)]
        kept = frozenset(places)
        return RolledOn(
            tuple(after[place] for place in places), tuple(g for place, g in enumerate(after) if place not in kept),
            horizon, drawn,
        )


def spans_of(completion: Completion) -> Spans:
    """Which weights drew its tokens."""
    return completion.spans or ((0, completion.weight_version),)


def trajectory_of(prompt: Prompt, completion: Completion) -> Trajectory:
    """A prompt with its answer, as `roll_out` makes it."""
    answer = Segment("policy", completion.tokens, completion.text, completion.logprobs, spans=spans_of(completion))
    return answered(prompt, answer, completion.finish_reason, completion.flow_digest, completion.request_id)


def answered(prompt: Prompt, answer: Segment, end: EndReason, flow_digest: str, request_id: int) -> Trajectory:
    """A prompt with one turn of the policy."""
    first = Segment("environment", token_ids(prompt.tokens), prompt.problem.prompt_text, opened=prompt.opened)
    return Trajectory((first, answer), end, flow_digest, request_id=request_id)


def _not_ended(request: Request, completion: Completion) -> Unfinished:
    """An answer as it was before its last token, for one that ended beyond the horizon."""
    last = len(completion.tokens) - 1
    spans = tuple(span for span in spans_of(completion) if span[0] < last)
    return Unfinished(request, completion.tokens[:last], completion.logprobs[:last], spans)
