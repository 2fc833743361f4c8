"""What the user's code does to the process, in whole runs: folders, settings of torch, exits, threads left behind."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from test_cli import Cli, assert_refused
from test_cli import jetrl as jetrl
from test_cli import recipe as recipe
from tiny import REWARD, numbers, tiny_config, tiny_run, weights_hash

import jetrl as package
from jetrl.config import to_toml
from jetrl.engine.engine import PagedEngine
from jetrl.report.recorder import read_samples
from jetrl.run.checkpoint import checkpoint

BODY = REWARD.splitlines()[1] + "\n"


def reward_file(path: Path, before: str = "", inside: str = "pass") -> str:
    """A reward file that does something at import and in each call, else what tiny runs have."""
    path.write_text(f"{before}\ndef reward(completions, answer, **_):\n    {inside}\n{BODY}")
    return f"{path}:reward"


def process(folder: Path, *arguments: Any) -> tuple[int, str, float]:
    """The real program, in a folder: status, standard error, seconds."""
    env = os.environ | {"PYTHONPATH": str(Path(package.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "jetrl.cli", *map(str, arguments)], cwd=folder, env=env, capture_output=True, text=True,
        timeout=100,
    )
    return done.returncode, done.stderr, time.monotonic() - started


def relative_recipe(folder: Path) -> Path:
    """A tiny recipe all of whose paths are relative to its folder."""
    reward_file(folder / "rw.py", "import os")
    changes = {"output_dir": "runs", "task.reward": "rw.py:reward", "train.steps": 2}
    (folder / "r.toml").write_text(to_toml(tiny_config(folder, changes)))
    return folder / "r.toml"


@pytest.mark.parametrize(
    ("before", "inside"), [("import os", "os.chdir('/')"), ("import os; os.chdir('/')", "pass")], ids=["call", "import"]
)
def test_a_reward_that_changes_the_folder(
    jetrl: Cli, tmp_path: Path, before: str, inside: str
) -> None:
    relative_recipe(tmp_path)
    reward_file(tmp_path / "rw.py", before, inside)
    status, out, err = jetrl("train", "r.toml")
    assert status == 0, err
    assert Path.cwd() == tmp_path and "runs/tiny/report.html" in out
    assert len(numbers(tmp_path / "runs" / "tiny")) == 3
    assert checkpoint.newest(tmp_path / "runs" / "tiny" / "checkpoints").name == "step_000002"
    assert not Path("/runs").exists()
    config = (tmp_path / "runs" / "tiny" / "config.toml").read_text()
    assert 'output_dir = "runs"' in config and 'reward = "rw.py:reward"' in config, "written as the user wrote it"


def test_a_run_is_resumed_from_elsewhere_and_after_a_move(
    jetrl: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    relative_recipe(tmp_path)
    assert jetrl("train", "r.toml")[0] == 0
    shutil.copytree(tmp_path / "runs", tmp_path / "moved")
    (tmp_path / "work").mkdir()
    shutil.copy(tmp_path / "rw.py", tmp_path / "work" / "rw.py")
    shutil.rmtree(tmp_path / "runs")
    monkeypatch.chdir(tmp_path / "work")
    status, _, err = jetrl("train", "../moved/tiny/config.toml", "--resume", "train.steps=4")
    assert status == 0, err
    assert len(numbers(tmp_path / "moved" / "tiny")) == 5 and not (tmp_path / "work" / "runs").exists()
    spelled = f"task.reward={tmp_path}//work/rw.py:reward"
    status, _, err = jetrl("train", "../moved/tiny/config.toml", "--resume", "train.steps=5", spelled)
    assert status == 0, f"the spelling of a path counts: {err}"


HOSTILE = {
    "gradients off": ("import torch\ntorch.set_grad_enabled(False)", "assert not torch.is_grad_enabled()"),
    "default dtype": ("import torch", "torch.set_default_dtype(torch.float64)"),
    "all at once": (
        "import torch, random, numpy",
        "torch.set_grad_enabled(False); torch.set_default_dtype(torch.float16); torch.set_num_threads(5); "
        "torch.use_deterministic_algorithms(False); torch.manual_seed(1); random.seed(1); numpy.random.seed(1); "
        "torch.set_default_device('meta'); torch.set_float32_matmul_precision('medium')",
    ),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run(tmp_path_factory.mktemp("plain"), {"train.steps": 2})


@pytest.mark.parametrize("name", HOSTILE)
def test_settings_of_the_users_code_change_no_bit_of_the_run(name: str, plain: Path, tmp_path: Path) -> None:
    reward = reward_file(tmp_path / "hostile.py", *HOSTILE[name])
    run_dir = tiny_run(tmp_path, {"train.steps": 2, "task.reward": reward})
    assert numbers(run_dir) == numbers(plain) and list(read_samples(run_dir)) == list(read_samples(plain))
    assert weights_hash(run_dir, 2) == weights_hash(plain, 2)


ENVIRONMENT = """\
import asyncio, os, sys, time, torch
class Env:
    {kind} reset(self, problem):
        {act}
        return "1+1="
    def step(self, action): return "", 1.0, True
