"""An engine that the user names serves a run, its log-probs are compared as they are, and a bad one is refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import numbers, tiny_config, tiny_run

from jetrl.engine.engine import PagedEngine
from jetrl.errors import OutOfMemory, UserError
from jetrl.report.recorder import read_samples
from jetrl.run import loop
from jetrl.run.checked_engine import CheckedEngine, blamed
from jetrl.run.checkpoint.checkpoint import newest
from jetrl.run.engines import check_truncation, eos_ids, keep_cache
from jetrl.run.prepare import prepare
from jetrl.run.setup import build
from jetrl.train.batches import PackedBatch
from jetrl.types import Engine, Request, SamplingParams, WeightSet

PARITY = "parity/logprob_abs_diff_max"
# Our own engine behind a user's class; SHIFT is what its log-probs are wrong by.
ENGINE = """\
from dataclasses import replace

from jetrl.run.engines import paged_engine


class Own:
    keeps_bits = {keeps_bits}

    def __init__(self, context):
        assert context.eos_token_ids and context.base_config["model_type"] == "qwen3" and context.flow_digest
        self.inner = paged_engine(context)

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def load(self, weights):
        self.names = set(weights.tensors)
        assert "model.embed_tokens.weight" in self.names
        self.inner.load(weights)

    def add(self, requests):
        self.inner.add(requests)

    def step(self):
        return self.inner.step()

    def collect(self):
        return [
            replace(c, tokens=c.tokens.tolist(), logprobs=tuple(p + {shift} for p in c.logprobs.tolist()))
            for c in self.inner.collect()
        ]

    def forget(self, ids):
        self.inner.forget(ids)

    def release(self):
        self.inner.release()
"""


GOOD = ENGINE.format(keeps_bits=True, shift=0.0)


def named(folder: Path, keeps_bits: bool, shift: float = 0.0) -> dict[str, object]:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "own.py").write_text(ENGINE.format(keeps_bits=keeps_bits, shift=shift))
    return {"rollout.engine": f"{folder}/own.py:Own", "train.steps": 1}


def test_a_users_engine_serves_the_run(tmp_path: Path) -> None:
    plain = tiny_run(tmp_path / "a", {"train.steps": 1})
    other = tiny_run(tmp_path / "b", named(tmp_path / "b", True))
    assert list(read_samples(other)) == list(read_samples(plain))
    assert numbers(other)[1][PARITY] == 0.0


def test_what_its_log_probs_are_off_by_is_measured(tmp_path: Path) -> None:
    rows = numbers(tiny_run(tmp_path, named(tmp_path, False, -0.25)))
    assert rows[1][PARITY] == pytest.approx(0.25, abs=1e-6)
    assert rows[1]["parity/frac_tokens_different"] == 1.0


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("class Own:\n    def load(self, w): ...\n    def add(self, r): ...\n", "it has no step, collect, forget"),
        (ENGINE.format(keeps_bits="'yes'", shift=0.0), "set keeps_bits, to True only if"),
        (GOOD.replace("__init__(self, context)", "__init__(self)"), r"write Own.__init__\(self, context\)"),
        (GOOD.replace("        assert c", "        assert not c"), "the constructor raised AssertionError"),
        ("Own = 3\n", "Own"),
    ],
)
def test_an_engine_that_is_none_is_refused_before_the_run(tmp_path: Path, code: str, message: str) -> None:
    changes = named(tmp_path, True)
    (tmp_path / "own.py").write_text(code)
    with pytest.raises(UserError, match=rf"rollout\.engine.*{message}"):
        tiny_run(tmp_path, changes)
    if "constructor" not in message and "keeps_bits" not in message:  # a dry run makes no engine
        with pytest.raises(UserError, match=rf"rollout\.engine.*{message}"):
            prepare(tiny_config(tmp_path, changes))
    with pytest.raises(UserError, match="write jetrl, vllm, module:Class or"):
        tiny_run(tmp_path, changes | {"rollout.engine": "sglang"})


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("flow", 'precision = "fp8_rollout"'), ("kernels", 'kernels = "hopper_scaled_mm"'),
        ("engine", r'rollout.engine = ".*own.py:Own"'),
    ],
)
def test_truncation_is_refused_where_the_learner_cannot_find_what_was_kept(
    tmp_path: Path, given: str, why: str
) -> None:
    """Before anything is built; with the whole distribution's log-probs it runs as before."""
    cut: dict[str, Any] = {"rollout.top_p": 0.9, "rollout.min_p": 0.1, "train.steps": 1}
    cut |= named(tmp_path, False) if given == "engine" else {}
    cut |= {"precision": "fp8_rollout"} if given == "flow" else {}
    config = tiny_config(tmp_path, cut)
    told = rf"rollout.top_p = 0.9 and rollout.min_p = 0.1: .* with {why} its logits are not bit-equal.*logprobs = .full"
    if given == "kernels":
        with pytest.raises(UserError, match=told):
            check_truncation(config.model_copy(update={"kernels": "hopper_scaled_mm"}), True)
        return
    with pytest.raises(UserError, match=told):
        prepare(config)
    rows = numbers(tiny_run(tmp_path / "full", cut | {"rollout.logprobs": "full"}))
    assert rows[1]["policy/grad_norm"] > 0


