"""The gradients of `portable.py`'s attention: sums in one order, no atomics.

With P the softmax and D = rowsum(dO * O): dV = P^T dO; dS = P * (dO V^T - D); dQ = dS K * scale; dK = dS^T Q * scale. P
is made again from the scores and the row's logarithm. Three kernels: D; dK and dV of some keys, over all queries that
see them, head after head; dQ of some queries, over the keys that they see. P and dS are rounded to BF16 for the
products, whose sums are FP32.

Legend: `T` packed rows of tokens, `K` packed keys, `N` query heads, `G` key/value heads, `H` head size.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels take pointers and compile-time numbers, for which there are no types)
from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_QUERIES, _KEYS = 64, 64  # of a tile; half as many for heads beyond 128


@triton.jit(do_not_specialize=["rows", "tokens"])
def _delta_kernel(out, grad, delta, rows, tokens, N: tl.constexpr, H: tl.constexpr, HB: tl.constexpr, R: tl.constexpr):
    """`delta` [N, T] = rowsum(dO * O) of R heads."""
    row, cols = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R), tl.arange(0, HB)
    mask = (row < rows)[:, None] & (cols < H)[None, :]
    at = row[:, None] * H + cols[None, :]
    o = tl.load(out + at, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(grad + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(delta + row % N * tokens + row // N, tl.sum(o * g, axis=1), mask=row < rows)


@triton.jit
def _rows(x, first, count, head, cols, HEADS: tl.constexpr, H: tl.constexpr, R: tl.constexpr):
    """One head of R rows [R, HB] from `first` on, zeros from `count` on."""
    row = tl.arange(0, R)
    at = ((first + row).to(tl.int64) * HEADS + head)[:, None] * H + cols[None, :]
    return tl.load(x + at, mask=(row < count)[:, None] & (cols < H)[None, :], other=0.0)


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["starts", "key_starts"])
def _keys_kernel(
    q, k, v, grad, lse, delta, starts, key_starts, dk, dv, scale, log2_scale, tokens,
    N: tl.constexpr, G: tl.constexpr, H: tl.constexpr, HB: tl.constexpr, Q: tl.constexpr, K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dK and dV of K keys of one key head."""
    sequence, group = tl.program_id(0) // G, tl.program_id(0) % G
    start = tl.load(key_starts + sequence)
    length = tl.load(key_starts + sequence + 1) - start
    first = tl.program_id(1) * K
    if first < length:
        origin = tl.load(starts + sequence)
        queries = tl.load(starts + sequence + 1) - origin
        cols, key = tl.arange(0, HB), first + tl.arange(0, K)
        keys = _rows(k, start + first, length - first, group, cols, G, H, K)
        values = _rows(v, start + first, length - first, group, cols, G, H, K)
        d_keys, d_values = tl.zeros((K, HB), tl.float32), tl.zeros((K, HB), tl.float32)
        before = length - queries  # keys before the sequence's own first token
        begin = tl.maximum(first - before, 0) // Q
        tiles = tl.maximum(tl.cdiv(queries, Q) - begin, 0)
        for i in tl.range(0, tiles * (N // G), num_stages=STAGES):
            head, low = group * (N // G) + i // tiles, (begin + i % tiles) * Q
            query = low + tl.arange(0, Q)
            real = query < queries
            rows = _rows(q, origin + low, queries - low, head, cols, N, H, Q)
            at = head.to(tl.int64) * tokens + origin + query
            logs = tl.load(lse + at, mask=real, other=0.0)
            p = tl.exp2(tl.dot(keys, tl.trans(rows)) * log2_scale - logs[None, :])
            seen = (key[:, None] <= before + query[None, :]) & real[None, :]
            p = tl.where(seen, p, 0.0)
            outs = _rows(grad, origin + low, queries - low, head, cols, N, H, Q)
            d_values = tl.dot(p.to(tl.bfloat16), outs, d_values)
            less = tl.load(delta + at, mask=real, other=0.0)
            ds = p * (tl.dot(values, tl.trans(outs)) - less[None, :])
            d_keys = tl.dot(ds.to(tl.bfloat16), rows, d_keys)
        to = ((start + key).to(tl.int64) * G + group)[:, None] * H + cols[None, :]
        mask = (key < length)[:, None] & (cols < H)[None, :]
        tl.store(dk + to, (d_keys * scale).to(tl.bfloat16), mask=mask)
        tl.store(dv + to, d_values.to(tl.bfloat16), mask=mask)


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["starts", "key_starts"])
def _queries_kernel(
    q, k, v, grad, lse, delta, starts, key_starts, dq, scale, log2_scale, tokens,
    N: tl.constexpr, G: tl.constexpr, H: tl.constexpr, HB: tl.constexpr, Q: tl.constexpr, K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dQ of Q queries of one head."""
    sequence, head = tl.program_id(0) // N, tl.program_id(0) % N
    group = head // (N // G)
    origin = tl.load(starts + sequence)
    queries = tl.load(starts + sequence + 1) - origin
    low = (tl.num_programs(1) - 1 - tl.program_id(1)) * Q
    if low < queries:
        start = tl.load(key_starts + sequence)
        length = tl.load(key_starts + sequence + 1) - start
        cols, query = tl.arange(0, HB), low + tl.arange(0, Q)
        real, before = query < queries, length - queries
        rows = _rows(q, origin + low, queries - low, head, cols, N, H, Q)
        outs = _rows(grad, origin + low, queries - low, head, cols, N, H, Q)
        at = head.to(tl.int64) * tokens + origin + query
        logs = tl.load(lse + at, mask=real, other=0.0)
        less = tl.load(delta + at, mask=real, other=0.0)
        d_rows = tl.zeros((Q, HB), tl.float32)
        last = tl.minimum(length, before + low + Q)
        for i in tl.range(0, tl.cdiv(last, K), num_stages=STAGES):
            key = i * K + tl.arange(0, K)
            keys = _rows(k, start + i * K, length - i * K, group, cols, G, H, K)
            p = tl.exp2(tl.dot(rows, tl.trans(keys)) * log2_scale - logs[:, None])
            p = tl.where(key[None, :] <= before + query[:, None], p, 0.0)
            values = _rows(v, start + i * K, length - i * K, group, cols, G, H, K)
            ds = p * (tl.dot(outs, tl.trans(values)) - less[:, None])
            d_rows = tl.dot(ds.to(tl.bfloat16), keys, d_rows)
        to = ((origin + query).to(tl.int64) * N + head)[:, None] * H + cols[None, :]
        tl.store(dq + to, (d_rows * scale).to(tl.bfloat16), mask=real[:, None] & (cols < H)[None, :])


def gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, starts: Tensor, key_starts: Tensor,
    longest: int, most_keys: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ [T, N, H], dK and dV [K, G, H], of sequences with `starts` and `key_starts` [B + 1], up to `longest` queries
    and `most_keys` keys each."""
    (tokens, heads, size), groups = q.shape, k.shape[1]
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    sequences = starts.shape[0] - 1
    if not tokens or not sequences:
        return dq, dk.zero_(), dv.zero_()
    delta = torch.empty(heads, tokens, dtype=torch.float32, device=q.device)
    padded = max(16, triton.next_power_of_2(size))
    _delta_kernel[(triton.cdiv(tokens * heads, 16),)](
        out, grad, delta, tokens * heads, tokens, N=heads, H=size, HB=padded, R=16, num_warps=4
    )
    many, few = (_QUERIES, _KEYS) if size <= 128 else (_QUERIES // 2, _KEYS // 2)
    sizes: dict[str, Any] = {"N": heads, "G": groups, "H": size, "HB": padded, "Q": many, "K": few}
    log2_scale = scale * math.log2(math.e)
    _keys_kernel[(sequences * groups, triton.cdiv(most_keys, few))](
        q, k, v, grad, lse, delta, starts, key_starts, dk, dv, scale, log2_scale, tokens, **sizes, STAGES=2, num_warps=8
    )
    _queries_kernel[(sequences * heads, triton.cdiv(longest, many))](
        q, k, v, grad, lse, delta, starts, key_starts, dq, scale, log2_scale, tokens, **sizes, STAGES=2, num_warps=4
    )
    return dq, dk, dv
