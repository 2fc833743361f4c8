"""Decode attention where rollouts have their tail and their groups, at the sizes of Qwen3-8B, and the step around it.

    python benchmarks/bench_tail.py [--quick] [PART ...]   # keys, groups, step; writes results/tail_<part>.json

- keys: few sequences with many keys: the kernel that walks through them against those that take them in parallel.
- groups: samples of a prompt whose shared pages are read once, against each for itself.
- step: a whole decode step of one sequence, both ways, with the time by kind of kernel. Times of single kernels come
  from a graph in which none starts before the one before has ended (no PDL): elsewhere they include waiting.

Calls stand in one CUDA graph, each on pages of its own, so that launches cost what they do in a run and the L2 cache is
cold (1 GB for `keys`); variants take turns. `--quick` takes few sizes, and FP8 alone for `step`. Bits are compared
first. A part that fails is reported, the others go on; the status tells.
"""

from __future__ import annotations

import argparse
import re
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import READ_TBPS, RESULTS, SPEC, median, require_gpu, save, table
from torch import Tensor

from jetrl.engine.sharing import chunk_size, find_sharing
from jetrl.engine.state_pool import StatePool
from jetrl.kernels.attention import choice
from jetrl.kernels.attention import decode as walk
from jetrl.kernels.attention import decode_split as split
from jetrl.kernels.attention.state import SharedPages
from jetrl.kernels.launch import LAUNCH
from jetrl.kernels.logprob.ops import draw
from jetrl.parity.model_under_test import random_model
from jetrl.types import ForwardBatch, LayerCache, PagedPlan

CUDA = "cuda"
N, G, H, PAGE, LAYERS = 32, 8, 128, 128, 36
SHAPES = {"16x5": split.Shape(16, 5), "32x5": split.Shape(32, 5), "32x3": split.Shape(32, 3), "chosen": None}
Rows = list[dict[str, Any]]


def pages_of(count: int, fp8: bool) -> LayerCache:
    """`count` random pages."""
    keys, values = (torch.empty(count, PAGE, G, H, device=CUDA, dtype=torch.bfloat16) for _ in "kv")
    for x in (keys, values):
        x.normal_()
    if not fp8:
        return LayerCache(keys, values)
    scales = torch.full((count, G, PAGE, 2), 0.25, device=CUDA, dtype=torch.bfloat16)
    return LayerCache(keys.mul_(4).to(torch.float8_e4m3fn), values.mul_(4).to(torch.float8_e4m3fn), scales)


def key_bytes(fp8: bool) -> int:
    return 2 * G * (H + 2 if fp8 else 2 * H)


def captured(calls: list[Callable[[], Any]]) -> torch.cuda.CUDAGraph:
    """The calls one after another; the first has run before."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def microseconds(graphs: dict[str, torch.cuda.CUDAGraph], calls: int, rounds: int = 5) -> dict[str, float]:
    """Median time of a call in each graph; they take turns."""
    times = defaultdict(list)
    for _ in range(rounds + 1):
        for name, graph in graphs.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) * 1e3 / calls)
    return {name: median(values[1:]) for name, values in times.items()}


@contextmanager
def one_by_one() -> Iterator[None]:
    """Kernels that are captured within start when the one before has ended, so that their times add up."""
    import deep_gemm

    held, LAUNCH["launch_pdl"] = LAUNCH["launch_pdl"], False
    deep_gemm.set_pdl(False)
    try:
        yield
    finally:
        LAUNCH["launch_pdl"] = held
        deep_gemm.set_pdl(True)


def by_kernel(graph: torch.cuda.CUDAGraph) -> dict[str, tuple[float, int]]:
    """Microseconds and launches of each kernel in a replay."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        graph.replay()
        torch.cuda.synchronize()
    return {e.key: (e.self_device_time_total, e.count) for e in profiled.key_averages() if e.self_device_time_total}


# ---- few sequences, many keys ---------------------------------------------------------------------------------------


