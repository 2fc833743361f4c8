"""The engine on a model whose hidden states betray any error of the cache (`hash_model`), and on the real one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hash_model import SPEC, BurstRunner, HashModel, Letters, learners_logprobs, make_engine, real_model, straight

import jetrl.engine.engine
from jetrl.engine.engine import PagedEngine
from jetrl.engine.limits import RefusedRequest
from jetrl.engine.runner import ModelRunner
from jetrl.engine.settings import EngineSettings
from jetrl.engine.state_pool import StatePool, page_bytes, pages_in_memory
from jetrl.engine.stopper import Stopper
from jetrl.errors import OutOfMemory, UserError
from jetrl.kernels.attention.reference import read_cache, write_cache
from jetrl.kernels.reference import round_heads
from jetrl.precision.formats import BF16, kv_head
from jetrl.types import Completion, Request, SamplingParams, StepReport, WeightSet


def mixed_requests() -> list[Request]:
    prompts = [(1, 2, 3, 4, 5), (6, 7), (8,) * 13, (1, 2, 3, 4)]
    kinds = [
        SamplingParams(12), SamplingParams(9, temperature=0.7, top_p=0.8), SamplingParams(15, ignore_eos=True),
        SamplingParams(10, temperature=0.0), SamplingParams(11, top_k=5, stop_token_ids=(9, 11), seed=5),
    ]
    return [Request(100 + i, prompts[(i // 3) % 4], kinds[i % 5]) for i in range(24)]


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"page_size": 1, "max_num_seqs": 5, "max_tokens_per_step": 7},
        {"page_size": 3, "kv_cache_tokens": 30},
        {"page_size": 4, "kv_cache_tokens": 60, "max_tokens_per_step": 6, "max_num_seqs": 9},
    ],
)
@pytest.mark.parametrize("force", [None, lambda step, running: running[step % 3 :: 3] if step % 4 == 1 else ()])
def test_equals_straight_recomputation(sizes: dict[str, int], force: Callable | None) -> None:
    requests = mixed_requests()
    engine = make_engine(**sizes)
    completions = engine.generate(requests, force_preempt=force)
    assert [c.request_id for c in completions] == [r.id for r in requests]
    reasons = set()
    for r, c in zip(requests, completions, strict=True):
        tokens, lps = straight(HashModel(), r)
        assert list(c.tokens) == tokens and list(c.logprobs) == lps
        assert c.finish_reason == ("length" if len(tokens) == r.sampling.max_tokens and not ends(r, tokens) else "stop")
        assert (c.weight_version, c.flow_digest) == (3, "flow")
        reasons.add(c.finish_reason)
    assert reasons == {"stop", "length"}
    stats = engine.stats
    assert stats is not None and stats.generated_tokens == sum(len(c.tokens) for c in completions)
    assert (stats.preemptions > 0) == (force is not None or "kv_cache_tokens" in sizes)
    assert 0 < stats.peak_pages <= stats.num_pages and 0 < stats.model_seconds < stats.seconds


def ends(request: Request, tokens: list[int]) -> bool:
    p = request.sampling
    return tokens[-1] in p.stop_token_ids or (tokens[-1] == 0 and not p.ignore_eos)


def test_one_prefill_serves_a_group() -> None:
    engine = make_engine(model := HashModel())
    group = [Request(i, (1, 2, 3, 4, 5, 6, 7), SamplingParams(5, ignore_eos=True)) for i in range(8)]
    completions = engine.generate(group)
    assert model.rows == [7, 8, 8, 8, 8] and engine.stats is not None and engine.stats.computed_tokens == 39
    assert len({c.tokens.tobytes() for c in completions}) >= 4, "each sample draws for itself"
    alone = make_engine().generate(group[3:4])
    assert alone == [completions[3]], "a request's tokens do not depend on its company"


def test_stop_strings_end_with_the_token_that_completes_them() -> None:
    request = Request(1, (1, 2), SamplingParams(60, ignore_eos=True, seed=2))
    free = make_engine().generate([request])[0]
    text = free.text
    for stop in (text[20:23], text[7], text[11:30]):
        cut = dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, stop=("@@", stop)))
        (completion,) = make_engine(page_size=4).generate([cut])
        assert completion.text == text[: text.index(stop) + len(stop)]
        assert completion.tokens.tolist() == free.tokens[: len(completion.tokens)].tolist()
        assert completion.finish_reason == "stop"
    never = dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, stop=("@@", "a@")))
    assert make_engine().generate([never]) == [free]


def test_stop_strings_span_interruptions() -> None:
    """A sequence that was interrupted knows the letters from before."""
    asked = [Request(i, (1, 2), SamplingParams(40, ignore_eos=True, seed=2)) for i in range(4)]
    stops = [c.text[17:21] for c in make_engine().generate(asked)]
    cut = [
        dataclasses.replace(r, sampling=dataclasses.replace(r.sampling, stop=(stop,)))
        for r, stop in zip(asked, stops, strict=True)
    ]
    plain, engine = make_engine(), make_engine(max_num_seqs=3)
    found = engine.generate(cut, force_preempt=lambda step, running: running if step % 3 == 2 else ())
    assert found == plain.generate(cut) and all(c.text.endswith(s) for c, s in zip(found, stops, strict=True))
    assert engine.stats is not None and engine.stats.preemptions > 20


class Bytes:
    """Token t is byte t: characters of several bytes are cut by tokens; token 4 is special and decodes to nothing."""

    eos_token_id: int | None = None

    def decode(self, token_ids: list[int]) -> str:
        return bytes(t for t in token_ids if t != 4).decode("utf-8", errors="replace")


@pytest.mark.parametrize(
    ("text", "stop"), [("so läuft es", "ä"), ("x €uro", "€u"), ("end \n\n", "d \n"), ("aXb", "XXX")]
)
def test_stop_strings_across_bytes(text: str, stop: str) -> None:
    stopper = Stopper(frozenset(), Bytes(), 2)
    stopper.put(1, SamplingParams(99, stop=(stop,)))
    data = [4, *text.encode(), 4, 4]
    hits = stopper.check(np.array([1]), np.array(data)[:, None])[:, 0].tolist()
    wanted = [stop in Bytes().decode(data[: i + 1]) for i in range(len(data))]
    assert hits.index(True) == wanted.index(True) if any(wanted) else not any(hits)


def test_stop_token_is_kept_in_tokens_and_not_in_text() -> None:
    requests = [Request(i, (1, 2, 3), SamplingParams(120)) for i in range(24)]
    for eos_ids in ({0}, {0, 5}):
        settings = EngineSettings(eos_token_ids=frozenset(eos_ids))
        engine = PagedEngine(HashModel(), Letters(), "flow", settings)  # type: ignore[arg-type]
        engine.load(WeightSet(0, "flow", {}))
        stopped = [c for c in engine.generate(requests) if c.finish_reason == "stop"]
        assert {c.tokens[-1] for c in stopped} == eos_ids
        for c in stopped:
            assert len(c.tokens) == len(c.logprobs) and not eos_ids & set(c.tokens[:-1])
            assert c.text == Letters().decode(c.tokens[:-1].tolist())


def test_step_reports() -> None:
    steps: list[StepReport] = []
    requests = mixed_requests()
    engine = make_engine(max_num_seqs=5)
    completions = engine.generate(requests, on_step=steps.append)
    assert [s.step for s in steps] == list(range(1, len(steps) + 1))
    assert steps[-1] == StepReport(len(steps), 0, 0, 24, sum(len(c.tokens) for c in completions))
    assert all(s.running <= 5 and s.running + s.waiting + s.finished == 24 for s in steps)
    assert engine.generate([]) == [] == make_engine().generate([]), "with a cache and without"


def test_refusals() -> None:
    settings = EngineSettings(page_size=4, kv_cache_tokens=22)
    engine = PagedEngine(HashModel(), Letters(), "flow", settings)  # type: ignore[arg-type]
    request = Request(9, (1, 2), SamplingParams(4))
    with pytest.raises(ValueError, match="no weights are loaded"):
        engine.generate([request])
    with pytest.raises(ValueError, match="version 5 have flow other, this engine runs flow flow"):
        engine.load(WeightSet(5, "other", {}))
    engine.load(WeightSet(5, "flow", {}))
    assert len(engine.generate([request])) == 1
    with pytest.raises(UserError, match=r"request 9: 2 prompt tokens \+ max_tokens 23 = 25.*6 pages \* 4 tokens = 24"):
        engine.generate([Request(9, (1, 2), SamplingParams(23))])
    with pytest.raises(UserError, match="= 129, beyond the model's 128 positions"):
        make_engine().generate([Request(9, (1, 2), SamplingParams(127))])
    with pytest.raises(UserError, match="tokens from 1 to 40, but the model knows 0 to 39"):
        engine.generate([Request(9, (1, 40), SamplingParams(3))])
    with pytest.raises(UserError, match="top_p = 0"):
        engine.generate([Request(9, (1,), SamplingParams(3, top_p=0))])
    with pytest.raises(UserError, match="page_size = 0"):
        make_engine(page_size=0)


def test_cache_grows_with_need_and_is_released() -> None:
    engine = make_engine(page_size=4, max_num_seqs=2)
    engine.generate([Request(i, (1, 2), SamplingParams(2)) for i in range(5)])
    assert engine.runner.cache is not None and engine.runner.cache.num_pages == 3
    engine.generate([Request(i, (1, 2), SamplingParams(3 + i, ignore_eos=True)) for i in range(5)])
    assert engine.runner.cache is not None and engine.runner.cache.num_pages == 6
    engine.release()
    assert engine.runner.cache is None
    assert len(engine.generate([Request(0, (1, 2), SamplingParams(2))])) == 1


def test_a_cache_sized_by_need_lets_all_run_at_once() -> None:
    """Prompts that fill their pages from the start: the pages kept back for running sequences come on top."""
    model = HashModel()
    engine = make_engine(model, page_size=8)
    engine.generate([Request(i, tuple([1 + i] * 14), SamplingParams(2, ignore_eos=True)) for i in range(4)])
    assert engine.stats is not None and engine.stats.steps == 2, model.rows


def test_page_copies_read_before_they_write() -> None:
    cache = StatePool(SPEC, 4, 2, torch.bfloat16, torch.device("cpu"))
    for page in range(4):
        cache.keys[:, page], cache.values[:, page] = page, 10 + page
    cache.copy_pages(torch.tensor([[0, 1], [1, 2], [2, 3]]))
    assert cache.keys[1, :, 0, 0, 0].tolist() == [0, 0, 1, 2]
    assert cache.layer(0).values[:, 1, 1, 3].tolist() == [10, 10, 11, 12]


def test_memory_that_has_no_room_for_one_request_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, which others may hold. On a CPU the request is refused, as with `kv_cache_tokens`."""
    engine, requests = make_engine(page_size=4), [Request(7, (1, 2, 3), SamplingParams(6))]
    monkeypatch.setattr(jetrl.engine.engine, "pages_in_memory", lambda *_: 2)
    with pytest.raises(RefusedRequest, match="request 7: .* beyond the KV cache of 2 pages"):
        engine.generate(requests)
    monkeypatch.setattr(type(engine.runner), "device", torch.device("cuda"))
    with pytest.raises(OutOfMemory, match="room for a KV cache of 8 tokens, and the longest request may need 12"):
        engine.generate(requests)
    assert not engine.has_work


