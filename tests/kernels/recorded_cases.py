"""Run by test_recorded.py in a process of its own, with an empty cache of Triton's: what is recorded and compiled is
what launches look for. Kernels are compiled for Hopper, which needs no GPU, and never launched."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from jetrl.kernels.compiling import recorded
from jetrl.kernels.compiling.pool import Job, function
from jetrl.kernels.gemm import choice
from jetrl.kernels.gemm.few_rows import matmul
from jetrl.kernels.pointwise.swiglu import swiglu
from jetrl.kernels.pointwise.triton import add_rms_norm_quantize
from jetrl.kernels.quantize.triton import quantize_act


class Hopper:
    """The driver of a GPU that is not here, as far as compiling asks for it."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def program(rows: int) -> None:
    x = torch.zeros(rows, 256, dtype=torch.bfloat16)
    quantize_act(x)
    add_rms_norm_quantize(x, x, torch.ones(256, dtype=torch.bfloat16), 1e-6, False)
    swiglu(x)
    few_rows(rows)
    quantize_act(torch.zeros(rows * 256 + 1, dtype=torch.bfloat16)[1:].view(rows, 256))  # not aligned


def few_rows(tokens: int) -> None:
    """A GEMM whose operands TMA reads; all these tokens take one kernel, or two."""
    codes = torch.zeros(tokens, 512, dtype=torch.uint8).view(torch.float8_e4m3fn)
    weight = torch.zeros(256, 512, dtype=torch.uint8).view(torch.float8_e4m3fn)
    shape = choice.shape_of(256, 512, 1 if tokens <= 8 else 64, "one")
    assert shape is not None
    units = torch.empty_strided((tokens, 4), (1, -(-tokens // 4) * 4))
    matmul(codes, units, weight, torch.ones(2, 4), shape, early=tokens == 1)


def compiled() -> set[str]:
    return {path.name for path in Path(os.environ["TRITON_CACHE_DIR"]).iterdir()}


def main() -> None:
    driver.set_active(Hopper())
    jobs: dict[str, Job] = {}
    with ExitStack() as stack:
        for patch in recorded._triton(lambda job: jobs.setdefault(job.key, job)):
            stack.enter_context(patch)
        for rows in (1, 5, 13, 16, 21):  # 21 is as 5
            program(rows)
    for job in jobs.values():
        function(job.call)(*job.arguments)
    before, run = compiled(), JITFunction.run

    def compiles_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        run(self, *args, grid=grid, warmup=True, **options)

    with mock.patch.object(JITFunction, "run", compiles_only):
        for rows in (1, 5, 13, 16, 21, 37, 48):
            program(rows)
        assert compiled() == before, f"{len(compiled() - before)} kernels were looked for under other names"
        quantize_act(torch.zeros(5, 256, dtype=torch.bfloat16), True)
        assert compiled() > before, "a kernel that was not recorded must be a new entry, or this finds nothing"
    print(f"{len(jobs)} jobs, {len(before)} entries")


if __name__ == "__main__":
    sys.exit(main())
