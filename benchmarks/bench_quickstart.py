"""Time and peak memory of the quickstart by phase, engine overhead, and the reference GEMM against float32.

`python benchmarks/bench_quickstart.py [key=value ...]`: one whole run of the quickstart in a temporary
folder, its warm start made again; then the GEMMs interleaved with their baseline. Prints and writes
benchmarks/results/quickstart.json.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import torch

from jetrl.config import load_config, resolve
from jetrl.engine.engine import PagedEngine
from jetrl.kernels import reference as ref
from jetrl.report.environment import cpu_name, git_commit
from jetrl.report.recorder import read_metrics
from jetrl.report.run import PARITY_KEY
from jetrl.run import gather
from jetrl.run.loop import Clock, StopRequest, run

ROOT = Path(__file__).parents[1]
SHAPES = [(128, 320, 192), (128, 896, 192), (128, 192, 448), (4096, 896, 192), (4096, 192, 448)]


def resident_mib() -> float:
    """Resident memory of this process now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


class Watch:
    """Samples resident memory every 10 ms and assigns it to the current phase; counts the engine's own time."""

    def __init__(self) -> None:
        self.peak: dict[str, float] = defaultdict(float)
        self.phase, self.running = "set-up", True
        self.seconds = self.model = 0.0
        self.thread = threading.Thread(target=self._sample, daemon=True)

    def _sample(self) -> None:
        while self.running:
            self.peak[self.phase] = max(self.peak[self.phase], resident_mib())
            time.sleep(0.01)

    def __enter__(self) -> Watch:
        enter, rolled = Clock.__call__, gather.roll_out

        def watched_phase(clock: Clock, phase: str, total: int | None = None):  # type: ignore[no-untyped-def]
            self.phase = phase
            return enter(clock, phase, total)

        def watched_rollout(engine: PagedEngine, *args, **kwargs):  # type: ignore[no-untyped-def]
            result = rolled(engine, *args, **kwargs)
            assert engine.stats is not None
            self.seconds += engine.stats.seconds
            self.model += engine.stats.model_seconds
            return result

        Clock.__call__, gather.roll_out = watched_phase, watched_rollout  # type: ignore[method-assign,assignment]
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.running = False
        self.thread.join()


def quickstart(overrides: list[str]) -> dict[str, object]:
    """One run; seconds and peak MiB by phase."""
    with tempfile.TemporaryDirectory() as folder, Watch() as watch:
        config = load_config(ROOT / "jetrl" / "recipes" / "quickstart.toml", [*overrides, f"output_dir={folder}",
                                                                     f"sft.cache_dir={folder}/sft"])
        run_dir, start = Path(folder) / config.name, time.perf_counter()
        run(resolve(config, cuda_available=False), run_dir, sys.argv, StopRequest())
        total, rows = time.perf_counter() - start, read_metrics(run_dir)
    seconds: dict[str, float] = defaultdict(float)
    for row in rows:
        for key, value in row.items():
            if key.startswith("time/") and key != "time/step":
                seconds[key[5:]] += value
    accuracy = [v for r in rows for k, v in r.items() if k.startswith("eval/") and "/avg@" in k]
    return {
        "seconds": total, "seconds_by_phase": dict(seconds), "peak_mib": max(watch.peak.values()),
        "peak_mib_by_phase": dict(watch.peak), "engine_overhead_share": 1 - watch.model / watch.seconds,
        "accuracy": [accuracy[0], accuracy[-1]],
        "parity_max": max(r[PARITY_KEY] for r in rows if PARITY_KEY in r), "steps": len(rows) - 1,
    }


def gemm_ratios(repeats: int = 25) -> list[dict[str, object]]:
    """Median microseconds of a float32 matmul, the FP8 and the BF16 reference GEMM (weights prepared), interleaved."""
    rows: list[dict[str, object]] = []
    for m, n, k in SHAPES:
        x, w = torch.randn(m, k), torch.randn(n, k)
        xq, wq = ref.quantize_1x128(x), ref.PreparedFP8(ref.quantize_128x128(w))
        xb, wb = x.bfloat16(), ref.PreparedBF16(w.bfloat16())
        cases: dict[str, Callable[[], object]] = {
            "float32": lambda x=x, w=w: x @ w.T, "fp8": lambda a=xq, b=wq: ref.fp8_gemm(a, b),
            "bf16": lambda a=xb, b=wb: ref.bf16_gemm(a, b),
        }
        times: dict[str, list[float]] = {name: [] for name in cases}
        for i in range(repeats + 5):
            for name, case in cases.items():
                start = time.perf_counter()
                case()
                if i >= 5:
                    times[name].append((time.perf_counter() - start) * 1e6)
        us = {name: statistics.median(values) for name, values in times.items()}
        rows.append({"M": m, "N": n, "K": k, "us": us, "fp8_over_float32": us["fp8"] / us["float32"],
                     "bf16_over_float32": us["bf16"] / us["float32"]})
    return rows


def main() -> None:
    result = {"run": quickstart(sys.argv[1:]), "gemm": gemm_ratios()}
    commit, _ = git_commit(ROOT / "jetrl")
    result["environment"] = {
        "cpu": cpu_name(), "threads": torch.get_num_threads(), "torch": torch.__version__, "commit": commit,
        "python": platform.python_version(), "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    (ROOT / "benchmarks" / "results" / "quickstart.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
