"""The house rules that a machine can check: who imports whom, sizes, rooms without torch, a test for every op."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "jetrl"
STUDY = ROOT / "jetrl_study"  # the study of flows: a package of its own beside jetrl
FILES = sorted(PACKAGE.rglob("*.py")) + sorted(STUDY.rglob("*.py"))

# Ranks of docs/ARCHITECTURE.md: a module imports from its own room or from lower ranks only.
RANKS = [
    ("arrays", "branches"),
    ("errors", "types", "spec", "choices", "presets", "process_exit", "hashing", "moved", "values", "rounding",
     "__init__"),
    ("untrusted", "phrases"),
    ("config", "requirements"),
    ("precision", "user_code"),
    ("kernels", "parallel", "rl", "report", "arguments", "trust", "callbacks"),
    ("engine", "model", "rewards"),
    ("huggingface", "rollout", "train"),
    ("chat", "vllm"),
    ("serve",),
    ("environments",),
    ("tasks",),
    ("run",),
    ("parity", "program", "jetrl_study", "pages"),
    ("api",),
    ("doctor", "trainer"),
    ("cli",),
    ("__main__",),
]
RANK = {room: rank for rank, rooms in enumerate(RANKS) for room in rooms}
REPORT_MAY = {"types", "errors", "untrusted", "moved", "rounding", "report", "__init__"}
NO_TORCH = [
    "precision", "config", "spec.py", "errors.py", "types.py", "arrays.py", "branches.py", "choices.py", "presets.py",
    "requirements.py", "untrusted.py", "values.py", "rounding.py",
    "engine/scheduler.py", "engine/pages.py", "engine/plan.py", "engine/slots.py", "engine/prefixes.py",
    "engine/turns.py", "engine/limits.py", "engine/settings.py", "engine/rows.py",
    "engine/speculation/depth.py", "engine/speculation/sources.py",
    "engine/sharing.py", "rl/advantage.py",
]

MAX_MODULE, MAX_FUNCTION = 600, 60  # a module is a thing; far beyond 400 lines it is mostly two
# file -> why it may be longer
LONG_MODULES: dict[str, str] = {}
LONG_FUNCTIONS = {
    "kernels/delta/general.py:_rule_kernel": "one kernel, whose state stays in registers from chunk to chunk",
    "rl/losses.py:policy_loss": "a third is the docstring with the formulas; the code is one straight computation",
}
# Functions with an `except Exception` that goes on: checkers by others fail on odd answers, which is counted apart;
# the doctor tells how a library fails; a process that compiles sends its error to the one that tells it.
SWALLOWERS = [
    "chat/template.py:_attempt",  # templates refuse texts that are none of the data's; limits pass
    "doctor/finding.py:attempted",
    "environments/verifiers_worker.py:main",  # the run is told why the environment cannot be
    "errors.py:shown", "errors.py:text_of",  # the text says that repr or str of the user raised
    "jetrl_study/conduct.py:_write_so_far",  # told, and met again at the end: hours of runs do not hang on a page
    "kernels/compiling/pool.py:_attempted",
    "report/channel.py:error_of",  # told once, and again at the end: no run hangs on a tracker
    "report/live.py:_attempt",  # told, and met again at the end: no run hangs on its page
    "rewards/mathematics.py:_serve", "rewards/mathematics.py:score_math",
    "run/checkpoint/checkpoint.py:_carry",  # in a thread: raised by `finish`
    "tasks/gym.py:_score",
]
# A module that no test of its room names -> the module, with tests, that uses it and whose tests cover it.
REACHED_THROUGH = {
    "config/precedence": "config/load",
    "config/rollout": "config/sections",
    "config/teacher": "config/sections",
    "huggingface/config": "huggingface/read",
    "kernels/gemm/deepgemm": "kernels/gemm/table",
    "kernels/experts/deepgemm": "kernels/experts/table",
    "kernels/attention/flash": "kernels/attention/by_head",
    "kernels/pointwise/reference": "kernels/pointwise/table",
    "kernels/quantize/reference": "kernels/quantize/table",
    "model/attention": "model/blocks",
    "model/mlp": "model/blocks",
    "huggingface/tokenizer": "huggingface/read",
    "huggingface/write": "huggingface/read",
    "precision/picture/svg": "precision/picture/draw",
    "report/files": "report/recorder",
    "rewards/function": "rewards/score",
    "rl/gae": "rl/advantage",
    "rl/sequences": "rl/mismatch",
    "engine/prefixes": "engine/scheduler",
    "engine/slots": "engine/scheduler",
    "engine/turns": "engine/scheduler",
    "run/compare": "cli",
    "tasks/protocol": "tasks/task",
    "user_code/calls": "environments/conversations",
}


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE if PACKAGE in path.parents else ROOT).as_posix()


def dotted(name: str) -> str:
    """`jetrl.room.module` of a module's name without `.py`."""
    return ("" if name.startswith("jetrl_study/") else "jetrl.") + name.replace("/", ".")


