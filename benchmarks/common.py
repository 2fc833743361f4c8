"""What all benchmarks share: interleaved timing with a cold L2, processes that report rows, the environment, tables
and JSON.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from jetrl.parity.certificate import NoText as NoText
from jetrl.report.environment import git_commit
from jetrl.spec import SHAPES
from jetrl.types import Completion

COPY_TBPS = 4.29  # device copy of one H200, bytes read and written
READ_TBPS = 4.47  # reading alone
ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
SPEC = SHAPES["qwen3-8b"]  # the shape of the benchmarks of whole runs
MARK = "BENCH "  # begins each line of JSON that a measuring process prints


def bits(of: Completion) -> tuple[bytes, bytes]:
    """What two engines, or two settings of one, must draw alike."""
    return of.tokens.tobytes(), of.logprobs.tobytes()


def split_variant(variant: str) -> tuple[str, str, str]:
    """Split `fp8`, `fp8 kv8` or `fp8 kv8 nonexact` into precision, KV cache ("" or "fp8"), and the rest."""
    precision, *words = variant.split(" ")
    kv_cache = "fp8" if words[:1] == ["kv8"] else ""
    return precision, kv_cache, " ".join(words[1:] if kv_cache else words)


def emit(row: dict[str, Any]) -> None:
    """Report a row to the parent process."""
    print(MARK + json.dumps(row), flush=True)


def end_on_sigterm() -> None:
    """A program that `timeout` ends leaves no process of `ask` behind."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def ask(
    command: list[str] | str, mark: str = MARK, limit: float | None = None, env: dict[str, str] | None = None,
    say: Callable[[str], object] | None = None,
) -> Iterator[dict[str, Any]]:
    """The rows that a new process prints after `mark`, each as soon as it is there; `say` gets its other lines. `env`
    is added to this process's.

    RuntimeError, with the end of its output, if the process fails or has no row. After `limit` seconds it is killed,
    with all processes that it has started.
    """
    count, tail = 0, deque[str](maxlen=15)
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, shell=isinstance(command, str),
            start_new_session=limit is not None, env=os.environ | (env or {}),
        )
        timer = None if limit is None else threading.Timer(limit, os.killpg, (process.pid, signal.SIGKILL))
        assert process.stdout is not None
        try:
            if timer is not None:
                timer.start()
            for line in process.stdout:
                if line.startswith(mark):
                    count += 1
                    yield json.loads(line[len(mark) :])
                else:
                    tail.append(line)
                    if say is not None:
                        say(line.rstrip())
            status = process.wait()
        finally:
            if timer is not None:
                timer.cancel()
            process.kill()  # if the caller stopped reading; has no effect on a process that has ended
            process.wait()
        if status or not count:
            errors.seek(0)
            text = "".join(tail) + errors.read()[-3000:]
            late = "" if limit is None else f" (its limit is {limit:g} s)"
            raise RuntimeError(f"{command}: status {status} after {count} rows{late}\n{text}")


def require_gpu() -> None:
    """Exit with a message if a benchmark cannot run."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        raise SystemExit("this benchmark needs a Hopper GPU (H100, H200) with jetrl[hopper]; none is here")


def interleaved(variants: dict[str, Callable[[], Any]], rounds: int = 30, warmup: int = 3) -> dict[str, list[float]]:
    """Microseconds of each call, by events. Variants take turns, so drift affects all of them; each has a cold L2.

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


def timed(call: Callable[[], Any]) -> tuple[float, float]:
    """Milliseconds of a call until the device is done with it, and the peak of allocated memory in GiB.

    Without a GPU the peak is 0.
    """
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if on_gpu:
        torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3, torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def profiled(call: Callable[[], Any]) -> None:
    """Print each kernel's calls and microseconds in one call, the longest first."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiling:
        call()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = {}
    for event in profiling.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found.setdefault(event.name[:110], []).append(event.time_range.elapsed_us())
    for name, us in sorted(found.items(), key=lambda item: -sum(item[1])):
        print(f"{sum(us):10.0f} us in {len(us):4d} calls, {median(us):8.1f} each  {name}")


def quantiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {f"p{p}": ordered[min(len(ordered) - 1, len(ordered) * p // 100)] for p in (10, 50, 90)}


def host_us(fn: Callable[[], Any], repeats: int = 50) -> float:
    """Microseconds that the host needs to issue one call (the device falls behind and is waited for at the end)."""
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
    """Where and when: GPU, versions, date, commit. Asks the GPU, so call it in a process that measures."""
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none", "torch": str(torch.__version__),
        "cuda": torch.version.cuda, "date": datetime.now(UTC).isoformat(timespec="seconds"), "commit": commit_name(),
    }


def commit_name(package: Path = ROOT / "jetrl") -> str:
    """The short commit, with `+changes` if the checkout has any; "unknown" outside a checkout."""
    commit, dirty = git_commit(package)
    return "unknown" if commit is None else commit[:10] + ("+changes" if dirty else "")


def write_json(path: Path, value: Any) -> None:
    """Write whole or not at all: if the program is stopped, the last complete state is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value, indent=1) + "\n")
    part.replace(path)


def between_markers(text: str, name: str, content: str) -> str:
    """`text` with everything between `<!-- name:begin -->` and `<!-- name:end -->` replaced."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"the text must hold {begin} and, after it, {end}, once each")
    return text[: text.index(begin) + len(begin)] + f"\n{content.strip()}\n" + text[text.index(end) :]


def save(name: str, rows: list[dict[str, Any]], folder: Path = RESULTS) -> Path:
    path = folder / f"{name}.json"
    write_json(path, {"environment": environment(), "rows": rows})
    return path


def saved_rows(path: Path) -> list[dict[str, Any]]:
    """The rows that `save` has written to a file; none where there is no file."""
    return json.loads(path.read_text())["rows"] if path.is_file() else []


def table(rows: list[dict[str, Any]], columns: list[str]) -> str:
    def cell(value: Any) -> str:
        return f"{value:.3g}" if isinstance(value, float) else str(value)

    cells = [[cell(r.get(c, "")) for c in columns] for r in rows]
    widths = [max(len(c), *(len(row[i]) for row in cells)) for i, c in enumerate(columns)]
    lines = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in [columns, *cells]]
    return "\n".join(lines)
