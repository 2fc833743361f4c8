"""Exact arithmetic: error bounds, and bits that depend on the value alone (not on lane, order, shape or threads)."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from tolerances import assert_bitwise_equal

from jetrl.kernels import exact


def test_exp_is_within_two_ulp_over_its_whole_range() -> None:
    x = torch.cat((torch.linspace(-87, 88, 400_001), torch.randn(100_000, generator=torch.Generator().manual_seed(0))))
    got, true = exact.exp(x).numpy(), np.exp(x.double().numpy())
    ulp = np.spacing(true.astype(np.float32)).astype(np.float64)
    worst = (np.abs(got.astype(np.float64) - true) / ulp).max()
    assert worst < 2, worst


def test_exp_at_special_values() -> None:
    x = torch.tensor([0.0, -0.0, -1e30, float("-inf"), 1e30, float("inf"), -87.0, 88.0, 1e-45])
    low, high = exact.exp(torch.tensor([-87.0, 88.0]))
    expected = torch.stack([torch.tensor(1.0), torch.tensor(1.0), low, low, high, high, low, high, torch.tensor(1.0)])
    assert_bitwise_equal(exact.exp(x), expected)
    assert math.isnan(float(exact.exp(torch.tensor([float("nan")]))))


@pytest.mark.parametrize("size", [1, 3, 7, 8, 17, 1000, (1 << 16) + 5])
def test_exp_and_log_give_a_value_the_same_bits_in_every_lane(size: int) -> None:
    x = torch.randn(size, generator=torch.Generator().manual_seed(size)) * 10
    e, g = exact.exp(x), exact.log(x.abs() + 1e-3)
    for i in {0, size // 2, size - 1}:
        assert_bitwise_equal(exact.exp(x[i : i + 1]), e[i : i + 1], f"exp, lane {i}")
        assert_bitwise_equal(exact.log(x[i : i + 1].abs() + 1e-3), g[i : i + 1], f"log, lane {i}")
    assert_bitwise_equal(exact.exp(x.flip(0)), e.flip(0), "exp, reversed")
    strided = torch.stack((x, torch.zeros_like(x)), dim=1)[:, 0]
    assert_bitwise_equal(exact.exp(strided), e, "exp, strided")


def test_log_has_a_relative_error_below_1e_15() -> None:
    rng = np.random.default_rng(0)
    wide, middle = np.exp(rng.uniform(-700, 700, 50_000)), rng.uniform(0.7, 1.6, 50_000)
    x = np.concatenate((wide, middle, 1 + rng.normal(size=99) * 1e-9))
    got = exact.log(torch.from_numpy(x)).numpy()
    true = np.log(x.astype(np.longdouble))
    worst = float((np.abs(got - true) / np.abs(true)).max())
    assert worst < 1e-15, worst
    assert float(exact.log(torch.tensor([1.0]))) == 0.0


def test_power_of_two_and_exponent_over_the_whole_range() -> None:
    exponents = torch.arange(-1022, 1024)
    assert exact.power_of_two(exponents).tolist() == [math.ldexp(1.0, int(e)) for e in exponents]
    x = torch.tensor([1.0, 1.5, 2.0, -0.75, 2.0**-126, 3e38, 0.0, 1e-45])
    assert exact.exponent_of(x).tolist() == [0, 0, 1, -1, -126, 127, -127, -127]


@pytest.mark.parametrize("bits", [18, 21, 24])
def test_align_rounds_to_the_grid_of_the_row_maximum(bits: int) -> None:
    x = torch.randn(6, 200, generator=torch.Generator().manual_seed(bits))
    x *= torch.tensor([1.0, 1e-30, 1e30, 1.0, 1.0, 1.0])[:, None]
    x[3] = 0.0
    x[4] = 1e-40  # denormal: below the grid that a row of exponent -127 has
    x[5, 0] = -2.0
    m, unit = exact.align(x, bits)
    assert torch.equal(m, m.round()) and float(m.abs().max()) <= 2**bits
    top = x.abs().amax(-1, keepdim=True).double()
    assert bool((unit <= top.clamp_min(2.0**-127) * 2.0 ** (1 - bits)).all()), "the grid is coarser than promised"
    assert bool(((m * unit - x.double()).abs() <= unit / 2).all())
    assert bool((m[3] == 0).all())
    assert_bitwise_equal(exact.align(x[2:3], bits)[0], m[2:3], "a row alone")


def test_align_leaves_its_input_alone() -> None:
    x = torch.randn(3, 5, dtype=torch.float64).float().double()
    before = x.clone()
    exact.align(x)
    assert torch.equal(x, before)


def test_matmul_of_aligned_rows_is_the_exact_sum() -> None:
    generator = torch.Generator().manual_seed(3)
    a, _ = exact.align(torch.randn(3, 2048, generator=generator))
    b, _ = exact.align(torch.randn(4, 2048, generator=generator))
    got = exact.matmul_nt(a, b)
    for i in range(3):
        for j in range(4):
            true = sum(int(x) * int(y) for x, y in zip(a[i].tolist(), b[j].tolist(), strict=True))
            assert Fraction(got[i, j].item()) == true
    order = torch.randperm(2048, generator=generator)
    assert_bitwise_equal(exact.matmul_nt(a[:, order], b[:, order]), got, "K in another order")


def test_matmul_at_the_bound_is_exact() -> None:
    full = torch.full((1, 2048), 2.0**21, dtype=torch.float64)
    assert exact.matmul_nt(full, full).item() == 2.0**53
    assert exact.matmul_nt(full, full - 1).item() == 2**21 * (2**21 - 1) * 2048


def test_long_rows_are_added_in_chunks_whatever_the_batch() -> None:
    generator = torch.Generator().manual_seed(4)
    a, _ = exact.align(torch.randn(5, 5000, generator=generator))
    b, _ = exact.align(torch.randn(7, 5000, generator=generator))
    got = exact.matmul_nt(a, b)
    parts = [a[:, s : s + 2048] @ b[:, s : s + 2048].T for s in range(0, 5000, 2048)]
    assert_bitwise_equal(got, (parts[0] + parts[1]) + parts[2])
    assert_bitwise_equal(exact.matmul_nt(a[2:3], b), got[2:3], "a row alone")


def test_sum_of_squares_is_exact_in_any_order() -> None:
    x = torch.randn(4, 8192, generator=torch.Generator().manual_seed(5)).bfloat16()
    got = exact.sum_of_squares(x)
    m, unit = exact.align(x, bits=20)
    for i in range(4):
        true = sum(Fraction(int(v)) ** 2 for v in m[i].tolist()) * Fraction(unit[i].item()) ** 2
        assert Fraction(got[i].item()) == true
    assert_bitwise_equal(exact.sum_of_squares(x.flip(-1)), got, "reversed")
    true = x.double().square().sum(-1, keepdim=True)
    assert float(((got - true) / true).abs().max()) < 1e-6
