"""Cases of the BF16 GEMM that reads a weight's codes, bit for bit against its definition, as in `triton_cases.py`:
`python tests/kernels/triton_gemm_cases.py [part of a name]`, in the interpreter.

In the interpreter a product adds 16 elements at a time to FP32 sums, here and there, as in
`triton_attention_cases.py`; `tests/gpu/test_coded_rows_hopper.py` compares with DeepGEMM on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
import triton_attention_cases as attention  # also makes the interpreter's products those of the definition
import triton_cases as base
from torch import Tensor

from jetrl.kernels import reference as ref
from jetrl.kernels.gemm import coded_rows as coded
from jetrl.kernels.quantize.ops import weight_values

DEVICE, Case, equal = base.DEVICE, base.Case, base.equal


def by_definition(x: Tensor, values: Tensor) -> Tensor:
    """One chain over K for each output, rounded once."""
    start = np.zeros((len(values), len(x)), np.float32)
    return torch.from_numpy(attention.product(values.float().numpy(), x.float().T.numpy(), start).T).bfloat16()


def coded_cases() -> Iterator[tuple[str, Case]]:
    def multiply(m: int, n: int, k: int, rows: int, gap: int) -> None:
        g = torch.Generator().manual_seed(m + n + k)
        x = torch.randn(m, k, generator=g).bfloat16()
        w = torch.randn(n, k, generator=g) * torch.exp2(torch.randint(-20, 4, (n, 1), generator=g).float())
        q = ref.quantize_128x128(w.bfloat16(), True, (n,))
        held = torch.zeros(n, k + gap, dtype=torch.uint8)  # rows of codes may be further apart than K
        held[:, :k] = q.codes.view(torch.uint8)
        got = coded.matmul(x.to(DEVICE), held.view(q.codes.dtype)[:, :k].to(DEVICE), q.scale.to(DEVICE), rows)
        equal("output", got, by_definition(x, weight_values(q)))

    sizes = [
        (1, 64, 128, 64, 0), (5, 160, 256, 32, 0), (9, 48, 384, 16, 128), (70, 64, 128, 64, 0), (8, 192, 128, 64, 0),
    ]
    for m, n, k, rows, gap in sizes:
        yield f"coded {m} x {n} x {k}, {rows} rows", partial(multiply, m, n, k, rows, gap)


if __name__ == "__main__":
    raise SystemExit(base.main(list(coded_cases())))
