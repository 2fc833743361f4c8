"""`time_limit`: code that is late ends, and nothing of it stays behind."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from jetrl.user_code.time_limit import TooSlow, time_limit

TRACED = """
import sys
from jetrl.user_code.time_limit import TooSlow, time_limit

def late():
    try:
        with time_limit(0.1):
            while True:
                pass
    except TooSlow:
        return "late"

print(late())
for watch in (sys.setprofile, sys.settrace):
    watch(lambda *event: None)
    late.__name__.upper(), (lambda: 1)()
    watch(None)
print("went on")
"""


def test_late_code_ends_and_what_follows_is_left_alone() -> None:
    for _ in range(2):
        with pytest.raises(TooSlow), time_limit(0.1):
            while True:
                pass
    with time_limit(100):
        assert sum(range(1000)) == 499500
    time.sleep(0.7)  # a look later


def test_code_that_ends_late_by_itself_is_not_interrupted_behind_its_end() -> None:
    """As one long call of C: the exception is raised at its end, or not at all."""
    try:
        with time_limit(0.1):
            time.sleep(1.2)
    except TooSlow:
        pass
    for _ in range(1000):
        assert len("after") == 5


def test_a_profiler_or_debugger_behind_late_code_goes_on() -> None:
    """Python 3.11 hung there: the interpreter's mark of an exception to be raised had stayed."""
    done = subprocess.run([sys.executable, "-c", TRACED], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "late\nwent on\n"), done.stderr
