"""The portable kernels (`kernels = "triton"`) on a Hopper GPU, next to what is there for it, in one run.

    python benchmarks/bench_portable.py --peer "COMMAND"            # all; COMMAND as for bench_rollout.py
    python benchmarks/bench_portable.py --what rollout update --rounds 1
    python benchmarks/bench_portable.py --tiny                      # a CPU: only that the commands are put together

Qwen3-8B's shape with random weights. Rollouts: 64 sequences of 512 + 1024 tokens, BF16 next to the peer (vLLM in BF16),
FP8 with an FP8 cache next to the hopper backend. Updates: 32K tokens in BF16, masters and moments in BF16, next to
transformers with Liger's kernels and SDPA (`foreign_update.py`), and next to the hopper backend. Each measurement is a
process of its own, and variants take turns for `--rounds`. Compilation: the first rollout with an empty cache of
Triton's, all of which is time that a fresh machine waits.

Goals: 0.9 of the peer, 0.7 of hopper, 0.8 of transformers, 60 seconds. Writes `benchmarks/results/portable.json` after
every measurement.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench_rollout import PEER_MARK, peer_command, peer_row
from common import MARK, RESULTS, ROOT, ask, end_on_sigterm, environment, median, require_gpu, save, table

GOALS = {"rollout bf16": 0.9, "rollout fp8 kv8": 0.7, "update bf16": 0.8}
BASELINES = {"rollout bf16": "peer", "rollout fp8 kv8": "hopper", "update bf16": "transformers"}
LIMIT = 900.0  # seconds of one measurement


def commands(args: argparse.Namespace) -> list[tuple[str, str, list[str] | str]]:
    """What is measured, by whom, and the command: in the order of a round."""
    here, found = ROOT / "benchmarks", []
    layers = f"--layers={args.layers}"
    sizes = ["--batch", str(args.batch), f"--prompt={args.prompt}", f"--new={args.new}", layers]
    rollout = [sys.executable, str(here / "bench_rollout.py"), *sizes, "--one"]
    if "rollout" in args.what:
        found.append(("rollout bf16", "triton", [*rollout, "bf16", "--kernels=triton"]))
        if args.peer:
            command = peer_command(args.peer, "bf16", [args.batch], args.prompt, args.new, args.layers)
            found.append(("rollout bf16", "peer", command))
        found.append(("rollout bf16", "hopper", [*rollout, "bf16", "--kernels=hopper"]))
        for kernels in ("triton", "hopper"):
            found.append(("rollout fp8 kv8", kernels, [*rollout, "fp8 kv8", f"--kernels={kernels}"]))
    if "update" in args.what:
        update = [
            sys.executable, str(here / "bench_update.py"), "--one", "--precision=bf16", "--variants", "lean",
            "--rounds=1", layers, f"--tokens={args.tokens}", f"--length={args.length}",
        ]
        found += [("update bf16", kernels, [*update, f"--kernels={kernels}"]) for kernels in ("triton", "hopper")]
        found.append(("update bf16", "transformers", [
            sys.executable, str(here / "foreign_update.py"), "--one", "liger", "--attention", "sdpa", "--rounds=1",
            layers, f"--tokens={args.tokens}", f"--length={args.length}",
        ]))
    return found


def measured(what: str, who: str, command: list[str] | str) -> dict[str, Any]:
    """The row of one measurement, with its speed in tokens a second, or with the reason why there is none."""
    row: dict[str, Any] = {"what": what, "who": who}
    try:
        rows = list(ask(command, PEER_MARK if who == "peer" else MARK, LIMIT))
    except RuntimeError as error:
        return row | {"error": str(error)[-800:]}
    if what.startswith("rollout"):
        (one,) = rows if who != "peer" else [peer_row(rows[0], "bf16")]
        return row | one | {"speed": one["tokens/s"]}
    one = next((r for r in rows if "update_ms" in r), None)
    if one is None:
        return row | {"error": str(rows[-1].get("error", rows))[-800:]}
    return row | one | {"speed": one["tokens"] / one["update_ms"] * 1e3}


def compilation(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a short rollout's process with an empty cache, and with a full one: the difference is compilation."""
    command = [
        sys.executable, str(ROOT / "benchmarks" / "bench_rollout.py"), "--batch", str(args.batch), "--prompt=512",
        "--new=64", "--layers=2", "--one", "bf16", "--kernels=triton",
    ]
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):
            start = time.perf_counter()
            try:
                list(ask(command, MARK, LIMIT, {"TRITON_CACHE_DIR": folder}))
            except RuntimeError as error:
                return {"what": "compilation", "who": "triton", "error": str(error)[-800:]}
            seconds.append(time.perf_counter() - start)
    empty, full = seconds
    return {"what": "compilation", "who": "triton", "empty_s": empty, "full_s": full, "compile_s": empty - full}


def shown(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Medians and spread, each as a share of its baseline."""
    lines = []
    for what, who in dict.fromkeys((row["what"], row["who"]) for row in rows):
        of = [row for row in rows if (row["what"], row["who"]) == (what, who)]
        speeds = [row["speed"] for row in of if "speed" in row]
        compared = [row for row in rows if row["what"] == what and row["who"] == BASELINES.get(what)]
        base = [row["speed"] for row in compared if "speed" in row]
        line: dict[str, Any] = {"what": what, "who": who}
        if speeds:
            line |= {"tokens/s": median(speeds), "spread %": 100 * (max(speeds) / min(speeds) - 1)}
        if speeds and base:
            line["share"] = median(speeds) / median(base)
        if who == "triton":
            line["goal"] = GOALS.get(what, "")
        if compile_s := next((row["compile_s"] for row in of if "compile_s" in row), None):
            line |= {"compile s": compile_s, "goal": "60 s"}
        lines.append(line | {"error": next((row["error"][:60] for row in of if "error" in row), "")})
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = ["rollout", "update", "compilation"]
    parser.add_argument("--what", nargs="+", choices=every, default=every)
    parser.add_argument("--peer", default="", help="command of another engine, as for bench_rollout.py")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="print the commands, and measure nothing")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    end_on_sigterm()
    if args.tiny:
        for what, who, command in commands(args):
            print(f"{what}, {who}: {command if isinstance(command, str) else ' '.join(command)}")
        return
    require_gpu()
    rows: list[dict[str, Any]] = []

    def keep(row: dict[str, Any]) -> None:
        rows.append(row)
        save("portable", rows, args.out)
        print(table(shown(rows[-1:]), ["what", "who", "tokens/s", "compile s", "error"]), flush=True)

    if "compilation" in args.what:
        keep(compilation(args))
    for number in range(args.rounds):
        for what, who, command in commands(args):
            keep(measured(what, who, command) | {"round": number})
    print(environment())
    print(table(shown(rows), ["what", "who", "tokens/s", "spread %", "share", "goal", "compile s", "error"]))


if __name__ == "__main__":
    main()