"""


def environment(folder: Path, kind: str, act: str) -> list[str]:
    (folder / "env.py").write_text(ENVIRONMENT.format(kind=kind, act=act))
    return [f"environment.name={folder}/env.py:Env", "eval.eval_interval=0", "train.steps=1"]


def env_recipe(folder: Path) -> Path:
    """A tiny recipe whose rewards are the environment's."""
    (folder / "e.toml").write_text(to_toml(tiny_config(folder, {"task.reward": None})))
    return folder / "e.toml"


@pytest.mark.parametrize("kind", ["def", "async def"])
@pytest.mark.parametrize(
    ("act", "said"),
    [
        ("os._exit(0)", r"os\._exit\(0\) was called .*env\.py, line 4"),
        ("sys.exit(0)", r"all 16 conversations failed.*SystemExit"),
        ("quit()", r"all 16 conversations failed.*SystemExit"),
        ("torch.set_default_dtype(torch.float64)", r"Environment Env changes .*set_default_dtype\(torch\.float64\)"),
    ],
    ids=["_exit", "exit", "quit", "dtype"],
)
def test_environments_that_end_or_change_the_process(
    jetrl: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, act: str, said: str
) -> None:
    monkeypatch.setattr(sys, "stdin", open(os.devnull))  # noqa: SIM115  (quit() closes it)
    assert_refused(jetrl("train", env_recipe(tmp_path), *environment(tmp_path, kind, act)), said)
    assert torch.get_default_dtype() == torch.float32
    assert checkpoint.newest(tmp_path / "runs" / "tiny" / "checkpoints").name == "step_000000"


def test_an_error_that_comes_of_changed_settings_is_told_as_that(
    jetrl: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An environment may change them while the engine is at work, which then fails in a way that says nothing."""

    def fails(engine: PagedEngine) -> None:
        torch.set_default_dtype(torch.float64)
        raise RuntimeError("expected scalar type Float but found Double")

    monkeypatch.setattr(PagedEngine, "step", fails)
    said = r"Environment Env changes .*set_default_dtype\(torch\.float64\)"
    assert_refused(jetrl("train", env_recipe(tmp_path), *environment(tmp_path, "def", "pass")), said)
    assert torch.get_default_dtype() == torch.float32


def test_an_exit_in_a_task_of_an_environments_own_holds_up_no_other(jetrl: Cli, tmp_path: Path) -> None:
    """asyncio leaves its loop for SystemExit; without care every conversation would wait for its time limit."""
    act = (
        "if not hasattr(Env, 'sent'):\n            async def leave(): sys.exit(3)\n"
        "            Env.sent = asyncio.ensure_future(leave())\n        await asyncio.sleep(0.01)"
    )
    started = time.monotonic()
    status, _, err = jetrl("train", env_recipe(tmp_path), *environment(tmp_path, "async def", act))
    assert status == 0 and time.monotonic() - started < 30, err


@pytest.mark.parametrize("inside", ["os._exit(0)", "os.kill(os.getpid(), 15)", "__import__('signal').raise_signal(2)"])
def test_a_reward_that_ends_the_process_never_does_so_quietly(
    jetrl: Cli, recipe: Path, tmp_path: Path, inside: str
) -> None:
    inside = f"calls.append(1); len(calls) == 3 and {inside}"
    reward = reward_file(tmp_path / "ends.py", "import os\ncalls = []", inside)
    status, out, err = jetrl("train", recipe, f"task.reward={reward}")
    if "_exit" in inside:
        assert_refused((status, out, err), r"os\._exit\(0\) was called .*ends\.py, line 4")
    else:
        assert status == 130 and "Continue with" in out, (status, out, err)
    assert checkpoint.newest(tmp_path / "runs" / "tiny" / "checkpoints") is not None


def test_exit_in_a_process_of_its_own_has_a_status_and_a_word(tmp_path: Path) -> None:
    relative_recipe(tmp_path)
    reward_file(tmp_path / "rw.py", "import os", "os._exit(0)")
    status, err, _ = process(tmp_path, "train", "r.toml")
    assert status == 2 and re.search(r"jetrl: os\._exit\(0\) was called \(.*rw\.py, line 3\)", err), err


def test_a_thread_that_is_left_does_not_keep_the_program_alive(tmp_path: Path) -> None:
    relative_recipe(tmp_path)
    before = "import threading, time\nfrom concurrent.futures import ThreadPoolExecutor\nstarted = []"
    inside = (
        "if not started: started.extend([threading.Thread(target=time.sleep, args=(90,), name='poller'), "
        "ThreadPoolExecutor(1)]); started[0].start(); started[1].submit(int).result()"
    )
    reward_file(tmp_path / "rw.py", before, inside)
    status, err, seconds = process(tmp_path, "train", "r.toml")
    assert status == 0 and seconds < 60, err
    assert "still running: thread poller. Your code left this behind" in err and "Stopping" not in err
    assert "ThreadPool" not in err, "the idle thread of an executor ends by itself"
