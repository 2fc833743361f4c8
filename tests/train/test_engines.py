"""An engine that the user names serves a run, its log-probs are compared as they are, and a bad one is refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny import numbers, tiny_run

from jetrl.errors import UserError
from jetrl.report.recorder import read_samples
from jetrl.train.engines import eos_ids

PARITY = "parity/logprob_abs_diff_max"
# Our own engine behind a user's class; SHIFT is what its log-probs are wrong by.
ENGINE = """\
from dataclasses import replace

from jetrl.train.engines import paged_engine


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
        return [replace(c, logprobs=tuple(p + {shift} for p in c.logprobs)) for c in self.inner.collect()]

    def forget(self, ids):
        self.inner.forget(ids)

    def release(self):
        self.inner.release()
"""


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
        (ENGINE.format(keeps_bits="'yes'", shift=0.0), "set keeps_bits, True only if"),
        ("Own = 3\n", "Own"),
    ],
)
def test_an_engine_that_is_none_is_refused_before_the_run(tmp_path: Path, code: str, message: str) -> None:
    changes = named(tmp_path, True)
    (tmp_path / "own.py").write_text(code)
    with pytest.raises(UserError, match=rf"rollout\.engine.*{message}"):
        tiny_run(tmp_path, changes)
    with pytest.raises(UserError, match="write jetrl, module:Class or"):
        tiny_run(tmp_path, changes | {"rollout.engine": "vllm"})


def test_end_of_sequence_ids_come_from_tokenizer_and_folder(tmp_path: Path) -> None:
    tokenizer = SimpleNamespace(eos_token_id=7)
    assert eos_ids(tokenizer, None) == {7}
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 8}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 7]}))
    assert eos_ids(tokenizer, str(tmp_path)) == {7, 8, 9}
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": "end"}))
    with pytest.raises(UserError, match="eos_token_id 'end' is no token id"):
        eos_ids(tokenizer, str(tmp_path))
