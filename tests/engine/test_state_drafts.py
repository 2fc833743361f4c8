"""Drafts of hybrids: the states of sequences go back to the last token that stayed, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from enlarged import enlarged
from hash_model import BurstRunner, Letters, learners_logprobs, suspended_every
from run.test_carried import RAGGED, plain
from tiny import HYBRID, numbers, tiny_run, weights_hash

from jetrl.api import random_model
from jetrl.engine.engine import PagedEngine
from jetrl.engine.rows import Rows
from jetrl.engine.runner import ModelRunner
from jetrl.engine.settings import EngineSettings
from jetrl.engine.speculation.depth import DepthRule
from jetrl.engine.speculation.drafts import DraftIndex
from jetrl.engine.speculation.sources import SOURCES
from jetrl.engine.speculation.speculator import Speculator
from jetrl.engine.speculation.verify import DraftState, propose
from jetrl.kernels.delta import ops
from jetrl.model.transformer import Transformer
from jetrl.parity.drawn import draft_link
from jetrl.parity.rows import Workload, random_sequences
from jetrl.precision.recipe import build_recipe
from jetrl.spec import DeltaSpec, ModelSpec, RopeSpec
from jetrl.types import Completion, Request, SamplingParams, WeightSet

SPEC = ModelSpec(
    family="qwen3_5_text", vocab_size=40, hidden_size=48, intermediate_size=72, num_layers=2, num_heads=2,
    num_kv_heads=1, head_dim=16, rms_norm_eps=1e-6, rope=RopeSpec(1e4), max_position=256, tie_embeddings=True,
    qkv_bias=False, qk_norm=True, rotary_dim=8, attention_gate=True, norm_offset=True,
    delta=DeltaSpec(key_heads=1, value_heads=2, key_dim=8, value_dim=16, conv_width=4, layers=(0,)),
)
Known = dict[tuple[int, ...], tuple[int, ...]]  # a beginning -> what follows


class Forced(DraftIndex):
    """Drafts of which about `holds` hold: `known` tells what follows the tokens of a text."""

    known: Known = {}
    holds = 1.0

    def draft(self, rows: torch.Tensor, depth: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        drafts, counts = torch.zeros(len(rows), depth, dtype=torch.int64), torch.zeros(len(rows), dtype=torch.int64)
        for b, row in enumerate(rows.tolist()):
            text = tuple(self.texts[row, : self.lengths[row]].tolist())
            guess = self.known.get(text, ())[:depth]
            wrong = [(7 * len(text) + 3 * i + sum(text)) % 100 >= 100 * self.holds for i in range(len(guess))]
            drafts[b, : len(guess)] = torch.tensor([(t + w) % 40 for t, w in zip(guess, wrong, strict=True)])
            counts[b] = len(guess)
        return drafts, counts, rows


def followers(requests: list[Request], completions: list[Completion]) -> Known:
    """Of every beginning of every answer; where two answers begin alike, drafts are from the first."""
    found: Known = {}
    for r, c in zip(requests, completions, strict=True):
        tokens = (*r.tokens, *c.tokens.tolist())
        for n in range(len(r.tokens), len(tokens)):
            found.setdefault(tokens[:n], tokens[n:])
    return found


def engine_of(
    model: Transformer, deepest: int = 0, forced: tuple[Known, float] | None = None, bursts: bool = False, **sizes: Any
) -> PagedEngine:
    """With drafts at every step, if `deepest` is not 0: its own, or forced ones."""
    settings = EngineSettings(**{"page_size": 8} | sizes)
    rule = DepthRule(len(SOURCES), deepest, always=True) if deepest else None
    speculator = None if rule is None else Speculator(rule, settings.max_num_seqs)
    engine = PagedEngine(model, Letters(), "flow", settings, speculator)
    if speculator is not None and forced is not None:
        kind = type("Drafts", (Forced,), {"known": forced[0], "holds": forced[1]})
        speculator.new_index = kind  # type: ignore[method-assign]
    if bursts:
        engine.runner = BurstRunner(model, engine.settings)
    engine.load(WeightSet(3, "flow", {}))
    return engine


def requests() -> list[Request]:
    """Groups whose answers pass ends of blocks and chunks, or begin at one; some end at a stop within a burst."""
    prompts = [tuple(1 + (i * n) % 38 for i in range(n)) for n in (5, 45, 57, 63, 64)]
    return [
        Request(100 + i, prompts[i // 3], SamplingParams(
            12 + 7 * (i % 3), ignore_eos=i % 2 == 0, seed=i % 2, stop_token_ids=(9,) if i % 4 == 1 else (),
        )) for i in range(15)
    ]


def preempt(step: int, running: tuple[int, ...]) -> tuple[int, ...]:
    return running[step % 2 :: 3] if step % 4 == 3 else ()


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_drafts_change_no_completion(precision: str) -> None:
    """Forks of a group, more requests than slots, preemption, few pages; drafts that hold always, mostly and never."""
    cache = "fp8" if precision == "fp8" else "bf16"
    model = enlarged(SPEC, build_recipe(precision, 2, kv_cache=cache, head_dim=16))
    plain = engine_of(model)
    expected = plain.generate(requests())
    known = followers(requests(), expected)
    assert plain.stats is not None
    for deepest, holds, force, more in (
        (7, 1.0, None, {}), (7, 0.8, None, {"bursts": True}), (3, 0.6, None, {"max_num_seqs": 4, "bursts": True}),
        (7, 0.0, preempt, {"max_num_seqs": 7, "kv_cache_tokens": 500, "max_tokens_per_step": 80}),
        (7, 0.8, preempt, {"max_num_seqs": 5, "page_size": 3, "kv_cache_tokens": 300, "max_tokens_per_step": 70}),
    ):
        engine = engine_of(model, deepest, (known, holds), **more)
        assert engine.generate(requests(), force_preempt=force) == expected
        assert engine.stats is not None and (engine.stats.preemptions > 0) == (force is not None)
        gained = engine.take_metrics()["rollout/tokens_per_decode_step"]
        assert gained > 2.5 if holds == 1.0 else (gained > 1.2) == (holds > 0.0)
    for r, c in zip(requests(), expected, strict=True):
        assert learners_logprobs(model, [*r.tokens, *c.tokens.tolist()])[len(r.tokens) - 1 :] == c.logprobs.tolist()


def phases() -> list[Request]:
    """A prompt of each length from 1 to 64, and answers over the next end of a chunk."""
    prompts = [tuple(1 + (7 * i + n) % 38 for i in range(n)) for n in range(1, 65)]
    return [Request(i, p, SamplingParams(20, ignore_eos=True, seed=1)) for i, p in enumerate(prompts)]


@pytest.mark.parametrize("deepest", [1, 2, 7])
def test_every_phase(deepest: int) -> None:
    model = enlarged(SPEC, build_recipe("bf16", 2))
    expected = engine_of(model).generate(phases())
    engine = engine_of(model, deepest, (followers(phases(), expected), 0.7))
    assert engine.generate(phases()) == expected


@pytest.mark.parametrize("broken", ["grid", "convolution", "row"])
def test_a_wrong_way_back_is_found(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts behind the end of a block; rows before the convolution that move on; steps that read an older state."""
    model, asked = enlarged(SPEC, build_recipe("bf16", 2)), requests() if broken == "row" else phases()
    expected = engine_of(model).generate(asked)
    if broken == "grid":
        monkeypatch.setattr("jetrl.engine.speculation.verify.propose", without_grid)
    elif broken == "convolution":
        right = ops.conv_heads

        def shifted(*args: Any) -> Any:
            """As rows would be that are kept in order, with the last one always at the end."""
            found, (parts, state) = right(*args), args[-2:]
            if state is not None and max(parts.lengths) > 1:
                state[parts.rows.write] = state[parts.rows.write].roll(1, 1)
            return found

        monkeypatch.setattr(ops, "conv_heads", shifted)
    else:
        plain = ModelRunner._positions

        def stuck(self: Any, plan: Any, table: Any, states: Any, step: Any, real: Any) -> Any:
            return plain(self, plan, table, replace(states, read=states.read.clone()), step, real)

        monkeypatch.setattr(ModelRunner, "_positions", stuck)
    engine = engine_of(model, 7, (followers(asked, expected), 0.7), bursts=broken == "row")
    assert engine.generate(asked) != expected