def test_an_fp8_cache_takes_its_bytes_and_copies_its_scales() -> None:
    """Codes, and two bytes of scale for each head of 8: 10 bytes where BF16 takes 16."""
    device, form = torch.device("cpu"), kv_head(SPEC.head_dim)
    plain, cache = (StatePool(SPEC, 4, 2, torch.bfloat16, device, f) for f in (BF16, form))
    heads = 2 * SPEC.num_layers * 4 * 2 * SPEC.num_kv_heads
    assert plain.num_bytes == heads * SPEC.head_dim * 2 == 4 * page_bytes(SPEC, 2, torch.bfloat16, BF16)
    assert cache.num_bytes == heads * (SPEC.head_dim + 2) == 4 * page_bytes(SPEC, 2, torch.bfloat16, form)
    assert cache.scales is not None and cache.num_pages == 4 and cache.page_size == 2
    assert pages_in_memory(SPEC, 2, torch.bfloat16, device, form) > 1.1 * pages_in_memory(
        SPEC, 2, torch.bfloat16, device, BF16
    )
    k, v = torch.randn(2, 8, SPEC.num_kv_heads, SPEC.head_dim, generator=torch.Generator().manual_seed(0)).bfloat16()
    for layer in range(SPEC.num_layers):
        write_cache(k * 2**layer, v, torch.arange(8), cache.layer(layer))
    cache.copy_pages(torch.tensor([[0, 1], [1, 2], [2, 3]]))
    for layer in range(SPEC.num_layers):
        keys, values = read_cache(cache.layer(layer), torch.arange(4)[None], torch.bfloat16)
        order = torch.tensor([0, 1, 0, 1, 2, 3, 4, 5])
        assert torch.equal(keys[0], round_heads(k * 2**layer)[order])
        assert torch.equal(values[0], round_heads(v)[order])


