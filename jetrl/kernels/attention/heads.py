"""From the fused projection to attention and back: QK-norm, RoPE, the quantizer of an FP8 KV cache and the write to the
cache as one Triton kernel, bit-equal to `reference`, and their gradient as another.

The backward kernel reads the gradients of queries, keys and values and writes that of the projection directly: no
rotated copies, no concatenation. The rotation back is bit-equal to `reference.rope` (with -sin); the norm's mean is
summed by halves.

Legend: `T` tokens, `N` query heads, `G` key/value heads, `H` head size.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels take pointers and compile-time numbers, for which there are no types)
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.kernels.attention.cache import scale_place, stored
from jetrl.kernels.launch import LAUNCH, begin
from jetrl.kernels.pointwise.triton import aligned_squares, inv_rms_from, rows_view
from jetrl.kernels.quantize.triton import _FLOOR_BITS, abs_bits, scale_from
from jetrl.types import LayerCache

_PROGRAMS = 1024  # along the tokens: fixed, so that the order in which the norms' gradients are summed is fixed
_HEADS = 16  # heads per program


@triton.jit
def quantize_halves(y1, y2, CODES: tl.constexpr, FLOOR: tl.constexpr):
    """`stored` of both halves [R, HB] of R heads, and the scales [R] that the halves share."""
    y1, y2 = y1.to(tl.float32), y2.to(tl.float32)
    scale = scale_from(tl.maximum(tl.max(abs_bits(y1), axis=1), tl.max(abs_bits(y2), axis=1)), FLOOR, True)
    return stored(y1, scale[:, None], CODES), stored(y2, scale[:, None], CODES), scale


@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])
def _qkv_kernel(
    qkv, q_weight, k_weight, cos, sin, positions, slots, q_out, k_out, v_out, scales, qkv_stride,
    N: tl.constexpr, G: tl.constexpr, H: tl.constexpr, HB: tl.constexpr, R: tl.constexpr, EPS: tl.constexpr,
    NORM: tl.constexpr, PAGED: tl.constexpr, PAGE: tl.constexpr, FP8: tl.constexpr, FLOOR: tl.constexpr,
    PDL: tl.constexpr,
):
    """QK-norm and RoPE of the fused projection; keys and values go to rows `slots[t]` (paged cache) or `t`.

    FP8: pages get codes, and `scales` gets their scales; rows `t` get the values of the codes.
    """
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * R + tl.arange(0, R)
    cols = tl.arange(0, HB)
    inside = cols < H // 2
    is_q, is_v = head < N, head >= N + G
    mask = (head < N + 2 * G)[:, None] & inside[None, :]
    at = qkv + token * qkv_stride + head[:, None] * H + cols[None, :]
    x1 = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(at + H // 2, mask=mask, other=0.0).to(tl.float32)
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
    position = tl.load(positions + token)
    c = tl.load(cos + position * (H // 2) + cols, mask=inside, other=0.0)[None, :]
    s = tl.load(sin + position * (H // 2) + cols, mask=inside, other=0.0)[None, :]
    y1 = tl.where(is_v[:, None], x1, n1 * c - n2 * s).to(tl.bfloat16)
    y2 = tl.where(is_v[:, None], x2, n2 * c + n1 * s).to(tl.bfloat16)
    to_q = q_out + (token * N + head[:, None]) * H + cols[None, :]
    q_mask = mask & is_q[:, None]
    tl.store(to_q, y1, mask=q_mask)
    tl.store(to_q + H // 2, y2, mask=q_mask)
    row = token
    if PAGED:
        row = tl.load(slots + token)
    z1, z2 = y1, y2
    if FP8:
        z1, z2, scale = quantize_halves(y1, y2, PAGED, FLOOR)
        if PAGED:
            to_scale = scales + scale_place(row, head - N - tl.where(is_v, G, 0), G, PAGE) + tl.where(is_v, 1, 0)
            tl.store(to_scale, scale.to(tl.bfloat16), mask=(is_q == 0) & (head < N + 2 * G) & (row >= 0))
    k_mask = mask & ((head >= N) & (head < N + G))[:, None] & (row >= 0)
    to_k = k_out + (row * G + head[:, None] - N) * H + cols[None, :]
    tl.store(to_k, z1, mask=k_mask)
    tl.store(to_k + H // 2, z2, mask=k_mask)
    v_mask = mask & is_v[:, None] & (row >= 0)
    to_v = v_out + (row * G + head[:, None] - N - G) * H + cols[None, :]
    tl.store(to_v, z1, mask=v_mask)
    tl.store(to_v + H // 2, z2, mask=v_mask)


@triton.jit
def _load_grads(dq, dk, dv, row, head, cols, here, N: tl.constexpr, G: tl.constexpr, H: tl.constexpr):
    """FP32 [R, HB]: a token's gradients of the heads, which are in three tensors."""
    is_q, is_v = (head < N)[:, None], (head >= N + G)[:, None]
    is_k = (is_q == 0) & (is_v == 0)
    at = head[:, None] * H + cols[None, :]
    q = tl.load(dq + row * (N * H) + at, mask=here & is_q, other=0.0)
    k = tl.load(dk + row * (G * H) + (at - N * H), mask=here & is_k, other=0.0)
    v = tl.load(dv + row * (G * H) + (at - (N + G) * H), mask=here & is_v, other=0.0)
    return tl.where(is_q, q, tl.where(is_v, v, k)).to(tl.float32)


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["positions"])
def _qkv_backward_kernel(
    dq, dk, dv, qkv, q_weight, k_weight, cos, sin, positions, out, partial, num_tokens, qkv_stride,
    N: tl.constexpr, G: tl.constexpr, H: tl.constexpr, HB: tl.constexpr, R: tl.constexpr, EPS: tl.constexpr,
    NORM: tl.constexpr,
):
    head = tl.program_id(1) * R + tl.arange(0, R)
    cols = tl.arange(0, HB)
    inside = cols < H // 2
    is_q, is_v = (head < N)[:, None], (head >= N + G)[:, None]
    here = (head < N + 2 * G)[:, None] & inside[None, :]
    normed = here & (is_v == 0)
    at = head[:, None] * H + cols[None, :]
    if NORM:
        q1 = tl.load(q_weight + cols, mask=inside, other=0.0).to(tl.float32)[None, :]
        q2 = tl.load(q_weight + H // 2 + cols, mask=inside, other=0.0).to(tl.float32)[None, :]
        k1 = tl.load(k_weight + cols, mask=inside, other=0.0).to(tl.float32)[None, :]
        k2 = tl.load(k_weight + H // 2 + cols, mask=inside, other=0.0).to(tl.float32)[None, :]
        w1, w2 = tl.where(is_q, q1, k1), tl.where(is_q, q2, k2)
        sum1, sum2 = tl.zeros((R, HB), dtype=tl.float32), tl.zeros((R, HB), dtype=tl.float32)
    for token in range(tl.program_id(0), num_tokens, tl.num_programs(0)):
        row = token + tl.zeros((1, 1), dtype=tl.int64)
        position = tl.load(positions + token)
        c = tl.load(cos + position * (H // 2) + cols, mask=inside, other=0.0)[None, :]
        s = tl.load(sin + position * (H // 2) + cols, mask=inside, other=0.0)[None, :]
        g1 = _load_grads(dq, dk, dv, row, head, cols, here, N, G, H)
        g2 = _load_grads(dq, dk, dv, row, head, cols + H // 2, here, N, G, H)
        d1 = (g1 * c + g2 * s).to(tl.bfloat16).to(tl.float32)
        d2 = (g2 * c - g1 * s).to(tl.bfloat16).to(tl.float32)
        if NORM:
            x1 = tl.load(qkv + row * qkv_stride + at, mask=normed, other=0.0).to(tl.float32)
            x2 = tl.load(qkv + row * qkv_stride + at + H // 2, mask=normed, other=0.0).to(tl.float32)
            # not the exact sum of `inv_rms`, as in a norm's backward pass: gradients are outside parity
            total = tl.sum(x1 * x1 + x2 * x2, axis=1)
            inv = tl.div_rn(1.0, tl.sqrt_rn(total / H + EPS))[:, None]
            n1, n2 = x1 * inv, x2 * inv
            sum1 += tl.where(normed, d1 * n1, 0.0)
            sum2 += tl.where(normed, d2 * n2, 0.0)
            d1, d2 = d1 * w1, d2 * w2
            mean = ((tl.sum(d1 * n1, axis=1) + tl.sum(d2 * n2, axis=1)) / H)[:, None]
            d1, d2 = (d1 - n1 * mean) * inv, (d2 - n2 * mean) * inv
        to = out + row * ((N + 2 * G) * H) + at
        tl.store(to, tl.where(is_v, g1, d1).to(tl.bfloat16), mask=here)
        tl.store(to + H // 2, tl.where(is_v, g2, d2).to(tl.bfloat16), mask=here)
    if NORM:  # v's heads added nothing
        to_q = partial + (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * (2 * H) + cols
        tl.store(to_q, tl.sum(tl.where(is_q, sum1, 0.0), axis=0), mask=inside)
        tl.store(to_q + H // 2, tl.sum(tl.where(is_q, sum2, 0.0), axis=0), mask=inside)
        tl.store(to_q + H, tl.sum(tl.where(is_q, 0.0, sum1), axis=0), mask=inside)
        tl.store(to_q + H + H // 2, tl.sum(tl.where(is_q, 0.0, sum2), axis=0), mask=inside)


class Home(NamedTuple):
    """Where heads are kept, as kernels take it, and what is returned of it: q, and k and v or the cache's."""

    slots: Tensor
    q: Tensor
    keys: Tensor
    values: Tensor
    scales: Tensor
    page: int
    found: tuple[Tensor, Tensor, Tensor]


def home_of(
    qkv: Tensor, heads: tuple[int, int], head_dim: int, positions: Tensor, cache: tuple[LayerCache, Tensor] | None,
    fp8_kv: bool,
) -> Home:
    """That of the heads of `qkv`: the paged `cache`, or new tensors; the rest as `qkv_norm_rope` takes it."""
    (n, g), t = heads, qkv.shape[0]
    q = torch.empty(t, n, head_dim, dtype=qkv.dtype, device=qkv.device)
    if cache is None:
        keys, values = torch.empty(2, t, g, head_dim, dtype=qkv.dtype, device=qkv.device)
        return Home(positions, q, keys, values, q, 1, (q, keys, values))  # slots, scales and pages are not in use
    layer, slots = cache
    keys, values = layer.keys, layer.values
    assert keys.is_contiguous() and values.is_contiguous()
    assert fp8_kv == (layer.scales is not None), "the cache has another format than the model's recipe"
    if layer.scales is None:
        return Home(slots, q, keys, values, q, 1, (q, keys, values))
    assert layer.scales.is_contiguous() and layer.scales.dtype == torch.bfloat16
    codes = keys.view(torch.uint8), values.view(torch.uint8)
    return Home(slots, q, *codes, layer.scales, keys.shape[1], (q, keys, values))


def qkv_norm_rope(
    qkv: Tensor, heads: tuple[int, int], head_dim: int, norms: tuple[Tensor, Tensor] | None, eps: float,
    tables: tuple[Tensor, Tensor], positions: Tensor, cache: tuple[LayerCache, Tensor] | None, fp8_kv: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """QK-norm, RoPE and the write to the paged cache in one kernel, bit-equal to the ops one after another.

    `qkv` [T, (N + 2G) * H]; `heads` (N, G); `norms` the weights [H] of q and k; `tables` cos and sin [positions, H/2];
    `cache` (pages of the layer, slots [T]). Returns q [T, N, H] and k, v [T, G, H], or, with a cache, q and the cache's
    own keys and values. `fp8_kv`: the cache gets codes and scales; without a cache, k and v come as `round_heads` makes
    them.
    """
    (n, g), t = heads, qkv.shape[0]
    rows_view(qkv)
    to, q_weight, k_weight = home_of(qkv, heads, head_dim, positions, cache, fp8_kv), *(norms or (qkv, qkv))
    r = 16
    if t:
        _qkv_kernel[(t, triton.cdiv(n + 2 * g, r))](
            qkv, q_weight, k_weight, tables[0], tables[1], positions, to.slots, to.q, to.keys, to.values, to.scales,
            qkv.stride(0), N=n, G=g, H=head_dim, HB=triton.next_power_of_2(head_dim // 2), R=r, EPS=eps,
            NORM=norms is not None, PAGED=cache is not None, PAGE=to.page, FP8=fp8_kv, FLOOR=_FLOOR_BITS, num_warps=4,
            enable_fp_fusion=False, **LAUNCH,
        )
    return to.found


def qkv_norm_rope_backward(
    grads: tuple[Tensor, Tensor, Tensor], qkv: Tensor, norms: tuple[Tensor, Tensor] | None, eps: float,
    tables: tuple[Tensor, Tensor], positions: Tensor,
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """Gradients of `qkv` [T, (N + 2G) * H] (rounded) and of the norms' weights (FP32 [H]); no atomics.

    `grads` of q [T, N, H], k and v [T, G, H]; the rest as `qkv_norm_rope` took it.
    """
    rows_view(qkv)
    dq, dk, dv = (grad.contiguous() for grad in grads)
    (t, n, h), g = dq.shape, dk.shape[1]
    assert t > 0 and positions.is_contiguous() and dq.dtype == dk.dtype == dv.dtype == qkv.dtype
    assert tables[0].is_contiguous() and tables[1].is_contiguous()
    out = torch.empty(t, (n + 2 * g) * h, dtype=qkv.dtype, device=qkv.device)
    blocks = triton.cdiv(n + 2 * g, _HEADS)
    size = (_PROGRAMS * blocks, 2, h) if norms is not None else (1, 2, h)
    partial = torch.empty(size, dtype=torch.float32, device=qkv.device)
    q_weight, k_weight = norms if norms is not None else (qkv, qkv)
    _qkv_backward_kernel[(_PROGRAMS, blocks)](
        dq, dk, dv, qkv, q_weight, k_weight, tables[0], tables[1], positions, out, partial, t, qkv.stride(0), N=n, G=g,
        H=h, HB=triton.next_power_of_2(h // 2), R=_HEADS, EPS=eps, NORM=norms is not None, num_warps=4,
        enable_fp_fusion=False,
    )
    if norms is None:
        return out, None
    d_q, d_k = partial.sum(0)
    return out, (d_q, d_k)
