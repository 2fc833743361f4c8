"""The definition of causal attention on the CPU, exact for any batch, padding, chunking and cache layout.

For one query row with keys j = 0..p:

    s_j = f32(q . k_j) * scale                     exact dot product of aligned rows, rounded to FP32, one FP32 product
    e_j = exp(s_j - max_j s_j)                     FP32, `exact.exp`
    l   = sum_j round(e_j * 2**32)                 integers: exact in any order
    o   = rounded((sum_j w_j * v_j) / (l * 2**-32))

The last sum is exact too: each value row is aligned (18 bits, unit u_j), its unit is folded into the weight,
`w_j = e_j * u_j`, and the weights of the row are aligned to 24 bits. A masked key has e_j = 0 and changes no bit, so
sequences may be padded to any length. Keys are taken in chunks of 2048, counted from position 0.

Where packed sequences share a prompt (`VarlenPlan.keys`), a row has the same keys, so the same bits. The gradient of a
shared key or value is the sum, in FP32, of what its own part and then each of the parts that go on from it give.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jetrl.kernels import exact
from jetrl.kernels import reference as ref
from jetrl.kernels.attention.state import DecodeState
from jetrl.kernels.pointwise.reference import rms_norm_backward, rope_backward
from jetrl.kernels.qtensor import QTensor
from jetrl.kernels.quantize.reference import quantize_act
from jetrl.kernels.reference import rms_norm, rope, round_heads
from jetrl.types import LayerCache, PagedPlan, SharedKeys, VarlenPlan

VALUE_BITS, WEIGHT_BITS, SUM_BITS = 18, 24, 32
_CHUNK_ELEMENTS = 1 << 22  # scores held at once


def attend(q: Tensor, k: Tensor, v: Tensor, plan: VarlenPlan | PagedPlan, layer: int, scale: float) -> Tensor:
    """`q` [T, N, H], `k`, `v` [T, G, H] -> [T, N, H]. A paged plan first writes k and v to the cache, then reads it."""
    if isinstance(plan, VarlenPlan):
        return attend_packed(q, k, v, plan, scale)
    write_cache(k, v, plan.slots, plan.cache.layer(layer))
    return attend_cached(q, plan, layer, scale)


def attend_cached(q: Tensor, plan: PagedPlan, layer: int, scale: float) -> Tensor:
    """`q` [T, N, H] over the pages of its sequences; the new keys and values are in the cache already."""
    return attend_pages(q, plan.cache.layer(layer), plan, scale)


def attend_pages(q: Tensor, cache: LayerCache, plan: PagedPlan, scale: float) -> Tensor:
    """The same over given pages, whose values may have another size than keys: [T, N, value size]."""
    out = q.new_empty(*q.shape[:2], cache.values.shape[-1])
    kv_lengths = plan.kv_lengths.tolist()
    starts = plan.cu_seqlens.tolist()
    page = cache.keys.shape[1]
    for members, width, depth in _similar(list(plan.query_lengths), kv_lengths, q.shape[1]):
        table = plan.block_table[members, : -(-depth // page)].long()
        rows, positions = _query_rows(members, width, starts, kv_lengths)
        keys, values = read_cache(cache, table, q.dtype)
        o = _dense(q[rows.clamp_min(0)], keys[:, :depth], values[:, :depth], positions, scale)
        out[rows[rows >= 0]] = o[rows >= 0]
    return out


def attend_packed(q: Tensor, k: Tensor, v: Tensor, plan: VarlenPlan, scale: float) -> Tensor:
    """`attend` of packed sequences; `v` may have another size than keys: [T, N, value size]."""
    out = q.new_empty(*q.shape[:2], v.shape[-1])
    starts, key_starts, depths = plan.cu_seqlens.tolist(), *_seen(plan)
    k, v = copied(k, v, plan)
    for members, width, depth in _similar(list(plan.lengths), depths, q.shape[1]):
        rows, positions = _query_rows(members, width, starts, depths)
        keys = _query_rows(members, depth, key_starts, depths)[0].clamp_min(0)
        o = _dense(q[rows.clamp_min(0)], k[keys], v[keys], positions, scale)
        out[rows[rows >= 0]] = o[rows >= 0]
    return out


def _seen(plan: VarlenPlan) -> tuple[list[int], list[int]]:
    """Where the keys that each part sees begin (one entry more than parts), and how many they are."""
    keys = plan if plan.keys is None else plan.keys
    return keys.cu_seqlens.tolist(), list(keys.lengths)


def copied(k: Tensor, v: Tensor, plan: VarlenPlan) -> tuple[Tensor, Tensor]:
    """The keys and values that the parts see: `k` and `v` themselves, or copies [K, G, H]."""
    if plan.keys is None:
        return k, v
    return k.index_select(0, plan.keys.rows), v.index_select(0, plan.keys.rows)


def add_shared(grad: Tensor, keys: SharedKeys, dtype: torch.dtype) -> Tensor:
    """The gradient [T, G, H] of rows from those of the keys [K, G, H] that are their copies, rounded once to `dtype`.

    FP32 sums in one order: the part that has the row, then the parts that go on from it as they are packed.
    """
    total = grad.index_select(0, keys.own).to(torch.float32)
    for rows, places in keys.later:  # rows are distinct, so nothing races
        total[rows] += grad.index_select(0, places)
    return total.to(dtype)


def write_cache(k: Tensor, v: Tensor, slots: Tensor, cache: LayerCache) -> None:
    """Scatter rows `k`, `v` [T, G, H] into the pages, quantized by heads if the cache is FP8; slot -1 writes nothing.

    Keys and values that are already rounded (`reference.round_heads`) keep their values.
    """
    real = slots >= 0
    if not bool(real.all()):
        slots, k, v = slots[real], k[real], v[real]
    if cache.scales is None:
        cache.keys.flatten(0, 1)[slots] = k
        cache.values.flatten(0, 1)[slots] = v
        return
    page = cache.keys.shape[1]
    for i, (codes, x) in enumerate(((cache.keys, k), (cache.values, v))):
        quantized, scales = ref.quantize_heads(x)
        codes.view(torch.uint8).flatten(0, 1)[slots] = quantized.view(torch.uint8)  # torch cannot scatter E4M3
        cache.scales[..., i][slots // page, :, slots % page] = scales


def read_cache(cache: LayerCache, pages: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values of `pages` [B, M], each [B, M * page, G, H] and dequantized to `dtype` if the cache is FP8."""
    if cache.scales is None:
        return cache.keys[pages].flatten(1, 2), cache.values[pages].flatten(1, 2)
    scales = cache.scales[pages].transpose(2, 3)  # [B, M, page, G, 2]
    keys, values = (codes.view(torch.uint8)[pages].view(codes.dtype) for codes in (cache.keys, cache.values))
    k, v = (ref.dequantize_heads(codes, scales[..., i], dtype) for i, codes in enumerate((keys, values)))
    return k.flatten(1, 2), v.flatten(1, 2)


