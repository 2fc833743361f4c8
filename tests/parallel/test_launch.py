"""Ranks start, end and fail as one run: real processes, by `spawn` and by torchrun."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from jetrl.errors import UserError
from jetrl.parallel import launch
from jetrl.parallel.agreement import agree, same_everywhere, together
from jetrl.parallel.launch import is_rank, join
from jetrl.parallel.progress import LostContact, came_by_lost_contact
from jetrl.parallel.spawn import SignalForwarder, spawn
from jetrl.parallel.watch import Failure, who
from jetrl.parallel.world import ALONE

CASES = Path(__file__).with_name("rank_cases.py")
Spawned = Callable[..., tuple[int, str, str, float]]
SPAWN = f"import sys; from jetrl.parallel.spawn import spawn; sys.exit(spawn(2, sys.argv[1:], program=['{CASES}']))"
ROOT = Path(__file__).parents[2]


def environment() -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "RANK", "WORLD_SIZE")}
    return clean | {"PYTHONPATH": str(ROOT)}


@pytest.fixture
def spawned(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Spawned:
    """Status, output, error output and seconds of two ranks of a case. The launcher is this process."""

    def run(*case: str) -> tuple[int, str, str, float]:
        start, before = time.monotonic(), dict(os.environ)
        for key in before.keys() - environment().keys():
            monkeypatch.delenv(key)
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
        status = spawn(2, list(case), program=[str(CASES)])
        out, err = capfd.readouterr()
        return status, out, err, time.monotonic() - start

    return run


def test_two_ranks_run_and_one_speaks(spawned: Spawned) -> None:
    status, out, err, _ = spawned("fine")
    threads = str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert (status, out, err) == (0, f"all {[(0, 0, threads, 3), (1, 1, threads, 3)]}\n", "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "status", "message"),
    [
        ("mistake", 2, r"rank 1: reward.py: no such function\."),
        ("mistake_of_all", 2, r"reward.py: no such function\."),
        ("mistake_together", 2, r"rank 1: reward.py: no such function\."),
        ("computing", 2, r"rank 1: it gives up\."),
        ("bug", 1, r"rank 1: KeyError: 'our mistake'\nTraceback .*\n(.*\n)+KeyError: 'our mistake'"),
        ("killed", 1, r"rank 1 \(process \d+\) was ended by SIGKILL\. Most likely the machine ran out of memory\."),
        ("late", 1, r"rank 1 \(process \d+ on .*, last seen in rollout\) has not come to gather \(call 2\), in which "
                    r"rank 0 has waited for 2 s\. If that phase may take longer, raise train\.collective_timeout\."),
        ("full", 3, r"rank 1: out of GPU memory in the phase update, .* CUDA out of memory\. Tried .*"),
        ("stopped", 1, r"rank 1 \(process \d+ on .*, last seen in update\): no sign of life\. The process was .*"),
        ("absent", 2, r"rank 0: 1 of 2 ranks did not join within 2 s: 1\. Look at .*"),
        ("differ", 2, r"The ranks of this run differ: config is a on rank 0, b on rank 1\. Start .*"),
        ("quits", 1, r"rank 1 \(process \d+\) ended with status 7 and no message\.\nIts last lines:\ncannot go on"),
    ],
)
def test_a_failure_is_one_message(case: str, status: int, message: str, spawned: Spawned) -> None:
    got, out, err, seconds = spawned(case)
    assert re.fullmatch(f"jetrl: {message}\n", err), err
    assert (got, out) == (status, "") and seconds < 60


@pytest.mark.slow
def test_one_rank_is_a_run_in_one_process() -> None:
    code = SPAWN.replace("spawn(2", "spawn(1")
    done = subprocess.run([sys.executable, "-c", code, "alone"], capture_output=True, text=True, env=environment())
    assert (done.returncode, done.stdout, done.stderr) == (2, "1\n", "jetrl: no such file.\n")


def test_a_mistake_with_debug_has_its_traceback(spawned: Spawned) -> None:
    status, _, err, _ = spawned("mistake", "--debug")
    assert status == 2 and err.startswith("jetrl: rank 1: reward.py: no such function.\nTraceback (most recent call")


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_reaches_every_rank_once(times: int, number: signal.Signals) -> None:
    """Once: the step is finished, and the ranks end by themselves. Twice: at once."""
    arguments = [sys.executable, "-c", SPAWN, "stops", *(["--slow"] if times == 2 else [])]
    with subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.stdout.readline() == "stopped after the step\n"
        start = time.monotonic()
        if times == 2:
            process.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "jetrl: interrupted.\n" if times == 2 else "")
    assert time.monotonic() - start < 30, "the slow end of a run takes 60"


EARLY = """
import os, sys, time
from pathlib import Path
from jetrl.parallel import launch
Path(sys.argv[1], os.environ["RANK"]).write_text(str(os.getpid()))
if os.environ["RANK"] == "1":
    time.sleep(3)
