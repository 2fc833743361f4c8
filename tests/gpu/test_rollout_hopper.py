"""The engine on a GPU: sampled log-probs equal the learner's bit for bit, and the batch changes no token."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from jetrl.engine.engine import PagedEngine
from jetrl.engine.graphs import cache, capture
from jetrl.engine.graphs.decode import GraphSize
from jetrl.engine.graphs.mixed import MixedSize
from jetrl.engine.sampler import SamplingTable, sample_rows
from jetrl.engine.settings import EngineSettings
from jetrl.types import Completion, Request, SamplingParams, WeightSet

pytestmark = pytest.mark.gpu
CUDA = "cuda"


def _models() -> ModuleType:
    path = Path(__file__).with_name("test_model_parity_hopper.py")
    spec = importlib.util.spec_from_file_location("model_parity", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class NoText:
    eos_token_id = 0

    def decode(self, token_ids: list[int]) -> str:
        return " ".join(map(str, token_ids))


def requests(vocab: int) -> list[Request]:
    g = np.random.default_rng(0)
    kinds = [
        SamplingParams(30, ignore_eos=True), SamplingParams(45, temperature=0.7, top_p=0.9),
        SamplingParams(20, temperature=0.0), SamplingParams(60, temperature=1.2, seed=4),
        SamplingParams(25, top_k=50, min_p=0.01),
    ]
    prompts = [tuple(g.integers(1, vocab, n).tolist()) for n in (5, 40, 130, 17)]
    return [Request(i, prompts[i % 4], kinds[i % 5]) for i in range(40)]


def generate(model: object, asked: list[Request], **sizes: int | str) -> list[Completion]:
    engine = PagedEngine(model, NoText(), "flow", EngineSettings(**sizes))
    engine.load(WeightSet(1, "flow", {}))
    return list(engine.generate(asked))


@pytest.mark.parametrize("precision", ["bf16", "fp8", "fp8 kv"])
@pytest.mark.parametrize("name", ["smollm2", "qwen3"])
def test_sampled_logprobs_are_the_learners_and_batches_change_no_token(
    name: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jetrl.kernels.attention import choice

    launches, launch = [], choice._launch
    monkeypatch.setattr(choice, "_launch", lambda *args: (launches.append(1), launch(*args)))
    helpers = _models()
    model = helpers.build(name, precision)
    asked = requests(model.spec.vocab_size)
    wide = generate(model, asked, page_size=128)  # as in runs
    assert launches, "decoding did not take its kernel"
    narrow = generate(model, asked, max_num_seqs=7, max_tokens_per_step=48, page_size=64)
    for a, b in zip(wide, narrow, strict=True):
        assert a == b, f"request {a.request_id} depends on the batch"
    for temperature in (1.0, 0.7, 1.2):
        chosen = [
            (r, c) for r, c in zip(asked, wide, strict=True) if (r.sampling.temperature or 1.0) == temperature
        ]
        whole = [torch.tensor([*r.tokens, *c.tokens.tolist()]) for r, c in chosen]
        with torch.no_grad():
            hidden = model(helpers.varlen_batch(whole))
            targets = torch.cat([w.roll(-1) for w in whole]).to(CUDA)
            learner = model.token_logprobs(hidden, targets, temperature)[0].split([len(w) for w in whole])
        for (r, c), logp in zip(chosen, learner, strict=True):
            first = len(r.tokens) - 1
            got = torch.tensor(c.logprobs, dtype=torch.float32)
            want = logp[first : first + len(c.tokens)].cpu()
            assert torch.equal(got, want), f"request {r.id}: {(got - want).abs().max()} at most"


def test_draws_on_the_gpu_equal_those_on_the_cpu() -> None:
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(24, 49152, generator=g) * 4
    kinds = [SamplingParams(1), SamplingParams(1, temperature=0.6, top_p=0.9), SamplingParams(1, temperature=0.0)]
    for params in ([kinds[i % 3] for i in range(24)], [kinds[2 * (i % 2)] for i in range(24)]):
        table = SamplingTable.build(params, list(range(24)))
        for step in range(4):
            want = sample_rows(logits, table, np.arange(24) + step)
            got = sample_rows(logits.to(CUDA), table, np.arange(24) + step)
            assert torch.equal(got[0].cpu(), want[0]) and torch.equal(got[1].cpu(), want[1])


def test_broken_logits_are_reported() -> None:
    logits = torch.zeros(3, 100, device=CUDA)
    logits[1, 5] = float("nan")
    table = SamplingTable.build([SamplingParams(1)] * 3, [0, 1, 2])
    with pytest.raises(FloatingPointError, match=r"\[1\]"):
        sample_rows(logits, table, np.arange(3))


@pytest.mark.parametrize("precision", ["bf16", "fp8 kv"])
def test_merged_prefixes_change_no_token(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of a long prompt each, of which some end early: the decode graphs read shared pages once."""
    from jetrl.kernels.attention import decode_shared

    model = _models().build("qwen3", precision)
    g = np.random.default_rng(1)
    prompts = [tuple(g.integers(1, model.spec.vocab_size, n).tolist()) for n in (300, 700, 256, 90)]
    asked = [
        Request(i, prompts[i // 12], SamplingParams(20 + 7 * (i % 5), ignore_eos=True)) for i in range(48)
    ]
    apart = generate(model, asked, page_size=128)
    merged, go_on = [], decode_shared.go_on
    monkeypatch.setattr(decode_shared, "go_on", lambda *args: (merged.append(1), go_on(*args)))
    together = generate(model, asked, page_size=128, merge_prefix="on")
    assert merged, "no step merged anything"
    for a, b in zip(apart, together, strict=True):
        assert a == b, f"request {a.request_id}"


def ragged(vocab: int, count: int = 72) -> list[Request]:
    """More sequences than slots: they end one by one, and others begin with prompts of several lengths."""
    g = np.random.default_rng(5)
    prompts = [tuple(g.integers(1, vocab, 20 + 37 * (i % 4)).tolist()) for i in range(count)]
    return [Request(i, p, SamplingParams(9 + 4 * (i % 11), seed=i, ignore_eos=True)) for i, p in enumerate(prompts)]


@pytest.mark.parametrize("precision", ["bf16", "fp8", "fp8 kv"])
def test_graphs_outlive_an_update(precision: str) -> None:
    """Rollouts of other weights, published in place, replay what was captured before them: same bits, no capture."""
    model = _models().build("qwen3", precision)
    asked = ragged(model.spec.vocab_size)
    kept = PagedEngine(model, NoText(), "flow", EngineSettings(page_size=128, max_num_seqs=32, keep_bytes=1 << 40))
    freed = PagedEngine(model, NoText(), "flow", EngineSettings(page_size=128, max_num_seqs=32, keep_bytes=0))
    captured = []
    for version in range(1, 6):
        for engine in (kept, freed):
            engine.load(WeightSet(version, "flow", {}))
        got, want = kept.generate(asked), freed.generate(asked)
        assert got == want, f"weights of version {version}"
        assert kept.runner.graphs.sizes(GraphSize) and freed.runner.cache is None
        captured.append(kept.take_metrics()["perf/graph_captures"])
        assert freed.take_metrics()["perf/graph_captures"] > 0
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.03)
        model.publish()
    assert captured[0] > 0 and captured[-1] == 0, captured  # a size met for the third time still gets its own graph


@pytest.mark.parametrize("precision", ["bf16", "fp8", "fp8 kv"])
@pytest.mark.parametrize("name", ["smollm2", "qwen3"])
def test_graphs_of_steps_with_prompts_change_no_bit(name: str, precision: str) -> None:
    model = _models().build(name, precision)
    asked = ragged(model.spec.vocab_size)
    found = []
    for mixed in (False, True):
        settings = EngineSettings(page_size=128, max_num_seqs=24, keep_bytes=1 << 40)
        engine = PagedEngine(model, NoText(), "flow", settings)
        engine.runner.mixed_graphs = mixed
        engine.load(WeightSet(1, "flow", {}))
        found += [engine.generate(asked) for _ in range(3)]
        assert bool(engine.runner.graphs.sizes(MixedSize)) == mixed, "no step had a graph"
    assert all(one == found[0] for one in found)


def test_graphs_go_where_memory_is_short_and_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each capture finds too little memory, so the step that was not used for longest goes; the pool lives on."""
    model = _models().build("qwen3", "bf16")
    asked = ragged(model.spec.vocab_size)
    settings = EngineSettings(page_size=128, max_num_seqs=32, keep_bytes=1 << 40)
    plenty, short = (PagedEngine(model, NoText(), "flow", settings) for _ in range(2))
    for engine in (plenty, short):
        engine.load(WeightSet(1, "flow", {}))
    want = [plenty.generate(asked) for _ in range(3)]
    for name, value in (("_SHORT", 1 << 60), ("_TIGHT", 1 << 59)):
        monkeypatch.setattr(capture, name, value)
    monkeypatch.setattr(cache, "_LEAST", 2)
    assert [short.generate(asked) for _ in range(3)] == want
    kept = [size for kind in (GraphSize, MixedSize) for size in short.runner.graphs.sizes(kind)]
    assert len(kept) == 2 and short.take_metrics()["perf/graph_captures"] > 2
