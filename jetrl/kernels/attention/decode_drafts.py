"""Attention of a few new tokens per sequence over its pages: a decode step whose last tokens are drafts.

The kernel is `decode.py`'s with more columns: one for each (token, query head) of a key/value head, up to 16 of
them a program. So the drafts of a step cost no further read of the keys, and a column's arithmetic, order of sums and
bits are those of a step with its token alone:

- a column sees the keys up to its own token; keys of the tokens after it are masked, as in a tile that is not full;
- the walk begins at the last tile of the program's last token. Where that lies beyond a column's own keys, all its
  scores are masked: its maximum stays -inf, its weights are exactly 0, and its sums and output stay 0, the state in
  which it would begin. (The maximum is taken as 0 there, or -inf - -inf would make NaN.)

What a masked key or value holds does not count, but it must be finite: the cache begins as zeros.

`tests/gpu/test_draft_hopper.py` compares it with the decode kernel, token by token.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels take pointers and compile-time numbers, for which there are no types)
from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from jetrl.kernels.attention.decode import (
    _MMA,
    _RIGHT,
    _TILE,
    _add_up,
    _copy,
    _key_operand,
    _parts,
    _reciprocal,
    _rings,
    _value_operand,
    _value_rows,
    serves,
)
from jetrl.kernels.launch import LAUNCH, begin
from jetrl.kernels.qtensor import QTensor
from jetrl.kernels.quantize.triton import _FLOOR_BITS, abs_bits, encode, new_heads, scale_from
from jetrl.precision.formats import BLOCK
from jetrl.types import LayerCache

TOKENS = (2, 4, 8)  # of a sequence in a step: 1, 3 or 7 drafts and the last token before them
_COLUMNS = (8, 16)  # of the tensor core in a program
_SLOTS = 3  # tiles in the ring


@gluon.jit
def _softmax(s, top, scale):
    """`decode._softmax` for columns that may have seen no key yet."""
    new = gl.maximum(top, gl.max(s, axis=0))
    known = gl.where(new == float("-inf"), 0.0, new)
    shrink = gl.exp2((top - known) * scale)
    zeros = gl.zeros_like(s)
    return gl.exp2(gl.fma(s, scale + zeros, zeros - (known * scale)[None, :])), new, shrink


@gluon.jit(do_not_specialize=["table_stride", "scales_stride"])
def _draft_kernel(
    q, keys, values, scales, table, lengths, out, codes, code_scales, scale, table_stride, codes_stride, scales_stride,
    N: gl.constexpr, G: gl.constexpr, H: gl.constexpr, Q: gl.constexpr, J: gl.constexpr, EACH: gl.constexpr,
    PAGE: gl.constexpr, SLOTS: gl.constexpr, FP8: gl.constexpr, QUANT: gl.constexpr, FLOOR: gl.constexpr,
    POW2: gl.constexpr, PDL: gl.constexpr,
):
    """One key/value head of one sequence, for EACH of its J tokens."""
    begin(PDL)
    k_ring, v_ring, scale_ring = _rings(SLOTS, H, FP8)
    rings, sources = (k_ring, v_ring, scale_ring), (keys, values, scales)
    PARTS: gl.constexpr = (J + EACH - 1) // EACH
    HEADS: gl.constexpr = N // G
    program = gl.program_id(0)
    first = program % PARTS * EACH
    group, sequence = program // PARTS % G, program // (PARTS * G)
    before = gl.load(lengths + sequence) - (J - 1)  # keys that the sequence's first token sees
    length = before + gl.minimum(first + EACH, J) - 1
    pages = table + sequence * table_stride
    tiles = gl.cdiv(length, _TILE)
    for half in gl.static_range(SLOTS - 1):
        _copy(rings, sources, pages, half, tiles, tiles, length, group, G, PAGE, SLOTS, half % 2 == 0, FP8)
    query = _query(q, sequence, first, group, N, G, H, Q, J, EACH)
    key = gl.arange(0, _TILE, layout=gl.SliceLayout(1, _MMA))
    seen = gl.minimum(before + first + gl.arange(0, Q, layout=gl.SliceLayout(0, _MMA)) // HEADS, length)
    top = gl.full([Q], float("-inf"), gl.float32, layout=gl.SliceLayout(0, _RIGHT))
    parts_layout: gl.constexpr = _parts(gl.zeros([_TILE, Q], gl.float32, layout=_RIGHT)).type.layout
    sums = gl.zeros([4, Q], gl.float32, layout=gl.SliceLayout(2, parts_layout))
    acc = gl.zeros([H, Q], gl.float32, layout=_MMA)
    for t in range(tiles):
        async_copy.wait_group(SLOTS - 2)  # this tile's keys are here
        gl.thread_barrier()
        _copy(
            rings, sources, pages, 2 * t - 1 + SLOTS, tiles, tiles, length, group, G, PAGE, SLOTS, SLOTS % 2 == 1, FP8
        )
        k = _key_operand(k_ring.index((2 * t) % SLOTS), FP8)
        s = mma_v2(k, query, gl.zeros([_TILE, Q], gl.float32, layout=_MMA))
        if FP8:  # BF16 in the lower half: the key's power of two
            s *= (scale_ring.index(t % 4).load(gl.SliceLayout(1, _MMA)) << 16).to(gl.float32, bitcast=True)[:, None]
        s = gl.where(((tiles - 1 - t) * _TILE + key)[:, None] < seen[None, :], s, float("-inf"))
        s = gl.convert_layout(s, _RIGHT)
        async_copy.wait_group(SLOTS - 2)  # this tile's values are here
        gl.thread_barrier()
        _copy(rings, sources, pages, 2 * t + SLOTS, tiles, tiles, length, group, G, PAGE, SLOTS, SLOTS % 2 == 0, FP8)
        p, top, shrink = _softmax(s, top, scale)
        weights = p
        if FP8:  # BF16 in the upper half: the value's. What is rounded next rounds as p alone would.
            unit = (scale_ring.index(t % 4).load(gl.SliceLayout(1, _RIGHT)) & -65536).to(gl.float32, bitcast=True)
            weights = p * unit[:, None]
        v = _value_operand(v_ring.index((2 * t + 1) % SLOTS), FP8)
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(0, _MMA))[None, :]
        acc = mma_v2(v, weights.to(gl.bfloat16), acc)
        sums = _add_up(sums, p, shrink)
    async_copy.wait_group(0)
    total = gl.sum(gl.sum(sums.reshape([2, 2, Q]), axis=1), axis=0)
    y = (acc * gl.convert_layout(_reciprocal(total), gl.SliceLayout(0, _MMA))[None, :]).to(gl.bfloat16)
    _store(
        y, sequence, first, group, out, codes, code_scales, codes_stride, scales_stride, N, G, J, EACH, FP8, QUANT,
        FLOOR, POW2,
    )


@gluon.jit
def _query(
    q, sequence, first, group, N: gl.constexpr, G: gl.constexpr, H: gl.constexpr, Q: gl.constexpr, J: gl.constexpr,
    EACH: gl.constexpr,
):
    """The queries of a program [H, Q]; zeros beyond its tokens."""
    HEADS: gl.constexpr = N // G
    element = gl.arange(0, H, layout=gl.SliceLayout(1, _RIGHT))
    column = gl.arange(0, Q, layout=gl.SliceLayout(0, _RIGHT))
    token = first + column // HEADS
    mine = (column < EACH * HEADS) & (token < J)
    at = ((sequence * J + token) * N + group * HEADS + column % HEADS)[None, :] * H + element[:, None]
    return gl.load(q + at, mask=mine[None, :], other=0.0)


@gluon.jit
def _store(
    y, sequence, first, group, out, codes, code_scales, codes_stride, scales_stride,
    N: gl.constexpr, G: gl.constexpr, J: gl.constexpr, EACH: gl.constexpr, FP8: gl.constexpr, QUANT: gl.constexpr,
    FLOOR: gl.constexpr, POW2: gl.constexpr,
):
    """The heads [H, Q] of one group's tokens, BF16 or quantized."""
    H: gl.constexpr = y.shape[0]
    HEADS: gl.constexpr = N // G
    element, column = _value_rows(H, FP8), gl.arange(0, y.shape[1], layout=gl.SliceLayout(0, _MMA))
    token, head = first + column // HEADS, group * HEADS + column % HEADS
    mine, row = (column < EACH * HEADS) & (token < J), sequence * J + token
    if QUANT:  # a head is a group of 128 columns
        x = y.to(gl.float32)
        unit = scale_from(gl.max(abs_bits(x), axis=0), FLOOR, POW2)
        at = (row.to(gl.int64) * codes_stride + head * H)[None, :] + element[:, None]
        gl.store(codes + at, encode(x, unit[None, :]).to(gl.uint8, bitcast=True), mask=mine[None, :])
        gl.store(code_scales + head * scales_stride + row, unit, mask=mine)
    else:
        gl.store(out + (row * N + head)[None, :] * H + element[:, None], y, mask=mine[None, :])


