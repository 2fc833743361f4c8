"""Code that a run folder names: told and asked for before it runs, unless it is jetrl's or this user has run it."""

from __future__ import annotations

import ast
import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jetrl import trust
from jetrl.config import Config, parse_config
from jetrl.config.keys import sections
from jetrl.config.paths import holding
from jetrl.errors import UserError
from tests.tiny import tiny_config, tiny_data, tiny_run

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "jetrl" / "own_code"


def config_with(folder: Path, **changes: object) -> Config:
    return tiny_config(folder, {key.replace("__", "."): value for key, value in changes.items()})


CODE = holding("code")
# A value that names code, for each of these keys: a new key needs one.
EXAMPLES = {
    "task.reward": ("subprocess:getoutput", {}), "rollout.engine": ("mine.py:Engine", {}),
    **{f"rl.{key}": ("mine.py:part", {}) for key in ("surrogate", "adv_estimator", "loss_agg")},
    "environment.name": ("mine:Env", {}), "environment.tools": (["mine.py:search"], {"environment.name": "tools"}),
}


@pytest.mark.parametrize("key", CODE)
def test_every_key_of_code_is_asked_for(tmp_path: Path, key: str) -> None:
    value, more = EXAMPLES[key]
    config = tiny_config(tmp_path, {"task.reward": "jetrl.rewards.text:last_integer", **more, key: value})
    (named,) = trust.code_of(config)
    assert (named.key, named.name) == (key, value if isinstance(value, str) else value[0])
    with pytest.raises(UserError, match=rf"(?s)runs/x: .*{re.escape(key)} = {named.name}.*add --trust") as told:
        trust.require("runs/x", config, [], False, None)
    assert "A column of the data fills a function's parameter of the same name" in str(told.value)
    assert not trust.require("runs/x", config, [], True, None)
    assert not trust.require("runs/x", config, [f"{key}=a"], False, None)  # the user's own choice


def test_no_setting_names_code_outside_of_the_table() -> None:
    """Settings that are described as path/to/file.py:name, and keys that `import_attribute` is called with."""
    described = {
        f"{name}.{key}" for name, section in sections().items() for key, field in section.model_fields.items()
        if re.search(r"\.py:|module:", field.description or "")
    }
    assert described == set(CODE)
    imported = set()
    for path in (ROOT / "jetrl").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("import_attribute", "import_function"):
                imported |= {a.value for a in node.args if isinstance(a, ast.Constant) and "." in str(a.value)}
    assert imported <= set(CODE)


def test_built_in_functions_need_no_question(tmp_path: Path) -> None:
    """Those that are documented, and no other function of jetrl: one that writes files would be as bad as anyone's."""
    texts = [path.read_text() for folder in ("docs", "jetrl/recipes", "jetrl_study/studies", "examples")
             for path in (ROOT / folder).rglob("*.*") if path.suffix in (".md", ".toml")]
    documented = {name for text in texts for name in re.findall(r"jetrl\.rewards\.\w+:\w+", text)}
    assert documented and documented <= trust.BUILT_IN
    for name in ("jetrl.report.files:write_whole", "jetrl.rewards.score:partial"):
        assert trust.code_of(config_with(tmp_path, task__reward=name))
    assert not trust.code_of(config_with(tmp_path, task__reward=sorted(documented)))
    named = trust.code_of(config_with(
        tmp_path, task__reward="jetrl.rewards.text:last_integer", environment__name="retry",
        environment__params={"a": ["x.py:f", {"mod.b:c": 1}], "b": "no: code", "c": "12:30"},
    ))
    assert [one.name for one in named] == ["x.py:f", "mod.b:c"]


def test_what_the_user_has_run_here_needs_no_question(tmp_path: Path, home: Path) -> None:
    config = config_with(tmp_path)  # with a reward of its own
    with pytest.raises(UserError, match="add --trust"):
        trust.require("x", config, [], False, None)
    trust.remember(config)
    assert not trust.require("x", config, [], False, None)
    assert "task.reward = " in next(home.iterdir()).read_text()
    for changes in ({"task.reward": "subprocess:getoutput"}, {"task.params": {"digits": [3]}}):
        with pytest.raises(UserError, match="add --trust"):
            trust.require("x", tiny_config(tmp_path, changes), [], False, None)
    elsewhere = tiny_config(tmp_path / "other")  # a file of the same name in another folder
    with pytest.raises(UserError, match="add --trust"):
        trust.require("x", elsewhere, [], False, None)


