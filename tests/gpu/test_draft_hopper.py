"""Drafts on a GPU: a few tokens at once have the bits of one after another, a rollout those of one without drafts."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from bench_draft import Forced

from jetrl.engine.engine import PagedEngine
from jetrl.engine.graphs import drafts as draft_graphs
from jetrl.engine.settings import EngineSettings
from jetrl.engine.speculation.depth import DepthRule
from jetrl.engine.speculation.drafts import DraftIndex
from jetrl.engine.speculation.sources import SOURCES
from jetrl.engine.speculation.speculator import Speculator, build_speculator
from jetrl.types import Completion, LayerCache, Request, SamplingParams, WeightSet

pytestmark = pytest.mark.gpu
CUDA = "cuda"
LENGTHS = [8, 9, 64, 127, 128, 129, 130, 131, 134, 135, 136, 255, 256, 257, 260, 263, 385, 640, 900, 1025, 2050, 4097]
HEADS = [(32, 8, 128), (16, 8, 128), (64, 4, 128), (9, 3, 64), (14, 2, 64), (8, 8, 64)]


def _beside(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pages(g: int, h: int, page: int, fp8: bool) -> tuple[LayerCache, torch.Tensor, torch.Tensor]:
    """Random pages in random order, all of them written: what follows a sequence's end is another's, or stale."""
    gen = torch.Generator(CUDA).manual_seed(g + h + page)
    blocks = -(-(max(LENGTHS) + 8) // page)
    shape = (len(LENGTHS) * blocks, page, g, h)
    size = torch.exp2(torch.randint(-9, 6, (2, *shape[:3], 1), generator=gen, device=CUDA).float()) if fp8 else 1.0
    k, v = (torch.randn((2, *shape), generator=gen, device=CUDA) * size).to(torch.bfloat16)
    table = torch.randperm(shape[0], generator=gen, device=CUDA).view(len(LENGTHS), blocks).to(torch.int32)
    if not fp8:
        return LayerCache(k, v), table, torch.tensor(LENGTHS, dtype=torch.int32, device=CUDA)
    (kc, ks, _), (vc, vs, _) = (_beside("test_decode_hopper").quantize(x) for x in (k, v))
    scales = torch.stack((ks, vs), -1).transpose(1, 2).contiguous()
    return LayerCache(kc, vc, scales), table, torch.tensor(LENGTHS, dtype=torch.int32, device=CUDA)


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize(("n", "g", "h"), HEADS)
@pytest.mark.parametrize("tokens", [2, 4, 8])
def test_each_token_has_the_bits_of_a_step_of_its_own(n: int, g: int, h: int, fp8: bool, tokens: int) -> None:
    from jetrl.kernels.attention import decode as walk
    from jetrl.kernels.attention import decode_drafts

    for page in (128, 256):
        cache, table, lengths = pages(g, h, page, fp8)
        gen = torch.Generator(CUDA).manual_seed(tokens)
        q = torch.randn((len(LENGTHS), tokens, n, h), generator=gen, device=CUDA).mul_(3).to(torch.bfloat16)
        scale = h**-0.5
        together = decode_drafts.decode(q.flatten(0, 1), cache, table, lengths, scale, tokens).view(q.shape)
        for i in range(tokens):
            own = (lengths - (tokens - 1) + i).contiguous()
            alone = walk.decode(q[:, i].contiguous(), cache, table, own, scale)
            wrong = (together[:, i] != alone).flatten(1).any(1).nonzero()[:, 0].tolist()
            assert not wrong, f"token {i} of sequences with {[LENGTHS[b] for b in wrong]} keys, pages of {page}"
            assert torch.equal(together[:, i].view(torch.int16), alone.view(torch.int16)), "zeros of other signs"
        if h != 128:
            continue
        for pow2 in (False, True):
            both = decode_drafts.decode_quantize(q.flatten(0, 1), cache, table, lengths, scale, tokens, pow2)
            codes, units = both.codes.view(torch.uint8).view(*q.shape[:2], -1), both.scale.reshape(*q.shape[:2], -1)
            for i in range(tokens):
                own = (lengths - (tokens - 1) + i).contiguous()
                alone = walk.decode_quantize(q[:, i].contiguous(), cache, table, own, scale, pow2)
                assert torch.equal(codes[:, i], alone.codes.view(torch.uint8)) and torch.equal(units[:, i], alone.scale)


def requests(vocab: int, longest: int) -> list[Request]:
    """Groups that share prompts; greedy and hot ones, stop tokens, other lengths."""
    gen = torch.Generator().manual_seed(0)
    prompts = [tuple(torch.randint(1, vocab, (n,), generator=gen).tolist()) for n in (5, 40, 130, 250)]
    kinds = [
        SamplingParams(longest, ignore_eos=True), SamplingParams(longest // 2, temperature=0.7, seed=4),
        SamplingParams(longest, temperature=0.0), SamplingParams(longest - 9, temperature=1.2, stop_token_ids=(7, 11)),
    ]
    return [Request(i, prompts[i // 4 % 4], kinds[i % 4]) for i in range(24)]


def cut(asked: list[Request]) -> list[Request]:
    """The same from truncated distributions, some of them."""
    few = {"top_p": 0.9, "top_k": 40}
    return [replace(r, sampling=replace(r.sampling, **few)) if r.id % 3 == 0 else r for r in asked]


def engine_of(model: object, speculator: Speculator | None, **sizes: int) -> PagedEngine:
    settings = EngineSettings(**sizes)
    engine = PagedEngine(model, _beside("test_rollout_hopper").NoText(), "flow", settings, speculator=speculator)
    engine.load(WeightSet(1, "flow", {}))
    return engine


def assert_equal(got: list[Completion], want: list[Completion], what: str) -> None:
    for a, b in zip(got, want, strict=True):
        assert a == b, f"{what}: request {a.request_id} has other bits"


@pytest.mark.parametrize("depth", [1, 3, 7])
@pytest.mark.parametrize("precision", ["bf16", "fp8", "fp8 kv"])
@pytest.mark.parametrize("name", ["smollm2", "qwen3"])
def test_a_rollout_with_drafts_is_the_one_without(
    name: str, precision: str, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First its own drafts, of which few hold; then those from the answers before, which hold; and these with every
    fifth token spoilt. Runs of graphs, and steps without them for truncated distributions."""
    from jetrl.kernels.attention import decode_drafts

    launches, launch = [], decode_drafts._launch
    monkeypatch.setattr(decode_drafts, "_launch", lambda *args: (launches.append(1), launch(*args)))
    model = _beside("test_model_parity_hopper").build(name, precision)
    sizes = dict(page_size=128, max_num_seqs=24)
    for asked in (requests(model.spec.vocab_size, 90), cut(requests(model.spec.vocab_size, 40))):
        plain = engine_of(model, None, **sizes)
        want = plain.generate(asked)
        engine = engine_of(model, Speculator(DepthRule(len(SOURCES), depth, always=True), 24), **sizes)
        assert_equal(engine.generate(asked), want, "its own drafts")
        engine.take_metrics()
        assert_equal(engine.generate(asked), want, "drafts that hold")
        metrics = engine.take_metrics()
        assert metrics["rollout/tokens_per_decode_step"] > 1 + 0.4 * depth, metrics
        index = engine.speculator.index
        assert isinstance(index, DraftIndex)
        # old texts still end as new ones do at most places, so they give drafts, of which some do not hold
        index.texts[:, ::5] = (index.texts[:, ::5] + 1) % model.spec.vocab_size
        assert_equal(engine.generate(asked), want, "spoilt drafts")
        spoilt = engine.take_metrics()
        assert 0.0 < spoilt["rollout/draft_acceptance"] < metrics["rollout/draft_acceptance"], (spoilt, metrics)
        assert isinstance(engine.runner.draft_graphs, draft_graphs.DraftGraphs) and launches
        alone = engine_of(model, build_speculator("on", depth, 1), page_size=128, max_num_seqs=1)
        assert_equal(alone.generate(asked[:4]), want[:4], "one sequence")
        small = engine_of(model, build_speculator("on", depth, 7), page_size=64, max_num_seqs=7, max_tokens_per_step=64,
                          kv_cache_tokens=64 * 24)
        assert_equal(small.generate(asked), want, "few pages, FlashAttention-4's kernel, mixed batches")


