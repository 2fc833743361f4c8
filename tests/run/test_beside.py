"""Checkpoints beside the run: the same files, what the run waits for, and every way in which the writer is cut off."""

from __future__ import annotations

import errno
import io
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import files_of, numbers, tiny_config, tiny_run, weights_hash

from jetrl.errors import UserError
from jetrl.parallel import host
from jetrl.parallel.world import ALONE
from jetrl.report.console import Display, Output
from jetrl.report.recorder import read_metrics
from jetrl.run import loop
from jetrl.run.checkpoint import checkpoint, store
from jetrl.run.checkpoint.beside import Beside, HostCopy, _short, beside
from jetrl.run.checkpoint.state import parts_of_run
from jetrl.run.fit.memory import checkpoint_bytes
from jetrl.run.setup import build
from jetrl.run.stopping import StopRequest

GIB = 2**30
HERE = Path(__file__).parents[1]
OFF, EACH = {"checkpoint.background": "off"}, {"checkpoint.save_interval": 1}


def slow(call: Callable[..., Any], seconds: float = 0.3) -> Callable[..., Any]:
    def slowed(*args: Any, **options: Any) -> Any:
        time.sleep(seconds)
        return call(*args, **options)

    return slowed


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose checkpoints are waited for."""
    return tiny_run(tmp_path_factory.mktemp("straight"), OFF)


def assert_goes_on(folder: Path, straight: Path) -> None:
    """What is left in the run's folder is whole, and goes on to the bits of the run that never stopped."""
    for path in checkpoint.complete(folder / "runs" / "tiny" / "checkpoints"):
        checkpoint.load(path)
        checkpoint.verify_model(path)
    run_dir = tiny_run(folder, {"checkpoint.resume": "auto"})
    assert weights_hash(run_dir, 4) == weights_hash(straight, 4) and numbers(run_dir) == numbers(straight)
    assert not list((run_dir / "checkpoints").glob(".*"))


