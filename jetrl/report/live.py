"""`LiveReport`: the report.html of a run while it goes on, and after an error has ended it.

The page is written between steps, so seldom that it takes at most `SHARE` of the run's time, whatever a page costs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from jetrl.errors import UserError
from jetrl.report.channel import cause
from jetrl.report.html import write_report
from jetrl.report.recorder import Recorder
from jetrl.report.samples import SampleFile

REPORT_FILE = "report.html"
SHARE = 0.02  # of the time that has passed since the last page
SELDOM = 5.0  # seconds between two pages at least


class LiveReport:
    """The page of the run that `recorder` writes; on a rank that records nothing, and before the first row, there is
    none. As a context manager it writes the page after an error, which goes on. `tell` shows a line to the user."""

    def __init__(self, run_dir: Path, recorder: Recorder, tell: Callable[[str], None]) -> None:
        self._run_dir, self._recorder, self._tell = run_dir, recorder, tell
        self._files: dict[Path, SampleFile] = {}  # of samples: only what was added is read again
        self._next = 0.0  # on the clock `time.monotonic`: when the next page may be written
        self._told = False

    @property
    def due(self) -> bool:
        """Whether it is time for a new page."""
        return self._recorder.last_step >= 0 and time.monotonic() >= self._next

    def update(self) -> None:
        """Write the page. What keeps it from the disk is reported once: a run does not end for it."""
        start = time.monotonic()
        if (why := self._attempt()) and not self._told:
            self._told = True
            self._tell(
                f"{REPORT_FILE} cannot be written for now ({why}). The run continues. This warning is shown once."
            )
        end = time.monotonic()
        self._next = end + max(SELDOM, (end - start) / SHARE)

    def _attempt(self) -> str:
        """Write the page; what went wrong, whatever it is, as part of a sentence. Empty: nothing did."""
        try:
            self.finish()
        except Exception as error:
            return str(error).rstrip(".") if isinstance(error, UserError) else cause(error)
        return ""

    def finish(self) -> None:
        """Write the page of a run that has ended. UserError where that fails."""
        if self._recorder.last_step >= 0:  # a run from elsewhere may stop before its first step
            write_report([self._run_dir], self._run_dir / REPORT_FILE, files=self._files)

    def __enter__(self) -> LiveReport:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception) and (why := self._attempt()):  # an interrupt waits for nothing
            self._tell(f"{REPORT_FILE} cannot be written ({why}).")
