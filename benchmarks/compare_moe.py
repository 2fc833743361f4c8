"""What precision does to routing: the flows of `jetrl compare quickstart_moe`, on a CPU, from the same weights.

    python benchmarks/compare_moe.py                       # runs them, about 15 minutes with one thread
    python benchmarks/compare_moe.py --runs runs           # reads runs/quickstart_moe-FLOW, which are there already

For each flow: held-out accuracy, the largest log-prob gap, and the share of (token, layer) pairs whose experts are
others in the rollout's flow than in training's. Prints a Markdown table and writes `compare_moe.json`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import RESULTS, environment, save

from jetrl.report.run import PARITY_KEY, ROUTING_KEY, headline, load_runs

RECIPE, FLOWS = "quickstart_moe", ("bf16", "fp8", "fp8_rollout")


def row_of(folder: Path) -> dict[str, Any]:
    (run,) = load_runs([folder])
    told, routing, gaps = headline(run), run.series(ROUTING_KEY)[1], run.series(PARITY_KEY)[1]
    accuracy = [] if told.accuracy_key is None else run.series(told.accuracy_key)
    return {
        "flow": run.precision, "steps": told.steps, "accuracy": dict(zip(*accuracy, strict=True)) if accuracy else {},
        "largest gap": told.parity_max, "steps with a gap": told.parity_nonzero_steps, "gaps": gaps,
        "routing different": told.routing_mean, "routing different, by step": routing, "seconds": told.seconds,
    }


def markdown(rows: list[dict[str, Any]]) -> str:
    lines = ["| flow | held-out accuracy | best | largest log-prob gap | routers with other experts, by step |",
             "|---|--:|--:|--:|--:|"]
    for row in rows:
        score, routed = list(row["accuracy"].values()), row["routing different, by step"]
        shares = "0" if not any(routed) else f"{row['routing different']:.2%} ({min(routed):.2%} to {max(routed):.2%})"
        gap = "0" if row["largest gap"] == 0 else f"{row['largest gap']:.2f}"
        lines.append(f"| `{row['flow']}` | {score[0]:.3f} -> {score[-1]:.3f} | {max(score):.3f} | {gap} | {shares} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="settings, such as train.steps=20")
    parser.add_argument("--runs", type=Path, help="the output_dir of a comparison that has ended")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = args.runs or Path(folder)
        if args.runs is None:
            command = [sys.executable, "-m", "jetrl.cli", "compare", RECIPE, "train.compare_routing=true"]
            subprocess.run([*command, f"output_dir={runs}", *args.overrides], check=True)
        rows = [row_of(runs / f"{RECIPE}-{flow}") | {"environment": environment()} for flow in FLOWS]
    save("compare_moe", rows, args.out)
    print(markdown(rows))


if __name__ == "__main__":
    main()