def without_grid(state: DraftState, index: DraftIndex, depth: int) -> Any:
    return propose(replace(state, grid=0), index, depth)


def test_drafts_end_with_the_block() -> None:
    """None lies where the state of all of them would not serve the sequence's own token."""
    index = type("Always", (DraftIndex,), {"draft": lambda self, rows, depth: (
        torch.zeros(len(rows), depth, dtype=torch.int64), torch.full((len(rows),), depth), rows,
    )})(8, 256, torch.device("cpu"))
    state = DraftState.empty(6, 32, 7, 1, 8, index, grid=16)
    state.columns[1], state.columns[2] = torch.tensor([0, 7, 8, 14, 15, 62]), torch.tensor([99, 99, 99, 99, 18, 61])
    assert propose(state, index, 7).drafted.tolist() == [7, 7, 6, 0, 2, -2]


@pytest.mark.parametrize("bursts", [False, True])
def test_conversations_go_on(bursts: bool) -> None:
    """Turns that end at a stop within a burst: the state is kept where it serves, and else made again."""
    model = enlarged(SPEC, build_recipe("fp8", 2))

    def talk(engine: PagedEngine) -> tuple[list[Any], dict[int, list[int]]]:
        known, found = {i: [1 + i % 5, *range(2, 3 + 4 * i)] for i in range(6)}, list[Any]()
        for turn in range(4):
            sampling = SamplingParams(14, seed=turn, stop_token_ids=(3, 9, 11, 17, 25))
            asked = [Request(i, tuple(k), sampling, 200) for i, k in known.items()]
            engine.add(asked)
            if turn == 1:
                engine.step()
                if 2 in engine.drawn():
                    engine.cancel([2])
                    engine.add(asked[2:3])
            while engine.has_work:
                engine.step()
                engine._scheduler.check_integrity()
            for c in sorted(engine.collect(), key=lambda c: c.request_id):
                found.append((len(known[c.request_id]), c.tokens.tolist(), c.logprobs.tolist()))
                known[c.request_id] += [*c.tokens.tolist(), 5, 9 + turn]
        engine.forget(list(known))
        return found, known

    expected, known = talk(engine_of(model))
    follow: Known = {tuple(k[:n]): tuple(k[n:]) for k in known.values() for n in range(1, len(k))}
    for holds in (0.0, 0.7, 1.0):
        engine = engine_of(model, 7, (follow, holds), bursts)
        assert talk(engine) == (expected, known)
        assert (engine.take_metrics()["rollout/tokens_per_decode_step"] > 1.3) == (holds > 0)


