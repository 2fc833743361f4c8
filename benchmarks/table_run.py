"""Runs the pieces of `table.py` within a budget of seconds, and keeps every row as soon as it is there."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench_rollout import PEER_MARK, peer_row
from bench_workloads import ragged_lengths
from common import MARK, ask, write_json
from table_pieces import BEFORE, COMPILING, PEER, START, Piece
from table_rows import Raw


@dataclass
class Runner:
    """Where results go, and what pieces need: the peer's command, a checkout of the older commit, a folder that holds
    compiled kernels (none: the compilers' own)."""

    path: Path
    raw: Raw = field(default_factory=dict)
    peer: str = ""
    before: Path | None = None
    kernels: Path | None = None

    def lacks(self, piece: Piece) -> str:
        """The option that the piece needs and that was not given."""
        if piece.script == PEER and not self.peer:
            return "--peer"
        return "--before" if piece.script == BEFORE and self.before is None else ""

    def keep(self) -> None:
        write_json(self.path, {"pieces": self.raw})


def load(path: Path) -> Raw:
    return json.loads(path.read_text())["pieces"] if path.is_file() else {}


def missing(pieces: list[Piece], raw: Raw, again: bool) -> list[Piece]:
    return [piece for piece in pieces if again or not raw.get(piece.name, {}).get("complete")]


def run(pieces: list[Piece], runner: Runner, budget: float, again: bool = False) -> bool:
    """Measure what is missing while there is time; each piece replaces its old rows. False if one failed."""
    ok, start = True, time.perf_counter()
    todo = missing(pieces, runner.raw, again)
    while todo:
        piece = todo.pop(0)
        if option := runner.lacks(piece):
            print(f"{piece.name}: no {option}, left out", flush=True)
            continue
        left = budget - (time.perf_counter() - start)
        need = piece.seconds + (START if piece.process else 0.0)
        if need > left:
            print(f"{piece.name}: needs about {need:.0f} s, {max(left, 0):.0f} s are left; call again", flush=True)
            continue
        together = [piece]
        while piece.process and todo and todo[0].process == piece.process and need + todo[0].seconds <= left:
            need += todo[0].seconds
            together.append(todo.pop(0))
        rest = need + sum(p.seconds for p in todo)
        names = "; ".join(p.name for p in together)
        print(f"{names}: about {need:.0f} s (all that is left: {rest:.0f} s)", flush=True)
        ok &= measure_together(together, runner) if piece.process else measure(piece, runner)
    return ok


def measure(piece: Piece, runner: Runner) -> bool:
    """Run one piece; its rows are in the file as soon as they are printed."""
    begun, kernels = time.perf_counter(), runner.kernels
    held: dict[str, Any] = {"complete": False, "seconds": 0.0, "rows": []}
    if fresh := piece.name == COMPILING:  # its figure is about a fresh machine
        kernels = kernels or Path(tempfile.mkdtemp(prefix="kernels-"))
        shutil.rmtree(kernels, ignore_errors=True)
    try:
        for row in _asked(piece, runner, kernels):
            runner.raw[piece.name] = held  # from the first row on: until then the old ones stay
            held["rows"].append(_named(row, piece))
            held["seconds"] = time.perf_counter() - begun
            runner.keep()
    except RuntimeError as error:
        print(f"{piece.name}: FAILED\n{error}", flush=True)
        return False
    finally:
        if fresh and runner.kernels is None and kernels is not None:
            shutil.rmtree(kernels, ignore_errors=True)
    held["complete"] = True
    runner.keep()
    print(f"{piece.name}: {held['seconds']:.0f} s", flush=True)
    return True


def _asked(piece: Piece, runner: Runner, kernels: Path | None) -> Any:
    mark = PEER_MARK if piece.script == PEER else MARK
    environment = {} if piece.script == PEER else piece.environment(runner.before, kernels)
    say = print if piece.name == COMPILING else None  # it tells which kernels were not compiled ahead, and why
    return ask(piece.command(runner.peer, runner.before), mark, env=environment, say=say)


def _named(row: dict[str, Any], piece: Piece) -> dict[str, Any]:
    """A peer's row under our names; RuntimeError if it has drawn other lengths than ours."""
    if piece.script != PEER:
        return row
    if piece.ragged and row.get("out_tokens") != (want := sum(ragged_lengths(row["batch"]))):
        raise RuntimeError(f"the peer drew {row.get('out_tokens')} tokens; the table of lengths has {want}")
    return peer_row(row, piece.variant)


def measure_together(pieces: list[Piece], runner: Runner) -> bool:
    """Run the works of one process. A work is complete with its last row; those that are, stay if a later one fails."""
    first, by_name = pieces[0], {piece.name: piece for piece in pieces}
    command = replace(first, options=(*first.options, "--works", *by_name))
    held: dict[str, dict[str, Any]] = {}
    try:
        for row in _asked(command, runner, runner.kernels):
            name = row["piece"]
            if "error" in row:
                print(f"{name}: FAILED\n{row['error']}", flush=True)
                continue
            if name not in held:
                held[name] = {"complete": False, "seconds": 0.0, "rows": []}
            mine = runner.raw[name] = held[name]
            mine["rows"].append(row)
            if row.get("done"):
                mine |= {"complete": True, "seconds": row["seconds"]}
                print(f"{name}: {row['seconds']:.0f} s", flush=True)
            runner.keep()
    except RuntimeError as error:
        lost = "; ".join(name for name in by_name if not held.get(name, {}).get("complete"))
        print(f"{lost}: FAILED\n{error}", flush=True)
    return all(held.get(name, {}).get("complete") for name in by_name)
