"""Attention of one new token a sequence over its pages, bit-equal to FlashAttention-4's forward pass and faster.

One program serves the query heads of one key/value head. It reads exactly the keys that exist, three tiles deep, where
FlashAttention-4 loads whole tiles, two deep. The bits are the same because every step is:

- tiles of 128 keys from the last to the first; scores by wgmma in one order of the head's elements, from zero;
- `p = exp2(fma(score, scale, -(max * scale)))`, rounded to BF16 for the product with the values, not for its sum;
- a row's sum in four parts, those of the threads that hold a row of a wgmma result: part q adds, key by key, the keys
  8 i + 2 q and 8 i + 2 q + 1 of each tile to what it had, times the change of the maximum in one fma; in the end
  (part 0 + part 1) + (part 2 + part 3);
- the output rescaled before a tile's product is added, and divided by an approximate reciprocal of the sum.

`tests/gpu/test_attention_hopper.py` holds both kernels against each other.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels take pointers and compile-time numbers, for which there are no types)
from __future__ import annotations

import math

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.kernels.backends.triton_launch import LAUNCH, begin
from jetrl.kernels.backends.triton_quant import _FLOOR_BITS, abs_bits, encode, new_codes, new_scale, scale_from
from jetrl.kernels.qtensor import QTensor
from jetrl.precision.formats import BLOCK

TILE = 128  # keys: what FlashAttention-4 takes for heads of 64 and 128
_ROWS = 64  # of a tile of queries, the least that wgmma computes


@triton.jit
def _reciprocal(x):
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )  # fmt: skip


@triton.jit
def _softmax_step(s, top, sums, scale, ROWS: tl.constexpr, TILE: tl.constexpr):
    """Weights [ROWS, TILE] of a tile, the new maximum, the four sums [ROWS, 4], and what rescales older results."""
    new = tl.maximum(top, tl.max(s, axis=1))
    shrink = tl.exp2((top - new) * scale)
    zeros = tl.zeros_like(s)
    p = tl.exp2(tl.fma(s, scale + zeros, zeros - (new * scale)[:, None]))
    parts = tl.reshape(tl.permute(tl.reshape(p, (ROWS, TILE // 8, 4, 2)), (0, 2, 1, 3)), (ROWS, 4, TILE // 4))
    zeros = tl.zeros_like(parts)
    begun = tl.fma(sums[:, :, None] + zeros, shrink[:, None, None] + zeros, parts)
    first = (tl.arange(0, TILE // 4) == 0)[None, None, :]
    # all keys of a part lie in one thread, which adds them one after another
    return p, new, tl.sum(tl.where(first, begun, parts), axis=2), shrink


@triton.jit
def _decode_kernel(
    q, keys, values, table, lengths, out, codes, scales, scale, table_stride, codes_stride, scales_stride,
    N: tl.constexpr, G: tl.constexpr, H: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
    STAGES: tl.constexpr, QUANT: tl.constexpr, FLOOR: tl.constexpr, POW2: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    sequence, group = tl.program_id(0) // G, tl.program_id(0) % G
    length = tl.load(lengths + sequence)
    rows, cols, key = tl.arange(0, ROWS), tl.arange(0, H), tl.arange(0, TILE)
    head = group * (N // G) + rows
    at_q = (sequence * N + head)[:, None] * H + cols[None, :]
    mine = (rows < N // G)[:, None]
    query = tl.load(q + at_q, mask=mine, other=0.0)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    sums = tl.zeros((ROWS, 4), tl.float32)
    acc = tl.zeros((ROWS, H), tl.float32)
    pages = table + sequence * table_stride
    last = tl.cdiv(length, TILE) - 1
    page = tl.load(pages + tl.maximum(last, 0) * TILE // PAGE)
    for step in tl.range(0, last + 1, num_stages=STAGES):
        block = last - step
        inside = block * TILE + key < length
        row = page.to(tl.int64) * PAGE + (block * TILE) % PAGE + key
        page = tl.load(pages + tl.maximum(block - 1, 0) * TILE // PAGE)  # a tile ahead of its use
        at = (row * G + group)[:, None] * H + cols[None, :]
        k = tl.load(keys + at, mask=inside[:, None], other=0.0)
        v = tl.load(values + at, mask=inside[:, None], other=0.0)
        s = tl.where(inside[None, :], tl.dot(query, tl.trans(k)), float("-inf"))
        p, top, sums, shrink = _softmax_step(s, top, sums, scale, ROWS, TILE)
        acc = tl.dot(p.to(tl.bfloat16), v, acc * shrink[:, None])
    total = tl.sum(tl.sum(tl.reshape(sums, (ROWS, 2, 2)), axis=2), axis=1)
    y = (acc * _reciprocal(total)[:, None]).to(tl.bfloat16)
    if QUANT:  # a head is a group of 128 columns
        v = y.to(tl.float32)
        s = scale_from(tl.max(abs_bits(v), axis=1), FLOOR, POW2)
        at = sequence.to(tl.int64) * codes_stride + head[:, None] * H + cols[None, :]
        tl.store(codes + at, encode(v, s[:, None]).to(tl.uint8, bitcast=True), mask=mine)
        tl.store(scales + head * scales_stride + sequence, s, mask=rows < N // G)
    else:
        tl.store(out + at_q, y, mask=mine)


def serves(heads: int, groups: int, head_dim: int, page_size: int) -> bool:
    """Whether `decode` is FlashAttention-4's equal at these sizes; it takes other ones itself."""
    return head_dim in (64, 128) and page_size % TILE == 0 and heads // groups <= _ROWS


