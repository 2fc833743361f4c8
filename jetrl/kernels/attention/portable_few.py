"""The steps of `portable.py` for few rows (decode steps, drafts) over the pages of a cache, with keys and queries in
exchanged places.

There a program's rows are queries, and a tensor core takes at least 16 or 64 of them, while a decode step has as many
as query heads share a key head. Here the keys of a step are the rows of the first product, and the elements of a head
those of the second; queries are columns, of which 16 suffice. A product of two numbers does not depend on their order,
and sums are over the same elements in the same order, so the bits are those of `portable.py`, and all four warps have
keys of their own.

A step's keys, values and powers of two are copied while steps before are computed. An FP8 cache's codes become BF16 as
two pairs at a time, by shifts and two exact products.

Legend: `B` sequences, `N` query heads, `G` key/value heads, `H` head size.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels take pointers and compile-time numbers, for which there are no types)
from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.kernels import launch, tiles
from jetrl.kernels.launch import begin
from jetrl.kernels.qtensor import QTensor
from jetrl.kernels.quantize.e4m3 import scaled_values
from jetrl.kernels.quantize.triton import _FLOOR_BITS, abs_bits, encode, scale_from
from jetrl.types import LayerCache

_LEAST = 16  # queries of a tile


@triton.jit
def _page(table, step, k, length, KEYS: tl.constexpr, PAGE: tl.constexpr):
    """The page of a step, or of each of its keys where a page holds less."""
    if PAGE % KEYS == 0:
        return tl.load(table + tl.minimum(step * KEYS, length - 1) // PAGE).to(tl.int64)
    else:
        return tl.load(table + tl.minimum(step * KEYS + k, length - 1) // PAGE).to(tl.int64)


@triton.jit
def _units(scales, place, inside, FP8: tl.constexpr):
    """The powers of two of a step's keys and of its values, BF16. Where one is infinite, its head's codes are 0 or NaN
    and all its values NaN, as with a power that is NaN."""
    if FP8:
        word = tl.load(scales + place, mask=inside, other=0)
        key, value = word << 16, word & -65536
        key = tl.where((key & 0x7FFFFFFF) == 0x7F800000, 0x7FC00000, key)
        value = tl.where((value & 0x7FFFFFFF) == 0x7F800000, 0x7FC00000, value)
        return (
            key.to(tl.float32, bitcast=True).to(tl.bfloat16), value.to(tl.float32, bitcast=True).to(tl.bfloat16)
        )
    else:
        return scales, scales


@triton.jit
def _values(read, unit, FP8: tl.constexpr):
    """A step's keys or values [KEYS, HB] in BF16."""
    if FP8:
        return scaled_values(read, tl.broadcast_to(unit[:, None], read.shape))
    else:
        return read


