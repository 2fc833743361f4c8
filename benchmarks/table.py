"""The tables of docs/PERFORMANCE.md, each measured in one go: ours and others', one after the other on one GPU.

    python benchmarks/table.py --table rollouts --peer "COMMAND" --kernels DIR              # groups, ragged, drafts
    python benchmarks/table.py --table updates --peer "COMMAND" --kernels DIR --before DIR  # training, foreign trainers
    python benchmarks/table.py --peer "COMMAND" --again         # the first goals: 16 minutes and compilation
    python benchmarks/table.py --table rollouts --budget 560    # start nothing that would not end in 560 s; call again
    python benchmarks/table.py --table rollouts --add benchmarks/results/table_updates.json    # its pieces count too
    python benchmarks/table.py --pieces "update fp8" "update bf16" --again
    python benchmarks/table.py --table updates --write          # run nothing; the table goes to docs/PERFORMANCE.md
    python benchmarks/table.py --table rollouts --list

A piece is one process of our benchmarks or of vLLM (`--peer` as for `bench_rollout.py`), or one work of a process that
several share. Its rows are written as they come, so a killed run keeps what it has and another call continues. A row of
the table whose pieces are missing says "not run". `--again` measures the chosen pieces again. With two GPUs, `--side
ours` and `--side others` with an `--out` each may run at once, and `--write --add` joins them.

`--kernels` is where our pieces keep compiled kernels; the piece "compilation" empties it first and fills it. `--before`
is a checkout of commit 107d9e3 (`git archive 107d9e3 | tar -x -C DIR`), whose BF16 is a baseline of whole steps.

The modules: `table_pieces.py` what is run, `table_run.py` how, `table_rows.py` what is read from it, `table_show.py`
what is shown.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from common import RESULTS, ROOT, between_markers, require_gpu, write_json
from rich.console import Console
from table_pieces import START, Piece
from table_rows import pieces_of
from table_run import Runner, load, missing, run
from table_show import SHEETS, Sheet, markdown, show

DOCUMENT = ROOT / "docs" / "PERFORMANCE.md"


def chosen(sheet: Sheet, names: list[str] | None, everything: bool, side: str) -> list[Piece]:
    """Those named, else all that are not optional; of one side if it is given."""
    named = [p for p in sheet.pieces if (p.name in names if names else everything or not p.optional)]
    return [p for p in named if not side or p.is_ours == (side == "ours")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", choices=list(SHEETS), default="goals")
    parser.add_argument("--pieces", nargs="+", metavar="PIECE")
    parser.add_argument("--all", action="store_true", help="the optional pieces too")
    parser.add_argument("--side", choices=["ours", "others"], default="", help="only our pieces, or only baselines")
    parser.add_argument("--peer", default="", help="command of another engine; see bench_rollout.py")
    parser.add_argument("--before", type=Path, help="a checkout of commit 107d9e3")
    parser.add_argument("--kernels", type=Path, help="folder of compiled kernels; default: each compiler's own")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds")
    parser.add_argument("--again", action="store_true", help="measure the chosen pieces again")
    parser.add_argument("--write", action="store_true", help="only put the table into docs/PERFORMANCE.md")
    parser.add_argument("--list", action="store_true", help="only list the pieces")
    parser.add_argument("--add", type=Path, nargs="+", default=[], help="results whose pieces count where ours lack")
    parser.add_argument("--out", type=Path, help="default: the table's file in benchmarks/results/")
    args = parser.parse_args()
    sheet = SHEETS[args.table]
    names = [piece.name for piece in sheet.pieces]
    if unknown := set(args.pieces or ()) - set(names):
        parser.error(f"no pieces {sorted(unknown)} in {args.table}; known: {', '.join(names)}")
    out = args.out or RESULTS / sheet.file
    before, kernels = (path and path.resolve() for path in (args.before, args.kernels))
    runner, ok = Runner(out, load(out), args.peer, before, kernels), True
    if args.list:
        for piece in sheet.pieces:
            state = "done" if runner.raw.get(piece.name, {}).get("complete") else f"about {piece.seconds:.0f} s"
            shared = f", and {START:.0f} s once for the process" if piece.process else ""
            print(f"{piece.name:<32}{state}{shared}{', optional' if piece.optional else ''}")
        return
    if not args.write:
        pieces = chosen(sheet, args.pieces, args.all, args.side)
        if missing(pieces, runner.raw, args.again):
            require_gpu()
            ok = run(pieces, runner, args.budget, args.again)
        else:
            print(f"nothing measured: {out} holds all of it already; --again measures again\n")
    raw = runner.raw
    for path in args.add:
        raw = load(path) | raw
    show(raw, Console(), sheet)
    if args.write:
        if args.add:  # one file holds what the document shows
            used = set().union(*(pieces_of(row) for row in [*sheet.rows, *sheet.extra]))
            write_json(out, {"pieces": {name: held for name, held in raw.items() if name in used}})
        DOCUMENT.write_text(between_markers(DOCUMENT.read_text(), sheet.marker, markdown(raw, sheet)))
    raise SystemExit(0 if ok else 1)


if __name__ == "__main__":
    main()