def takes(query_lengths: tuple[int, ...], cache: LayerCache, heads: int) -> bool:
    """Whether `decode` serves sequences with so many new tokens each: all have as many, and few."""
    return (
        bool(query_lengths) and query_lengths[0] in TOKENS and len(set(query_lengths)) == 1 and serves(cache, heads)
    )


def decode(
    q: Tensor, cache: LayerCache, table: Tensor, lengths: Tensor, scale: float, tokens: int, out: Tensor | None = None
) -> Tensor:
    """`q` [B * J, N, H], the last J = `tokens` tokens of each sequence, over the pages of `cache` -> the same shape.

    `table` int32 [B, M] names the pages of a sequence; `lengths` int32 [B] counts its keys, those of all J tokens
    included, so it is at least J. Token i of a sequence sees the first `lengths - (J - 1) + i` of them. The bits of a
    row are those of `decode.decode` with that many keys.
    """
    out = torch.empty_like(q) if out is None else out
    _launch(q, cache, table, lengths, scale, tokens, out, None, False)
    return out


def decode_quantize(
    q: Tensor, cache: LayerCache, table: Tensor, lengths: Tensor, scale: float, tokens: int, pow2: bool
) -> QTensor:
    """`quantize_act(decode(...).flatten(1))` in the same kernel, for heads of 128."""
    quantized = new_heads(q)
    _launch(q, cache, table, lengths, scale, tokens, q, quantized, pow2)
    return quantized


