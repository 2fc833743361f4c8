"""What a signal does to a run: Ctrl-C finishes the step, SIGTERM does not wait for it, a second one stops at once.

| while | Ctrl-C | SIGTERM (schedulers, which kill some seconds later), SIGHUP (a closed terminal) |
|---|---|---|
| loading, warm start | at once | at once |
| rollout and rewards | the step is finished, then saved | given up; the steps before are saved |
| update | finished, then saved | finished, then saved |
| evaluation | given up; the step is saved | given up; the step is saved |
| the last checkpoint | it is waited for | it is waited for |

A terminal may send SIGHUP more than once, so a further one asks for nothing. What is given up is lost as time only: the
resumed run repeats it to the bit.

Several ranks each get the signal, at different moments. None gives up by itself: at the points where all of them meet,
all do what the first one wants. Rewards, which rank 0 computes, are waited for.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any, Literal

from jetrl.parallel.agreement import GivenUp, together
from jetrl.parallel.launch import stop_signals
from jetrl.parallel.world import ALONE, World
from jetrl.report.terminal import forget_closed_terminal

__all__ = ["GivenUp", "StopRequest"]

Phase = Literal["start", "warm start", "step", "rollout", "evaluation", "checkpoint", "report"]
_LOST = {
    "start": "no step had begun", "warm start": "the warm start is not saved; next time it is made from its beginning",
    "report": "report.html is not written; `jetrl report` makes it",
}  # by phase in which a signal stops at once
_AGAIN = {
    signal.SIGINT: "Press Ctrl-C again to stop immediately.",
    signal.SIGTERM: "A second SIGTERM stops it immediately.",
}
_STOPS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Whether the user asked to stop. As a context manager it catches both signals, and puts the handlers back."""

    def __init__(self, world: World = ALONE) -> None:
        self.world = world
        self.asked = False  # to stop after the step
        self.got: int | None = None  # the last signal that asked
        self.saves = True  # whether the run writes checkpoints
        self.phase: Phase = "start"
        self.said = ""  # the answer to the last signal
        self.shown = False  # whether a display shows `said`, which printing would tear
        self._waits = True  # for the step to finish; not after SIGTERM or SIGHUP
        self._over = False  # a signal has stopped the run before its first step
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        for number in stop_signals():
            self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before.clear()

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """This phase lasts while the context does. Raises GivenUp at any point of a phase that is given up; of several
        ranks on all of them, where `check` is called and at both ends. A collective at both ends."""
        if self._over and self.world.alone:
            raise KeyboardInterrupt  # again: imports may swallow it, torch's do
        before, self.phase = self.phase, phase
        try:
            with together(self.world):
                self.check()
            yield
            with together(self.world):
                self.check()  # where the user's code has swallowed what the handler raised
        finally:
            self.phase = before

    def take(self) -> int | None:
        """The signal that asked, on this rank or another, once: then the run is not asked to stop any
        more. Collective."""
        got = next((number for number in self.world.gather(self.got) if number is not None), None)
        if got is not None:
            self.asked, self.got, self._waits = False, None, True
        return got

    def anywhere(self) -> bool:
        """Whether any rank was asked to stop. A collective."""
        return any(self.world.gather(self.asked))

    def check(self) -> None:
        """Raises GivenUp if the run no longer waits for this phase."""
        if self.asked and (self.phase == "evaluation" or (self.phase == "rollout" and not self._waits)):
            raise GivenUp

    def _ask(self, number: int, frame: FrameType | None) -> None:
        forget_closed_terminal()
        hurries = number != signal.SIGINT and self._waits
        if self.asked and number not in _STOPS and not hurries:
            return
        if self.phase in _LOST or (self.asked and not hurries):
            self._over = self.phase in _LOST
            self._say(f"Interrupted: {_LOST.get(self.phase) or _left_out(self.phase)}.")
            raise KeyboardInterrupt
        self.asked, self._waits, self.got = True, number == signal.SIGINT, number
        self._say(self._answer(), _AGAIN.get(signal.Signals(number), "Ctrl-C or SIGTERM stops it immediately."))
        if self.world.alone:
            self.check()

    def _answer(self) -> str:
        if self.phase == "checkpoint":
            return "Stopping: the last checkpoint is being written."
        if self.phase == "evaluation":
            kept = "saved; the resumed run makes the evaluation" if self.saves else "done"
            text = f"Stopping: the evaluation is given up. The step before it is {kept}."
        elif self.phase == "rollout" and not self._waits:
            kept = "saved; the resumed run repeats this one" if self.saves else "done"
            text = f"Stopping: the rollout is given up. The steps before it are {kept}."
        else:
            text = f"Stopping after this step, {'with' if self.saves else 'without'} a checkpoint."
        return text if self.saves else f"{text} Nothing is saved (checkpoint.save_interval = 0)."

    def _say(self, text: str, again: str = "") -> None:
        """Print from a signal handler: past Python's buffers, which the interrupted code may be writing to."""
        self.said = text
        if not self.world.first or (self.shown and text.startswith("Stopping")):
            return
        with suppress(OSError):  # nobody reads it any more
            os.write(2, f"{text} {again}".rstrip().encode() + b"\n")


def _left_out(phase: Phase) -> str:
    """What a signal loses that does not wait for the end of this phase."""
    if phase == "checkpoint":
        return "the checkpoint that was being written is not; the one before it is intact"
    return "the current step is not saved"
