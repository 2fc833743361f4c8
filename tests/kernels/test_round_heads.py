"""Heads as the FP8 KV cache holds them: the definition against plain arithmetic, and cache, forward and gradient."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from invariance import assert_rows_independent
from tolerances import assert_bitwise_equal
from torch import Tensor

from jetrl.kernels.attention.reference import read_cache, write_cache
from jetrl.kernels.pointwise import ops as pointwise
from jetrl.kernels.reference import dequantize_heads, quantize_heads, round_heads
from jetrl.types import LayerCache

H = 24
# the finite E4M3 values from 0 up, from their definition: 4 exponent bits (bias 7), 3 fraction bits
GRID = [m * 2.0**-9 for m in range(8)] + [(8 + m) * 2.0 ** (e - 10) for e in range(1, 16) for m in range(8)][:-1]


def heads(*shape: int, seed: int = 0) -> Tensor:
    """BF16 heads of sizes far apart, with zeros among the entries."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, H, generator=generator) * torch.randn(*shape, 1, generator=generator).mul_(12).exp2()
    return x.masked_fill(torch.rand(x.shape, generator=generator) < 0.05, 0.0).bfloat16()


def plainly(head: list[float]) -> tuple[float, list[float]]:
    """Scale and codes' values of one head, by search: the definition, without torch."""
    amax = np.float32(max(max(abs(x) for x in head), np.float32(1e-12)))
    ratio = float(amax / np.float32(448.0))
    scale = 2.0 ** math.ceil(math.log2(ratio))
    codes = []
    for x in head:
        size = min(abs(x) / scale, 448.0)
        gap = min(abs(g - size) for g in GRID)
        near = [i for i, g in enumerate(GRID) if abs(g - size) == gap]
        codes.append(math.copysign(GRID[near[0] if len(near) == 1 or near[0] % 2 == 0 else near[1]], x))
    return scale, codes


def special() -> Tensor:
    """Heads at the edges: zero, denormal, tiny, huge, maxima on and next to a step of the scale, halves of codes."""
    rows = [torch.zeros(H), -torch.zeros(H), torch.full((H,), 1e-40), torch.full((H,), 1e-13), torch.full((H,), 3e37)]
    for top in (447.0, 448.0, 450.0, 224.0, 226.0, 1.75, 1.7578125, 2.0**-40):
        rows.append(torch.linspace(-1, 1, H) * top)
    halves = torch.tensor([(a + b) / 2 for a, b in zip(GRID[:-1], GRID[1:], strict=True)])
    rows += [torch.cat((part, torch.full((H - len(part),), 448.0))) for part in halves.split(H - 1)]
    rows += [row * 2.0**-20 for row in rows[-4:]]
    return torch.stack(rows).bfloat16()


@pytest.mark.parametrize("x", [heads(150), special()], ids=["random", "special"])
def test_codes_and_scales_are_those_of_the_definition(x: Tensor) -> None:
    codes, scales = quantize_heads(x)
    assert codes.dtype == torch.float8_e4m3fn and codes.shape == x.shape
    assert scales.dtype == torch.bfloat16 and scales.shape == x.shape[:-1]
    values = round_heads(x)
    for i, row in enumerate(x.tolist()):
        scale, wanted = plainly(row)
        assert float(scales[i]) == scale, f"scale of head {i}"
        assert codes[i].float().tolist() == wanted, f"codes of head {i}"
        assert values[i].tolist() == [scale * w for w in wanted], f"head {i}: not exact in BF16"
        assert torch.equal(values[i].signbit(), x[i].signbit()), f"signs of head {i}"


def test_what_is_rounded_stays_though_its_scale_may_not() -> None:
    x = torch.cat((heads(3000, seed=1), special()))
    once = round_heads(x)
    assert not torch.equal(once, x)
    assert_bitwise_equal(round_heads(once), once)
    (codes, scales), (again, smaller) = quantize_heads(x), quantize_heads(once)
    halved = scales != smaller
    assert halved.any() and torch.equal(smaller[halved] * 2, scales[halved])
    assert_bitwise_equal(dequantize_heads(again, smaller, x.dtype), dequantize_heads(codes, scales, x.dtype))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_spoils_its_head_and_no_other(bad: float) -> None:
    x = heads(4, seed=2)
    x[2, 5] = bad
    y = round_heads(x)
    assert y[2].isnan().all()
    others = torch.tensor([0, 1, 3])
    assert_bitwise_equal(y[others], round_heads(x[others]))


def test_the_last_binade_of_bf16_may_round_up_to_infinity() -> None:
    top = torch.full((1, H), torch.finfo(torch.bfloat16).max).bfloat16()
    assert round_heads(top).isinf().all() and round_heads(top * 0.96875).isfinite().all()


def test_a_head_does_not_depend_on_the_others() -> None:
    assert_rows_independent(round_heads, heads(9, 2, seed=3))


