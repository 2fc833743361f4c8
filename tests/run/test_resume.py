"""A run stopped at any point and resumed ends with the same bits as one that never stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from stopped_runs import CASES
from tiny import numbers, tiny_config, tiny_run, weights_hash

from jetrl.errors import UserError
from jetrl.report.files import lock
from jetrl.report.recorder import read_metrics, read_samples
from jetrl.run import loop
from jetrl.run.checkpoint import checkpoint, store
from jetrl.run.setup import Session
from jetrl.run.stopping import StopRequest

HERE = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, int]]:
    root = tmp_path_factory.mktemp("stopped")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent)])}
    command = [sys.executable, str(HERE / "stopped_runs.py"), str(root)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return root, json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Hash of the last checkpoint and metrics of a run that never stopped, by the changes of its config."""

    def of(changes: dict[str, Any]) -> tuple[str, list[dict[str, Any]], list[Any]]:
        key = json.dumps(changes)
        if key not in cache:
            run_dir = tiny_run(tmp_path_factory.mktemp("straight"), changes)
            cache[key] = (weights_hash(run_dir, 4), numbers(run_dir), list(read_samples(run_dir)))
        return cache[key]

    cache: dict[str, Any] = {}
    return of


@pytest.mark.parametrize("name", CASES)
def test_resumed_equals_uninterrupted(name: str, stopped: tuple[Path, dict[str, int]], straight: Any) -> None:
    root, ends = stopped
    changes, how = CASES[name]
    in_order = how.startswith("SIG")
    assert ends[name] == (3 if in_order else -signal.SIGKILL), f"the run was not stopped as meant: {ends[name]}"
    run_dir = root / name / "runs" / "tiny"
    before = len(read_metrics(run_dir))
    assert 1 <= before < 5
    if in_order:  # the step under way is finished and saved
        assert checkpoint.newest(run_dir / "checkpoints").name == f"step_{before - 1:06d}"
    assert tiny_run(root / name, changes | {"checkpoint.resume": "auto"}) == run_dir
    digest, metrics, samples = straight(changes)
    assert weights_hash(run_dir, 4) == digest, "the final weights or optimizer state differ"
    assert numbers(run_dir) == metrics
    assert list(read_samples(run_dir)) == samples
    assert not list((run_dir / "checkpoints").glob(".*")), "left-overs of the killed writer"


def test_resuming_a_finished_run_changes_nothing(tmp_path: Path) -> None:
    run_dir = tiny_run(tmp_path)
    rows, digest = numbers(run_dir), weights_hash(run_dir, 4)
    tiny_run(tmp_path, {"checkpoint.resume": "auto"})
    assert numbers(run_dir) == rows and weights_hash(run_dir, 4) == digest


def test_a_finished_run_goes_on_with_more_steps(tmp_path: Path) -> None:
    tiny_run(tmp_path / "a", {"train.steps": 2})
    longer = tiny_run(tmp_path / "a", {"checkpoint.resume": "auto"})
    assert weights_hash(longer, 4) == weights_hash(tiny_run(tmp_path / "b"), 4)


def test_resume_from_an_earlier_step_by_path(tmp_path: Path) -> None:
    changes = {"checkpoint.save_interval": 1, "checkpoint.keep": 2, "rl.kl_coef": 0.1}
    run_dir = tiny_run(tmp_path, changes)
    rows, digest = numbers(run_dir), weights_hash(run_dir, 4)
    path = run_dir / "checkpoints" / "step_000003"
    tiny_run(tmp_path, changes | {"checkpoint.resume": str(path)})
    assert numbers(run_dir) == rows and weights_hash(run_dir, 4) == digest
    other = tmp_path / "elsewhere"
    tiny_run(tmp_path, changes | {"checkpoint.resume": str(path), "output_dir": str(other)}, name="again")
    assert weights_hash(tmp_path / "runs" / "again", 4) == digest


def test_a_run_from_another_folder_resumes_in_its_own_from_the_start(tmp_path: Path) -> None:
    """Stopped before its first step, it has no rows and no report, but a checkpoint."""
    changes = {"checkpoint.save_interval": 2, "rl.kl_coef": 0.1}
    straight = tiny_run(tmp_path, changes)
    path = straight / "checkpoints" / "step_000002"
    stop, run_dir = StopRequest(), tmp_path / "runs" / "moved"
    stop.anywhere = lambda: True  # type: ignore[method-assign]
    assert not loop.run(tiny_config(tmp_path, changes | {"checkpoint.resume": str(path)}), run_dir, ["test"], stop)
    assert not read_metrics(run_dir) and not (run_dir / "report.html").exists()
    tiny_run(tmp_path, changes | {"checkpoint.resume": "auto"}, name="moved")
    assert [row["step"] for row in read_metrics(run_dir)] == [3, 4]
    assert numbers(run_dir) == numbers(straight)[3:] and weights_hash(run_dir, 4) == weights_hash(straight, 4)