def test_forced_acceptance_at_every_level() -> None:
    model = _beside("test_model_parity_hopper").build("qwen3", "fp8 kv")
    gen = torch.Generator().manual_seed(0)
    prompts = [tuple(torch.randint(1, 8000, (60,), generator=gen).tolist()) for _ in range(9)]
    asked = [Request(i, (i + 1, *p), SamplingParams(200, ignore_eos=True)) for i, p in enumerate(prompts)]
    want = engine_of(model, None, page_size=128).generate(asked)
    steps = []
    for holds in (0.0, 0.6, 1.0):
        speculator = Speculator(DepthRule(len(SOURCES), 7, always=True), 256)
        speculator.new_index = lambda *sizes, h=holds: Forced(*sizes).answering(asked, want, h, 8000)
        engine = engine_of(model, speculator, page_size=128)
        assert_equal(engine.generate(asked), want, f"acceptance {holds}")
        steps.append(engine.take_metrics()["rollout/tokens_per_decode_step"])
    assert steps[0] == 1.0 and 1.8 < steps[1] < 3.2 and steps[2] > 6.5, steps


def test_auto_changes_no_bit_and_drafts_what_holds() -> None:
    model = _beside("test_model_parity_hopper").build("smollm2", "fp8")
    asked = requests(model.spec.vocab_size, 300)
    want = engine_of(model, None, page_size=128).generate(asked)
    engine = engine_of(model, build_speculator("auto", 7, 256), page_size=128)
    for _ in range(3):
        assert_equal(engine.generate(asked), want, "auto")
    assert engine.take_metrics()["rollout/draft_share"] > 0.1
