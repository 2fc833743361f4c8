"""The end of the program with things left behind, each in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny import tiny_config

from jetrl import process_exit
from jetrl.config import to_toml

PROGRAM = """\
import multiprocessing, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from jetrl import process_exit
process_exit._PATIENCE = 0.5
if __name__ == "__main__":
    with process_exit.ends_in_time():
        {body}
        print("done")
        {end}
"""
THREAD = "threading.Thread(target=time.sleep, args=(60,), name='poller').start()"
PROCESS = "multiprocessing.get_context('fork').Process(target=time.sleep, args=(60,), name='server').start()"
POOL = "pool = ThreadPoolExecutor(2); pool.submit(int).result()"


@pytest.mark.parametrize(
    ("body", "end", "status", "named"),
    [
        (THREAD, "", 0, "thread poller"), (THREAD, "sys.exit(2)", 2, "thread poller"),
        (THREAD, "sys.exit('words')", 1, "thread poller"), (THREAD, "raise KeyError", 1, "thread poller"),
        (PROCESS, "sys.exit(130)", 130, "process server"), (POOL, "", 0, ""), ("pass", "sys.exit(3)", 3, ""),
        (THREAD.replace("target", "daemon=True, target"), "", 0, ""),
    ],
    ids=lambda v: str(v)[-22:],
)
def test_what_is_left_is_named_and_the_status_is_the_programs(body: str, end: str, status: int, named: str) -> None:
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(body=body, end=end)], capture_output=True, text=True, timeout=50,
    )
    assert done.returncode == status and done.stdout == "done\n" and time.monotonic() - started < 30, done
    assert (f"still running: {named}." in done.stderr) == bool(named), done.stderr
    assert ("still running" in done.stderr) == bool(named), done.stderr


def test_the_program_that_goes_on_is_left_alone() -> None:
    with process_exit.ends_in_time():
        pass
    assert process_exit._left() == []


SIGNALLED = "import os, signal\nfor _ in range(3):\n    os.kill(os.getpid(), signal.SIGINT)\n"
INTERRUPTED = """\
import os, signal
from jetrl import process_exit
{before}
with process_exit.ctrl_c_is_reported():
    try:
        {inside}
    except BaseException as error:
        print(type(error).__name__, flush=True)
print("goes on")
"""


@pytest.mark.parametrize(
    ("before", "inside", "status", "said"),
    [
        ("", "import swallows", 130, ""),
        ("", "os.kill(os.getpid(), signal.SIGINT)", 0, "KeyboardInterrupt\ngoes on\n"),
        ("signal.signal(signal.SIGINT, signal.SIG_IGN)", "import swallows", 0, "goes on\n"),
        ("os.environ['RANK'] = '0'", "os.kill(os.getpid(), signal.SIGINT)", 0, "KeyboardInterrupt\ngoes on\n"),
        ("os.environ['RANK'] = '0'", "import swallows", 130, ""),
    ],
    ids=["in an import", "elsewhere", "ignored", "a rank", "a rank in an import"],
)
def test_ctrl_c_ends_the_program_even_in_an_import_that_swallows_exceptions(
    tmp_path: Path, before: str, inside: str, status: int, said: str
) -> None:
    (tmp_path / "signalled.py").write_text(SIGNALLED)
    (tmp_path / "swallows.py").write_text("try:\n    import signalled\nexcept BaseException:\n    pass\n")
    path = os.pathsep.join([str(tmp_path), str(Path(process_exit.__file__).parents[1])])
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED.format(before=before, inside=inside)], capture_output=True, text=True,
        timeout=50, env=os.environ | {"PYTHONPATH": path},
    )
    assert (done.returncode, done.stdout) == (status, said), done
    assert done.stderr == ("" if before else "jetrl: interrupted.\n")


@pytest.mark.slow
def test_ctrl_c_in_a_warm_start_says_what_is_lost(tmp_path: Path) -> None:
    settings = {"sft.steps": 100_000, "sft.batch_size": 4, "sft.cache_dir": str(tmp_path / "warm")}
    (tmp_path / "recipe.toml").write_text(to_toml(tiny_config(tmp_path, settings)))
    process = subprocess.Popen(
        [sys.executable, "-m", "jetrl", "sft", "recipe.toml"], cwd=tmp_path, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(Path(process_exit.__file__).parents[1])},
    )
    assert process.stdout is not None
    while "step " not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=50)
    told = "Interrupted: the warm start is not saved; next time it is made from its beginning.\n"
    assert (process.returncode, err) == (130, told)
