"""An op is registered once, in its folder; what each row names exists, also where the GPU's packages do not."""

from __future__ import annotations

import ast
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jetrl.kernels import dispatch, registry
from jetrl.kernels.registry import Backend, Op, tables

ROOT = Path(__file__).parents[2]
ROWS = [op for rows in tables().values() for op in rows]
FOLDERS = {
    "adapters": "jetrl.kernels.adapters.table",
    "attention": "jetrl.kernels.attention.table", "experts": "jetrl.kernels.experts.table",
    "gemm": "jetrl.kernels.gemm.table", "logprob": "jetrl.kernels.logprob.table",
    "pointwise": "jetrl.kernels.pointwise.table", "quantize": "jetrl.kernels.quantize.table",
    "update": "jetrl.kernels.update.table",
}


def source_of(module: str) -> ast.Module:
    """Found without importing it: on this machine its packages may be missing."""
    path = ROOT / f"{module.replace('.', '/')}.py"
    assert path.is_file(), f"{module} does not exist"
    return ast.parse(path.read_text())


def names_at_top(tree: ast.Module) -> dict[str, ast.AST]:
    """What the module's own lines define: functions and other names, none that it imports."""
    found: dict[str, ast.AST] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign):
            found.update({target.id: node for target in node.targets if isinstance(target, ast.Name)})
    return found


def parameters(function: ast.FunctionDef) -> tuple[int, int]:
    """How many arguments it needs, and how many it takes."""
    assert not function.args.kwonlyargs and not function.args.vararg and not function.args.kwarg
    return len(function.args.args) - len(function.args.defaults), len(function.args.args)


@pytest.mark.parametrize("op", ROWS, ids=lambda op: op.name)
def test_each_row_names_functions_that_exist_and_are_called_alike(op: Op) -> None:
    assert set(op.modules) <= set(dispatch.DEVICE_OF), f"{op.name}: a backend that is none"
    functions = {}
    for backend in dispatch.DEVICE_OF:
        module = op.module(backend)
        if module is None:
            continue
        found = names_at_top(source_of(module))
        assert op.name in found, f"{module} has no function {op.name}, which the row for {backend} says"
        if isinstance(function := found[op.name], ast.FunctionDef):
            functions[module] = parameters(function)
    assert functions, f"no backend has a function {op.name}"
    least, most = max(n for n, _ in functions.values()), min(n for _, n in functions.values())
    assert least <= most, f"no call of {op.name} suits all of {functions}"


def test_the_tables_are_found_and_each_op_has_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tables().keys() >= FOLDERS.keys()
    assert all(importlib.util.find_spec(name) for name in FOLDERS.values())
    assert len(ROWS) >= 70 and len({op.name for op in ROWS}) == len(ROWS)
    monkeypatch.setattr(importlib.import_module(FOLDERS["gemm"]), "OPS", (Op("rope", reference="reference"),))
    with pytest.raises(AssertionError, match=r"ops with two rows: \['rope'\]"):
        registry.tables.__wrapped__()


def test_what_a_row_says_of_a_backend() -> None:
    both, cpu = Op("f", reference="a.b", hopper="c"), Op("g", reference="a", hopper=None)
    assert both.module("reference") == "jetrl.kernels.a.b" and both.module("hopper") == "jetrl.kernels.c"
    assert both.module("hopper_scaled_mm") == "jetrl.kernels.c", "it has hopper's"
    assert Op("f", hopper="c", hopper_scaled_mm="d").module("hopper_scaled_mm") == "jetrl.kernels.d"
    assert Op("f", hopper="c", hopper_scaled_mm=None).module("hopper_scaled_mm") is None
    assert cpu.module("hopper") is None and cpu.module("hopper_scaled_mm") is None
    with pytest.raises(LookupError, match="the row of the op f has no module for the backend hopper, nor None"):
        Op("f", reference="a", hoper="c").module("hopper")


def test_which_backends_do_without_what() -> None:
    """What draws on a CPU is no op; the second GEMM backend has no experts and no latent attention. All
    else is everywhere."""
    without = {b: {op.name for op in ROWS if op.module(b) is None} for b in dispatch.DEVICE_OF}
    latent = {op.name for op in ROWS if "latent" in op.name}
    assert without["reference"] == {"sample"} and without["hopper"] == without["triton"] == set()
    assert without["hopper_scaled_mm"] == {op.name for op in tables()["experts"]} | latent


def test_an_op_that_a_backend_lacks_is_an_error_that_names_both() -> None:
    backend = dispatch.load_backend("reference")
    assert isinstance(backend, Backend) and not hasattr(backend, "sample")
    with pytest.raises(AttributeError, match="the backend reference has no op sample"):
        backend.sample(None)


def test_a_cpu_imports_no_kernels_of_a_gpu() -> None:
    """In a process of its own: others may have loaded them here."""
    code = (
        "import sys; from jetrl.kernels.dispatch import load_backend; load_backend('reference');"
        "print(sorted(m for m in sys.modules if m.startswith('jetrl.kernels.')), 'deep_gemm' in sys.modules)"
    )
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert loaded.strip().endswith("False") and "jetrl.kernels.gemm.reference" in loaded
    modules = {op.module(name) for op in ROWS for name in ("hopper", "hopper_scaled_mm")} - {None}
    gpu = {m for m in modules if not str(m).endswith(".reference")}
    assert len(gpu) >= 18 and not [m for m in gpu if f"'{m}'" in loaded]


TABLE = '''"""Ops of a test."""

from jetrl.kernels.registry import Op

OPS = (Op("doubled", reference="mine.reference", hopper="mine.reference"),)
'''
REFERENCE = '''"""The definition."""


def doubled(x):
    return x + x
'''
OPS = '''"""What others call."""

from jetrl.kernels.dispatch import backend_of


def doubled(x):
    return backend_of(x).doubled(x)
'''
ASK = '''
import torch
from jetrl.kernels import registry
from jetrl.kernels.mine import ops
print(ops.doubled(torch.tensor([1.5, -2.0])).tolist())
rows = {op.name: op for rows in registry.tables().values() for op in rows}
print(rows["doubled"].module("hopper_scaled_mm"), len(rows))
'''


def test_an_op_is_added_by_touching_one_folder(tmp_path: Path) -> None:
    """A copy of the package gets a folder, and nothing else is changed."""
    shutil.copytree(ROOT / "jetrl", tmp_path / "jetrl", ignore=shutil.ignore_patterns("__pycache__"))
    folder = tmp_path / "jetrl" / "kernels" / "mine"
    folder.mkdir()
    files = {"__init__.py": "", "table.py": TABLE, "reference.py": REFERENCE, "ops.py": OPS}
    for name, text in files.items():
        (folder / name).write_text(text)
    (tmp_path / "ask.py").write_text(ASK)
    done = subprocess.run([sys.executable, "ask.py"], cwd=tmp_path, capture_output=True, text=True,
                          env={"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:2] == ["[3.0, -4.0]", f"jetrl.kernels.mine.reference {len(ROWS) + 1}"]
