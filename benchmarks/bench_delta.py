"""Times of Gated DeltaNet's kernels on one GPU: a layer's forward and backward over packed tokens, and a decode step.

    python benchmarks/bench_delta.py            # sizes of the 9B model; results/delta.json
    python benchmarks/bench_delta.py --tiny     # without a GPU: the definition at a small size, to see that it runs

"plain" is the backward pass in plain torch (`delta/backward.py`), which a CPU has; "conv" and "norm" are backward, too.
"general" is the form of the rule that the others are compared with. Three rounds, cases interleaved; medians and the
spread. Decode steps have sequences at all phases of a chunk, and are the times of one of 20 layers in a CUDA graph:
"layer decode" has all between the projections (convolution, gates, rule, norm). Shares are those of the time in which
an H200 would read the bytes of the design (46.7 KB a value head and token).
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import READ_TBPS, RESULTS, write_json

from jetrl.kernels.delta import backward as plain
from jetrl.kernels.delta.parts import HeadSizes, Parts, empty_state
from jetrl.types import StateRows

ROUNDS, LAYERS = 3, 20
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


def layer_of(batch: int, sizes: HeadSizes, kernels: Any, device: str, seed: int) -> tuple[Callable[[], object], ...]:
    """A decode step in one layer, with sequences at all phases of a chunk and a state of its own: the rule, the rule by
    the general form if there is one, and all between the projections."""
    hk, hv, dk, dv = sizes
    channels, gen = sum(sizes.columns), torch.Generator().manual_seed(seed)
    x, rows = inputs(batch, sizes, device), torch.arange(2, 2 + batch, device=device)
    kept = empty_state(2 + batch, sizes, torch.bfloat16, device)
    before = torch.arange(batch, dtype=torch.int32, device=device)
    ends = torch.arange(batch + 1, dtype=torch.int32, device=device)
    parts = Parts(ends, (1,) * batch, before, StateRows(rows, rows))
    wide = torch.randn(batch, channels + hv * dv, generator=gen).bfloat16().to(device)
    logits, gates = torch.randn(batch, 2 * hv, generator=gen).to(device), torch.zeros(2, hv, device=device)
    weight = torch.rand(channels, 4, generator=gen).bfloat16().to(device)
    conv = torch.zeros(2 + batch, 3, channels, dtype=torch.bfloat16, device=device)
    norm = torch.ones(dv, dtype=torch.bfloat16, device=device)

    def chain() -> object:
        q, k, v = kernels.conv_heads(wide[:, :channels], weight, sizes, parts, conv)
        g, beta = kernels.delta_gates(logits, gates[0], gates[1])
        o = kernels.delta_rule(q, k, v, g, beta, parts, kept)
        return kernels.gated_norm(o, wide[:, channels:].unflatten(-1, (hv, dv)), norm, 1e-6)

    general = getattr(kernels, "general_rule", kernels.delta_rule)
    return lambda: kernels.delta_rule(*x, parts, kept), lambda: general(*x, parts, kept), chain


def captured(layers: list[Callable[[], object]], device: str) -> Callable[[], object]:
    """All of them as one CUDA graph, as a decode step is, so that no launch waits for the host."""
    def every() -> None:
        for layer in layers:
            layer()

    every()
    if device == "cpu":
        return every
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        every()
    return lambda: (graph.replay(), layers)  # which hold what the graph reads


@torch.no_grad()
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", default="", help="cases whose names have this part")
    parser.add_argument("--out", type=Path, help="where delta.json goes (benchmarks/results; with --tiny, nowhere)")
    args = parser.parse_args(arguments)
    tiny, device = args.tiny, "cpu" if args.tiny else "cuda"
    kernels: Any = importlib.import_module(f"jetrl.kernels.delta.{'reference' if tiny else 'triton'}")
    backward: Any = plain if tiny else importlib.import_module("jetrl.kernels.delta.backward_triton")
    sizes = HeadSizes(1, 2, 16, 16) if tiny else HeadSizes(16, 32, 128, 128)
    cases: dict[str, Callable[[], object]] = {}
    for length, number in ((64, 2),) if tiny else ((1024, 32), (4096, 8), (32768, 1)):
        x = inputs(length * number, sizes, device)
        ends = torch.arange(number + 1, dtype=torch.int32, device=device) * length
        parts = Parts(ends, (length,) * number)
        cases[f"packed {number} x {length}"] = lambda x=x, p=parts: kernels.delta_rule(*x, p, None)
        if not tiny and number > 1:
            cases[f"general {number} x {length}"] = lambda x=x, p=parts: kernels.general_rule(*x, p, None)
        cases[f"backward {number} x {length}"] = lambda x=x, p=parts: backward.delta_rule_backward(x[2], *x, p)
        cases[f"plain {number} x {length}"] = lambda x=x, p=parts: plain.delta_rule_backward(x[2], *x, p)
    cases |= row_cases(64 if tiny else 32768, sizes, device)
    for batch in (2,) if tiny else (64, 256):
        kinds = [f"{kind} {batch}" for kind in ("decode", "general decode", "layer decode")]
        if any(args.only in kind for kind in kinds):
            layers = [layer_of(batch, sizes, kernels, device, seed) for seed in range(LAYERS)]
            for kind, runs in zip(kinds, zip(*layers, strict=True), strict=True):
                cases[kind] = captured(list(runs), device)
    chosen = {name: run for name, run in cases.items() if args.only in name}
    if not chosen:
        raise SystemExit(f"no case has {args.only!r} in its name; there are: {', '.join(cases)}")
    cases = chosen
    found: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(ROUNDS):
        for name, run in cases.items():
            of = LAYERS if "decode" in name else 1
            found[name].append(timed(run, device, 3 if tiny or name.startswith("plain") else 20) / of)
        if args.out or not tiny:
            gpu = None if tiny else torch.cuda.get_device_name()
            path = (args.out or RESULTS) / "delta.json"
            before = json.loads(path.read_text())["ms"] if args.only and path.exists() else {}
            write_json(path, {"gpu": gpu, "heads": list(sizes), "layers": LAYERS, "ms": before | found})
    for case, times in found.items():
        middle, share = statistics.median(times), ""
        if "decode" in case and not tiny:
            share = f"   {floor_ms(int(case.split()[-1]), sizes.value_heads) / middle:.0%} of the bytes' time"
        print(f"{case:22s} {middle:9.4f} ms   {min(times):.4f} to {max(times):.4f}{share}")


if __name__ == "__main__":
    main()