def test_gradients_pass_straight_through() -> None:
    x = heads(5, 2, seed=4).requires_grad_()
    y = pointwise.round_heads(x)
    grad = heads(5, 2, seed=5)
    y.backward(grad)
    assert_bitwise_equal(y, round_heads(x.detach()))
    assert x.grad is not None
    assert_bitwise_equal(x.grad, grad)


def pages(num_pages: int, page: int, g: int) -> LayerCache:
    """FP8 pages full of NaN."""
    codes = torch.full((num_pages, page, g, H), math.nan).to(torch.float8_e4m3fn)
    scales = torch.full((num_pages, g, page, 2), math.nan).bfloat16()
    return LayerCache(codes.clone(), codes.clone(), scales)


def test_a_cache_holds_rounded_heads_where_its_slots_say() -> None:
    k, v, cache = heads(5, 2, seed=6), heads(5, 2, seed=7), pages(4, 3, 2)
    slots = torch.tensor([7, 2, -1, 9, 0])
    write_cache(k, v, slots, cache)
    keys, values = read_cache(cache, torch.arange(4)[None], torch.bfloat16)
    written = slots >= 0
    assert_bitwise_equal(keys[0, slots[written]], round_heads(k)[written], "keys")
    assert_bitwise_equal(values[0, slots[written]], round_heads(v)[written], "values")
    rest = torch.ones(12, dtype=torch.bool)
    rest[slots[written]] = False
    assert keys[0, rest].isnan().all() and values[0, rest].isnan().all()
    assert cache.scales is not None
    (_, of_keys), (_, of_values) = quantize_heads(k), quantize_heads(v)
    for token, slot in enumerate(slots.tolist()):  # the layout that decode kernels read
        if slot >= 0:
            both = cache.scales[slot // 3, :, slot % 3]
            assert_bitwise_equal(both, torch.stack((of_keys[token], of_values[token]), -1), f"scales of token {token}")


def test_rounded_heads_are_cached_with_the_same_values() -> None:
    k, v, slots, read = heads(6, 2, seed=8), heads(6, 2, seed=9), torch.arange(6), torch.arange(2)[None]
    first, second = pages(2, 3, 2), pages(2, 3, 2)
    write_cache(k, v, slots, first)
    write_cache(round_heads(k), round_heads(v), slots, second)
    pairs = zip(read_cache(first, read, k.dtype), read_cache(second, read, k.dtype), strict=True)
    for a, b in pairs:
        assert_bitwise_equal(a, b)


@pytest.mark.parametrize("normed", [False, True])
def test_the_fused_projection_rounds_keys_and_values_in_every_form(normed: bool) -> None:
    """With gradients, without, and into a cache, the same values; queries and all gradients as without rounding."""
    t, (n, g) = 6, (4, 2)
    qkv, positions = heads(t, n + 2 * g, seed=10).flatten(1), torch.tensor([0, 1, 2, 3, 0, 1])
    norms = (heads(1, seed=11)[0], heads(1, seed=12)[0]) if normed else None
    angles = torch.arange(4)[:, None] / torch.arange(1, H // 2 + 1)
    tables = angles.cos(), angles.sin()

    def train(fp8_kv: bool) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        x, masters = qkv.clone().requires_grad_(), tuple(w.float().requires_grad_() for w in norms or ())
        out = pointwise.norm_rope(x, (n, g), H, masters or None, norms, 1e-6, tables, positions, fp8_kv)
        torch.autograd.backward(out, [heads(*o.shape[:2], seed=20 + i) for i, o in enumerate(out)])
        return tuple(o.detach() for o in out), [x.grad, *(m.grad for m in masters)]  # type: ignore[list-item]

    (plain, grads), (rounded, through) = train(False), train(True)
    wanted = plain[0], round_heads(plain[1]), round_heads(plain[2])
    assert not torch.equal(wanted[1], plain[1]) and not torch.equal(wanted[2], plain[2])
    for i in range(3):
        assert_bitwise_equal(rounded[i], wanted[i], f"training, {'qkv'[i]}")
    for a, b in zip(through, grads, strict=True):
        assert_bitwise_equal(a, b, "gradient")
    cache = pages(2, 4, g)
    with torch.no_grad():
        arguments = (qkv, (n, g), H, norms, 1e-6, tables, positions)
        for i, got in enumerate(pointwise.qkv_norm_rope(*arguments, None, True)):
            assert_bitwise_equal(got, wanted[i], f"without gradients, {'qkv'[i]}")
        q, keys, _ = pointwise.qkv_norm_rope(*arguments, (cache, torch.arange(t)), True)
        with pytest.raises(AssertionError, match="another format"):
            pointwise.qkv_norm_rope(*arguments, (cache, torch.arange(t)), False)
    assert_bitwise_equal(q, wanted[0], "queries next to a cache")
    assert keys is cache.keys
    for got, want in zip(read_cache(cache, torch.arange(2)[None], q.dtype), wanted[1:], strict=True):
        assert_bitwise_equal(got[0, :t], want, "the cache")
