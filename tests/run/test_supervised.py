"""method = "sft": a run on given answers. It learns, resumes to the bit, samples nothing, and refuses bad data."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from tiny import ARCH, numbers, saved, tiny_config, tiny_run

from jetrl.config import load_config, resolve
from jetrl.config.shipped import shipped
from jetrl.config.supervised import of_rl_alone
from jetrl.errors import UserError
from jetrl.report.recorder import read_metrics
from jetrl.run.fit.memory import predict
from jetrl.run.loop import StopRequest, evaluate_once, run
from jetrl.run.no_engine import NoEngine
from jetrl.run.prepare import in_steps, prepare
from jetrl.run.preview import preview
from jetrl.run.replay.bisect import bisect
from jetrl.run.replay.checks import replay
from jetrl.run.setup import build
from jetrl.run.start import summarize
from jetrl.run.supervised import held_out_loss

pytestmark = pytest.mark.timeout(300)


def supervised(**more: Any) -> dict[str, Any]:
    """Changes of a tiny recipe: its sums, learned from their worked solutions."""
    return {
        "method": "sft", "rollout": {}, "task.reward": None, "task.max_prompt_length": None, "train.batch_size": 8,
        "train.max_length": 64, "train.max_tokens_per_gpu": 64, "train.lr": 1e-2, "train.steps": 6,
        "checkpoint.save_interval": 2, "eval.eval_interval": 2,
    } | more


def chats(folder: Path, rows: list[Any]) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return supervised(**{
        "task.name": "file", "task.params": None, "task.train_file": str(folder / "chats.jsonl"), "task.num_eval": 2,
    })


def talk(*texts: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]}


def test_it_learns_and_measures_held_out_answers(tmp_path: Path):
    run_dir = tiny_run(tmp_path, supervised(**{"train.steps": 12, "precision": "fp8"}))
    first, *rows = read_metrics(run_dir)
    assert rows[-1]["sft/loss"] < 0.8 * rows[0]["sft/loss"]
    assert rows[-1]["eval/addition/loss"] < 0.8 * first["eval/addition/loss"]
    for row in rows:
        assert row["policy/loss"] == pytest.approx(row["sft/loss"], rel=1e-6)
        assert 0 < row["sft/num_learned_tokens"] < row["sft/num_tokens"]
        assert not any(key.startswith(("reward/", "parity/", "response_length/")) for key in row)
    assert (run_dir / "report.html").is_file()
    assert not (run_dir / "replay").exists()
    for again in (lambda: replay(run_dir, 2, "update"), lambda: bisect(run_dir, tmp_path)):
        with pytest.raises(UserError, match=r'learned given answers .method = "sft".: nothing was sampled'):
            again()
    said = Console(file=io.StringIO(), width=300)
    summarize(run_dir, said)
    assert f"model.path={run_dir}/checkpoints/step_000012/model" in said.file.getvalue()


def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(tmp_path: Path):
    rows = [talk(f"{i}+{i}=", str(2 * i), "+1=", str(2 * i + 1)) for i in range(10, 40)]
    changes = chats(tmp_path, rows) | {"precision": "fp8", "train.batch_size": 7}
    whole = tiny_run(tmp_path / "whole", changes)
    part = tmp_path / "part" / "runs" / "tiny"
    shutil.copytree(whole, part)
    for step in (4, 6):
        shutil.rmtree(part / "checkpoints" / f"step_{step:06d}")
    before = torch.get_num_threads()
    assert run(tiny_config(tmp_path / "part", changes | {"checkpoint.resume": "auto"}), part, ["test"], StopRequest())
    torch.set_num_threads(before)
    assert numbers(part) == numbers(whole)
    assert all(torch.equal(value, saved(part, 6)[name]) for name, value in saved(whole, 6).items())


def test_adapters_learn_over_a_frozen_base(tmp_path: Path):
    changes = supervised(**{"lora.rank": 8, "precision": "w8a16", "train.steps": 2, "model.arch": ARCH})
    run_dir = tiny_run(tmp_path, changes)
    after = saved(run_dir, 2)
    masters = [name for name in after if name.startswith("model.")]
    assert masters and all("lora" in name for name in masters), "a checkpoint holds the adapters alone"
    before = saved(run_dir, 0)
    assert any(not torch.equal(before[name], after[name]) for name in masters)
    # and RL goes on from them: a warm start of adapters alone, whose reference is the base all the same
    folder = run_dir / "checkpoints" / "step_000002" / "model"
    own = {"model.arch": None, "model.tokenizer": None, "model.path": str(folder), "lora.rank": 8, "train.steps": 2}
    rl = tiny_run(tmp_path / "rl", own | {"precision": "w8a16", "rl.kl_coef": 0.1, "train.lr": 1e-3})
    for name in masters:  # without an update they are what the first run ended with, rounded to BF16 in the folder
        assert torch.equal(saved(rl, 0)[name], after[name].bfloat16().to(after[name].dtype))
    first, second = [row for row in numbers(rl) if row["step"]]
    assert first["parity/logprob_abs_diff_mean"] == second["parity/logprob_abs_diff_mean"] == 0
    assert first["policy/ref_kl"] > 0, "the reference is not the policy that RL begins with"


def test_nothing_is_built_that_samples_and_the_dry_run_knows(tmp_path: Path):
    before = torch.get_num_threads()
    config = tiny_config(tmp_path, supervised())
    session = build(config)
    assert isinstance(session.engine, NoEngine)
    memory = predict(config, session.model.spec, 1, 80 << 30)
    assert memory.cache == 0 and memory.rollout_passing == 0 and memory.peak == memory.update
    shown = list(preview(in_steps(config, session.task), prepare(config)))
    assert any(line.startswith("The first conversation of the run (problem ") for line in shown)
    (text,) = [line for line in shown if line.startswith("  | ")]
    assert text.count("[[") == text.count("]]") == 1 and text.index("=") < text.index("[["), "the sum is not learned"
    assert list(held_out_loss(session)) == ["eval/addition/loss"] == list(evaluate_once(session))
    torch.set_num_threads(before)


def test_epochs_are_of_answers(tmp_path: Path):
    rows = [talk(f"{i}+{i}=", str(2 * i)) for i in range(10, 30)]
    changes = chats(tmp_path, rows) | {"train.steps": None, "train.epochs": 2.0}
    made = read_metrics(tiny_run(tmp_path, changes))[1:]
    assert [row["data/epoch"] for row in made][-1] >= 2.0 and len(made) == 5  # 18 rows are trained on, 8 a step


@pytest.mark.parametrize(("changes", "said"), [
    ({"rl.algo": "ppo"}, 'rl.algo: has no effect while method = "sft"'),
    ({"sft.steps": 3}, 'sft.steps: has no effect while method = "sft"'),
    ({"teacher.path": "x"}, 'teacher.path: has no effect while method = "sft"'),
    ({"method": "rl", "task.train_on": "all"}, 'task.train_on: has no effect while method = "rl"'),
    ({"train.max_length": 65}, "train.max_tokens_per_gpu: must be at least train.max_length = 65, got 64"),
])
def test_settings_of_the_other_method_are_refused(tmp_path: Path, changes: dict[str, Any], said: str):
    with pytest.raises(UserError, match=said.replace("(", "\\(")):
        tiny_config(tmp_path, supervised() | changes)


def test_bad_data_stops_before_a_step_and_long_rows_can_be_left_out(tmp_path: Path):
    rows = [talk(f"{i}+{i}=", str(2 * i)) for i in range(10, 20)]
    long = talk("1+1=", "2" * 70)
    before = torch.get_num_threads()
    with pytest.raises(UserError, match=r"chats.jsonl:11: the conversation has 75 tokens, and train.max_length is 64"):
        prepare(tiny_config(tmp_path, chats(tmp_path, [*rows, long])))
    changes = chats(tmp_path, [*rows, long]) | {"task.overlong_prompts": "drop"}
    task = prepare(tiny_config(tmp_path, changes)).task
    assert "1 row of" in task.describe() and "longer conversations than train.max_length" in task.describe()
    with pytest.raises(UserError, match=r"chats.jsonl:11: there is no answer to learn: the row has neither"):
        prepare(tiny_config(tmp_path, chats(tmp_path, [*rows, {"text": "x"}])))
    with pytest.raises(UserError, match=r"train.max_length = 65, but the model has positions for 64 tokens"):
        prepare(tiny_config(tmp_path, supervised(**{"train.max_length": 65, "train.max_tokens_per_gpu": 65})))
    torch.set_num_threads(before)


def test_the_shipped_recipe_is_of_this_kind():
    config = resolve(load_config(shipped()["sft_quickstart"]), cuda_available=False)
    assert set(of_rl_alone(config)) <= config.without_effect()
    assert config.supervised and config.per_step == (config.train.batch_size, "train.batch_size")
