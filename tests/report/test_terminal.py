"""`report/terminal.py`: output to a terminal that has gone away ends nothing; other errors are told."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jetrl.report.console import Output
from jetrl.report.terminal import Lasting

pty = pytest.importorskip("pty", reason="a Unix")

WRITES = """
import sys, warnings
from pathlib import Path
from jetrl.report.console import Output
out = Output()
sys.stdin.readline()
for _ in range(3):
    out.print("a step")
warnings.warn("said to nobody")
Path(sys.argv[1]).write_text("saved")
"""


def test_a_terminal_that_is_gone_ends_nothing(tmp_path: Path) -> None:
    """As a rank meets it: in a session of its own, which the terminal's signal does not reach."""
    master, slave = pty.openpty()
    root = str(Path(__file__).parents[2])
    with subprocess.Popen(
        [sys.executable, "-c", WRITES, str(tmp_path / "file")], stdin=subprocess.PIPE, stdout=slave, stderr=slave,
        start_new_session=True, env=os.environ | {"PYTHONPATH": root},
    ) as process:
        os.close(slave)
        os.close(master)
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.close()
        assert process.wait(60) == 0
    assert (tmp_path / "file").read_text() == "saved"


def test_other_errors_of_a_file_are_told() -> None:
    class Full(io.StringIO):
        number = errno.ENOSPC

        def write(self, text: str) -> int:
            raise OSError(self.number, "no space")

    with pytest.raises(OSError, match="no space"):
        Output(file=Full()).print("text")
    gone = Full()
    gone.number = errno.EIO
    assert Lasting(gone).write("text") == 4 and Lasting(gone).getvalue() == ""
