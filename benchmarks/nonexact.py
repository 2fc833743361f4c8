"""The fastest choices that parity forbids, in place of ours: the difference is the cost of exactness.

    nonexact  BF16 GEMMs (the lm_head, and all linears of the BF16 flow) by cuBLAS if it is the quicker one at that
              size, tried at the first call (its bits depend on the number of rows); attention backward in any order
    nondet    only the latter

Nothing else is known to be faster. FP8 GEMMs: cuBLASLt's kernel with blocks of 128 is slower than DeepGEMM's
(`scaled_mm`). Attention with split keys: FlashAttention-4 has none on Hopper, and where sequences times key/value heads
exceed the multiprocessors (from 17 sequences on, for 8 heads) its heuristic would make one split anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from common import median, split_variant
from torch import Tensor

from jetrl.kernels.attention import flash
from jetrl.kernels.dispatch import load_backend
from jetrl.kernels.gemm.deepgemm import PreparedBF16, bf16_gemm
from jetrl.kernels.logprob import chunks

KINDS = ("nonexact", "nondet")
_quicker: dict[tuple[int, ...], bool] = {}  # rows, N, K, bytes of an output element -> cuBLAS is the quicker one


def apply(variant: str) -> tuple[str, str]:
    """Make this process run `variant`: a precision, then optionally `kv8` (FP8 KV cache), then optionally one of KINDS.

    Returns the precision and the format of the cache.
    """
    precision, kv_cache, kind = split_variant(variant)
    if kind and kind not in KINDS:
        raise SystemExit(f"unknown variant {variant!r}: a precision, then kv8, then {' or '.join(KINDS)}")
    use(kind)
    return precision, kv_cache


def use(kind: str) -> None:
    """From now on this process computes with the choices of `kind`; with "" exactly."""
    flash.DETERMINISTIC_BACKWARD = not kind
    owners: tuple[Any, ...] = (load_backend("hopper"), chunks)  # linears and routers; the lm_head
    for owner in owners:
        owner.bf16_gemm = quickest_gemm if kind == "nonexact" else bf16_gemm


def cublas_gemm(x: Tensor, w: PreparedBF16, out_dtype: torch.dtype) -> Tensor:
    """`deepgemm.bf16_gemm` by cuBLAS, whose order of sums depends on the number of rows."""
    y = torch.mm(x, w.weight.T) if out_dtype == x.dtype else torch.mm(x, w.weight.T, out_dtype=out_dtype)
    return y if y.shape[1] == w.size else y[:, : w.size].contiguous()


def quickest_gemm(x: Tensor, w: PreparedBF16, out_dtype: torch.dtype) -> Tensor:
    """The quicker of the two for this size. A graph's capture cannot measure; the sizes it needs have run before."""
    key = (x.shape[0], *w.weight.shape, out_dtype.itemsize)
    if key not in _quicker and x.shape[0] and not torch.cuda.is_current_stream_capturing():
        _quicker[key] = _microseconds(cublas_gemm, x, w, out_dtype) < _microseconds(bf16_gemm, x, w, out_dtype)
    return (cublas_gemm if _quicker.get(key, False) else bf16_gemm)(x, w, out_dtype)


def _microseconds(gemm: Callable[..., Tensor], x: Tensor, w: PreparedBF16, out_dtype: torch.dtype) -> float:
    times = []
    for _ in range(4):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        gemm(x, w, out_dtype)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return median(times[1:])


def chosen() -> dict[str, int]:
    """How many GEMM sizes each of the two won, for the record."""
    return {"cublas": sum(_quicker.values()), "deepgemm": len(_quicker) - sum(_quicker.values())}