def decode(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor, scale: float
) -> Tensor:
    """`q` [B, N, H], one query a sequence, over `keys`, `values` [pages, page, G, H] -> [B, N, H].

    `table` int32 [B, M] names the pages of a sequence, `lengths` int32 [B] counts its keys, the new one among them: at
    least 1.
    """
    out = torch.empty_like(q)
    _launch(q, keys, values, table, lengths, scale, out, None, False)
    return out


def decode_quantize(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor, scale: float, pow2: bool
) -> QTensor:
    """`quantize_act(decode(...).flatten(1))` in the same kernel, for heads of 128."""
    batch, heads, head_dim = q.shape
    assert head_dim == BLOCK, "a group of the quantizer is a head"
    codes, scales = new_codes(batch, heads * head_dim, q.device), new_scale(batch, heads, q.device)
    quantized = QTensor(codes, scales, "1x128", (batch,), (heads * head_dim,))
    _launch(q, keys, values, table, lengths, scale, q, quantized, pow2)
    return quantized


def _launch(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor, scale: float, out: Tensor,
    quantized: QTensor | None, pow2: bool,
) -> None:  # fmt: skip
    batch, heads, head_dim = q.shape
    page, groups = keys.shape[1], keys.shape[2]
    assert serves(heads, groups, head_dim, page) and q.is_contiguous() and keys.is_contiguous()
    assert values.is_contiguous() and table.stride(1) == 1 and lengths.is_contiguous()
    log2_scale = float(np.float32(scale) * np.float32(math.log2(math.e)))  # one FP32 product, as in FlashAttention-4
    codes, scales = (quantized.codes.view(torch.uint8), quantized.scale) if quantized is not None else (q, q)
    if batch:
        _decode_kernel[(batch * groups,)](
            q, keys, values, table, lengths, out, codes, scales, log2_scale, table.stride(0), codes.stride(0),
            scales.stride(1), N=heads, G=groups, H=head_dim, PAGE=page, TILE=TILE, ROWS=_ROWS, STAGES=3,
            QUANT=quantized is not None, FLOOR=_FLOOR_BITS, POW2=pow2, num_warps=4, enable_fp_fusion=False, **LAUNCH,
        )  # fmt: skip