def test_relative_files_are_those_of_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tiny_data(tmp_path) | {"task": {"name": "addition", "reward": "reward.py:reward"}}
    config = parse_config(data)
    monkeypatch.chdir(tmp_path)
    trust.remember(config)
    (tmp_path / "theirs").mkdir()
    shutil.copy(tmp_path / "reward.py", tmp_path / "theirs" / "reward.py")
    assert not trust.require("x", config, [], False, None)
    monkeypatch.chdir(tmp_path / "theirs")
    with pytest.raises(UserError, match="add --trust"):
        trust.require("x", config, [], False, None)


def test_notes_are_bounded_and_never_stop_a_run(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trust, "_KEPT", 3)
    for digits in range(1, 7):
        trust.remember(config_with(tmp_path, task__params={"digits": [digits]}))
    assert len(list(home.iterdir())) == 3
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").write_text("no folder")
    trust.remember(config_with(tmp_path))


def test_the_question_decides(tmp_path: Path) -> None:
    asked: list[str] = []
    config = config_with(tmp_path, task__reward="subprocess:getoutput")
    assert trust.require("x", config, [], False, lambda text: not asked.append(text))  # type: ignore[func-returns-value]
    assert "task.reward = subprocess:getoutput" in asked[0] and asked[0].endswith("Run it?")
    with pytest.raises(UserError, match="not evaluated. With --recipe"):
        trust.require("x", config, [], False, lambda text: False)


@pytest.fixture
def strangers(tmp_path: Path) -> tuple[Path, Path]:
    """A run whose config.toml names a command of the shell, and the file that this command would make."""
    run, made = tiny_run(tmp_path / "made", {"train.steps": 2}), tmp_path / "made_by_command"
    (tmp_path / "data.jsonl").write_text(
        "".join(f'{{"prompt": "{i}+1=", "answer": "1", "cmd": "touch {made}"}}\n' for i in range(10, 20))
    )
    text = (run / "config.toml").read_text()
    text = re.sub(r'reward = ".*"', 'reward = "subprocess:getoutput"', text)
    text = text.replace('name = "addition"', f'name = "file"\ntrain_file = "{tmp_path / "data.jsonl"}"')
    (run / "config.toml").write_text(text.replace("[task.params]\ndigits = [2]", ""))
    return run, made


def evaluate(run: Path, *options: str, answer: str | None = None) -> tuple[int, str]:
    """`jetrl eval`; with an answer, on a terminal."""
    program = [sys.executable, "-m", "jetrl.cli", "eval", str(run), *options]
    if answer is None:
        done = subprocess.run(program, capture_output=True, text=True, cwd=ROOT, check=False, stdin=subprocess.DEVNULL)
        return done.returncode, done.stdout + done.stderr
    ours, theirs = pty.openpty()
    process = subprocess.Popen(program, stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT)
    os.close(theirs)
    os.write(ours, answer.encode())
    told = b""
    while True:
        try:
            part = os.read(ours, 1 << 16)
        except OSError:  # the end, on Linux
            break
        told += part
        if not part:
            break
    return process.wait(), told.decode()


@pytest.mark.slow
def test_evaluating_a_strangers_run_runs_nothing_unasked(strangers: tuple[Path, Path]) -> None:
    run, made = strangers
    status, told = evaluate(run)
    assert status == 2 and "task.reward = subprocess:getoutput" in told and "--trust" in told, told
    status, told = evaluate(run, answer="\n")
    assert status == 2 and "Run it? [y/N]" in told and "not evaluated" in told, told
    assert not made.exists()
    status, told = evaluate(run, answer="y\n")
    assert made.exists(), "the functions would have run: this test tests something"


@pytest.mark.slow
def test_evaluating_a_run_of_ones_own_asks_nothing(tmp_path: Path) -> None:
    run = tiny_run(tmp_path / "made", {"train.steps": 2})
    status, told = evaluate(run)
    assert status == 0 and "held-out problems" in told, told


def test_a_folder_does_not_decide_alone_who_gets_the_key_of_a_teacher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_with(
        tmp_path, task__reward="jetrl.rewards.text:last_integer", rl__algo="distill", teacher__path="http://127.0.0.1:9"
    )
    assert not trust.code_of(config)
    monkeypatch.setenv("JETRL_TEACHER_KEY", "secret")
    asked = r"(?s)teacher.path = http://127.0.0.1:9 .gets the key in JETRL_TEACHER_KEY.*--trust"
    with pytest.raises(UserError, match=asked):
        trust.require("runs/x", config, [], False, None)
    trust.remember(config)
    assert not trust.require("runs/x", config, [], False, None)
