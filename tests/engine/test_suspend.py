"""Requests that are suspended and go on under other weights: each token is by one version of the weights, and has the
log-prob that the learner computes with that version from the whole sequence before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hash_model import SPEC, BurstRunner, HashModel, Letters, learners_logprobs, make_engine, real_model, straight
from hypothesis import given, settings
from hypothesis import strategies as st

from jetrl.engine.engine import PagedEngine, spans_with
from jetrl.engine.settings import EngineSettings
from jetrl.engine.speculation.speculator import build_speculator
from jetrl.errors import UserError
from jetrl.model.transformer import Transformer
from jetrl.run.checked_engine import CheckedEngine
from jetrl.types import Completion, Engine, Request, SamplingParams, Unfinished, WeightSet

PROMPTS = [(1, 2, 3, 4, 5), (6, 7), (8,) * 13, (1, 2, 3, 4)]
KINDS = [
    SamplingParams(20, stop=("cd", "k")), SamplingParams(9, temperature=0.7, top_p=0.8),
    SamplingParams(24, ignore_eos=True), SamplingParams(10, temperature=0.0),
    SamplingParams(16, top_k=5, min_p=0.05, stop_token_ids=(9, 11), seed=5),
]
VERSIONS = 4


def requests(count: int = 20) -> list[Request]:
    """Groups of several samples, with stop strings, truncated and greedy sampling."""
    return [Request(100 + i, PROMPTS[i // 3 % 4], KINDS[i % 5]) for i in range(count)]


def version_of(model: HashModel, version: int) -> None:
    """Other weights in place, as an update makes them."""
    generator = torch.Generator().manual_seed(100 + version)
    model.head_weight = torch.randn(model.head_weight.shape, generator=generator) * 1.5


def load(engine: PagedEngine, version: int) -> None:
    version_of(engine.model, version)  # type: ignore[arg-type]
    engine.load(WeightSet(version, "flow", {}))


def expected(request: Request, edges: Sequence[int], text: Callable[[list[int]], str]) -> tuple[list[int], list[float]]:
    """What a request draws, without cache or batch, if weights of version v draw tokens edges[v-1] to edges[v]."""
    known: list[int] = []
    logprobs: list[float] = []
    for version, edge in enumerate([*edges, request.sampling.max_tokens]):
        model = HashModel()
        version_of(model, version)
        while len(known) < edge:
            one = replace(request.sampling, max_tokens=1)
            tokens, lps = straight(model, Request(request.id, (*request.tokens, *known), one))
            known, logprobs = known + tokens, logprobs + lps
            ends = known[-1] in one.stop_token_ids or (known[-1] == 0 and not one.ignore_eos)
            if ends or any(s in text(known) for s in one.stop):
                return known, logprobs
    return known, logprobs


def edges_of(spans: tuple[tuple[int, int], ...], count: int) -> list[int]:
    """The inverse of spans: how many tokens there were when each version's time was over."""
    return [next((start for start, v in spans if v > version), count) for version in range(VERSIONS)]


def check(request: Request, completion: Completion) -> None:
    spans = completion.spans or ((0, completion.weight_version),)
    tokens, logprobs = expected(request, edges_of(spans, len(completion.tokens)), Letters().decode)
    assert completion.tokens.tolist() == tokens and completion.logprobs.tolist() == logprobs


def to_the_end(engine: PagedEngine) -> list[Completion]:
    while engine.has_work:
        engine.step()
        engine._scheduler.check_integrity()
    return engine.collect()


def idle(engine: PagedEngine) -> None:
    scheduler = engine._scheduler
    assert not engine.has_work and engine._began is None and not len(scheduler.turns)
    assert scheduler.allocator.num_used == 0 and not scheduler.prompts._all and not scheduler.slots.owner.count(object)
    assert sorted(scheduler.slots.free) == list(range(len(scheduler.slots.owner)))


