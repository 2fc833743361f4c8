"""What a run reports once and then counts: steps without a signal, a parity that should be 0 and is not; and a reward
that never moves."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jetrl.rounding import all_equal

CONSTANT_FOR = 10  # steps in which no completion's score differs, before a reward function is named
NO_SIGNAL = "nothing to learn from"  # the hint of a step that has no advantage but 0
WHOLE = ""  # stands for the reward itself among the names of reward functions
_PENALTY = "The run learns from the penalty for long answers alone (rl.overlong_buffer_len). "
_STD = re.compile(r"reward/(.+)/std")


class Hints:
    """Reports something in full the first time, then in a line at its 10th, 100th, ... time."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell, self.counts = tell, Counter[str]()

    def hint(self, step: int, what: str, detail: str) -> None:
        """`what` happened in this step; `detail` says why and what to do."""
        self.counts[what] += 1
        count = self.counts[what]
        if count == 1:
            self._tell(f"step {step}: {what}: {detail}")
        elif str(count).strip("0") == "1":
            self._tell(f"step {step}: {what}, for the {count}th time in this run")


class ConstantRewards:
    """Looks for reward functions that give all completions one score, step after step: of several functions one such
    is hidden in the sum. Each is reported once."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[float | None, int]] = {}  # by function: its only score, in how many steps

    def look(self, metrics: Mapping[str, Any], tell: Callable[[str, str], None], known: bool = False) -> None:
        """The row of a step. `known`: it was reported before that there is nothing to learn from."""
        for name, score in _constants(metrics).items():
            before, count = self._seen.get(name, (score, 0))
            if score is None or (before is not None and not all_equal((before, score))):
                self._seen[name] = (score, 0 if score is None else 1)
                continue
            self._seen[name] = (score, count + 1)
            if count + 1 == CONSTANT_FOR and not (name == WHOLE and known):
                paid = _PENALTY if name == WHOLE and "reward/before_penalty_min" in metrics else ""
                tell(
                    f"constant reward {name}".rstrip(),
                    f"it gave {score:g} to every completion of {CONSTANT_FOR} steps, so nothing is learned from it. "
                    f"{paid}Look at what it is given: samples.jsonl, or `jetrl report` (a chat template may have "
                    "written the beginning of the reply, such as <think>, which is not in the completion).",
                )


def never_moved(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """The rewards that were one number for every completion of every step, as `right: 0 in all 30 steps`."""
    found: dict[str, list[float | None]] = {}
    for row in rows:
        for name, score in _constants(row).items():
            found.setdefault(name, []).append(score)
    lines = []
    for name, scores in found.items():
        values = [score for score in scores if score is not None]
        if len(values) == len(scores) > 1 and all_equal(values):
            lines.append(f"{name or _whole(found)}: {values[0]:g} in all {len(values)} steps")
    return lines


def _whole(names: Iterable[str]) -> str:
    """What the reward itself is called next to these functions."""
    return "the whole reward" if "reward" in names else "reward"


def _constants(metrics: Mapping[str, Any]) -> dict[str, float | None]:
    """By reward function the score that it gave to all completions of the step, None where they differ; as `WHOLE` the
    reward itself, before the penalty for long answers."""
    found: dict[str, float | None] = {}
    ends = [(metrics.get(f"reward/{kind}min"), metrics.get(f"reward/{kind}max")) for kind in ("before_penalty_", "")]
    for least, most in ends:
        if least is not None and most is not None and WHOLE not in found:
            found[WHOLE] = least if all_equal((least, most)) else None
    for key, value in metrics.items():
        if (match := _STD.fullmatch(key)) and f"reward/{match[1]}/mean" in metrics:
            found[match[1]] = metrics[f"reward/{match[1]}/mean"] if value == 0.0 else None
    return found
