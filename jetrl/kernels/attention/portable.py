"""Causal attention in plain Triton, for any GPU from sm_80 on: one kernel for packed sequences, prompts in chunks,
decode steps and drafts, over packed keys or the pages of a cache, in BF16 or FP8. (`portable_few.py` takes the same
steps for few rows, where it serves.)

A row is a query head of a token; the heads that share a key head are rows of one tile, so keys are read once for all of
them. Each row takes these steps, whatever the tile around it:

- keys in steps of 64 from the first one on; scores `s` summed over the head from zero;
- `top' = max(top, s)`, `p = exp2(fma(s, scale, -(top' * scale)))`, and `shrink = exp2((top - top') * scale)`;
- `acc = acc * shrink + bf16(p) @ values`, and the sum of the weights by the same product, with a one for the value;
- at the end `acc / sum`, rounded once.

So no layout decides the order of a sum: both are chains of the tensor core over the keys. Keys that a row does not see
have the weight 0, and a step of them alone changes nothing: `shrink` is 1, and nothing is added. That is why a row has
the same bits alone in a decode step, with drafts, in a chunk of a prompt and in a packed batch.

An FP8 cache holds E4M3 codes and a power of two for each head; their product is exact in BF16, so the kernel reads what
training's attention reads (`reference.round_heads`).

Legend: `T` packed rows of tokens, `B` sequences, `N` query heads, `G` key/value heads, `H` head size.
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
from jetrl.kernels.attention import portable_few
from jetrl.kernels.attention.cache import write_cache
from jetrl.kernels.attention.portable_backward import gradients
from jetrl.kernels.attention.reference import add_shared, copied
from jetrl.kernels.launch import begin
from jetrl.kernels.qtensor import QTensor
from jetrl.kernels.quantize.e4m3 import held, values_of
from jetrl.kernels.quantize.triton import new_heads, quantize_act
from jetrl.precision.formats import BLOCK
from jetrl.types import LayerCache, PagedPlan, VarlenPlan

_ONES = tl.constexpr(16)  # columns of the product that sums the weights: the fewest that a tensor core takes


@triton.jit
def _places(table, scales, start, key, inside, group, G: tl.constexpr, PAGED: tl.constexpr, PAGE: tl.constexpr):
    """Where the keys of a step are, in heads of the cache or of the packed keys, and where their powers of two."""
    if PAGED:
        page = tl.load(table + key // PAGE, mask=inside, other=0).to(tl.int64)
        offset = key % PAGE
        return (page * PAGE + offset) * G + group, scales + ((page * G + group) * PAGE + offset) * 2
    else:
        row = (start + key).to(tl.int64) * G + group
        return row, scales + row


@triton.jit
def _heads(at, unit, inside, cols, H: tl.constexpr, FP8: tl.constexpr):
    """Heads of a step [KEYS, HB] in BF16; zeros where no key is."""
    mask = inside[:, None] & (cols < H)[None, :]
    if FP8:
        power = tl.load(unit, mask=inside, other=0.0).to(tl.float32)
        return held((values_of(tl.load(at, mask=mask, other=0)) * power[:, None]).to(tl.bfloat16))
    else:
        return tl.load(at, mask=mask, other=0.0)


@triton.jit
def _step(
    query, keys, values, scales, table, start, first, stop, position, group, cols, top, total, acc, scale,
    G: tl.constexpr, H: tl.constexpr, KEYS: tl.constexpr, PAGED: tl.constexpr, PAGE: tl.constexpr, FP8: tl.constexpr,
    MASK: tl.constexpr,
):
    """The keys from `first` on; those from `stop` on are not there. MASK: some rows do not see all of the others."""
    key = first + tl.arange(0, KEYS)
    inside = key < stop
    place, unit = _places(table, scales, start, key, inside, group, G, PAGED, PAGE)
    at = place[:, None] * H + cols[None, :]
    k = _heads(keys + at, unit, inside, cols, H, FP8)
    s = tl.dot(query, tl.trans(k))
    if MASK:
        s = tl.where(key[None, :] <= position[:, None], s, float("-inf"))
    new = tl.maximum(top, tl.max(s, axis=1))
    zeros = tl.zeros_like(s)
    p = tl.exp2(tl.fma(s, scale + zeros, zeros - (new * scale)[:, None])).to(tl.bfloat16)
    shrink = tl.exp2((top - new) * scale)[:, None]
    v = _heads(values + at, unit + 1, inside, cols, H, FP8)
    acc = tl.dot(p, v, acc * shrink)
    total = tl.dot(p, tl.full((KEYS, _ONES), 1.0, tl.float32).to(tl.bfloat16), total * shrink)
    return new, total, acc


@triton.jit(
    do_not_specialize=["table_stride", "rows_of_lse"], do_not_specialize_on_alignment=["starts", "lengths", "table"]
)
def _attention_kernel(
    q, keys, values, scales, table, starts, lengths, out, lse, scale, table_stride, rows_of_lse,
    N: tl.constexpr, G: tl.constexpr, H: tl.constexpr, HB: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    STAGES: tl.constexpr, PAGED: tl.constexpr, PAGE: tl.constexpr, FP8: tl.constexpr, LSE: tl.constexpr,
    SPLIT: tl.constexpr, PDL: tl.constexpr,
):
    """ROWS rows of one key head of one sequence. `lengths`: keys of each sequence, or where its packed keys start."""
    begin(PDL)
    SHARE: tl.constexpr = N // G
    sequence, group = tl.program_id(0) // G, tl.program_id(0) % G
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # the longest work first
    origin = tl.load(starts + sequence)
    queries = tl.load(starts + sequence + 1) - origin
    if tile * ROWS < queries * SHARE:
        start = tl.load(lengths + sequence)
        length = start
        if PAGED:
            start = 0
        else:
            length = tl.load(lengths + sequence + 1) - start
        table += sequence.to(tl.int64) * table_stride
        row, cols = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, HB)
        token, head = row // SHARE, group * SHARE + row % SHARE
        alive = token < queries
        position = length - queries + token
        at = ((origin + token).to(tl.int64) * N + head)[:, None] * H + cols[None, :]
        mask = alive[:, None] & (cols < H)[None, :]
        query = tl.load(q + at, mask=mask, other=0.0)
        last = tl.minimum(length, length - queries + (tile * ROWS + ROWS - 1) // SHARE + 1)
        top = tl.full((ROWS,), float("-inf"), tl.float32)
        total, acc = tl.zeros((ROWS, _ONES), tl.float32), tl.zeros((ROWS, HB), tl.float32)
        whole = 0
        if SPLIT:
            whole = (length - queries + tile * ROWS // SHARE + 1) // KEYS  # steps of keys that all rows see
            for i in tl.range(0, whole, num_stages=STAGES):
                top, total, acc = _step(
                    query, keys, values, scales, table, start, i * KEYS, length, position, group, cols, top, total, acc,
                    scale, G, H, KEYS, PAGED, PAGE, FP8, False,
                )
        for i in tl.range(whole, tl.cdiv(last, KEYS), num_stages=1 if SPLIT else STAGES):
            top, total, acc = _step(
                query, keys, values, scales, table, start, i * KEYS, length, position, group, cols, top, total, acc,
                scale, G, H, KEYS, PAGED, PAGE, FP8, True,
            )
        weight = tl.sum(tl.where((tl.arange(0, _ONES) == 0)[None, :], total, 0.0), axis=1)
        tl.store(out + at, tl.div_rn(acc, weight[:, None] + tl.zeros_like(acc)).to(tl.bfloat16), mask=mask)
        if LSE:
            to = lse + head.to(tl.int64) * rows_of_lse + origin + token
            tl.store(to, top * scale + tl.log2(weight), mask=alive)


def _check(q: Tensor) -> None:
    if q.dtype != torch.bfloat16:
        raise ValueError(f"attention on a GPU is BF16, got {q.dtype}")
    if q.shape[2] % 8 or q.shape[2] > 256:
        raise ValueError(f"attention on a GPU takes head sizes up to 256 that are multiples of 8, got {q.shape[2]}")


def _launch(
    q: Tensor, keys: Tensor, values: Tensor, scales: Tensor | None, table: Tensor | None, starts: Tensor,
    lengths: Tensor, longest: int, scale: float, out: Tensor, lse: Tensor | None, tile: tiles.Attention,
) -> None:
    """Sequences with up to `longest` queries each."""
    (tokens, heads, size), groups = q.shape, keys.shape[-2]
    sequences = starts.shape[0] - 1
    assert q.is_contiguous() and keys.is_contiguous() and values.is_contiguous() and out.is_contiguous()
    assert starts.dtype == lengths.dtype == torch.int32 and heads % groups == 0
    assert table is None or (table.dtype == torch.int32 and table.stride(1) == 1)
    if not tokens or not sequences or not longest:
        return
    if scales is not None:
        keys, values = keys.view(torch.uint8), values.view(torch.uint8)
    _attention_kernel[(sequences * groups, triton.cdiv(longest * (heads // groups), tile.rows))](
        q, keys, values, q if scales is None else scales, lengths if table is None else table, starts, lengths, out,
        out if lse is None else lse, scale * math.log2(math.e), 0 if table is None else table.stride(0),
        0 if lse is None else lse.shape[1], N=heads, G=groups, H=size, HB=max(16, triton.next_power_of_2(size)),
        ROWS=tile.rows, KEYS=tiles.keys_for(size), STAGES=tile.stages, PAGED=table is not None,
        PAGE=1 if table is None else keys.shape[1], FP8=scales is not None, LSE=lse is not None, SPLIT=tile.split,
        num_warps=tile.warps, enable_fp_fusion=False, **launch.LAUNCH,
    )


def attend_varlen(
    q: Tensor, k: Tensor, v: Tensor, plan: VarlenPlan, scale: float, need_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Packed sequences: `q` [T, N, H], `k`, `v` [T, G, H] -> (output [T, N, H], FP32 [N, T] if asked: the base-2
    logarithm of the sum of exponentials of a row's scores).

    With shared prompts each part's keys and values are first copied side by side.
    """
    _check(q)
    k, v = copied(k, v, plan)
    starts = (plan if plan.keys is None else plan.keys).cu_seqlens
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device) if need_lse else None
    few, many = tiles.attention(launch.CAPABILITY)
    longest = max(plan.lengths, default=0)
    tile = few if longest * (q.shape[1] // k.shape[1]) <= few.rows else many
    _launch(q, k, v, None, None, plan.cu_seqlens, starts, longest, scale, out, lse, tile)
    return out, lse


def attend_cached(q: Tensor, plan: PagedPlan, layer: int, scale: float) -> Tensor:
    """`q` [T, N, H] over the pages of its sequences; the new keys and values are in the cache already.

    Decoding sequences come first in a step of the engine: those with few rows have a launch of their own, by
    `portable_few.py` or else with the tile for few. Pages that sequences share (`plan.shared`) are read by each of
    them.
    """
    _check(q)
    cache, q = plan.cache.layer(layer), q.contiguous()
    out = torch.empty_like(q)
    few, many = tiles.attention(launch.CAPABILITY)
    share, lengths = q.shape[1] // cache.keys.shape[2], plan.query_lengths
    exchanged = portable_few.most_rows(q.shape[2])
    first = next((i for i, n in enumerate(lengths) if n * share > (exchanged or few.rows)), len(lengths))
    for part, tile in ((slice(0, first), few), (slice(first, len(lengths)), many)):
        longest = max(lengths[part], default=0)
        if not longest:
            continue
        starts = plan.cu_seqlens[part.start : part.stop + 1]
        if exchanged and tile is few:
            portable_few.attend(q, cache, plan.block_table[part], starts, plan.kv_lengths[part], longest, scale, out)
        else:
            _paged(q, cache, plan, part, starts, longest, scale, out, tile)
    return out


def _paged(
    q: Tensor, cache: LayerCache, plan: PagedPlan, part: slice, starts: Tensor, longest: int, scale: float, out: Tensor,
    tile: tiles.Attention,
) -> None:
    assert cache.scales is None or (cache.scales.is_contiguous() and cache.scales.dtype == torch.bfloat16)
    _launch(
        q, cache.keys, cache.values, cache.scales, plan.block_table[part], starts, plan.kv_lengths[part], longest,
        scale, out, None, tile,
    )


def attend_cached_quantize(q: Tensor, plan: PagedPlan, layer: int, scale: float, pow2: bool) -> QTensor:
    """`quantize_act(attend_cached(...).flatten(1))`; in the same kernel where all sequences have few rows and a head is
    a group of the quantizer."""
    _check(q)
    cache, longest = plan.cache.layer(layer), max(plan.query_lengths, default=0)
    rows = longest * (q.shape[1] // cache.keys.shape[2])
    if q.shape[2] != BLOCK or not 0 < rows <= portable_few.most_rows(BLOCK):
        return quantize_act(attend_cached(q, plan, layer, scale).flatten(1), pow2)
    quantized = new_heads(q)
    portable_few.attend(
        q.contiguous(), cache, plan.block_table, plan.cu_seqlens, plan.kv_lengths, longest, scale, None, quantized, pow2
    )
    return quantized


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
    assert lse is not None
    k, v = copied(k, v, plan)
    keys = plan if plan.keys is None else plan.keys
    dq, dk, dv = gradients(
        grad.contiguous(), q.contiguous(), k.contiguous(), v.contiguous(), out, lse, plan.cu_seqlens, keys.cu_seqlens,
        max(plan.lengths, default=0), max(keys.lengths, default=0), scale,
    )
    if plan.keys is None:
        return dq, dk, dv
    return dq, add_shared(dk, plan.keys, k.dtype), add_shared(dv, plan.keys, v.dtype)
