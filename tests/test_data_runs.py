"""Runs over data files: no answers, no evaluation, long prompts left out, resumed with other settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import numbers, tiny_config, tiny_run, weights_hash

from jetrl.errors import UserError
from jetrl.run.loop import evaluate_once
from jetrl.run.setup import build

SHORT = "def short(completions): return [1.0 / (1 + len(c)) for c in completions]\n"


def changes(folder: Path, rows: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "short.py").write_text(SHORT)
    task = {"task.name": "file", "task.params": {}, "task.train_file": f"{folder}/data.jsonl",
            "task.reward": f"{folder}/short.py:short"}
    return task | {"eval.eval_interval": 0} | {key.replace("__", "."): value for key, value in more.items()}


def test_no_answers_no_evaluation_and_one_long_prompt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": f"{i}+1="} for i in range(3)] + [{"prompt": "1" * 40}]
    run = tiny_run(tmp_path, changes(tmp_path, rows, task__overlong_prompts="drop", train__steps=2))
    assert [row["parity/logprob_abs_diff_max"] for row in numbers(run)[1:]] == [0.0] * 2
    told = " ".join(capsys.readouterr().out.split())
    assert "none held out, because eval.eval_interval = 0; 1 row of" in told and told.count("left out") == 1
    threads = torch.get_num_threads()
    try:
        with pytest.raises(UserError, match="nothing to evaluate on: with eval.eval_interval = 0 no rows are held out"):
            evaluate_once(build(tiny_config(tmp_path, changes(tmp_path, rows[:3]))))
    finally:
        torch.set_num_threads(threads)


def test_evaluation_that_holds_rows_out_cannot_begin_on_resume(tmp_path: Path) -> None:
    """The run has trained on the rows that would be held out. With an eval_file it may begin."""
    rows = [{"prompt": f"{i}+1="} for i in range(8)]
    off = changes(tmp_path, rows, train__steps=2, task__num_eval=2)
    tiny_run(tmp_path, off)
    again = off | {"train.steps": 3, "checkpoint.resume": "auto"}
    with pytest.raises(UserError, match="other settings|eval_interval"):
        tiny_run(tmp_path, again | {"eval.eval_interval": 2})
    resumed = tiny_run(tmp_path, again)
    straight = tiny_run(tmp_path / "straight", off | {"train.steps": 3})
    assert weights_hash(resumed, 3) == weights_hash(straight, 3)
    (tmp_path / "held.jsonl").write_text(json.dumps({"prompt": "9+9="}) + "\n")
    named = off | {"task.eval_file": f"{tmp_path}/held.jsonl"}
    tiny_run(tmp_path / "named", named)
    tiny_run(tmp_path / "named", named | {"eval.eval_interval": 2, "train.steps": 3, "checkpoint.resume": "auto"})
