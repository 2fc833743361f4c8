"""What every benchmark shares: interleaved timing with a cold L2, the environment, tables and JSON."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

COPY_TBPS = 4.29  # device copy of one H200, bytes read and written
RESULTS = Path(__file__).parent / "results"


def interleaved(variants: dict[str, Callable[[], Any]], rounds: int = 30, warmup: int = 3) -> dict[str, list[float]]:
    """Microseconds of each call, by events. Variants take turns, so that drifts hit all of them, each with a cold L2.

    The flush keeps the device busy while the host issues the launches: host time stays out unless it is very long.
    """
    flush = torch.empty(1 << 29, dtype=torch.uint8, device="cuda")
    for fn in variants.values():
        for _ in range(warmup):
            fn()
    torch.cuda.synchronize()
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, fn in variants.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            flush.zero_()
            start.record()
            fn()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) * 1e3)
    return times


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def quantiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {f"p{p}": ordered[min(len(ordered) - 1, len(ordered) * p // 100)] for p in (10, 50, 90)}


def host_us(fn: Callable[[], Any], repeats: int = 50) -> float:
    """Microseconds that the host spends to issue one call (the device is left behind, then waited for)."""
    for _ in range(3):
        fn()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        fn()
    spent = time.perf_counter() - start
    torch.cuda.synchronize()
    return spent / repeats * 1e6


def graphed(fn: Callable[[], Any]) -> Callable[[], None]:
    """`fn` as a CUDA graph: its device time without the host's."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            fn()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fn()
    return graph.replay


def environment() -> dict[str, Any]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda,
        "date": datetime.now(UTC).isoformat(timespec="seconds"), "commit": commit.stdout.strip() or "unknown",
    }  # fmt: skip


def save(name: str, rows: list[dict[str, Any]], folder: Path = RESULTS) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")
    return path


def table(rows: list[dict[str, Any]], columns: list[str]) -> str:
    def cell(value: Any) -> str:
        return f"{value:.3g}" if isinstance(value, float) else str(value)

    cells = [[cell(r.get(c, "")) for c in columns] for r in rows]
    widths = [max(len(c), *(len(row[i]) for row in cells)) for i, c in enumerate(columns)]
    lines = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in [columns, *cells]]
    return "\n".join(lines)