def test_an_engine_that_says_late_that_its_bits_are_others_is_refused_with_truncation(tmp_path: Path) -> None:
    changes = named(tmp_path, True) | {"rollout.top_k": 4}
    lines = [line for line in GOOD.splitlines() if "keeps_bits" not in line]
    late = "\n".join(lines).replace("        self.inner =", "        self.keeps_bits = False\n        self.inner =")
    (tmp_path / "own.py").write_text(late)
    prepare(tiny_config(tmp_path, changes))
    with pytest.raises(UserError, match=r"rollout.top_k = 4: .*own.py:Own"):
        tiny_run(tmp_path, changes)
    (tmp_path / "own.py").write_text(GOOD)
    assert numbers(tiny_run(tmp_path, changes))[1][PARITY] == 0.0


def test_an_engine_without_gpu_memory_is_told_apart() -> None:
    for error, kind in ((torch.OutOfMemoryError("CUDA out of memory."), OutOfMemory), (KeyError("ours"), UserError)):
        with pytest.raises(UserError, match=rf"engine = own: step raised {type(error).__name__}: ") as told:
            with blamed("own", "step"):
                raise error
        assert type(told.value) is kind


class Least:
    """Only what an engine must have."""

    keeps_bits = False
    has_work = False
    forgotten: tuple[int, ...] = ()

    def load(self, weights: WeightSet) -> None: ...
    def add(self, requests: list[Request]) -> None: ...
    def step(self) -> None: ...
    def collect(self) -> list[object]:
        return []

    def forget(self, ids: list[int]) -> None:
        self.forgotten += tuple(ids)

    def release(self) -> None: ...


def test_optional_methods_of_an_engine_do_nothing_where_it_lacks_them() -> None:
    """Of a class with the required methods alone, and of a subclass of `Engine`; those that it has are called."""
    subclass = type("Sub", (Least, Engine), {})()
    for least in (Least(), subclass):
        engine = CheckedEngine(least, "own", 40)  # type: ignore[arg-type]
        assert isinstance(engine, Engine) and engine.about == "" and engine.take_metrics() == {}
        engine.add([Request(5, (1,), SamplingParams(1))])
        engine.expect([7])
        engine.cancel([5])
        engine.close()
        assert least.forgotten == (5,) and not engine.has_work, "a cancelled request is owed no completion"
    told: list[object] = []
    own = {n: lambda self, *args, n=n: told.append((n, *args)) for n in ("cancel", "expect", "close")}
    engine = CheckedEngine(type("All", (Least,), own)(), "own", 40)  # type: ignore[arg-type]
    engine.expect([7]), engine.cancel([5]), engine.close()
    assert told == [("expect", [7]), ("cancel", [5]), ("close",)]
    with pytest.raises(UserError, match="engine = own: cancel raised ValueError: no"):
        own["cancel"] = lambda self, ids: _raise()
        CheckedEngine(type("Bad", (Least,), own)(), "own", 40).cancel([5])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="abstract"):
        type("None_", (Engine,), {})()


def _raise() -> None:
    raise ValueError("no")


NO_IDS = "collect raised ValueError: token ids must be a row of integers, got an array of shape "


