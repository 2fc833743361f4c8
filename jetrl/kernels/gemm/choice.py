"""Which GEMMs of few tokens go through `few_rows.py` (FP8) or `coded_rows.py` (BF16 by a weight's codes) instead of
DeepGEMM. All have the same bits.

The choice depends on sizes alone, which the host knows when a CUDA graph is captured. `CHOSEN` and `OTHERS` hold what
`benchmarks/bench_few_rows.py` has measured to be faster, `CODED` what `benchmarks/bench_coded_rows.py` has; where they
have no entry, DeepGEMM computes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from jetrl.kernels.gemm import coded_rows
from jetrl.kernels.gemm.few_rows import COLUMNS, GROUPS, Shape, cut, matmul
from jetrl.kernels.qtensor import QTensor
from jetrl.kernels.quantize.triton import has_gaps

PROCESSORS = 132  # of an H100 or H200 (SXM)


@dataclass(frozen=True, slots=True)
class Variant:
    """`rows` of the weight for a program, or with 0 as many as give every program of the device the same; `share`
    programs' rings fit into a multiprocessor, and `programs` are meant to run there."""

    rows: int = 0
    programs: int = 1
    share: int = 1
    groups: int = GROUPS[0]


VARIANTS = {
    "one": Variant(),
    "short": Variant(groups=2),  # stages of 256 of K
    "half": Variant(share=2),  # the next kernel's programs find room beside
    "two": Variant(programs=2, share=2),
    "64": Variant(rows=64),  # whole products, on fewer multiprocessors or several on each
}

DEEPGEMM = "deepgemm"  # stands for no variant

# (N, K) of a weight -> (at most so many tokens, variant or DEEPGEMM), ...: the first that holds; measured
CHOSEN: dict[tuple[int, int], tuple[tuple[int, str], ...]] = {
    (6144, 4096): ((8, "64"),),  # qkv, o, down and gate_up of Qwen3-8B's shape
    (4096, 4096): ((8, "64"),),
    (4096, 12288): ((8, "64"),),
    (24576, 4096): ((8, "half"), (64, "64")),
}
# The same for weights without an entry that have at least so many bytes
OTHERS: tuple[tuple[int, str], ...] = ()
OTHERS_FROM = 8 << 20

# For BF16 GEMMs whose weight is codes, by (N, K): (at most so many tokens, rows of the weight for a program), ...: the
# first that holds. The other sizes of Qwen3-8B and more tokens were measured on an H200, and are slower by codes.
CODED: dict[tuple[int, int], tuple[tuple[int, int], ...]] = {(24576, 4096): ((16, 64),)}


def shape_of(n: int, k: int, tokens: int, variant: str) -> Shape | None:
    """How `variant` computes `tokens` by a weight [n, k]; None if it cannot."""
    if not 1 <= tokens <= COLUMNS[-1] or k % 128 or n % 16:
        return None
    what = VARIANTS[variant]
    columns = next(size for size in COLUMNS if size >= tokens)
    places = PROCESSORS * what.programs
    # whole multiples of 16 rows; weights too large for 256 rows each take several rounds of the device
    rows = what.rows or min(-(-n // (16 * places)) * 16, 256)
    share = what.share if not what.rows else min(max(-(-n // (rows * PROCESSORS)), 1), 3)
    return cut(rows, k, columns, share, what.groups)


def chosen(n: int, k: int, tokens: int) -> Shape | None:
    """The shape to compute with, or None for DeepGEMM."""
    table = CHOSEN.get((n, k), OTHERS if n * k >= OTHERS_FROM else ())
    name = next((name for most, name in table if tokens <= most), None)
    return None if name in (None, DEEPGEMM) else shape_of(n, k, tokens, name)


def multiply(codes: Tensor, units: Tensor, weight: Tensor, scales: Tensor) -> Tensor | None:
    """`few_rows.matmul` where it is chosen, else None.

    Within a graph nothing writes weights, so their loads may begin before the kernel before has ended; elsewhere that
    kernel may be the one that publishes them.
    """
    shape = chosen(weight.shape[0], weight.shape[1], codes.shape[0])
    if shape is None:
        return None
    return matmul(codes, units, weight, scales, shape, torch.cuda.is_current_stream_capturing())


def coded(n: int, k: int, tokens: int) -> int | None:
    """Rows of a program of `coded_rows` for a weight [n, k] of codes, or None for DeepGEMM on their values."""
    rows = next((rows for most, rows in CODED.get((n, k), ()) if tokens <= most), None)
    return None if rows is None else coded_rows.rows_for(n, k, rows)


def multiply_coded(x: Tensor, weight: QTensor) -> Tensor | None:
    """`coded_rows.matmul` where it is chosen, else None: also where blocks of rows restart within 128."""
    n, k = weight.codes.shape
    rows = coded(n, k, x.shape[0])
    if rows is None or has_gaps(weight.row_sections):
        return None
    return coded_rows.matmul(x, weight.codes, weight.scale, rows)
