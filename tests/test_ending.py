"""The end of the program with things left behind, each in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from jetrl import ending

PROGRAM = """\
import multiprocessing, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from jetrl import ending
ending._PATIENCE = 0.5
if __name__ == "__main__":
    with ending.ends_in_time():
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
    with ending.ends_in_time():
        pass
    assert ending._left() == []
