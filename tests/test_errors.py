"""Where an error is told to have been raised: in the user's file, whatever the library calls in between."""

from __future__ import annotations

import ast
import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from tiny import tiny_config

import jetrl_study
from jetrl.callbacks import checked, tell
from jetrl.config import TaskConfig
from jetrl.errors import UserError, defined_at, place_of, shown, told
from jetrl.rewards.loading import import_reward
from jetrl.rewards.score import call_reward
from jetrl.run.checked_engine import CheckedEngine, blamed
from jetrl.run.own_parts import load_own_parts
from jetrl.types import Completion, Problem
from jetrl.user_code.calls import Call
from jetrl.user_code.importing import import_attribute

ROOT = Path(__file__).parents[1]
CODE = """\
import json
import re

import numpy


def parse(text):
    return json.loads(text)


def search(text):
    return re.compile("(").match(text)


def reshape(text):
    return numpy.zeros(3).reshape(2, 2) if text else max(map(parse, ["{"]))
"""
LINES = {"parse": 8, "search": 12, "reshape": 16}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(CODE)
    return tmp_path / "own.py"


@pytest.mark.parametrize("name", LINES)
def test_the_last_line_of_the_users_own_file(file: Path, name: str) -> None:
    function = import_attribute(f"{file}:{name}", "key", "function")
    with pytest.raises(Exception) as caught:
        function("x")
    assert place_of(caught.value) == f" ({file}, line {LINES[name]})"
    call = Call(lambda: function("x"), 1.0)  # an environment's
    with call:
        call.run()
    assert call.describe_error().endswith(f" ({file}, line {LINES[name]})")
    with pytest.raises(UserError, match=rf"own: step raised .* \({file}, line {LINES[name]}\)"), blamed("own", "step"):
        function("x")


def test_lines_of_the_study_are_not_the_users(tmp_path: Path) -> None:
    file, study = tmp_path / "calls.py", Path(jetrl_study.__file__).with_name("x.py")
    file.write_text("def calls(function):\n    return function()\n")
    exec(compile("def fails():\n    return 1 / 0\n", str(study), "exec"), named := {})
    with pytest.raises(ZeroDivisionError) as caught:
        import_attribute(f"{file}:calls", "key", "function")(named["fails"])
    assert place_of(caught.value) == f" ({file}, line 2)"


def test_a_lambda_of_a_helper_counts_as_the_users(file: Path) -> None:
    with pytest.raises(json.JSONDecodeError) as caught:
        import_attribute(f"{file}:reshape", "key", "function")("")
    assert place_of(caught.value) == f" ({file}, line 8)"


def test_what_a_dataclass_generates_is_not_the_line(tmp_path: Path) -> None:
    file = tmp_path / "calls.py"
    file.write_text("def calls(make):\n    return make(1, [0.5], [-1.0], '', 'stop', 0, '')\n")
    with pytest.raises(ValueError, match="token ids must be a row of integers") as caught:
        import_attribute(f"{file}:calls", "key", "function")(Completion)
    assert place_of(caught.value) == f" ({file}, line 2)"


def test_an_installed_module_that_jetrl_calls_is_the_users() -> None:
    with pytest.raises(ValueError, match="reshape") as caught:
        np.zeros(3).reshape(2, 2)
    assert place_of(caught.value).startswith(f" ({__file__}")
    assert place_of(ValueError("never raised")) == ""


def test_a_file_that_fails_while_it_is_loaded(tmp_path: Path) -> None:
    file = tmp_path / "loads.py"
    file.write_text("import json\n\nTABLE = json.loads('{')\n")
    with pytest.raises(UserError, match=rf"JSONDecodeError: .* \({file}, line 3\)"):
        import_attribute(f"{file}:x", "key", "function")
    file.write_text("def f(:\n")
    with pytest.raises(UserError, match=r"SyntaxError: invalid syntax \(loads.py, line 1\)$"):
        import_attribute(f"{file}:x", "key", "function")


ARITIES = """\
import functools

import jetrl


def surrogate(ratio):
    return ratio


class Loss:
    def __call__(self, ids):
        return ids


loss = Loss()
estimator = functools.partial(surrogate, 1, 2)


def reward(completions, /):
    return [0.0] * len(completions)


def compute_score(data_source, solution_str, ground_truth, extra_info, more):
    return 0.0


class Room:
    def __new__(cls):
        return Other()

    def reset(self, problem):
        return ""

    def step(self, action):
        return None


class Other:
    def reset(self):
        return ""


class Engine:
    keeps_bits = True

    def step(self, more):
        pass

    def release(self, more):
        pass
"""


def place(file: Path, text: str) -> str:
    """Where a definition is, as a pattern."""
    line = ARITIES.splitlines().index(text) + 1
    return rf" \({file}, line {line}\)"


