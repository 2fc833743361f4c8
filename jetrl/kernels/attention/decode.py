"""Attention of one new token per sequence over its pages, BF16 or FP8: FlashAttention-4's bits, and faster.

One program serves the query heads of one key/value head and reads exactly the keys that exist. Scores and outputs are
computed transposed, with the keys (then the head's elements) along the 64 or 128 rows of the tensor core and the few
queries along its columns. Tiles of keys and tiles of values take turns in one ring in shared memory, so that two to
four programs fit on a processor and hide each other's waits. The bits are those of FlashAttention-4's forward pass
because the steps are the same:

- tiles of 128 keys from the last to the first; scores summed 16 elements of the head at a time, from zero;
- `p = exp2(fma(score, scale, -(max * scale)))`, rounded to BF16 for the product with the values, not for its sum;
- a row's sum in four parts: part q adds, key by key, the keys 8 i + 2 q and 8 i + 2 q + 1 of each tile to what it had,
  times the change of the maximum in one fma; in the end (part 0 + part 1) + (part 2 + part 3);
- the output rescaled before a tile's product is added, and multiplied at the end by an approximate reciprocal of the
  sum.

An FP8 cache holds E4M3 codes and a power of two for each key and value head. A code is a BF16 number; a key's power
of two multiplies its score, a value's multiplies its softmax weight. Neither rounds, so the bits are those of attention
over the dequantized BF16 keys and values (D21). (A weight times a power of two rounds below 2**-126. To affect an
output, all heavier keys must have a value of exactly zero there; such outputs are below 2**-100.) The layouts below say
which thread reads what: shared memory is read without bank conflicts, and codes become operands of the tensor core in
the thread that reads them.

`tests/gpu/test_decode_hopper.py` compares it with FlashAttention-4.
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

from jetrl.kernels.launch import LAUNCH, begin
from jetrl.kernels.qtensor import QTensor
from jetrl.kernels.quantize.triton import _FLOOR_BITS, abs_bits, encode, new_heads, scale_from
from jetrl.precision.formats import BLOCK
from jetrl.types import LayerCache

TILE = 128  # keys: what FlashAttention-4 takes for heads of 64 and 128
_TILE = gl.constexpr(TILE)
_PROCESSORS = 132
_QUERIES = (8, 16)  # per key/value head: columns of the tensor core

_MMA = gl.constexpr(gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1], instr_shape=[16, 8]))
_LEFT = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=_MMA, k_width=2))
_RIGHT = gl.constexpr(gl.DotOperandLayout(operand_index=1, parent=_MMA, k_width=2))
# FP8: a thread reads pairs of a key's elements; of a value, four (heads of 128) or two elements of neighbouring keys
_KEY_WORDS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[8, 0], [0, 4], [0, 8], [0, 16], [0, 32], [64, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]], [], [TILE, 64],
    )
)
_KEY_WORDS_64 = gl.constexpr(
    gl.DistributedLinearLayout(
        [[8, 0], [0, 4], [0, 8], [0, 16], [64, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]], [], [TILE, 32],
    )
)
_VALUE_WORDS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[1, 0], [8, 0], [16, 0], [32, 0], [64, 0]], [[2, 0], [4, 0], [0, 1], [0, 2], [0, 4]],
        [[0, 8], [0, 16]], [], [TILE, 32],
    )
)
_K_SHARED = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
_V_SHARED = gl.constexpr(gl.SwizzledSharedLayout(8, 2, 4, [1, 0]))  # of 64 codes: for keys as well


@gluon.jit
def _reciprocal(x):
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


def _widened(codes: str, outputs: str) -> str:
    """PTX: the four E4M3 codes in register `codes` -> BF16, two in each of two outputs. 2**120 corrects the bias."""
    first, second = outputs.split()
    return f"""
        shr.b32 t, {codes}, 4; and.b32 t, t, 0x07070707; and.b32 high, {codes}, 0x80808080; or.b32 high, high, t;
        shl.b32 low, {codes}, 4; and.b32 low, low, 0xf0f0f0f0;
        prmt.b32 t, low, high, 0x5140; mul.bf16x2 {first}, t, c;
        prmt.b32 t, low, high, 0x7362; mul.bf16x2 {second}, t, c;"""


_REGISTERS = "{ .reg .b32 high, low, t, x, c; mov.b32 c, 0x7b807b80;"
_PAIRS = gl.constexpr(_REGISTERS + _widened("$2", "$0 $1") + " }")
_TWOS = gl.constexpr(_REGISTERS + "prmt.b32 x, $2, 0, 0x3120;" + _widened("x", "$0 $1") + " }")
_QUADS = gl.constexpr(
    _REGISTERS + "prmt.b32 x, $4, $5, 0x5140;" + _widened("x", "$0 $1")
    + "prmt.b32 x, $4, $5, 0x7362;" + _widened("x", "$2 $3") + " }"
)


@gluon.jit
def _pairs(x):
    """Two E4M3 codes in each 16-bit word -> two BF16 in a 32-bit word."""
    return gl.inline_asm_elementwise(_PAIRS, "=&r,=&r,r", [x], dtype=gl.int32, is_pure=True, pack=2)


@gluon.jit
def _twos(x):
    """Two E4M3 codes in each 16-bit word -> two BF16 tensors; two neighbouring words are converted together."""
    return gl.inline_asm_elementwise(
        _TWOS, "=&r,=&r,r", [x], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=2
    )


@gluon.jit
def _quads(x):
    """Four E4M3 codes in each 32-bit word -> four BF16 tensors; two neighbouring words are converted together."""
    return gl.inline_asm_elementwise(
        _QUADS, "=&r,=&r,=&r,=&r,r,r", [x], dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True,
        pack=2,
    )


@gluon.jit
def _copy_rows(slot, source, first, group, left, G: gl.constexpr):
    """Begin to copy a tile's rows of one head from row `first` on; from row `left` of the tile on, zeros."""
    width: gl.constexpr = slot.shape[1]
    vector: gl.constexpr = 128 // slot.dtype.primitive_bitwidth
    layout: gl.constexpr = gl.BlockedLayout([1, vector], [32 * vector // width, width // vector], [4, 1], [1, 0])
    row = gl.arange(0, _TILE, layout=gl.SliceLayout(1, layout))
    col = gl.arange(0, width, layout=gl.SliceLayout(0, layout))
    at = source + (first * G + group) * width + ((row * (G * width))[:, None] + col[None, :])
    async_copy.async_copy_global_to_shared(slot, at, mask=(row < left)[:, None])


@gluon.jit
def _copy(
    rings, sources, pages, half, tiles, own, length, group,
    G: gl.constexpr, PAGE: gl.constexpr, SLOTS: gl.constexpr, KEYS: gl.constexpr, FP8: gl.constexpr,
):
    """Begin to copy tile number `half`, counting keys and values alternately, to its slot; `KEYS`: it holds keys."""
    tile = half // 2
    if tile < own:
        block = tiles - 1 - tile
        page = gl.load(pages + block * _TILE // PAGE).to(gl.int64)
        inside, left = (block * _TILE) % PAGE, length - block * _TILE
        if KEYS:
            _copy_rows(rings[0].index(half % SLOTS), sources[0], page * PAGE + inside, group, left, G)
            if FP8:
                each = gl.arange(0, _TILE, layout=gl.BlockedLayout([1], [32], [4], [0]))
                at = sources[2] + ((page * G + group) * PAGE + inside) + each
                async_copy.async_copy_global_to_shared(rings[2].index(tile % 4), at, mask=each < left)
        else:
            _copy_rows(rings[1].index(half % SLOTS), sources[1], page * PAGE + inside, group, left, G)
    async_copy.commit_group()


@gluon.jit
def _key_operand(slot, FP8: gl.constexpr):
    """A tile of keys [TILE, H] as the left operand."""
    if FP8:
        w = _pairs(slot.load(_KEY_WORDS if slot.shape[1] == 64 else _KEY_WORDS_64))
        k = gl.join(w.to(gl.int16), (w >> 16).to(gl.int16)).to(gl.bfloat16, bitcast=True)
        return gl.convert_layout(k.reshape([_TILE, 2 * slot.shape[1]]), _LEFT)
    else:
        return slot.load(_LEFT)


@gluon.jit
def _value_operand(slot, FP8: gl.constexpr):
    """A tile of values transposed, [H, TILE], as the left operand; FP8: rows in the order of `_value_rows`."""
    if FP8:
        words = slot.load(_VALUE_WORDS)
        if slot.dtype == gl.int32:
            v0, v1, v2, v3 = _quads(words)
            v = gl.join(gl.join(v0, v2), gl.join(v1, v3)).reshape([_TILE, 4, 8, 2, 2])
            return gl.convert_layout(v.permute((3, 1, 4, 2, 0)).reshape([128, _TILE]), _LEFT)
        else:
            v0, v1 = _twos(words)
            v = gl.join(v0, v1).reshape([_TILE, 4, 8, 2])
            return gl.convert_layout(v.permute((1, 3, 2, 0)).reshape([64, _TILE]), _LEFT)
    else:
        return slot.permute((1, 0)).load(_LEFT)


@gluon.jit
def _value_rows(H: gl.constexpr, FP8: gl.constexpr):
    """The element of a head that each row of the result holds."""
    m = gl.arange(0, H, layout=gl.SliceLayout(1, _MMA))
    if FP8:  # of H / 32 neighbouring elements, two lie 8 rows apart, the other two 64
        m = H // 32 * (m // 16 % 4 * 8 + m % 8) + m // 64 * 2 + m // 8 % 2
    return m


@gluon.jit
def _softmax(s, top, scale):
    """Weights of the scores [TILE, Q], the new maximum [Q], and what rescales older results [Q]."""
    new = gl.maximum(top, gl.max(s, axis=0))
    shrink = gl.exp2((top - new) * scale)
    zeros = gl.zeros_like(s)
    return gl.exp2(gl.fma(s, scale + zeros, zeros - (new * scale)[None, :])), new, shrink


@gluon.jit
def _parts(p):
    """[TILE, Q] -> [4, Q, TILE / 4]: the keys of each part of a row's sum, in order."""
    q: gl.constexpr = p.shape[1]
    return p.reshape([_TILE // 16, 2, 4, 2, q]).permute((2, 4, 0, 1, 3)).reshape([4, q, _TILE // 4])


@gluon.jit
def _add_up(sums, p, shrink):
    """The four sums [4, Q] after a tile's weights. One thread holds all keys of a part and adds them in order."""
    parts = _parts(p)
    layout: gl.constexpr = parts.type.layout
    shrink = gl.convert_layout(shrink, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    first = gl.arange(0, _TILE // 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout))) == 0
    zeros = gl.zeros_like(parts)
    begun = gl.fma(sums[:, :, None] + zeros, shrink[None, :][:, :, None] + zeros, parts)
    return gl.sum(gl.where(first[None, :][:, None, :], begun, parts), axis=2)


@gluon.jit
def _rings(SLOTS: gl.constexpr, H: gl.constexpr, FP8: gl.constexpr):
    """Shared memory for tiles of keys, of values (the same) and of powers of two."""
    if FP8 and H == 128:  # words of two codes of a key, of four codes of a value
        k_ring = gl.allocate_shared_memory(gl.int16, [SLOTS, _TILE, 64], _K_SHARED)
        v_ring = k_ring._reinterpret(gl.int32, [SLOTS, _TILE, 32], _V_SHARED)
    elif FP8:
        k_ring = gl.allocate_shared_memory(gl.int16, [SLOTS, _TILE, 32], _V_SHARED)
        v_ring = k_ring
    else:
        k_ring = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, _TILE, H], _K_SHARED)
        v_ring = k_ring
    scale_ring = gl.allocate_shared_memory(gl.int32, [4, _TILE], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return k_ring, v_ring, scale_ring


@gluon.jit(do_not_specialize=["table_stride", "scales_stride"])  # one kernel for all batches: seconds to compile each
def _decode_kernel(
    q, keys, values, scales, table, lengths, out, codes, code_scales, shared, tops, parts, accs,
    scale, table_stride, codes_stride, scales_stride,
    N: gl.constexpr, G: gl.constexpr, H: gl.constexpr, Q: gl.constexpr, PAGE: gl.constexpr, SLOTS: gl.constexpr,
    FP8: gl.constexpr, QUANT: gl.constexpr, FLOOR: gl.constexpr, POW2: gl.constexpr, MERGE: gl.constexpr,
    PDL: gl.constexpr,
):
    begin(PDL)
    k_ring, v_ring, scale_ring = _rings(SLOTS, H, FP8)
    rings, sources = (k_ring, v_ring, scale_ring), (keys, values, scales)
    sequence, group = gl.program_id(0) // G, gl.program_id(0) % G
    length = gl.load(lengths + sequence)
    pages = table + sequence * table_stride
    tiles = gl.cdiv(length, _TILE)
    own = tiles
    if MERGE:  # the first tiles belong to several sequences: `decode_shared.py` goes on with them
        own -= gl.load(shared + sequence)
    for half in gl.static_range(SLOTS - 1):
        _copy(rings, sources, pages, half, tiles, own, length, group, G, PAGE, SLOTS, half % 2 == 0, FP8)
    element, head = gl.arange(0, H, layout=gl.SliceLayout(1, _RIGHT)), gl.arange(0, Q, layout=gl.SliceLayout(0, _RIGHT))
    at_q = (sequence * N + group * (N // G) + head)[None, :] * H + element[:, None]
    query = gl.load(q + at_q, mask=(head < N // G)[None, :], other=0.0)
    key = gl.arange(0, _TILE, layout=gl.SliceLayout(1, _MMA))
    top = gl.full([Q], float("-inf"), gl.float32, layout=gl.SliceLayout(0, _RIGHT))
    parts_layout: gl.constexpr = _parts(gl.zeros([_TILE, Q], gl.float32, layout=_RIGHT)).type.layout
    sums = gl.zeros([4, Q], gl.float32, layout=gl.SliceLayout(2, parts_layout))
    acc = gl.zeros([H, Q], gl.float32, layout=_MMA)
    for t in range(own):
        async_copy.wait_group(SLOTS - 2)  # this tile's keys are here
        gl.thread_barrier()
        _copy(rings, sources, pages, 2 * t - 1 + SLOTS, tiles, own, length, group, G, PAGE, SLOTS, SLOTS % 2 == 1, FP8)
        k = _key_operand(k_ring.index((2 * t) % SLOTS), FP8)
        s = mma_v2(k, query, gl.zeros([_TILE, Q], gl.float32, layout=_MMA))
        if FP8:  # BF16 in the lower half: the key's power of two
            s *= (scale_ring.index(t % 4).load(gl.SliceLayout(1, _MMA)) << 16).to(gl.float32, bitcast=True)[:, None]
        s = gl.where(((tiles - 1 - t) * _TILE + key < length)[:, None], s, float("-inf"))
        s = gl.convert_layout(s, _RIGHT)
        async_copy.wait_group(SLOTS - 2)  # this tile's values are here
        gl.thread_barrier()
        _copy(rings, sources, pages, 2 * t + SLOTS, tiles, own, length, group, G, PAGE, SLOTS, SLOTS % 2 == 0, FP8)
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
    if MERGE and own < tiles:
        _store_state(top, sums, acc, sequence, group, tops, parts, accs, N, G, FP8)
    else:
        inverse = _reciprocal(gl.sum(gl.sum(sums.reshape([2, 2, Q]), axis=1), axis=0))
        y = (acc * gl.convert_layout(inverse, gl.SliceLayout(0, _MMA))[None, :]).to(gl.bfloat16)
        to = (out, codes, code_scales, codes_stride, scales_stride)
        _store(y, sequence, group, to, N, G, FP8, QUANT, FLOOR, POW2)


@gluon.jit
def _store_state(
    top, sums, acc, sequence, group, tops, parts, accs, N: gl.constexpr, G: gl.constexpr, FP8: gl.constexpr,
):
    """What the tiles after these need: maxima [B, N], sums [B, N, 4], outputs [B, N, H], FP32."""
    H: gl.constexpr = acc.shape[0]
    Q: gl.constexpr = acc.shape[1]
    first = sequence * N + group * (N // G)
    head = gl.arange(0, Q, layout=top.type.layout)
    gl.store(tops + first + head, top, mask=head < N // G)
    sums_layout: gl.constexpr = sums.type.layout
    part = gl.arange(0, 4, layout=gl.SliceLayout(1, sums_layout))
    head = gl.arange(0, Q, layout=gl.SliceLayout(0, sums_layout))
    gl.store(parts + ((first + head) * 4)[None, :] + part[:, None], sums, mask=(head < N // G)[None, :])
    element, head = _value_rows(H, FP8), gl.arange(0, Q, layout=gl.SliceLayout(0, _MMA))
    gl.store(accs + ((first + head) * H)[None, :] + element[:, None], acc, mask=(head < N // G)[None, :])


@gluon.jit
def _store(
    y, sequence, group, to, N: gl.constexpr, G: gl.constexpr, FP8: gl.constexpr, QUANT: gl.constexpr,
    FLOOR: gl.constexpr, POW2: gl.constexpr,
):
    """The heads [H, Q] of one group, BF16 or quantized."""
    out, codes, code_scales, codes_stride, scales_stride = to
    H: gl.constexpr = y.shape[0]
    element, head = _value_rows(H, FP8), gl.arange(0, y.shape[1], layout=gl.SliceLayout(0, _MMA))
    mine, head = head < N // G, group * (N // G) + head
    if QUANT:  # a head is a group of 128 columns
        x = y.to(gl.float32)
        unit = scale_from(gl.max(abs_bits(x), axis=0), FLOOR, POW2)
        at = sequence.to(gl.int64) * codes_stride + head[None, :] * H + element[:, None]
        gl.store(codes + at, encode(x, unit[None, :]).to(gl.uint8, bitcast=True), mask=mine[None, :])
        gl.store(code_scales + head * scales_stride + sequence, unit, mask=mine)
    else:
        gl.store(out + (sequence * N + head)[None, :] * H + element[:, None], y, mask=mine[None, :])


def serves(cache: LayerCache, heads: int) -> bool:
    """Whether `decode` reads such a cache; FlashAttention-4 serves the rest."""
    page, groups, head_dim = cache.keys.shape[1:]
    return head_dim in (64, 128) and page % TILE == 0 and heads // groups <= _QUERIES[-1]


def decode(
    q: Tensor, cache: LayerCache, table: Tensor, lengths: Tensor, scale: float, out: Tensor | None = None
) -> Tensor:
    """`q` [B, N, H], one query per sequence, over the pages of `cache` -> [B, N, H], in `out` if that is given.

    `table` int32 [B, M] names the pages of a sequence, `lengths` int32 [B] counts its keys, the new one included, so it
    is at least 1.
    """
    out = torch.empty_like(q) if out is None else out
    launch(q, cache, table, lengths, scale, out, None, False)
    return out


def decode_quantize(
    q: Tensor, cache: LayerCache, table: Tensor, lengths: Tensor, scale: float, pow2: bool
) -> QTensor:
    """`quantize_act(decode(...).flatten(1))` in the same kernel, for heads of 128."""
    quantized = new_heads(q)
    launch(q, cache, table, lengths, scale, q, quantized, pow2)
    return quantized


def launch(
    q: Tensor, cache: LayerCache, table: Tensor, lengths: Tensor, scale: float, out: Tensor,
    quantized: QTensor | None, pow2: bool, state: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
) -> None:
    """`state`: how many of the first tiles of each sequence [B] int32 to leave out, and where what was computed goes if
    any were: maxima [B, N], sums [B, N, 4], outputs [B, N, H], FP32; nothing goes to `out` or `quantized` then."""
    (batch, heads, head_dim), (page, groups) = q.shape, cache.keys.shape[1:3]
    keys, values, scales = cache.keys, cache.values, cache.scales
    assert serves(cache, heads) and q.is_contiguous() and keys.is_contiguous() and values.is_contiguous()
    assert table.stride(1) == 1 and lengths.is_contiguous() and out.is_contiguous() and out.shape == q.shape
    fp8 = scales is not None
    if scales is not None:  # a word: two elements of a key, four or two of a value, the powers of two of both
        assert scales.is_contiguous()
        value_words = torch.int32 if head_dim == 128 else torch.int16
        keys, values, scales = keys.view(torch.int16), values.view(value_words), scales.view(torch.int32)
    log2_scale = float(np.float32(scale) * np.float32(math.log2(math.e)))  # one FP32 product, as in FlashAttention-4
    codes, units = (quantized.codes.view(torch.uint8), quantized.scale) if quantized is not None else (q, q)
    queries = next(size for size in _QUERIES if size >= heads // groups)
    if batch:
        _decode_kernel[(batch * groups,)](
            q, keys, values, scales if fp8 else q, table, lengths, out, codes, units, *(state or (q, q, q, q)),
            log2_scale, table.stride(0), codes.stride(0), units.stride(1), N=heads, G=groups, H=head_dim, Q=queries,
            PAGE=page, SLOTS=_slots(fp8, batch * groups), FP8=fp8, QUANT=quantized is not None, FLOOR=_FLOOR_BITS,
            POW2=pow2, MERGE=state is not None, num_warps=4, maxnreg=128 if fp8 and head_dim == BLOCK else None,
            enable_fp_fusion=False, **LAUNCH,
        )


def _slots(fp8: bool, programs: int) -> int:
    """Tiles in the ring (they change no bits): 3, so that two (BF16) or four (FP8) programs fit on a processor. With
    more than four FP8 programs per processor, a longer ring is faster, though only three fit at a time."""
    return 4 if fp8 and programs > 4 * _PROCESSORS else 3
