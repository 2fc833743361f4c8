"""Commands and settings that pages print: jetrl takes each command as it stands, and each setting exists.

Nothing is run here: a command is parsed as the command line parses it, and a recipe with its overrides is loaded and
checked, as `--dry-run` begins. README's own recipe, reward and environment are trained, in miniature.
"""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from byte_tokenizer import saved
from tiny import ARCH

import jetrl
from jetrl.cli import app
from jetrl.config import load_config, sections
from jetrl.config.keys import key_of
from jetrl.config.load import quiet
from jetrl.config.shipped import find_recipe, shipped
from jetrl_study.plan import shipped_studies

ROOT = Path(__file__).parents[1]
RECORDS = {"LOG.md", "DECISIONS.md", "CHANGELOG.md"}  # of what was true on a day
PAGES = [path for folder in (".", "docs") for path in sorted((ROOT / folder).glob("*.md")) if path.name not in RECORDS]
COMMANDS = {name: command for name, command in typer.main.get_command(app).commands.items()}  # type: ignore[attr-defined]
PLACEHOLDER = re.compile(r"[A-Z][A-Z0-9_]*(/\S*)?$|\.\.\.$|.*=\.\.\.$|my[-_]\w+\.toml$|(mine|first)\.toml$|runs/.*")


def written(page: str) -> Iterator[str]:
    """What follows `jetrl ` in lines of code and in marked code, without comments."""
    page = page.replace("\\\n", " ")
    lines = re.findall(r"^ {4,}(?:\$ )?(?:\S.* -m |NAME=\S+ )?jetrl +(\S.*)$", page, re.M)
    lines += [line for block in re.findall(r"^```(?:sh|bash|console)\n(.*?)^```", page, re.M | re.S)
              for line in re.findall(r"^(?:\$ )?jetrl (\S.*)$", block, re.M)]
    lines += [" ".join(text.split()) for text in re.findall(r"(?<!`)`jetrl\s+([a-z][^`]*)`(?!`)", page)]
    return (re.sub(r"\s+#.*", "", line) for line in lines)


FOUND = sorted({(path.name, line) for path in PAGES for line in written(path.read_text(encoding="utf-8"))})


def text_of(name: str) -> str:
    """A page by the name of its file."""
    return next(path for path in PAGES if path.name == name).read_text(encoding="utf-8")


def words_of(line: str) -> list[str]:
    return ["2" if word == "N" else word for word in shlex.split(line)]


