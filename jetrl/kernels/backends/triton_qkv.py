"""The gradient of the fused projection through RoPE and QK-norm, as one Triton kernel.

It reads the gradients of queries, keys and values and writes straight into that of the projection: no rotated copies,
no concatenation. The rotation back is bit-equal to `reference.rope` (with -sin); the norm's mean is summed by halves.

Legend: `T` tokens, `N` query heads, `G` key/value heads, `H` head size.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels take pointers and compile-time numbers, for which there are no types)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.kernels.backends.triton_pointwise import _rows_view, aligned_squares, inv_rms_from
from jetrl.kernels.backends.triton_quant import abs_bits

_PROGRAMS = 1024  # along the tokens: fixed, so that the order in which the norms' gradients are summed is fixed
_HEADS = 16  # heads a program


@triton.jit
def _load_grads(dq, dk, dv, row, head, cols, here, N: tl.constexpr, G: tl.constexpr, H: tl.constexpr):
    """FP32 [R, HB]: a token's gradients of the heads, which lie in three tensors."""
    is_q, is_v = (head < N)[:, None], (head >= N + G)[:, None]
    is_k = (is_q == 0) & (is_v == 0)
    at = head[:, None] * H + cols[None, :]
    q = tl.load(dq + row * (N * H) + at, mask=here & is_q, other=0.0)
    k = tl.load(dk + row * (G * H) + (at - N * H), mask=here & is_k, other=0.0)
    v = tl.load(dv + row * (G * H) + (at - (N + G) * H), mask=here & is_v, other=0.0)
    return tl.where(is_q, q, tl.where(is_v, v, k)).to(tl.float32)


@triton.jit
def _qkv_backward_kernel(
    dq, dk, dv, qkv, q_weight, k_weight, cos, sin, positions, out, partial, num_tokens, qkv_stride,
    N: tl.constexpr, G: tl.constexpr, H: tl.constexpr, HB: tl.constexpr, R: tl.constexpr, EPS: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
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
            top = tl.maximum(tl.max(abs_bits(x1), axis=1), tl.max(abs_bits(x2), axis=1))
            total = tl.sum(aligned_squares(x1, top), axis=1) + tl.sum(aligned_squares(x2, top), axis=1)
            inv = inv_rms_from(total, top, H, EPS)[:, None]
            n1, n2 = x1 * inv, x2 * inv
            sum1 += tl.where(normed, d1 * n1, 0.0)
            sum2 += tl.where(normed, d2 * n2, 0.0)
            d1, d2 = d1 * w1, d2 * w2
            mean = ((tl.sum(d1 * n1, axis=1) + tl.sum(d2 * n2, axis=1)) / H)[:, None]
            d1, d2 = (d1 - n1 * mean) * inv, (d2 - n2 * mean) * inv
        to = out + row * ((N + 2 * G) * H) + at
        tl.store(to, tl.where(is_v, g1, d1).to(tl.bfloat16), mask=here)
        tl.store(to + H // 2, tl.where(is_v, g2, d2).to(tl.bfloat16), mask=here)
    if NORM:  # v's heads have added nothing
        to_q = partial + (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * (2 * H) + cols
        tl.store(to_q, tl.sum(tl.where(is_q, sum1, 0.0), axis=0), mask=inside)
        tl.store(to_q + H // 2, tl.sum(tl.where(is_q, sum2, 0.0), axis=0), mask=inside)
        tl.store(to_q + H, tl.sum(tl.where(is_q, 0.0, sum1), axis=0), mask=inside)
        tl.store(to_q + H + H // 2, tl.sum(tl.where(is_q, 0.0, sum2), axis=0), mask=inside)


def qkv_norm_rope_backward(
    grads: tuple[Tensor, Tensor, Tensor], qkv: Tensor, norms: tuple[Tensor, Tensor] | None, eps: float,
    tables: tuple[Tensor, Tensor], positions: Tensor,
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:  # fmt: skip
    """Gradients of `qkv` [T, (N + 2G) * H] (rounded) and of the norms' weights (FP32 [H]); no atomics.

    `grads` of q [T, N, H], k and v [T, G, H]; the rest as `qkv_norm_rope` took it.
    """
    _rows_view(qkv)
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
    )  # fmt: skip
    if norms is None:
        return out, None
    d_q, d_k = partial.sum(0)
    return out, (d_q, d_k)
