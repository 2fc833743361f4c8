"""The table of docs/PERFORMANCE.md, measured in one go: ours and another engine's, alternating, on one GPU.

    python benchmarks/table.py --peer "COMMAND" --again         # all pieces, 16 minutes and compilation
    python benchmarks/table.py --peer "COMMAND"                 # those that results/table.json lacks
    python benchmarks/table.py --peer "COMMAND" --budget 560    # start nothing that would not end in 560 s; call again
    python benchmarks/table.py --pieces "update fp8" "update bf16" --again
    python benchmarks/table.py --write                          # run nothing; the table goes to docs/PERFORMANCE.md
    python benchmarks/table.py --list

A piece is one process of `bench_rollout.py`, `bench_step.py` or vLLM (`--peer` as for `bench_rollout.py`). Its rows
are written as they come, so a killed run keeps what it has and another call continues. A row of the table
whose pieces are missing says "not run". `--again` measures the chosen pieces again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_rollout import PEER_MARK, peer_command, peer_row
from common import MARK, RESULTS, ROOT, SPEC, ask, between_markers, require_gpu, write_json
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
DOCUMENT = ROOT / "docs" / "PERFORMANCE.md"

# ---- what is measured -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """One process. `seconds` is its expected time, including its start but not compiling kernels for the first
    time."""

    name: str
    seconds: float
    script: str  # of benchmarks/, or "peer"
    variant: str  # or the dtype of vLLM
    options: tuple[str, ...] = ()
    sizes: tuple[list[int], int, int] = ([], 0, 0)  # of a rollout: batches, prompt, new tokens

    def command(self, peer: str) -> list[str] | str:
        if self.script == "peer":
            return peer_command(peer, self.variant, *self.sizes, SPEC.num_layers)
        return [sys.executable, str(HERE / self.script), "--one", self.variant, *self.options]


def _rollout(name: str, seconds: float, variant: str, sizes: tuple[list[int], int, int]) -> Piece:
    batches, prompt, new = sizes
    options = ("--batch", *map(str, batches), f"--prompt={prompt}", f"--new={new}")
    return Piece(name, seconds, "peer" if name.startswith("peer") else "bench_rollout.py", variant, options, sizes)


def _step(name: str, seconds: float) -> Piece:
    kind, variant = name.split(" ", 1)
    return Piece(name, seconds, "bench_step.py", variant, (f"--only={kind}",))


SHORT, LONG = ([64, 256], 512, 1024), ([64], 8192, 512)
PIECES = [  # ours and what it is compared with, one after the other
    _rollout("rollout fp8", 40, "fp8", SHORT),
    _rollout("rollout fp8 kv8", 35, "fp8 kv8", SHORT),
    _rollout("peer rollout bf16", 85, "bf16", SHORT),
    _rollout("rollout bf16", 45, "bf16", SHORT),
    _step("update fp8", 25),
    _step("update bf16", 25),
    _rollout("long fp8", 30, "fp8", LONG),
    _rollout("peer long fp8", 90, "fp8", LONG),
    _rollout("long fp8 kv8", 30, "fp8 kv8", LONG),
    _step("whole fp8", 70),
    _step("whole fp8 kv8", 60),
    _step("whole bf16", 80),
    _step("whole fp8 nonexact", 70),
    _step("update fp8 nonexact", 25),
    _step("update bf16 nonexact", 25),
    _rollout("peer rollout fp8", 80, "fp8", SHORT),
    _rollout("peer rollout fp8 kv8", 80, "fp8 kv8", SHORT),
]

# ---- what the table says --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class At:
    """A figure in the raw results: of a piece, by key, and by batch size if the piece has several rows."""

    piece: str
    key: str
    batch: int | None = None


@dataclass(frozen=True)
class Row:
    """`ours` against `base` of the same run. `how` makes the result that the goal is about:

    rate   ours / base, more is better            time   base / ours, for what takes less time
    cost   ours / base - 1, at most the goal      share  ours itself, at least the goal
    below  ours itself, at most the goal
    """

    what: str
    ours: At
    base: At | None
    against: str
    how: str
    goal: float
    unit: str
    peak: str


GOAL = {"rate": "≥ {:.4g}x", "time": "≥ {:.4g}x", "cost": "≤ {:.0%}", "share": "≥ {:.0%}", "below": "≤ {:.0f} ms"}
RESULT = {"rate": "{:.2f}x", "time": "{:.2f}x", "cost": "{:+.1%}", "share": "{:.0%}", "below": "{:.1f} ms"}
COMPUTE: dict[str, Callable[[float, float], float]] = {
    "rate": lambda ours, base: ours / base, "time": lambda ours, base: base / ours,
    "cost": lambda ours, base: ours / base - 1, "share": lambda ours, base: ours, "below": lambda ours, base: ours,
}
AT_MOST = ("cost", "below")


def _speed(what: str, ours: str, base: str, against: str, batch: int, goal: float) -> Row:
    key = "tokens/s"
    return Row(what, At(ours, key, batch), At(base, key, batch), against, "rate", goal, "tok/s", "peak GiB")


def _floor(what: str, precision: str) -> Row:
    key = "share of floor"
    base = At(f"peer rollout {precision}", key, 64)
    return Row(what, At(f"rollout {precision}", key, 64), base, "vLLM", "share", 0.75, "share", "peak GiB")


def _cost(what: str, piece: str, key: str, peak: str) -> Row:
    return Row(what, At(piece, key), At(f"{piece} nonexact", key), "non-exact", "cost", 0.02, key.split("_")[-1], peak)


ROWS = [
    _speed("rollout, batch 64, FP8", "rollout fp8", "peer rollout bf16", "vLLM BF16", 64, 1.5),
    _speed("rollout, batch 256, FP8", "rollout fp8", "peer rollout bf16", "vLLM BF16", 256, 1.35),
    _speed("rollout, batch 64, FP8, FP8 cache", "rollout fp8 kv8", "peer rollout bf16", "vLLM BF16", 64, 1.5),
    _speed("rollout, batch 256, FP8, FP8 cache", "rollout fp8 kv8", "peer rollout bf16", "vLLM BF16", 256, 1.35),
    _speed("rollout, batch 64, BF16", "rollout bf16", "peer rollout bf16", "vLLM BF16", 64, 1.1),
    _speed("rollout, batch 256, BF16", "rollout bf16", "peer rollout bf16", "vLLM BF16", 256, 1.1),
    _speed("rollout, batch 64, prompt 8192 + 512", "long fp8", "peer long fp8", "vLLM FP8", 64, 1.1),
    _speed("the same, FP8 cache", "long fp8 kv8", "peer long fp8", "vLLM FP8", 64, 1.1),
    Row("actor update, FP8", At("update fp8", "update_ms"), At("update bf16", "update_ms"), "our BF16", "time", 1.5,
        "ms", "update peak GiB"),
    Row("BF16 update, share of 785 TFLOP/s", At("update bf16", "MFU"), None, "", "share", 0.5, "share",
        "update peak GiB"),
    Row("reference log-probs, FP8", At("update fp8", "logprob_ms"), At("update bf16", "logprob_ms"), "our BF16", "time",
        1.7, "ms", "logprob peak GiB"),
    Row("whole RL step, 4K new tokens, FP8", At("whole fp8", "whole_s"), At("whole bf16", "whole_s"), "our BF16",
        "time", 1.4, "s", "whole peak GiB"),
    Row("whole RL step, FP8, FP8 cache", At("whole fp8 kv8", "whole_s"), At("whole bf16", "whole_s"), "our BF16",
        "time", 1.4, "s", "whole peak GiB"),
    _cost("cost of exactness, whole step, FP8", "whole fp8", "whole_s", "whole peak GiB"),
    _cost("cost of exactness, update, FP8", "update fp8", "update_ms", "update peak GiB"),
    _cost("cost of exactness, update, BF16", "update bf16", "update_ms", "update peak GiB"),
    Row("publishing after an update, FP8", At("update fp8", "publish_ms"), None, "", "below", 30, "ms",
        "publish peak GiB"),
    _floor("decode step of the floor, batch 64, FP8", "fp8"),
    _floor("decode step of the floor, batch 64, BF16", "bf16"),
]

Raw = dict[str, dict[str, Any]]  # piece -> {"complete", "seconds", "rows"}


@dataclass(frozen=True)
class Reading:
    """A row with its figures; None where a piece has not been run."""

    row: Row
    ours: float | None
    base: float | None
    result: float | None
    peak: float | None

    @property
    def met(self) -> bool | None:
        if self.result is None:
            return None
        return self.result <= self.row.goal if self.row.how in AT_MOST else self.result >= self.row.goal

    def cells(self) -> list[str]:
        """what, ours, baseline, result, goal, verdict, peak GiB"""
        row = self.row
        told = self.base is not None or row.how != "share"  # a share is for comparison; not every engine reports it
        base = f"{_number(self.base, row.unit)} ({row.against})" if row.base is not None and told else ""
        result = "not run" if self.result is None else RESULT[row.how].format(self.result)
        if self.met is False and result == f"{row.goal:.2f}x":  # just below: not to be rounded up to the goal
            result = f"{self.result:.3f}x"
        verdict = {True: "met", False: "missed", None: ""}[self.met]
        peak = "" if self.peak is None else f"{self.peak:.0f}"
        return [row.what, _number(self.ours, row.unit), base, result, GOAL[row.how].format(row.goal), verdict, peak]


def _number(value: float | None, unit: str) -> str:
    if value is None:
        return "not run"
    if unit == "share":
        return f"{value:.0%}"
    return f"{value:,.0f} {unit}" if value >= 1000 else f"{value:.3g} {unit}"


def look(raw: Raw, at: At | None) -> float | None:
    """The figure; None if its piece has no such row yet. A row without the key is our mistake, and raises."""
    rows = raw.get(at.piece, {}).get("rows", []) if at is not None else []
    for row in rows:
        if at is not None and (at.batch is None or row["batch"] == at.batch):
            if at.key not in row and row.get("engine", "").startswith("peer"):
                return None  # another engine need not report everything
            return row[at.key]
    return None


def read(raw: Raw, row: Row) -> Reading:
    ours, base = look(raw, row.ours), look(raw, row.base)
    needs_base = row.how in ("rate", "time", "cost")
    result = None
    if ours is not None and (base is not None or not needs_base):
        result = COMPUTE[row.how](ours, 0.0 if base is None else base)
    return Reading(row, ours, base, result, look(raw, At(row.ours.piece, row.peak, row.ours.batch)))


HEAD = ["Qwen3-8B's shape", "ours", "baseline, same run", "result", "goal", "", "peak GiB"]


def markdown(raw: Raw) -> str:
    lines = [f"| {' | '.join(HEAD)} |", "|---|--:|--:|--:|--:|---|--:|"]
    for row in ROWS:
        cells = read(raw, row).cells()
        cells[3] = f"**{cells[3]}**" if cells[3] != "not run" else cells[3]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *notes(raw)])


def notes(raw: Raw) -> list[str]:
    """Counts of verdicts; GPU, versions and commits, and a warning where pieces come from different commits."""
    verdicts = [read(raw, row).met for row in ROWS]
    rows = [row for piece in raw.values() for row in piece["rows"]]
    places = [row["environment"] for row in rows if "environment" in row]
    text = [f"{verdicts.count(True)} met, {verdicts.count(False)} missed, {verdicts.count(None)} not run."]
    if places:
        versions = sorted({f"{e['gpu']}, torch {e['torch']}" for e in places})
        peers = sorted({row["peer"] for row in rows if "peer" in row})
        dates = sorted(e["date"] for e in places)
        text.append(f"{'; '.join(versions)}; compared with: {', '.join(peers) or 'not run'}.")
        text.append(f"Measured from {dates[0][:16]} to {dates[-1][:16]} UTC.")
        commits = sorted({e["commit"] for e in places})
        text.append(f"Commit {', '.join(commits)}." + (" **Not one state of the code.**" if len(commits) > 1 else ""))
    return text


def show(raw: Raw, console: Console) -> None:
    table = Table(width=min(console.width, 100), show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for i, title in enumerate(HEAD):
        table.add_column(title, justify="left" if i in (0, 5) else "right", overflow="fold")
    for row in ROWS:
        reading = read(raw, row)
        style = {True: "green", False: "red", None: "dim"}[reading.met]
        cells = reading.cells()
        table.add_row(*cells[:3], f"[{style}]{cells[3]}[/]", cells[4], f"[{style}]{cells[5]}[/]", cells[6])
    console.print(table)
    for text in notes(raw):
        console.print(text.replace("**", ""), style="dim", highlight=False)


# ---- running --------------------------------------------------------------------------------------------------------


def load(path: Path) -> Raw:
    return json.loads(path.read_text())["pieces"] if path.is_file() else {}


def missing(pieces: list[Piece], raw: Raw, again: bool) -> list[Piece]:
    return [piece for piece in pieces if again or not raw.get(piece.name, {}).get("complete")]


def run(pieces: list[Piece], raw: Raw, path: Path, peer: str, budget: float, again: bool = False) -> bool:
    """Measure what is missing while there is time; each piece replaces its old rows. False if one failed."""
    ok, start = True, time.perf_counter()
    todo = missing(pieces, raw, again)
    for i, piece in enumerate(todo):
        if piece.script == "peer" and not peer:
            print(f"{piece.name}: no --peer, left out", flush=True)
            continue
        left = budget - (time.perf_counter() - start)
        if piece.seconds > left:
            print(f"{piece.name}: needs about {piece.seconds:.0f} s, {max(left, 0):.0f} s are left; call again")
            continue
        rest = sum(p.seconds for p in todo[i:])
        print(f"{piece.name}: about {piece.seconds:.0f} s (all that is left: {rest:.0f} s)", flush=True)
        ok &= measure(piece, raw, path, peer)
    return ok


def measure(piece: Piece, raw: Raw, path: Path, peer: str) -> bool:
    """Run one piece; its rows are in the file as soon as they are printed."""
    is_peer, began = piece.script == "peer", time.perf_counter()
    held: dict[str, Any] = {"complete": False, "seconds": 0.0, "rows": []}
    try:
        for row in ask(piece.command(peer), PEER_MARK if is_peer else MARK):
            raw[piece.name] = held  # from the first row on: until then the old ones stay
            held["rows"].append(peer_row(row, piece.variant) if is_peer else row)
            held["seconds"] = time.perf_counter() - began
            write_json(path, {"pieces": raw})
    except RuntimeError as error:
        print(f"{piece.name}: FAILED\n{error}", flush=True)
        return False
    held["complete"] = True
    write_json(path, {"pieces": raw})
    print(f"{piece.name}: {held['seconds']:.0f} s", flush=True)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pieces", nargs="+", choices=[p.name for p in PIECES], metavar="PIECE")
    parser.add_argument("--peer", default="", help="command of another engine; see bench_rollout.py")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds")
    parser.add_argument("--again", action="store_true", help="measure the chosen pieces again")
    parser.add_argument("--write", action="store_true", help="only put the table into docs/PERFORMANCE.md")
    parser.add_argument("--list", action="store_true", help="only list the pieces")
    parser.add_argument("--out", type=Path, default=RESULTS / "table.json")
    args = parser.parse_args()
    raw, ok = load(args.out), True
    if args.list:
        for piece in PIECES:
            state = "done" if raw.get(piece.name, {}).get("complete") else f"about {piece.seconds:.0f} s"
            print(f"{piece.name:<22}{state}")
        return
    if not args.write:
        chosen = [piece for piece in PIECES if not args.pieces or piece.name in args.pieces]
        if missing(chosen, raw, args.again):
            require_gpu()
            ok = run(chosen, raw, args.out, args.peer, args.budget, args.again)
        else:
            print(f"nothing measured: {args.out} holds all of it already; --again measures again\n")
    show(raw, Console())
    if args.write:
        DOCUMENT.write_text(between_markers(DOCUMENT.read_text(), "table", markdown(raw)))
    raise SystemExit(0 if ok else 1)


if __name__ == "__main__":
    main()
