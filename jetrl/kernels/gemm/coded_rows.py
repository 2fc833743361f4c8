"""BF16 GEMMs of few tokens that read their weight as E4M3 codes with scales of powers of two (`precision = "w8a16"`).

Half of the bytes of `deepgemm.bf16_gemm`, which training and prefill use with the same weight as BF16 values, and its
bits. An output there is one chain of the tensor core over K from zero, 16 elements at a time, rounded once:

    y = round_bf16(acc),  acc = acc + sum of 16 products  for each 16 of K in order

A code times 2^k is a BF16 number, so what is widened and scaled in registers is what the other GEMM loads. The weight
is the tensor core's rows and tokens are its columns, as in `few_rows.py`: an element has the bits of its mirror image,
and they do not depend on the instruction (Hopper's `wgmma` or the older `mma`). A program owns some rows and walks
along all of K; nothing is split over programs.

`choice.py` says for which sizes it is used. `tests/gpu/test_coded_rows_hopper.py` compares its bits with DeepGEMM's,
`tests/kernels/test_triton_layouts.py` reads the order of products from what is compiled.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels take pointers and compile-time numbers, for which there are no types)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.kernels.launch import LAUNCH, begin
from jetrl.kernels.quantize.triton import widened
from jetrl.precision.formats import BLOCK

ROWS = (64, 32, 16)  # of the weight, of a program
COLUMNS = (8, 16, 32, 64)  # tokens of a program; more than it has are zeros
STAGES = 5  # steps of K that are on their way
_STEP = tl.constexpr(BLOCK)


@triton.jit
def _scaled(wide, unit, ON_GPU: tl.constexpr):
    """`wide * unit` in BF16: exact, as `unit` is a power of two. The interpreter has no products of BF16."""
    if ON_GPU:
        return wide * unit.to(tl.bfloat16)
    else:
        return (wide.to(tl.float32) * unit).to(tl.bfloat16)


@triton.jit(do_not_specialize=["m"])
def _coded_rows_kernel(
    x, codes, units, out, m, n, steps, x_stride, codes_stride, units_stride, ROWS: tl.constexpr, COLS: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):
    """ROWS rows of the weight by COLS tokens, in `steps` of 128 along K."""
    begin(PDL)
    first = tl.program_id(0) * ROWS
    row, token, k = first + tl.arange(0, ROWS), tl.program_id(1) * COLS + tl.arange(0, COLS), tl.arange(0, _STEP)
    at_w = codes + row.to(tl.int64)[:, None] * codes_stride + k[None, :]
    at_x = x + token.to(tl.int64)[None, :] * x_stride + k[:, None]
    at_unit = units + first // _STEP * units_stride
    real = (token < m)[None, :]
    acc = tl.zeros((ROWS, COLS), tl.float32)
    for step in tl.range(0, steps, num_stages=STAGES):
        w = tl.load(at_w + step * _STEP, eviction_policy="evict_first")
        unit = tl.load(at_unit + step)
        tokens = tl.load(at_x + step * _STEP, mask=real, other=0.0)
        acc = tl.dot(_scaled(widened(w, True, PDL), unit, PDL), tokens, acc)
    tl.store(out + token.to(tl.int64)[None, :] * n + row[:, None], acc.to(tl.bfloat16), mask=real)


def rows_for(n: int, k: int, rows: int) -> int | None:
    """The rows of a program for a weight [n, k]: `rows`, or the most below that fit; None where there is no kernel."""
    if k % BLOCK:
        return None
    return next((size for size in ROWS if size <= rows and n % size == 0), None)


def matmul(x: Tensor, codes: Tensor, units: Tensor, rows: int) -> Tensor:
    """`x` [M, K] BF16 by a weight of `codes` [N, K] with `units` [blocks(N), K / 128] -> BF16 [M, N].

    K is a multiple of 128, N of `rows`, one of ROWS; blocks of 128 rows do not restart before the last section.
    """
    (m, k), n = x.shape, codes.shape[0]
    assert rows in ROWS and not n % rows and not k % BLOCK and codes.shape[1] == k and codes.stride(1) == 1
    assert units.shape == (-(-n // BLOCK), k // BLOCK) and units.stride(1) == 1
    x = x.contiguous()
    out = torch.empty(m, n, dtype=torch.bfloat16, device=x.device)
    if m:
        columns = next((size for size in COLUMNS if size >= m), COLUMNS[-1])
        _coded_rows_kernel[(n // rows, -(-m // columns))](
            x, codes.view(torch.uint8), units, out, m, n, k // BLOCK, x.stride(0), codes.stride(0), units.stride(0),
            ROWS=rows, COLS=columns, STAGES=STAGES, num_warps=4, enable_fp_fusion=False, **LAUNCH,
        )
    return out