def test_a_path_with_a_link_in_it_is_still_of_the_run(tmp_path: Path) -> None:
    """Its rows count from the first, and its reference policy is not written again."""
    changes = {"checkpoint.save_interval": 1, "rl.kl_coef": 0.1}
    run_dir = tiny_run(tmp_path, changes | {"train.steps": 1})
    (tmp_path / "link").symlink_to(tmp_path / "runs")
    reference = (run_dir / "checkpoints" / "reference").stat().st_ino
    path = tmp_path / "link" / "tiny" / "checkpoints" / "step_000001"
    tiny_run(tmp_path, changes | {"train.steps": 2, "checkpoint.resume": str(path)})
    assert checkpoint.load(run_dir / "checkpoints" / "step_000002").first_row == 0
    assert (run_dir / "checkpoints" / "reference").stat().st_ino == reference


def test_a_run_that_is_refused_leaves_the_folder_of_another_alone(tmp_path: Path) -> None:
    """Also where the other one, resumed from elsewhere, has not ended its first step: it has no row yet."""
    changes = {"checkpoint.save_interval": 1, "rl.kl_coef": 0.1}
    path = tiny_run(tmp_path, changes | {"train.steps": 1}) / "checkpoints" / "step_000001"
    busy = tmp_path / "runs" / "busy"
    reference = busy / "checkpoints" / "reference"
    reference.mkdir(parents=True)
    (reference / "files.json").write_text("that of the other run")
    held = lock(busy)
    resumed = changes | {"train.steps": 2, "checkpoint.resume": str(path)}
    with pytest.raises(UserError, match="Another process is writing"):
        tiny_run(tmp_path, resumed, name="busy")
    assert (reference / "files.json").read_text() == "that of the other run"
    os.close(held)
    kept = [store.whole(run / "checkpoints" / "reference" / "tensors") for run in (
        path.parents[1], tiny_run(tmp_path, resumed, name="busy")
    )]
    assert kept[0].keys() == kept[1].keys() and all(torch.equal(kept[0][name], kept[1][name]) for name in kept[0])


def test_other_settings_are_refused(tmp_path: Path) -> None:
    tiny_run(tmp_path, {"train.steps": 2})
    for change in ({"train.lr": 1e-4}, {"precision": "bf16"}, {"seed": 5}, {"rl.norm_adv_by_std": False}):
        with pytest.raises(UserError, match="written by a run with other settings"):
            tiny_run(tmp_path, change | {"checkpoint.resume": "auto"})
    with pytest.raises(UserError, match="already holds a run"):
        tiny_run(tmp_path)
    with pytest.raises(UserError, match="there is no such folder"):
        tiny_run(tmp_path, {"checkpoint.resume": str(tmp_path / "nowhere")})


def test_a_damaged_checkpoint_is_refused_and_an_older_one_serves(tmp_path: Path) -> None:
    run_dir = tiny_run(tmp_path, {"train.steps": 4})
    digest = weights_hash(run_dir, 4)
    (state,) = (run_dir / "checkpoints" / "step_000004" / "state").iterdir()
    data = bytearray(state.read_bytes())
    data[-3] ^= 1
    state.write_bytes(data)
    with pytest.raises(UserError, match=f"{state.name} does not have the recorded hash"):
        tiny_run(tmp_path, {"checkpoint.resume": "auto"})
    tiny_run(tmp_path, {"checkpoint.resume": str(run_dir / "checkpoints" / "step_000002")})
    assert weights_hash(run_dir, 4) == digest


def test_config_of_a_run_reads_back(tmp_path: Path) -> None:
    from jetrl.config import load_config

    run_dir = tiny_run(tmp_path, {"train.steps": 1})
    assert load_config(run_dir / "config.toml") == tiny_config(tmp_path, {"train.steps": 1})


def test_an_evaluation_that_fails_loses_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"eval.eval_interval": 2, "checkpoint.save_interval": 4}
    straight = tiny_run(tmp_path / "a", changes)
    evaluate = loop.evaluate

    def broken(session: Session, clock: loop.Clock) -> dict[str, float]:
        if session.progress.step == 2:
            raise UserError("the server is down")
        return evaluate(session, clock)

    monkeypatch.setattr(loop, "evaluate", broken)
    with pytest.raises(UserError, match="the server is down"):
        tiny_run(tmp_path / "b", changes)
    monkeypatch.undo()
    run_dir = tmp_path / "b" / "runs" / "tiny"
    assert checkpoint.newest(run_dir / "checkpoints").name == "step_000002"
    tiny_run(tmp_path / "b", changes | {"checkpoint.resume": "auto"})
    assert numbers(run_dir) == numbers(straight), "the evaluation is made when the run is resumed"
    assert weights_hash(run_dir, 4) == weights_hash(straight, 4)
    assert list(read_samples(run_dir)) == list(read_samples(straight))
