"""Where an error is told to have been raised: in the user's file, whatever the library calls in between."""

from __future__ import annotations

import ast
import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

import jetrl_study
from jetrl.errors import UserError, place_of
from jetrl.run.checked_engine import blamed
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


def test_nobody_else_reads_the_last_frame_of_a_traceback() -> None:
    """A new place that names a line uses `place_of`."""
    assert importlib.util.find_spec("jetrl") is not None
    for path in sorted((ROOT / "jetrl").rglob("*.py")):
        if path.name != "errors.py":
            names = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
            assert not names & {"extract_tb", "tb_lineno"}, f"{path}: errors.place_of says where an error was raised"