@triton.jit(
    do_not_specialize=["table_stride", "codes_stride", "units_stride"],
    do_not_specialize_on_alignment=["starts", "lengths", "table"],
)
def _few_kernel(
    q, keys, values, scales, table, starts, lengths, out, codes, units, scale, table_stride, codes_stride, units_stride,
    N: tl.constexpr, G: tl.constexpr, H: tl.constexpr, HB: tl.constexpr, COLS: tl.constexpr, KEYS: tl.constexpr,
    STAGES: tl.constexpr, PAGE: tl.constexpr, FP8: tl.constexpr, ONES: tl.constexpr, QUANT: tl.constexpr,
    FLOOR: tl.constexpr, POW2: tl.constexpr, PDL: tl.constexpr,
):
    """All rows of one key head of one sequence. ONES: rows of the product that sums the weights. QUANT: codes and
    scales of the result are stored in place of it."""
    begin(PDL)
    SHARE: tl.constexpr = N // G
    sequence, group = tl.program_id(0) // G, tl.program_id(0) % G
    origin, length = tl.load(starts + sequence), tl.load(lengths + sequence)
    queries = tl.load(starts + sequence + 1) - origin
    if queries > 0:
        table += sequence.to(tl.int64) * table_stride
        col, e, k = tl.arange(0, COLS), tl.arange(0, HB), tl.arange(0, KEYS)
        token, head = origin + col // SHARE, group * SHARE + col % SHARE
        alive, position = col // SHARE < queries, length - queries + col // SHARE
        at = (token.to(tl.int64) * N + head)[None, :] * H + e[:, None]
        mask = alive[None, :] & (e < H)[:, None]
        query = tl.load(q + at, mask=mask, other=0.0)
        ones = tl.full((ONES, KEYS), 1.0, tl.float32).to(tl.bfloat16)
        top = tl.full((COLS,), float("-inf"), tl.float32)
        total, acc = tl.zeros((ONES, COLS), tl.float32), tl.zeros((HB, COLS), tl.float32)
        steps = tl.cdiv(length, KEYS)
        for i in tl.range(0, steps, num_stages=STAGES):
            key = i * KEYS + k
            inside = key < length
            page = _page(table, i, k, length, KEYS, PAGE)
            offset = i * KEYS % PAGE + k if PAGE % KEYS == 0 else key % PAGE
            place = ((page * PAGE + offset) * G + group)[:, None] * H + e[None, :]
            there = inside[:, None] & (e < H)[None, :]
            unit, value_unit = _units(scales, (page * G + group) * PAGE + offset, inside, FP8)
            read = tl.load(keys + place, mask=there, other=0)
            s = tl.dot(_values(read, unit, FP8), query)
            s = tl.where(key[:, None] <= position[None, :], s, float("-inf"))
            new = tl.maximum(top, tl.max(s, axis=0))
            zeros = tl.zeros_like(s)
            p = tl.exp2(tl.fma(s, scale + zeros, zeros - (new * scale)[None, :])).to(tl.bfloat16)
            shrink = tl.exp2((top - new) * scale)[None, :]
            read = tl.load(values + place, mask=there, other=0)
            acc = tl.dot(tl.trans(_values(read, value_unit, FP8)), p, acc * shrink)
            total = tl.dot(ones, p, total * shrink)
            top = new
        weight = tl.sum(tl.where((tl.arange(0, ONES) == 0)[:, None], total, 0.0), axis=0)
        y = tl.div_rn(acc, weight[None, :] + tl.zeros_like(acc)).to(tl.bfloat16)
        if QUANT:  # a head is a group of the quantizer
            x = y.to(tl.float32)
            unit = scale_from(tl.max(abs_bits(x), axis=0), FLOOR, POW2)
            to = codes + (token.to(tl.int64) * codes_stride + head * H)[None, :] + e[:, None]
            tl.store(to, encode(x, unit[None, :]), mask=mask)
            tl.store(units + head * units_stride + token, unit, mask=alive)
        else:
            tl.store(out + at, y, mask=mask)


def most_rows(head_dim: int) -> int:
    """Rows (query heads of one key head, of all tokens of a sequence) up to which `attend` serves; 0: it does not."""
    return tiles.few_rows(launch.CAPABILITY, head_dim)


def attend(
    q: Tensor, cache: LayerCache, table: Tensor, starts: Tensor, lengths: Tensor, longest: int, scale: float,
    out: Tensor | None, quantized: QTensor | None = None, pow2: bool = False,
) -> None:
    """`q` [T, N, H] of the B sequences of `starts` int32 [B + 1], up to `longest` tokens each, over their pages in
    `cache` to `out` [T, N, H], or to `quantized` (heads of 128).

    `table` int32 [B, M] names the pages of a sequence, `lengths` int32 [B] counts its keys, the new ones included.
    """
    (_, heads, size), (page, groups) = q.shape, cache.keys.shape[1:3]
    keys, values, scales, sequences = cache.keys, cache.values, cache.scales, starts.shape[0] - 1
    rows = longest * (heads // groups)
    assert 0 < rows <= most_rows(size) and (out is None) != (quantized is None) and (quantized is None or size == 128)
    assert q.is_contiguous() and keys.is_contiguous() and values.is_contiguous() and table.stride(1) == 1
    assert starts.dtype == lengths.dtype == table.dtype == torch.int32
    if scales is not None:  # a word: the powers of two of a key and of its value
        assert scales.is_contiguous() and scales.dtype == torch.bfloat16
        keys, values, scales = keys.view(torch.uint8), values.view(torch.uint8), scales.view(torch.int32)
    codes, units = (q, q) if quantized is None else (quantized.codes.view(torch.uint8), quantized.scale)
    tile = tiles.few(launch.CAPABILITY)
    _few_kernel[(sequences * groups,)](
        q, keys, values, q if scales is None else scales, table, starts, lengths, q if out is None else out, codes,
        units, scale * math.log2(math.e), table.stride(0), codes.stride(0), units.stride(1), N=heads, G=groups, H=size,
        HB=max(16, triton.next_power_of_2(size)), COLS=max(_LEAST, triton.next_power_of_2(rows)),
        KEYS=tiles.keys_for(size), STAGES=tile.stages, PAGE=page, FP8=scales is not None, ONES=tile.ones,
        QUANT=quantized is not None, FLOOR=_FLOOR_BITS, POW2=pow2, num_warps=tile.warps, enable_fp_fusion=False,
        **launch.LAUNCH,
    )