def room_of(module: str) -> str:
    """The room (or top-level module) of `jetrl.room.module`; the study's package is one room."""
    parts = module.split(".")
    if parts[0] == "jetrl_study":
        return parts[0]
    return parts[1] if len(parts) > 1 else "__init__"


def imports(path: Path) -> list[tuple[int, str, bool]]:
    """(line, module, only for type checking) of every import, those inside functions too."""
    tree, found = ast.parse(path.read_text()), []
    typing_only = {
        id(inner)
        for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name, id(node) in typing_only) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative imports hide the room"
            module = node.module or ""
            if module == "jetrl":  # from jetrl import room
                found += [(node.lineno, f"jetrl.{alias.name}", id(node) in typing_only) for alias in node.names]
            else:
                found.append((node.lineno, module, id(node) in typing_only))
    return found


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_go_downwards(path: Path) -> None:
    room = name_of(path).split("/")[0].removesuffix(".py")
    wrong = []
    for line, module, _ in imports(path):
        if module.split(".")[0] not in ("jetrl", "jetrl_study"):
            continue
        other = room_of(module)
        other = "__init__" if other == "__version__" else other
        assert other in RANK, f"{path}:{line}: {module} is in no room; add it to docs/ARCHITECTURE.md and here"
        allowed = other == room or RANK[other] < RANK[room]
        if room == "report":
            allowed = other in REPORT_MAY
        if not allowed:
            wrong.append(f"line {line}: {module}")
    assert not wrong, f"{name_of(path)} imports upwards or sideways: {wrong}"


# Who may import what compiles kernels ahead of need: a run has one door to it, `run.compiling.ahead`.
DOORS = {
    "jetrl.kernels.compiling.recorded": {"run/compiling/needed"},  # takes the place of functions of libraries
    "jetrl.kernels.compiling.pool": {"run/compiling/ahead", "run/compiling/needed", "kernels/compiling/recorded"},
    "jetrl.run.compiling.needed": set[str](),  # called by name, in a process of its own
    "jetrl.run.compiling.ahead": {"run/setup"},
}


def test_kernels_compiled_ahead_have_one_door() -> None:
    found = {door: set[str]() for door in DOORS}
    for path in FILES:
        for _, imported, _ in imports(path):
            if imported in DOORS:
                found[imported].add(name_of(path).removesuffix(".py"))
    assert found == DOORS


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_tool_of_tests_is_used_elsewhere(path: Path) -> None:
    found = [name for _, name, _ in imports(path) if name.split(".")[0] in ("unittest", "pytest", "mock")]
    assert not found, f"{name_of(path)} imports {found}"


@pytest.mark.parametrize("place", NO_TORCH)
def test_rooms_without_torch(place: str) -> None:
    target = PACKAGE / place
    for path in sorted(target.rglob("*.py")) if target.is_dir() else [target]:
        heavy = [m for _, m, typing_only in imports(path) if m.split(".")[0] in ("torch", "triton") and not typing_only]
        assert not heavy, f"{name_of(path)} imports {heavy}"


def loads_torch(statement: str, heavy: tuple[str, ...] = ("torch", "transformers")) -> bool:
    code = f"import sys; {statement}; print(bool({{*{heavy}}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip() == "True"


def test_help_does_not_load_torch() -> None:
    assert not loads_torch("import jetrl.cli") and loads_torch("import jetrl.api")
    heavy = ("torch", "transformers", "numpy")
    assert not loads_torch("import jetrl.cli", heavy) and loads_torch("import jetrl.types", heavy)


