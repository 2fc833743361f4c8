"""The scheduler against a cache that is simulated token by token, under random traffic.

`Simulation` plays the runner: it keeps what every cache slot holds (the token's whole history up to there) and asserts,
for each planned row, that the sequence's cache holds exactly its own past. Any wrong page, copy or chunk is caught.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetrl.engine.pages import PageAllocator
from jetrl.engine.plan import Plan
from jetrl.engine.rows import Rows, rows_for
from jetrl.engine.scheduler import ForcePreempt, Scheduler
from jetrl.errors import UserError
from jetrl.types import Request, SamplingParams


def request(number: int, tokens: tuple[int, ...], max_tokens: int) -> Request:
    return Request(number, tokens, SamplingParams(max_tokens=max_tokens))


def next_token(history: tuple[int, ...], number: int) -> int:
    """The 'model' and 'sampler': what follows depends on the whole history and on the request."""
    return hash((history, number)) % 50


def logprob(history: tuple[int, ...]) -> float:
    """A number for the last token of `history` that no other token has."""
    return float(np.float32(hash((history, "p")) % 2**20))


class Simulation:
    """`requests` at the start, more of them by `add`. Requests and conversations are told apart by their place."""

    def __init__(
        self,
        requests: list[Request],
        *,
        num_pages: int,
        page_size: int,
        max_num_seqs: int,
        budget: int,
        force: ForcePreempt | None = None,
        stop_at: Callable[[int, int], bool] = lambda number, length: False,
        burst: int = 1,
        depth: int = 0,
        holds: float = 0.0,
        grid: int = 0,
        share: bool = False,
    ) -> None:
        self.burst, self.bursts = burst, 0
        self.depth, self.holds, self.drafted, self.accepted = depth, holds, 0, 0
        self.requests: list[Request] = []
        self.page_size, self.budget, self.stop_at = page_size, budget, stop_at
        self.allocator = PageAllocator(num_pages, page_size)
        more = 900 if num_pages >= 400 else 0  # room enough
        self.rows = Rows(max_num_seqs, rows_for(max_num_seqs) + more, grid) if grid else None
        self.states: dict[int, tuple[int, ...]] = {0: ()}  # what each row has seen
        self.scheduler = Scheduler(
            self.allocator, max_num_seqs=max_num_seqs, max_tokens_per_step=budget, max_position=10_000,
            force_preempt=force, rows=self.rows, share_beginnings=share,
        )
        self.history: list[list[int]] = []
        self.cache: dict[tuple[int, int], tuple[int, ...]] = {}
        self.computed: dict[tuple[int, ...], int] = {}  # how often each history was computed
        self.first_started: list[int] = []
        self.ended: list[int] = []
        self.max_rows = 0
        self.add(requests)

    def add(self, requests: list[Request]) -> None:
        self.scheduler.add(requests)
        self.requests += requests
        self.history += [list(r.tokens) for r in requests]
        self.scheduler.check_integrity()

    def run(self, max_steps: int = 5000) -> Simulation:
        while self.scheduler.has_work:
            assert self.scheduler.num_steps < max_steps, "the scheduler does not come to an end"
            self.step()
        assert self.allocator.num_used == 0 and (self.rows is None or self.rows.num_used == 0)
        assert sorted(self.ended) == list(range(len(self.requests)))
        return self

    def step(self) -> list[int]:
        """One step or burst; the places of the requests that ended."""
        plan, steps = self.scheduler.schedule(), 1
        self.scheduler.check_integrity()
        # as the runner decides it: one token of each sequence, each drawing from its own row
        own = [slot for slot in plan.slots.tolist() if slot in plan.sample_slots]
        assert plan.is_decode == (own == plan.slots.tolist() and len(own) == len(plan.tokens) == len(plan.sample_rows))
        assert not plan.is_decode or plan.sample_rows.tolist() == list(range(len(own)))
        if plan.is_decode and (self.burst > 1 or self.depth):
            fits = len(plan.counts) * (self.depth + 1) <= self.budget
            plan, steps = self.scheduler.extend(self.burst, self.depth if fits else 0)
            self.bursts += steps > 1
            self.scheduler.check_integrity()
        if plan.depth:
            tokens, logprobs, stop, counts = self.draw_with_drafts(plan, steps)
            assert counts.min() >= 1 and len(tokens) <= steps * (plan.depth + 1)
            return self.commit(plan, tokens, logprobs, stop, counts)
        drawn = [self.draw(plan, self.compute(plan))]
        for step in range(1, steps):  # each from the tokens of the one before, also beyond a stop
            later = replace(
                plan, starts=plan.starts + step, tokens=drawn[-1][0], positions=plan.positions + step,
                copies=plan.copies[:0], sample_positions=plan.sample_positions + step, row_reads=plan.row_writes,
            )
            drawn.append(self.draw(later, self.compute(later)))
        tokens, logprobs, stop = (np.stack(column) for column in zip(*drawn, strict=True))
        return self.commit(plan, tokens, logprobs, stop, np.full(tokens.shape[1], len(tokens)))

    def commit(
        self, plan: Plan, tokens: np.ndarray, logprobs: np.ndarray, stop: np.ndarray, counts: np.ndarray
    ) -> list[int]:
        finished = self.scheduler.commit(tokens, logprobs, stop, counts).finished
        for column, number in enumerate(plan.sample_requests.tolist()):  # forget what came after the stop
            if stop[:, column].any():
                wasted = int(counts[column]) - 1 - int(stop[:, column].argmax())
                del self.history[number][len(self.history[number]) - wasted :]
        for end in finished:
            history, prompt = self.history[end.request], len(self.requests[end.request].tokens)
            assert end.tokens.tolist() == history[prompt:] and end.id == self.requests[end.request].id
            wanted = [logprob(tuple(history[: i + 1])) for i in range(prompt, len(history))]
            assert end.logprobs.tolist() == wanted, "log-probs of other tokens"
            assert end.stopped == self.stop_at(end.id, len(history) - prompt)
        ended = [end.request for end in finished]
        self.ended += ended
        self.scheduler.check_integrity()
        return ended

    def draw_with_drafts(self, plan: Plan, steps: int) -> tuple[np.ndarray, ...]:
        """Steps of a plan with drafts, each of which holds with probability `self.holds`: what `commit` takes."""
        assert plan.reach is not None
        batch, drawn = range(len(plan.tokens)), [[] for _ in plan.tokens]
        for step in range(steps):
            rows: list[tuple[int, list[int]]] = []
            for b in batch:
                number, position = int(plan.sample_requests[b]), int(plan.positions[b]) + len(drawn[b])
                known = self.history[number]
                assert len(known) == position + 1, "behind what was drawn"
                room = int(plan.reach[b]) - position - 1
                if room < 0:
                    assert len(known) >= len(self.requests[number].tokens) + self.requests[number].sampling.max_tokens
                    continue
                guess: list[int] = []
                for i in range(min(room, plan.depth, hash((number, position, "some")) % (2 * plan.depth + 1))):
                    right = hash((number, position, i)) % 1000 < 1000 * self.holds
                    after = next_token((*known, *guess), self.requests[number].id)
                    guess.append(after if right else (after + 1) % 50)
                rows.append((b, guess))
            if not rows:
                break
            which, counts = np.array([b for b, _ in rows]), np.array([1 + len(guess) for _, guess in rows])
            starts = plan.positions[which] + [len(drawn[b]) for b in which]
            later = replace(
                plan, starts=starts, counts=counts, block_table=plan.block_table[which],
                tokens=np.array([t for b, g in rows for t in (self.history[plan.sample_requests[b]][-1], *g)]),
                positions=np.concatenate([s + np.arange(n) for s, n in zip(starts, counts, strict=True)]),
                copies=plan.copies if step == 0 else plan.copies[:0],
            )
            histories = iter(self.compute(later))
            self.drafted += int(counts.sum()) - len(counts)
            for b, guess in rows:
                number = int(plan.sample_requests[b])
                known, request, open_ = self.history[number], self.requests[number], True
                for i in range(len(guess) + 1):
                    computed = next(histories)
                    if open_:
                        assert computed == tuple(known), "a token from the row of another"
                        known.append(next_token(tuple(known), request.id))
                        stop = self.stop_at(request.id, len(known) - len(request.tokens))
                        drawn[b].append((known[-1], logprob(tuple(known)), stop))
                        open_ = i < len(guess) and guess[i] == known[-1]
                        self.accepted += open_
        counts = np.array([len(d) for d in drawn])
        columns = [np.zeros((counts.max(), len(drawn)), dtype=t) for t in (np.int64, np.float32, bool)]
        for b in batch:
            for column, values in zip(columns, zip(*drawn[b], strict=True), strict=True):
                column[: counts[b], b] = values
                column[counts[b] :, b] = 1  # has no meaning, not even as a stop
        return (*columns, counts)

    def compute(self, plan: Plan) -> list[tuple[int, ...]]:
        """Apply the page copies, write the planned rows, read every row's past back; the history of each row."""
        assert len(set(plan.copies[:, 1].tolist())) == len(plan.copies), "two copies into one page"
        read = {(dst, o): self.cache.get((src, o)) for src, dst in plan.copies.tolist() for o in range(self.page_size)}
        self.cache.update({place: value for place, value in read.items() if value is not None})
        assert (plan.counts >= 1).all() and len(plan.tokens) == plan.counts.sum() <= self.budget
        self.max_rows = max(self.max_rows, len(plan.tokens))
        writes: dict[tuple[int, int], tuple[int, ...]] = {}
        histories = []
        row = 0
        for b, (start, count) in enumerate(zip(plan.starts.tolist(), plan.counts.tolist(), strict=True)):
            table = plan.block_table[b].tolist()
            past = self.cache[table[(start - 1) // self.page_size], (start - 1) % self.page_size] if start else ()
            assert len(past) == start
            for j in range(start):
                assert self.cache[table[j // self.page_size], j % self.page_size] == past[: j + 1], "a wrong page"
            for position in range(start, start + count):
                assert plan.positions[row] == position
                past = (*past, int(plan.tokens[row]))
                place = (table[position // self.page_size], position % self.page_size)
                assert place not in writes, "two rows write one cache slot"
                writes[place] = past
                self.computed[past] = self.computed.get(past, 0) + 1
                histories.append(past)
                row += 1
        self.cache.update(writes)
        self.move_states(plan, histories)
        return histories

    def move_states(self, plan: Plan, histories: list[tuple[int, ...]]) -> None:
        """Read all rows of states, then write them: a row has seen the tokens before the pass, and then those of it."""
        if self.rows is None:
            return
        reads, writes = plan.row_reads.tolist(), plan.row_writes.tolist()
        assert len(set(writes)) == len(writes) and not {0, 1} & set(writes)
        for i, write in enumerate(writes):
            assert write not in reads[:i] + reads[i + 1 :], "a row that another reads is written"
        moved, grid, ends = {}, self.rows.grid, np.cumsum(plan.counts) - 1
        for read, write, start, end in zip(reads, writes, plan.starts.tolist(), ends.tolist(), strict=True):
            seen, past = self.states[read], histories[end]
            assert len(seen) >= start and len(seen) // grid == start // grid, "a state from elsewhere in the sequence"
            assert seen[:start] == past[:start], "another sequence's state"
            moved[write] = past
        self.states |= moved

    def draw(self, plan: Plan, histories: list[tuple[int, ...]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        assert len(set(plan.sample_requests.tolist())) == len(plan.sample_requests), "a request draws twice in a step"
        tokens, logprobs, stop = [], [], []
        for row, number, position in zip(
            plan.sample_rows.tolist(), plan.sample_requests.tolist(), plan.sample_positions.tolist(), strict=True
        ):
            known, request = self.history[number], self.requests[number]
            assert histories[row] == tuple(known) and position == len(known), "drawn from another sequence's row"
            if position == len(request.tokens):
                self.first_started.append(number)
            known.append(next_token(tuple(known), request.id))
            tokens.append(known[-1])
            logprobs.append(logprob(tuple(known)))
            stop.append(self.stop_at(request.id, len(known) - len(request.tokens)))
        return np.array(tokens, dtype=np.int64), np.array(logprobs, dtype=np.float32), np.array(stop, dtype=bool)

    def times_computed(self) -> int:
        return sum(self.computed.values())


def test_equal_prompts_are_computed_once() -> None:
    prompt, other = (1, 2, 3, 4, 5), (7, 8, 9)
    requests = [request(i, prompt if i < 4 else other, 3) for i in range(8)]
    sim = Simulation(requests, num_pages=100, page_size=2, max_num_seqs=8, budget=64).run()
    # prompts once; then of three drawn tokens the last is never computed
    assert sim.times_computed() == 5 + 3 + 8 * 2 and sim.scheduler.num_steps == 3
    assert all(sim.computed[prompt[:n]] == 1 for n in range(1, 6))
    assert sim.scheduler.num_preemptions == 0


def test_a_group_shares_its_full_pages() -> None:
    requests = [request(i, tuple(range(16)), 4) for i in range(8)]
    sim = Simulation(requests, num_pages=100, page_size=4, max_num_seqs=8, budget=64).run()
    assert sim.allocator.peak_used == 4 + 8, "four prompt pages for all, one page of its own each"


@pytest.mark.parametrize("grid", [0, 1, 64])
def test_samples_beyond_the_slots_reuse_the_held_prompt(grid: int) -> None:
    requests = [request(i, tuple(range(10)), 3) for i in range(6)]
    sim = Simulation(requests, num_pages=100, page_size=4, max_num_seqs=2, budget=64, grid=grid).run()
    # four late samples compute the last prompt token again, to draw their first token from it
    assert sim.times_computed() == 10 + 4 * 1 + 6 * 2
    assert sim.first_started == list(range(6))


def test_long_prompts_are_chunked_next_to_decoding() -> None:
    requests = [request(0, (1, 2), 12), request(1, tuple(range(20)), 2)]
    sim = Simulation(requests, num_pages=100, page_size=4, max_num_seqs=4, budget=5)
    mixed = 0
    while sim.scheduler.has_work:
        plan = sim.scheduler.schedule()
        mixed += len(plan.counts) == 2 and plan.counts.tolist() == [1, 4]
        sim.scheduler.commit(*sim.draw(plan, sim.compute(plan)))
    assert mixed == 4 and sim.max_rows == 5, "three tokens next to the first prompt, then four chunks of four, then one"
    assert sim.times_computed() == 2 + 11 + 20 + 1


def test_the_youngest_is_preempted_when_pages_run_out() -> None:
    requests = [request(i, (i, i), 10) for i in range(3)]
    sim = Simulation(requests, num_pages=7, page_size=2, max_num_seqs=3, budget=64).run()
    assert sim.scheduler.num_preemptions > 0
    assert sim.ended[0] == 0, "the oldest is never held up"
    assert sim.first_started == [0, 1, 2]
    recomputed = [past for past, times in sim.computed.items() if times > 1]
    assert recomputed and not any(past[0] == 0 for past in recomputed)


def test_forced_preemption_recomputes_and_changes_nothing() -> None:
    requests = [request(i, (1, 2, 3), 8) for i in range(4)]
    sizes = dict(num_pages=50, page_size=2, max_num_seqs=4, budget=64)
    calm = Simulation(requests, **sizes).run()
    forced = Simulation(requests, **sizes, force=lambda step, running: running if step % 3 == 2 else ()).run()
    assert forced.scheduler.num_preemptions >= 8 and forced.times_computed() > calm.times_computed()
    assert forced.history == calm.history
    with pytest.raises(ValueError, match="named request 99; running are"):
        Simulation(requests, **sizes, force=lambda step, running: [99] if step else []).run()


def test_requests_that_can_never_fit_are_refused() -> None:
    def scheduler(**sizes: int) -> Scheduler:
        return Scheduler(
            PageAllocator(4, 4), **{"max_num_seqs": 2, "max_tokens_per_step": 8, "max_position": 99} | sizes
        )

    taken = scheduler()
    with pytest.raises(UserError, match=r"request 5: 10 prompt tokens \+ max_tokens 7 = 17.*4 pages \* 4 tokens = 16"):
        taken.add([request(4, (1,), 2), request(5, tuple(range(10)), 7)])
    assert not taken.has_work, "none is taken when one is refused"
    taken.add([request(5, tuple(range(10)), 6)])
    with pytest.raises(UserError, match="beyond the model's 12 positions"):
        scheduler(max_position=12).add([request(0, (1, 2, 3), 10)])
    with pytest.raises(UserError, match="at least one prompt token"):
        scheduler().add([request(0, (), 3)])
    with pytest.raises(UserError, match="max_num_seqs = 0"):
        scheduler(max_num_seqs=0)
    with pytest.raises(UserError, match="max_tokens_per_step = 0"):
        scheduler(max_tokens_per_step=0)


def test_a_request_of_exactly_the_capacity_runs_next_to_others() -> None:
    prompt = tuple(range(9))
    requests = [request(0, prompt, 3), request(1, prompt, 7), request(2, (1,), 15), request(3, prompt, 7)]
    sim = Simulation(requests, num_pages=4, page_size=4, max_num_seqs=4, budget=3).run()
    assert [len(h) for h in sim.history] == [12, 16, 16, 16]


def test_an_interrupted_leader_whose_last_prompt_token_comes_alone_is_no_decode_step() -> None:
    """It computes one token, and another draws from it: a burst would go on in the pages of the other."""
    requests = [request(i, (0, 0, 0), n) for i, n in enumerate([3, 6, 1, 2, 1, 1, 1, 1, 1])]
    sizes = dict(page_size=4, num_pages=3, max_num_seqs=3, budget=2, burst=3, grid=1)
    sim = Simulation(requests, **sizes, stop_at=lambda number, length: hash((number, length)) % 9 == 0)
    assert sim.run().scheduler.num_preemptions


def test_a_share_that_a_preempted_sequence_leaves_goes_to_those_without() -> None:
    """The decoding sequence has all of the budget, and is preempted for want of a page: the older one goes on."""
    requests = [request(i, (0, 0, 0), n) for i, n in enumerate([5, 3, 4, 5, 6, 4, 2, 5, 2])]
    sim = Simulation(
        requests, page_size=5, num_pages=2, max_num_seqs=3, budget=1, burst=3, depth=1, holds=0.6,
        stop_at=lambda number, length: hash((number, length)) % 9 == 0,
        force=lambda step, running: [r for r in running if hash((490, step, r)) % 9 == 0],
    ).run()
    assert sim.scheduler.num_preemptions


@st.composite
def traffic(draw: st.DrawFn) -> dict:
    page_size = draw(st.integers(1, 5))
    prompts = draw(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=14), min_size=1, max_size=4))
    requests = [
        request(i, tuple(prompts[draw(st.integers(0, len(prompts) - 1))]), draw(st.integers(1, 12)))
        for i in range(draw(st.integers(1, 12)))
    ]
    largest = max(-(-(len(r.tokens) + r.sampling.max_tokens) // page_size) for r in requests)
    return {
        "requests": requests,
        "page_size": page_size,
        "num_pages": largest + draw(st.integers(0, 12)),
        "max_num_seqs": draw(st.integers(1, 8)),
        "budget": draw(st.integers(1, 24)),
        "force_seed": draw(st.integers(0, 1000)),
        "stop_every": draw(st.integers(3, 20)),
        "depth": draw(st.sampled_from((0, 1, 3, 7))),
        "holds": draw(st.sampled_from((0.0, 0.6, 1.0))),
        "grid": draw(st.sampled_from((0, 0, 1, 4))), "share": draw(st.booleans()),
    }


@settings(max_examples=150, deadline=None)
@given(traffic())
def test_random_traffic(case: dict) -> None:
    """Under any sizes and forced preemptions all finish, none reads a wrong cache, and first tokens come in order."""
    force_seed, stop_every = case.pop("force_seed"), case.pop("stop_every")

    def force(step: int, running: tuple[int, ...]) -> list[int]:
        return [r for r in running if hash((force_seed, step, r)) % 9 == 0] if force_seed % 2 and step < 200 else []

    def stop_at(number: int, length: int) -> bool:
        return hash((number, length)) % stop_every == 0

    burst = 1 + force_seed % 5
    case["depth"] *= not case["grid"]  # with a state for each sequence there are no drafts
    sim = Simulation(**case, force=force if force_seed % 2 else None, stop_at=stop_at, burst=burst).run()
    for number, (r, history) in enumerate(zip(sim.requests, sim.history, strict=True)):
        expected = list(r.tokens)
        for length in range(1, r.sampling.max_tokens + 1):
            expected.append(next_token(tuple(expected), number))
            if stop_at(number, length):
                break
        assert history == expected, "tokens depend on the traffic"


@settings(max_examples=60, deadline=None)
@given(traffic())
def test_with_room_enough_nothing_is_computed_twice(case: dict) -> None:
    """Each distinct prompt once, each drawn token but the last once; a late sample one prompt token more."""
    for name in ("force_seed", "stop_every", "depth", "holds", "grid", "share"):
        case.pop(name)
    case["num_pages"] = 400
    sim = Simulation(**case).run()
    prompts = {r.tokens for r in sim.requests}
    least = sum(map(len, prompts)) + sum(r.sampling.max_tokens - 1 for r in sim.requests)
    late = sim.times_computed() - least
    assert 0 <= late <= len(sim.requests) - len(prompts)
    if case["max_num_seqs"] >= len(sim.requests) and case["budget"] >= 12 + sum(map(len, prompts)):
        assert late == 0
    assert sim.scheduler.num_preemptions == 0
    assert sim.times_computed() == sim.scheduler.num_computed_tokens


def test_a_burst_takes_its_pages_before_and_drops_what_follows_a_stop() -> None:
    requests = [request(i, (i, 1), 20) for i in range(3)]
    sizes = dict(page_size=4, max_num_seqs=3, budget=64, stop_at=lambda number, length: (number, length) == (1, 6))
    sim = Simulation(requests, num_pages=30, burst=8, **sizes).run()
    plain = Simulation(requests, num_pages=30, **sizes).run()
    assert sim.history == plain.history and [len(h) for h in sim.history] == [22, 8, 22]
    assert sim.bursts == 3  # 19 steps in bursts of 8, 8 and 3
    assert sim.times_computed() == plain.times_computed() + 3 == sim.scheduler.num_computed_tokens  # the dropped ones
    short = Simulation(requests, num_pages=9, burst=8, **sizes).run()  # pages for a part of a burst, then preemption
    assert short.history == plain.history and short.scheduler.num_preemptions > 0


def test_drafts_that_hold_save_steps_and_pages_of_others_are_given_back() -> None:
    requests = [request(i, (i, 1), 30) for i in range(3)]
    sizes = dict(num_pages=60, page_size=2, max_num_seqs=3, budget=64)
    plain = Simulation(requests, **sizes).run()
    for holds, depth in ((1.0, 7), (1.0, 1), (0.6, 3), (0.0, 7)):
        sim = Simulation(requests, **sizes, depth=depth, holds=holds)
        while sim.scheduler.has_work:
            sim.step()
            held = [-(-(len(sim.history[s.request]) - 1) // 2) for s in sim.scheduler.running]
            assert sim.allocator.num_used == sum(held), "pages of drafts that did not hold"
        assert sim.history == plain.history and sim.allocator.num_used == 0
        assert sim.drafted > 0 and (sim.accepted == sim.drafted * holds or holds == 0.6)
        assert (sim.scheduler.num_steps < plain.scheduler.num_steps) == (holds > 0)


def test_where_pages_run_short_there_are_no_drafts() -> None:
    requests = [request(i, (i, 1), 20) for i in range(3)]
    sizes = dict(page_size=4, max_num_seqs=3, budget=64)
    sim = Simulation(requests, num_pages=8, **sizes, burst=4, depth=7, holds=0.6).run()
    plain = Simulation(requests, num_pages=40, **sizes).run()
    assert sim.history == plain.history and sim.scheduler.num_preemptions > 0 and sim.drafted > 0


def test_samples_that_come_later_fork_from_a_preempted_leader() -> None:
    """The leader recomputes prompt and drawn tokens in chunks; the row after the prompt then lies inside a chunk."""
    prompt = (1, 2, 3, 4, 5, 6)
    force: list[int] = []
    first, later = request(0, prompt, 9), request(1, prompt, 4)
    sim = Simulation([first], num_pages=50, page_size=4, max_num_seqs=4, budget=4, force=lambda step, running: force)
    for _ in range(6):  # two chunks of the prompt, then one token a step
        sim.step()
    assert len(sim.history[0]) == 6 + 5
    sim.add([later])
    force.append(0)
    plan = sim.scheduler.schedule()
    force.clear()
    assert plan.counts.tolist() == [4] and not len(plan.sample_rows)
    sim.scheduler.commit(*sim.draw(plan, sim.compute(plan)))
    plan = sim.scheduler.schedule()
    assert plan.sample_requests.tolist() == [1] and plan.sample_rows.tolist() == [1] and plan.starts.tolist() == [4]
    sim.scheduler.commit(*sim.draw(plan, sim.compute(plan)))
    sim.run()


# ---- conversations --------------------------------------------------------------------------------------------------


def turn(number: int, tokens: tuple[int, ...], max_tokens: int, longest: int = 36) -> Request:
    return Request(number, tokens, SamplingParams(max_tokens=max_tokens), max_conversation=longest)


def test_the_next_turn_computes_only_new_tokens() -> None:
    sim = Simulation([turn(7, (1, 2, 3, 4, 5), 4)], num_pages=20, page_size=4, max_num_seqs=2, budget=64)
    while sim.scheduler.has_work:
        sim.step()
    assert sim.scheduler.num_computed_tokens == 5 + 3 and sim.allocator.num_used == 2, "9 tokens, keys of 8"
    sim.add([turn(7, (*sim.history[0], 8, 9), 3)])
    assert sim.scheduler.schedule().starts.tolist() == [8]
    assert sim.scheduler.num_computed_tokens == 8 + 3, "the last drawn token and the two new ones"


def test_a_turn_that_stops_within_a_burst_keeps_only_keys_of_its_own_tokens() -> None:
    sizes = dict(num_pages=20, page_size=2, max_num_seqs=2, budget=64, burst=8)
    sim = Simulation([turn(7, (1, 2), 30)], **sizes, stop_at=lambda number, length: length == 3)
    while sim.scheduler.has_work:
        sim.step()
    assert sim.bursts == 1 and sim.scheduler.num_computed_tokens == 2 + 8 and len(sim.history[0]) == 5
    assert sim.allocator.num_used == 2, "four keys are kept; the burst had taken pages for ten"
    sim.add([turn(7, (*sim.history[0], 5), 3)])
    sim.step()
    sim.scheduler.forget([7])
    assert sim.allocator.num_used == 0


@pytest.mark.parametrize(("grid", "kept"), [(1, 0), (3, 0), (4, 4), (8, 4)])
def test_a_state_that_went_beyond_the_end_is_not_kept(grid: int, kept: int) -> None:
    """Of 5 tokens the turn keeps keys of 4; the burst computed 7, beyond a point of a grid of 3, not of 4 or 8."""
    sizes = dict(num_pages=20, page_size=2, max_num_seqs=2, budget=64, burst=5, grid=grid)
    sim = Simulation([turn(7, (1, 2), 30)], **sizes, stop_at=lambda number, length: length == 3)
    while sim.scheduler.has_work:
        sim.step()
    assert sim.scheduler.num_computed_tokens == 7 and sim.scheduler.turns.kept(7)[1] == kept
    assert sim.rows.num_used == (kept > 0)
    sim.add([turn(7, (*sim.history[0], 5), 3)])
    assert sim.scheduler.schedule().starts.tolist() == [kept]


def test_rows_of_kept_states_go_before_a_sequence_waits() -> None:
    """Six rows for three sequences: the states of conversations that finished first go first."""
    sim = Simulation(
        [turn(i, (i, 1), 1) for i in range(9)], num_pages=90, page_size=2, max_num_seqs=3, budget=64, grid=1
    )
    while sim.scheduler.has_work:
        sim.step()
    assert [sim.scheduler.turns.kept(i)[1] for i in range(9)] == [0] * 3 + [2] * 6 and sim.rows.num_used == 6
    assert sim.scheduler.num_preemptions == 0


@pytest.mark.parametrize(("prompt", "copies"), [((1, 2, 3), True), ((1, 2, 3, 4), False)])
def test_a_kept_page_that_others_share_is_copied(prompt: tuple[int, ...], copies: bool) -> None:
    """Two conversations from one prompt, of one drawn token each: the page where the prompt ends is both's."""
    sim = Simulation([turn(i, prompt, 1) for i in (0, 1)], num_pages=20, page_size=4, max_num_seqs=2, budget=64)
    sim.step()
    assert sim.allocator.num_used == 1 and not sim.scheduler.has_work
    sim.add([turn(i, (*prompt, sim.history[i][-1], 9, i), 2) for i in (0, 1)])
    plan = sim.scheduler.schedule()
    assert len(plan.copies) == copies and plan.starts.tolist() == [len(prompt)] * 2, "the second may write in place"
    sim.scheduler.commit(*sim.draw(plan, sim.compute(plan)))
    while sim.scheduler.has_work:
        sim.step()
    sim.scheduler.forget([0, 1])
    assert sim.allocator.num_used == 0


def test_kept_pages_go_before_a_running_sequence_is_preempted_the_first_finished_first() -> None:
    sizes = dict(num_pages=6, page_size=2, max_num_seqs=3, budget=64)
    sim = Simulation([turn(1, (1, 2, 3), 1, 8), turn(2, (2, 2, 2), 2, 8), request(3, (5, 5), 6)], **sizes)
    while 2 not in sim.ended:
        sim.step()
    assert sim.scheduler.num_preemptions == 0 and sim.ended == [0, 1, 2]
    assert sim.scheduler.turns.kept(1) == ([], 0), "its turn was the first to finish"
    assert sim.scheduler.turns.kept(2)[1] == 4
    sim.scheduler.check_integrity()
    sim.add([turn(1, (*sim.history[0], 7), 2, 8)])
    plan = sim.scheduler.schedule()
    assert plan.starts.tolist() == [0], "from the first token"
    sim.scheduler.commit(*sim.draw(plan, sim.compute(plan)))


def test_waiting_requests_take_the_pages_of_conversations_between_turns() -> None:
    """Else nothing could run although nothing is running; and a conversation's own pages are its last to go."""
    sim = Simulation([turn(i, (i, 1, 1), 1, 16) for i in range(3)], num_pages=8, page_size=2, max_num_seqs=3, budget=64)
    sim.step()
    assert sim.allocator.num_used == 6
    sim.add([turn(0, (*sim.history[0], 1, 1, 1), 9, 16)])  # needs all eight pages
    plan = sim.scheduler.schedule()
    assert plan.starts.tolist() == [3]
    sim.scheduler.commit(*sim.draw(plan, sim.compute(plan)))
    while sim.scheduler.has_work:
        sim.step()
    assert sim.allocator.num_used == 8 and sim.scheduler.num_preemptions == 0
    sim.add([request(9, (4, 4), 3)])
    while sim.scheduler.has_work:
        sim.step()
    assert sim.allocator.num_used == 0, "one page was asked for; pages are kept all or none"


def test_turns_that_do_not_fit_their_conversation_are_refused() -> None:
    sim = Simulation([turn(7, (1, 2, 3), 2)], num_pages=20, page_size=4, max_num_seqs=2, budget=64)
    with pytest.raises(ValueError, match="request 7: a turn of this conversation still waits or runs"):
        sim.add([turn(7, (1, 2, 3), 2)])
    sim.step(), sim.step()
    wrong = [(1, 2, 4, *sim.history[0][3:], 5), tuple(sim.history[0][:-1])]
    for tokens in wrong:
        for other in (turn(7, tokens, 2), request(7, tokens, 2)):
            with pytest.raises(ValueError, match="request 7: its . tokens do not begin with the 5"):
                sim.add([request(1, (1,), 1), other])
    follow = (*sim.history[0], 5)
    with pytest.raises(ValueError, match="two turns of one conversation"):
        sim.add([turn(7, follow, 2), turn(7, follow, 2)])
    with pytest.raises(UserError, match=r"request 8: 3 prompt.* max_tokens 6 = 9, beyond its max_conversation = 8"):
        sim.add([turn(8, (1, 2, 3), 6, 8)])
    with pytest.raises(UserError, match="begins with 3 tokens and may reach 81, beyond the KV cache of 20 pages"):
        sim.add([turn(8, (1, 2, 3), 6, 81)])
    assert not sim.scheduler.has_work, "all or none"
    sim.scheduler.forget([7])
    sim.add([turn(7, wrong[0], 2)])


def test_a_leader_that_is_forgotten_leaves_its_prompt_to_another() -> None:
    prompt = tuple(range(10))
    sim = Simulation([request(i, prompt, 3) for i in range(3)], num_pages=20, page_size=4, max_num_seqs=3, budget=4)
    sim.step()
    sim.scheduler.forget([0, 99])
    while sim.scheduler.has_work:
        sim.step()
    assert sim.ended == [1, 2] and sim.allocator.num_used == 0
    assert sim.computed[prompt] == 1 and sim.computed[prompt[:4]] == 2


def test_a_turn_forks_from_a_request_that_computes_the_same_tokens() -> None:
    """What was kept for the turn is then of no use, and is given back."""
    sim = Simulation([turn(1, (1, 2, 3, 4, 5), 2)], num_pages=20, page_size=4, max_num_seqs=3, budget=64)
    while sim.scheduler.has_work:
        sim.step()
    tokens = (*sim.history[0], 9)
    sim.add([request(2, tokens, 3), turn(1, tokens, 3)])
    sim.step()
    assert sim.computed[tokens] == 1 and sim.first_started[-2:] == [1, 2]
    while sim.scheduler.has_work:
        sim.step()
    sim.scheduler.forget([1])
    assert sim.allocator.num_used == 0


def test_equal_beginnings_are_computed_once() -> None:
    """Of other prompts, and after the first has gone; whole pages, short of the last token, until they are reused."""
    system, sizes = tuple(range(10, 22)), dict(page_size=4, max_num_seqs=3, budget=64, share=True)
    sim = Simulation([request(0, (*system, 1), 2)], num_pages=8, **sizes)
    sim.step()
    sim.add([request(1, (*system, 2, 3), 2), request(2, system, 2), request(3, (*system[:5], 9, 9, 9), 2)])
    plan = sim.scheduler.schedule()
    assert plan.starts.tolist() == [13, 12, 8], "three pages, and two for the one whose last token is their end"
    assert plan.block_table[1, :3].tolist() == plan.block_table[0, :3].tolist()
    sim.commit(plan, *(x[None] for x in sim.draw(plan, sim.compute(plan))), np.ones(3, dtype=np.int64))
    sim.run()
    sim.add([request(4, (*system, 7), 2)])
    plan = sim.scheduler.schedule()
    assert plan.starts.tolist() == [12], "nobody held them"
    sim.commit(plan, *(x[None] for x in sim.draw(plan, sim.compute(plan))), np.ones(1, dtype=np.int64))
    sim.run()
    sim.add([request(5, (30,) * 31, 1)])  # takes all pages
    sim.run()
    sim.add([request(6, (*system, 8), 1)])
    assert sim.scheduler.schedule().starts.tolist() == [0] and len(sim.allocator.beginnings) <= 8


def test_pages_of_an_interrupted_sequence_are_computed_again() -> None:
    """As one that is preempted must be: nobody keeps its pages. New requests find them."""
    force: list[int] = []
    sizes = dict(num_pages=40, page_size=2, max_num_seqs=2, budget=64, share=True)
    sim = Simulation([request(0, (1, 2, 3, 4, 5), 9)], **sizes, force=lambda step, running: force)
    for _ in range(4):
        sim.step()
    force.append(0)
    plan = sim.scheduler.schedule()
    force.clear()
    assert plan.starts.tolist() == [0] and plan.counts.tolist() == [9]
    sim.commit(plan, *(x[None] for x in sim.draw(plan, sim.compute(plan))), np.ones(1, dtype=np.int64))
    sim.add([request(1, (*sim.history[0][:8], 7), 2)])
    assert sim.scheduler.schedule().starts.tolist()[-1] == 8


@st.composite
def conversations(draw: st.DrawFn) -> dict:
    """Conversations and plain requests that join, reply, are cancelled, asked again, and forgotten at any time."""
    page_size = draw(st.integers(1, 5))
    prompts = draw(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=10), min_size=1, max_size=3))
    talks = []
    for _ in range(draw(st.integers(1, 10))):
        turns = draw(st.lists(st.tuples(
            st.sampled_from((1, 1, 2, 3, 8)), st.lists(st.integers(0, 3), max_size=6), st.integers(0, 9)),
            min_size=1, max_size=4,
        ))
        prompt = tuple(draw(st.sampled_from(prompts)))
        talks.append({
            "prompt": prompt, "turns": turns, "joins": draw(st.sampled_from((0, 0, 0, 3, 15))),
            "plain": draw(st.booleans()), "forgotten": draw(st.one_of(st.none(), st.none(), st.integers(0, 40))),
            "cancelled": draw(st.sets(st.integers(0, 40), max_size=3)),
            "longest": len(prompt) + sum(n + len(reply) for n, reply, _ in turns),
        })
    largest = max(-(-t["longest"] // page_size) for t in talks)
    return {
        "talks": talks, "page_size": page_size, "num_pages": largest + draw(st.integers(0, 15)),
        "max_num_seqs": draw(st.integers(1, 6)), "budget": draw(st.integers(1, 16)), "burst": draw(st.integers(1, 5)),
        "force_seed": draw(st.integers(0, 100)), "stop_every": draw(st.integers(3, 20)),
        "depth": draw(st.sampled_from((0, 1, 3, 7))), "holds": draw(st.sampled_from((0.0, 0.6, 1.0))),
        "grid": draw(st.sampled_from((0, 0, 1, 4))), "share": draw(st.booleans()),
    }


def play(case: dict, room: bool = False) -> tuple[Simulation, list[list[int]]]:
    """Run the conversations of `case`; what each came to. `room`: pages for all, and nothing disturbs."""
    talks, stop_every, seed = case["talks"], case["stop_every"], case["force_seed"]

    def force(step: int, running: tuple[int, ...]) -> list[int]:
        return [r for r in running if hash((seed, step, r)) % 9 == 0] if step < 200 else []

    sim = Simulation(
        [], num_pages=999 if room else case["num_pages"], page_size=case["page_size"],
        max_num_seqs=case["max_num_seqs"], budget=case["budget"], burst=case["burst"],
        depth=0 if room or case["grid"] else case["depth"], holds=case["holds"], grid=case["grid"],
        share=case["share"] and not room,
        force=force if seed % 2 and not room else None,
        stop_at=lambda number, length: hash((number, length)) % stop_every == 0,
    )
    known = [list(t["prompt"]) for t in talks]
    due = {i: t["joins"] for i, t in enumerate(talks)}  # when each says something next
    done, left = [0] * len(talks), set(range(len(talks)))
    at: dict[int, int] = {}  # place of its last request -> conversation
    asked: set[int] = set()  # those with a request that waits or runs
    for now in range(3000):
        for i in [i for i in left if not room and talks[i]["forgotten"] == now]:
            sim.scheduler.forget([i])
            left.remove(i), due.pop(i, None), asked.discard(i)
        for i in [i for i in asked if not room and now in talks[i]["cancelled"]]:
            sim.scheduler.cancel([i, 999])
            sim.scheduler.check_integrity()
            asked.remove(i)
            due[i] = now + now % 3  # the same again, perhaps at once
        for i in [i for i in due if due[i] <= now]:
            del due[i]
            if done[i] == len(talks[i]["turns"]):
                sim.scheduler.forget([i])
                left.remove(i)
                continue
            at[len(sim.requests)] = i
            asked.add(i)
            make = request if talks[i]["plain"] else turn
            extra = () if talks[i]["plain"] else (talks[i]["longest"],)
            sim.add([make(i, tuple(known[i]), talks[i]["turns"][done[i]][0], *extra)])
        if sim.scheduler.has_work:
            for place in sim.step():
                i = at[place]
                asked.remove(i)
                _, reply, delay = talks[i]["turns"][done[i]]
                done[i] += 1
                known[i] = sim.history[place] + reply
                due[i] = now + 1 + delay
        elif not left:
            break
    assert not left, "the scheduler does not come to an end"
    assert sim.allocator.num_used == 0 and not sim.scheduler.prompts._all and not len(sim.scheduler.turns)
    assert sim.rows is None or sim.rows.num_used == 0
    return sim, known


def alone(talk: dict, number: int, stop_every: int) -> list[int]:
    known = list(talk["prompt"])
    for max_tokens, reply, _ in talk["turns"]:
        for length in range(1, max_tokens + 1):
            known.append(next_token(tuple(known), number))
            if hash((number, length)) % stop_every == 0:
                break
        known += reply
    return known


@settings(max_examples=200, deadline=None)
@given(conversations())
def test_random_conversations(case: dict) -> None:
    """Whoever joins, replies, leaves or asks again, and when: a turn is what it would be alone, and no page is lost."""
    _, known = play(case)
    for i, (talk, got) in enumerate(zip(case["talks"], known, strict=True)):
        want = alone(talk, i, case["stop_every"])
        assert got == want if talk["forgotten"] is None else got == want[: len(got)]


@settings(max_examples=100, deadline=None)
@given(conversations())
def test_with_room_enough_no_turn_computes_what_was_computed(case: dict) -> None:
    """Each token of a conversation once. Those that start from one prompt may share or repeat that."""
    for talk in case["talks"]:
        talk["plain"] = False
    for i, talk in enumerate(case["talks"]):
        talk["prompt"] = (100 + i, *talk["prompt"])
        talk["longest"] += 1
    case["stop_every"] = 10**9
    case["burst"] = 1
    sim, known = play(case, room=True)
    assert set(sim.computed.values()) == {1}
    # the last drawn token is computed only if another turn or reply follows it, and a last reply never is
    want = sum(len(k) - len(t["turns"][-1][1]) - 1 for t, k in zip(case["talks"], known, strict=True))
    assert sim.times_computed() == want == sim.scheduler.num_computed_tokens