def keys(quick: bool) -> Rows:
    rows: Rows = []
    for fp8 in (True, False):
        pool = 4096
        cache = pages_of(pool, fp8)
        for batch in (1, 4, 16) if quick else (1, 2, 4, 8, 16):
            for length in (10_000, 32_768) if quick else (2048, 10_000, 32_768):
                rows.append(_tail_row(cache, pool, batch, length, fp8, quick))
        del cache
        torch.cuda.empty_cache()
    return rows


def _tail_row(cache: LayerCache, pool: int, batch: int, length: int, fp8: bool, quick: bool) -> dict[str, Any]:
    width = 1 << (-(-length // PAGE) - 1).bit_length()  # as a decode graph has it
    places = torch.arange(batch * width, dtype=torch.int32, device=CUDA).view(batch, width)
    tables = [(places + i * batch * width) % pool for i in range(LAYERS)]
    lengths = torch.full((batch,), length, dtype=torch.int32, device=CUDA)
    q = torch.randn(batch, N, H, device=CUDA, dtype=torch.bfloat16)
    shapes = {"chosen": None} if quick else SHAPES
    variants: dict[str, Callable[[Tensor], Any]] = {
        "walk": lambda t: walk.decode(q, cache, t, lengths, H**-0.5),
        **{n: lambda t, s=s: split.decode(q, cache, t, lengths, H**-0.5, shape=s) for n, s in shapes.items()},
    }
    want = variants["walk"](tables[0])
    wrong = [name for name, call in variants.items() if not torch.equal(call(tables[0]), want)]
    graphs = {name: captured([lambda t=t, c=c: c(t) for t in tables]) for name, c in variants.items()}
    times = microseconds(graphs, LAYERS)
    best = min(shapes, key=lambda name: times[name])
    floor = batch * length * key_bytes(fp8) / READ_TBPS / 1e6
    row = {"kv": "fp8" if fp8 else "bf16", "batch": batch, "keys": length, **times, "best": best, "floor": floor}
    row |= {"share": floor / times[best], "bits": "WRONG " + " ".join(wrong) if wrong else "equal"}
    if batch == 1 and not quick:
        with one_by_one():
            graph = captured([lambda t=t: variants[best](t) for t in tables])
        parts = by_kernel(graph)
        row["parts"] = {k.strip("_"): round(us / LAYERS, 1) for k, (us, _) in parts.items() if "kernel" in k}
    return row


def advice(rows: Rows) -> str:
    """What `kernels.attention.choice.SPLIT_FROM` should hold."""
    lines = []
    for batch in sorted({r["batch"] for r in rows}):
        mine = [r for r in rows if r["batch"] == batch]
        better = {r["keys"] for r in mine} - {r["keys"] for r in mine if r[r["best"]] > r["walk"]}
        lines.append(f"{batch * G} programs: parallel is faster in both formats at {sorted(better)}")
    return "\n".join(lines)


# ---- groups ---------------------------------------------------------------------------------------------------------


def groups(quick: bool) -> Rows:
    rows: Rows = []
    for fp8 in (True, False):
        pool = 16_384 if fp8 else 10_240
        cache = pages_of(pool, fp8)
        for batch in (64, 256):
            for size in (16,) if quick else (8, 16):
                for prompt in (512, 4096) if quick else (512, 2048, 4096, 8192):
                    rows.append(_group_row(cache, pool, batch, size, prompt, fp8))
        del cache
        torch.cuda.empty_cache()
    return rows


def _group_row(cache: LayerCache, pool: int, batch: int, size: int, prompt: int, fp8: bool) -> dict[str, Any]:
    rng, first = np.random.default_rng(batch + prompt), prompt // PAGE
    own = rng.integers(100, 924, batch)  # new keys
    width = first + 8
    pages = np.zeros((batch, width), dtype=np.int32)
    count = 0
    for b in range(batch):
        if b % size == 0:
            shared, count = np.arange(count, count + first), count + first
        pages[b, :first] = shared
        pages[b, first:] = np.arange(count, count + 8)
        count += 8
    layers = 12
    order = rng.permutation(pool).astype(np.int32)  # a layer's pages lie where they happen to
    tables = [torch.from_numpy(order[(pages + i * count) % pool]).to(CUDA) for i in range(layers)]
    lengths = torch.from_numpy((prompt + own).astype(np.int32)).to(CUDA)
    q = torch.randn(batch, N, H, device=CUDA, dtype=torch.bfloat16)
    found = find_sharing(pages, prompt + own - 1, PAGE, chunk_size(N // G))
    plan = SharedPages(*(torch.from_numpy(x).to(CUDA) for x in found.padded(batch, found.room)))
    out = torch.empty_like(q)
    variants: dict[str, Callable[[Tensor], Any]] = {
        "apart": lambda t: walk.decode(q, cache, t, lengths, H**-0.5),
        "merged": lambda t: choice.merged(q, cache, t, lengths, plan, H**-0.5, out, None, False),
    }
    want = variants["apart"](tables[0])
    variants["merged"](tables[0])
    equal = torch.equal(out, want)
    graphs = {name: captured([lambda t=t, c=c: c(t) for t in tables]) for name, c in variants.items()}
    times, bytes_each = microseconds(graphs, layers), key_bytes(fp8)
    once = (float(own.sum()) + batch // size * prompt) * bytes_each / READ_TBPS / 1e6
    parts = {("shared" if "shared" in k else "own"): round(us / layers, 1)
             for k, (us, _) in by_kernel(graphs["merged"]).items() if "kernel" in k}
    return {
        "kv": "fp8" if fp8 else "bf16", "batch": batch, "group": size, "prompt": prompt, **times,
        "gain": times["apart"] / times["merged"], "floor": once, "share": once / times["merged"], **parts,
        "pays": found.pays(bytes_each), "bits": "equal" if equal else "WRONG",
    }


# ---- a whole step ---------------------------------------------------------------------------------------------------

KINDS = (
    ("attention", r"_decode_kernel|_scores_kernel|_weights_kernel|_chain_kernel|_shared_kernel"),
    ("gemm", r"gemm|nvjet|cutlass|sm90_|_few_rows_kernel"),
    ("short", r"kernel"),
)


def step(quick: bool) -> Rows:
    rows: Rows = []
    for precision, kv in (("fp8", "fp8"),) if quick else (("fp8", "fp8"), ("bf16", "")):
        model = random_model("qwen3-8b", precision, CUDA, kv_cache=kv, masters=False)
        for length in (10_000, 32_768):
            rows += _step_rows(model, precision, length)
        del model
        torch.cuda.empty_cache()
    return rows


def decode_batch(model: Any, rows: int, length: int) -> ForwardBatch:
    """A decode step of `rows` sequences that then have `length` tokens each, over a cache of random keys and values."""
    width = 1 << (-(-length // PAGE) - 1).bit_length()
    cache = StatePool(model.spec, rows * width, PAGE, torch.bfloat16, torch.device(CUDA), model.recipe.kv_cache)
    for x in (cache.keys, cache.values):
        for layer in x:
            layer.copy_(torch.randn(layer.shape, device=CUDA).to(x.dtype))
    if cache.scales is not None:
        cache.scales.fill_(1.0)
    table = torch.arange(rows * width, dtype=torch.int32, device=CUDA).view(rows, width)
    plan = PagedPlan(
        cache=cache, cu_seqlens=torch.arange(rows + 1, dtype=torch.int32, device=CUDA), query_lengths=(1,) * rows,
        kv_lengths=torch.full((rows,), length, dtype=torch.int32, device=CUDA), kv_pages=(width,) * rows,
        block_table=table, slots=table[:, 0].long() * PAGE + length - 1,
    )
    positions = torch.full((rows,), length - 1, device=CUDA)
    return ForwardBatch(torch.full((rows,), 5, device=CUDA), positions, plan, "rollout")


def _step_rows(model: Any, precision: str, length: int) -> Rows:
    batch = decode_batch(model, 1, length)
    fp8 = model.recipe.kv_cache.is_quantized
    ones = torch.ones(1, device=CUDA), torch.tensor([7], device=CUDA), torch.tensor([length], device=CUDA)

    def once() -> tuple[Tensor, ...]:
        with torch.no_grad():
            logits = model.logits(model(batch))
            return (logits, *draw(logits, *ones))

    wide = sum(SPEC.qkv_sections) + sum(SPEC.gate_up_sections) + SPEC.num_heads * SPEC.head_dim + SPEC.intermediate_size
    linear, head = LAYERS * SPEC.hidden_size * wide, SPEC.vocab_size * SPEC.hidden_size * 2
    read = linear * (1 if precision == "fp8" else 2) + head + length * LAYERS * key_bytes(fp8)
    graphs, apart, logits, table_of = {}, {}, {}, choice.SPLIT_FROM
    for name, held in (("walk", ()), ("parallel", ((1 << 30, 1),))):
        choice.SPLIT_FROM = held
        logits[name] = once()[0]
        graphs[name] = captured([once])
        with one_by_one():
            apart[name] = captured([once])
    choice.SPLIT_FROM = table_of
    times, rows = microseconds(graphs, 1), []
    for name in graphs:
        row: dict[str, Any] = {"precision": precision, "keys": length, "kernels": name, "ms": times[name] / 1e3}
        row["floor"] = read / READ_TBPS / 1e9
        row["share"] = row["floor"] / row["ms"]
        spent: dict[str, float] = defaultdict(float)
        parts = by_kernel(apart[name])
        for kernel, (us, _) in parts.items():
            spent[next((kind for kind, what in KINDS if re.search(what, kernel)), "other")] += us / 1e3
        row |= {kind: spent[kind] for kind in ("attention", "gemm", "short", "other")}
        row["bits"] = "equal" if torch.equal(logits[name], logits["walk"]) else "WRONG"
        rows.append(row)
        print(f"-- {precision}, {length} keys, {name}: microseconds in all, launches, microseconds each, kernel")
        for kernel, (us, count) in sorted(parts.items(), key=lambda item: -item[1][0])[:12]:
            print(f"{us:9.1f} {count:5d} {us / count:7.2f}  {kernel[:60]}")
    return rows


PARTS: dict[str, tuple[Callable[[bool], Rows], list[str]]] = {
    "step": (step, [
        "precision", "keys", "kernels", "ms", "floor", "share", "attention", "gemm", "short", "other", "bits",
    ]),
    "groups": (groups, [
        "kv", "batch", "group", "prompt", "apart", "merged", "gain", "own", "shared", "floor", "share", "pays", "bits",
    ]),
    "keys": (keys, ["kv", "batch", "keys", "walk", *SHAPES, "best", "floor", "share", "bits", "parts"]),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", help="keys, groups, step; default: all")
    parser.add_argument("--quick", action="store_true", help="few sizes")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"no parts {sorted(unknown)}; known: {', '.join(PARTS)}")
    require_gpu()
    torch.manual_seed(0)
    shown, failed = [], []
    for name, (part, columns) in PARTS.items():
        if args.parts and name not in args.parts:
            continue
        try:
            rows = part(args.quick)
        except Exception:
            traceback.print_exc()
            failed.append(name)
            continue
        failed += [f"{name}: wrong bits"] * any(str(r["bits"]).startswith("WRONG") for r in rows)
        save(f"tail_{name}{'_quick' * args.quick}", rows, args.out)
        columns = [c for c in columns if any(c in r for r in rows)]
        shown.append(f"== {name} (microseconds, step: milliseconds)\n{table(rows, columns)}")
        if name == "keys":
            shown.append(advice(rows))
    print("\n".join(shown))
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
