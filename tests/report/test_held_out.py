"""The mean reward of held-out problems is called an accuracy only where the config says that it is one."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from jetrl.chat.tokenizer import arithmetic_tokenizer
from jetrl.report import console, html, plots
from jetrl.report.run import CORRECTNESS, Run, headline, held_out_name, load_runs
from jetrl.rewards.loading import import_function
from jetrl.rewards.score import call_reward
from jetrl.tasks.addition import AdditionTask
from jetrl.types import Problem

OWN = {"name": "file", "reward": "mine.py:reward"}


def run_with(config: dict[str, Any]) -> Run:
    return Run(Path("r"), "r", [], config, "", {})


@pytest.mark.parametrize(
    ("task", "environment", "name"),
    [
        ({"name": "addition"}, None, "accuracy"), ({"name": "addition"}, "calculator", "accuracy"),
        ({"name": "addition"}, "mine.py:Env", "reward"), ({"name": "gym"}, None, "reward"), (OWN, None, "reward"),
        ({"name": "environment"}, "mine.py:Env", "reward"), ({"name": "addition", "reward": "m:f"}, None, "reward"),
        ({"name": "file", "reward": "jetrl.rewards.gsm8k:gsm8k_reward"}, None, "accuracy"),
        ({"name": "file", "reward": ["jetrl.rewards.gsm8k:gsm8k_reward", "m:f"]}, None, "reward"),
        ({"name": "file", "reward": "jetrl.tasks.gsm8k:gsm8k_reward"}, None, "accuracy"),  # of an earlier version
        ({}, None, "accuracy"),
    ],
)
def test_the_name_follows_from_the_config(task: dict[str, Any], environment: str | None, name: str) -> None:
    config = {"task": task} | ({"environment": {"name": environment}} if environment else {})
    assert run_with(config).held_out == name
    assert held_out_name([name, "accuracy"]) == f"Held-out {name}"


def test_of_several_functions_the_deciding_one_may_be_an_accuracy() -> None:
    task = {"name": "file", "reward": ["jetrl.rewards.gsm8k:gsm8k_reward", "m:f"]}
    for signal, name in (("gsm8k_reward", "accuracy"), ("f", "reward"), ("reward", "reward")):
        assert run_with({"task": task, "rl": {"signal": signal}}).held_out == name


def test_the_rewards_that_are_called_so_say_right_or_wrong() -> None:
    for name in CORRECTNESS:
        if name.endswith("math_reward"):
            pytest.importorskip("math_verify")
        pairs = [(Problem("i", "p", "18"), text, (1,)) for text in ("18", "19")]
        assert call_reward(import_function(name), pairs) == [1.0, 0.0]
    task = AdditionTask({}, 0, arithmetic_tokenizer())
    assert task.reward is not None and CORRECTNESS


def test_display_report_and_picture_say_it(make_run: Callable[..., Path], tmp_path: Path) -> None:
    right, own = make_run("right", steps=10), make_run("own", steps=10)
    with (own / "config.toml").open("a") as file:
        file.write('\n[task]\nname = "file"\nreward = "mine.py:reward"\n')
    numbers = [headline(run) for run in load_runs([right, own])]
    assert [n.held_out for n in numbers] == ["accuracy", "reward"]
    pages = [html.write_report(runs, tmp_path / f"{i}.html").read_text()
             for i, runs in enumerate(([right], [own], [right, own]))]
    said = [tuple(f'"heldOut":"Held-out {name}"' in page for name in ("accuracy", "reward")) for page in pages]
    assert said == [(True, False), (False, True), (False, True)]
    assert "0.031 →" in pages[1] and "3.1% →" in pages[0] and '"heldOut":"Held-out reward"' in pages[2]
    out = io.StringIO()
    console.comparison([("fp8", n) for n in numbers], Console(file=out, width=200))
    console.summary(run_dir="r", steps=1, seconds=1.0, accuracy_after=3.5, held_out="reward",
                    console=Console(file=out, width=200))
    assert out.getvalue().count("held-out reward") == 2 and "accuracy" not in out.getvalue()


def test_a_comparison_shows_routing_where_it_was_compared(make_run: Callable[..., Path]) -> None:
    folder = make_run("moe", steps=4)
    (plain,) = (headline(run) for run in load_runs([folder]))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        if row["step"]:
            row["parity/frac_routing_different"] = 0.01 * row["step"]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (routed,) = load_runs([folder])
    told = headline(routed)
    assert plain.routing_mean is None and told.routing_mean == pytest.approx(0.025)
    said = io.StringIO()
    console.comparison([("bf16", plain)], Console(file=said, width=200))
    assert "other experts" not in said.getvalue()
    rows_ = [("bf16", plain), ("fp8", replace(plain, routing_mean=0.0)), ("fp8_rollout", told)]
    console.comparison(rows_, Console(file=said, width=200))
    lines = [line.split() for line in said.getvalue().splitlines()]
    assert "other experts" in said.getvalue()
    assert [line[-3] for line in lines if line[:1] == ["fp8"]] == ["0"]
    assert [line[-3] for line in lines if line[:1] == ["fp8_rollout"]] == ["2.50%"]


def test_the_picture_says_it(make_run: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    own, titles = make_run("own", steps=5), []
    with (own / "config.toml").open("a") as file:
        file.write('\n[task]\nname = "file"\nreward = "mine.py:reward"\n')
    drawn = plots._curves
    monkeypatch.setattr(plots, "_curves", lambda axis, runs, title, *a, **k: (titles.append(title),
                                                                             drawn(axis, runs, title, *a, **k)))
    plots.plot_runs([own], tmp_path / "p.png")
    assert titles == ["Reward", "Held-out reward"]
