"""Programmatic dependent launch, and what else kernels must know of the GPU that they are compiled for.

With dependent launch a kernel starts while the one before it ends, and waits only before it reads. A decode step has
about ten short kernels per layer; between two of them the device would idle for 1 us. A kernel launched with `**LAUNCH`
calls `begin` first: it waits until all earlier work is done and visible, then lets the next kernel set itself up.
DeepGEMM's kernels do the same (`set_pdl`). Without the launch attribute `begin` does nothing. GPUs before Hopper have
none.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels take pointers and compile-time numbers, for which there are no types)
from __future__ import annotations

import os
from typing import Any

import torch
import triton
import triton.language as tl

from jetrl.kernels.tiles import kind_of

ON_GPU = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1")  # else no inline assembly
# of the GPU that this process has; without one that of Hopper, for which kernels may be compiled all the same
CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
DEPENDENT = ON_GPU.value and CAPABILITY >= (9, 0)
OLD_MMA = tl.constexpr(ON_GPU.value and kind_of(CAPABILITY) == "mma")  # operands of products wait in registers
E4M3 = tl.constexpr(CAPABILITY >= (8, 9))  # whether instructions convert to E4M3 and multiply its codes
LAUNCH: dict[str, Any] = {"PDL": True, "launch_pdl": True} if DEPENDENT else {"PDL": False}


@triton.jit
def begin(PDL: tl.constexpr):
    """Wait for earlier kernels, then allow the next. In this order: the next may read what was written before us."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def fetch(at):
    """Ask for the lines of memory at pointers `at` before `begin`. Nothing is read, so no value depends on when: it may
    be of what is still being written. Only where PDL."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )
