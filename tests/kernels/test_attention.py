"""Attention: float64 truth, gradients, and equal bits for packing, chunking, page layout and rubbish in the cache."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from tolerances import assert_at_most_twice, assert_bitwise_equal
from torch import Tensor

from jetrl.kernels import reference
from jetrl.kernels.attention.ops import attend, varlen_plan
from jetrl.kernels.attention.reference import add_shared
from jetrl.types import LayerCache, PagedPlan, VarlenPlan

H = 16
SCALE = H**-0.5
LENGTHS = (1, 33, 7, 20, 21)
PAGE = 4


@dataclass
class Cache:
    """Pages filled with rubbish, NaN included: what a page held before must never matter."""

    keys: Tensor
    values: Tensor
    scales: Tensor | None = None

    def layer(self, index: int) -> LayerCache:
        assert index == 3
        return LayerCache(self.keys, self.values, self.scales)


def cache_of(num_pages: int, heads: int, fp8: bool = False) -> Cache:
    rubbish = torch.full((num_pages, PAGE, heads, H), 1e30).bfloat16()
    rubbish[::2] = float("nan")
    if fp8:
        scales = torch.full((num_pages, heads, PAGE, 2), float("nan"), dtype=torch.bfloat16)
        return Cache(rubbish.to(torch.float8_e4m3fn), rubbish.to(torch.float8_e4m3fn), scales)
    return Cache(rubbish.clone(), rubbish.clone())


def inputs(tokens: int, heads: int = 6, kv_heads: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    shapes = ((tokens, heads, H), (tokens, kv_heads, H), (tokens, kv_heads, H))
    q, k, v = (torch.randn(s, generator=generator).bfloat16() for s in shapes)
    return q * 2, k, v


def plan_of(lengths: tuple[int, ...]) -> VarlenPlan:
    return VarlenPlan(torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32), lengths)


def plain(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """Each sequence by itself with torch's softmax, in the dtype of q."""
    out = []
    group = q.shape[1] // k.shape[1]
    for a, b, c in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
        b, c = b.repeat_interleave(group, 1), c.repeat_interleave(group, 1)
        s = torch.einsum("qnh,knh->nqk", a, b) * SCALE
        s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), float("-inf"))
        out.append(torch.einsum("nqk,knh->qnh", torch.softmax(s, -1), c))
    return torch.cat(out)


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_values_and_gradients(kv_heads: int) -> None:
    tensors = inputs(sum(LENGTHS), 6, kv_heads)
    dy = torch.randn(tensors[0].shape, generator=torch.Generator().manual_seed(9)).bfloat16()
    results = {}
    for name, dtype in (("ours", torch.bfloat16), ("baseline", torch.bfloat16), ("exact", torch.float64)):
        leaves = [t.to(dtype).requires_grad_() for t in tensors]
        y = attend(*leaves, plan_of(LENGTHS), 0, SCALE) if name == "ours" else plain(*leaves, LENGTHS)
        results[name] = [y, *torch.autograd.grad(y, leaves, dy.to(dtype))]
    names = ("value", "dq", "dk", "dv")
    for what, *triple in zip(names, results["ours"], results["baseline"], results["exact"], strict=True):
        assert_at_most_twice(*triple, what)


def test_a_sequence_alone_equals_itself_in_any_batch() -> None:
    q, k, v = inputs(sum(LENGTHS))
    packed = attend(q, k, v, plan_of(LENGTHS), 0, SCALE).split(LENGTHS)
    parts = list(zip(q.split(LENGTHS), k.split(LENGTHS), v.split(LENGTHS), strict=True))
    for i, part in enumerate(parts):
        assert_bitwise_equal(attend(*part, plan_of(LENGTHS[i : i + 1]), 0, SCALE), packed[i], f"sequence {i} alone")
    order = [3, 0, 4, 2, 1]
    shuffled = [torch.cat([parts[i][j] for i in order]) for j in range(3)]
    lengths = tuple(LENGTHS[i] for i in order)
    again = attend(*shuffled, plan_of(lengths), 0, SCALE).split(lengths)
    for place, i in enumerate(order):
        assert_bitwise_equal(again[place], packed[i], f"sequence {i} in another order")


