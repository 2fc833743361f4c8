"""Names of earlier versions: recipes with them work, digests stay, and code with an old import is told the new name."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from jetrl import moved
from jetrl.config import load_config, parse_config
from jetrl.config.load import config_of, digest
from jetrl.errors import UserError
from jetrl.user_code.importing import import_attribute

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("old", sorted(moved.BUILT_IN))
def test_names_in_recipes_work(old: str) -> None:
    module, _, name = moved.BUILT_IN[old].partition(":")
    assert hasattr(importlib.import_module(module), name)
    assert moved.now_at(old.partition(":")[0]) is not None and moved.first(moved.current(old)) == old


def test_a_recipe_with_an_old_name_is_the_recipe_with_the_new_one(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps({"prompt": "a", "answer": "1"}) + "\n")
    configs = []
    for reward in ("jetrl.tasks.rewards:last_integer", "jetrl.rewards.text:last_integer"):
        task = {"name": "file", "train_file": str(file), "reward": reward}
        configs.append(config_of({"name": "x", "model": {"path": "m"}, "task": task}, [], "here"))
    assert configs[0] == configs[1] and configs[0].task.reward == "jetrl.rewards.text:last_integer"
    assert digest(configs[0]) == digest(configs[1])
    several = config_of(
        {
            "name": "x", "model": {"path": "m"},
            "task": {"name": "file", "train_file": str(file), "reward": ["jetrl.tasks.gsm8k:gsm8k_reward", "m:f"]},
        }, [], "here",
    )
    assert several.task.reward == ("jetrl.rewards.gsm8k:gsm8k_reward", "m:f")


def test_old_names_work_wherever_a_config_is_made(tmp_path: Path) -> None:
    """In overrides of a recipe, and in tables that no file holds, as those of `jetrl env`."""
    recipe = ROOT / "jetrl" / "recipes" / "quickstart.toml"
    config = load_config(recipe, ["task.reward=jetrl.tasks.rewards:last_integer"])
    assert config.task.reward == "jetrl.rewards.text:last_integer"
    data = {
        "name": "x", "model": {"path": "m"}, "rollout": {"engine": "jetrl.study.perturb:OtherBits"},
        "task": {"name": "addition", "reward": ["jetrl.tasks.math_reward:math_reward", "m:f"]},
    }
    made = parse_config(data)
    assert made.task.reward == ("jetrl.rewards.mathematics:math_reward", "m:f")
    assert made.rollout.engine == "jetrl_study.perturb:OtherBits"
    assert data["rollout"] == {"engine": "jetrl.study.perturb:OtherBits"}  # what was given stays


def test_digests_of_shipped_recipes_are_those_of_the_first_names() -> None:
    config = load_config(ROOT / "jetrl" / "recipes" / "gsm8k_qwen3_0.6b.toml")
    as_before = config.model_copy(
        update={"task": config.task.model_copy(update={"reward": "jetrl.tasks.gsm8k:gsm8k_reward"})}
    )
    assert digest(config) == digest(as_before)


def test_every_module_that_left_is_in_the_table_and_every_new_name_exists() -> None:
    """Against the modules of e2fbf90, the last commit with the old layout."""
    here = {path.relative_to(ROOT).as_posix() for path in (ROOT / "jetrl").rglob("*.py")}
    old = (ROOT / "tests" / "golden" / "modules_before_the_rooms.txt").read_text().split()
    assert len(old) > 250
    for name in old:
        module = name.removesuffix(".py").replace("/", ".")
        new = moved.now_at(module)
        if new is not None:
            assert (ROOT / (new.replace(".", "/") + ".py")).is_file(), f"{module} -> {new}"
        assert new is not None or name in here, module


def test_a_users_file_that_imports_an_old_module_is_told_the_new_name(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("from jetrl.rollout.engine import PagedEngine\n")
    with pytest.raises(UserError, match=r"jetrl\.rollout\.engine is jetrl\.engine\.engine now"):
        import_attribute(f"{file}:f", "task.reward", "function")
    with pytest.raises(UserError, match=r"jetrl\.kernels\.backends is jetrl\.kernels\.dispatch now"):
        import_attribute("jetrl.kernels.backends.hopper:f", "task.reward", "function")
    with pytest.raises(UserError, match=r"jetrl\.kernels\.decode is jetrl\.kernels\.attention\.state now"):
        import_attribute("jetrl.kernels.decode:f", "task.reward", "function")