def _similar(query_lengths: list[int], kv_lengths: list[int], heads: int) -> list[tuple[list[int], int, int]]:
    """Sequences in chunks of similar size, so that padding stays small: (members, longest query, longest key)."""
    order = sorted(range(len(query_lengths)), key=lambda i: (query_lengths[i], kv_lengths[i]))
    chunks: list[tuple[list[int], int, int]] = []
    for i in order:
        queries, depth = query_lengths[i], kv_lengths[i]
        if queries == 0:
            continue
        if chunks:
            members, width, deep = chunks[-1]
            new_width, new_deep = max(width, queries), max(deep, depth)
            fits = (len(members) + 1) * new_width * new_deep * heads <= _CHUNK_ELEMENTS
            alike = new_width <= query_lengths[members[0]] * 1.25 + (8 if width > 1 else 0)
            if fits and alike:
                chunks[-1] = ([*members, i], new_width, new_deep)
                continue
        chunks.append(([i], queries, depth))
    return chunks


def _query_rows(members: list[int], width: int, starts: list[int], kv_lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Rows of the packed tensor [B, width] (-1: padding) and the position of each within its sequence."""
    first = torch.tensor([starts[i] for i in members])
    count = torch.tensor([starts[i + 1] - starts[i] for i in members])
    offset = torch.tensor([kv_lengths[i] - (starts[i + 1] - starts[i]) for i in members])
    column = torch.arange(width)
    inside = column < count[:, None]
    rows = torch.where(inside, first[:, None] + column, -1)
    return rows, torch.where(inside, offset[:, None] + column, 0)


def _scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """[B, L, N, H] x [B, J, G, H] -> FP32 [B, G, L*N/G, J]; row order (query, head within the group)."""
    b, length, n, h = q.shape
    g = k.shape[2]
    qm, qu = exact.align(q)
    km, ku = exact.align(k)
    qm = qm.view(b, length, g, n // g, h).permute(0, 2, 1, 3, 4).reshape(b, g, -1, h)
    qu = qu.view(b, length, g, n // g, 1).permute(0, 2, 1, 3, 4).reshape(b, g, -1, 1)
    s = exact.matmul_nt(qm, km.permute(0, 2, 1, 3)).mul_(qu).mul_(ku.permute(0, 2, 3, 1))
    return s.to(torch.float32).mul_(scale)


def _masked(positions: Tensor, heads_per_group: int, depth: int) -> Tensor:
    """True where key j is beyond the query's position: [B, 1, L*N/G, J]."""
    rows = positions.repeat_interleave(heads_per_group, dim=1)
    return (torch.arange(depth) > rows[..., None])[:, None]


def _dense(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, scale: float) -> Tensor:
    """Attention of padded queries [B, L, N, H] at `positions` [B, L] over keys 0..J-1 [B, J, G, H] -> [B, L, N, H], or
    the size of values where it is another one."""
    b, length, n, _ = q.shape
    g, depth, h = k.shape[2], k.shape[1], v.shape[3]
    mask = _masked(positions, n // g, depth)
    s = _scores(q, k, scale).masked_fill_(mask, float("-inf"))
    e = exact.exp(s - s.amax(-1, keepdim=True)).masked_fill_(mask, 0.0).to(torch.float64)
    total = (e * 2.0**SUM_BITS).round_().sum(-1, keepdim=True)
    # garbage beyond a sequence's end (padding, stale pages) must be finite to vanish against a zero weight
    finite = (torch.arange(depth) <= positions.amax(1, keepdim=True))[:, :, None, None]
    vm, vu = exact.align(v.masked_fill(~finite, 0.0), bits=VALUE_BITS)
    w = e.mul_(vu.permute(0, 2, 3, 1))
    wm, wu = exact.align(w, bits=WEIGHT_BITS)
    o = exact.matmul_nt(wm, vm.permute(0, 2, 3, 1)).mul_(wu).div_(total * 2.0**-SUM_BITS)
    return o.to(torch.float32).to(q.dtype).view(b, g, length, n // g, h).permute(0, 2, 1, 3, 4).reshape(b, length, n, h)


def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, plan: VarlenPlan, scale: float,
    out: Tensor | None = None, lse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the varlen case, FP32 inside, rounded at the end. Same shapes as `attend`; deterministic.

    `out` and `lse` from `attend_varlen` save a fast backend a second forward; this one needs neither.

    With P the softmax: dV = P^T dO; dS = P * (dO V^T - rowsum(dO * O)); dQ = dS K * scale; dK = dS^T Q * scale.
    """
    dtypes, shared = (q.dtype, k.dtype, v.dtype), plan.keys
    if shared is not None:
        k, v = k[shared.rows], v[shared.rows]
    dq, dk, dv = (torch.zeros(t.shape, dtype=torch.float32) for t in (q, k, v))
    starts, key_starts, depths = plan.cu_seqlens.tolist(), *_seen(plan)
    groups, group = k.shape[1], q.shape[1] // k.shape[1]
    for members, width, depth in _similar(list(plan.lengths), depths, q.shape[1]):
        rows, positions = _query_rows(members, width, starts, depths)
        keys = _query_rows(members, depth, key_starts, depths)[0]

        def split(t: Tensor, index: Tensor) -> Tensor:  # [B, G, L*N/G, H] in FP32
            x = t[index.clamp_min(0)].to(torch.float32).masked_fill_((index < 0)[..., None, None], 0.0)
            b, length, heads, h = x.shape
            return x.view(b, length, groups, heads // groups, h).permute(0, 2, 1, 3, 4).reshape(b, groups, -1, h)

        qs, ks, vs, gs = split(q, rows), split(k, keys), split(v, keys), split(grad, rows)
        s = (qs @ ks.mT).mul_(scale).masked_fill_(_masked(positions, group, depth), float("-inf"))
        p = torch.softmax(s, -1)
        dp = gs @ vs.mT
        ds = p * (dp - (p * dp).sum(-1, keepdim=True))
        back = ((dq, rows, ds @ ks * scale), (dk, keys, ds.mT @ qs * scale), (dv, keys, p.mT @ gs))
        for target, index, value in back:
            b, g, _, h = value.shape
            dense = value.view(b, g, index.shape[1], -1, h).permute(0, 2, 1, 3, 4).reshape(b, index.shape[1], -1, h)
            target[index[index >= 0]] = dense[index >= 0]
    if shared is not None:
        return dq.to(dtypes[0]), add_shared(dk, shared, dtypes[1]), add_shared(dv, shared, dtypes[2])
    return dq.to(dtypes[0]), dk.to(dtypes[1]), dv.to(dtypes[2])


def attend_cached_quantize(q: Tensor, plan: PagedPlan, layer: int, scale: float, pow2: bool) -> QTensor:
    return quantize_act(attend_cached(q, plan, layer, scale).flatten(1), pow2)


def attend_varlen(
    q: Tensor, k: Tensor, v: Tensor, plan: VarlenPlan, scale: float, need_lse: bool
) -> tuple[Tensor, Tensor | None]:
    return attend(q, k, v, plan, 0, scale), None


def qkv_norm_rope(
    qkv: Tensor, heads: tuple[int, int], head_dim: int, norms: tuple[Tensor, Tensor] | None, eps: float,
    tables: tuple[Tensor, Tensor], positions: Tensor, cache: tuple[LayerCache, Tensor] | None, fp8_kv: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    n, g = heads
    q, k, v = qkv.view(-1, n + 2 * g, head_dim).split((n, g, g), 1)
    if norms is not None:
        q, k = rms_norm(q, norms[0], eps), rms_norm(k, norms[1], eps)
    cos, sin = tables[0][positions], tables[1][positions]
    q, k, v = rope(q, cos, sin), rope(k, cos, sin), v.clone(memory_format=torch.contiguous_format)
    if cache is None:
        return (q, round_heads(k), round_heads(v)) if fp8_kv else (q, k, v)
    layer, slots = cache
    assert fp8_kv == (layer.scales is not None), "the cache has another format than the model's recipe"
    write_cache(k, v, slots, layer)
    return q, layer.keys, layer.values


def qkv_norm_rope_backward(
    grads: tuple[Tensor, Tensor, Tensor], qkv: Tensor, norms: tuple[Tensor, Tensor] | None, eps: float,
    tables: tuple[Tensor, Tensor], positions: Tensor,
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """Gradients of `qkv` (rounded) and of the norms' weights (FP32): those of the ops, one after another."""
    (dq, dk, dv), (_, n, h), d_norms = grads, grads[0].shape, None
    cos, sin = tables[0][positions], tables[1][positions]
    dq, dk = rope_backward(dq, cos, sin), rope_backward(dk, cos, sin)
    if norms is not None:
        q, k = qkv.view(len(qkv), -1, h)[:, : n + dk.shape[1]].split((n, dk.shape[1]), 1)
        (dq, d_q), (dk, d_k) = rms_norm_backward(dq, q, norms[0], eps), rms_norm_backward(dk, k, norms[1], eps)
        d_norms = (d_q, d_k)
    return torch.cat((dq, dk, dv), 1).flatten(1), d_norms


def advance(state: DecodeState, tokens: Tensor, logprobs: Tensor, maxima: Tensor) -> None:
    """`kernels.attention.state.advance`, plainly."""
    step = int(state.count)
    state.drawn[:, step] = torch.stack([tokens, *(x.double().view(torch.int64) for x in (logprobs, maxima))])
    inputs, positions, slots, _, sample_positions = state.integers
    alive = slots >= 0
    inputs.copy_(tokens)
    for column in (positions, sample_positions, state.kv_lengths):
        column += alive.to(column.dtype)
    block = (positions // state.page_size).clamp(max=state.table.shape[1] - 1)
    pages = state.table.gather(1, block[:, None])[:, 0].long()
    slots.copy_(torch.where(alive, pages * state.page_size + positions % state.page_size, slots))
    state.count.copy_((state.count + 1) % state.drawn.shape[1])
