"""The arithmetic of `quantize.triton.quotient`, `scale_from` and `pointwise.triton.sigmoid32`, tried on all its inputs.

Fused multiply-adds are computed here with one rounding: the float64 sum is made odd where it was rounded, after which
rounding to FP32 is right. A hardware reciprocal may be a unit off; more are tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from jetrl.kernels import exact
from jetrl.kernels import reference as ref

F32 = np.float32
VALUES = (np.arange(65536, dtype=np.uint32) << 16).view(F32)  # every BF16
HIGH_448, LOW_448 = F32(9586980 * 2.0**-32), F32(9586981 * 2.0**-56)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with np.errstate(all="ignore"):
        yield


def fma(a: Any, b: Any, c: Any) -> np.ndarray:
    """`a * b + c` of FP32, rounded once."""
    p, c = np.broadcast_arrays(np.multiply(a, b, dtype=np.float64), np.asarray(c, np.float64))
    s = p + c
    back = s - p
    error = (p - (s - back)) + (c - back)
    bits = s.view(np.int64)
    odd = np.where((error > 0) == (s > 0), bits + 1, bits - 1).view(np.float64)
    return np.where((error != 0) & (bits & 1 == 0) & np.isfinite(s), odd, s).astype(F32)


def units(x: Any, by: int) -> np.ndarray:
    return (x.view(np.int32) + by).view(F32)


def codes(q: np.ndarray) -> np.ndarray:
    return torch.from_numpy(q.copy()).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def maxima(exponent: int) -> np.ndarray:
    """The 128 BF16 of a biased exponent."""
    return ((np.arange(128, dtype=np.uint32) + 128 * exponent) << 16).view(F32)


def test_the_emulation_rounds_once() -> None:
    one, eps = F32(1), F32(2.0**-24)
    assert fma(eps, one, one) == one and fma(eps, units(one, 1), one) == units(one, 1)  # a tie; just above it
    assert fma(eps * eps, eps * eps, units(one, 1)) == units(one, 1)


def test_a_scale_is_a_product_in_two_parts() -> None:
    random = np.random.default_rng(0).integers(0x2B8CBCCC, 0x7F800000, 1 << 20, dtype=np.uint32).view(F32)
    amax = np.concatenate([VALUES[VALUES >= F32(1e-12)], random, np.array([1e-12], F32)])
    want = ref.scale_of(torch.from_numpy(amax), False).numpy()
    np.testing.assert_array_equal(fma(amax, HIGH_448, amax * LOW_448).view(np.int32), want.view(np.int32))


@pytest.mark.parametrize("exponent", [87, 127, 254])  # of the floor; in the middle; the second part is denormal
@pytest.mark.parametrize("less", [1, 3, 5])
def test_a_quotient_is_a_product_in_two_parts(exponent: int, less: int) -> None:
    """Every BF16 up to every maximum of an exponent, whatever the reciprocal's error."""
    amax = maxima(exponent)
    scales = ref.scale_of(torch.from_numpy(amax), False).numpy()
    for top, scale in zip(amax, scales, strict=True):
        high = units(F32(1) / scale.reshape(1), -less)
        low = fma(-high, scale, F32(1)) * high
        assert low > 0
        x = VALUES[np.abs(VALUES) <= top]
        got, want = fma(x, high, x * low), x / scale
        np.testing.assert_array_equal(codes(got), codes(want))
        if exponent < 254:
            there = np.abs(want) >= 2.0**-11
            np.testing.assert_array_equal(got[there].view(np.int32), want[there].view(np.int32))


@pytest.mark.parametrize("off", [-3, -1, 0, 1, 3])
def test_a_sigmoid_is_a_reciprocal_corrected_twice(off: int) -> None:
    e = (exact.exp(-torch.from_numpy(VALUES)) + 1.0).numpy()
    quarter = e * F32(0.25)
    r = units(F32(1) / quarter, off)
    for _ in range(2):
        r = fma(fma(-quarter, r, F32(1)), r, r)
    got, want = r * F32(0.25), F32(1) / e
    got[e == F32(2 - 2.0**-23)] = F32(0.5 + 2.0**-24)
    nan = np.isnan(want)
    assert (np.isnan(got) == nan).all()
    np.testing.assert_array_equal(got[~nan].view(np.int32), want[~nan].view(np.int32))
