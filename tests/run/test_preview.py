"""What a dry run shows of the data: rows, epochs, and one prompt exactly as the policy will read it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_config

from jetrl.chat.prompts import decoded
from jetrl.config import load_config, resolve
from jetrl.environments.conversations import build_pool
from jetrl.run import prepare as prepare_module
from jetrl.run.prepare import in_steps, prepare
from jetrl.run.preview import preview

TEMPLATE = (
    "{% for m in messages %}<{{ {'system': '0', 'user': '1', 'assistant': '2'}[m.role] }}>{{ m.content }}|"
    "{% endfor %}{% if add_generation_prompt %}<2>_{% if open %}???{% endif %}{% endif %}"
)


def shown(folder: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], template: str = "") -> list[str]:
    """The lines of a dry run; with a template the built-in tokenizer has it."""
    if template:
        loaded = prepare_module.load_tokenizer

        def with_template(name: str, revision: str | None) -> Any:
            tokenizer = loaded(name, revision)
            tokenizer.chat_template = template
            return tokenizer

        monkeypatch.setattr(prepare_module, "load_tokenizer", with_template)
    threads = torch.get_num_threads()
    config = tiny_config(folder, changes)
    plan = prepare(config)
    torch.set_num_threads(threads)
    return list(preview(in_steps(config, plan.task), plan))


def rows_of(folder: Path, prompts: list[str]) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    rows = [json.dumps({"prompt": p, "answer": "1"}) for p in prompts]
    (folder / "d.jsonl").write_text("\n".join(rows))
    return {"task.name": "file", "task.params": None, "task.train_file": str(folder / "d.jsonl"), "task.num_eval": 4}


def test_rows_and_epochs_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = rows_of(tmp_path, [f"{i}+1=" for i in range(14)] + ["1" * 30, "2" * 30, "3+1="])
    drops = {"task.overlong_prompts": "drop", "task.repeated_prompts": "drop"}
    lines = shown(tmp_path, monkeypatch, data | drops)
    assert lines[0] == (
        f"Data: {tmp_path}/d.jsonl: 10 training rows, 4 held out for evaluation (the same data, chosen by hash of the "
        f"prompt); 2 rows of {tmp_path}/d.jsonl left out: longer prompts than task.max_prompt_length; 1 row of "
        f"{tmp_path}/d.jsonl left out: repeated prompts."
    )
    assert lines[1] == (
        "17 rows read from the training data, 10 trained on. One epoch: 2.5 steps of 4 prompts "
        "(rollout.prompts_per_step). train.steps = 4 are 1.6 epochs."
    )
    lines = shown(tmp_path, monkeypatch, data | drops | {"train.steps": None, "train.epochs": 2.0})
    assert lines[1].endswith("(rollout.prompts_per_step). train.epochs = 2 of 10 rows: 5 steps of 4 prompts.")


def test_a_rendered_prompt_is_shown_with_what_the_template_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = rows_of(tmp_path, ["1+1=\n"] * 20) | {"task.system_prompt": "#", "eval.eval_interval": 0}
    data |= {"task.max_prompt_length": 30}
    lines = shown(tmp_path, monkeypatch, data | {"task.chat_template_kwargs": {"open": True}}, TEMPLATE)
    at = next(i for i, line in enumerate(lines) if line.startswith("The first prompt"))
    assert lines[at].endswith("by the chat template, 21 tokens:")
    assert lines[at + 1 : at + 3] == ["  | <0>#|<1>1+1=", "  | |<2>_???"]
    assert '3:"1" 12:"+" 3:"1" 16:"=" 23:"\\n"' in lines[at + 3]
    assert lines[at + 4] == 'The tokenizer has no BOS token. Tokens that end a completion: 1:"<eos>".'
    assert 'opened the policy\'s turn with "_???"' in lines[at + 5] and "prefilled" in lines[at + 5]


def test_long_prompts_are_bounded_and_odd_characters_written_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = {"task.max_prompt_length": 6000, "model.arch.max_position_embeddings": 8192, "eval.eval_interval": 0}
    lines = shown(tmp_path, monkeypatch, rows_of(tmp_path, ["1" * 5000] * 2) | long)
    assert any(line == "  ... 1000 more characters" for line in lines)
    (tokens,) = [line for line in lines if line.startswith("Its tokens")]
    assert "... 4936 more ..." in tokens and tokens.count('3:"1"') == 64
    from jetrl.run import preview as module

    assert module._visible("a\x1b[2J\u202eb") == "a\\x1b[2J\\u202eb" and module._quoted("\n\x1b") == '"\\n\\u001b"'


def test_an_environment_is_not_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "env.py").write_text(
        "class Own:\n    def reset(self, problem):\n        raise SystemExit(7)\n"
        "    def step(self, action):\n        raise SystemExit(7)\n"
    )
    own = {"environment.name": f"{tmp_path}/env.py:Own"}
    made = {"task.name": "environment", "task.params": None, "task.reward": None}
    lines = shown(tmp_path, monkeypatch, own | made)
    assert lines[-1] == "The first prompt is what Own.reset returns; a dry run does not call it."
    lines = shown(tmp_path, monkeypatch, own)
    assert any(line.endswith("plain text, 6 tokens; Own.reset may begin otherwise:") for line in lines)


def test_the_prompt_of_a_run_with_tools_has_their_schemas(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the rollout encodes it: token for token what the environment's first reply holds."""
    monkeypatch.chdir(Path(__file__).parents[2])
    threads = torch.get_num_threads()
    config = resolve(load_config(Path("examples/tools.toml"), ["num_threads=1"]), cuda_available=False)
    plan = prepare(config)
    torch.set_num_threads(threads)
    lines = list(preview(config, plan))
    assert plan.environment is not None
    pool = build_pool(plan.environment, plan.tokenizer, config.task)
    try:
        pool.start(0, plan.task.problem(0))
        (reply,) = pool.poll(True)
    finally:
        pool.shutdown()
    at = next(i for i, line in enumerate(lines) if line.startswith("The first prompt"))
    assert lines[at].endswith(f"by the chat template, {len(reply.tokens)} tokens:"), "reset says nothing else"
    text = decoded(plan.tokenizer, reply.tokens)
    assert '"name": "keep"' in text and lines[at + 1 :][: text.count("\n") + 1] == [
        f"  | {line}" for line in text.split("\n")
    ]
