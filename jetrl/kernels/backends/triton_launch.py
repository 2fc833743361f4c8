"""Programmatic dependent launch: a kernel starts while the one before it ends, and waits only before it reads.

A decode step has about ten short kernels per layer; between two of them the device would idle for 1 us. A kernel
launched with `**LAUNCH` calls `begin` first: it waits until all earlier work is done and visible, then lets the next
kernel set itself up. DeepGEMM's kernels do the same (`set_pdl`). Without the launch attribute `begin` does nothing.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels take pointers and compile-time numbers, for which there are no types)
from __future__ import annotations

import os
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

ON_GPU = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1")  # else no inline assembly
LAUNCH: dict[str, Any] = {"PDL": True, "launch_pdl": True} if ON_GPU.value else {"PDL": False}


@triton.jit
def begin(PDL: tl.constexpr):
    """Wait for earlier kernels, then allow the next. In this order: the next may read what was written before us."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


ahead_bytes = 0  # of a matrix of experts, read into the L2 ahead of its GEMM; `benchmarks/bench_moe_decode.py` sets it
_PART = 1 << 16  # bytes that a program asks for


@triton.jit
def read_ahead(x, part):
    """Ask for 64 KiB of the bytes `x` to come into the L2, by a program of one warp that waits for nothing: no earlier
    kernel of a step writes weights. No result depends on it."""
    at = (x + part.to(tl.int64) * 65536 + tl.arange(0, 32) * 2048).to(tl.int64)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], 2048; mov.u32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False,
        pack=1,
    )


def parts_ahead(codes: Tensor | None, tokens: int, per_token: int) -> int:
    """How many programs `read_ahead` gets for weights [E, N, K]: none for so few tokens that they miss many experts,
    nor for so many that GEMMs do not wait for weights."""
    if codes is None or not ON_GPU.value or tokens > 512 or tokens * per_token < 2 * codes.shape[0]:
        return 0
    return min(ahead_bytes, codes.numel()) // _PART