@pytest.mark.parametrize(("precision", "cache"), [("bf16", "bf16"), ("fp8", "bf16"), ("fp8", "fp8")])
def test_real_model_gives_the_learners_logprobs_bit_for_bit(precision: str, cache: str) -> None:
    """Sampled log-probs equal those of the trainer's whole-sequence forward; whatever the pages and chunks."""
    model = real_model(precision, cache)
    requests = [r for r in mixed_requests() if r.sampling.temperature == 1.0]
    results: list[list[Completion]] = []

    def preempt(step: int, running: tuple[int, ...]) -> tuple[int, ...]:
        return running[:1] if step % 7 == 6 else ()

    for sizes in ({}, {"page_size": 3, "kv_cache_tokens": 54, "max_tokens_per_step": 9, "max_num_seqs": 6}):
        engine = make_engine(model, **sizes)
        results.append(engine.generate(requests, force_preempt=preempt if sizes else None))
        assert engine.stats is not None and (engine.stats.preemptions > 0) == bool(sizes)
        assert engine.runner.cache is not None and (engine.runner.cache.scales is not None) == (cache == "fp8")
    assert results[0] == results[1]
    for r, c in zip(requests, results[0], strict=True):
        learner = learners_logprobs(model, [*r.tokens, *c.tokens])
        assert learner[len(r.tokens) - 1 :] == list(c.logprobs)
    assert len({c.tokens.tobytes() for c in results[0]}) > 8


