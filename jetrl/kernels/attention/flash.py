"""Attention by FlashAttention-4 (CuTe DSL): one kernel for packed sequences and the paged cache. Decode steps run in
the kernels of `choice.py`, those with drafts in `decode_drafts.py`; all give the same bits. FlashAttention-4
reads BF16: pages of an FP8 cache are first dequantized into scratch pages, which is exact, so the bits are those of a
BF16 cache with the rounded keys and values.

The keys are never split: with splits, the order of sums would change with the batch. On Hopper a row's bits depend
neither on the batch nor on the chunk of queries, so prefill, decode and training agree. Backward is the deterministic
variant. A kernel is compiled at its first call (seconds): it must have run before a CUDA graph captures it. Compiled
kernels are kept on disk for the next process.

Legend: `T` packed rows, `N` query heads, `G` key/value heads, `H` head size.
"""

from __future__ import annotations

import os
import warnings

import torch
from torch import Tensor

from jetrl.kernels.attention import choice, decode_drafts
from jetrl.kernels.attention.cache import read_cache, write_cache
from jetrl.kernels.attention.reference import add_shared, copied
from jetrl.kernels.qtensor import QTensor
from jetrl.kernels.quantize.triton import quantize_act
from jetrl.kernels.support import broken, flash_cache
from jetrl.precision.formats import BLOCK
from jetrl.types import PagedPlan, VarlenPlan

# its own kernels make its compiler warn about this at every compilation
warnings.filterwarnings("ignore", message="Argument aux_data .* cannot be converted to a JitArgument")

# read when the package is imported; values that the user has set stay
os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(flash_cache()))

try:
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd
except (ImportError, OSError) as error:
    raise broken("flash-attn-4", error) from error


DETERMINISTIC_BACKWARD = True  # False only in benchmarks, to measure what the fixed order of sums costs


def _check(q: Tensor) -> None:
    if q.dtype != torch.bfloat16:
        raise ValueError(f"attention on Hopper is BF16, got {q.dtype}")
    if q.shape[2] % 8 or q.shape[2] > 256:
        raise ValueError(f"attention on Hopper takes head sizes up to 256 that are multiples of 8, got {q.shape[2]}")


def attend_varlen(
    q: Tensor, k: Tensor, v: Tensor, plan: VarlenPlan, scale: float, need_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Packed sequences: `q` [T, N, H], `k`, `v` [T, G, H] -> (output [T, N, H], log-sum-exp [N, T] FP32 if asked).

    With shared prompts each part's keys and values are first copied side by side.
    """
    _check(q)
    k, v = copied(k, v, plan)
    keys = plan if plan.keys is None else plan.keys
    out = _flash_attn_fwd(
        q, k, v, cu_seqlens_q=plan.cu_seqlens, cu_seqlens_k=keys.cu_seqlens, max_seqlen_q=max(plan.lengths, default=0),
        max_seqlen_k=max(keys.lengths, default=0), softmax_scale=scale, causal=True, num_splits=1, return_lse=need_lse,
    )
    return out[0], out[1]


def attend_cached(q: Tensor, plan: PagedPlan, layer: int, scale: float) -> Tensor:
    """`q` [T, N, H] over the pages of its sequences; the new keys and values are in the cache already.

    Decoding sequences come first in a step of the engine: they use the decode kernel, even in a step with prompts.
    """
    _check(q)
    cache, first = plan.cache.layer(layer), _decoding(q, plan, layer)
    if decode_drafts.takes(plan.query_lengths, cache, q.shape[1]):
        return decode_drafts.decode(q, cache, plan.block_table, plan.kv_lengths, scale, plan.query_lengths[0])
    if first and first == len(plan.query_lengths):
        return choice.decode(q, cache, plan, scale)
    out = torch.empty_like(q)
    if not plan.query_lengths:
        return out
    if first:
        choice.decode(q[:first], cache, plan, scale, out[:first], first)
    table, lengths = plan.block_table[first:], plan.kv_lengths[first:]
    starts = plan.cu_seqlens[first:] - first if first else plan.cu_seqlens
    if cache.scales is not None:
        cache, table = read_cache(cache, table, lengths, sum(plan.kv_pages[first:]))
    # no bound on the key length: the page table gives one, and a bound that changes each step would spoil a CUDA graph
    _flash_attn_fwd(
        q[first:], cache.keys, cache.values, cu_seqlens_q=starts, seqused_k=lengths,
        max_seqlen_q=max(plan.query_lengths), page_table=table, softmax_scale=scale, causal=True, num_splits=1,
        out=out[first:],
    )
    return out


def attend_cached_quantize(q: Tensor, plan: PagedPlan, layer: int, scale: float, pow2: bool) -> QTensor:
    """`quantize_act(attend_cached(...).flatten(1))`, in one kernel for a decode step with heads of 128."""
    if q.shape[2] == BLOCK and plan.query_lengths and _decoding(q, plan, layer) == len(plan.query_lengths):
        _check(q)
        cache = plan.cache.layer(layer)
        return choice.decode_quantize(q, cache, plan, scale, pow2)
    if q.shape[2] == BLOCK and decode_drafts.takes(plan.query_lengths, plan.cache.layer(layer), q.shape[1]):
        _check(q)
        cache, tokens = plan.cache.layer(layer), plan.query_lengths[0]
        return decode_drafts.decode_quantize(q, cache, plan.block_table, plan.kv_lengths, scale, tokens, pow2)
    return quantize_act(attend_cached(q, plan, layer, scale).flatten(1), pow2)


def _decoding(q: Tensor, plan: PagedPlan, layer: int) -> int:
    """How many sequences the decode kernel takes: the leading ones with one query each, if it supports these sizes."""
    if not choice.serves(plan.cache.layer(layer), q.shape[1]):
        return 0
    count = len(plan.query_lengths)
    if plan.query_lengths == (1,) * count:
        return count
    return next(i for i, length in enumerate(plan.query_lengths) if length != 1)


def attend(q: Tensor, k: Tensor, v: Tensor, plan: VarlenPlan | PagedPlan, layer: int, scale: float) -> Tensor:
    """`ops.attend`: a paged plan first writes `k` and `v` to its cache, quantized if the cache is FP8."""
    if isinstance(plan, VarlenPlan):
        return attend_varlen(q, k, v, plan, scale, False)[0]
    write_cache(k, v, plan.slots, plan.cache.layer(layer))
    return attend_cached(q, plan, layer, scale)


def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, plan: VarlenPlan, scale: float,
    out: Tensor | None = None, lse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Deterministic gradients; `out` and `lse` come from forward, else forward runs again (with the same bits).

    Copies of shared keys and values get BF16 gradients each, which `add_shared` adds in FP32.
    """
    if out is None or lse is None:
        out, lse = attend_varlen(q, k, v, plan, scale, True)
    k, v = copied(k, v, plan)
    keys = plan if plan.keys is None else plan.keys
    dq, dk, dv = _flash_attn_bwd(
        q, k, v, out, grad, lse, softmax_scale=scale, causal=True, cu_seqlens_q=plan.cu_seqlens,
        cu_seqlens_k=keys.cu_seqlens, max_seqlen_q=max(plan.lengths, default=0),
        max_seqlen_k=max(keys.lengths, default=0), deterministic=DETERMINISTIC_BACKWARD,
    )
    if plan.keys is None:
        return dq, dk, dv
    return dq, add_shared(dk, plan.keys, k.dtype), add_shared(dv, plan.keys, v.dtype)
