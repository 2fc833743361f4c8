"""Blocks from outside whose states the package does not know: rollout = training, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hopper_inputs
import numpy as np
import pytest
import torch
from doors import hybrid
from doors.hybrid import KINDS, WIDTH, MovingAverage, register, spec_of
from enlarged import enlarged
from hash_model import BurstRunner, Letters, learners_logprobs, suspended_every
from replays import Static, graph_cache
from tiny import ARCH, numbers, tiny_config, tiny_run, weights_hash

from jetrl.engine.engine import PagedEngine
from jetrl.engine.graphs.cache import GraphCache
from jetrl.engine.graphs.decode import DecodeGraphs, GraphSize, _Held
from jetrl.engine.plan import Plan
from jetrl.engine.rows import PADDING, ZEROS, rows_for
from jetrl.engine.runner import ModelRunner
from jetrl.engine.sampler import SamplingTable
from jetrl.engine.settings import EngineSettings
from jetrl.engine.speculation.speculator import build_speculator
from jetrl.engine.state_pool import StatePool, grid_of, page_bytes, pages_in_memory, row_bytes
from jetrl.errors import UserError
from jetrl.kernels.dispatch import load_backend
from jetrl.model.transformer import Transformer
from jetrl.parity.certificate import Workload, certify
from jetrl.precision.flow import require_unified
from jetrl.precision.formats import BF16, kv_head
from jetrl.precision.recipe import build_recipe
from jetrl.run.prepare import prepare
from jetrl.types import Completion, Request, SamplingParams, WeightSet

WORK = Workload(num_sequences=4, max_prompt=20, new_tokens=6, chunk=5, page_size=4)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch)


def model_of(kind: str, precision: str = "fp8", layers: int = 2, cache: str = "bf16") -> Transformer:
    spec = spec_of(kind, layers)
    recipe = build_recipe(precision, layers, kv_cache=cache, head_dim=spec.head_dim)
    require_unified(spec, recipe)
    return enlarged(spec, recipe)


def engine_of(model: Transformer, **sizes: Any) -> PagedEngine:
    engine = PagedEngine(model, Letters(), "flow", EngineSettings(**sizes))
    engine.load(WeightSet(3, "flow", {}))
    return engine


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("precision", "cache"), [("bf16", "bf16"), ("fp8", "bf16"), ("fp8", "fp8")])
def test_the_certificate(kind: str, precision: str, cache: str) -> None:
    """Packed, chunks of prompts, decoding with preemption, shared prompts; drafts where they can be taken back."""
    result = certify(model_of(kind, precision, cache=cache), WORK, "test", lambda text: None)
    assert result.ok, result.links
    assert [link.link for link in result.links] == [*"abc", *("v" if kind == "latent" else ""), "s", "w"]


def test_a_state_that_depends_on_passes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = hybrid.average
    monkeypatch.setattr(hybrid, "average", lambda x, before: plain(x, before.to(torch.bfloat16).to(torch.float32)))
    result = certify(model_of("moving_average"), WORK, "test", lambda text: None)
    assert [link.link for link in result.links if not link.ok] == ["b", "c", "w"]


def requests() -> list[Request]:
    """Groups of several sizes, more than there are slots, with prompts of 1 to 13 tokens."""
    prompts = [(1, 2, 3, 4, 5), (6,), (8,) * 13, (1, 2, 3, 4), (9, 8, 7, 6, 5, 4, 3)]
    return [Request(100 + i, prompts[i // 5 % 5], SamplingParams(4 + i % 9, ignore_eos=i % 2 == 0)) for i in range(25)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_completions_have_the_learners_log_probs(kind: str, precision: str) -> None:
    """Whatever the pages, slots, chunks, preemptions and bursts: groups fork, wait and begin again."""
    model = model_of(kind, precision, layers=3)

    def preempt(step: int, running: tuple[int, ...]) -> tuple[int, ...]:
        return running[step % 2 :: 3] if step % 6 == 5 else ()

    results: list[list[Completion]] = []
    for sizes, burst in (
        ({}, False), ({"max_num_seqs": 3}, True),
        ({"page_size": 3, "kv_cache_tokens": 54, "max_tokens_per_step": 5, "max_num_seqs": 4}, False),
    ):
        engine = engine_of(model, **sizes)
        if burst:
            engine.runner = BurstRunner(model, engine.settings)
        results.append(engine.generate(requests(), force_preempt=preempt if sizes and not burst else None))
        assert engine.stats is not None and (engine.stats.preemptions > 0) == ("page_size" in sizes)
    assert results[0] == results[1] == results[2]
    for r, c in zip(requests(), results[0], strict=True):
        assert learners_logprobs(model, [*r.tokens, *c.tokens.tolist()])[len(r.tokens) - 1 :] == c.logprobs.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_suspended_requests_go_on_with_their_states(kind: str) -> None:
    """A state is made again from the tokens, as keys are: nothing of it is in what is suspended."""
    model = model_of(kind)
    expected = {c.request_id: c for c in engine_of(model).generate(requests())}
    done = suspended_every(5, engine_of(model, page_size=4, max_num_seqs=5), requests())
    assert len(done) == 25 and all(c == expected[c.request_id] for c in done)


class Replayed(DecodeGraphs):
    """Graphs without a GPU."""

    def _prepare(self, of: GraphSize) -> _Held:
        held = super()._prepare(of)
        held.step = Static(held.step)
        return held


class GraphRunner(ModelRunner):
    """Decode steps as on a GPU: fixed shapes, padding rows, bursts in which each step reads what the last one wrote."""

    @property
    def graphs(self) -> GraphCache:
        self._graphs = self._graphs or graph_cache(self.model)
        return self._graphs

    def burst(self, plan: Plan, table: SamplingTable) -> int:
        return 4 if plan.is_decode else 0

    def run(self, plan: Plan, table: SamplingTable, steps: int = 1) -> tuple[np.ndarray, np.ndarray]:
        if not plan.is_decode:
            return super().run(plan, table)
        assert self.cache is not None
        if len(plan.copies):
            self.cache.copy_pages(torch.from_numpy(plan.copies))
        if self.decode_graphs is None:
            self.decode_graphs = Replayed(self.model, self.cache, self.graphs, 8)
        with torch.no_grad():
            return self._decode(plan, table, steps)


@pytest.mark.parametrize("kind", KINDS)
def test_decode_graphs_move_states(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(kind, layers=3)
    backend = load_backend("reference")
    monkeypatch.setattr(  # the CPU draws with `sample_rows`; a padding row is at position 0
        backend, "sample", lambda *args: hopper_inputs.draw(*args[:3], args[3].clamp_min(1)), raising=False
    )
    engine = engine_of(model, max_num_seqs=6)
    expected = engine.generate(requests())
    engine.runner = GraphRunner(model, engine.settings)
    assert engine.generate(requests()) == expected
    assert engine.runner.graphs.number > 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [{}, {"max_num_seqs": 2}, {"kv_cache_tokens": 150, "page_size": 2}], ids=str)
@pytest.mark.parametrize("bursts", [False, True])
def test_turns_go_on_from_what_was_kept(kind: str, sizes: dict[str, int], bursts: bool) -> None:
    """Conversations with replies between turns; one turn is cancelled and asked again."""
    model = model_of(kind)
    engine = engine_of(model, **sizes)
    if bursts:
        engine.runner = BurstRunner(model, engine.settings)
    known = {i: [1 + i % 2, 2, 3] for i in range(5)}
    drawn: dict[int, list[tuple[int, float]]] = {i: [] for i in known}
    for turn in range(3):
        asked = [Request(i, tuple(k), SamplingParams(7, ignore_eos=i % 2 == 0), 100) for i, k in known.items()]
        engine.add(asked)
        if turn == 1:
            engine.step()
            engine.cancel([2])
            engine.add(asked[2:3])
        while engine.has_work:
            engine.step()
            engine._scheduler.check_integrity()
        for c in engine.collect():
            first = len(known[c.request_id])
            drawn[c.request_id] += enumerate(c.logprobs.tolist(), first)
            known[c.request_id] += [*c.tokens.tolist(), 5, 9 + turn]
    if not sizes and not bursts:
        assert engine._scheduler.num_computed_tokens < sum(len(k) for k in known.values()), "nothing was kept"
    engine.forget(list(known))
    assert engine.stats is not None
    for i, tokens in known.items():
        learner = learners_logprobs(model, tokens)
        assert [learner[at - 1] for at, _ in drawn[i]] == [value for _, value in drawn[i]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_trains_and_resumes(kind: str, tmp_path: Path) -> None:
    """Rollout = training in every step, in the loss too: gradients reach the block. A checkpoint goes on to the bit."""
    arch = {"model.arch": ARCH | {"model_type": kind}, "rollout.max_num_seqs": 5}
    straight = tiny_run(tmp_path / "a", arch)
    rows = numbers(straight)
    assert all(row["parity/logprob_abs_diff_max"] == 0.0 for row in rows[1:])
    shared = tiny_run(tmp_path / "b", arch | {"train.steps": 1, "train.share_prompts": True, "eval.eval_interval": 0})
    assert numbers(shared)[-1]["parity/logprob_abs_diff_max"] == 0.0
    tiny_run(tmp_path / "c", arch | {"train.steps": 2})
    resumed = tiny_run(tmp_path / "c", arch | {"checkpoint.resume": "auto"})
    assert weights_hash(resumed, 4) == weights_hash(straight, 4) != weights_hash(straight, 2)


def test_gradients_are_those_of_the_recurrence() -> None:
    """Against the same sums in float64, without packing."""
    spec = spec_of("moving_average")
    model = Transformer(spec, build_recipe("bf16", 2), dtype=torch.float32).init_random(0).publish()
    block = model.layers[0].mix
    assert isinstance(block, MovingAverage)
    x = torch.randn(2, 7, 2 * spec.hidden_size, generator=torch.Generator().manual_seed(0)).requires_grad_()
    hybrid.average(x, torch.zeros(())).square().sum().backward()
    exact = x.detach().double().requires_grad_()
    value, gate = exact.chunk(2, -1)
    gate, h, total = (gate / 8 + 0.5).clamp(0, 1), torch.zeros(()), torch.zeros((), dtype=torch.float64)
    for t in range(7):
        h = gate[:, t] * h + (1 - gate[:, t]) * value[:, t]
        total = total + h.square().sum()
    total.backward()
    assert x.grad is not None and exact.grad is not None and (x.grad - exact.grad).norm() < 1e-6 * exact.grad.norm()


def test_drafts_are_refused_by_name(tmp_path: Path) -> None:
    """Before the run where it can be known; a block whose rows can be written again takes them."""
    speculator = build_speculator("on", 3, 4)
    words = "rollout.speculate: layers of the kind moving_average keep one state per sequence"
    with pytest.raises(UserError, match=words):
        PagedEngine(model_of("moving_average"), Letters(), "flow", EngineSettings(), speculator)
    changes = {"model.arch": ARCH | {"model_type": "moving_average"}, "rollout.speculate": "on"}
    with pytest.raises(UserError, match=words):
        prepare(tiny_config(tmp_path, changes))
    prepare(tiny_config(tmp_path, changes | {"model.arch": ARCH | {"model_type": "latent"}}))


def test_the_pool_holds_what_is_declared() -> None:
    """Four layers, two with attention. Bytes by hand."""
    device, bf16 = torch.device("cpu"), torch.bfloat16
    for kind, format in (("moving_average", BF16), ("latent", BF16), ("latent", kv_head(16))):
        spec = spec_of(kind, 4)
        pool = StatePool(spec, 5, 8, bf16, device, format, rows_for(3) if grid_of(spec) else 0)
        assert pool.keys.shape == pool.values.shape == (2, 5, 8, 2, 16)
        head = 16 * 2 if format == BF16 else 16 + 2
        page = 8 * 2 * (2 * 2 * head + (WIDTH * 2 if kind == "latent" else 0))
        row = 2 * 72 * 4 if kind == "moving_average" else 0
        assert page_bytes(spec, 8, bf16, format) == page and row_bytes(spec, bf16) == row
        assert pool.num_bytes == 5 * page + (8 * row if row else 0)
        pool.layer(3).keys.view(torch.uint8).fill_(1)
        assert pool.keys.view(torch.uint8)[1].all() and not pool.keys.view(torch.uint8)[0].any()
        with pytest.raises(KeyError):
            pool.layer(2)
    assert grid_of(spec_of("moving_average")) == 1 and grid_of(spec_of("latent")) == 0
    latent = pool.state(2, "latent")
    assert latent.shape == (5, 8, WIDTH)
    latent[1:4] = torch.arange(1, 4)[:, None, None]
    pool.copy_pages(torch.tensor([[1, 2], [2, 3]]))
    assert pool.state(2, "latent")[:, 0, 0].tolist() == [0, 1, 1, 2, 0] and not pool.state(0, "latent").any()
    assert (ZEROS, PADDING) == (0, 1)
    spec = spec_of("moving_average", 4)
    few = pages_in_memory(spec, 8, bf16, device, BF16, 0, 10**9)
    assert few == 0 < pages_in_memory(spec, 8, bf16, device)