def test_a_kept_state_that_does_not_serve_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where every row is taken to reach every token before it."""
    monkeypatch.setattr(Rows, "reaches", lambda self, computed, tokens: tokens <= computed)
    with pytest.raises(AssertionError):
        test_conversations_go_on(True)


def test_suspended_requests_go_on() -> None:
    model = enlarged(SPEC, build_recipe("bf16", 2))
    plain = engine_of(model).generate(requests())
    expected = {c.request_id: c for c in plain}
    engine = engine_of(model, 7, (followers(requests(), plain), 0.8), page_size=4, max_num_seqs=6)
    done = suspended_every(3, engine, requests())
    assert len(done) == len(expected) and all(c == expected[c.request_id] for c in done)


@pytest.mark.parametrize("name", ["tiny-hybrid", "tiny-hybrid-moe"])
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_the_certificate_of_drafts(name: str, precision: str) -> None:
    """Link v of `jetrl parity random:tiny-hybrid`, with enough new tokens for several blocks."""
    work, model = Workload(3, 70, 20, page_size=4), random_model(name, precision, "cpu", layers=4, masters=False)
    with torch.no_grad():
        link = draft_link(model, random_sequences(model, work), work)
    assert (link.link, link.rows, link.rows_different, link.first_difference) == ("v", 3 * 20, 0, None)


def test_a_run_with_drafts_is_the_run_without(tmp_path: Path) -> None:
    """With answers of 1 to 40 tokens that are carried over to the next weights, and after a restart."""
    changes = RAGGED | HYBRID | {"train.steps": 3, "checkpoint.save_interval": 1, "eval.eval_interval": 1}
    off = tiny_run(tmp_path / "off", changes)
    rows = numbers(off)
    assert max(row.get("rollout/version_spans", 0) for row in rows) > 1, "nothing was carried over"
    on = changes | {"rollout.speculate": "on"}
    tiny_run(tmp_path / "on", on | {"train.steps": 2})
    run = tiny_run(tmp_path / "on", on | {"checkpoint.resume": "auto"})
    assert weights_hash(run, 3) == weights_hash(off, 3)
    assert [plain(row) for row in numbers(run)] == rows
    gained = [row.get("in_eval/rollout/tokens_per_decode_step", 0.0) for row in numbers(run)]
    assert max(gained) > 1.0, "no draft ever held"


def test_steps_on_a_gpu_are_no_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """With states, only the device knows in a graph which rows count, so such a step is a plain one."""
    model = enlarged(SPEC, build_recipe("bf16", 2))
    expected = engine_of(model).generate(requests())
    engine = engine_of(model, 7, (followers(requests(), expected), 0.8))
    drafted = list[int]()
    plain = ModelRunner.run_drafted

    def noted(self: Any, plan: Any, *args: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(ModelRunner, "on_graphs", property(lambda self: True))
            drafted.append(plan.depth)
            return plain(self, plan, *args)

    monkeypatch.setattr(ModelRunner, "run_drafted", noted)
    assert engine.generate(requests()) == expected
    assert drafted and engine.runner.draft_graphs is None
