"""FP8 GEMMs for 1 to 64 tokens at the sizes of Qwen3-8B: DeepGEMM against the variants of `kernels/gemm/choice.py`.

    python benchmarks/bench_few_rows.py [--tokens 1 8 64] [--variants one half] [--out DIR]

Each measurement is one CUDA graph over 36 layers, each with a weight of its own, so the L2 cache holds none of them.
It is taken twice: GEMMs alone, and each behind the kernel that quantizes its input, as in a decode step (columns `q`);
early loads of weights show only there. Then a whole step's GEMMs, four a layer, each behind its quantizer. Bits are
compared with DeepGEMM's first: for normal input, for all codes under scales of a wide range, and for products of scales
below FP32's normal numbers.

Everything runs in a process of its own. If it dies or hangs, the variant that had begun last is left out and the rest
goes on. Prints what `kernels.gemm.choice.CHOSEN` should hold. Writes `results/few_rows.json`.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, ask, emit, require_gpu, save, table
from torch import Tensor

from jetrl.kernels.compiling.pool import compile_all, processors
from jetrl.kernels.gemm.choice import DEEPGEMM as DEEP
from jetrl.kernels.gemm.choice import VARIANTS, shape_of
from jetrl.kernels.gemm.few_rows import Shape, matmul

CUDA, READ_TBPS, LAYERS = "cuda", 4.47, 36
SIZES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}
TOKENS = (1, 2, 4, 8, 16, 32, 64)
STEPS = (1, 8, 16, 64)  # tokens for which a whole step is measured
Call = Callable[[], Any]
Operand = tuple[Tensor, Tensor]  # codes and scales


def codes(rows: int, k: int) -> Tensor:
    """Every E4M3 number alike, subnormal ones too."""
    x = torch.randint(0, 254, (rows, k), dtype=torch.uint8, device=CUDA)
    return (x + (x >= 127)).view(torch.float8_e4m3fn)  # without the two NaNs


def operands(n: int, m: int, k: int, kind: str) -> tuple[Operand, Operand]:
    """Activations and a weight."""
    low, high = {"normal": (-8, -6), "wide": (-24, 24), "tiny": (-76, -64)}[kind]

    def scales(rows: int, cols: int) -> Tensor:
        return torch.exp2(torch.empty(rows, cols, device=CUDA).uniform_(low, high))

    units = torch.empty_strided((m, k // 128), (1, -(-m // 4) * 4), device=CUDA).copy_(scales(m, k // 128))
    if kind != "normal":
        return (codes(m, k), units), (codes(n, k), scales(-(-n // 128), k // 128))
    a, b = (torch.randn(rows, k, device=CUDA).mul_(64).to(torch.float8_e4m3fn) for rows in (m, n))
    return (a, units), (b, scales(-(-n // 128), k // 128))


def deep(a: Operand, b: Operand) -> Tensor:
    import deep_gemm

    out = torch.empty(a[0].shape[0], b[0].shape[0], dtype=torch.bfloat16, device=CUDA)
    deep_gemm.fp8_gemm_nt(a, b, out, disable_ue8m0_cast=True)
    return out


def few(a: Operand, b: Operand, shape: Shape, early: bool = True) -> Tensor:
    return matmul(*a, *b, shape, early)


# ---- compiling ------------------------------------------------------------------------------------------------------


def find(send: Callable[[Any], object], tokens: list[int], variants: list[str]) -> None:
    """A job for every kernel that is measured."""
    from jetrl.kernels.compiling.recorded import recording
    from jetrl.kernels.quantize.triton import quantize_act

    with recording(send):
        for n, k in SIZES.values():
            for m in tokens:
                a, b = operands(n, m, k, "tiny")
                deep(a, b)
                quantize_act(torch.zeros(m, k, dtype=torch.bfloat16, device=CUDA))
                for name in variants:
                    if shape := shape_of(n, k, m, name):
                        few(a, b, shape)


def compile_first(tokens: list[int], variants: list[str]) -> None:
    begin = time.perf_counter()
    prepare = ("jetrl.kernels.compiling.recorded:prepare", (0,))
    done = compile_all(
        "bench_few_rows:find", (tokens, variants), workers=min(processors(), 16), prepare=prepare, limit=120.0
    )
    print(f"compiled {done.done} of {done.found} kernels in {time.perf_counter() - begin:.0f} s", flush=True)
    for name, why in done.failures:
        print(f"not compiled: {name}: {why}", flush=True)


# ---- measuring, in a process of its own -----------------------------------------------------------------------------


def bits(n: int, k: int, m: int, name: str) -> str:
    """Whether a variant equals DeepGEMM for all kinds of input, with early loads and without."""
    shape, wrong = shape_of(n, k, m, name), []
    assert shape is not None
    for kind in ("normal", "wide", "tiny"):
        a, b = operands(n, m, k, kind)
        want = deep(a, b)
        for early in (False, True):
            got = few(a, b, shape, early)
            if differ := int((got.view(torch.int16) != want.view(torch.int16)).sum()):
                wrong.append(f"{kind}: {differ} of {want.numel()}")
                most, size = (got.float() - want.float()).abs().max().item(), want.abs().max().item()
                emit({"note": f"{name} {n}x{k}, {m} tokens, {kind}: off by {most:.3g} of {size:.3g}"})
    return "WRONG " + ", ".join(wrong) if wrong else "equal"


def times(calls: dict[str, list[Call]]) -> dict[str, float]:
    """Microseconds of a layer."""
    from bench_tail import captured, microseconds

    return microseconds({name: captured(each) for name, each in calls.items()}, LAYERS, rounds=4)


def measure(size: str, m: int, variants: list[str], weights: list[Operand]) -> dict[str, Any]:
    from jetrl.kernels.quantize.triton import quantize_act

    n, k = SIZES[size]
    a, _ = operands(16, m, k, "normal")
    x = torch.randn(m, k, dtype=torch.bfloat16, device=CUDA)
    floor = (n * k + n * k / 4096 + m * (k + 2 * n)) / READ_TBPS / 1e6
    row: dict[str, Any] = {"size": size, "tokens": m, "floor": floor, "bits": {}}
    alone: dict[str, list[Call]] = {DEEP: [lambda b=b: deep(a, b) for b in weights]}
    behind: dict[str, list[Call]] = {DEEP: [lambda b=b: (quantize_act(x), deep(a, b)) for b in weights]}
    for name in variants:
        shape = shape_of(n, k, m, name)
        if shape is None:
            continue
        emit({"begin": name})
        try:
            row["bits"][name] = bits(n, k, m, name)
            torch.cuda.synchronize()
        except Exception:
            row["bits"][name] = "FAILED"
            emit({"note": traceback.format_exc()})
            continue
        row[f"{name} shape"] = f"{shape.rows} rows, {shape.stages} x {shape.groups}"
        alone[name] = [lambda b=b, s=shape: few(a, b, s) for b in weights]
        behind[name] = [lambda b=b, s=shape: (quantize_act(x), few(a, b, s)) for b in weights]
    row |= times(alone)
    row |= {f"{name} q": us for name, us in times(behind).items()}
    return row


def whole(m: int, picked: dict[str, str], weights: dict[str, list[Operand]]) -> dict[str, Any]:
    """Milliseconds of all GEMMs of a step, each behind a quantizer; `picked`: the variant of each size."""
    from jetrl.kernels.quantize.triton import quantize_act

    def layer(i: int, chosen: dict[str, str]) -> None:
        for size, (n, k) in SIZES.items():
            quantize_act(xs[k])
            shape = shape_of(n, k, m, chosen[size]) if chosen[size] != DEEP else None
            if shape is None:
                deep(inputs[k], weights[size][i])
            else:
                few(inputs[k], weights[size][i], shape)

    inputs = {k: operands(16, m, k, "normal")[0] for k in {k for _, k in SIZES.values()}}
    xs = {k: torch.randn(m, k, dtype=torch.bfloat16, device=CUDA) for k in inputs}
    found = times({
        "deepgemm": [lambda i=i: layer(i, dict.fromkeys(SIZES, DEEP)) for i in range(LAYERS)],
        "picked": [lambda i=i: layer(i, picked) for i in range(LAYERS)],
    })
    step = {name: us * LAYERS / 1e3 for name, us in found.items()}
    floor = LAYERS * sum(n * k for n, k in SIZES.values()) / READ_TBPS / 1e9
    return {"step": True, "tokens": m, **step, "floor": floor, "share": floor / step["picked"], "variants": picked}


def child(tokens: list[int], variants: list[str], done: set[str]) -> None:
    torch.manual_seed(0)
    weights = {
        size: [operands(n, 1, k, "normal")[1] for _ in range(LAYERS)] for size, (n, k) in SIZES.items()
    }
    best: dict[int, dict[str, str]] = {}
    for m in tokens:
        for size in SIZES:
            if f"{size} {m}" not in done:
                row = measure(size, m, variants, weights[size])
                best.setdefault(m, {})[size] = pick(row)
                emit(row)
    for m in STEPS:
        if len(best.get(m, {})) == len(SIZES):
            emit(whole(m, best[m], weights))
    emit({"end": True})


def pick(row: dict[str, Any]) -> str:
    """The fastest with equal bits behind a quantizer; DeepGEMM unless 2 % are gained."""
    good = [name for name, what in row["bits"].items() if what == "equal" and f"{name} q" in row]
    name = min(good, key=lambda name: row[f"{name} q"], default=DEEP)
    return name if row[f"{name} q"] < 0.98 * row[f"{DEEP} q"] else DEEP


# ---- all of it ------------------------------------------------------------------------------------------------------


def measured(args: argparse.Namespace) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows, and what went wrong; a variant at which the process ends is left out of the next."""
    rows: list[dict[str, Any]] = []
    failed: list[str] = []
    variants = list(args.variants)
    while variants:
        done = [f"{row['size']} {row['tokens']}" for row in rows if "size" in row]
        command = [sys.executable, __file__, "--child", "--tokens", *map(str, args.tokens), "--variants", *variants,
                   "--done", *done]
        begun = ""
        try:
            for row in ask(command, limit=args.limit):
                begun = row.get("begin", begun)
                if "end" in row:
                    return rows, failed
                if "note" in row:
                    print(row["note"], flush=True)
                elif "begin" not in row:
                    rows.append(row)
        except RuntimeError as error:
            failed.append(f"the process ended at {begun or 'its start'}: {error}")
            print(failed[-1], flush=True)
        if begun not in variants:
            break
        variants.remove(begun)
    return rows, failed