def _launch(
    q: Tensor, cache: LayerCache, table: Tensor, lengths: Tensor, scale: float, tokens: int, out: Tensor,
    quantized: QTensor | None, pow2: bool,
) -> None:
    (rows, heads, head_dim), (page, groups) = q.shape, cache.keys.shape[1:3]
    batch, keys, values, scales = lengths.shape[0], cache.keys, cache.values, cache.scales
    assert rows == batch * tokens and tokens in TOKENS and serves(cache, heads)
    assert q.is_contiguous() and keys.is_contiguous() and values.is_contiguous()
    assert table.stride(1) == 1 and lengths.is_contiguous() and out.is_contiguous() and out.shape == q.shape
    fp8 = scales is not None
    if scales is not None:  # a word: two elements of a key, four or two of a value, the powers of two of both
        assert scales.is_contiguous()
        value_words = torch.int32 if head_dim == 128 else torch.int16
        keys, values, scales = keys.view(torch.int16), values.view(value_words), scales.view(torch.int32)
    log2_scale = float(np.float32(scale) * np.float32(math.log2(math.e)))  # one FP32 product, as in FlashAttention-4
    codes, units = (quantized.codes.view(torch.uint8), quantized.scale) if quantized is not None else (q, q)
    each, columns = split(heads // groups, tokens)
    if batch:
        _draft_kernel[(batch * groups * -(-tokens // each),)](
            q, keys, values, scales if fp8 else q, table, lengths, out, codes, units, log2_scale, table.stride(0),
            codes.stride(0), units.stride(1), N=heads, G=groups, H=head_dim, Q=columns, J=tokens, EACH=each, PAGE=page,
            SLOTS=_SLOTS, FP8=fp8, QUANT=quantized is not None, FLOOR=_FLOOR_BITS, POW2=pow2, num_warps=4,
            maxnreg=128 if fp8 and head_dim == BLOCK and columns == _COLUMNS[0] else None, enable_fp_fusion=False,
            **LAUNCH,
        )


def split(heads: int, tokens: int) -> tuple[int, int]:
    """How many of a sequence's tokens one program takes, with `heads` query heads each, and its columns."""
    each = min(tokens, _COLUMNS[-1] // heads)
    return each, next(size for size in _COLUMNS if size >= each * heads)
