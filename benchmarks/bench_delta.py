"""Times of Gated DeltaNet's kernels on one GPU: a layer's forward and backward over packed tokens, and a decode step.

    python benchmarks/bench_delta.py            # sizes of the 9B model; results/delta.json
    python benchmarks/bench_delta.py --tiny     # without a GPU: the definition at a small size, to see that it runs

"plain" is the backward pass in plain torch (`delta/backward.py`), which a CPU has; "conv" and "norm" are backward, too.
Three rounds, cases interleaved; medians and the spread. Decode steps have sequences at all phases of a chunk; their
share is that of the time in which an H200 would read the bytes of the design (46.7 KB a value head and token).
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from common import READ_TBPS, RESULTS, write_json

from jetrl.kernels.delta import backward as plain
from jetrl.kernels.delta.parts import HeadSizes, Parts, empty_state
from jetrl.types import StateRows

ROUNDS = 3
ROWS = "jetrl.kernels.delta.backward_rows"


def inputs(count: int, sizes: HeadSizes, device: str) -> tuple[torch.Tensor, ...]:
    gen = torch.Generator().manual_seed(count)
    hk, hv, dk, dv = sizes
    q, k = (torch.nn.functional.normalize(torch.randn(count, hk, dk, generator=gen), dim=-1) for _ in "qk")
    v, g = torch.randn(count, hv, dv, generator=gen), -torch.rand(count, hv, generator=gen)
    beta = torch.rand(count, hv, generator=gen)
    return tuple(t.to(device) for t in (q.bfloat16(), k.bfloat16(), v.bfloat16(), g, beta))


def floor_ms(batch: int, heads: int) -> float:
    """Milliseconds of a decode step in one layer, by its bytes alone."""
    return batch * heads * 46.7e3 / (READ_TBPS * 1e12) * 1e3


def timed(run: Callable[[], object], device: str, repeats: int) -> float:
    """Milliseconds a call."""
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats * 1e3


def row_cases(count: int, sizes: HeadSizes, device: str) -> dict[str, Callable[[], object]]:
    """Gradients of the convolution and of the gated norm: of the backend, and in plain torch."""
    hk, hv, dk, dv = sizes
    channels, gen = sum(sizes.columns), torch.Generator().manual_seed(1)
    wide = torch.randn(count, channels + hv * dv, generator=gen).bfloat16().to(device)
    x, gate = wide[:, :channels], wide[:, channels:].unflatten(-1, (hv, dv))
    heads = ((hk, dk), (hk, dk), (hv, dv))
    ups = tuple(torch.randn(count, *shape, generator=gen).bfloat16().to(device) for shape in heads)
    weight = torch.rand(channels, 4, generator=gen).bfloat16().to(device)
    parts = Parts(torch.tensor([0, count], dtype=torch.int32, device=device), (count,))
    norm = torch.ones(dv, dtype=torch.bfloat16, device=device)
    cases: dict[str, Callable[[], object]] = {}
    kernels: Any = plain if device == "cpu" else importlib.import_module(ROWS)
    for name, module in (("", kernels), ("plain-", plain)):
        cases[f"{name}conv {count}"] = lambda m=module: m.conv_heads_backward(ups, x, weight, sizes, parts)
        cases[f"{name}norm {count}"] = lambda m=module: m.gated_norm_backward(ups[2], ups[2], gate, norm, 1e-6)
    return cases


@torch.no_grad()
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true")
    tiny = parser.parse_args(arguments).tiny
    device = "cpu" if tiny else "cuda"
    if tiny:
        from jetrl.kernels.delta.backward import delta_rule_backward
        from jetrl.kernels.delta.reference import delta_rule
    else:
        from jetrl.kernels.delta.backward_triton import delta_rule_backward
        from jetrl.kernels.delta.triton import delta_rule
    sizes = HeadSizes(1, 2, 16, 16) if tiny else HeadSizes(16, 32, 128, 128)
    cases: dict[str, Callable[[], object]] = {}
    for length, number in ((64, 2),) if tiny else ((1024, 32), (4096, 8), (32768, 1)):
        x = inputs(length * number, sizes, device)
        ends = torch.arange(number + 1, dtype=torch.int32, device=device) * length
        parts = Parts(ends, (length,) * number)
        cases[f"packed {number} x {length}"] = lambda x=x, p=parts: delta_rule(*x, p, None)
        cases[f"backward {number} x {length}"] = lambda x=x, p=parts: delta_rule_backward(x[2], *x, p)
        cases[f"plain {number} x {length}"] = lambda x=x, p=parts: plain.delta_rule_backward(x[2], *x, p)
    cases |= row_cases(64 if tiny else 32768, sizes, device)
    for batch in (2,) if tiny else (64, 256):
        x, rows = inputs(batch, sizes, device), torch.arange(2, 2 + batch, device=device)
        kept = empty_state(2 + batch, sizes, torch.bfloat16, device)
        before = torch.arange(batch, dtype=torch.int32, device=device)  # all phases
        ends = torch.arange(batch + 1, dtype=torch.int32, device=device)
        parts = Parts(ends, (1,) * batch, before, StateRows(rows, rows))
        cases[f"decode {batch}"] = lambda x=x, p=parts, kept=kept: delta_rule(*x, p, kept)
    found: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(ROUNDS):
        for name, run in cases.items():
            found[name].append(timed(run, device, 3 if tiny or name.startswith("plain") else 20))
        if not tiny:
            name = torch.cuda.get_device_name()
            write_json(RESULTS / "delta.json", {"gpu": name, "heads": list(sizes), "ms": found})
    for case, times in found.items():
        middle, share = statistics.median(times), ""
        if case.startswith("decode") and not tiny:
            share = f"   {floor_ms(int(case.split()[1]), sizes.value_heads) / middle:.0%} of the bytes' time"
        print(f"{case:20s} {middle:9.3f} ms   {min(times):.3f} to {max(times):.3f}{share}")


if __name__ == "__main__":
    main()