def show(rows: list[dict[str, Any]], variants: list[str]) -> list[str]:
    """Prints the tables; returns what has wrong bits."""
    wrong: list[str] = []
    advice: dict[tuple[int, int], list[tuple[int, str]]] = {}
    for row in rows:
        if "size" in row:
            picked = pick(row)
            row |= {"best": picked, "gain": row[f"{DEEP} q"] / row[f"{picked} q"]}
            row["share"] = row["floor"] / row[f"{picked} q"]
            wrong += [f"{row['size']} {row['tokens']} {name}: {w}" for name, w in row["bits"].items() if w != "equal"]
            steps = advice.setdefault(SIZES[row["size"]], [])
            steps[:] = [*(one for one in steps if one is not steps[-1] or one[1] != picked), (row["tokens"], picked)]
    singles = [row for row in rows if "size" in row]
    columns = [DEEP, *variants]
    print("\nmicroseconds of a GEMM, alone and (q) behind the kernel that quantizes its input")
    print(table(singles, ["size", "tokens", "floor", *columns, *(f"{c} q" for c in columns), "best", "gain", "share"]))
    print("\nwhere bits are equal and it gains 2 %: CHOSEN =", {size: tuple(steps) for size, steps in advice.items()})
    print("\nmilliseconds of a step's FP8 GEMMs with a quantizer before each (no lm_head)")
    print(table([r for r in rows if "step" in r], ["tokens", DEEP, "picked", "floor", "share", "variants"]))
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--limit", type=float, default=100.0, help="seconds of a measuring process")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--done", nargs="*", default=[], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.tokens, args.variants, set(args.done))
        return
    require_gpu()
    begin = time.perf_counter()
    compile_first(args.tokens, args.variants)
    rows, failed = measured(args)
    print(f"measured after {time.perf_counter() - begin:.0f} s")
    wrong = show(rows, args.variants)
    save("few_rows", rows, args.out)
    print(f"\n{len(wrong)} with wrong bits or none" + "".join(f"\n  {line}" for line in wrong))
    if wrong or failed:
        raise SystemExit("failed: " + "; ".join(failed or ["bits"])[:2000])


if __name__ == "__main__":
    main()
