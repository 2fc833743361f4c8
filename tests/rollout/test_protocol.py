"""The engine by its verbs: requests that join and leave while others run, and turns that go on from kept pages."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hash_model import SPEC, BurstRunner, HashModel, learners_logprobs, make_engine, real_model, straight

from jetrl.engine.engine import PagedEngine
from jetrl.errors import UserError
from jetrl.types import Completion, Engine, Request, SamplingParams, StepReport, WeightSet


def request(id: int, tokens: tuple[int, ...], max_tokens: int, longest: int | None = None, **more: object) -> Request:
    return Request(id, tokens, SamplingParams(max_tokens, **more), longest)  # type: ignore[arg-type]


def drain(engine: Engine) -> list[Completion]:
    done = []
    while engine.has_work:
        engine.step()
        done += engine.collect()
    return done


def test_requests_that_join_while_others_run_get_what_they_get_alone() -> None:
    requests = [
        request(i, (1 + i % 3, 2, 3), 2 + 5 * i % 13, top_k=5 * (i % 2), stop=("a", "bc") * (i % 3 == 1))
        for i in range(12)
    ]
    engine = make_engine(page_size=2, max_num_seqs=5, kv_cache_tokens=34)
    done: list[Completion] = []
    for late in requests:  # one joins at every step
        engine.add([late])
        engine.step()
        done += engine.collect()
    done += drain(engine)
    assert sorted(c.request_id for c in done) == list(range(12)) != [c.request_id for c in done]
    for c in done:
        assert make_engine().generate([requests[c.request_id]]) == [c]
    assert engine.stats is not None and engine.stats.generated_tokens == sum(len(c.tokens) for c in done)
    assert engine.stats.preemptions > 0


def test_completions_are_collected_once_in_the_order_in_which_they_finished() -> None:
    engine = make_engine()
    engine.add([request(i, (1, i), n, ignore_eos=True) for i, n in enumerate((5, 1, 3))])
    assert engine.has_work and engine.collect() == [] and engine.stats is None
    reports = [engine.step()]
    assert [c.request_id for c in engine.collect()] == [1] and engine.collect() == []
    engine.add([request(7, (2,), 1, ignore_eos=True)])
    while engine.has_work:
        reports.append(engine.step())
    assert engine.stats is None, "not over before all is collected"
    assert [c.request_id for c in engine.collect()] == [7, 2, 0]
    assert engine.stats is not None and engine.stats.generated_tokens == 10 and not engine.has_work
    assert reports[0] == StepReport(1, 2, 0, 1, 3) and reports[-1] == StepReport(5, 0, 0, 4, 10)


def test_add_takes_all_or_none_and_says_whose_request_cannot_run() -> None:
    engine = make_engine(page_size=4, max_num_seqs=2)
    good = request(1, (1, 2), 6)
    for bad, text in (
        (request(2, (1, 40), 3), "knows 0 to 39"), (request(2, (1,), 3, top_p=0.0), "top_p"),
        (request(2, (), 3), "at least"), (request(2, (1,), 200), "beyond the model's 128 positions"),
    ):
        with pytest.raises(UserError, match=text):
            engine.add([good, bad])
        assert not engine.has_work and engine.collect() == []
    engine.add([good])
    engine.step()
    pages = engine.runner.cache.num_pages  # type: ignore[union-attr]
    assert pages == 3, "sized for the first requests"
    with pytest.raises(UserError, match=r"request 2: .* = 22, beyond the KV cache of 3 pages.*rollout.kv_cache_tokens"):
        engine.add([request(3, (1,), 2), request(2, (1, 2), 20)])
    (completion,) = drain(engine)
    assert [completion] == make_engine().generate([good])
    assert len(engine.generate([request(2, (1, 2), 20)])) == 1, "an idle engine makes a cache that holds it"


@pytest.mark.parametrize("where", ["on_step", "runner"])
def test_an_error_leaves_no_work_behind(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [request(i, (1, 2, 3), 9) for i in range(4)]
    engine = make_engine(page_size=2)
    calls = 0

    def broken(*args: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise FloatingPointError("here")

    with monkeypatch.context() as patch:
        if where == "runner":
            run = engine.runner.run
            patch.setattr(engine.runner, "run", lambda *args: (broken(), run(*args))[1])
        with pytest.raises(FloatingPointError, match="here"):
            engine.generate(requests, on_step=broken if where == "on_step" else None)
    assert not engine.has_work and engine.collect() == [] and engine.runner.cache is None
    assert engine.generate(requests) == make_engine().generate(requests)


def test_generate_wants_an_engine_without_other_requests() -> None:
    engine = make_engine()
    engine.add([request(1, (1, 2), 2, ignore_eos=True)])
    for _ in range(2):
        with pytest.raises(ValueError, match="without other requests"):
            engine.generate([request(2, (1,), 2)])
        while engine.has_work:
            engine.step()
    for verb in (engine.release, lambda: engine.load(WeightSet(4, "flow", {}))):
        engine.add([request(3, (1, 2), 2)])
        with pytest.raises(ValueError, match="while requests are running or waiting"):
            verb()
        drain(engine)


def test_equal_ids_may_run_side_by_side() -> None:
    twins = [request(1, (1, 2), 5), request(1, (1, 3), 5), request(1, (1, 2), 3)]
    assert make_engine().generate(twins) == [make_engine().generate([t])[0] for t in twins]


def test_forgetting_a_request_that_runs_drops_it() -> None:
    requests = [request(i, (1, 2, 3, 4), 12, ignore_eos=True) for i in range(5)]
    engine = make_engine(page_size=2, max_num_seqs=3)
    engine.add(requests)
    engine.step(), engine.step()
    engine.forget([1, 4, 77])  # one runs, one waits, one is unknown
    done = drain(engine)
    assert {c.request_id for c in done} == {0, 2, 3} and engine.stats is not None
    assert all(make_engine().generate([requests[c.request_id]]) == [c] for c in done)


# ---- conversations --------------------------------------------------------------------------------------------------

REPLIES = ((9, 10), (), (3, 3, 3, 3, 3), (11,))


def talk(engine: PagedEngine, ids: range, force: Callable | None = None, fresh: bool = False) -> dict[int, list]:
    """Conversations of five turns; all turns of a round in one `generate`. `fresh`: by an engine that keeps nothing."""
    known = {i: tuple(range(1, 4 + i % 3)) for i in ids}
    turns: dict[int, list] = {i: [] for i in ids}
    for number in range(len(REPLIES) + 1):
        asked = [request(i, known[i], 2 + (i + number) % 6, None if fresh else 80, ignore_eos=i % 2 == 0) for i in ids]
        for c in engine.generate(asked, force_preempt=force):
            turns[c.request_id].append((known[c.request_id], c))
            known[c.request_id] += tuple(c.tokens.tolist()) + (REPLIES[number] if number < len(REPLIES) else ())
    engine.forget(ids)
    return turns


SIZES = [
    {}, {"page_size": 1, "max_num_seqs": 3, "max_tokens_per_step": 5}, {"page_size": 3, "max_tokens_per_step": 7},
    {"page_size": 4, "kv_cache_tokens": 90, "max_tokens_per_step": 6}, {"page_size": 8, "kv_cache_tokens": 80},
]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("force", [None, lambda step, running: running[step % 3 :: 3] if step % 4 == 1 else ()])
@pytest.mark.parametrize("burst", [False, True])
def test_every_turn_equals_straight_recomputation(sizes: dict[str, int], force: Callable | None, burst: bool) -> None:
    engine = make_engine(**sizes)
    if burst:
        engine.runner = BurstRunner(engine.model, engine.settings)
    for id, turns in talk(engine, range(6), force).items():
        for tokens, completion in turns:
            again = request(id, tokens, completion_limit(id, turns, completion), ignore_eos=id % 2 == 0)
            assert straight(HashModel(), again) == (list(completion.tokens), list(completion.logprobs))
    assert engine.stats is not None and engine.stats.peak_pages <= engine.stats.num_pages


def completion_limit(id: int, turns: list, completion: Completion) -> int:
    return 2 + (id + [c for _, c in turns].index(completion)) % 6


def test_turns_compute_only_their_new_tokens_until_pages_run_short() -> None:
    kept, fresh, short = make_engine(), make_engine(), make_engine(page_size=4, kv_cache_tokens=80)
    assert talk(kept, range(6)) == talk(short, range(6))
    talk(fresh, range(6), fresh=True)
    whole = HashModel()
    many = make_engine(whole)
    turns = talk(many, range(6))
    prompts = {tuple(range(1, 4 + i % 3)) for i in range(6)}
    # of each conversation every token but the last, once; the prompts are shared within their groups
    longest = [len(t[-1][0]) + len(t[-1][1].tokens) - 1 for t in turns.values()]
    prompt_tokens = sum(map(len, prompts)) - sum(3 + i % 3 for i in range(6))
    assert sum(whole.rows) == sum(longest) + prompt_tokens
    assert kept.stats is not None and kept.stats.computed_tokens == sum(whole.rows)
    assert short.stats is not None and kept.stats.computed_tokens < short.stats.computed_tokens


def test_pages_are_kept_until_forgotten_and_then_the_session_is_over() -> None:
    engine = make_engine(page_size=2)
    (first,) = engine.generate([request(5, (1, 2, 3), 4, 40, ignore_eos=True)])
    assert engine.stats is None and not engine.has_work, "the conversation may go on"
    with pytest.raises(ValueError, match="do not begin with the 7"):
        engine.add([request(5, (1, 2, 4, *first.tokens.tolist()), 4, 40)])
    engine.forget([5])
    assert engine.stats is not None and engine.stats.steps == 4
    engine.add([request(5, (1, 2, 4), 4)])
    assert len(drain(engine)) == 1


@pytest.mark.parametrize("verb", ["load", "release"])
def test_new_weights_or_a_released_cache_end_what_is_kept_and_change_no_token(verb: str) -> None:
    """Keys of old weights are never read again: the next turn is computed from its first token."""
    engine = make_engine(model := HashModel(), page_size=2)
    (first,) = engine.generate([request(5, (1, 2, 3), 4, 40, ignore_eos=True)])
    if verb == "load":
        engine.load(WeightSet(4, "flow", {}))
    else:
        engine.release()
        assert engine.runner.cache is None
    model.rows.clear()
    follow = request(5, (1, 2, 3, *first.tokens.tolist(), 8), 4, 40, ignore_eos=True)
    (second,) = engine.generate([follow])
    assert model.rows[0] == 8 and second.weight_version == (4 if verb == "load" else 3)
    assert straight(HashModel(), follow) == (list(second.tokens), list(second.logprobs))
    engine.forget([5])
    assert engine.stats is not None


def test_the_cache_has_room_for_conversations_that_have_not_begun_yet() -> None:
    engine = make_engine(page_size=4, max_num_seqs=6)
    engine.add([request(0, (1, 2), 3, 20)])
    assert engine.runner.cache is not None and engine.runner.cache.num_pages == 6 * 5 + 6 // 4 + 1
    with pytest.raises(UserError, match="beyond the model's 128 positions"):
        engine.add([request(1, (1, 2), 3, 129)])
    drain(engine)
    engine.forget([0])


@pytest.mark.parametrize(("precision", "cache"), [("bf16", "bf16"), ("fp8", "bf16"), ("fp8", "fp8")])
def test_turns_of_the_real_model_are_those_of_a_fresh_engine_and_of_the_learner(precision: str, cache: str) -> None:
    """Bit for bit: kept pages, one request with all tokens, and the training forward of the whole trajectory."""
    model = real_model(precision, cache)
    ids = range(5)
    fresh = talk(make_engine(model), ids, fresh=True)
    for sizes, force in (
        ({}, None), ({"page_size": 3, "max_tokens_per_step": 9}, lambda step, now: now[-1:] if step % 7 == 6 else ()),
        ({"page_size": 4, "kv_cache_tokens": 80, "max_num_seqs": 3, "share_beginnings": False}, None),
    ):
        engine = make_engine(model, **sizes)
        assert talk(engine, ids, force) == fresh
        assert engine.stats is not None and (engine.stats.preemptions > 0) == bool(sizes)
    for turns in fresh.values():
        learner = learners_logprobs(model, [*turns[-1][0], *turns[-1][1].tokens])
        for tokens, completion in turns:
            start = len(tokens) - 1
            assert learner[start : start + len(completion.tokens)] == list(completion.logprobs)
    assert len({c.tokens.tobytes() for turns in fresh.values() for _, c in turns}) > 15 and SPEC.max_position >= 80


def test_a_turn_draws_what_one_long_request_draws_at_its_place() -> None:
    """A token is a function of seed, id and position, whatever the number of turns."""
    whole = make_engine().generate([request(3, (1, 2), 12, ignore_eos=True)])[0]
    engine, tokens = make_engine(), (1, 2)
    for _ in range(4):
        (part,) = engine.generate([request(3, tokens, 3, 20, ignore_eos=True)])
        tokens += tuple(part.tokens.tolist())
    assert tokens == (1, 2, *whole.tokens)
    assert part.logprobs.tolist() == whole.logprobs[-3:].tolist()
