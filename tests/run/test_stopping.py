"""Signals: what is finished, what is given up, and that the resumed run ends with the bits of one left alone."""

from __future__ import annotations

import io
import os
import pty
import select
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tiny import numbers, tiny_config, tiny_run, weights_hash

from jetrl.config import to_toml
from jetrl.engine.engine import PagedEngine
from jetrl.report.console import Display
from jetrl.report.recorder import read_metrics, read_samples
from jetrl.run import gather, loop
from jetrl.run.checkpoint import checkpoint
from jetrl.run.loop import Clock
from jetrl.run.stopping import GivenUp, StopRequest

SIGNAL = {"SIGINT": signal.SIGINT, "SIGTERM": signal.SIGTERM, "SIGHUP": signal.SIGHUP}
CHANGES = {"checkpoint.save_interval": 3, "eval.eval_interval": 2}


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that never stopped."""
    return tiny_run(tmp_path_factory.mktemp("straight"), CHANGES)


def assert_resumes_as(straight: Path, folder: Path) -> None:
    run_dir = tiny_run(folder, CHANGES | {"checkpoint.resume": "auto"})
    assert weights_hash(run_dir, 4) == weights_hash(straight, 4)
    assert numbers(run_dir) == numbers(straight)
    assert list(read_samples(run_dir)) == list(read_samples(straight))


def run_until(folder: Path, changes: dict[str, Any] | None = None) -> tuple[bool, Path]:
    """Run with the handlers on; whether it came to its end, and its folder."""
    config, run_dir = tiny_config(folder, CHANGES | (changes or {})), folder / "runs" / "tiny"
    with StopRequest() as stop:
        return loop.run(config, run_dir, ["test"], stop), run_dir


def once(monkeypatch: pytest.MonkeyPatch, where: Any, name: str, number: int, act: Callable[[], None]) -> None:
    """`act` in the middle of call `number` of a function."""
    right, calls = getattr(where, name), []

    def wrapped(*args: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == number:
            act()
        return right(*args, **options)

    monkeypatch.setattr(where, name, wrapped)


def send(kind: str) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), SIGNAL[kind])


def send_again(kind: str) -> None:
    """The signal, in code that swallows what its handler raises."""
    with suppress(GivenUp):
        send(kind)()


@pytest.mark.parametrize("kind", SIGNAL)
def test_an_evaluation_is_given_up_and_made_up(
    kind: str, straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    evaluate = loop.evaluate

    def interrupted(session: Any, clock: Any) -> Any:
        if session.progress.step == 2:
            once(monkeypatch, PagedEngine, "step", 2, send(kind))
        return evaluate(session, clock)

    monkeypatch.setattr(loop, "evaluate", interrupted)
    ended, run_dir = run_until(tmp_path)
    monkeypatch.undo()
    assert not ended and checkpoint.newest(run_dir / "checkpoints").name == "step_000002"
    assert [any(k.startswith("eval/") for k in row) for row in read_metrics(run_dir)] == [True, False, False]
    assert "the evaluation is given up" in capfd.readouterr().err
    assert_resumes_as(straight, tmp_path)


@pytest.mark.parametrize("step", [0, 4])
def test_the_first_and_the_last_evaluation(
    step: int, straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate = loop.evaluate

    def interrupted(session: Any, clock: Any) -> Any:
        if session.progress.step == step:
            send("SIGTERM")()
        return evaluate(session, clock)

    monkeypatch.setattr(loop, "evaluate", interrupted)
    ended, run_dir = run_until(tmp_path)
    monkeypatch.undo()
    assert not ended, "a run that owes an evaluation is not finished"
    assert checkpoint.newest(run_dir / "checkpoints").name == f"step_{step:06d}"
    assert_resumes_as(straight, tmp_path)


@pytest.mark.parametrize("kinds", [("SIGTERM",), ("SIGHUP", "SIGHUP"), ("SIGINT", "SIGHUP")], ids="".join)
def test_a_rollout_is_given_up_and_the_steps_before_are_saved(
    kinds: tuple[str, ...], straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A terminal that is closed may send its signal twice."""
    roll_out, rolled = gather.roll_out, []

    def interrupted(engine: Any, prompts: Any, asked: Any, *rest: Any) -> Any:
        rolled.append(engine)
        if len(rolled) == 4:  # evaluation, two steps, and the third
            once(monkeypatch, PagedEngine, "step", 2, lambda: [send_again(kind) for kind in kinds])
        return roll_out(engine, prompts, asked, *rest)

    monkeypatch.setattr(gather, "roll_out", interrupted)
    ended, run_dir = run_until(tmp_path, {"eval.eval_interval": 4})
    monkeypatch.undo()
    engine = rolled[-1]
    assert not ended and not engine.has_work and engine.stats is not None, "the engine still holds requests"
    assert [row["step"] for row in read_metrics(run_dir)] == [0, 1, 2]
    assert checkpoint.newest(run_dir / "checkpoints").name == "step_000002"
    assert "the rollout is given up" in capfd.readouterr().err
    tiny_run(tmp_path, CHANGES | {"checkpoint.resume": "auto"})
    assert weights_hash(run_dir, 4) == weights_hash(straight, 4)


