"""The two rules of comparison: bit-equal where exactness is promised, at most twice the baseline's error elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def assert_bitwise_equal(actual: Tensor, expected: Tensor, name: str = "") -> None:
    """Equal dtype, shape and bits. NaNs must have the same bits, and 0.0 is not -0.0. Names the first difference."""
    where = f"{name}: " if name else ""
    assert actual.dtype == expected.dtype, f"{where}dtype {actual.dtype}, expected {expected.dtype}"
    assert actual.shape == expected.shape, f"{where}shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    view = _BITS[actual.element_size()]
    actual, expected = actual.detach().contiguous(), expected.detach().contiguous()
    unequal = (actual.view(view) != expected.view(view)).nonzero()
    if len(unequal):
        at = tuple(unequal[0].tolist())
        raise AssertionError(
            f"{where}{len(unequal)} of {actual.numel()} values differ; the first at {at}: "
            f"{actual[at].item()!r}, expected {expected[at].item()!r}"
        )


def error(actual: Tensor, exact: Tensor) -> float:
    """Root of the mean square difference, in float64."""
    return float((actual.detach().double() - exact.detach().double()).square().mean().sqrt())


def assert_at_most_twice(actual: Tensor, baseline: Tensor, exact: Tensor, name: str = "", floor: float = 0.0) -> None:
    """The error of `actual` against `exact` is at most twice that of `baseline`, or at most `floor`."""
    assert torch.isfinite(actual).all(), f"{name}: not finite"
    ours, theirs = error(actual, exact), error(baseline, exact)
    assert ours <= max(2 * theirs, floor), f"{name}: error {ours:.3g}, the baseline's is {theirs:.3g}"


def sqnr_db(actual: Tensor, exact: Tensor) -> float:
    """Signal to quantization noise in decibels."""
    exact = exact.detach().double()
    noise = (actual.detach().double() - exact).square().sum().clamp_min(1e-300)
    return float(10 * torch.log10(exact.square().sum() / noise))
