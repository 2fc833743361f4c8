"""The quickstart in a shortened form, for CI: `python tests/quickstart_short.py OUTDIR`.

Fails unless every step has a parity of exactly zero and held-out accuracy rises. Ends with `5 passed, 0 failed`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

RECIPE = Path(__file__).parents[1] / "jetrl" / "recipes" / "quickstart.toml"
STEPS = 16  # of the recipe's RL steps
OVERRIDES = (f"train.steps={STEPS}", f"eval.eval_interval={STEPS}", f"checkpoint.save_interval={STEPS}")
MIN_RISE = 0.3  # of held-out accuracy, a share of `task.num_eval` problems


def train(out: Path) -> tuple[int, Path]:
    """Run the command line as a user would; the warm start is made here and not taken from a cache."""
    overrides = [*OVERRIDES, f"output_dir={out}", f"sft.cache_dir={out / 'sft'}", "name=quickstart-short"]
    command = [sys.executable, "-m", "jetrl.cli", "train", str(RECIPE), *overrides]
    return subprocess.run(command, env={**os.environ, "PYTHONUNBUFFERED": "1"}).returncode, out / "quickstart-short"


def checks(status: int, run_dir: Path) -> list[tuple[str, bool, str]]:
    """(what must hold, whether it does, the numbers)."""
    found = [("jetrl train ends with status 0", status == 0, f"status {status}")]
    metrics = run_dir / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.is_file() else []
    found.append((f"{STEPS} steps", [row["step"] for row in rows] == list(range(STEPS + 1)), f"{len(rows) - 1} steps"))
    parity = [row["parity/logprob_abs_diff_max"] for row in rows if "parity/logprob_abs_diff_max" in row]
    zero = len(parity) >= STEPS // 2 and all(value == 0.0 for value in parity)
    found.append(("parity is exactly 0 in every step", zero, f"max {max(parity, default=None)}, {len(parity)} steps"))
    accuracy = [v for row in rows for k, v in row.items() if k.startswith("eval/") and "/avg@" in k]
    rises = len(accuracy) >= 2 and accuracy[-1] >= accuracy[0] + MIN_RISE
    found.append(("held-out accuracy rises", rises, " -> ".join(f"{value:.3f}" for value in accuracy)))
    found.append(("report.html is there", (run_dir / "report.html").is_file(), str(run_dir / "report.html")))
    return found


def main() -> int:
    """Exit status: the number of checks that failed."""
    if len(sys.argv) != 2:
        sys.exit("usage: python tests/quickstart_short.py OUTDIR")
    results = checks(*train(Path(sys.argv[1]).absolute()))
    for what, good, values in results:
        print(f"{'ok' if good else 'FAILED'}: {what} ({values})")
    failed = sum(not good for _, good, _ in results)
    print(f"{len(results) - failed} passed, {failed} failed")
    return failed


if __name__ == "__main__":
    sys.exit(main())
