"""Adapters of q, k and v, then QK-norm, RoPE and the write to the cache, in one Triton kernel: the bits of
`_expand_kernel`, then `_qkv_kernel`.

A program has a head of 16 tokens, as many as the tensor core takes; the sum of the base and its adapters stays in
registers. For few tokens only, those with sums of chains: many wait for nothing.

Legend: `T` tokens, `N` query heads, `G` key/value heads, `H` head size. FP fusion is off, as in `adapters/triton.py`.
`tests/kernels/triton_adapter_cases.py` runs it in the interpreter.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels take pointers and compile-time numbers, for which there are no types)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.kernels.adapters.ops import Begun, Heads, Places
from jetrl.kernels.adapters.triton import adapter_finish, fetch_rows, left_of, multiplied, right_of, unrolled
from jetrl.kernels.attention.cache import scale_place
from jetrl.kernels.attention.heads import home_of, qkv_norm_rope, quantize_halves
from jetrl.kernels.launch import LAUNCH, begin
from jetrl.kernels.pointwise.triton import aligned_squares, inv_rms_from, rows_view
from jetrl.kernels.quantize.triton import _FLOOR_BITS, abs_bits

# Whether it is used at all, or one kernel after the other; off until certificates on a GPU were made with it
JOINED = False
_TOKENS = 16


@triton.jit
def _finish_rows(
    x1, x2, token, position, row, scale_row, head, alive, q_weight, k_weight, cos, sin, q_out, k_out, v_out, scales,
    N: tl.constexpr, G: tl.constexpr, H: tl.constexpr, HB: tl.constexpr, EPS: tl.constexpr, NORM: tl.constexpr,
    PAGED: tl.constexpr, PAGE: tl.constexpr, FP8: tl.constexpr, FLOOR: tl.constexpr,
):
    """What `attention.heads._qkv_kernel` does to R heads, of which it has the halves, FP32 [R, HB]. Written twice: one
    function for both takes that kernel from 56 to 64 registers on sm_90. Cases in the interpreter compare the two.

    `head`, `alive` [R]; `token`, `position` and the `row` of keys and values [R, 1], or one for all; `scale_row`, the
    row again, [R] or one.
    """
    cols = tl.arange(0, HB)
    inside = cols < H // 2
    is_q, is_v = head < N, head >= N + G
    mask = alive[:, None] & inside[None, :]
    n1, n2 = x1, x2
    if NORM:
        top = tl.maximum(tl.max(abs_bits(x1), axis=1), tl.max(abs_bits(x2), axis=1))
        total = tl.sum(aligned_squares(x1, top), axis=1) + tl.sum(aligned_squares(x2, top), axis=1)
        inv = inv_rms_from(total, top, H, EPS)[:, None]
        qw1 = tl.load(q_weight + cols, mask=inside, other=0.0).to(tl.float32)[None, :]
        qw2 = tl.load(q_weight + H // 2 + cols, mask=inside, other=0.0).to(tl.float32)[None, :]
        kw1 = tl.load(k_weight + cols, mask=inside, other=0.0).to(tl.float32)[None, :]
        kw2 = tl.load(k_weight + H // 2 + cols, mask=inside, other=0.0).to(tl.float32)[None, :]
        n1 = (x1 * inv).to(tl.bfloat16).to(tl.float32) * tl.where(is_q[:, None], qw1, kw1)
        n2 = (x2 * inv).to(tl.bfloat16).to(tl.float32) * tl.where(is_q[:, None], qw2, kw2)
        n1, n2 = n1.to(tl.bfloat16).to(tl.float32), n2.to(tl.bfloat16).to(tl.float32)
    c = tl.load(cos + position * (H // 2) + cols[None, :], mask=inside[None, :], other=0.0)
    s = tl.load(sin + position * (H // 2) + cols[None, :], mask=inside[None, :], other=0.0)
    y1 = tl.where(is_v[:, None], x1, n1 * c - n2 * s).to(tl.bfloat16)
    y2 = tl.where(is_v[:, None], x2, n2 * c + n1 * s).to(tl.bfloat16)
    to_q = q_out + (token * N + head[:, None]) * H + cols[None, :]
    q_mask = mask & is_q[:, None]
    tl.store(to_q, y1, mask=q_mask)
    tl.store(to_q + H // 2, y2, mask=q_mask)
    z1, z2 = y1, y2
    if FP8:
        z1, z2, scale = quantize_halves(y1, y2, PAGED, FLOOR)
        if PAGED:
            to_scale = scales + scale_place(scale_row, head - N - tl.where(is_v, G, 0), G, PAGE) + tl.where(is_v, 1, 0)
            tl.store(to_scale, scale.to(tl.bfloat16), mask=alive & (is_q == 0) & (scale_row >= 0))
    k_mask = mask & ((head >= N) & (head < N + G))[:, None] & (row >= 0)
    to_k = k_out + (row * G + head[:, None] - N) * H + cols[None, :]
    tl.store(to_k, z1, mask=k_mask)
    tl.store(to_k + H // 2, z2, mask=k_mask)
    v_mask = mask & is_v[:, None] & (row >= 0)
    to_v = v_out + (row * G + head[:, None] - N - G) * H + cols[None, :]
    tl.store(to_v, z1, mask=v_mask)
    tl.store(to_v + H // 2, z2, mask=v_mask)


@triton.jit(do_not_specialize=["m"], do_not_specialize_on_alignment=["positions", "slots"])
def _finish_heads_kernel(
    qkv, u, b, q_weight, k_weight, cos, sin, positions, slots, q_out, k_out, v_out, scales, scale, m, qkv_stride,
    u_stride, T: tl.constexpr, R: tl.constexpr, RANK: tl.constexpr, CHAINS: tl.constexpr, UNROLL: tl.constexpr,
    OF_Q: tl.constexpr, OF_K: tl.constexpr, OF_V: tl.constexpr, ROW_Q: tl.constexpr, ROW_K: tl.constexpr,
    ROW_V: tl.constexpr, N: tl.constexpr, G: tl.constexpr, H: tl.constexpr, HB: tl.constexpr, EPS: tl.constexpr,
    NORM: tl.constexpr, PAGED: tl.constexpr, PAGE: tl.constexpr, FP8: tl.constexpr, FLOOR: tl.constexpr,
    PDL: tl.constexpr,
):
    """One head of T tokens. OF_Q: which adapter is q's, by number (-1: none); ROW_Q: where its rows begin in `b`."""
    h = tl.program_id(0)
    place, first = OF_Q, ROW_Q + h * H
    if h >= N + G:
        place, first = OF_V, ROW_V + (h - N - G) * H
    elif h >= N:
        place, first = OF_K, ROW_K + (h - N) * H
    has = place >= 0
    first = tl.where(has, first, 0)
    cols = tl.arange(0, HB)
    inside = cols < H // 2
    if PDL and tl.program_id(1) == 0:
        fetch_rows(b, first + cols, first + H // 2 - 1, RANK)
        fetch_rows(b, first + H // 2 + cols, first + H - 1, RANK)
    begin(PDL)
    token = (tl.program_id(1) * T + tl.arange(0, T)).to(tl.int64)
    alive = token < m
    mask = alive[:, None] & inside[None, :]
    at = qkv + token[:, None] * qkv_stride + h * H + cols[None, :]
    x1 = tl.load(at, mask=mask, other=0.0)
    x2 = tl.load(at + H // 2, mask=mask, other=0.0)
    position = tl.load(positions + token, mask=alive, other=0)
    row = token
    if PAGED:
        row = tl.load(slots + token, mask=alive, other=-1)
    acc1, acc2 = tl.zeros((T, HB), tl.float32), tl.zeros((T, HB), tl.float32)
    rows, tokens = inside[None, :] & has, alive[:, None] & has
    for r in tl.static_range(0, RANK, R):
        right1 = right_of(b, first + cols, rows, r, R, RANK)
        right2 = right_of(b, first + H // 2 + cols, rows, r, R, RANK)
        left = left_of(u, token, tokens, tl.maximum(place, 0) * RANK, m, u_stride, r, R, RANK, CHAINS, UNROLL)
        acc1 = multiplied(left, right1, acc1, CHAINS)
        acc2 = multiplied(left, right2, acc2, CHAINS)
    x1, x2 = x1.to(tl.float32), x2.to(tl.float32)
    y1 = tl.where(has, (x1 + acc1 * scale).to(tl.bfloat16).to(tl.float32), x1)
    y2 = tl.where(has, (x2 + acc2 * scale).to(tl.bfloat16).to(tl.float32), x2)
    head = tl.zeros((T,), tl.int32) + h
    _finish_rows(
        y1, y2, token[:, None], position[:, None], row[:, None], row, head, alive, q_weight, k_weight, cos, sin, q_out,
        k_out, v_out, scales, N, G, H, HB, EPS, NORM, PAGED, PAGE, FP8, FLOOR,
    )


def adapter_finish_heads(
    qkv: Tensor, begun: Begun, b: Tensor, scale: float, places: Places, of: Heads
) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.adapter_finish_heads`."""
    (n, g), h, u = of.heads, of.head_dim, begun.left
    if not JOINED or u.ndim == 2 or h % 32:  # half a head is what the tensor core multiplies
        return qkv_norm_rope(adapter_finish(qkv, begun, b, scale, places), *of)
    rows_view(qkv)
    assert qkv.dtype == b.dtype == torch.bfloat16 and b.is_contiguous() and u.is_contiguous()
    (m, rank), chains = (qkv.shape[0], b.shape[1]), len(u)
    starts = [start for (start, _), _ in places]
    numbers = [starts.index(start) if start in starts else -1 for start in (0, n * h, (n + g) * h)]
    assert sum(number >= 0 for number in numbers) == len(places)
    firsts = [places[number][1][0] if number >= 0 else 0 for number in numbers]
    to = home_of(qkv, of.heads, h, of.positions, of.cache, of.fp8_kv)
    q_weight, k_weight = of.norms or (qkv, qkv)
    if m:
        _finish_heads_kernel[(n + 2 * g, triton.cdiv(m, _TOKENS))](
            qkv, u, b, q_weight, k_weight, *of.tables, of.positions, to.slots, to.q, to.keys, to.values, to.scales,
            scale, m, qkv.stride(0), u.shape[-1], T=_TOKENS, R=min(128, max(16, triton.next_power_of_2(rank))),
            RANK=rank, CHAINS=chains, UNROLL=unrolled(chains, 24), OF_Q=numbers[0], OF_K=numbers[1], OF_V=numbers[2],
            ROW_Q=firsts[0], ROW_K=firsts[1], ROW_V=firsts[2], N=n, G=g, H=h, HB=triton.next_power_of_2(h // 2),
            EPS=of.eps, NORM=of.norms is not None, PAGED=of.cache is not None, PAGE=to.page, FP8=of.fp8_kv,
            FLOOR=_FLOOR_BITS, num_warps=4, enable_fp_fusion=False, **LAUNCH,
        )
    return to.found