@pytest.mark.parametrize(
    ("method", "body", "message"),
    [
        ("step", "raise ValueError('server gone')", r"step raised ValueError: server gone \(.*own\.py, line \d+"),
        ("step", "raise SystemExit(0)", "step raised SystemExit: 0"),
        ("step", "self.inner.step()", "step: must return a StepReport, got NoneType"),
        ("load", "raise ConnectionError('refused')", "load raised ConnectionError: refused"),
        ("collect", "return None", "collect: must return a list, got NoneType"),
        ("collect", "self.inner.collect(); return []", "has_work: no work left, but 16 requests have no completion"),
        ("collect", "return self.inner.collect() * 2", "which is not open"),
        ("collect", "return [{}] if self.inner.collect() else []", "must return Completions, got dict"),
        ("completion", "tokens=[*map(float, c.tokens)]", NO_IDS + r"\(\d+,\) and type float64 \(.*own\.py, line \d+\)"),
        ("completion", "tokens=[c.tokens]", NO_IDS + r"\(\d+, \d+\) and type int32"),
        ("completion", "tokens=[2**40] * len(c.tokens)", "collect raised ValueError: .*: they must fit into 32 bits"),
        ("completion", "tokens=[*'ab']", NO_IDS + ".* and type <U1"),
        ("completion", "logprobs=[0] * len(c.tokens)", "collect raised .*: log-probs must be a row of floats, .*int64"),
        ("completion", "logprobs=[-1e300] * len(c.tokens)", "log-prob -inf is not a finite float"),
        ("completion", "logprobs=c.logprobs[1:]", "tokens and .* log-probs; need equal numbers, from 1 to 10"),
        ("completion", "tokens=[*c.tokens] * 11, logprobs=[*c.logprobs] * 11", "need equal numbers, from 1 to 10"),
        ("completion", "tokens=(10**6,) * len(c.tokens)", "token 1000000 is not an integer from 0 to"),
        ("completion", "logprobs=(float('nan'),) * len(c.tokens)", "log-prob nan is not a finite float"),
        ("completion", "request_id=7", "a completion of request 7, which is not open"),
        ("completion", "finish_reason='eos'", "finish_reason must be"),
        ("completion", "weight_version=99", "weight_version 99 .* but version 0"),
        ("completion", "text=b''", "text is of type bytes"),
    ],
    ids=str,
)
def test_an_engine_that_breaks_the_contract_ends_the_run_with_one_message(
    tmp_path: Path, method: str, body: str, message: str
) -> None:
    changes = named(tmp_path, True) | {"eval.eval_interval": 0}
    if method == "completion":
        method, body = "collect", f"return [replace(c, {body}) for c in self.inner.collect()]"
    end = f"\n    def {method}(self, *args):\n        {body}\n"
    (tmp_path / "own.py").write_text(GOOD + end)
    with pytest.raises(UserError, match=rf"rollout\.engine = .*own\.py:Own: {message}|: collect: .*{message}"):
        tiny_run(tmp_path, changes)


def test_what_had_finished_of_conversations_given_up_is_dropped(tmp_path: Path) -> None:
    engine = build(tiny_config(tmp_path, named(tmp_path, True))).engine
    assert isinstance(engine, CheckedEngine)
    engine.load(WeightSet(3, engine.inner.flow_digest, dict.fromkeys(["model.embed_tokens.weight"])))
    engine.add([Request(5, (3, 4), SamplingParams(max_tokens=1))])
    engine.step()
    assert not engine.inner.has_work, "it has finished, and is not collected yet"
    engine.forget([5])
    assert engine.collect() == [] and not engine.has_work


def test_what_an_engine_says_and_measures_reaches_the_run_and_it_is_closed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = named(tmp_path, True)
    (tmp_path / "own.py").write_text(GOOD + """
    about = "borrowed plumes"

    def take_metrics(self):
        return {"own/loads": 1.0}

    def close(self):
        print("own closed")
""")
    rows = numbers(tiny_run(tmp_path, changes))
    assert [row["own/loads"] for row in rows] == [1.0, 1.0]
    assert [row["in_eval/own/loads"] for row in rows] == [1.0, 1.0], "after the evaluation it is asked again"
    said = capsys.readouterr().out
    assert 0 <= said.index("borrowed plumes") < said.index("step 0/1") < said.index("own closed")