@pytest.mark.parametrize("page, line", FOUND, ids=lambda text: text)
def test_a_printed_command_is_taken(page: str, line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    verb, *words = words_of(line)
    assert verb in COMMANDS, f"{page}: jetrl has no command {verb}"
    if not words:
        return  # the name of a command
    context = COMMANDS[verb].make_context(verb, list(words))
    given = context.params.get("overrides") or []
    for override in (word for word in given if not PLACEHOLDER.match(word) or "=" in word):
        assert key_of(override.partition("=")[0]) is not None, f"{page}: no setting {override}"
    recipe = context.params.get("recipe")
    printed = re.search(rf"^```toml\n(# {re.escape(recipe)}\n.*?)^```", text_of(page), re.M | re.S) if recipe else None
    if recipe and printed:  # a tutorial's own: tests/test_tutorials.py runs it
        (tmp_path / recipe).write_text(printed[1])
        recipe = str(tmp_path / recipe)
    if verb in ("train", "sft", "compare", "flow") and recipe and not PLACEHOLDER.match(recipe):
        load_config(find_recipe(recipe), [word for word in given if not word.endswith("=...")], quiet)


def test_the_list_above_is_no_empty_one() -> None:
    assert len(FOUND) > 80 and {page for page, _ in FOUND} >= {"README.md", "MEMORY.md", "ENVIRONMENTS.md", "STUDY.md"}
    assert list(written("    jetrl train a \\\n      b=1   # why\n\nAs `jetrl docs RUNS` says.")) == [
        "train a        b=1", "docs RUNS"]


KEY = re.compile(rf"(?<![\w./`-])`((?:{'|'.join(sections())})\.[a-z]\w*(?:\.\w+)*)(?: ?= ?[^`]*)?`")
# Modules and functions that are written like keys, and keys of other systems.
NO_KEYS = re.compile(r"\.(py|md|toml|json|jsonl|parquet)$")


@pytest.mark.parametrize("page", [p for p in PAGES if p.name != "ARCHITECTURE.md"], ids=lambda path: path.name)
def test_settings_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    text = re.sub(r"^\| .*? \| (?=.* \|$)", "| ", text, flags=re.M) if page.name.startswith("FROM_") else text
    missing = {name for name in KEY.findall(text) if key_of(name) is None and not NO_KEYS.search(name)}
    assert not missing, f"{page.name} names settings that do not exist: {sorted(missing)}"


# ---- the README ------------------------------------------------------------------------------------------------------

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_readme_is_short() -> None:
    lines = README.splitlines()
    assert len(lines) <= 120 and max(map(len, lines)) <= 100


def test_figures_of_the_readme_stand_in_the_pages_that_it_names() -> None:
    rows = re.findall(r"^\| (\[.*\]\((docs/\w+\.md)\).*)\|$", README, re.M)
    assert len(rows) == 3
    for row, page in rows:
        text = (ROOT / page).read_text(encoding="utf-8")
        figures = re.findall(r"\d+,\d+|\d+\.\d+|\d+, \d+ and \d+ %", row.partition("|")[2])
        assert figures
        for figure in figures:
            assert figure in text, f"{page} does not have {figure}"
    scaling = (ROOT / "docs/SCALING.md").read_text(encoding="utf-8")
    for figure in re.findall(r"(\d\.\d\d)x on ", README):
        assert figure in scaling, figure


def test_the_readme_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its recipe, reward and environment, with a model of bytes and sizes that take a second."""
    monkeypatch.chdir(tmp_path)
    (recipe,) = re.findall(r"^```toml\n(.*?)^```", README, re.M | re.S)
    reward, environment = re.findall(r"^```python\n(.*?)^```", README, re.M | re.S)
    (tmp_path / "mine.py").write_text(f"{reward}\n\n{environment}")
    (tmp_path / "train.jsonl").write_text("".join(
        json.dumps({"prompt": f"{i}+{i}=", "answer": str(2 * i)}) + "\n" for i in range(40)))
    tables = tomllib.loads(recipe)
    assert tables["model"].pop("path") == "Qwen/Qwen3-0.6B"
    tables["model"] |= {"arch": {**ARCH, "max_position_embeddings": 256}, "tokenizer": saved(tmp_path / "bytes", None)}
    small: dict[str, Any] = {
        "device": "cpu", "num_threads": 1, "task.num_eval": 4, "rollout.prompts_per_step": 2, "rollout.group_size": 2,
        "rollout.max_response_length": 4, "task.max_prompt_length": 16, "train.steps": 1, "train.warmup_steps": 0,
    }
    assert jetrl.train(tables, overrides=small, verbose=False).finished
    talks = {**small, "task.max_prompt_length": 64, "environment.max_turn_tokens": 4, "rollout.max_response_length": 80}
    tables |= {"name": "talk", "task": {"name": "environment"}, "environment": {"name": "mine.py:Guess"}}
    trained = jetrl.train(tables, overrides=talks, verbose=False)
    said = (trained.run_dir / "samples.jsonl").read_text()
    assert trained.finished and "Guess my number from 0 to 99." in said and "Wrong. Guess again." in said


def test_recipes_and_studies_that_pages_name_are_shipped() -> None:
    known = {*shipped(), *shipped_studies(), *(path.stem for path in (ROOT / "benchmarks/results").glob("*.json"))}
    known |= {path.name for path in (ROOT / "docs/study").iterdir()}
    for page in PAGES:
        named = re.findall(r"`((?:gsm8k|grpo|dapo|quickstart|h200)_[\w.]+)`", page.read_text(encoding="utf-8"))
        missing = {name for name in named if name not in known and not NO_KEYS.search(name)}
        assert not missing, f"{page.name} names recipes or studies that do not exist: {sorted(missing)}"


def test_no_help_has_brackets_that_are_taken_for_markup() -> None:
    """[lora] would be printed as nothing."""
    texts = [
        (name, text) for name, command in COMMANDS.items()
        for text in (command.help, *(getattr(param, "help", None) for param in command.params))
    ]
    assert len(texts) > 50 and not [(name, text) for name, text in texts if re.search(r"\[[a-z/]", text or "")]