def test_ctrl_c_waits_for_the_rollout_and_sigterm_behind_it_does_not(
    straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def both() -> None:
        send("SIGINT")()
        assert (run / "metrics.jsonl").is_file()
        if hurry:
            send("SIGTERM")()

    for hurry, steps in ((False, [0, 1, 2, 3]), (True, [0, 1, 2])):
        folder = tmp_path / str(hurry)
        run = folder / "runs" / "tiny"
        once(monkeypatch, loop, "gather", 3, both)
        ended, run_dir = run_until(folder, {"eval.eval_interval": 4})
        monkeypatch.undo()
        assert not ended and [row["step"] for row in read_metrics(run_dir)] == steps
        assert checkpoint.newest(run_dir / "checkpoints").name == f"step_{steps[-1]:06d}"


def test_rewards_are_given_up_too_even_where_they_swallow_everything(tmp_path: Path) -> None:
    reward = """\
import os, signal, time
calls = []
def reward(completions, answer, **_):
    calls.append(1)
    if len(calls) == 4:  # the gold answers, an evaluation, a step, and this one
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(30)
        except BaseException:
            pass
    return [len(set(c) & set(a)) / len(set(a)) for c, a in zip(completions, answer)]
"""
    (tmp_path / "slow.py").write_text(reward)
    started = time.monotonic()
    ended, run_dir = run_until(tmp_path, {"task.reward": f"{tmp_path}/slow.py:reward"})
    assert not ended and time.monotonic() - started < 25
    assert [row["step"] for row in read_metrics(run_dir)] == [0, 1]
    assert checkpoint.newest(run_dir / "checkpoints").name == "step_000001"


def test_an_environment_that_hangs_does_not_keep_a_run_from_stopping(tmp_path: Path) -> None:
    (tmp_path / "env.py").write_text(
        "import os, signal, threading, time\n"
        "class Slow:\n"
        "    def reset(self, problem): return '1+1='\n"
        "    def step(self, action):\n"
        "        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start() if not Slow.sent else None\n"
        "        Slow.sent = True\n"
        "        time.sleep(40)\n"
        "    sent = False\n"
    )
    changes = {"environment.name": f"{tmp_path}/env.py:Slow", "eval.eval_interval": 0, "task.reward": None}
    started = time.monotonic()
    ended, run_dir = run_until(tmp_path, changes)
    assert not ended and time.monotonic() - started < 20
    assert [row["step"] for row in read_metrics(run_dir)] == [0]


def test_environments_of_a_rollout_that_is_given_up_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    (tmp_path / "env.py").write_text(
        "class Noted:\n"
        f"    def note(self, mark): open({str(log)!r}, 'a').write(mark)\n"
        "    def reset(self, problem): self.note('o'); return '1+1='\n"
        "    def step(self, action): return '2', 0.0, False\n"
        "    def close(self): self.note('c')\n"
    )
    once(monkeypatch, PagedEngine, "step", 3, send("SIGTERM"))
    changes = {"environment.name": f"{tmp_path}/env.py:Noted", "eval.eval_interval": 0, "task.reward": None}
    ended, _ = run_until(tmp_path, changes)
    assert not ended and log.read_text().count("o") == 16 == log.read_text().count("c")


@pytest.mark.parametrize("kind", SIGNAL)
def test_a_second_signal_stops_at_once(kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    with StopRequest() as stop:
        stop.phase = "step"
        send(kind)()
        assert stop.asked
        if kind == "SIGHUP":
            send(kind)()  # the same terminal once more
        with pytest.raises(KeyboardInterrupt):
            send("SIGTERM" if kind == "SIGHUP" else kind)()
    err = capfd.readouterr().err
    again = {"SIGHUP": "Ctrl-C or SIGTERM stops it", "SIGTERM": "A second SIGTERM stops it"}.get(
        kind, "Press Ctrl-C again to stop")
    assert f"Stopping after this step, with a checkpoint. {again} immediately." in err
    assert "Interrupted: the current step is not saved." in err


@pytest.mark.parametrize(("phase", "said"), [("start", "no step had begun"), ("warm start", "is not saved"),
                                              ("report", "jetrl report")])
@pytest.mark.parametrize("kind", SIGNAL)
def test_before_and_behind_the_steps_a_signal_stops_at_once(
    kind: str, phase: Any, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(KeyboardInterrupt), StopRequest() as stop:
        stop.phase = phase
        send(kind)()
    assert said in capfd.readouterr().err


def test_a_stop_that_an_import_swallows_comes_again_with_the_first_step(capfd: pytest.CaptureFixture[str]) -> None:
    with StopRequest() as stop:
        with suppress(BaseException):
            send("SIGINT")()
        with pytest.raises(KeyboardInterrupt), stop.during("rollout"):
            raise AssertionError("the run goes on")
    assert capfd.readouterr().err.count("no step had begun") == 1


def test_without_checkpoints_the_message_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    with StopRequest() as stop:
        stop.saves, stop.phase = False, "step"
        send("SIGINT")()
    err = capfd.readouterr().err
    assert "without a checkpoint" in err and "checkpoint.save_interval = 0" in err and "with a" not in err


def test_a_display_on_a_terminal_shows_the_answer_and_nothing_is_printed_into_it(
    capfd: pytest.CaptureFixture[str],
) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80, height=30)
    with Display(4, "run", console=console) as display, StopRequest() as stop:
        Clock(display, stop)
        stop.phase = "step"
        send("SIGINT")()
        console.print(display.render())
    assert "Stopping after this step" in console.file.getvalue()  # type: ignore[attr-defined]
    assert "Stopping" not in capfd.readouterr().err


def test_handlers_come_off_with_the_run() -> None:
    before = [signal.getsignal(number) for number in SIGNAL.values()]
    with StopRequest():
        assert all(signal.getsignal(number) not in before for number in SIGNAL.values())
    assert [signal.getsignal(number) for number in SIGNAL.values()] == before


def test_progress_ends_a_rollout_that_the_users_code_would_not_leave() -> None:
    stop = StopRequest()
    on_step = loop.Clock(Display(1, "test"), stop).progress()
    with pytest.raises(GivenUp), stop.during("rollout"):
        stop.asked, stop._waits = True, False
        on_step(loop.StepReport(1, 0, 0, 0, 0))


def test_a_hangup_that_is_ignored_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.asked and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_terminal_that_is_closed_costs_no_finished_step(ranks: int, tmp_path: Path) -> None:
    """The whole command on a terminal of its own, which goes away after the first step: its signal arrives, and nothing
    that is still printed breaks the run before it is saved."""
    (tmp_path / "tiny.toml").write_text(to_toml(tiny_config(tmp_path, {"train.steps": 4000})))
    command = [sys.executable, "-m", "jetrl", "train", str(tmp_path / "tiny.toml")]
    command += ["--nproc", str(ranks)] if ranks > 1 else []
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ |= {"PYTHONPATH": str(Path(loop.__file__).parents[2]), "TERM": "xterm", "OMP_NUM_THREADS": "1"}
        os.execv(command[0], command)
    run_dir, end = tmp_path / "runs" / "tiny", time.monotonic() + 100
    while not (run_dir / "metrics.jsonl").is_file() or len(read_metrics(run_dir)) < 2:
        assert time.monotonic() < end, "no step"
        if select.select([terminal], [], [], 0.1)[0]:
            os.read(terminal, 4096)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    newest = checkpoint.newest(run_dir / "checkpoints")
    assert newest is not None and newest.name == f"step_{read_metrics(run_dir)[-1]['step']:06d}"
