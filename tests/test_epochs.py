"""`train.epochs`: how many steps it is, what the rows of metrics say of it, and what it does not go with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny import numbers, tiny_config, tiny_run
from typer.testing import CliRunner

from jetrl.chat.tokenizer import arithmetic_tokenizer
from jetrl.cli import app
from jetrl.config import load_config, to_toml
from jetrl.errors import UserError
from jetrl.report.recorder import read_samples
from jetrl.run.prepare import epochs_told, in_steps
from jetrl.tasks.task import build_task


def rows_file(folder: Path, count: int = 30) -> dict[str, Any]:
    """Changes for a tiny run over `count` rows, of which none is held out."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"prompt": f"{i}+{i + 3}=", "answer": str(2 * i + 3)} for i in range(12, 12 + count)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"task.name": "file", "task.params": None, "task.train_file": str(folder / "rows.jsonl"),
            "eval.eval_interval": 0}


def test_epochs_say_how_many_steps_there_are(tmp_path: Path) -> None:
    """10 rows in steps of 4: one epoch has 3 steps, of which the last takes 2 prompts of the next epoch."""
    changes = rows_file(tmp_path, 10)
    run_dir = tiny_run(tmp_path / "epochs", changes | {"train.steps": None, "train.epochs": 1})
    rows = numbers(run_dir)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert [row["data/epoch"] for row in rows] == [0.0, 0.4, 0.8, 1.2]
    assert rows == numbers(tiny_run(tmp_path / "steps", changes | {"train.steps": 3}))
    seen = [row["prompt"] for row in read_samples(run_dir)][::4]
    assert len(set(seen[:10])) == 10, "every row once"
    text = (run_dir / "config.toml").read_text()
    assert "epochs = 1.0" in text and "\nsteps = 3" not in text
    more = {"train.steps": None, "train.epochs": 1.3, "checkpoint.resume": "auto"}
    assert len(numbers(tiny_run(tmp_path / "epochs", changes | more))) == 1 + 4
    with pytest.raises(UserError, match="at step 4, beyond train.epochs = 1, which is 3 steps. Raise it"):
        tiny_run(tmp_path / "epochs", changes | more | {"train.epochs": 1})


@pytest.mark.parametrize(("epochs", "count", "steps"), [(2, 8, 4), (1, 9, 3), (0.1, 10, 1), (1.1, 400, 110), (3, 1, 1)])
def test_steps_of_epochs_are_rounded_up(tmp_path: Path, epochs: float, count: int, steps: int) -> None:
    config = tiny_config(tmp_path, rows_file(tmp_path, count) | {"train.steps": None, "train.epochs": epochs})
    task = build_task(config.task, config.seed, arithmetic_tokenizer(), hold_out=False)
    made = in_steps(config, task)
    assert made.train.steps == steps and made.train.epochs == epochs
    assert f"{steps} steps of 4 prompts" in epochs_told(made, task) and epochs_told(tiny_config(tmp_path), task) == ""


def test_what_does_not_go_with_epochs(tmp_path: Path) -> None:
    data = rows_file(tmp_path, 8)
    for changes, said in (
        (data | {"train.epochs": 1}, r"train.steps: does not go together with train.epochs = 1.0.*use one of the two"),
        ({"train.steps": None, "train.epochs": 1}, r'train.epochs: is for problems from data .* task "addition" are'),
        (data | {"train.steps": None, "train.epochs": 0}, "train.epochs"),
    ):
        with pytest.raises(UserError, match=said):
            tiny_config(tmp_path, changes)
    for key, value in (("train.warmup_steps", 3), ("rl.critic_warmup_steps", 2)):
        more = {"rl.algo": "ppo"} if key.startswith("rl.") else {}
        config = tiny_config(tmp_path, data | {"train.steps": None, "train.epochs": 1, key: value} | more)
        task = build_task(config.task, config.seed, arithmetic_tokenizer(), hold_out=False)
        with pytest.raises(UserError, match=f"of 8 rows are 2 steps of 4 prompts, but {key} = {value}"):
            in_steps(config, task)


def test_epochs_on_the_command_line_take_the_place_of_the_recipes_steps(tmp_path: Path) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text(to_toml(tiny_config(tmp_path, rows_file(tmp_path, 8))))
    notes: list[str] = []
    config = load_config(file, ["train.epochs=2"], notes.append)
    assert config.train.epochs == 2
    assert notes == ["dropped train.steps = 4 (from the recipe): train.epochs = 2 is given"]
    file.write_text(to_toml(config))
    assert load_config(file) == config
    back = load_config(file, ["train.steps=7"], notes.append)
    assert back.train.epochs is None and back.train.steps == 7

    told = CliRunner().invoke(app, ["train", str(file), "train.epochs=3", "--dry-run"])
    assert told.exit_code == 0 and "train.epochs = 3 of 8 rows: 6 steps of 4 prompts" in told.output