@pytest.mark.parametrize("sizes", [{}, {"page_size": 3, "kv_cache_tokens": 99, "max_num_seqs": 6}], ids=str)
def test_bursts_of_steps_change_no_completion(sizes: dict[str, int]) -> None:
    requests = [
        dataclasses.replace(r, sampling=dataclasses.replace(r.sampling, stop=("cd",), max_tokens=30))
        for r in mixed_requests()
    ]
    plain, engine = make_engine(**sizes), make_engine(**sizes)
    engine.runner = runner = BurstRunner(engine.model, engine.settings)
    assert engine.generate(requests) == plain.generate(requests) and runner.bursts > 3
    assert engine.stats is not None and plain.stats is not None
    assert engine.stats.generated_tokens == plain.stats.generated_tokens < engine.stats.computed_tokens


def test_runner_refuses_to_run_without_a_cache() -> None:
    with pytest.raises(AssertionError, match="reserve"):
        ModelRunner(HashModel(), EngineSettings()).run(None, None)  # type: ignore[arg-type]


def test_an_observer_hears_of_every_plan_before_its_pass() -> None:
    """And changes no completion; on a GPU no step is in a graph then, so that none is missed."""
    model, heard = HashModel(), list[tuple[int, int]]()
    settings = EngineSettings(page_size=4, kv_cache_tokens=60, max_tokens_per_step=6, max_num_seqs=9)
    engine = PagedEngine(
        model, Letters(), "flow", settings, observe=lambda plan: heard.append((len(model.rows), len(plan.tokens)))
    )
    engine.load(WeightSet(3, "flow", {}))
    assert engine.generate(mixed_requests()) == make_engine(**dataclasses.asdict(settings)).generate(mixed_requests())
    assert heard == list(enumerate(model.rows)) and len(heard) > 20
    assert not engine.runner.cuda_graphs and make_engine().runner.cuda_graphs


def test_a_cache_may_be_smaller_than_the_one_before() -> None:
    """As where it does not stay during updates, and an evaluation asked for more: old page numbers are no pages now."""
    engine = make_engine(page_size=2, max_num_seqs=8)
    engine.generate([Request(i, (1, 2, 3, 4, i), SamplingParams(20, ignore_eos=True)) for i in range(8)])
    engine.release()
    request = Request(9, (5, 6, 7), SamplingParams(9, ignore_eos=True))
    (completion,) = engine.generate([request])
    assert list(completion.tokens) == straight(HashModel(), request)[0]
