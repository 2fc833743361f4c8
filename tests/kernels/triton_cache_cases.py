"""Cases of the FP8 KV cache's Triton kernels, as in `triton_cases.py`: bit for bit against the definitions.

`python tests/kernels/triton_cache_cases.py [part of a name]`; interpreter or GPU as there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial

import torch
import triton_cases as base  # also makes the interpreter round as a GPU does
from torch import Tensor

from jetrl.kernels import reference as ref
from jetrl.kernels.attention import cache as tc
from jetrl.kernels.attention import heads as tb
from jetrl.kernels.attention import reference as attention
from jetrl.kernels.dispatch import load_backend
from jetrl.types import LayerCache

DEVICE, KINDS, Case, equal, sample = base.DEVICE, base.KINDS, base.Case, base.equal, base.sample
backend = load_backend("reference")
HEADS = ((9, 3, 64), (4, 2, 128), (5, 5, 32), (6, 1, 80))  # query heads, key/value heads, size


def fp8_cache(pages: int, page: int, g: int, h: int) -> LayerCache:
    """Whatever an earlier user left: every byte a code, NaN among them, and scales of many sizes."""
    gen = torch.Generator().manual_seed(pages + page)
    codes = torch.randint(0, 256, (2, pages, page, g, h), generator=gen).to(torch.uint8).view(torch.float8_e4m3fn)
    scales = torch.exp2(torch.randint(-48, 100, (pages, g, page, 2), generator=gen).float()).to(torch.bfloat16)
    return LayerCache(codes[0].clone(), codes[1].clone(), scales)


def moved(cache: LayerCache) -> LayerCache:
    """A copy on the device."""
    assert cache.scales is not None
    return LayerCache(*(x.clone().to(DEVICE) for x in (cache.keys, cache.values, cache.scales)))


def equal_caches(name: str, got: LayerCache, want: LayerCache) -> None:
    assert got.scales is not None and want.scales is not None
    equal(f"{name} keys", got.keys, want.keys)
    equal(f"{name} values", got.values, want.values)
    equal(f"{name} scales", got.scales, want.scales)


def heads(t: int, g: int, h: int, kind: str, seed: int = 0) -> Tensor:
    """[T, G, H]: a head is a row of `sample`, so every kind of head stands next to others."""
    return sample(t * g, h, kind, seed).view(t, g, h)


def check_round(kind: str, g: int, h: int) -> None:
    x = heads(7, g, h, kind)
    want = ref.round_heads(x)
    got = tc.round_heads(x.to(DEVICE))
    equal("rounded", got, want)
    equal("rounded twice", tc.round_heads(got), ref.round_heads(want))
    if kind != "huge":  # there, what was rounded up to infinity makes its head NaN
        equal("rounding again changes no value", ref.round_heads(want), want)
    wide = torch.cat((heads(7, 2, h, "normal", 1), x, x), 1).to(DEVICE)
    equal("a part of wider rows", tc.round_heads(wide[:, 2 : 2 + g]), want)
    assert tc.round_heads(x[:0].to(DEVICE)).shape == (0, g, h)


SLOTS = torch.tensor([4, -1, 9, 0, 14, 2])


def check_write(kind: str, g: int, h: int) -> None:
    k, v = heads(6, g, h, kind), heads(6, g, h, "normal", 1) if kind == "nan" else heads(6, g, h, kind, 1)
    for page in (4, 5):
        want = fp8_cache(4, page, g, h)
        got = moved(want)
        attention.write_cache(k, v, SLOTS, want)
        tc.write_cache(k.to(DEVICE), v.to(DEVICE), SLOTS.to(DEVICE), got)
        equal_caches(f"page {page}", got, want)


def check_prepare(kind: str, n: int, g: int, h: int, norm: bool) -> None:
    """The fused kernel with and without a cache against the definition, and against the ops one after another."""
    t, page = 6, 5
    qkv, norms = sample(t, (n + 2 * g) * h, kind), tuple(sample(2, h, "normal", 5)) if norm else None
    angles = torch.rand(50, h // 2, generator=torch.Generator().manual_seed(1)) * 7
    tables, positions = (angles.cos(), angles.sin()), torch.tensor([3, 0, 49, 12, 7, 7])
    shared = (qkv.to(DEVICE), (n, g), h, tuple(w.to(DEVICE) for w in norms) if norms else None, 1e-6,
              tuple(x.to(DEVICE) for x in tables), positions.to(DEVICE))
    want = backend.qkv_norm_rope(qkv, (n, g), h, norms, 1e-6, tables, positions, None, True)
    rounded = tb.qkv_norm_rope(*shared, None, True)
    plain = tb.qkv_norm_rope(*shared, None, False)
    for name, a, b in zip("qkv", rounded, want, strict=True):
        equal(name, a, b.contiguous())
    equal("q unrounded", rounded[0], plain[0])
    equal("k of its own op", tc.round_heads(plain[1]), want[1])
    cache = fp8_cache(4, page, g, h)
    fused, apart = moved(cache), moved(cache)
    backend.qkv_norm_rope(qkv, (n, g), h, norms, 1e-6, tables, positions, (cache, SLOTS), True)
    q, keys, _ = tb.qkv_norm_rope(*shared, (fused, SLOTS.to(DEVICE)), True)
    tc.write_cache(plain[1], plain[2], SLOTS.to(DEVICE), apart)
    equal("paged q", q, want[0])
    assert keys is fused.keys
    equal_caches("fused", fused, cache)
    equal_caches("apart", apart, cache)


def check_read(lengths: tuple[int, ...], page: int, g: int, h: int, pages: int) -> None:
    """Tables wider than any sequence, whose rest names no page; with few pages, sequences share them."""
    cache = fp8_cache(pages, page, g, h)
    width = -(-max(lengths) // page) + 2
    used = [-(-n // page) for n in lengths]
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(page)).repeat(1 + sum(used) // pages)
    table = torch.full((len(lengths), width), -1, dtype=torch.int32)
    for b, count in enumerate(used):
        table[b, :count] = order[sum(used[:b]) : sum(used[: b + 1])]
    on_device = moved(cache)
    args = (table.to(DEVICE), torch.tensor(lengths, dtype=torch.int32, device=DEVICE))
    for kv_pages in (sum(used), sum(used) + 3):
        scratch, places = tc.read_cache(on_device, *args, kv_pages)
        assert scratch.scales is None and scratch.keys.shape == scratch.values.shape
        room, places = scratch.keys.shape[0], places.cpu()
        assert room <= min(pages, kv_pages + kv_pages // 8 + 1) and places.shape == table.shape
        assert places.min() >= 0 and places.max() < room
        named = torch.cat([places[b, :count] for b, count in enumerate(used)]).tolist()
        assert named == (list(range(sum(used))) if kv_pages < pages else order[: sum(used)].tolist())
        for b, length in enumerate(lengths):
            want = attention.read_cache(cache, table[b : b + 1, : used[b]].long(), torch.bfloat16)
            rest = places[b, : used[b]].long()
            for name, got, full in (("keys", scratch.keys, want[0]), ("values", scratch.values, want[1])):
                got = got.cpu()[rest].flatten(0, 1)
                if kv_pages < pages:
                    full[0, length:] = 0.0
                equal(f"{name} of {b}", got, full[0])  # pages that sequences of different ends share are whole


def check_every_code() -> None:
    """All 256 codes with scales from the smallest to the largest, NaN and infinity."""
    page, g, h = 16, 2, 256
    codes = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).expand(1, page, g, h).contiguous()
    powers = torch.linspace(-48, 120, page * g * 2).round()
    powers[:2] = torch.tensor([float("nan"), float("inf")])
    scales = torch.exp2(powers).view(1, g, page, 2).to(torch.bfloat16)
    cache = LayerCache(codes, codes.clone(), scales)
    table, length = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([page], dtype=torch.int32)
    scratch, _ = tc.read_cache(moved(cache), table.to(DEVICE), length.to(DEVICE), 1)
    want = attention.read_cache(cache, table.long(), torch.bfloat16)
    equal("keys", scratch.keys[0], want[0][0])
    equal("values", scratch.values[0], want[1][0])


def all_cases() -> list[tuple[str, Case]]:
    return list(_cases())


def _cases() -> Iterator[tuple[str, Case]]:
    for kind, (n, g, h) in itertools.product(KINDS, HEADS):
        yield f"round_heads {kind} {g}/{h}", partial(check_round, kind, g, h)
        yield f"write FP8 cache {kind} {g}/{h}", partial(check_write, kind, g, h)
        if h % 64 == 0 or kind == "normal":
            yield f"qkv FP8 {kind} {n}/{g}/{h}", partial(check_prepare, kind, n, g, h, h != 64)
    yield "read FP8 cache: every code", check_every_code
    for lengths, page, pages in (((1, 40, 16, 33), 16, 30), ((7, 1, 20, 5), 5, 12), ((90, 64, 3), 64, 9)):
        for g, h in ((3, 64), (2, 128), (5, 32), (1, 80)):
            yield f"read FP8 cache {lengths} page {page} {g}/{h}", partial(check_read, lengths, page, g, h, pages)
            yield f"read shared pages {lengths} page {page} {g}/{h}", partial(check_read, lengths, page, g, h, 3)


if __name__ == "__main__":
    raise SystemExit(base.main(all_cases()))
