"""DeepGEMM's kernels of a vLLM that is on PYTHONPATH, compiled by several processes into DG_JIT_CACHE_DIR.

vLLM compiles them one after the other while it starts, which takes minutes. `compile_all` takes as many processes as
there are cores. Run as a program it is one of these: `python vllm_kernels.py N K ROWS,ROWS,...`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # vLLM's process has no jetrl
    from jetrl.spec import ModelSpec


def shapes(spec: ModelSpec) -> list[tuple[int, int]]:
    """(outputs, inputs) of the four linears of a layer, as vLLM has them."""
    heads = spec.num_heads * spec.head_dim
    return [
        (sum(spec.qkv_sections), spec.hidden_size), (spec.hidden_size, heads),
        (2 * spec.intermediate_size, spec.hidden_size), (spec.hidden_size, spec.intermediate_size),
    ]


def compile_all(spec: ModelSpec, sizes: list[int], env: dict[str, str], limit: float = 240.0) -> int:
    """Compile for steps with these numbers of rows; how many processes failed (vLLM then does their work itself)."""
    ways = max(1, (os.cpu_count() or 4) // 4)
    children = [
        subprocess.Popen(
            [sys.executable, __file__, str(n), str(k), ",".join(map(str, sizes[i::ways]))], env=env,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
        for n, k in shapes(spec) for i in range(ways) if sizes[i::ways]
    ]
    failed = 0
    for child in children:
        try:
            failed += child.wait(limit) != 0
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            failed += 1
    return failed


def main() -> None:
    import torch
    import vllm.third_party.deep_gemm as deep_gemm

    getattr(deep_gemm, "set_pdl", lambda on: None)(True)  # as vLLM does
    n, k = int(sys.argv[1]), int(sys.argv[2])
    weight = torch.zeros(n, k, device="cuda").to(torch.float8_e4m3fn), torch.ones(n // 128, k // 128, device="cuda")
    for rows in map(int, sys.argv[3].split(",")):
        codes = torch.zeros(rows, k, device="cuda").to(torch.float8_e4m3fn)
        out = torch.empty(rows, n, device="cuda", dtype=torch.bfloat16)
        scales = torch.ones(rows, k // 128, device="cuda")
        deep_gemm.fp8_gemm_nt((codes, scales), weight, out, disable_ue8m0_cast=False)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