launch.as_rank(launch.join, lambda error: None)
"""


def ended(pid: int) -> bool:
    """Whether a process has ended, be it that nobody has asked for its status."""
    path = Path(f"/proc/{pid}/stat")
    return not path.exists() or path.read_text().rpartition(")")[2].split()[0] == "Z"


def test_ranks_that_have_not_met_end_with_their_launcher(tmp_path: Path) -> None:
    """Rank 0 while it waits, rank 1 as it comes: it would look for the launcher's store for minutes."""
    (tmp_path / "early.py").write_text(EARLY)
    code = SPAWN.replace(str(CASES), str(tmp_path / "early.py"))
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], env=environment()) as process:
        files = [tmp_path / str(rank) for rank in range(2)]
        while not all(file.exists() and file.read_text() for file in files):
            assert process.poll() is None
            time.sleep(0.05)
        process.kill()
    pids, limit = [int(file.read_text()) for file in files], time.monotonic() + 20
    try:
        while not all(map(ended, pids)) and time.monotonic() < limit:
            time.sleep(0.1)
        assert [pid for pid in pids if not ended(pid)] == []
    finally:
        for pid in pids:
            if not ended(pid):
                os.kill(pid, signal.SIGKILL)


def test_one_rank_outlives_its_launcher(tmp_path: Path) -> None:
    """It has nobody to wait for, and no watch."""
    (tmp_path / "one.py").write_text(
        "import sys, time\nfrom pathlib import Path\nfrom jetrl.parallel import launch\n"
        "def work():\n    launch.join()\n    Path(sys.argv[1], 'begun').touch()\n    time.sleep(2)\n"
        "    Path(sys.argv[1], 'done').touch()\n"
        "launch.as_rank(work, lambda error: None)\n"
    )
    code = SPAWN.replace(str(CASES), str(tmp_path / "one.py")).replace("spawn(2", "spawn(1")
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], env=environment()) as process:
        while not (tmp_path / "begun").exists():
            assert process.poll() is None
            time.sleep(0.05)
        process.kill()
    limit = time.monotonic() + 20
    while not (tmp_path / "done").exists():
        assert time.monotonic() < limit
        time.sleep(0.1)


def torchrun(node: int, port: int, case: str) -> subprocess.Popen[str]:
    arguments = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2", "--node-rank",
        str(node), "--rdzv-backend", "c10d", "--rdzv-id", "test", "--rdzv-endpoint", f"127.0.0.1:{port}",
        "--local-addr", "127.0.0.1", str(CASES), case,
    ]
    threads = {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment() | threads
    )


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_the_death_of_a_launcher_ends_the_ranks_of_all(killed: int) -> None:
    """Its own ranks, which torch would leave running, and by them those of the other machine. One rank tells, or where
    the run's store was in that launcher one a machine."""
    port = free_port()
    nodes = [torchrun(node, port, "at_work") for node in range(2)]
    first = next(node for node in nodes if "ready" in node.stdout.readline())  # rank 0's: torch numbers the agents
    start = time.monotonic()
    (first if killed == 0 else next(node for node in nodes if node is not first)).kill()
    told = "".join(node.communicate(timeout=60)[1] for node in nodes)
    assert all(node.returncode for node in nodes) and time.monotonic() - start < 30
    lines = [line for line in told.splitlines() if line.startswith("jetrl: ")]
    ends = r"jetrl: rank \d.*(has lost the run's store|its launcher \(process \d+\) has ended).*"
    assert 1 <= len(lines) <= 2 and all(re.fullmatch(ends, line) for line in lines), told


