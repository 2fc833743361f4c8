"""A new key of the config is its field: one file of the package is edited here, and everything knows the key.

The package is copied, two sections get three fields more, and what reads keys is asked in processes of their own: the
check of a recipe, `jetrl settings`, docs/CONFIG.md, names of other systems, digests, resuming, the warm start, kernels
that are compiled ahead, memory, paths, trust, and the dry run.
"""

from __future__ import annotations

import filecmp
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jetrl.config import digest, load_config
from jetrl.config.shipped import shipped

ROOT = Path(__file__).parents[1]
EDITED = "config/rollout.py"
BEFORE = "    max_draft_tokens: Annotated["
FIELDS = '''\
    draft_patience: Annotated[
        Literal["low", "high"], NoEffectWhile("rollout.speculate", ("off",)), NoBits(), Since("0.2.0", "low"),
        Kernels(), SavesMemory(0, {"high": "low"}),
        Elsewhere("TRL: vllm_patience; verl: rollout.patience", " (how much)"),
    ] = Field(default="low", description="How long a draft may wait.")
    length_bonus: Annotated[float, Since("0.2.0", 0.0), WarmStart(), Elsewhere(same=("verl",))] = Field(
        default=0.0, ge=0, description="Added to the logit of each token.")
    hook: Annotated[str | None, Since("0.2.0", None), Holds("code")] = Field(
        default=None, description="Called with each draft.")
'''
ASK = '''
import json, sys
from pathlib import Path
from jetrl import trust
from jetrl.config import digest, load_config, to_toml
from jetrl.config.docs import describe_config, peer_table
from jetrl.config.keys import marked
from jetrl.config.markers import NoBits
from jetrl.config.paths import absolute_paths
from jetrl.config.shipped import shipped
from jetrl.errors import UserError
from jetrl.run import sft
from jetrl.run.checkpoint import resume
from jetrl.run.checkpoint.checkpoint import Meta
from jetrl.run.compiling import ahead
from jetrl.run.fit import advice
from jetrl.spec import SHAPES

QUICK, notes = shipped()["quickstart"], []

def config(*overrides):
    return load_config(QUICK, overrides, notes.append)

def refusal(*overrides):
    try:
        config(*overrides)
    except UserError as error:
        return str(error)
    return ""

def resumed(there, here, without=()):
    """What resuming says: empty if nothing differs. `without`: keys that the checkpoint does not have yet."""
    held = json.loads(json.dumps({k: v for k, v in resume.settings(there).items() if k not in without}))
    try:
        resume.check(Path("step_1"), Meta(1, 1, "flow", held, resume.paths(there)), here, here, "flow")
    except UserError as error:
        return str(error)
    return ""

def kernels(config):
    return ahead.marker_path(ahead.needs(config, SHAPES["smollm2-135m"], "a GPU", True)).name

plain, on, bonus = config(), config("rollout.speculate=on"), config("rollout.length_bonus=0.5")
high = config("rollout.speculate=on", "rollout.draft_patience=high")
hook = config("rollout.hook=mine.py:f")
Path("mine.py").write_text("")
print(json.dumps({
    "docs": describe_config(), "TRL": peer_table("TRL"), "verl": peer_table("verl"),
    "digests": {name: digest(load_config(path, (), str)) for name, path in shipped().items()},
    "digest": [digest(each) for each in (plain, bonus, hook)],
    "digest of bits": [digest(each, marked(NoBits)) for each in (on, high)],
    "void": refusal("rollout.speculate=off", "rollout.length_bonus=-1"),
    "void in a recipe": to_toml(plain), "told": to_toml(high),
    "gives way": config("rollout.speculate=off", "rollout.draft_patience=high") == config("rollout.speculate=off"),
    "notes": notes, "TRL's name": refusal("vllm_patience=1"), "verl's name": refusal("algorithm.length_bonus=1"),
    "free": resumed(on, high), "another": resumed(plain, bonus),
    "earlier": [resumed(plain, each, ("rollout.length_bonus",)) for each in (plain, bonus)],
    "warm start": [sft.made_of(each)["rollout.length_bonus"] for each in (plain, bonus)],
    "reads": "rollout.draft_patience" in sft.made_of(high),
    "kernels": [kernels(each) for each in (on, high, plain, bonus)],
    "memory": [str(advice.changes(each)[0][0]) for each in (on, high)],
    "path": absolute_paths(hook).rollout.hook, "code": [str(one) for one in trust.code_of(hook)],
}))
'''


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a copy of the package in which one file is edited."""
    folder = tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT / "jetrl", folder / "jetrl", ignore=shutil.ignore_patterns("__pycache__"))
    file = folder / "jetrl" / EDITED
    text = file.read_text()
    assert text.count(BEFORE) == 1
    file.write_text(text.replace(BEFORE, FIELDS + BEFORE))
    return folder


def run(package: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(package), "COLUMNS": "100", "XDG_CACHE_HOME": str(package / "cache")}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=package, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def answers(package: Path) -> dict[str, Any]:
    return dict(json.loads(run(package, "-c", ASK).stdout))


def differences(compared: filecmp.dircmp[str], at: str = "") -> list[str]:
    found = [f"{at}{name}" for name in (*compared.diff_files, *compared.left_only, *compared.right_only)]
    return found + [file for name, inner in compared.subdirs.items() for file in differences(inner, f"{at}{name}/")]


def test_one_file_is_touched(package: Path) -> None:
    assert differences(filecmp.dircmp(ROOT / "jetrl", package / "jetrl", ignore=["__pycache__"])) == [EDITED]


def test_docs_and_tables_of_names_have_it(answers: dict[str, Any]) -> None:
    row = ('| `draft_patience` | "low" or "high" | `"low"` | How long a draft may wait. Only used when '
           '`rollout.speculate` is not `"off"`. |')
    assert row in answers["docs"].splitlines()
    assert "| `length_bonus` | a number >= 0 | `0.0` | Added to the logit of each token. |" in answers["docs"]
    shown = "`rollout.draft_patience` (how much) |"
    assert f"| `vllm_patience` | {shown}" in answers["TRL"] and f"| `rollout.patience` | {shown}" in answers["verl"]
    assert "| `length_bonus` | `rollout.length_bonus` |" in answers["verl"] and "length_bonus" not in answers["TRL"]


def test_names_of_other_systems_are_answered(answers: dict[str, Any]) -> None:
    assert '"vllm_patience" is TRL\'s name; here it is rollout.draft_patience (how much)' in answers["TRL's name"]
    assert '"algorithm.length_bonus" is verl\'s name; here it is rollout.length_bonus' in answers["verl's name"]


def test_a_recipe_is_checked_and_what_has_no_effect_gives_way(answers: dict[str, Any]) -> None:
    assert "rollout.length_bonus: must be at least 0, got -1" in answers["void"]
    assert answers["gives way"]
    note = 'dropped rollout.draft_patience = "high" (from the overrides): no effect with rollout.speculate = "off"'
    assert note in answers["notes"]
    assert "draft_patience" not in answers["void in a recipe"] and 'draft_patience = "high"' in answers["told"]


def test_digests_of_before_stay_and_others_are_new(answers: dict[str, Any]) -> None:
    assert answers["digests"] == {name: digest(load_config(path, (), str)) for name, path in shipped().items()}
    assert len(set(answers["digest"])) == 3 and answers["digest"][0] == answers["digests"]["quickstart"]
    assert len(set(answers["digest of bits"])) == 1


def test_resuming_names_what_may_not_change(answers: dict[str, Any]) -> None:
    assert answers["free"] == ""
    line = "  rollout.length_bonus = 0.0 there, 0.5 here"
    assert line in answers["another"].splitlines()
    assert "rollout.merge_prefix, keep_kv_cache, speculate, draft_patience and max_draft_tokens" in answers["another"]
    before, differs = answers["earlier"]
    assert before == "" and line in differs.splitlines(), "a checkpoint of before the key"


def test_warm_start_kernels_and_memory_count_it(answers: dict[str, Any]) -> None:
    assert answers["warm start"] == [0.0, 0.5] and not answers["reads"]
    on, high, plain, bonus = answers["kernels"]
    assert on != high and plain == bonus
    assert answers["memory"][1] == "rollout.draft_patience=low" != answers["memory"][0]


def test_its_path_is_made_absolute_and_its_code_told(answers: dict[str, Any], package: Path) -> None:
    assert answers["path"] == f"{package}/mine.py:f"
    assert any("rollout.hook" in one and "mine.py:f" in one for one in answers["code"])


def test_the_commands_know_it(package: Path) -> None:
    shown = " ".join(run(package, "-m", "jetrl", "settings", "rollout.length_bonus").stdout.split())
    assert "Added to the logit of each token. a number >= 0 (since 0.2.0)" in shown
    dry = run(package, "-m", "jetrl", "train", "quickstart", "--dry-run", "rollout.speculate=on",
              "rollout.draft_patience=high", "rollout.length_bonus=0.25", "device=cpu")
    assert 'draft_patience = "high"' in dry.stdout and "length_bonus = 0.25" in dry.stdout