@pytest.mark.parametrize("drafts", ["off", "on"])
@pytest.mark.parametrize(
    "sizes",
    [{}, {"page_size": 3, "kv_cache_tokens": 99, "max_num_seqs": 6}, {"max_num_seqs": 2, "max_tokens_per_step": 4},
     {"page_size": 2, "share_beginnings": True}],
    ids=str,
)
@pytest.mark.parametrize("bursts", [False, True])
def test_each_token_is_by_the_version_it_names(sizes: dict[str, int], drafts: str, bursts: bool) -> None:
    engine = make_engine(**sizes)
    engine.speculator = build_speculator(drafts, 3, engine.settings.max_num_seqs)
    if bursts:
        engine.runner = BurstRunner(engine.model, engine.settings)
    load(engine, 0)
    engine.add(requests())
    done: list[Completion] = []
    most = 0
    for version in range(1, VERSIONS):
        for _ in range(4):
            if engine.has_work:
                engine.step()
        held = engine.suspend()
        done += engine.collect()
        idle(engine)
        assert sorted([*(u.request.id for u in held), *(c.request_id for c in done)]) == [r.id for r in requests()]
        assert [u.request for u in held] == [r for r in requests() if r.id in {u.request.id for u in held}]
        load(engine, version)
        engine.resume(held)
        most = max(most, engine._scheduler.num_preemptions)
    done += to_the_end(engine)
    idle(engine)
    assert sorted(c.request_id for c in done) == [r.id for r in requests()]
    for completion in done:
        check(next(r for r in requests() if r.id == completion.request_id), completion)
    assert max(len(c.spans) for c in done) >= 3, "one sequence over three versions at least"


def test_suspended_under_the_same_weights_changes_nothing() -> None:
    """However often, some or all: one version, no spans, the tokens and log-probs of a run without it."""
    plain = make_engine().generate(requests())
    engine = make_engine(page_size=2, kv_cache_tokens=140)
    engine.add(requests())
    done: list[Completion] = []
    for round in range(30):
        if engine.has_work:
            engine.step()
        done += engine.collect()
        some = None if round % 3 == 0 else [100 + (round * 7 + i) % 20 for i in range(8)]
        held = engine.suspend(some)
        assert some is None or {u.request.id for u in held} <= set(some)
        engine.resume(held)
    done += to_the_end(engine)
    assert sorted(done, key=lambda c: c.request_id) == plain
    assert all(c.spans == () for c in done)


def test_one_that_waited_has_drawn_nothing() -> None:
    engine = make_engine(max_num_seqs=1)
    load(engine, 0)
    engine.add(requests(2))
    engine.step()
    first, second = engine.suspend()
    assert len(first.tokens) == 1 and first.spans == ((0, 0),) and first.logprobs[0] < 0
    assert second == Unfinished(requests(2)[1]) and second.spans == () and len(second.tokens) == 0
    load(engine, 1)
    engine.resume([second])
    (only,) = to_the_end(engine)
    assert only.weight_version == 1 and only.spans == ()
    check(requests(2)[1], replace(only, spans=((0, 1),)))


def test_it_goes_on_in_another_engine() -> None:
    """What is suspended holds all that is needed: as after a kill, from a checkpoint."""
    engine, other = make_engine(), make_engine(page_size=4)
    for e in (engine, other):
        load(e, 0)
    engine.add(requests())
    for _ in range(5):
        engine.step()
    held, done = engine.suspend(), engine.collect()
    load(engine, 1), load(other, 1)
    engine.resume(held), other.resume(held)
    here, there = to_the_end(engine), to_the_end(other)
    by_id = {c.request_id: c for c in there}
    assert here and all(by_id[c.request_id] == c for c in here) and len(here) + len(done) == 20


def test_cut_back_to_fewer_tokens() -> None:
    """The first tokens of what was drawn: as if it had been suspended then."""
    engine = make_engine()
    load(engine, 0)
    engine.add([Request(1, (1, 2), SamplingParams(20, ignore_eos=True))])
    for _ in range(3):
        engine.step()
    (held,) = engine.suspend()
    load(engine, 1)
    engine.resume([held])
    for _ in range(4):
        engine.step()
    (longer,) = engine.suspend()
    assert longer.spans == ((0, 0), (3, 1)) and len(longer.tokens) == 7
    assert longer.first(3) == held and longer.first(7) == longer
    assert longer.first(0) == Unfinished(held.request) and longer.first(5).spans == longer.spans


def test_a_turn_of_a_conversation_goes_on() -> None:
    """Its earlier turns are of older weights, and so are its own first tokens; the environment's reply is between."""
    engine = make_engine(page_size=4)
    load(engine, 0)
    turn = Request(1, (1, 2, 3), SamplingParams(6, ignore_eos=True), 60)
    engine.add([turn, Request(2, (5, 5), SamplingParams(4), 60)])
    first = next(c for c in to_the_end(engine) if c.request_id == 1)
    assert engine.suspend() == [], "nothing waits or runs"
    idle(engine)
    load(engine, 1)
    second = Request(1, (*turn.tokens, *first.tokens.tolist(), 9, 9), SamplingParams(12, ignore_eos=True), 60)
    engine.add([second])
    for _ in range(3):
        engine.step()
    (held,) = engine.suspend()
    assert held.request == second and held.spans == ((0, 1),)
    idle(engine)
    load(engine, 2)
    engine.resume([held])
    (whole,) = to_the_end(engine)
    check(second, whole)
    assert whole.spans == ((0, 1), (len(held.tokens), 2)) and len(engine._scheduler.turns) == 1
    third = Request(1, (*second.tokens, *whole.tokens.tolist(), 4), SamplingParams(3, ignore_eos=True), 60)
    engine.add([third])
    engine.step()
    (again,) = engine.suspend([1])
    assert len(engine._scheduler.turns) == 1, "the conversation stays open where only some are suspended"
    engine.resume([again])
    check(third, to_the_end(engine)[0])
    engine.forget([1])
    idle(engine)


