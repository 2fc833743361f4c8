"""BF16 GEMMs of few tokens that read their weight as codes (`precision = "w8a16"`), at the sizes of Qwen3-8B: DeepGEMM
on the BF16 values against `kernels/gemm/coded_rows.py` with each number of rows of a program.

    python benchmarks/bench_coded_rows.py [--tokens 1 8 64 256] [--out DIR]

Each measurement is one CUDA graph over 36 layers, each with a weight of its own, so the L2 cache holds none of them.
Bits are compared with DeepGEMM's first. Prints what `kernels.gemm.choice.CODED` should hold. Writes
`results/coded_rows.json`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import torch
from bench_tail import captured, microseconds
from common import RESULTS, require_gpu, save, table
from torch import Tensor

from jetrl.kernels.dispatch import load_backend
from jetrl.kernels.gemm.coded_rows import ROWS, matmul, rows_for
from jetrl.kernels.qtensor import QTensor
from jetrl.kernels.quantize.ops import quantize_weight, weight_values

CUDA, READ_TBPS, LAYERS = "cuda", 4.47, 36
SIZES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
DEEP = "deepgemm"


class Weight(NamedTuple):
    """A weight's codes, and the operand of the BF16 GEMM that has their values."""

    codes: QTensor
    values: Any


def weight(n: int, k: int) -> Weight:
    codes = quantize_weight(torch.randn(n, k, device=CUDA).mul_(0.02).to(torch.bfloat16), (n,), True)
    return Weight(codes, load_backend("hopper").prepare_bf16(weight_values(codes)))


def deep(x: Tensor, w: Weight) -> Tensor:
    result: Tensor = load_backend("hopper").bf16_gemm(x, w.values, torch.bfloat16)
    return result


def coded(x: Tensor, w: Weight, rows: int) -> Tensor:
    return matmul(x, w.codes.codes, w.codes.scale, rows)


def measure(size: str, tokens: int, weights: list[Weight]) -> dict[str, Any]:
    """Microseconds of a GEMM by each way, and whether bits are equal."""
    n, k = SIZES[size]
    x = torch.randn(tokens, k, dtype=torch.bfloat16, device=CUDA)
    found = [rows for rows in ROWS if rows_for(n, k, rows) == rows]
    want = deep(x, weights[0]).view(torch.int16)
    wrong = {rows: int((coded(x, weights[0], rows).view(torch.int16) != want).sum()) for rows in found}
    calls = {DEEP: [lambda w=w: deep(x, w) for w in weights]}
    calls |= {f"{rows} rows": [lambda w=w, r=rows: coded(x, w, r) for w in weights] for rows in found}
    times = microseconds({name: captured(each) for name, each in calls.items()}, LAYERS, rounds=4)
    good = [rows for rows in found if not wrong[rows] and times[f"{rows} rows"] < 0.98 * times[DEEP]]
    best = min(good, key=lambda rows: times[f"{rows} rows"], default=None)
    return {
        "size": size, "tokens": tokens, **times, "floor": (n * k + tokens * (2 * k + 2 * n)) / READ_TBPS / 1e6,
        "wrong": {str(rows): count for rows, count in wrong.items() if count}, "best": best,
    }


def advice(rows: list[dict[str, Any]]) -> dict[tuple[int, int], tuple[tuple[int, int], ...]]:
    """(N, K) -> (tokens, rows of a program) for the token counts from the fewest on that gain."""
    found = {}
    for size, shape in SIZES.items():
        gains: list[tuple[int, int]] = []
        for row in sorted((row for row in rows if row["size"] == size), key=lambda row: row["tokens"]):
            if row["best"] is None:
                break
            if gains and gains[-1][1] == row["best"]:
                gains.pop()
            gains.append((row["tokens"], row["best"]))
        if gains:
            found[shape] = tuple(gains)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    require_gpu()
    torch.manual_seed(0)
    rows = []
    for size, (n, k) in SIZES.items():
        weights = [weight(n, k) for _ in range(LAYERS)]
        for tokens in args.tokens:
            rows.append(measure(size, tokens, weights))
            print(rows[-1], flush=True)
        del weights
    print(table(rows, ["size", "tokens", "floor", DEEP, *(f"{r} rows" for r in ROWS), "wrong", "best"]))
    print("CODED =", advice(rows))
    save("coded_rows", rows, args.out)
    if any(row["wrong"] for row in rows):
        raise SystemExit("failed: bits differ from DeepGEMM's")


if __name__ == "__main__":
    main()