def test_a_query_does_not_see_later_tokens() -> None:
    q, k, v = inputs(33)
    whole = attend(q, k, v, plan_of((33,)), 0, SCALE)
    k[20:], v[20:], q[20:] = 1e4, -1e4, 7.0
    assert_bitwise_equal(attend(q, k, v, plan_of((33,)), 0, SCALE)[:20], whole[:20])


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("chunk", [1, 3, 8, 64])
def test_chunks_over_a_paged_cache_equal_the_packed_batch(chunk: int, fp8: bool) -> None:
    """All sequences advance together, `chunk` tokens a call (1: decode), in scattered pages with padding rows.

    An FP8 cache equals the packed batch over rounded keys and values, and not that over those as they are.
    """
    total = sum(LENGTHS)
    q, k, v = inputs(total)
    expected = attend(q, k, v, plan_of(LENGTHS), 0, SCALE).split(LENGTHS)
    if fp8:
        plain = expected
        expected = attend(q, reference.round_heads(k), reference.round_heads(v), plan_of(LENGTHS), 0, SCALE)
        assert float((torch.cat(plain) != expected).double().mean()) > 0.5
        expected = expected.split(LENGTHS)
    pages = [-(-n // PAGE) for n in LENGTHS]
    cache = cache_of(sum(pages) + 3, 2, fp8)
    numbers = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(5)).split(pages)
    table = torch.zeros(len(LENGTHS), max(pages), dtype=torch.int32)
    for row, own in zip(table, numbers, strict=True):
        row[: len(own)] = own.int()
    starts = [0, *np.cumsum(LENGTHS)]
    for first in range(0, max(LENGTHS), chunk):
        live = [i for i, n in enumerate(LENGTHS) if n > first]
        counts = tuple(min(chunk, LENGTHS[i] - first) for i in live)
        begins = [starts[i] + first for i in live]
        rows = torch.cat([torch.arange(b, b + c) for b, c in zip(begins, counts, strict=True)])
        slots = torch.cat([
            table[i, torch.arange(first, first + c) // PAGE].long() * PAGE + torch.arange(first, first + c) % PAGE
            for i, c in zip(live, counts, strict=True)
        ])
        kv = torch.tensor([first + c for c in counts], dtype=torch.int32)
        pages = tuple(-(-n // PAGE) for n in kv.tolist())
        plan = PagedPlan(cache, plan_of(counts).cu_seqlens, counts, kv, pages, table[live], slots)
        got = attend(q[rows], k[rows], v[rows], plan, 3, SCALE).split(counts)
        for i, c, part in zip(live, counts, got, strict=True):
            assert_bitwise_equal(part, expected[i][first : first + c], f"sequence {i}, tokens from {first}")


def test_a_padding_slot_writes_nothing() -> None:
    q, k, v = inputs(2)
    cache = cache_of(2, 2)
    before = cache.keys.clone()
    table = torch.zeros(1, 1, dtype=torch.int32)
    one = torch.tensor([1], dtype=torch.int32)
    plan = PagedPlan(cache, plan_of((1,)).cu_seqlens, (1,), one, (1,), table, torch.tensor([0, -1]))
    attend(q, k, v, plan, 3, SCALE)
    assert_bitwise_equal(cache.keys[0, 0], k[0], "the written slot")
    assert_bitwise_equal(cache.keys.flatten(0, 1)[1:], before.flatten(0, 1)[1:], "all other slots")


def test_more_keys_than_one_exact_sum_holds() -> None:
    length = 2100  # past 2048 keys, chunks are added in order
    q, k, v = inputs(length, 1, 1)
    with torch.no_grad():
        expected = attend(q, k, v, plan_of((length,)), 0, SCALE)
        pages = -(-length // PAGE)
        cache = cache_of(pages, 1)
        for first, stop in ((0, 2047), (2047, 2050), (2050, 2100)):
            plan = PagedPlan(
                cache, torch.tensor([0, stop - first], dtype=torch.int32), (stop - first,),
                torch.tensor([stop], dtype=torch.int32), (pages,), torch.arange(pages, dtype=torch.int32)[None],
                torch.arange(first, stop),
            )
            got = attend(q[first:stop], k[first:stop], v[first:stop], plan, 3, SCALE)
            assert_bitwise_equal(got, expected[first:stop], f"tokens from {first}")
        exact = plain(*(t.double() for t in (q, k, v)), (length,))
    assert_at_most_twice(expected, exact.bfloat16(), exact, "against float64")


def test_scores_far_apart_and_values_of_any_size() -> None:
    q, k, v = inputs(12)
    k[3] *= 1000
    v[5] *= 1e20
    v[6] *= 1e-20
    got = attend(q, k, v, plan_of((12,)), 0, SCALE)
    exact = plain(*(t.double() for t in (q, k, v)), (12,))
    assert torch.isfinite(got).all()
    scale = v.double().abs().amax() * 2.0**-8
    assert float((got.double() - exact).abs().max()) <= float(scale)
    assert_at_most_twice(got[:3], exact[:3].bfloat16(), exact[:3], "rows that see none of the large ones")


def test_shapes_that_do_not_fit_are_refused() -> None:
    q, k, v = inputs(4, 6, 4)
    with pytest.raises(ValueError, match=r"q \(4, 6, 16\), k \(4, 4, 16\)"):
        attend(q, k, v, plan_of((4,)), 0, SCALE)


# a stem of 9 with three samples, a whole sequence, a stem of 33 with two, of which one is a single token
PARTS, STEMS = (9, 5, 20, 1, 7, 33, 1, 12), (-1, 0, 0, 0, -1, -1, 5, 5)


def shared_plan() -> VarlenPlan:
    return varlen_plan(plan_of(PARTS).cu_seqlens, PARTS, STEMS)


def whole_rows() -> tuple[Tensor, tuple[int, ...], Tensor]:
    """Whole sequences of the parts: their rows one after the other, their lengths, and where each row is found last."""
    rows = torch.arange(sum(PARTS)).split(PARTS)
    whole = [torch.cat([rows[s], r]) if s >= 0 else r for i, (r, s) in enumerate(zip(rows, STEMS, strict=True))
             if i not in STEMS]
    index = torch.cat(whole)
    place = torch.empty(sum(PARTS), dtype=torch.int64)
    place[index] = torch.arange(len(index))
    return index, tuple(map(len, whole)), place


def test_shared_prompts_equal_packed_whole_sequences() -> None:
    """Bit for bit, in every copy of a shared row and with a gradient asked or not."""
    q, k, v = inputs(sum(PARTS))
    index, lengths, _ = whole_rows()
    packed = attend(q[index], k[index], v[index], plan_of(lengths), 0, SCALE)
    assert_bitwise_equal(attend(q, k, v, shared_plan(), 0, SCALE)[index], packed)
    assert_bitwise_equal(attend(q.requires_grad_(), k, v, shared_plan(), 0, SCALE)[index], packed)
    assert varlen_plan(plan_of(PARTS).cu_seqlens, PARTS, (-1,) * len(PARTS)).keys is None, "nothing is shared"


def test_gradients_of_shared_prompts() -> None:
    """A shared row's gradient is the sum over the sequences that have it: by float64, and dq as if packed."""
    tensors = inputs(sum(PARTS))
    dy = torch.randn(tensors[0].shape, generator=torch.Generator().manual_seed(9)).bfloat16()
    index, lengths, place = whole_rows()

    def spread(*leaves: Tensor) -> Tensor:
        return plain(*(x[index] for x in leaves), lengths)[place]

    results = {}
    for name, dtype in (("ours", torch.bfloat16), ("baseline", torch.bfloat16), ("exact", torch.float64)):
        leaves = [t.to(dtype).requires_grad_() for t in tensors]
        y = attend(*leaves, shared_plan(), 0, SCALE) if name == "ours" else spread(*leaves)
        results[name] = torch.autograd.grad(y, leaves, dy.to(dtype))
    for what, *triple in zip("qkv", results["ours"], results["baseline"], results["exact"], strict=True):
        assert_at_most_twice(*triple, f"d{what}")
    again = [t.requires_grad_() for t in inputs(sum(PARTS))]
    for one, two in zip(results["ours"], torch.autograd.grad(attend(*again, shared_plan(), 0, SCALE), again, dy),
                        strict=True):
        assert_bitwise_equal(one, two, "the same bits again")


def test_gradients_of_copies_are_added_in_fp32_in_the_order_of_parts() -> None:
    keys = varlen_plan(torch.tensor([0, 1, 2, 4], dtype=torch.int32), (1, 1, 2), (-1, 0, 0)).keys
    assert keys is not None and keys.rows.tolist() == [0, 0, 1, 0, 2, 3] and keys.lengths == (1, 2, 3)
    assert keys.cu_seqlens.tolist() == [0, 1, 3, 6] and keys.own.tolist() == [0, 2, 4, 5]
    assert [(a.tolist(), b.tolist()) for a, b in keys.later] == [([0], [1]), ([0], [3])]
    copies = torch.tensor([2.0**24, 1.0, 5.0, -(2.0**24), 6.0, 7.0]).view(6, 1, 1)
    assert add_shared(copies, keys, torch.float32).flatten().tolist() == [0.0, 5.0, 6.0, 7.0]  # 2^24 + 1 has no FP32
    copies[[0, 3]] = torch.tensor([256.0, -256.0]).view(2, 1, 1)
    rounded = add_shared(copies.bfloat16(), keys, torch.bfloat16)  # 257 has no BF16: the sum is in FP32
    assert rounded.dtype == torch.bfloat16 and rounded.flatten().tolist() == [1.0, 5.0, 6.0, 7.0]


@pytest.mark.parametrize("stems", [(1, -1, -1), (-1, 0, 1), (0, -1, -1)])
def test_a_stem_comes_first_and_has_no_stem(stems: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"part [02] cannot go on from part [01]"):
        varlen_plan(plan_of((3, 2, 2)).cu_seqlens, (3, 2, 2), stems)
