"""Files about the repository: workflows, the image, hooks, citation, notes for agents. They name what exists."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import jetrl

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
MAKE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([\w-]+):", MAKE, re.M))


def loaded(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def steps(workflow: Path) -> list[dict[str, Any]]:
    return [step for job in loaded(workflow)["jobs"].values() for step in job["steps"]]


def test_there_is_a_workflow_for_tests_docs_and_releases() -> None:
    assert [path.stem for path in WORKFLOWS] == ["docs", "release", "test"]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_what_exists(workflow: Path) -> None:
    whole = loaded(workflow)
    assert set(whole) - {"concurrency"} == {"name", True, "permissions", "jobs"}  # YAML reads `on` as true
    for name, job in whole["jobs"].items():
        assert job["runs-on"] == "ubuntu-latest" and set(_list(job.get("needs"))) <= set(whole["jobs"]), name
    scripts = [step["run"] for step in steps(workflow) if "run" in step]
    assert scripts and all("run" in step or re.fullmatch(r"[\w-]+/[\w-]+@[\w/.]+", step["uses"])
                           for step in steps(workflow))
    for script in scripts:
        checked = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
        assert checked.returncode == 0, checked.stderr
        assert set(re.findall(r"\bmake ([\w-]+)", script)) <= TARGETS
        missing = [name for name in re.findall(r"(?:tests|docs|benchmarks)/[\w/.]+|[\w-]+\.txt", script)
                   if not (ROOT / name).exists()]
        assert not missing, missing
    pythons = re.findall(r'"(3\.\d+)"', workflow.read_text())
    least = PROJECT["requires-python"].removeprefix(">=")
    assert pythons and all(int(one.split(".")[1]) >= int(least.split(".")[1]) for one in pythons)


def _list(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value or ())


def test_the_tests_run_on_every_python_that_the_project_names() -> None:
    named = {line.rpartition(" ")[2] for line in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", line)}
    assert set(loaded(ROOT / ".github/workflows/test.yml")["jobs"]["test"]["strategy"]["matrix"]["python"]) == named


def test_a_tag_is_released_only_if_it_is_the_version_and_in_the_changelog(tmp_path: Path) -> None:
    """The script of the workflow, on this tree and on others."""
    (script,) = [one["run"] for one in steps(ROOT / ".github/workflows/release.yml") if "GITHUB_REF_NAME" in one.get(
        "run", "") and "__version__" in one["run"]]

    def status(tag: str, changelog: str) -> int:
        (tmp_path / "jetrl").mkdir(exist_ok=True)
        (tmp_path / "jetrl" / "__init__.py").write_text((ROOT / "jetrl" / "__init__.py").read_text())
        (tmp_path / "CHANGELOG.md").write_text(changelog)
        variables = {"GITHUB_REF_NAME": tag, "PATH": "/bin:/usr/bin"}
        return subprocess.run(["bash", "-e", "-c", script], cwd=tmp_path, env=variables, capture_output=True).returncode

    dated = f"## [{jetrl.__version__}] - 2026-11-26\n"
    assert status(f"v{jetrl.__version__}", dated) == 0
    assert status("v9.9.9", dated) != 0
    assert status(f"v{jetrl.__version__}", f"## [{jetrl.__version__}] - unreleased\n") != 0


def test_citation_and_image_name_the_version() -> None:
    citation = loaded(ROOT / "CITATION.cff")
    assert citation["version"] == jetrl.__version__ and citation["license"] == PROJECT["license"]
    assert {"cff-version", "message", "title", "authors", "date-released"} <= citation.keys()
    found = f"## [{jetrl.__version__}] - {citation['date-released']}"
    assert found in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), f"CHANGELOG.md has no {found}"
    image = (ROOT / "docker" / "Dockerfile.hopper").read_text()
    job = (ROOT / "examples" / "kubernetes" / "train.yaml").read_text()
    assert set(re.findall(r"jetrl:([\d.]+\d)", image + job)) == {jetrl.__version__}


def test_the_image_copies_what_the_tree_has_and_installs_known_extras() -> None:
    image = (ROOT / "docker" / "Dockerfile.hopper").read_text()
    ignored = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    for line in re.findall(r"^COPY (.+)$", image, re.M):
        *sources, _ = line.split()
        assert all((ROOT / source).exists() and source not in ignored for source in sources), line
    (extras,) = re.findall(r"\.\[([\w,]+)\]", image)
    assert set(extras.split(",")) <= PROJECT["optional-dependencies"].keys() and "hopper" in extras
    assert not {"jetrl", "jetrl_study", "docs", "README.md", "LICENSE"} & set(ignored)
    assert "-devel-" in re.findall(r"^FROM (\S+)", image, re.M)[0], "DeepGEMM needs nvcc"


def test_hooks_run_programs_of_the_extra_dev() -> None:
    (repository,) = loaded(ROOT / ".pre-commit-config.yaml")["repos"]
    dev = {re.match(r"[\w-]+", one)[0] for one in PROJECT["optional-dependencies"]["dev"]}  # type: ignore[index]
    for hook in repository["hooks"]:
        words = hook["entry"].split()
        assert words[0] in dev | {"python"}, hook
        assert all((ROOT / word).exists() for word in words if word.endswith(".py"))
        if "files" in hook:
            assert re.search(hook["files"], "jetrl/config/rl.py") and not re.search(hook["files"], "jetrl/rl/gae.py")


def test_notes_for_agents_name_what_exists() -> None:
    text = (ROOT / "AGENTS.md").read_text()
    files = {name for name in re.findall(r"(?<![\w/])((?:docs|tests)/[\w/.]+\w|[A-Z]+\.md)", text)}
    assert len(files) > 5 and all((ROOT / name).exists() for name in files), files
    assert set(re.findall(r"`?make ([\w-]+)", text)) <= TARGETS
    for command in re.findall(r"`python -m ([\w.]+) >", text):
        assert (ROOT / (command.replace(".", "/") + ".py")).is_file(), command


@pytest.mark.parametrize("page", ["AGENTS.md", "CODE_OF_CONDUCT.md", "examples/README.md"])
def test_lines_of_prose_are_short(page: str) -> None:
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    assert not [line for line in lines if len(line) > 100 and not line.startswith("|")]
