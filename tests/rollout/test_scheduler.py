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

from jetrl.errors import UserError
from jetrl.rollout.pages import PageAllocator
from jetrl.rollout.plan import Plan
from jetrl.rollout.scheduler import ForcePreempt, Scheduler
from jetrl.types import Request, SamplingParams


def request(number: int, tokens: tuple[int, ...], max_tokens: int) -> Request:
    return Request(number, tokens, SamplingParams(max_tokens=max_tokens))


def next_token(history: tuple[int, ...], number: int) -> int:
    """The 'model' and 'sampler': what follows depends on the whole history and on the request."""
    return hash((history, number)) % 50


class Simulation:
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
    ) -> None:
        self.burst, self.bursts = burst, 0
        self.requests, self.page_size, self.budget, self.stop_at = requests, page_size, budget, stop_at
        self.allocator = PageAllocator(num_pages, page_size)
        self.scheduler = Scheduler(
            self.allocator, max_num_seqs=max_num_seqs, max_tokens_per_step=budget, max_position=10_000,
            force_preempt=force,
        )  # fmt: skip
        self.scheduler.add(requests)
        self.history = [list(r.tokens) for r in requests]
        self.cache: dict[tuple[int, int], tuple[int, ...]] = {}
        self.computed: dict[tuple[int, ...], int] = {}  # how often each history was computed
        self.first_started: list[int] = []
        self.ended: list[int] = []
        self.max_rows = 0

    def run(self, max_steps: int = 5000) -> Simulation:
        while self.scheduler.has_work:
            assert self.scheduler.num_steps < max_steps, "the scheduler does not come to an end"
            plan, steps = self.scheduler.schedule(), 1
            self.scheduler.check_integrity()
            # as the runner decides it: one token of each sequence, each drawing from its own row
            draws = plan.sample_rows.tolist() == list(range(len(plan.counts)))
            if self.burst > 1 and draws and (plan.counts == 1).all():
                plan, steps = self.scheduler.extend(self.burst)
                self.bursts += steps > 1
                self.scheduler.check_integrity()
            drawn = [self.draw(plan, self.compute(plan))]
            for step in range(1, steps):  # each from the tokens of the one before, also beyond a stop
                later = replace(
                    plan, starts=plan.starts + step, tokens=drawn[-1][0], positions=plan.positions + step,
                    copies=plan.copies[:0], sample_positions=plan.sample_positions + step,
                )  # fmt: skip
                drawn.append(self.draw(later, self.compute(later)))
            tokens, stop = (np.stack(column) for column in zip(*drawn, strict=True))
            ended = self.scheduler.commit(tokens, stop)
            for column, number in enumerate(plan.sample_requests.tolist()):  # forget what came after the stop
                if stop[:, column].any():
                    wasted = steps - 1 - int(stop[:, column].argmax())
                    del self.history[number][len(self.history[number]) - wasted :]
            self.ended.extend(plan.sample_requests[ended].tolist())
            self.scheduler.check_integrity()
        assert self.allocator.num_used == 0
        assert sorted(self.ended) == list(range(len(self.requests)))
        return self

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
        return histories

    def draw(self, plan: Plan, histories: list[tuple[int, ...]]) -> tuple[np.ndarray, np.ndarray]:
        assert len(set(plan.sample_requests.tolist())) == len(plan.sample_requests), "a request draws twice in a step"
        tokens, stop = [], []
        for row, number, position in zip(
            plan.sample_rows.tolist(), plan.sample_requests.tolist(), plan.sample_positions.tolist(), strict=True
        ):
            known = self.history[number]
            assert histories[row] == tuple(known) and position == len(known), "drawn from another sequence's row"
            if position == len(self.requests[number].tokens):
                self.first_started.append(number)
            known.append(next_token(tuple(known), number))
            tokens.append(known[-1])
            stop.append(self.stop_at(number, len(known) - len(self.requests[number].tokens)))
        return np.array(tokens, dtype=np.int64), np.array(stop, dtype=bool)

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


def test_samples_beyond_the_slots_reuse_the_held_prompt() -> None:
    requests = [request(i, tuple(range(10)), 3) for i in range(6)]
    sim = Simulation(requests, num_pages=100, page_size=4, max_num_seqs=2, budget=64).run()
    # four late samples compute the last prompt token again, to draw their first token from it
    assert sim.times_computed() == 10 + 4 * 1 + 6 * 2
    assert sim.first_started == list(range(6))


def test_long_prompts_are_chunked_beside_decoding() -> None:
    requests = [request(0, (1, 2), 12), request(1, tuple(range(20)), 2)]
    sim = Simulation(requests, num_pages=100, page_size=4, max_num_seqs=4, budget=5)
    mixed = 0
    while sim.scheduler.has_work:
        plan = sim.scheduler.schedule()
        mixed += len(plan.counts) == 2 and plan.counts.tolist() == [1, 4]
        tokens, stop = sim.draw(plan, sim.compute(plan))
        sim.scheduler.commit(tokens, stop)
    assert mixed == 4 and sim.max_rows == 5, "three tokens beside the first prompt, then four chunks of four, then one"
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


def test_a_request_of_exactly_the_capacity_runs_beside_others() -> None:
    prompt = tuple(range(9))
    requests = [request(0, prompt, 3), request(1, prompt, 7), request(2, (1,), 15), request(3, prompt, 7)]
    sim = Simulation(requests, num_pages=4, page_size=4, max_num_seqs=4, budget=3).run()
    assert [len(h) for h in sim.history] == [12, 16, 16, 16]


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
    case.pop("force_seed"), case.pop("stop_every")
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


def test_samples_that_come_later_fork_from_a_preempted_leader() -> None:
    """The leader recomputes prompt and drawn tokens in chunks; the row after the prompt then lies inside a chunk."""
    prompt = (1, 2, 3, 4, 5, 6)
    force: list[int] = []
    first, later = request(0, prompt, 9), request(1, prompt, 4)
    sim = Simulation([first], num_pages=50, page_size=4, max_num_seqs=4, budget=4, force=lambda step, running: force)
    for _ in range(6):  # two chunks of the prompt, then one token a step
        plan = sim.scheduler.schedule()
        sim.scheduler.commit(*sim.draw(plan, sim.compute(plan)))
    assert len(sim.history[0]) == 6 + 5
    sim.requests.append(later)
    sim.history.append(list(prompt))
    sim.scheduler.add([later])
    force.append(0)
    plan = sim.scheduler.schedule()
    force.clear()
    assert plan.counts.tolist() == [4] and not len(plan.sample_rows)
    sim.scheduler.commit(*sim.draw(plan, sim.compute(plan)))
    plan = sim.scheduler.schedule()
    assert plan.sample_requests.tolist() == [1] and plan.sample_rows.tolist() == [1] and plan.starts.tolist() == [4]
    sim.scheduler.commit(*sim.draw(plan, sim.compute(plan)))
    sim.run()
