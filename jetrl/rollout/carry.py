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
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from jetrl.engine.limits import RefusedRequest
from jetrl.errors import UserError
from jetrl.parallel.agreement import MISTAKES, agree
from jetrl.parallel.world import ALONE, World
from jetrl.rollout.requests import RolloutRequest, without_tokens
from jetrl.rollout.talk import spans_of
from jetrl.types import (
    Completion,
    EndReason,
    Engine,
    FinishReason,
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
class Conversation:
    """A conversation under way. `turn`: the policy's that has begun, whose request holds the tokens of all `segments`;
    None: a reply of the environment is due, the first one being the prompt. `finish`: how the turn before it ended."""

    id: int
    segments: tuple[Segment, ...] = ()
    turn: Unfinished | None = None
    finish: FinishReason = "stop"
    flow_digest: str = ""

    @property
    def spans(self) -> list[Spans]:
        """Of each turn of the policy."""
        begun = [] if self.turn is None else [self.turn.spans]
        return [*(s.spans for s in self.segments if s.author == "policy"), *begun]


Answer = Unfinished | Conversation


@dataclass(frozen=True, slots=True)
class UnderWay:
    """A group that has begun: of each answer what is there. Complete ones have trajectories alone. `home`: the rank
    that has their environments, if it is one."""

    prompt: Prompt
    answers: tuple[Answer | Trajectory, ...]
    home: int | None = field(default=None, compare=False)

    @property
    def complete(self) -> bool:
        return all(isinstance(answer, Trajectory) for answer in self.answers)

    @property
    def in_turns(self) -> bool:
        """Whether its answers are conversations, whose problem is no prompt yet."""
        return not self.prompt.tokens

    @property
    def spans(self) -> list[Spans]:
        """Of each turn of each answer."""
        found: list[Spans] = []
        for a in self.answers:
            found += (
                [a.spans] if isinstance(a, Unfinished) else a.spans if isinstance(a, Conversation) else
                [turn.spans for turn in a.turns]
            )
        return found

    @property
    def oldest(self) -> int | None:
        """The version of the weights that drew its oldest token; None: nothing was drawn."""
        return min((spans[0][1] for spans in self.spans if spans), default=None)

    @property
    def ended(self) -> tuple[Trajectory, ...]:
        """The trajectories of a complete group."""
        answers = tuple(a for a in self.answers if isinstance(a, Trajectory))
        assert len(answers) == len(self.answers), "an answer has not ended"
        return answers

    @property
    def group(self) -> Group:
        """The complete group."""
        return Group(self.prompt, self.ended)


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


def id_of(answer: Answer) -> int:
    """What names its random stream."""
    return answer.id if isinstance(answer, Conversation) else answer.request.id


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
    return Work(engine, groups, wanted, forced, on_step, world).rolled_on()


class Work:
    """One `roll_on` call, on one rank. Answers have numbers: those of group 0, then those of group 1, ..."""

    def __init__(
        self, engine: Engine, groups: Sequence[UnderWay], wanted: int, forced: Collection[int],
        on_step: Callable[[StepReport], None] | None, world: World,
    ) -> None:
        assert len(forced) <= wanted <= len(groups), "more groups must end than there are"
        self.engine, self.groups, self.wanted, self.forced = engine, groups, wanted, frozenset(forced)
        self.on_step, self.world = on_step, world
        self.of_group = [(place, i) for place, group in enumerate(groups) for i in range(len(group.answers))]
        self.begun = {n: a for n, (place, i) in enumerate(self.of_group)
                      if not isinstance(a := groups[place].answers[i], Trajectory)}
        self.shares = self.shared_out()
        self.live = {id_of(self.begun[n]): n for n in self.shares[world.rank]}  # by request id: what still runs here
        self.ended: dict[int, Any] = {}  # of this rank, by number: completions
        self.apart: dict[int, Any] = {}  # of this rank, far enough: what is unfinished
        self.new: dict[int, int] = {}  # new tokens of the answers that have ended, on any rank
        self.finished = 0

    def shared_out(self) -> list[list[int]]:
        """The answers of each rank: whole groups, as a prompt is computed once on a rank. A group goes to its home,
        unless that has an equal part already, and any other to the rank that has the fewest answers so far. Single
        answers where there are fewer groups than ranks."""
        by_group: dict[int, list[int]] = {}
        for n in self.begun:
            by_group.setdefault(self.of_group[n][0], []).append(n)
        size = self.world.size
        if len(by_group) < size:
            return [[*self.begun][rank::size] for rank in range(size)]
        given: list[list[int]] = [[] for _ in range(size)]
        homeless = []
        for place, own in by_group.items():
            home = self.groups[place].home
            if home is None or home >= size or (len(given[home]) + len(own)) * size > len(self.begun):
                homeless.append(own)
            else:
                given[home] += own
        for own in homeless:
            min(given, key=len).extend(own)
        return given

    def rolled_on(self) -> RolledOn:
        """The result; after any error the engine is left without work."""
        try:
            return self.run()
        except BaseException as error:
            try:
                self.abort()
            except Exception as second:  # a broken engine, or one that a signal interrupted: what came first counts
                raise error from second
            raise

    def abort(self) -> None:
        """Leave nothing behind in the engine."""
        self.engine.cancel(list(self.live))
        self.engine.collect()

    def run(self) -> RolledOn:
        if self.world.alone:
            cut = self.to_the_cut()
            ended, apart = self.ended, self.apart
        else:
            cut, ended, apart = self.shared()
        return self.result(*cut, ended, apart)

    def start(self) -> None:
        """Add what this rank has to do to the engine."""
        self.add([a for n in self.live.values() if isinstance(a := self.begun[n], Unfinished)])

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

    @property
    def most(self) -> int:
        """No answer has more new tokens than this."""
        return max((a.request.sampling.max_tokens for a in self.begun.values() if isinstance(a, Unfinished)), default=1)

    def shared(self) -> tuple[tuple[int, list[int]], dict[int, Any], dict[int, Any]]:
        """The same by several ranks: each runs its answers up to a number of new tokens, then all tell which have
        ended, until that number is the horizon."""
        most, reach, cut = self.most, 0, self.cut()
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
        ended: dict[int, Any] = {}
        apart: dict[int, Any] = {}
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
        return {id: drawn[id] - len(self.before(n).tokens) >= reach for id, n in self.live.items()}

    def before(self, n: int) -> Unfinished:
        """An answer that is no conversation, as it was."""
        one = self.begun[n]
        assert isinstance(one, Unfinished)
        return one

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
        """New tokens of an answer that has ended here."""
        return len(self.ended[n].tokens) - len(self.before(n).tokens)

    def result(
        self, horizon: int, places: list[int], ended: Mapping[int, Any], apart: Mapping[int, Any]
    ) -> RolledOn:
        """All answers at their ends, or `horizon` tokens further than before."""
        answers: list[list[Answer | Trajectory]] = [list(group.answers) for group in self.groups]
        drawn = 0
        for n in self.begun:
            place, i = self.of_group[n]
            before = self.before(n)
            had, prompt = len(before.tokens), self.groups[place].prompt
            if n in ended and len(ended[n].tokens) - had <= horizon:
                answers[place][i] = trajectory_of(prompt, ended[n])
                drawn += len(ended[n].tokens) - had
            elif horizon:
                whole = apart[n] if n in apart else _not_ended(before.request, ended[n])
                assert len(whole.tokens) >= had + horizon, "an answer is short of the horizon"
                answers[place][i] = whole.first(had + horizon)
                drawn += horizon
        return self.sorted_out([UnderWay(g.prompt, tuple(own)) for g, own in zip(self.groups, answers, strict=True)],
                               horizon, places, drawn)

    @staticmethod
    def sorted_out(after: Sequence[UnderWay], horizon: int, places: Sequence[int], drawn: int) -> RolledOn:
        """The groups at `places` are complete, the others stay under way."""
        kept = frozenset(places)
        return RolledOn(
            tuple(after[place] for place in places), tuple(g for place, g in enumerate(after) if place not in kept),
            horizon, drawn,
        )


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
