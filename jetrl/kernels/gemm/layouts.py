"""Which kernel DeepGEMM takes for M rows: a prediction, so that each kernel is compiled once, ahead of need.

DeepGEMM compiles a kernel for each tile (rows, columns, cluster) and number of stages that its cost model picks, and
the model looks at M. Sizes of the matrix are arguments of the kernel, so matrices share kernels. This module computes
the same costs for all M at once (source: csrc/jit_kernels/heuristics/sm90.hpp of DeepGEMM). Nothing that is computed
depends on it: where it is wrong, a kernel is compiled when it is needed.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

Kind = Literal["fp8", "wgrad", "bf16"]  # 1x128 by 128x128; 1x128 by 1x128, adding to FP32; BF16

_SHARED_MEMORY = 232_448  # bytes of a Hopper processor
_MOST_STAGES = 16


class Layout(NamedTuple):
    """What a compiled GEMM is made for, besides its types."""

    rows: int
    columns: int
    cluster_rows: int
    cluster_columns: int
    stages: int


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _stages(kind: Kind, rows: int, columns: int, k: int, out_bytes: int) -> int:
    """Tiles of A and B that fit in shared memory next to the output and the scales."""
    depth, size = (64, 2) if kind == "bf16" else (128, 1)
    fixed = _up(rows * columns * out_bytes, 1024) + _MOST_STAGES * 16
    if kind == "fp8":  # a row of the weight's scales, or two where a tile straddles blocks
        fixed += _up(-(-k // depth) * 4 * (1 if depth % columns == 0 else 2), 8)
    each = (rows + columns) * depth * size
    if kind != "bf16":
        each += _up(rows * 4, 128)
    if kind == "wgrad":
        each += _up(columns * 4, 128)
    return min((_SHARED_MEMORY - fixed) // each, _MOST_STAGES)


def _candidates(kind: Kind, k: int, out_bytes: int) -> list[Layout]:
    """All layouts for any M, in DeepGEMM's order; tiles of 16 and 32 rows are for at most as many rows."""
    row_tiles = [64, 128, 16, 32] + ([256] if out_bytes == 2 else [])
    first, last = (24, 160) if kind == "wgrad" else (16, 192 if kind == "fp8" else 256)
    column_tiles = ([16] if kind == "wgrad" else []) + list(range(first, last + 1, 16))
    found = []
    for cluster in ((1, 1), (1, 2), (2, 1)):
        for rows in row_tiles:
            for columns in column_tiles:
                over = columns - 128
                if kind == "fp8" and over > 0 and columns % over and 128 % over:
                    continue
                stages = _stages(kind, rows, columns, k, out_bytes)
                small = rows * columns < 128 * 192
                if not (rows > 128 and columns > 128) and stages >= (4 if small else 3):
                    found.append(Layout(rows, columns, *cluster, stages))
    return found


def layouts(
    kind: Kind, m: np.ndarray, n: int, k: int, out_bytes: int, *, adds: bool = False, processors: int = 132
) -> list[Layout]:
    """The layout for each number of rows in `m`, for a matrix [n, k] and an output of `out_bytes` an element."""
    size = 2 if kind == "bf16" else 1
    l2, l1 = min(64.0 * processors, 8e6 / 1.3e3), 128 * processors  # bytes a cycle
    found = _candidates(kind, k, out_bytes)
    best = np.full(len(m), np.inf)
    taken = np.zeros(len(m), dtype=np.int64)
    for number, one in enumerate(found):
        tiles = -(-m // one.rows) * -(-n // one.columns)
        waves = -(-tiles // processors)
        out = one.rows * one.columns * out_bytes
        moved = k * (one.rows // one.cluster_columns + one.columns // one.cluster_rows) * size
        read = k * (one.rows + one.columns) * size + k * (max(64, one.rows) + one.columns) * size + out
        stored = out * (2 if adds else 1)
        cycles = np.maximum((read + stored) * tiles // l1, ((moved + stored) * tiles / l2).astype(np.int64))
        cost = np.floor(cycles / (tiles / (waves * processors)))
        if one.cluster_rows * one.cluster_columns > 1:
            cost = np.where(waves <= 1, np.inf, cost)
        if one.rows in (16, 32):
            cost = np.where(m > one.rows, np.inf, cost)
        better = cost < best
        best, taken = np.where(better, cost, best), np.where(better, number, taken)
    return [found[number] for number in taken.tolist()]


def representatives(
    kind: Kind, most: int, n: int, k: int, out_bytes: int, *, processors: int = 132
) -> dict[Layout, int]:
    """Every layout for 1 to `most` rows, each with the smallest number of rows that takes it."""
    rows = np.arange(1, most + 1)
    found: dict[Layout, int] = {}
    for m, layout in zip(rows.tolist(), layouts(kind, rows, n, k, out_bytes, processors=processors), strict=True):
        found.setdefault(layout, m)
    return found
