"""Each program in examples/ runs, and does what it says; the notebook and the job files too."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from tiny import tiny_run
from torch.distributed.run import get_args_parser

from jetrl.config import load_config, resolve
from jetrl.config.shipped import find_recipe
from jetrl.report.recorder import read_metrics
from jetrl.run.loop import StopRequest, run

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
PARITY = "parity/logprob_abs_diff_max"
SMALL = ("train.steps=2", "train.warmup_steps=0", "task.num_eval=4", "eval.eval_interval=2",
         "checkpoint.save_interval=2", "rollout.prompts_per_step=4", "rollout.group_size=4", "num_threads=1")


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """A run sets the number of threads of this process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def trained(recipe: str, folder: Path, *overrides: str) -> list[dict[str, float]]:
    config = load_config(ROOT / recipe, [*SMALL, f"output_dir={folder}", *overrides])
    assert run(resolve(config, cuda_available=False), folder / config.name, ["test"], StopRequest())
    return read_metrics(folder / config.name)


@pytest.mark.timeout(400)
def test_training_through_an_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openai", reason="needs OpenAI's client: the extra dev")
    pytest.importorskip("starlette", reason="needs the extra serve")
    monkeypatch.chdir(ROOT)
    rows = trained("examples/agent.toml", tmp_path, "environment.timeout=300", "rollout.prompts_per_step=2")
    assert [(row[PARITY], row["environment/num_errors"]) for row in rows[1:]] == [(0.0, 0)] * 2
    assert all(1.0 <= row["environment/turns_mean"] <= 3.0 for row in rows[1:])


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("recipe", "package"), [("agents_sdk", "agents"), ("agent_verifiers", "verifiers")])
def test_training_through_other_peoples_loops(
    recipe: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(package, reason="needs openai-agents, or the extra verifiers")
    pytest.importorskip("httptools", reason="needs the extra serve")
    monkeypatch.chdir(ROOT)
    rows = trained(f"examples/{recipe}.toml", tmp_path, "environment.timeout=300", "rollout.prompts_per_step=2")
    assert [(row[PARITY], row["environment/num_errors"]) for row in rows[1:]] == [(0.0, 0)] * 2
    assert all(1.0 <= row["environment/turns_mean"] <= 3.0 for row in rows[1:])


def test_own_data_and_rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    rows = trained("examples/sort_digits.toml", tmp_path, "sft.steps=2", "sft.warmup_steps=0",
                   f"sft.cache_dir={tmp_path}/sft")
    assert {"reward/right/mean", "reward/ordered/mean", "eval/file/right/avg@1"} <= rows[-1].keys()
    assert [row[PARITY] for row in rows[1:]] == [0.0, 0.0]
    example = loaded("sort_digits")
    assert example.right(["123", "132"], ["123", "123"]) == [1.0, 0.0]
    assert example.ordered(["123", "132", "321", "1", ""]) == [1.0, 0.5, 0.0, 0.0, 0.0]
    data = [json.loads(line) for line in (EXAMPLES / "sort_digits.jsonl").read_text().splitlines()]
    assert len(data) == 600 and all(sorted(row["prompt"][:-1]) == list(row["answer"]) for row in data)


@pytest.mark.parametrize("engine", ["jetrl", "examples/transformers_engine.py:TransformersEngine"])
def test_own_environment_and_own_engine(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    rows = trained("examples/guess_number.toml", tmp_path, f"rollout.engine={engine}")
    assert len(rows) == 3 and all(row["environment/turns_mean"] >= 1 for row in rows[1:])
    assert all((row[PARITY] == 0.0) == (engine == "jetrl") for row in rows[1:])


def test_warm_start_then_rl(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before, after = loaded("warm_start_then_rl").main(tmp_path / "run", sft_steps=3, rl_steps=2)
    told = capsys.readouterr().out
    assert 0 <= before <= 1 and 0 <= after <= 1
    assert f"after the warm start: {before:.3f}" in told and f"after RL: {after:.3f}" in told
    rows = list(loaded("warm_start_then_rl").rows())
    wrong = sum(row["solution"] != row["answer"] for row in rows) / len(rows)
    assert 0.2 < wrong < 0.4 and all(row["answer"] == row["prompt"][-2::-1] for row in rows)


@pytest.mark.slow
def test_after_training(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_dir = tiny_run(tmp_path, {"task.reward": None, "train.steps": 1})
    gap = loaded("after_training").main(str(run_dir), str(tmp_path / "exported"))
    assert 0 <= gap < 0.1
    told = capfd.readouterr().out
    assert "eval/addition/avg@1" in told and (tmp_path / "exported" / "config.json").is_file()
    assert [line for line in told.splitlines() if line.startswith("$ jetrl")] == [
        f"$ jetrl eval {run_dir}", f"$ jetrl parity {run_dir} --device cpu",
        f"$ jetrl export {run_dir} {tmp_path}/exported",
    ]


SMALL_NOTEBOOK = """
STEPS = 2
SETTINGS = {"sft.steps": 3, "sft.warmup_steps": 0, "sft.batch_size": 4, "sft.cache_dir": "sft", "train.warmup_steps": 0,
            "task.num_eval": 4, "rollout.prompts_per_step": 4, "rollout.group_size": 4, "eval.eval_interval": 1,
            "checkpoint.save_interval": 2, "model.arch.num_hidden_layers": 1, "num_threads": 1}
RUN = "run"
"""


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path) -> None:
    """As a program, with its cell of parameters replaced."""
    notebook = json.loads((EXAMPLES / "first_run.ipynb").read_text(encoding="utf-8"))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    (parameters,) = [cell for cell in code if "parameters" in cell["metadata"].get("tags", ())]
    names = {node.id for node in ast.walk(ast.parse("".join(parameters["source"]))) if isinstance(node, ast.Name)}
    assert names == {node.id for node in ast.walk(ast.parse(SMALL_NOTEBOOK)) if isinstance(node, ast.Name)}
    program = "\n".join(SMALL_NOTEBOOK if cell is parameters else "".join(cell["source"]) for cell in code)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT), "MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    for text in ("step  2  reward", "largest log-prob gap 0.0", "held-out accuracy", "48+75=", "bit for bit"):
        assert text in done.stdout, (text, done.stdout)
    assert (tmp_path / "run" / "report.html").is_file()


def test_the_notebook_shows_no_path_of_a_machine_and_no_error() -> None:
    text = (EXAMPLES / "first_run.ipynb").read_text(encoding="utf-8")
    outputs = [out for cell in json.loads(text)["cells"] for out in cell.get("outputs", ())]
    assert not [out for out in outputs if out["output_type"] == "error"]
    assert not re.search(r"/(?:root|home|tmp|work)/", text) and len(text) < 300_000


# ---- job files ------------------------------------------------------------------------------------------------------

FAKE_PYTHON = "#!/bin/bash\nprintf '%s\\n' \"$@\"\n"
MACHINE = {"NODES": "2", "GPUS": "8", "NAME": "mine", "JOB_COMPLETION_INDEX": "1", "RECIPE": "gsm8k_qwen3_1.7b",
           "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1",
           "SKYPILOT_NUM_GPUS_PER_NODE": "8"}


def kubernetes() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((EXAMPLES / "kubernetes" / "train.yaml").read_text()))


def skypilot() -> dict[str, Any]:
    return yaml.safe_load((EXAMPLES / "skypilot" / "train.yaml").read_text())


def script_of(kind: str) -> str:
    if kind == "skypilot":
        return skypilot()["run"]
    (container,) = kubernetes()[1]["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["bash", "-ceu"]
    (script,) = container["args"]
    return script


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("kind", ["kubernetes", "skypilot"])
def test_the_script_of_a_job_starts_ranks_that_train(kind: str, checkpoint: bool, tmp_path: Path) -> None:
    """With a `python` that prints its arguments: those of torchrun, and those of jetrl, which are a good command."""
    (tmp_path / "python").write_text(FAKE_PYTHON)
    (tmp_path / "python").chmod(0o755)
    if checkpoint:
        (tmp_path / "mine" / "checkpoints").mkdir(parents=True)
        (tmp_path / "mine" / "checkpoints" / "latest").write_text("step_000010")
    script = script_of(kind).replace("/runs", str(tmp_path))
    done = subprocess.run(["bash", "-ceu", script], capture_output=True, text=True,
                          env=MACHINE | {"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert done.returncode == 0, done.stderr
    words = done.stdout.split("\n")[:-1]
    of_torchrun, command = words[: (at := words.index("jetrl") - 1)], words[at:]
    assert command[:3] == ["-m", "jetrl", "train"] and ("--resume" in command) == checkpoint
    parsed = get_args_parser().parse_args([*of_torchrun[2:], "-m", "jetrl"])
    assert (parsed.nnodes, parsed.node_rank, parsed.nproc_per_node) == ("2", 1, "8")
    recipe, *overrides = [word for word in command[3:] if word != "--resume"]
    config = load_config(find_recipe(recipe), overrides)
    assert (config.name, config.output_dir) == ("mine", str(tmp_path))


def test_the_kubernetes_job_is_whole() -> None:
    service, job = kubernetes()
    assert (service["kind"], job["kind"], job["apiVersion"]) == ("Service", "Job", "batch/v1")
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    given = {one["name"]: one["value"] for one in container["env"]}
    assert spec["completions"] == spec["parallelism"] == int(given["NODES"]) and spec["completionMode"] == "Indexed"
    assert int(given["GPUS"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert pod["subdomain"] == service["metadata"]["name"] and service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert f"{job['metadata']['name']}-0.{pod['subdomain']}" in script_of("kubernetes"), "the first pod's name"
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}


def test_the_skypilot_task_is_whole() -> None:
    task = skypilot()
    known = {"name", "resources", "num_nodes", "workdir", "file_mounts", "envs", "setup", "run"}
    assert task.keys() <= known and set(task["envs"]) == {"RECIPE", "NAME"}
    checked = subprocess.run(["bash", "-n"], input=task["setup"], text=True, capture_output=True)
    assert checked.returncode == 0, checked.stderr
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (named,) = re.findall(r"\.\[(.*?)\]", task["setup"])
    assert set(named.split(",")) <= extras.keys()


def test_the_list_names_every_example() -> None:
    page = (EXAMPLES / "README.md").read_text()
    linked = {name for name in re.findall(r"\]\(([\w./]+)\)", page)}
    assert all((EXAMPLES / name).is_file() for name in linked), linked
    programs = {path.name for path in EXAMPLES.glob("*") if path.suffix in (".py", ".toml", ".ipynb")}
    assert programs <= linked, programs - linked
    jobs = {path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.glob("*/train.*")}
    assert jobs and jobs <= linked
