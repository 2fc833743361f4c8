"""An engine that is never idle, as a server's: what it holds does not grow, and requests may be cancelled."""

from __future__ import annotations

import gc
import tracemalloc
from collections import defaultdict, deque
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hash_model import SPEC, HashModel, Letters, make_engine, straight

from jetrl.engine.engine import PagedEngine
from jetrl.engine.plan import NewTokens
from jetrl.engine.settings import EngineSettings
from jetrl.engine.speculation.speculator import build_speculator
from jetrl.engine.stopper import Stopper
from jetrl.types import Completion, ForwardBatch, Request, SamplingParams, WeightSet


class Stand(HashModel):
    """Hidden states from token and position alone: a model that takes no time."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.table = 1.5 * torch.randn(SPEC.max_position, SPEC.vocab_size, SPEC.vocab_size, generator=generator)

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        return torch.stack((batch.positions, batch.tokens), 1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.table[hidden[:, 0], hidden[:, 1]]


def stream() -> Iterator[Request]:
    """Requests without end: groups of four with one prompt, each with stop tokens of its own, some with strings."""
    generator = np.random.default_rng(0)
    for number in range(10**6):
        prompt = np.random.default_rng(number // 4).integers(1, 40, 3 + number // 4 % 9)
        stop = (("ab", "C") if number % 3 == 0 else ())
        sampling = SamplingParams(
            int(generator.integers(1, 12)), stop=stop, stop_token_ids=(int(generator.integers(40)), number % 40),
            temperature=0.0 if number % 7 == 0 else 1.0, top_k=5 if number % 5 == 0 else 0,
        )
        yield Request(number, tuple(prompt.tolist()), sampling, max_conversation=60 if number % 6 == 0 else None)


class Traffic:
    """Keeps an engine busy; each tenth request is cancelled on its way, each sixth is a conversation of two turns."""

    def __init__(self, engine: PagedEngine) -> None:
        self.engine, self.requests = engine, stream()
        self.live: dict[int, Request] = {}
        self.second: set[int] = set()
        self.heard: dict[int, list[NewTokens]] = defaultdict(list)
        self.completed = self.cancelled = 0
        self.last: deque[tuple[Request, Completion]] = deque(maxlen=12)
        engine.on_tokens = lambda news: [self.heard[n.request_id].append(n) for n in news]  # type: ignore[assignment]

    def round(self, more: bool = True) -> None:
        new = [next(self.requests) for _ in range(40 - len(self.live) if more else 0)]
        self.engine.add(new)
        self.live |= {r.id: r for r in new}
        gone = [r.id for r in new if r.id % 10 == 3] + [i for i in self.live if i % 10 == 8 and self.heard.get(i)]
        self.engine.cancel(gone)
        for i in gone:
            self.end(i)
        self.cancelled += len(gone)
        if self.engine.has_work:
            self.engine.step()
        for c in self.engine.collect():
            self.take(c)

    def take(self, c: Completion) -> None:
        news, request = self.heard.pop(c.request_id), self.live[c.request_id]
        assert np.array_equal(np.concatenate([n.tokens for n in news]), c.tokens)
        assert np.array_equal(np.concatenate([n.logprobs for n in news]), c.logprobs)
        assert [n.start for n in news] == [0, *np.cumsum([len(n.tokens) for n in news])[:-1]]
        self.completed += 1
        self.last.append((request, c))
        if request.max_conversation is None or c.request_id in self.second:
            self.end(c.request_id)
            return
        again = Request(c.request_id, (*request.tokens, *c.tokens.tolist(), 5), request.sampling, 60)
        self.second.add(c.request_id)
        self.live[c.request_id] = again
        self.engine.add([again])

    def end(self, i: int) -> None:
        if self.live.pop(i).max_conversation is not None:
            self.engine.forget([i])
        self.second.discard(i)
        self.heard.pop(i, None)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "drafts"), [(10_000, "off"), (2_400, "on")])
def test_what_it_holds_does_not_grow(number: int, drafts: str) -> None:
    """The cache is small enough that sequences are preempted, too."""
    settings = EngineSettings(page_size=4, max_num_seqs=24, max_tokens_per_step=64, kv_cache_tokens=160)
    engine = PagedEngine(Stand(), Letters(), "flow", settings, build_speculator(drafts, 3, 24))  # type: ignore[arg-type]
    engine.load(WeightSet(1, "flow", {}))
    traffic, before = Traffic(engine), 0
    tracemalloc.start()
    try:
        while traffic.completed + traffic.cancelled < number:
            traffic.round()
            assert engine.has_work and engine.stats is None, "it was idle"
            if not before and traffic.completed + traffic.cancelled >= number // 4:
                gc.collect()
                before = tracemalloc.get_traced_memory()[0]
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    # a single number for each request would take 32 bytes; what is under way differs between the two moments
    assert grown < 40_000 < 32 * number * 3 // 4, f"{grown} bytes more after {number} requests"
    engine._scheduler.check_integrity()
    while engine.has_work or traffic.live:
        traffic.round(more=False)
    assert engine.stats is not None and engine.stats.preemptions > number // 500 and traffic.cancelled > number // 20
    assert engine._scheduler.allocator.num_used == 0 and not engine._scheduler.prompts._all
    for request, completion in traffic.last:
        alone = PagedEngine(Stand(), Letters(), "flow")  # type: ignore[arg-type]
        alone.load(WeightSet(1, "flow", {}))
        assert alone.generate([request]) == [completion]


def ask(i: int, prompt: tuple[int, ...] = (), new: int = 12, longest: int | None = None) -> Request:
    return Request(i, prompt or (1 + i, 2, 3, 4, 5, 6, 7), SamplingParams(new, ignore_eos=True), longest)


def run(engine: PagedEngine) -> list[Completion]:
    while engine.has_work:
        engine.step()
        engine._scheduler.check_integrity()
    return engine.collect()


def expect(completions: list[Completion], *requests: Request) -> None:
    """These have completed, as they would alone; and no page is left."""
    assert sorted(c.request_id for c in completions) == [r.id for r in requests]
    for c in completions:
        tokens, logprobs = straight(HashModel(), next(r for r in requests if r.id == c.request_id))
        assert c.tokens.tolist() == tokens and c.logprobs.tolist() == logprobs


STATES: dict[str, tuple[dict[str, int], Callable[[PagedEngine], bool]]] = {
    "waiting": ({"max_num_seqs": 1}, lambda e: any(s.id == 1 for s in e._scheduler.waiting)),
    "prefilling": (
        {"max_tokens_per_step": 4},
        lambda e: any(s.id == 1 and 0 < e._scheduler.slots.computed[s.slot] < 7 for s in e._scheduler.running),
    ),
    "running": ({}, lambda e: any(s.id == 1 and e._scheduler.slots.length[s.slot] > 9 for s in e._scheduler.running)),
    "preempted": (
        {"kv_cache_tokens": 36}, lambda e: any(s.id == 1 and len(s.tokens) > 7 for s in e._scheduler.waiting),
    ),
}


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("state", STATES)
def test_a_request_is_cancelled(state: str, drafts: bool) -> None:
    sizes, reached = STATES[state]
    engine = make_engine(page_size=4, **sizes)
    if drafts:
        engine.speculator = build_speculator("on", 3, engine.settings.max_num_seqs)
    engine.add([ask(0), ask(1), ask(2)])
    for _ in range(40):
        if reached(engine):
            break
        engine.step()
    assert reached(engine)
    engine.cancel([1, 77])
    engine._scheduler.check_integrity()
    assert not any(s.id == 1 for s in (*engine._scheduler.running, *engine._scheduler.waiting))
    expect(run(engine), ask(0), ask(2))
    assert engine.stats is not None and engine.stats.num_pages > 0
    expect(engine.generate([ask(1)]), ask(1))  # asked again, it is what it would have been


def test_the_last_request_is_cancelled_and_the_engine_rests() -> None:
    engine = make_engine()
    engine.add([ask(1)])
    engine.step()
    engine.cancel([1])
    assert not engine.has_work and engine.collect() == [] and engine.stats is not None


@pytest.mark.parametrize("gone", [0, 1])
@pytest.mark.parametrize("steps", [1, 3])
def test_one_of_a_group_is_cancelled(gone: int, steps: int) -> None:
    """The one that computes the prompt for all, or another; before and after it is computed."""
    prompt = tuple(range(1, 11))
    engine = make_engine(page_size=4, max_tokens_per_step=6)
    group = [ask(i, prompt) for i in range(3)]
    engine.add(group)
    for _ in range(steps):
        engine.step()
    engine.cancel([gone])
    expect(run(engine), *(r for r in group if r.id != gone))


@pytest.mark.parametrize("started", [False, True])
def test_a_cancelled_turn_is_as_if_never_asked(started: bool) -> None:
    """The conversation goes on from its last finished turn: the same turn again, or another one."""
    engine = make_engine(page_size=4, max_num_seqs=1)
    engine.add([ask(1, new=5, longest=60)])
    first = run(engine)
    expect(first, ask(1, new=5))
    engine.cancel([1])  # between two turns: nothing waits or runs
    known = (*ask(1).tokens, *first[0].tokens.tolist())
    if not started:
        engine.add([ask(5)])
        engine.step()
    for reply in ((8, 9), (7,), (8, 9)):
        turn = ask(1, (*known, *reply), 4, 60)
        engine.add([turn])
        engine.step()
        with pytest.raises(ValueError, match="a turn of this conversation still waits or runs"):
            engine.add([turn])
        engine.cancel([1])
        engine._scheduler.check_integrity()
    assert bool(engine._scheduler.turns.kept(1)[0]) == (not started), "what a turn took over is not kept"
    with pytest.raises(ValueError, match="do not begin with the 12 of the"):
        engine.add([ask(1, (9, 9), 4, 60)])
    engine.add([turn])
    found = run(engine)
    expect([c for c in found if c.request_id == 1], turn)
    assert engine.stats is None, "the conversation is open"
    engine.forget([1])
    assert engine.stats is not None


def test_a_cancelled_first_turn_leaves_no_conversation() -> None:
    engine = make_engine()
    engine.add([ask(1, longest=60)])
    engine.step()
    engine.cancel([1])
    assert engine.stats is not None and not len(engine._scheduler.turns)
    engine.add([ask(1, (3, 3), 4, 60)])
    expect(run(engine), ask(1, (3, 3), 4))


def test_a_listener_that_fails_ends_the_step() -> None:
    engine = make_engine()

    def broken(news: list[NewTokens]) -> None:
        raise RuntimeError("no")

    engine.on_tokens = broken
    engine.add([ask(1)])
    with pytest.raises(RuntimeError, match="no"):
        engine.step()
    engine.on_tokens = None
    assert not engine.has_work
    expect(engine.generate([ask(1)]), ask(1))


def test_slots_with_equal_stop_tokens_are_compared_once() -> None:
    """Kinds of stop tokens that no slot has any more are dropped."""
    stopper = Stopper(frozenset({0}), Letters(), 3)
    for number in range(200):
        stopper.put(number % 3, SamplingParams(1, stop_token_ids=(number // 2,), ignore_eos=number % 5 == 0))
        assert len(stopper._ids) <= 4 and sum(stopper._slots_of.values()) == 3
        assert set(stopper._slots_of) == set(stopper._ids) == set(stopper._kind.tolist())
    for slot, ids in enumerate([(7,), (7,), (8, 9)]):
        stopper.put(slot, SamplingParams(1, stop_token_ids=ids))
    assert len(stopper._ids) == 2
    stop = stopper.check(np.array([2, 0, 1]), np.array([[7, 7, 0], [9, 8, 1]]))
    assert stop.tolist() == [[False, True, True], [True, False, False]]
