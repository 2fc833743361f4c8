"""Messages to a program name arguments of `jetrl.Trainer`, and none an option of the command line."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import typer
from tiny import tiny_data

import jetrl
from jetrl import UserError
from jetrl.cli import app
from jetrl.phrases import IN_PYTHON, for_python, in_python

ROOT = Path(jetrl.__file__).parent
APP = typer.main.get_command(app)
OPTIONS = {
    word for command in APP.commands.values() for given in command.params for word in given.opts  # type: ignore[attr-defined]
    if word.startswith("--")
} | {"--debug"}
OPTION = re.compile("(?:" + "|".join(sorted(OPTIONS)) + r")(?![\w-])")
# What only the command line calls: its options are right there.
COMMANDS = {
    "cli.py", "__main__.py", "run/compare.py", "trust.py", "run/tryout.py", "parity/model_under_test.py",
    "parity/ranks.py", "doctor",
    "parallel/spawn.py",
}
# In no message to a program: module -> these options.
ELSEWHERE = {
    "api.py": {"--fp8", "--merge", "--recipe"},  # `jetrl export`, `eval` and `parity`
    "huggingface/merge.py": {"--merge"},
    "run/start.py": {"--debug"},  # the option itself
    "huggingface/hub.py": {"--revision"},  # of a command for the shell
    "parity/rows.py": {"--new-tokens", "--sequences"},
    "parity/depth.py": {"--beside", "--depth", "--kv-cache", "--turns"},  # `jetrl parity --depth` alone
    "parity/depth_command.py": {"--svg"},
    "serve/session_log.py": {"--sessions"},  # the option itself
    "run/replay/command.py": {"--json", "--trust"},  # the options themselves
    "run/fit/advice.py": {"--gpu"},  # the options themselves
}


def texts(path: Path) -> list[str]:
    """The texts of a module without its docstrings; those of a joined text as one."""
    tree = ast.parse(path.read_text())
    docs = {
        id(node.body[0].value) for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [one.value if isinstance(one, ast.Constant) else "4" for one in node.values]
            docs |= {id(one) for one in node.values}
            found.append("".join(map(str, parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            found.append(node.value)
    return found


def test_every_option_that_a_message_names_has_words_for_a_program() -> None:
    left: dict[str, set[str]] = {}
    seen: set[str] = set()
    for path in sorted(ROOT.rglob("*.py")):
        name = str(path.relative_to(ROOT))
        if name in COMMANDS or name.split("/")[0] in COMMANDS or name == "phrases.py":
            continue
        named = [text for text in texts(path) if OPTION.search(text)]
        seen |= {option for text in named for option in OPTION.findall(text)}
        if kept := {option for text in named for option in OPTION.findall(_outside_of_commands(in_python(text)))}:
            left[name] = kept
    assert left == ELSEWHERE, "a message names an option of the command line: see phrases.py"
    assert {"--resume", "--debug", "--nproc"} <= seen


def _outside_of_commands(text: str) -> str:
    return re.sub(r"`[^`]*`|torchrun [^,;.)]*", "", text)


@pytest.mark.parametrize(("text", "words"), [
    ("--resume: there is no folder. Leave out --resume to start.", "resume=True: there is no folder. Leave out resume"),
    ("Fix it; --debug shows the whole traceback.", "Fix it."),
    ("use 4 GPUs (--nproc 4)", "use 4 GPUs (torchrun --nproc-per-node 4)"),
    ("`jetrl train RUN --resume` goes on, or --resume", "`jetrl train RUN --resume` goes on, or resume=True"),
    ("then continue with checkpoint.resume=auto.", 'then continue with resume="auto".'),
    ("nothing of it", "nothing of it"),
])
def test_words(text: str, words: str) -> None:
    assert in_python(text).startswith(words) and in_python(in_python(text)) == in_python(text)


def test_a_mistake_keeps_its_kind_and_its_cause() -> None:
    class Full(UserError):
        pass

    with pytest.raises(Full, match="^continue with resume=True$") as caught, for_python():
        raise Full("continue with --resume") from KeyError("x")
    assert isinstance(caught.value.__cause__, KeyError)
    assert all(pattern.pattern for pattern, _ in IN_PYTHON)


def mistake(folder: Path, **arguments: Any) -> str:
    with pytest.raises(UserError) as caught:
        jetrl.Trainer(tiny_data(folder), verbose=False, **arguments)
    return str(caught.value)


def test_a_mistake_in_an_argument_is_not_blamed_on_the_recipe(tmp_path: Path) -> None:
    assert mistake(tmp_path, overrides={"train.lrr": 1}).startswith("overrides: train.lrr: unknown key")
    assert mistake(tmp_path, overrides={"trainn.lr": 1}).startswith("overrides: trainn: unknown section")
    assert mistake(tmp_path, run_dir=tmp_path / "a b").startswith("run_dir: name: must be letters")
    two = mistake(tmp_path, overrides={"train.lr": "x"}, run_dir=tmp_path / "a b")
    assert two.startswith("the config has 2 errors") and "\n  run_dir: name" in two and "\n  overrides: train.lr" in two
    data = tiny_data(tmp_path)
    data["train"]["lrr"] = 1
    with pytest.raises(UserError, match="^the config: train.lrr"):
        jetrl.Trainer(data, verbose=False, overrides={"train.lr": 1e-3})
    with pytest.raises(UserError, match=r"^the config has 2 errors:\n(.*\n)?  overrides: train.lr: must be"):
        jetrl.Trainer(data, verbose=False, overrides={"train.lr": "x"})


def test_resume_without_a_run_names_the_argument(tmp_path: Path) -> None:
    told = mistake(tmp_path, resume=True)
    assert told.startswith("resume=True: there is no run folder") and "--" not in told
