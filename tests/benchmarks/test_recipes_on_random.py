"""Recipes for real models: a dry run over stand-ins of what they name, and two steps with random weights."""

from __future__ import annotations

import json
import re
import tomllib
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import recipes_on_random
import torch
from common import RESULTS
from recipes_on_random import RECIPES, shape_of, stand_in_config, two_steps
from stand_ins import gsm8k_rows, verl_rows, write_gsm8k, write_model, write_verl
from typer.testing import CliRunner

from jetrl.cli import app
from jetrl.config.shipped import find_recipe, shipped, summary
from jetrl.rewards.gsm8k import gold_answer
from jetrl.spec import SHAPES

TINY = replace(
    SHAPES["qwen3-0.6b"], vocab_size=2304, hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2,
    num_kv_heads=1, head_dim=16,
)


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the names of models and data sets are folders."""
    pytest.importorskip("datasets")
    here = tmp_path_factory.mktemp("hub")
    for model in ("Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-8B"):
        write_model(here / "Qwen" / model, model.lower())
    write_gsm8k(here / "openai" / "gsm8k")
    write_verl(here / "BytedTsinghua-SIA" / "DAPO-Math-17k", "dapo-math-17k", verl_rows(40, 3, "math_dapo"))
    write_verl(here / "BytedTsinghua-SIA" / "AIME-2024", "aime-2024", verl_rows(5, 2, "aime", seed=5))
    return here


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_dry_run_passes(recipe: str, hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(hub)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(hub / "cache"))
    found = CliRunner().invoke(app, ["train", recipe, "--dry-run", "device=cpu"], catch_exceptions=False)
    assert found.exit_code == 0, found.output
    printed = tomllib.loads(found.stdout)
    given = tomllib.loads(find_recipe(recipe).read_text())
    assert printed["name"] == recipe == given["name"] and printed["model"]["path"] == given["model"]["path"]
    assert printed["rollout"]["max_response_length"] == given["rollout"]["max_response_length"]


def test_what_recipes_of_real_models_say_of_themselves() -> None:
    rows = json.loads((RESULTS / "recipes_on_random.json").read_text())["rows"]
    measured = {row["recipe"]: row for row in rows}
    several = {name for name, row in measured.items() if row.get("ranks", 1) > 1}
    published = {name for name in shipped() if name.startswith("grpo_")}
    with_adapters = {name for name in shipped() if name.endswith("_lora")}  # their memory is predicted (test_what_fits)
    hybrids = {name for name in shipped() if "_qwen3.5_" in name}
    small = {"gsm8k_qwen3_0.6b_24gb"}  # of cards that were not at hand: its memory is predicted
    unmeasured = published | with_adapters | small | hybrids
    assert {name for name in shipped() if "qwen3" in name} - unmeasured == set(RECIPES) | several and len(hybrids) == 3
    for recipe in hybrids:
        assert "neither run nor measured on a GPU yet" in find_recipe(recipe).read_text()
    lora = json.loads((RESULTS / "lora.json").read_text())["rows"]
    in_part = {row["recipe"]: row for row in lora if row["part"] == "fit"}
    assert set(in_part) <= with_adapters
    for recipe in with_adapters:
        text, row = find_recipe(recipe).read_text().replace("\n# ", " "), in_part.get(recipe)
        assert ("neither run nor measured on a GPU yet" in text) == (row is None)
        if row is not None:
            told = "took {} GiB where {} were predicted, parity 0, in {} GiB of an {}"
            numbers = [round(row[key]) for key in ("peak GiB", "predicted GiB", "GPU GiB")]
            assert told.format(*numbers, row["environment"]["gpu"].removeprefix("NVIDIA ")) in text
            assert "predicted, not run in full" in text and row["parity"] == 0.0
    for recipe in published:  # of papers, and none was measured
        text = find_recipe(recipe).read_text()
        assert f"jetrl train {recipe}" in text and "NOT RUN TO ITS END" in text
        assert len(summary(find_recipe(recipe))) < 115
    for recipe in several:  # of the recipe as it is the memory is predicted (tests/run/test_memory.py)
        text, row = find_recipe(recipe).read_text().replace("\n# ", " "), measured[recipe]
        peaks = [round(row[key]) for key in ("peak GiB", "host GiB", "predicted GiB", "predicted host GiB")]
        told = "answers of {} tokens took {} and {} where {} and {} were predicted, parity 0"
        assert told.format(row["response"], *peaks) in text and row["parity"] == 0.0
        assert f"jetrl train {recipe} --nproc {row['ranks']}" in text
    for recipe in RECIPES:
        text = find_recipe(recipe).read_text()
        assert "jetrl train " + recipe in text and "GiB" in text and "not run in full" in text
        assert len(summary(find_recipe(recipe))) < 110 and shape_of(recipe) in SHAPES
        # its peak is the measured one
        assert f"Memory: {round(measured[recipe]['peak GiB'])} GiB at the peak" in text
        assert measured[recipe]["parity"] == 0.0


@pytest.mark.parametrize("recipe", RECIPES)
def test_two_steps_with_random_weights(recipe: str, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    try:
        config = stand_in_config(recipe, tmp_path, TINY, tokens=2 * 16 * 8, response=8, device="cpu")
        given = tomllib.loads(find_recipe(recipe).read_text())
        assert config.train.optimizer_dtype == given["train"].get("optimizer_dtype", "float32")
        assert config.quant.kv_cache == "fp8" and config.rollout.group_size == given["rollout"]["group_size"]
        row = two_steps(config, tmp_path)
    finally:
        torch.set_num_threads(threads)
    assert row["parity"] == 0.0 and len(row["steps"]) == 2
    assert all(step["policy/grad_norm"] > 0 for step in row["steps"]), "the second reward makes groups differ"
    assert all(0 < step["reward/varied/mean"] < 1 and step["reward/gsm8k_reward/mean"] == 0 for step in row["steps"])


def test_a_mixture_with_random_weights_by_the_program_of_a_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As one rank: `--nproc` starts the same program for several."""
    name, shape = "gsm8k_qwen3_30b_a3b", SHAPES["qwen3-30b-a3b"]
    experts = replace(shape.experts, count=8, per_token=2, intermediate_size=32)
    tiny = replace(TINY, family=shape.family, experts=experts, num_layers=3)
    monkeypatch.setattr(recipes_on_random, "SHAPES", {"qwen3-30b-a3b": tiny})
    before, threads = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    try:
        recipes_on_random.on_rank(Namespace(one=name, tokens=256, response=8, layers=2))
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(before)
    (text,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("BENCH "))
    row = json.loads(text.removeprefix("BENCH "))
    assert (row["recipe"], row["ranks"], row["layers"], row["parity"]) == (name, 1, 2, 0.0)
    assert len(row["steps"]) == 2 and all(step["moe/router_entropy"] > 0 for step in row["steps"])
    assert recipes_on_random.same_case(row, {"recipe": name, "layers": 2})
    assert not recipes_on_random.same_case(row, row | {"ranks": 2})
    assert not recipes_on_random.same_case(row, {"recipe": name}), "which has all layers"


def test_stand_in_rows_are_right() -> None:
    for row in gsm8k_rows(50):
        had, more, days = map(int, re.findall(r"\d+", row["question"]))
        assert gold_answer(row["answer"]) == str(had + more * days)
    for row in verl_rows(50, 1, ""):
        c, ca, cb = map(int, re.findall(r"\d+", row["prompt"][0]["content"]))
        assert int(row["reward_model"]["ground_truth"]) * c == ca + cb
    assert len(verl_rows(4, 3, "")) == 12
