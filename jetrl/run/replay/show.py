"""`jetrl replay` and `jetrl bisect` for people: what was computed again, and what came of it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from jetrl.report.text import wrapped
from jetrl.run.replay import record
from jetrl.run.replay.bisect import Bisected
from jetrl.run.replay.checks import Replayed

_MEANING = {
    "logprobs": "log-probs recomputed by the learner's forward pass, with the weights that drew each token",
    "rollout": "tokens drawn again, with the log-prob of each",
    "update": "batches, log-probs, losses, gradients, masters, moments and published weights of the update",
}


def newest(run_dir: Path) -> int:
    """The newest step with a record, for whoever names none; a number that is refused where there is none."""
    return max(record.steps_of(run_dir), default=0)


def show(found: Replayed, console: Console) -> None:
    """Print the outcome."""
    console.print(f"Step {found.step}: {_MEANING[found.what]}.")
    verdict = "all equal, bit for bit" if found.same else f"{found.different:,} differ"
    console.print(f"  {found.checked:,} {found.unit}: {verdict}", style="green" if found.same else "red")
    if found.first is not None:
        console.print(wrapped(f"first: {found.first}", 2), markup=False)
    for note in found.notes:
        console.print(wrapped(f"note: {note}", 2), style="dim", markup=False)


def show_bisected(found: Bisected, console: Console) -> None:
    """Print where two runs part."""
    for text in found.differences:
        console.print(wrapped(f"differs: {text}", 0), style="dim", markup=False)
    if found.step is None:
        console.print(f"All recorded values are equal: step {record.ranges(found.compared)}.", style="green")
        return
    said = f"Step {found.step} differs first, in its {found.phase}: {found.recorded}."
    console.print(said, style="red", markup=False)
    index = "" if found.index is None else f" at {list(found.index)}"
    console.print(wrapped(f"first: {found.what}{index}", 2), markup=False)
    if found.bits is not None:
        console.print(f"    A: {found.bits[0]}\n    B: {found.bits[1]}", markup=False)
    console.print(wrapped(found.here, 2), style="dim", markup=False)


def to_json(found: Replayed | Bisected) -> dict[str, Any]:
    """The same as a table."""
    return asdict(found) | {"same": found.same}