@pytest.mark.parametrize("changes", [
    pytest.param({}, id="plain"),
    pytest.param({"train.optimizer_dtype": "8bit"}, id="8-bit moments"),
    pytest.param({"train.optimizer_dtype": "bfloat16", "train.offload_optimizer": True}, id="offloaded moments"),
    pytest.param({"rl.adv_estimator": "gae", "rl.kl_coef": 0.1}, id="critic and reference"),
])
def test_the_files_are_those_of_a_run_that_waits(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where copying takes longer than the rollout: the update waits for it."""
    waits = tiny_run(tmp_path, changes | OFF | EACH, "waits")
    asked, release, copied = threading.Event(), checkpoint.Writing.release, HostCopy._copied
    copies: list[int] = []

    def asking(writing: checkpoint.Writing) -> None:
        asked.set()
        release(writing)

    def late(*args: Any) -> Any:
        copies.append(len(copies))
        if copies[-1] < 4:  # no update follows the last of them
            assert asked.wait(60)  # until an update waits
            time.sleep(0.2)
            asked.clear()
        return copied(*args)

    monkeypatch.setattr(checkpoint.Writing, "release", asking)
    monkeypatch.setattr(HostCopy, "_copied", late)
    runs = tiny_run(tmp_path, changes | EACH, "runs")
    want = files_of(waits / "checkpoints")
    assert files_of(runs / "checkpoints") == want and len(want) > 3 * 4
    assert numbers(runs) == numbers(waits)
    told = "perf/checkpoint_beside_s"
    rows = read_metrics(runs)
    assert sum(told in row for row in rows) >= 3 and not any(told in row for row in read_metrics(waits))
    assert all(row["time/checkpoint"] > 0.1 for row in rows[1:-1]), "the wait for the copy is told"


def test_the_run_goes_on_while_the_disk_is_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps after a checkpoint are made before it is on the disk; the end of the run waits, and says so."""
    seen: list[tuple[int, bool]] = []
    record = loop.record_step

    def recorded(session: Any, recorder: Any, step: int, *rest: Any) -> None:
        seen.append((step, (tmp_path / "runs" / "tiny" / "checkpoints" / "step_000002").is_dir()))
        record(session, recorder, step, *rest)

    monkeypatch.setattr(loop, "record_step", recorded)
    monkeypatch.setattr(store, "write", slow(store.write, 2.0))
    run_dir = tiny_run(tmp_path, {"train.steps": 3, "checkpoint.save_interval": 2, "eval.eval_interval": 0})
    assert seen[2] == (3, False), "step 3 is made while step 2's checkpoint is written"
    assert [p.name for p in checkpoint.complete(run_dir / "checkpoints")] == [f"step_00000{n}" for n in (0, 2, 3)]
    last = read_metrics(run_dir)[-1]
    assert last["time/checkpoint"] > 2.0 and last["perf/checkpoint_beside_s"] > 2.0


def in_write_of(step: int, act: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """`act(folder)` in the thread that writes the state of this step, before it does."""
    write = store.write

    def written(folder: Path, *rest: Any) -> Any:
        if folder.parent.name == f".writing_step_{step:06d}":
            act(folder)
        return write(folder, *rest)

    monkeypatch.setattr(store, "write", written)


@pytest.mark.parametrize("step", [2, 4])
def test_a_disk_that_fills_meanwhile_stops_the_run_with_the_older_checkpoint(
    step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, straight: Path
) -> None:
    def full(_: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        in_write_of(step, full, patch)
        told = f"No disk space for .*step_{step:06d}.*step_{step - 2:06d} is intact.*--resume"
        with pytest.raises(UserError, match=told):
            tiny_run(tmp_path)
    assert not list((tmp_path / "runs" / "tiny" / "checkpoints").glob(".*"))
    assert_goes_on(tmp_path, straight)


@pytest.mark.parametrize("what", ["", "state", "model"])
def test_a_folder_that_vanishes_is_named(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, straight: Path
) -> None:
    with monkeypatch.context() as patch:
        if what:  # when the state is written
            hash_all = store.sha256_of
            patch.setattr(store, "sha256_of", lambda folder, names: (
                "step_000004" in folder.name and shutil.rmtree(folder / what)) or hash_all(folder, names))
        else:
            in_write_of(4, lambda folder: shutil.rmtree(folder.parent), patch)
        told = r"writing_step_000004 was removed, at least in part, while .*step_000002 is intact.*--resume"
        with pytest.raises(UserError, match=told):
            tiny_run(tmp_path)
    assert_goes_on(tmp_path, straight)


def signalled(folder: Path, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that gets SIGTERM so many times while it waits for its last checkpoint."""
    waits, wait = threading.Event(), loop.wait_for_checkpoint

    def waiting(*args: Any) -> None:
        waits.set()
        wait(*args)

    def act(_: Path) -> None:
        assert waits.wait(60)
        while loop.launch.PROGRESS.phase != "checkpoint":
            time.sleep(0.01)
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.3)

    with monkeypatch.context() as patch, StopRequest() as stop:
        in_write_of(4, act, patch)
        patch.setattr(loop, "wait_for_checkpoint", waiting)
        loop.run(tiny_config(folder), folder / "runs" / "tiny", ["test"], stop)


def test_a_signal_waits_for_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], straight: Path
) -> None:
    signalled(tmp_path, 1, monkeypatch)
    assert "Stopping: the last checkpoint is being written." in capfd.readouterr().err
    assert weights_hash(tmp_path / "runs" / "tiny", 4) == weights_hash(straight, 4)


def test_a_second_signal_does_not_wait_for_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], straight: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        signalled(tmp_path, 2, monkeypatch)
    assert "the checkpoint that was being written is not; the one before it is intact" in capfd.readouterr().err
    newest = checkpoint.newest(tmp_path / "runs" / "tiny" / "checkpoints")
    assert newest is not None and newest.name == "step_000002"
    assert_goes_on(tmp_path, straight)


def test_the_wait_at_the_end_is_shown_in_mib() -> None:
    class Three:
        size = 3 << 20

        def finish(self, show: Callable[[int], None]) -> None:
            for mib in (0, 1, 0, 3):  # a file that is renamed is missed for a moment
                show(mib << 20)

    out = io.StringIO()
    display = Display(4, "run", console=Output(file=out), interval=0.0)
    clock = loop.Clock(display)
    loop.wait_for_checkpoint(SimpleNamespace(pending=SimpleNamespace(beside=Three())), clock)  # type: ignore[arg-type]
    counts = [line.split()[1] for line in out.getvalue().splitlines()]
    assert counts == ["0/3", "1/3", "1/3", "3/3"] and list(clock.seconds) == ["checkpoint"]


def test_an_error_of_the_run_waits_for_the_checkpoint_and_stays_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether the checkpoint succeeds, or fails too."""
    def failing(session: Any, *rest: Any) -> Any:
        if session.progress.step == 2:
            raise ZeroDivisionError("ours")
        return gather(session, *rest)

    def full(_: Path) -> None:
        time.sleep(1.0)
        raise OSError(errno.ENOSPC, "No space left on device")

    gather = loop.gather
    monkeypatch.setattr(loop, "gather", failing)
    in_write_of(2, lambda _: time.sleep(1.0), monkeypatch)
    with pytest.raises(ZeroDivisionError):
        tiny_run(tmp_path / "written")
    assert checkpoint.newest(tmp_path / "written" / "runs" / "tiny" / "checkpoints").name == "step_000002"
    in_write_of(2, full, monkeypatch)
    with pytest.raises(ZeroDivisionError):
        tiny_run(tmp_path / "full")
    assert "No disk space for" in capsys.readouterr().out


def test_a_copy_is_as_large_as_predicted(tmp_path: Path) -> None:
    """Of BF16, FP32, 8-bit moments, and with a critic; the counts of steps and tables of codes are small."""
    for changes in ({}, {"train.optimizer_dtype": "8bit"}, {"train.optimizer_dtype": "bfloat16"},
                    {"rl.adv_estimator": "gae"}, {"train.master_dtype": "bfloat16"}):
        config = tiny_config(tmp_path, changes)
        session = build(config)
        for optimizer in (session.learner.optimizer, session.learner.critic_optimizer):
            for group in optimizer.param_groups if optimizer is not None else ():
                for p in group["params"]:
                    p.grad = torch.zeros(p.shape)
            if optimizer is not None:
                optimizer.step()
        held = sum(part.value.nbytes for part in parts_of_run(session).values())
        assert checkpoint_bytes(config, session.model.spec, 1) == pytest.approx(held, rel=0.03), changes
        session.close()


def test_where_memory_is_short_the_run_waits_and_says_so_or_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need = checkpoint_bytes(tiny_config(tmp_path), build(tiny_config(tmp_path)).model.spec, 1)
    monkeypatch.setattr(host, "memory", lambda: (need, 64 * GIB))
    with pytest.warns(UserWarning, match='free.*: the run waits .*. Set checkpoint.background = "off"'):
        run_dir = tiny_run(tmp_path, {}, "auto")
    assert not any("perf/checkpoint_beside_s" in row for row in read_metrics(run_dir))
    with pytest.raises(UserError, match='checkpoint.background = "on": a copy of .* GiB of host memory, and'):
        tiny_run(tmp_path, {"checkpoint.background": "on"}, "on")
    monkeypatch.setattr(host, "memory", lambda: (2 * need, 64 * GIB))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        session = build(tiny_config(tmp_path))
        assert session.pending.beside.copies
        assert not beside(tiny_config(tmp_path, OFF), session.model.spec, ALONE).copies


def test_the_ranks_of_a_host_share_its_memory() -> None:
    rank = ("a", 10 * GIB, 2 * GIB, 40 * GIB)
    assert _short([rank, rank]) is None
    assert _short([rank, ("b", 10 * GIB, 2 * GIB, 21 * GIB)]) is None
    told = _short([("b", 0, 0, GIB), rank, rank, rank])
    assert told is not None and "takes 30.0 GiB" in told and "a has 40.0 GiB free, 6.0 of it for offloaded" in told


def test_without_a_checkpoint_there_is_nothing_to_wait_for() -> None:
    none = Beside()
    none.release()
    none.look()
    none.finish()
    none.abandon()
    assert not none.writes and none.take_metrics() == {}


def test_a_copy_takes_the_same_memory_again(tmp_path: Path) -> None:
    memory, value = HostCopy(), torch.arange(6.0)
    parts = {"x": store.Part(value, (6,), 0)}
    first = memory.after(parts)(parts)["x"].value
    value.add_(1)
    again = memory.after(parts)(parts)["x"].value
    assert again.data_ptr() == first.data_ptr() != value.data_ptr() and torch.equal(again, value)


PROGRAM = """
import sys, time
from pathlib import Path
from tiny import tiny_data
from jetrl import Trainer
from jetrl.run.checkpoint import store

write = store.write
def slow(folder, *rest):
    time.sleep(2.0)
    return write(folder, *rest)
store.write = slow
trainer = Trainer(tiny_data(Path(sys.argv[1])) | {"checkpoint": {"save_interval": 1}}, verbose=False)
trainer.step()
"""


def test_a_program_that_ends_without_close_waits_for_its_checkpoint(tmp_path: Path) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent)])}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    newest = checkpoint.newest(tmp_path / "runs" / "tiny" / "checkpoints")
    assert newest is not None and newest.name == "step_000001" and checkpoint.load(newest).step == 1