def test_settings_reach_engine_model_and_packer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings that must change no sample: nothing else would tell if they were lost on the way."""
    changes: dict[str, object] = {
        "rollout.page_size": 3, "rollout.kv_cache_tokens": 96, "rollout.max_num_seqs": 5,
        "rollout.max_tokens_per_step": 7, "train.activation_checkpointing": True,
    }
    session = build(tiny_config(tmp_path, changes))
    engine = session.engine
    assert isinstance(engine, PagedEngine) and session.model.activation_checkpointing
    told = engine.settings
    assert (told.page_size, told.kv_cache_tokens, told.max_num_seqs, told.max_tokens_per_step) == (3, 96, 5, 7)
    batches: list[PackedBatch] = []
    pack = loop.pack

    def seen(*args: Any, **options: Any) -> list[PackedBatch]:
        batches.extend(packed := pack(*args, **options))
        return packed

    monkeypatch.setattr(loop, "pack", seen)
    tiny_run(tmp_path, {"train.max_tokens_per_gpu": 40, "train.steps": 1})
    sizes = [len(micro.tokens) for batch in batches for micro in batch.micro_batches]
    assert len(sizes) > 4 and max(sizes) <= 40


def test_end_of_sequence_ids_come_from_tokenizer_and_folder(tmp_path: Path) -> None:
    tokenizer = SimpleNamespace(eos_token_id=7)
    assert eos_ids(tokenizer, None, 10) == {7}
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 8}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 7]}))
    assert eos_ids(tokenizer, tmp_path, 10) == {7, 8, 9}


@pytest.mark.parametrize("place", ["config.json", "generation_config.json", "the tokenizer"])
@pytest.mark.parametrize(("value", "message"), [
    ("end", "eos_token_id 'end' is not a token id"), (True, "eos_token_id True is not a token id"),
    ([1, True], "eos_token_id True is not a token id"), (1.0, "eos_token_id 1.0 is not a token id"),
    (1000000, r"eos_token_id 1000000 is not in the model's vocabulary \(ids from 0 to 9\)"),
    ([1, 10], "eos_token_id 10 is not in the model's vocabulary"), (-1, "eos_token_id -1 is not in the model's"),
], ids=str)
def test_an_end_of_sequence_id_that_the_model_does_not_have_is_refused(
    tmp_path: Path, place: str, value: Any, message: str
) -> None:
    (tmp_path / "config.json").write_text("{}")
    if place == "the tokenizer":
        tokenizer = SimpleNamespace(eos_token_id=value[1] if isinstance(value, list) else value)
    else:
        tokenizer = SimpleNamespace(eos_token_id=None)
        (tmp_path / place).write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(UserError, match=f"{place}: {message}"):
        eos_ids(tokenizer, tmp_path, 10)


@pytest.mark.parametrize(("keeps_bits", "shift"), [(True, -1e-3), (True, 0.0), (False, -1e-3)])
def test_an_engine_that_lies_about_its_bits_stops_the_run(tmp_path: Path, keeps_bits: bool, shift: float) -> None:
    changes = named(tmp_path, keeps_bits, shift) | {"train.steps": 2, "checkpoint.save_interval": 2}
    if not (keeps_bits and shift):
        tiny_run(tmp_path, changes)
        return
    with pytest.raises(UserError, match=r"own.py:Own sets keeps_bits = True, but in step 1 100% .* up to 0.001"):
        tiny_run(tmp_path, changes)
    run_dir = tmp_path / "runs" / "tiny"
    assert newest(run_dir / "checkpoints") == run_dir / "checkpoints" / "step_000001", "the step itself is sound"


def test_the_engine_learns_how_large_a_cache_may_stay_and_tells(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, {"rollout.kv_cache_tokens": 1 << 20})
    engine = build(config).engine
    assert isinstance(engine, PagedEngine) and engine.about == "" and engine.runner.keep_bytes is None
    keep_cache(engine, config, 1, 64 << 30)
    most = engine.runner.keep_bytes
    assert most is not None and (1 << 30) < most < (64 << 30) and "it stays on the GPU during updates" in engine.about
    keep_cache(engine, config, 1, 4 << 30)  # less than the reserve
    assert engine.runner.keep_bytes == 0 and "updates leave room for 0.0" in engine.about
    for mode, expected in (("never", 0), ("always", 4 << 30)):
        rollout = config.rollout.model_copy(update={"keep_kv_cache": mode})
        keep_cache(engine, config.model_copy(update={"rollout": rollout}), 1, 4 << 30)
        assert engine.runner.keep_bytes == expected and bool(engine.about) == (mode == "always")
