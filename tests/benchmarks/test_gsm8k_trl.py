"""jetrl next to TRL: both sides follow one recipe, a missing peer is told, and what a side measured becomes a row."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import gsm8k_trl
import gsm8k_trl_peer as peer
import pytest
from common import ROOT

from jetrl.chat.tokenizer import load_tokenizer
from jetrl.config import Config, load_config
from jetrl.config.shipped import find_recipe
from jetrl.tasks.task import build_task, sample

RECIPE = "gsm8k_qwen2.5_0.5b"
TOKENIZER = ROOT / "examples" / "byte_tokenizer"


@pytest.fixture
def given(tmp_path: Path) -> argparse.Namespace:
    rows = [{"question": f"How much is {i} + {i}?", "answer": f"It is {2 * i}.\n#### {2 * i}"} for i in range(12)]
    for name, part in (("train", rows[:8]), ("test", rows[8:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return gsm8k_trl.parsed([
        "--model", str(tmp_path), "--train", str(tmp_path / "train.jsonl"), "--eval", str(tmp_path / "test.jsonl"),
        "--out", str(tmp_path / "out.json"), "--steps", "6", "device=cpu", f"model.tokenizer={TOKENIZER}",
        "rollout.prompts_per_step=4", "task.max_prompt_length=200", "task.num_eval=4",
    ])


def config_of(given: argparse.Namespace) -> Config:
    return load_config(find_recipe(RECIPE), gsm8k_trl.overrides_of(given), lambda _: None)


def test_the_peer_gets_the_recipe(given: argparse.Namespace, tmp_path: Path) -> None:
    config = config_of(given)
    args = argparse.Namespace(batch=16, steps=6, out=tmp_path, engine="vllm", checkpointing=False, uncorrected=False,
                              vllm_memory=0.2)
    found = peer.arguments_of(config, args)
    assert found["per_device_train_batch_size"] * found["gradient_accumulation_steps"] == 4 * config.rollout.group_size
    assert (found["learning_rate"], found["warmup_steps"], found["beta"], found["temperature"]) == (2e-6, 5, 0.0, 1.0)
    assert found["max_completion_length"] == config.rollout.max_response_length == 512
    assert found["use_vllm"] and found["vllm_importance_sampling_correction"] and not found["shuffle_dataset"]
    args.batch = 3
    with pytest.raises(SystemExit, match="--batch 3 does not divide the 32 answers"):
        peer.arguments_of(config, args)


@pytest.mark.parametrize("override", ["rl.kl_coef=0.1", "rl.algo=dr_grpo", "rl.updates_per_step=2"])
def test_another_objective_is_refused(override: str, given: argparse.Namespace, tmp_path: Path) -> None:
    given.overrides.append(override)
    with pytest.raises(SystemExit, match="GRPO without KL"):
        peer.arguments_of(config_of(given), argparse.Namespace(batch=8))


def test_the_peer_gets_the_problems_in_the_order_of_the_run(given: argparse.Namespace) -> None:
    config = config_of(given)
    rows = peer.problems_of(config, 3)
    tokenizer = load_tokenizer(str(TOKENIZER))
    task = build_task(config.task, config.seed, tokenizer)
    run = [sample(task, tokenizer, step * 4, 4, config) for step in range(3)]
    problems = [prompt.problem for step in run for prompt in step]
    assert [row["prompt"][-1]["content"] for row in rows] == [problem.prompt for problem in problems]
    assert [row["answer"] for row in rows] == [problem.answer for problem in problems]


def test_a_side_becomes_a_row(given: argparse.Namespace) -> None:
    given.warmup = 1
    row = {"time/rollout": 1.0, "time/update": 2.0, "time/step": 4.0, "response_length/mean": 10.0}
    compiling = {**row, "time/step": 99.0, "time/eval": 5.0}
    found = gsm8k_trl.summary("trl", [compiling, {**row, "time/checkpoint": 0.5}, row, row], given)
    assert (found["step s"], found["rollout s"], found["update s"], found["rest s"]) == (4.0, 1.0, 2.0, 1.0)
    assert found["answers/s"] == 32 / 4.0 and found["steps an hour"] == 900 and found["steps"] == 4
    assert found["gap mean"] is None and found["gap max"] is None, "not reported is not 0"
    gaps = {"parity/logprob_abs_diff_mean": 0.5, "parity/logprob_abs_diff_max": 3.0}
    assert gsm8k_trl.summary("trl", [row, {**row, **gaps}], given)["gap max"] == 3.0
    assert gsm8k_trl.seconds({**row, "time/checkpoint": 0.5, "time/eval": 1.0}) == 2.5


def test_phases_of_a_peers_step() -> None:
    phases = peer.Phases()
    for name, seconds in (("sync_weights", 0.5), ("vLLM.generate", 2.0), ("before the update", 3.0)):
        phases.add(name, seconds)
    assert phases.step(5.0) == {
        "time/rollout": 2.0, "time/sync": 0.5, "time/prepare": 0.5, "time/update": 2.0, "time/step": 5.0,
    }
    assert phases.step(1.0)["time/rollout"] == 0.0, "a step begins with none"
    assert peer.of_log({"reward": "0.25", "loss": "1"}) == {"reward/mean": 0.25}


def test_what_is_missing_is_told(given: argparse.Namespace, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="no_such_package: not installed here. The peer needs `pip install trl"):
        peer.require("json", "no_such_package")
    common = ["--model", str(given.model), "--train", str(given.train), "--eval", str(given.eval), "--out", "x.json"]
    for more, message in [
        (["--sides", "verl"], "'verl' is none of fp8"), (["--steps", "5"], "leaves none after --warmup 5"),
        (["--train", "/no/such.jsonl"], "there is no such file"),
    ]:
        with pytest.raises(SystemExit):
            gsm8k_trl.parsed([*common, *more])
        assert message in capsys.readouterr().err


def test_memory_is_not_measured_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with gsm8k_trl.memory() as used:
        pass
    assert used == []