@pytest.mark.slow
@pytest.mark.parametrize("case", ["fine", "mistake"])
def test_two_agents_of_two_processes_each(case: str) -> None:
    """As on two machines. Of a mistake on one rank, one rank of all four tells (next to torchrun's own table)."""
    port = free_port()
    nodes = [torchrun(node, port, case) for node in range(2)]
    told = [node.communicate(timeout=120) for node in nodes]
    out, err = "".join(o for o, _ in told), "".join(e for _, e in told)
    if case == "fine":
        assert [node.returncode for node in nodes] == [0, 0], err
        assert out == f"all {[(r, r % 2, '1', 10) for r in range(4)]}\n"
    else:
        assert all(node.returncode for node in nodes) and out == ""
        assert err.count("\njetrl: ") + err.startswith("jetrl: ") == 1, err
        assert "jetrl: rank 1: reward.py: no such function.\n" in err


def test_one_process_needs_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert not is_rank() and join() is ALONE
    same_everywhere(ALONE, version="1")
    agree(ALONE, None)
    with pytest.raises(UserError, match=r"^mine$"), together(ALONE):
        raise UserError("mine")
    add = ALONE.counter("x")
    assert (add(2), add(0), ALONE.counter("x")(1)) == (2, 2, 1)


@pytest.mark.parametrize("what", ["fine", "fails"])
def test_no_thread_is_left_to_look_into_the_removed_folder(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that had been looking for error files printed a traceback after a good run."""
    looking, pids = threading.Event(), SignalForwarder._pids

    def slowly(hand: SignalForwarder) -> dict[int, int]:
        looking.set()
        time.sleep(0.5)
        return pids(hand)

    monkeypatch.setattr(SignalForwarder, "_pids", slowly)
    before = signal.getsignal(signal.SIGINT)
    with suppress(RuntimeError), SignalForwarder(tmp_path, 2):
        assert looking.wait(10)
        if what == "fails":
            raise RuntimeError
    assert not [thread for thread in threading.enumerate() if thread.name == "jetrl-signals"]
    assert signal.getsignal(signal.SIGINT) is before


def test_what_cannot_be_spawned_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="--nproc 0"):
        spawn(0, ["train"])
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match="a rank of torchrun already"):
        spawn(2, ["train"])


@pytest.mark.parametrize(("early", "text"), [(True, "interrupted."), (False, "")])
def test_an_interrupt_is_told_once(early: bool, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By rank 0 where a run is under way that can say what is lost; before that by the launcher."""
    written: list[Failure] = []
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv(launch.SPAWNED, "folder")
    monkeypatch.setattr(launch, "_watch", lambda: None)
    monkeypatch.setattr(launch, "_write", written.append)
    monkeypatch.setattr(launch, "leave", lambda status: [status])
    monkeypatch.setattr(launch.INTERRUPTED, "is_set", lambda: early)
    assert launch._ran(lambda: sys.exit(130)) == 130
    assert [(one.kind, one.text, one.status) for one in written] == [("status", text, 130)]


def test_causes_by_hand() -> None:
    assert who(3, "") == "rank 3"
    assert Failure(2, "mistake", "x").message() == "rank 2: x"
    assert Failure(2, "mistake", "x", common=True).message() == "x"
    late = ValueError("what came of it")
    late.__cause__ = LostContact("gather")
    assert came_by_lost_contact(late) and not came_by_lost_contact(ValueError()) and not came_by_lost_contact(None)