@pytest.fixture
def arities(tmp_path: Path) -> Path:
    (tmp_path / "arity.py").write_text(ARITIES)
    return tmp_path / "arity.py"


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("surrogate", "surrogate", "def surrogate(ratio):"), ("loss_agg", "loss", "    def __call__(self, ids):"),
        ("adv_estimator", "estimator", "def surrogate(ratio):"),
    ],
)
def test_a_wrong_number_of_arguments_of_a_part_names_its_definition(
    tmp_path: Path, arities: Path, key: str, value: str, line: str
) -> None:
    name = f"{arities}:{value}"
    with pytest.raises(UserError, match=f"^rl.{key}: {name} raised TypeError: .*argument.*{place(arities, line)}. Fix"):
        load_own_parts(tiny_config(tmp_path, {f"rl.{key}": name}))


def test_a_wrong_number_of_arguments_of_a_reward_names_its_definition(arities: Path) -> None:
    item = (Problem("id", "prompt", "answer"), "text", (1,))
    for name, line in (
        ("reward", "def reward(completions, /):"),
        ("compute_score", "def compute_score(data_source, solution_str, ground_truth, extra_info, more):"),
    ):
        reward = import_reward(TaskConfig(name="addition", reward=f"{arities}:{name}"))
        assert reward is not None
        with pytest.raises(UserError, match=f"raised TypeError: .*{place(arities, line)}. Fix"):
            call_reward(reward, [item])


def test_a_wrong_number_of_arguments_of_an_engine_names_its_definition(arities: Path) -> None:
    inner = import_attribute(f"{arities}:Engine", "rollout.engine", "class")()
    engine = CheckedEngine(inner, "own", 8)
    for call, line in ((engine.step, "    def step(self, more):"), (engine.release, "    def release(self, more):")):
        with pytest.raises(UserError, match=rf"own: \w+ raised TypeError: .*{place(arities, line)}. Fix the engine"):
            call()


def test_a_wrong_number_of_arguments_of_a_callback_names_its_definition() -> None:
    class Wrong:
        def on_step(self, trainer: object) -> None: ...

    with pytest.raises(UserError, match=rf"Wrong.on_step \({__file__}, line \d+\) cannot be called: too many"):
        checked([Wrong()])
    with pytest.raises(UserError, match=rf"Wrong.on_step raised TypeError: .* \({__file__}, line \d+\)\.$"):
        tell([Wrong()], "on_step", None, 1, {})


def test_where_things_are_defined(arities: Path) -> None:
    found = {name: import_attribute(f"{arities}:{name}", "key", "class") for name in ("Other", "Room", "loss")}
    for thing, line in ((found["Other"], "    def reset(self):"), (found["Other"]().reset, "    def reset(self):"),
                        (found["loss"], "    def __call__(self, ids):")):
        number = ARITIES.splitlines().index(line) + 1
        assert defined_at(thing) == f" ({arities}, line {number})"
    for other in (len, 3, None, "text", defined_at, dict, UserError):
        assert defined_at(other) == "", "not the user's"


def test_objects_that_cannot_be_shown() -> None:
    class Odd(Exception):
        def __repr__(self) -> str:
            raise ValueError

        __str__ = __repr__

    nested: list[object] = []
    for _ in range(100_000):
        nested = [nested]
    assert shown(Odd()) == "<Odd, whose repr raises ValueError>" and shown("a" * 50, 10) == "'aaaaaa..."
    assert shown(nested) == "<list, whose repr raises RecursionError>"
    assert told(Odd()) == "Odd: (its text cannot be read: __str__ raised ValueError)"


def test_nobody_else_reads_the_last_frame_of_a_traceback() -> None:
    """A new place that names a line uses `place_of`."""
    assert importlib.util.find_spec("jetrl") is not None
    for path in sorted((ROOT / "jetrl").rglob("*.py")):
        if path.name != "errors.py":
            names = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
            assert not names & {"extract_tb", "tb_lineno"}, f"{path}: errors.place_of says where an error was raised"


@pytest.mark.parametrize("value", ["[ODD] * n", "ODD", "[{'score': ODD}] * n", "[{'x': ODD}] * n", "[10**5000] * n"])
def test_whatever_a_reward_returns_is_told(tmp_path: Path, value: str) -> None:
    """Also what cannot be shown."""
    (tmp_path / "own.py").write_text(
        "class Odd:\n    def __repr__(self):\n        raise KeyError\n\n\nODD = Odd()\n\n\n"
        f"def reward(completions, **_):\n    n = len(completions)\n    return {value}\n"
    )
    reward = import_reward(TaskConfig(name="addition", reward=f"{tmp_path}/own.py:reward"))
    assert reward is not None
    with pytest.raises(UserError, match="Reward function .*own.py:reward (returned|must return) "):
        call_reward(reward, [(Problem("id", "prompt", "answer"), "text", (1,))])
