"""Speculation in the engine: whatever is drafted, completions are those without drafts, bit for bit."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import hopper_inputs
import numpy as np
import pytest
import torch
from hash_model import BurstRunner, HashModel, Letters, learners_logprobs, make_engine, real_model, straight
from replays import Static, graph_cache
from tiny import numbers, saved, tiny_run

from jetrl.engine.engine import PagedEngine
from jetrl.engine.graphs.cache import GraphCache
from jetrl.engine.graphs.drafts import DraftGraphs, DraftSize, _Held
from jetrl.engine.plan import Finished, Plan
from jetrl.engine.sampler import SamplingTable, is_cut
from jetrl.engine.settings import EngineSettings
from jetrl.engine.speculation.depth import DepthRule
from jetrl.engine.speculation.drafts import DraftIndex
from jetrl.engine.speculation.sources import SOURCES, Texts
from jetrl.engine.speculation.speculator import Speculator, build_speculator
from jetrl.engine.speculation.verify import Burst
from jetrl.types import Completion, Request, SamplingParams, WeightSet

PROMPTS = [(1, 2, 3, 4, 5), (6, 7), (8,) * 13, (1, 2, 3, 4)]


def mixed_requests(max_tokens: int = 30) -> list[Request]:
    kinds = [
        SamplingParams(max_tokens, stop=("cd", "k")), SamplingParams(9, temperature=0.7, top_p=0.8),
        SamplingParams(max_tokens, ignore_eos=True), SamplingParams(10, temperature=0.0),
        SamplingParams(max_tokens, top_k=5, min_p=0.05, stop_token_ids=(9, 11), seed=5),
    ]
    return [Request(100 + i, PROMPTS[(i // 3) % 4], kinds[i % 5]) for i in range(24)]


class Oracle(DraftIndex):
    """Drafts that are known to hold: `answers` are the whole sequences of each text's prompt and first tokens."""

    answers: list[tuple[int, ...]] = []
    holds = 1.0

    def draft(self, rows: torch.Tensor, depth: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        drafts, counts = torch.zeros(len(rows), depth, dtype=torch.int64), torch.zeros(len(rows), dtype=torch.int64)
        for b, row in enumerate(rows.tolist()):
            known = tuple(self.texts[row, : self.lengths[row]].tolist())
            follow = [a[len(known) :] for a in self.answers if a[: len(known)] == known]
            guess = follow[0][:depth] if follow else ()
            for i, token in enumerate(guess):
                right = hash((known, i)) % 1000 < 1000 * self.holds
                drafts[b, i] = token if right else (token + 1) % 40
            counts[b] = len(guess)
        return drafts, counts, rows


def speculating(engine: PagedEngine, deepest: int = 7, holds: float | None = None, **answers: object) -> PagedEngine:
    """The engine with drafts at every step: its own, or an oracle's."""
    engine.speculator = Speculator(DepthRule(len(SOURCES), deepest, always=True), engine.settings.max_num_seqs)
    if holds is not None:
        kind = type("Forced", (Oracle,), {"holds": holds, **answers})
        engine.speculator.new_index = kind  # type: ignore[method-assign]
    return engine


def whole(requests: list[Request], completions: list[Completion]) -> list[tuple[int, ...]]:
    return [(*r.tokens, *c.tokens.tolist()) for r, c in zip(requests, completions, strict=True)]


@pytest.mark.parametrize("sizes", [{}, {"page_size": 3, "kv_cache_tokens": 99, "max_num_seqs": 6}], ids=str)
@pytest.mark.parametrize(("deepest", "holds"), [(7, None), (1, 1.0), (3, 0.6), (7, 0.0), (7, 1.0)])
@pytest.mark.parametrize("bursts", [False, True])
def test_drafts_change_no_completion(sizes: dict[str, int], deepest: int, holds: float | None, bursts: bool) -> None:
    """With stop strings, truncated sampling, greedy requests, shared prompts, and preemption."""
    requests = mixed_requests()
    plain = make_engine(**sizes)
    expected = plain.generate(requests)
    engine = speculating(make_engine(**sizes), deepest, holds, answers=whole(requests, expected))
    if bursts:
        engine.runner = BurstRunner(engine.model, engine.settings)
    assert engine.generate(requests) == expected
    assert engine.stats is not None and plain.stats is not None
    assert engine.stats.generated_tokens == plain.stats.generated_tokens
    assert (engine.stats.preemptions > 0) == bool(sizes)
    metrics = engine.take_metrics()
    if holds is not None:
        accepted = metrics["rollout/draft_acceptance"]
        # samples of a prompt begin alike, and the oracle cannot tell them apart; a draft counts as a whole
        assert {0.0: 0.0 <= accepted < 0.05, 0.6: 0.1 < accepted < 0.7, 1.0: 0.6 < accepted < 1.0}[holds]
        assert (metrics["rollout/tokens_per_decode_step"] > 1.0) == (holds > 0)
        if holds == 1.0 and not bursts and not sizes:
            assert engine.stats.steps < plain.stats.steps


def test_equals_straight_recomputation() -> None:
    requests = [dataclasses.replace(r, sampling=dataclasses.replace(r.sampling, stop=())) for r in mixed_requests(15)]
    answers = [r.tokens + tuple(straight(HashModel(), r)[0]) for r in requests]
    engine = speculating(make_engine(page_size=2), 7, 0.6, answers=answers)
    for r, c in zip(requests, engine.generate(requests, force_preempt=lambda step, running: running[step % 3 :: 3]
                                              if step % 4 == 1 else ()), strict=True):
        tokens, logprobs = straight(HashModel(), r)
        assert list(c.tokens) == tokens and list(c.logprobs) == logprobs
    assert engine.stats is not None and engine.stats.preemptions > 0


@pytest.mark.parametrize(("precision", "cache"), [("bf16", "bf16"), ("fp8", "fp8")])
def test_logprobs_are_the_learners(precision: str, cache: str) -> None:
    model = real_model(precision, cache)
    requests = [Request(i, PROMPTS[i % 2], SamplingParams(40, seed=i % 2, temperature=1.0)) for i in range(6)]
    plain = PagedEngine(model, Letters(), "flow", EngineSettings(page_size=4))
    plain.load(WeightSet(1, "flow", {}))
    expected = plain.generate(requests)
    engine = PagedEngine(model, Letters(), "flow", EngineSettings(page_size=4))
    engine.load(WeightSet(1, "flow", {}))
    speculating(engine, 3, 0.6, answers=whole(requests, expected))
    assert engine.generate(requests) == expected
    assert engine.take_metrics()["rollout/tokens_per_decode_step"] > 1.3
    for r, c in zip(requests, expected, strict=True):
        assert learners_logprobs(model, [*r.tokens, *c.tokens])[len(r.tokens) - 1 :] == list(c.logprobs)


def test_what_was_answered_before_is_drafted_and_holds() -> None:
    """The same requests twice: the second time, each draft is from the first time's answers and holds."""
    requests = [Request(i, PROMPTS[i % 2], SamplingParams(40, ignore_eos=True)) for i in range(6)]
    engine = speculating(make_engine(max_num_seqs=8))
    first, _ = engine.generate(requests), engine.take_metrics()
    assert engine.stats is not None
    steps = engine.stats.steps
    assert engine.generate(requests) == first
    metrics = engine.take_metrics()
    assert metrics["rollout/draft_acceptance_history"] > 0.7 and "rollout/draft_acceptance_siblings" not in metrics
    assert engine.stats.steps < steps / 3 and metrics["rollout/tokens_per_decode_step"] > 3
    assert engine.take_metrics() == {}, "nothing was decoded, so nothing was measured"


def test_auto_drafts_once_drafts_hold_and_never_where_they_do_not() -> None:
    """Nothing is computed to learn that: a plain burst's tokens are compared with what would have been drafted."""
    greedy = [Request(i, PROMPTS[i % 2], SamplingParams(60, temperature=0.0, ignore_eos=True)) for i in range(8)]
    engine = make_engine(max_num_seqs=4)
    expected = engine.generate(greedy)
    engine.speculator = build_speculator("auto", 7, 4)
    engine.runner = BurstRunner(engine.model, engine.settings)
    assert engine.generate(greedy) == expected and engine.generate(greedy) == expected
    assert engine.speculator is not None and engine.take_metrics()["rollout/draft_share"] > 0.2
    random = [Request(i, PROMPTS[i % 2], SamplingParams(60, seed=i, ignore_eos=True)) for i in range(8)]
    engine.speculator = build_speculator("auto", 7, 4)
    engine.generate(random)
    metrics = engine.take_metrics()
    assert metrics == {"rollout/tokens_per_decode_step": 1.0, "rollout/draft_share": 0.0}
    assert build_speculator("off", 7, 4) is None and make_engine().take_metrics() == {}


def test_greedy_evaluations_do_not_make_rollouts_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers of an evaluation hold as drafts for the next one; those of a rollout at temperature 1 do not."""
    greedy = [Request(i, PROMPTS[i % 2], SamplingParams(60, temperature=0.0, ignore_eos=True)) for i in range(8)]
    drawn = [Request(i, PROMPTS[i % 2], SamplingParams(60, seed=i, ignore_eos=True)) for i in range(100, 108)]
    engine = make_engine(max_num_seqs=4)
    engine.speculator = build_speculator("auto", 7, 4)
    monkeypatch.setattr(engine.speculator.rule, "ran", lambda *_: None)  # times of a busy machine would decide as well
    engine.runner = BurstRunner(engine.model, engine.settings)
    for _ in range(3):
        engine.generate(greedy)
    assert engine.take_metrics()["rollout/draft_share"] > 0.2
    engine.generate(drawn)
    assert engine.take_metrics() == {"rollout/tokens_per_decode_step": 1.0, "rollout/draft_share": 0.0}
    engine.generate(greedy)
    assert engine.take_metrics()["rollout/draft_share"] > 0.5, "what evaluations taught is still known"


def test_conversations_keep_their_bits() -> None:
    def talk(engine: PagedEngine) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
        known, found = {i: PROMPTS[i % 2] for i in range(4)}, []
        for turn in range(4):
            params = SamplingParams(9, ignore_eos=turn % 2 == 0)
            engine.add([Request(i, tokens, params, max_conversation=100) for i, tokens in known.items()])
            while engine.has_work:
                engine.step()
            for c in sorted(engine.collect(), key=lambda c: c.request_id):
                found.append((c.tokens.tolist(), c.logprobs.tolist()))
                known[c.request_id] += (*c.tokens.tolist(), 7, 7 + turn)
        engine.forget(list(known))
        return found

    for sizes in ({"page_size": 3}, {"page_size": 2, "kv_cache_tokens": 120, "max_num_seqs": 3}):
        expected = talk(make_engine(**sizes))
        engine = speculating(make_engine(**sizes))
        assert talk(engine) == expected and talk(engine) == expected
        assert engine.take_metrics()["rollout/draft_acceptance_history"] > 0.5


def test_texts_of_ended_sequences_stay_until_their_rows_are_needed() -> None:
    requests = [Request(i, (1, 2, 3), SamplingParams(5 + i, ignore_eos=True)) for i in range(30)]
    engine = speculating(make_engine(max_num_seqs=3))
    engine.generate(requests)
    texts = engine.speculator.texts  # type: ignore[union-attr]
    assert texts is not None and len(texts.lengths) == 12 and len(texts._free) == 12 and not texts._rows
    assert sorted(texts.lengths.tolist())[-3:] == [3 + 5 + i for i in (27, 28, 29)], "the last answers, whole"
    index = engine.speculator.index  # type: ignore[union-attr]
    assert index is not None and (texts.groups == texts.groups[0]).all()
    engine.speculator.end(Finished(999, 1, SamplingParams(1), np.zeros(2), np.zeros(2), True, 3))  # type: ignore[union-attr]


def test_more_sequences_than_rows() -> None:
    """Sequences that wait after a preemption give their rows up."""
    requests = [Request(i, (1, 2, i), SamplingParams(20, ignore_eos=True)) for i in range(9)]
    engine = speculating(make_engine(max_num_seqs=3, page_size=2))
    expected = make_engine(max_num_seqs=3, page_size=2).generate(requests)
    few = Texts(4, 3)

    def force(step: int, running: tuple[int, ...]) -> tuple[int, ...]:
        if engine.speculator.texts is not few:  # type: ignore[union-attr]
            engine.speculator.texts = few  # type: ignore[union-attr]
            engine.speculator.index = DraftIndex(4, 256, torch.device("cpu"))  # type: ignore[union-attr]
        return running[1:] if step % 4 == 3 and step < 60 else ()

    assert engine.generate(requests, force_preempt=force) == expected
    assert len(few._free) == 4 and engine.stats is not None and engine.stats.preemptions > 20


def test_records_are_read_in_order() -> None:
    """Two steps of three positions for three sequences: what counts, left-packed, and nothing of what does not."""
    record = np.full((2, 12, 3), -9, dtype=np.int64)
    record[:, :3] = np.arange(18).reshape(2, 3, 3)
    record[:, 3:6] = (-np.arange(18).reshape(2, 3, 3).astype(np.float64)).view(np.int64)
    record[:, 6:9] = np.ones((2, 3, 3)).view(np.int64)
    record[:, 9], record[:, 10], record[:, 11] = [[1, 3, 2], [2, 1, 0]], [[2, 2, 1], [1, 0, -1]], 4
    found = Burst.read(record)
    assert found.drawn.counts.tolist() == [3, 4, 2]
    columns = [found.drawn.tokens[:n, b].tolist() for b, n in enumerate(found.drawn.counts)]
    assert columns == [[0, 9, 12], [1, 4, 7, 10], [2, 5]]
    assert found.drawn.logprobs[:4, 1].tolist() == [-1.0, -4.0, -7.0, -10.0]
    assert found.accepted.tolist() == [[0, 2, 1], [1, 0, 0]] and found.drafted.tolist() == [[2, 2, 1], [1, 0, -1]]
    assert found.drawn.meant().sum() == 9 and (found.source == 4).all() and (found.maxima == 1.0).all()


@pytest.mark.parametrize("changes", [{}, {"quant.kv_cache": "fp8", "rollout.stop": ["1", "77"]}], ids=str)
def test_a_run_with_drafts_is_the_run_without(changes: dict[str, object], tmp_path: Path) -> None:
    runs = {}
    for mode in ("off", "on", "auto"):
        changed = changes | ({"rollout.speculate": mode} if mode != "off" else {})
        run = runs[mode] = tiny_run(tmp_path / mode, changed)
        if mode == "on":
            rows, drawn = numbers(run), "rollout/tokens_per_decode_step"
            assert [(drawn in row, f"in_eval/{drawn}" in row) for row in rows] == [
                (False, True), (True, False), (True, True), (True, False), (True, True)], "evaluations are told apart"
            assert max(row.get(f"in_eval/{drawn}", 0.0) for row in rows) > 1.0, "no draft ever held"
    own = ("rollout/", "in_eval/")
    keep = lambda run: [{k: v for k, v in row.items() if not k.startswith(own)} for row in numbers(run)]  # noqa: E731
    for mode in ("on", "auto"):
        assert keep(runs[mode]) == keep(runs["off"])
        assert (runs[mode] / "samples.jsonl").read_bytes() == (runs["off"] / "samples.jsonl").read_bytes()
        tensors = saved(runs["off"], 4)
        assert all(torch.equal(x, tensors[name]) for name, x in saved(runs[mode], 4).items())


class Replayed(DraftGraphs):
    """Graphs without a GPU."""

    def _prepare(self, size: DraftSize) -> _Held:
        held = super()._prepare(size)
        held.step = Static(held.step)
        return held


class GraphRunner(BurstRunner):
    """Steps with drafts as on a GPU: fixed shapes, padding rows, bursts, draws inside or outside of the graph."""

    @property
    def graphs(self) -> GraphCache:
        self._graphs = self._graphs or graph_cache(self.model)
        return self._graphs

    def run_drafted(self, plan: Plan, table: SamplingTable, steps: int, index: DraftIndex, rows: np.ndarray) -> Burst:
        if len(plan.copies):
            self.cache.copy_pages(self._put(plan.copies))
        if self.draft_graphs is None or self.draft_graphs.index is not index:
            self.draft_graphs = Replayed(self.model, self.cache, index, self.graphs, 8)
        with torch.no_grad():
            return self.draft_graphs.run(plan, table.take(plan.sample_slots), rows, steps)

    def burst(self, plan: Plan, table: SamplingTable) -> int:
        cut = is_cut(table.take(plan.sample_slots), self.model.spec.vocab_size).any()
        return min(super().burst(plan, table), 1 if cut else 5)


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize(("deepest", "holds"), [(7, 0.6), (3, 1.0), (1, 0.0), (7, None)])
def test_steps_of_fixed_shapes_give_the_same_bits(
    deepest: int, holds: float | None, cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And their ops get what a GPU's kernels require: contiguous, of one dtype, with indices in range."""
    calls = hopper_inputs.require(monkeypatch)
    model = real_model("fp8", "fp8")
    few = {"top_p": 0.8} if cut else {}
    requests = [
        Request(i, PROMPTS[i % 4], SamplingParams(20 + 5 * i, seed=i % 2, temperature=0.0 if i == 3 else 0.9, **few))
        for i in range(7)
    ]

    def engine(**sizes: int) -> PagedEngine:
        made = PagedEngine(model, Letters(), "flow", EngineSettings(**sizes))
        made.load(WeightSet(1, "flow", {}))
        return made

    expected = engine().generate(requests)
    for sizes in ({}, {"kv_cache_tokens": 120, "max_num_seqs": 3}, {"max_num_seqs": 1}):
        made = speculating(engine(page_size=4, **sizes), deepest, holds, answers=whole(requests, expected))
        made.runner = GraphRunner(model, EngineSettings(page_size=4))
        assert made.generate(requests) == expected
        if holds is not None:
            assert (made.take_metrics()["rollout/tokens_per_decode_step"] > 1.2) == (holds > 0)
        index, captured = made.speculator.index, made.runner.graphs.sizes(DraftSize)  # type: ignore[union-attr]
        assert isinstance(index, DraftIndex)
        assert 0 <= int(index.texts.min()) and int(index.texts.max()) < model.spec.vocab_size, "no tokens"
        assert (not cut) in {size.draws for size in captured}
        assert max(size.rows for size in captured) == {None: 8, 3: 4, 1: 1}[sizes.get("max_num_seqs")]
    assert all(calls[op] for op in ("forward", "qkv_norm_rope", "attend_cached_quantize")) and (calls["draw"] or cut)