def test_rooms_without_torch_load_none_through_others() -> None:
    files = [p for place in NO_TORCH for p in sorted((PACKAGE / place).rglob("*.py")) or [PACKAGE / place]]
    names = ["jetrl." + name_of(p).removesuffix(".py").removesuffix("/__init__").replace("/", ".") for p in files]
    assert not loads_torch(f"import {', '.join(names)}")


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_sizes(path: Path) -> None:
    text = path.read_text()
    lines = len(text.splitlines())
    name = name_of(path)
    if name in LONG_MODULES:
        assert lines > MAX_MODULE, f"{name} is short now: take it off the list of exceptions"
    else:
        assert lines <= MAX_MODULE, f"{name} has {lines} lines, at most {MAX_MODULE}: split it"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            size = (node.end_lineno or node.lineno) - node.lineno + 1
            where = f"{name}:{node.name}"
            is_long = size > MAX_FUNCTION
            assert is_long == (where in LONG_FUNCTIONS), f"{where} has {size} lines, at most {MAX_FUNCTION}"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_every_module_says_what_it_is(path: Path) -> None:
    tree = ast.parse(path.read_text())
    if not tree.body and path.name == "__init__.py":
        return
    assert ast.get_docstring(tree), f"{name_of(path)} has no docstring"


def test_no_op_is_without_a_test() -> None:
    """A folder of ops has tests/kernels/test_<folder>.py; so has each module that ops share, plain values aside."""
    shared = [path.stem for path in (PACKAGE / "kernels").glob("*.py")] + [
        path.stem for path in (PACKAGE / "kernels" / "update").glob("*.py")
        if path.stem not in ("reference", "table", "triton")
    ]
    folders = [path.parent.name for path in (PACKAGE / "kernels").glob("*/ops.py")]
    assert len(folders) >= 6
    for name in {*shared, *folders} - {"__init__", "qtensor", "reference", "launch"}:
        assert (ROOT / "tests" / "kernels" / f"test_{name}.py").is_file(), name


def names_in(path: Path) -> set[str]:
    """Modules that a file imports or names in a string (`jetrl.room.module`, `jetrl.room.module:attribute`).

    A table of ops names those of its rows, below `jetrl.kernels`.
    """
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and str(node.value).startswith(("jetrl.", "jetrl_study.")):
            name = str(node.value).partition(":")[0]
            found |= {name, name.rpartition(".")[0]}
        elif isinstance(node, ast.Constant) and path.match("kernels/*/table.py"):
            found.add(f"jetrl.kernels.{node.value}")
    return found


def test_every_module_is_named_by_a_test_of_its_room() -> None:
    """By a file in tests/<room>/ (kernels for a GPU: also tests/gpu/), or its tests go through a named module."""
    tests, rooms = ROOT / "tests", {path.name for path in (ROOT / "tests").iterdir() if path.is_dir()}
    by_folder: dict[str, set[str]] = {}
    for path in tests.rglob("*.py"):
        if path != Path(__file__):
            by_folder.setdefault(path.relative_to(tests).parts[0], set()).update(names_in(path))
    everywhere = set().union(*by_folder.values())
    modules = {name_of(path).removesuffix(".py"): path for path in FILES if path.name != "__init__.py"}
    named = set()
    for name in modules:
        room = name.split("/")[0]
        here = by_folder[room] if room in rooms else everywhere
        here = here | by_folder["gpu"] if room == "kernels" else here
        if dotted(name) in here:
            named.add(name)
    missing = modules.keys() - named - REACHED_THROUGH.keys()
    assert not missing, f"no test of the room names {sorted(missing)}"
    for name, through in REACHED_THROUGH.items():
        assert name in modules and name not in named, f"{name} is gone or named: take it out of REACHED_THROUGH"
        assert through in named or through in REACHED_THROUGH, f"no test names {through}, which {name} goes through"
        assert dotted(name) in names_in(modules[through]), f"{through} does not use {name}"
        assert REACHED_THROUGH.get(through) != name, f"{name} and {through} are reached through each other"


def test_no_swallowed_errors() -> None:
    """An `except` for all exceptions raises again, except where a checker by others fails: that is counted apart."""
    goes_on = []
    for path in FILES:
        for function in ast.walk(ast.parse(path.read_text())):
            if not isinstance(function, ast.FunctionDef):
                continue
            for node in ast.walk(function):
                if isinstance(node, ast.ExceptHandler):
                    broad = node.type is None or ast.unparse(node.type) in ("Exception", "BaseException")
                    raises = any(isinstance(inner, ast.Raise) for inner in ast.walk(node))
                    goes_on += [f"{name_of(path)}:{function.name}"] if broad and not raises else []
    assert sorted(goes_on) == SWALLOWERS, "a broad except that goes on, or one that is gone: see SWALLOWERS"
