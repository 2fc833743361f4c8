"""Triton kernels for pages of the KV cache: writing them, and reading FP8 pages back as BF16 for FlashAttention-4.

An FP8 cache holds, for each head of a token, E4M3 codes and one power of two. `code * scale` is exact in BF16, so what
attention reads from dequantized pages has the bits of what training's attention reads (`reference.round_heads`).

Legend: `T` tokens, `B` sequences, `M` pages per sequence, `G` key/value heads, `H` head size.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels take pointers and compile-time numbers, for which there are no types)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.kernels.launch import E4M3, LAUNCH, begin
from jetrl.kernels.quantize.e4m3 import values_of
from jetrl.kernels.quantize.triton import _FLOOR_BITS, abs_bits, encode, scale_from
from jetrl.types import LayerCache

_TOKENS = 32  # tokens of a page that are read at once


@triton.jit
def stored(x, scale, CODES: tl.constexpr):
    """What is stored for the FP32 `x`: the bytes of its E4M3 codes, or their values, exact in BF16."""
    codes = encode(x, scale)
    if CODES:
        return codes
    elif E4M3:
        return (codes.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale).to(tl.bfloat16)
    else:
        return (values_of(codes) * scale).to(tl.bfloat16)


@triton.jit
def scale_place(slot, group, G: tl.constexpr, PAGE: tl.constexpr):
    """Index in `scales` [pages, G, page, 2] of the key's scale of a slot; the value's is the next element."""
    return ((slot // PAGE * G + group) * PAGE + slot % PAGE) * 2


@triton.jit(do_not_specialize=["num_rows"])
def _round_kernel(
    x, out, num_rows, token_stride, group_stride,
    G: tl.constexpr, H: tl.constexpr, HB: tl.constexpr, R: tl.constexpr, FLOOR: tl.constexpr, PDL: tl.constexpr,
):
    """R heads; row r is head r % G of token r // G."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    cols = tl.arange(0, HB)
    mask = (row < num_rows)[:, None] & (cols < H)[None, :]
    start = row // G * token_stride + row % G * group_stride
    v = tl.load(x + start[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    scale = scale_from(tl.max(abs_bits(v), axis=1), FLOOR, True)
    tl.store(out + row[:, None] * H + cols[None, :], stored(v, scale[:, None], False), mask=mask)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _write_kernel(k, v, slots, keys, values, k_stride, v_stride, W: tl.constexpr, B: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    cols = tl.arange(0, B)
    mask = (cols < W) & (slot >= 0)
    tl.store(keys + slot * W + cols, tl.load(k + token * k_stride + cols, mask=mask), mask=mask)
    tl.store(values + slot * W + cols, tl.load(v + token * v_stride + cols, mask=mask), mask=mask)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _write_codes_kernel(
    k, v, slots, keys, values, scales, k_stride, v_stride,
    G: tl.constexpr, GB: tl.constexpr, H: tl.constexpr, HB: tl.constexpr, PAGE: tl.constexpr, FLOOR: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    group, cols = tl.arange(0, GB), tl.arange(0, HB)
    alive = (group < G) & (slot >= 0)
    mask = alive[:, None] & (cols < H)[None, :]
    at = group[:, None] * H + cols[None, :]
    k_head = tl.load(k + token * k_stride + at, mask=mask, other=0.0).to(tl.float32)
    v_head = tl.load(v + token * v_stride + at, mask=mask, other=0.0).to(tl.float32)
    k_scale = scale_from(tl.max(abs_bits(k_head), axis=1), FLOOR, True)
    v_scale = scale_from(tl.max(abs_bits(v_head), axis=1), FLOOR, True)
    tl.store(keys + slot * (G * H) + at, stored(k_head, k_scale[:, None], True), mask=mask)
    tl.store(values + slot * (G * H) + at, stored(v_head, v_scale[:, None], True), mask=mask)
    to = scales + scale_place(slot, group, G, PAGE)
    tl.store(to, k_scale.to(tl.bfloat16), mask=alive)
    tl.store(to + 1, v_scale.to(tl.bfloat16), mask=alive)


@triton.jit
def _decoded(codes, scale, at, mask):
    """BF16 values of the codes at `at`; zero where masked, whatever the scale."""
    code = tl.load(codes + at, mask=mask, other=0).to(tl.float8e4nv, bitcast=True).to(tl.float32)
    return (code * scale[:, None]).to(tl.bfloat16)


# what is not specialized has many values in steps with prompts, and is only added to an address
@triton.jit(do_not_specialize=["table_stride", "width"], do_not_specialize_on_alignment=["table", "lengths"])
def _read_kernel(
    keys, values, scales, table, lengths, out_keys, out_values, out_table, table_stride, width,
    G: tl.constexpr, H: tl.constexpr, HB: tl.constexpr, PAGE: tl.constexpr, R: tl.constexpr, BB: tl.constexpr,
    COMPACT: tl.constexpr, PDL: tl.constexpr,
):
    """One head of one page of one sequence, and the page's entry in the new table."""
    begin(PDL)
    block, group, sequence = tl.program_id(0) // G, tl.program_id(0) % G, tl.program_id(1)
    length = tl.load(lengths + sequence)
    used = tl.cdiv(length, PAGE)
    entry = out_table + sequence.to(tl.int64) * width + block
    pages = table + sequence.to(tl.int64) * table_stride
    if block < used:
        source = tl.load(pages + block)
        target = source
        if COMPACT:  # after the pages of the sequences before
            other = tl.arange(0, BB)
            target = block + tl.sum(tl.cdiv(tl.load(lengths + other, mask=other < sequence, other=0), PAGE), axis=0)
        cols = tl.arange(0, HB)
        for start in range(0, PAGE, R):
            offset = start + tl.arange(0, R)
            alive = offset < PAGE
            if COMPACT:
                alive &= block * PAGE + offset < length
            at_scale = scales + ((source.to(tl.int64) * G + group) * PAGE + offset) * 2
            k_scale = tl.load(at_scale, mask=alive, other=0.0).to(tl.float32)
            v_scale = tl.load(at_scale + 1, mask=alive, other=0.0).to(tl.float32)
            inside = (cols < H)[None, :]
            at = ((source.to(tl.int64) * PAGE + offset) * G + group)[:, None] * H + cols[None, :]
            to = ((target.to(tl.int64) * PAGE + offset) * G + group)[:, None] * H + cols[None, :]
            k = _decoded(keys, k_scale, at, alive[:, None] & inside)
            v = _decoded(values, v_scale, at, alive[:, None] & inside)
            # the end of the last page too: attention reads it under a mask, and NaN would pass through that
            whole = (offset < PAGE)[:, None] & inside
            tl.store(out_keys + to, k, mask=whole)
            tl.store(out_values + to, v, mask=whole)
        if group == 0:
            tl.store(entry, target)
    elif group == 0:  # nobody reads it, but it must name an existing page
        if COMPACT:
            tl.store(entry, 0)
        else:
            tl.store(entry, tl.load(pages + tl.maximum(used - 1, 0)))


def round_heads(x: Tensor) -> Tensor:
    """`reference.round_heads`: each head of `x` [T, G, H] quantized and dequantized; contiguous."""
    tokens, groups, head_dim = x.shape
    assert x.stride(2) == 1 and x.dtype == torch.bfloat16
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    r = 16
    if tokens:
        _round_kernel[(triton.cdiv(tokens * groups, r),)](
            x, out, tokens * groups, x.stride(0), x.stride(1), G=groups, H=head_dim,
            HB=triton.next_power_of_2(head_dim), R=r, FLOOR=_FLOOR_BITS, num_warps=4, enable_fp_fusion=False, **LAUNCH,
        )
    return out


def write_cache(k: Tensor, v: Tensor, slots: Tensor, cache: LayerCache) -> None:
    """Scatter `k`, `v` [T, G, H] to rows `slots` of the cache, quantized where it is FP8; slot -1 writes nothing."""
    tokens, groups, head_dim = k.shape
    k, v, keys, values = k.flatten(1), v.flatten(1), cache.keys, cache.values
    assert keys.is_contiguous() and values.is_contiguous() and k.stride(1) == 1 and v.stride(1) == 1
    if not tokens:
        return
    if cache.scales is None:
        width = groups * head_dim
        _write_kernel[(tokens,)](
            k, v, slots, keys, values, k.stride(0), v.stride(0), W=width, B=triton.next_power_of_2(width), num_warps=4
        )
        return
    assert cache.scales.is_contiguous()
    _write_codes_kernel[(tokens,)](
        k, v, slots, keys.view(torch.uint8), values.view(torch.uint8), cache.scales, k.stride(0), v.stride(0), G=groups,
        GB=triton.next_power_of_2(groups), H=head_dim, HB=triton.next_power_of_2(head_dim), PAGE=keys.shape[1],
        FLOOR=_FLOOR_BITS, num_warps=4, enable_fp_fusion=False,
    )


def _scratch_pages(needed: int, held: int) -> int:
    """Pages to allocate for `needed` of a cache's `held` pages: few distinct sizes, at most an eighth too large.

    The allocator reuses a freed block of the same size; sizes that grow step by step would pile up.
    """
    grain = max(1, (1 << needed.bit_length()) // 16)
    return min(-(-needed // grain) * grain, held)


def read_cache(cache: LayerCache, table: Tensor, lengths: Tensor, kv_pages: int) -> tuple[LayerCache, Tensor]:
    """The pages of an FP8 cache that hold keys of these sequences, in BF16: scratch pages and their table [B, M].

    `table` int32 [B, M], `lengths` int32 [B] (keys of each sequence), `kv_pages` at least the sum over the sequences of
    the pages that hold their keys (from `PagedPlan.kv_pages`): known on the host, so nothing waits for the device, and
    a CUDA graph may capture the call. Pages without keys are neither read nor written.

    If `kv_pages` is less than the cache has, the scratch has room for that many pages, in order of sequences, and the
    rows of a page after its last key become zero. Else it has as many as the cache, and each page goes whole to its own
    place there: sequences that share a page write the same bits to it twice, however many of its keys are theirs (a
    graph's padding rows own one key of page 0).
    """
    assert cache.scales is not None, "a BF16 cache needs no scratch"
    keys, values, scales = cache.keys, cache.values, cache.scales
    assert keys.is_contiguous() and values.is_contiguous() and scales.is_contiguous() and scales.dtype == torch.bfloat16
    held, page, groups, head_dim = keys.shape
    batch, width = table.shape
    assert table.stride(1) == 1 and lengths.is_contiguous() and kv_pages >= batch
    compact = kv_pages < held
    shape = (2, _scratch_pages(kv_pages, held), page, groups, head_dim)
    out_keys, out_values = torch.empty(shape, dtype=torch.bfloat16, device=keys.device)
    out_table = torch.empty(batch, width, dtype=torch.int32, device=keys.device)
    if batch:
        _read_kernel[(width * groups, batch)](
            keys.view(torch.uint8), values.view(torch.uint8), scales, table, lengths, out_keys, out_values, out_table,
            table.stride(0), width, G=groups, H=head_dim, HB=triton.next_power_of_2(head_dim), PAGE=page,
            R=min(_TOKENS, triton.next_power_of_2(page)), BB=max(256, triton.next_power_of_2(batch)) if compact else 1,
            COMPACT=compact, num_warps=4, enable_fp_fusion=False, **LAUNCH,
        )
    return LayerCache(out_keys, out_values), out_table