class Changing:
    """The trainer's model, whose weights change in place and are published."""

    def __init__(self, precision: str, cache: str) -> None:
        self.model = real_model(precision, cache)
        self._first = {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def to(self, version: int) -> Transformer:
        generator = torch.Generator().manual_seed(version)
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.copy_(self._first[name] * (1 + 0.2 * version * torch.randn(p.shape, generator=generator)))
        self.model.publish()
        return self.model

    def run(self, *, old_keys: bool = False) -> list[tuple[Request, Completion]]:
        """Eight answers over three versions. `old_keys`: a planted fault, the sequences just go on."""
        asked = [Request(i, PROMPTS[i // 3 % 4], SamplingParams(24, seed=i, ignore_eos=True)) for i in range(8)]
        engine = PagedEngine(self.to(0), Letters(), "flow", EngineSettings(page_size=4, kv_cache_tokens=160))
        engine.load(WeightSet(0, "flow", {}))
        engine.add(asked)
        for version in (1, 2):
            for _ in range(7):
                engine.step()
            if old_keys:
                at = engine._scheduler.slots
                for seq in (*engine._scheduler.running, *engine._scheduler.waiting):
                    length = int(at.length[seq.slot]) if seq.slot >= 0 else len(seq.tokens)
                    drawn = length - seq.prefix.length
                    seq.before = spans_with(seq.before, seq.num_before, drawn, version - 1)
                    seq.num_before = drawn
                self.to(version)
                engine.weights = WeightSet(version, "flow", {})
            else:
                held = engine.suspend()
                engine.load(WeightSet(version, "flow", {})), self.to(version)
                engine.resume(held)
        done = to_the_end(engine)
        assert len(done) == 8 and max(len(c.spans) for c in done) == 3
        return [(asked[c.request_id], c) for c in done]

    def different(self, done: list[tuple[Request, Completion]], moved: int = 0) -> tuple[int, int]:
        """Tokens whose log-prob is not the learner's with the weights of their version; and tokens of sequences of
        several versions that differ between versions. `moved`: a planted fault, spans begin that much later."""
        wrong = among = 0
        for version in range(3):
            self.to(version)
            for request, c in done:
                whole = [*request.tokens, *c.tokens.tolist()]
                by = np.array(learners_logprobs(self.model, whole)[len(request.tokens) - 1 :], np.float32)
                spans = [(a + moved * (a > 0), v) for a, v in c.spans or ((0, c.weight_version),)]
                ends = [*(a for a, _ in spans[1:]), len(whole)]
                unequal = by != c.logprobs
                among += int(unequal.sum()) if len(spans) > 1 else 0
                wrong += sum(int(unequal[a:end].sum()) for (a, v), end in zip(spans, ends, strict=True) if v == version)
        return wrong, among


@pytest.mark.parametrize(("precision", "cache"), [("bf16", "bf16"), ("fp8", "bf16"), ("fp8", "fp8")])
def test_log_probs_are_the_learners_of_their_version(precision: str, cache: str) -> None:
    changing = Changing(precision, cache)
    wrong, among = changing.different(changing.run())
    assert wrong == 0 and among > 100, "the versions do not differ"


def test_planted_faults_are_found() -> None:
    changing = Changing("fp8", "fp8")
    done = changing.run()
    boundaries = sum(len(c.spans) - 1 for _, c in done if c.spans)
    wrong, _ = changing.different(done, moved=1)
    assert boundaries // 2 < wrong <= boundaries, "a span that is moved by one token"
    wrong, among = changing.different(changing.run(old_keys=True))
    assert wrong > among // 10, "keys and values of the weights before are read"


@st.composite
def schedules(draw: st.DrawFn) -> dict:
    return {
        "sizes": {
            "page_size": draw(st.integers(1, 5)), "max_num_seqs": draw(st.integers(1, 8)),
            "max_tokens_per_step": draw(st.integers(1, 24)), "share_beginnings": draw(st.booleans()),
        },
        "spare": draw(st.integers(0, 60)),
        "drafts": draw(st.sampled_from(("off", "on"))),
        "count": draw(st.integers(1, 12)),
        "steps": draw(st.lists(st.integers(0, 8), min_size=1, max_size=VERSIONS - 1)),
        "some": draw(st.integers(0, 3)),
    }


@settings(max_examples=40, deadline=None)
@given(schedules())
def test_random_suspensions(case: dict) -> None:
    """Any sizes, preemption, drafts, groups: nothing is lost or drawn twice, no page leaks, and what each token is
    depends on nothing but the weights that drew it and the tokens before it."""
    sizes = case["sizes"]
    longest = max(len(r.tokens) + r.sampling.max_tokens for r in requests())
    pages = -(-longest // sizes["page_size"]) + case["spare"]
    budget = max(sizes["max_tokens_per_step"], 4 * sizes["max_num_seqs"]) if case["drafts"] == "on" else 0
    sizes |= {"kv_cache_tokens": pages * sizes["page_size"]} | ({"max_tokens_per_step": budget} if budget else {})
    engine = make_engine(**sizes)
    engine.speculator = build_speculator(case["drafts"], 3, sizes["max_num_seqs"])
    load(engine, 0)
    asked = requests(case["count"])
    engine.add(asked)
    done: list[Completion] = []
    for version, steps in enumerate(case["steps"], 1):
        for step in range(steps):
            if engine.has_work:
                engine.step()
                engine._scheduler.check_integrity()
            if case["some"] and step % 3 == case["some"]:
                engine.resume(engine.suspend([r.id for r in asked[step % 2 :: case["some"]]]))
                engine._scheduler.check_integrity()
        held = engine.suspend()
        done += engine.collect()
        idle(engine)
        load(engine, version)
        engine.resume(held)
    done += to_the_end(engine)
    idle(engine)
    assert sorted(c.request_id for c in done) == [r.id for r in asked]
    for completion in done:
        check(asked[completion.request_id - 100], completion)


def test_what_does_not_fit_together_is_refused() -> None:
    request = Request(7, (1, 2), SamplingParams(3))
    with pytest.raises(ValueError, match=r"request 7: 1 tokens, 0 log-probs and spans \(\(0, 1\),\)"):
        Unfinished(request, (4,), (), ((0, 1),))
    with pytest.raises(ValueError, match="below max_tokens = 3, and who drew them"):
        Unfinished(request, (4, 5, 6), (-1.0,) * 3, ((0, 1),))
    with pytest.raises(ValueError, match=r"and spans \(\); need"):
        Unfinished(request, (4,), (-1.0,))
    with pytest.raises(ValueError, match="they begin at 0"):
        Unfinished(request, (4, 5), (-1.0, -1.0), ((0, 1), (0, 2)))
    with pytest.raises(ValueError, match="do not end with weight_version 3"):
        Completion(7, (4,), (-1.0,), "", "stop", 3, "flow", ((0, 2),))
    engine = make_engine()
    with pytest.raises(UserError, match="request 7 has tokens from 40 to 40, but the model knows 0 to 39"):
        engine.resume([Unfinished(request, (SPEC.vocab_size,), (-1.0,), ((0, 1),))])
    assert not engine.has_work
    assert spans_with((), 0, 0, 5) == () and spans_with(((0, 4),), 2, 2, 5) == ((0, 4),)


class Least(Engine):
    """An engine that has only what an engine must have."""

    keeps_bits = False
    has_work = False

    def load(self, weights: WeightSet) -> None: ...
    def add(self, requests: Sequence[Request]) -> None: ...
    def step(self) -> None: ...  # type: ignore[override]
    def collect(self) -> list[Completion]: return []
    def forget(self, ids: object) -> None: ...
    def release(self) -> None: ...


@pytest.mark.parametrize("name", ["vllm", "mine.py:Least"])
def test_an_engine_that_cannot_is_refused_by_name(name: str) -> None:
    engine = CheckedEngine(Least(), name, 40)
    assert not engine.suspends and PagedEngine.suspends
    for call in (lambda: engine.suspend(), lambda: engine.resume([])):
        with pytest.raises(UserError, match=f"rollout.engine = {name}: it cannot suspend answers .* Set rollout"):
            call()
    with pytest.raises(NotImplementedError, match="Least cannot suspend requests"):
        Least().suspend()
