"""The wheel, the sdist and an editable install, each made from a copy of this tree and tried in a fresh environment.

The fresh environments take their dependencies from the running one, by a path file: its folder comes behind their own,
and path files inside it (such as that of an editable jetrl) are not read. So jetrl itself is the one just installed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from jetrl import __version__

pytest.importorskip("setuptools", reason='builds packages: pip install "jetrl[dev]"')
pytest.importorskip("pip", reason="installs packages")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
NOT_COPIED = shutil.ignore_patterns(
    ".git", ".venv", ".*_cache", ".hypothesis", "__pycache__", "*.egg-info", "build", "dist", "runs", "models")
TINY = (  # the quickstart in two steps
    "sft.steps=2", "sft.warmup_steps=1", "sft.batch_size=4", "train.steps=2", "train.warmup_steps=1", "num_threads=1",
    "rollout.prompts_per_step=2", "rollout.group_size=2", "task.num_eval=4", "eval.eval_interval=2",
    "checkpoint.save_interval=2", "sft.cache_dir=cache",
)


def clean(**changes: str) -> dict[str, str]:
    """The variables of this process without those that lead Python to other code."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))} | changes


def call(*command: str | Path, cwd: Path) -> str:
    """The output of a command, which must succeed."""
    done = subprocess.run([*map(str, command)], cwd=cwd, env=clean(COLUMNS="80"), capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def copied(to: Path) -> Path:
    """A copy of this tree. Its folder is called jetrl, as a clone's is."""
    return Path(shutil.copytree(ROOT, to / "jetrl", ignore=NOT_COPIED))


def built(source: Path, kind: str, out: Path) -> Path:
    """A wheel, an editable wheel or an sdist by the hooks that pip calls, with the setuptools of this environment."""
    out.mkdir(parents=True, exist_ok=True)
    code = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
    call(sys.executable, "-c", code, f"build_{kind}", out, cwd=source)
    (found,) = out.iterdir()
    return found


def environment(folder: Path, wheel: Path) -> Path:
    """The `bin` of a fresh environment with this wheel in it, and the packages of the running one behind it."""
    venv.create(folder, with_pip=False, symlinks=True)
    program = folder / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", program, "install", "--quiet", "--no-deps", "--no-index")
    call(*pip, "--disable-pip-version-check", wheel, cwd=folder)
    (own,) = folder.glob("lib/python*/site-packages")
    others = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (own / "zz_dependencies.pth").write_text("\n".join(others) + "\n")
    return program.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    return built(copied(folder), "wheel", folder / "dist")


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment(tmp_path_factory.mktemp("environment"), wheel)


@pytest.fixture(scope="module")
def editable(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(a clone, the `bin` of an environment in which it is installed editable)."""
    folder = tmp_path_factory.mktemp("editable")
    clone = copied(folder / "clones")
    return clone, environment(folder / "environment", built(clone, "editable", folder / "dist"))


def contents(file: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(file) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/RECORD")}


def test_the_wheel_holds_both_packages_their_pages_and_nothing_else(wheel: Path) -> None:
    held = contents(wheel)
    package = {path.relative_to(ROOT).as_posix(): path.read_bytes()
               for top in ("jetrl", "jetrl_study") for path in (ROOT / top).rglob("*")
               if path.is_file() and "__pycache__" not in path.parts}
    assert {name: data for name, data in held.items() if name.startswith(("jetrl/", "jetrl_study/"))} == package
    info = f"jetrl-{__version__}.dist-info"
    files = ("METADATA", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt")
    at = f"jetrl-{__version__}.data/data/share/doc/jetrl"
    pages = {f"{at}/{path.name}": path for path in (ROOT / "docs").glob("*.md")}
    assert held.keys() - package.keys() == {f"{info}/{name}" for name in files} | pages.keys()
    assert all(held[name] == path.read_bytes() for name, path in pages.items())
    assert "jetrl/py.typed" in held and "jetrl/report/template.html.j2" in held
    assert {"jetrl_study/study.html.j2", "jetrl_study/studies/quick.toml"} <= held.keys()
    assert held[f"{info}/licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()
    metadata = held[f"{info}/METADATA"].decode()
    for line in (f"Version: {__version__}", "License-Expression: Apache-2.0", "Requires-Python: >=3.11"):
        assert f"\n{line}\n" in metadata, line


def test_the_sdist_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    sdist = built(copied(tmp_path), "sdist", tmp_path / "dist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (source,) = (tmp_path / "unpacked").iterdir()
    for name in ("LICENSE", "CHANGELOG.md", "Makefile", "constraints-cpu.txt", "tests/tiny.py", "docs/INSTALL.md",
                 "examples/guess_number.toml", "tests/golden/golden.json"):
        assert (source / name).read_bytes() == (ROOT / name).read_bytes(), name
    assert contents(built(source, "wheel", tmp_path / "again")) == contents(wheel)


def test_the_commands_of_the_wheel_from_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    where = call(installed / "python", "-c", "import jetrl; print(jetrl.__file__)", cwd=tmp_path).strip()
    assert Path(where).is_relative_to(installed.parent), where
    assert call(installed / "jetrl", "--version", cwd=tmp_path) == f"jetrl {__version__}\n"
    listed = call(installed / "jetrl", "recipes", cwd=tmp_path)
    assert {path.stem for path in (ROOT / "jetrl" / "recipes").iterdir()} <= set(listed.split())
    assert "train.lr" in call(installed / "jetrl", "settings", cwd=tmp_path)
    listed = call(installed / "jetrl", "docs", cwd=tmp_path)
    assert {path.stem for path in (ROOT / "docs").glob("*.md")} <= set(listed.split())
    assert call(installed / "jetrl", "docs", "docs/REWARDS.md", cwd=tmp_path) == (ROOT / "docs/REWARDS.md").read_text()
    assert not list(tmp_path.iterdir())


def test_the_doctor_of_the_wheel(installed: Path, tmp_path: Path) -> None:
    """Its versions come from the wheel's metadata, and are those of pyproject.toml."""
    from jetrl.requirements import packages

    found = json.loads(call(installed / "jetrl", "doctor", "--json", cwd=tmp_path))
    assert found["ok"] and found["jetrl"] == __version__ and not list(tmp_path.iterdir())
    told = {f["what"]: f["found"] for f in found["findings"] if f["section"] == "Packages"}
    assert told == {p.name: f"{p.found} (needs {p.needed})" for p in packages()}


def test_the_quickstart_of_the_wheel_in_two_steps(installed: Path, tmp_path: Path) -> None:
    told = call(installed / "jetrl", "train", "quickstart", *TINY, cwd=tmp_path)
    run = tmp_path / "runs" / "quickstart"
    assert f"{run.relative_to(tmp_path)}/report.html" in told and list((tmp_path / "cache").iterdir())
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2] and rows[2]["parity/logprob_abs_diff_max"] == 0.0
    page = (run / "report.html").read_text()
    assert (ROOT / "jetrl" / "report" / "report.css").read_text().strip()[:200] in page
    assert (ROOT / "jetrl" / "report" / "samples.js").read_text().strip()[-200:] in page


@pytest.mark.parametrize("recipe", ["tools"])
def test_other_recipes_of_the_wheel(installed: Path, tmp_path: Path, recipe: str) -> None:
    assert f'name = "{recipe}"' in call(installed / "jetrl", "train", recipe, "--dry-run", cwd=tmp_path)


@pytest.mark.parametrize("where", ["a folder named jetrl", "the folder that holds the clone", "the clone"])
def test_an_editable_install_is_found_from_everywhere(editable: tuple[Path, Path], where: str, tmp_path: Path) -> None:
    """A folder `jetrl` without __init__.py in the current folder is a namespace package, if Python finds no other.

    An editable install by a finder of setuptools' would come after it; a plain path is looked through before.
    """
    clone, programs = editable
    (tmp_path / "jetrl").mkdir()
    cwd = {"a folder named jetrl": tmp_path, "the folder that holds the clone": clone.parent, "the clone": clone}[where]
    code = "import jetrl; print(jetrl.__file__, jetrl.UserError.__name__)"
    assert call(programs / "python", "-c", code, cwd=cwd).split() == [str(clone / "jetrl" / "__init__.py"), "UserError"]
    for command in ((programs / "python", "-m", "jetrl.cli"), (programs / "jetrl",)):
        assert call(*command, "--version", cwd=cwd) == f"jetrl {__version__}\n"
