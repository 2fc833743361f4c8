"""How many files a step of a run enters, and how deep its calls are: `python tests/entered.py [--list]`.

A miniature run of two steps on a CPU under `sys.setprofile`. Counted are modules of the package of which a frame ran
below a function, in any of its calls, and the most frames of the package on top of each other, that function's
included. A comprehension is a frame where Python makes it one. `--list` names the files and the deepest calls.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import jetrl
from jetrl.engine.engine import PagedEngine
from jetrl.run import loop
from jetrl.train import step

PACKAGE = str(Path(jetrl.__file__).parent) + "/"


@dataclass
class Count:
    """Of one function."""

    calls: int = 0
    files: set[str] = field(default_factory=set)
    depth: int = 0
    deepest: list[str] = field(default_factory=list)  # the functions of these frames


class Profile:
    """Counts below the functions of these codes while it is on."""

    def __init__(self, functions: dict[str, CodeType]) -> None:
        self.counts = {name: Count() for name in functions}
        self._of = {code: self.counts[name] for name, code in functions.items()}
        self._own = 0  # frames of the package on the stack
        self._open: list[tuple[Count, int]] = []  # and how many there were below it

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(PACKAGE):
            return
        if event == "return":
            self._own -= 1
            if self._open and self._open[-1][1] == self._own:
                self._open.pop()
            return
        if (count := self._of.get(code)) is not None:
            count.calls += 1
            self._open.append((count, self._own))
        self._own += 1
        for count, below in self._open:
            count.files.add(code.co_filename.removeprefix(PACKAGE))
            if self._own - below > count.depth:
                count.depth = self._own - below
                count.deepest = _functions(frame)[-count.depth :]


def _functions(frame: FrameType | None) -> list[str]:
    """Of the package, from the outermost to this frame."""
    found = []
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            found.append(frame.f_code.co_qualname)
        frame = frame.f_back
    return found[::-1]


def counts(folder: Path) -> dict[str, Count]:
    """Of an RL step, the engine's step and an update, in a run of two steps."""
    from tiny import tiny_run

    profile = Profile({
        "an RL step": loop.train_step.__code__, "engine.step": PagedEngine.step.__code__,
        "update": step.update.__code__,
    })
    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        tiny_run(folder, {"train.steps": 2, "eval.eval_interval": 0})
    finally:
        sys.setprofile(before)
    return profile.counts


def main(listed: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = counts(Path(folder))
    for name, count in found.items():
        print(f"{name}: {len(count.files)} files, depth {count.depth}, in {count.calls} calls")
        if listed:
            print("    " + " ".join(sorted(count.files)))
            print("    " + " > ".join(count.deepest))


if __name__ == "__main__":
    main("--list" in sys.argv[1:])
