"""`jetrl settings` explains every key, with the rows of docs/CONFIG.md; help pages point to it and fit 80 columns."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from test_cli import Cli, assert_refused
from test_cli import jetrl as jetrl
from typer.main import get_command

from jetrl import __version__, cli
from jetrl.config import Config, sections
from jetrl.config.docs import settings_of
from jetrl.config.explain import find_settings

ROOT = Path(__file__).parents[1]
COMMANDS = sorted(get_command(cli.app).commands)  # type: ignore[attr-defined]


def keys(which: str) -> list[str]:
    return [row.full_key for _, _, rows in find_settings(which) for row in rows]


def test_what_a_name_means() -> None:
    everything = [row.full_key for section in (Config, *sections().values()) for row in settings_of(section)]
    assert keys("all") == everything and len(everything) == len(set(everything)) > 80
    assert keys("train.lr") == ["train.lr"] and keys("lr") == ["train.lr", "sft.lr"] and keys("seed") == ["seed"]
    assert keys("rl") == [key for key in everything if key.startswith("rl.")]
    for name in sections():
        assert {key.partition(".")[0] for key in keys(name)} == {name}


def test_every_key_is_explained_as_in_the_docs(jetrl: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    status, out, _ = jetrl("settings", "all")
    assert status == 0 and max(map(len, out.splitlines())) <= 80
    printed = "".join(out.split())  # the default's column folds
    table = re.findall(r"^\| `(\w+)` \| (.*?) \| (\S.*?) \| (.*) \|$", (ROOT / "docs/CONFIG.md").read_text(), re.M)
    assert len(table) == len(keys("all"))
    for key, _, default, _ in table:
        assert key in out and default.strip("`").split()[0][:14] in printed, key
    one = jetrl("settings", "train.min_lr_ratio")[1]
    flat = " ".join(one.split())
    assert "Last learning rate as a share of the peak." in flat and "a number >= 0 and <= 1" in flat and "0.0" in flat
    assert 'Only used when train.lr_schedule is not "constant".' in flat and "`" not in one


def test_without_a_name_the_sections(jetrl: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    status, out, _ = jetrl("settings")
    assert status == 0 and all(re.search(rf"^{name} ", out, re.M) for name in sections())
    assert {key.partition(".")[2] or key for key in keys("all")} <= set(re.findall(r"\w+", out))


@pytest.mark.parametrize(
    ("name", "words"),
    [("train.stps", "Did you mean train.steps?"), ("moe", "It occurs in train.router_aux_loss_coef, train.router_z"),
     ("draft", "It occurs in rollout.speculate, rollout.max_draft_tokens"),
     ("num_generations", "TRL's name; here it is rollout.group_size"),
     ("rolout", "Did you mean rollout?"), ("zzz", "`jetrl settings` lists")],
)
def test_unknown_names(jetrl: Cli, name: str, words: str) -> None:
    assert_refused(jetrl("settings", name), re.escape(words))


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_fits_80_columns(jetrl: Cli, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    status, out, err = jetrl(*command.split(), "--help")
    assert status == 0 and max(map(len, out.splitlines())) <= 80, err
    flat = " ".join(out.split())
    if not command:
        for words in ("--version", "--debug", "jetrl doctor", "jetrl recipes", "jetrl settings", *COMMANDS):
            assert words in flat, words
    if command in ("train", "compare", "sft", "flow"):
        for words in ("jetrl settings", "jetrl recipes", "--debug"):
            assert words in flat, words


def test_version_is_an_option(jetrl: Cli) -> None:
    for arguments in (["--version"], ["--version", "train"], ["--debug", "--version"]):
        assert jetrl(*arguments)[:2] == (0, f"jetrl {__version__}\n"), arguments


def texts_of(path: Path) -> list[str]:
    """The string constants of a module: without docstrings, and descriptions of settings, of which pages are made."""
    tree, passed = ast.parse(path.read_text()), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):
            passed.add(node.value)
        elif isinstance(node, ast.keyword) and node.arg == "description":
            passed.update(ast.walk(node.value))
    return [node.value for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in passed]


def test_an_installed_jetrl_sends_nobody_to_pages_that_it_does_not_bring(jetrl: Cli) -> None:
    modules = {path.relative_to(ROOT).as_posix(): path for path in (ROOT / "jetrl").rglob("*.py")}
    found = {name: [text for text in texts_of(path) if "docs/" in text] for name, path in modules.items()}
    here = {name: texts for name, texts in found.items() if texts}
    # Two write pages, one names the command that prints them, and that is the third.
    pages = {"jetrl/config/docs.py", "jetrl/report/metrics.py"}
    assert here.keys() == pages | {"jetrl/config/explain.py", "jetrl/pages.py"}
    assert here["jetrl/pages.py"] == ["docs/*.md"]
    assert here["jetrl/config/explain.py"] == [r"docs/(\w+)\.md"]
    for name in ("all", ""):
        assert "docs/" not in jetrl("settings", *filter(None, [name]))[1]
    for recipe in (ROOT / "jetrl/recipes").glob("*.toml"):
        assert "docs/" not in recipe.read_text(), recipe
    for command in COMMANDS:
        assert "docs/" not in jetrl(command, "--help")[1]
