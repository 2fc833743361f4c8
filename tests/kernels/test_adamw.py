"""One AdamW step; the Triton kernel is compared with the definition in `triton_cases.py`."""

from __future__ import annotations

import itertools

import pytest
import torch

from jetrl.kernels.update.adamw import AdamWStep, adamw_step_

KINDS = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize(("master", "moments"), list(itertools.product(KINDS, KINDS)))
def test_a_step_is_the_formula_rounded_once(master: torch.dtype, moments: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    p, grad, m = (torch.randn(50, 7, generator=g) for _ in range(3))
    p, grad, m, v = p.to(master), grad.to(master), m.to(moments), torch.rand(50, 7, generator=g).to(moments)
    want_m = 0.9 * m.double() + 0.1 * grad.double()
    want_v = 0.95 * v.double() + 0.05 * grad.double() ** 2
    update = (want_m / (1 - 0.9**3)) / ((want_v / (1 - 0.95**3)).sqrt() + 1e-8)
    want_p = p.double() * (1 - 0.01 * 0.1) - 0.01 * update
    adamw_step_(p, grad, m, v, AdamWStep(0.01, (0.9, 0.95), 1e-8, 0.1, 3))
    for got, want, dtype in ((p, want_p, master), (m, want_m, moments), (v, want_v, moments)):
        assert got.dtype == dtype
        if dtype == torch.float32:
            torch.testing.assert_close(got.double(), want, rtol=2e-6, atol=2e-7)
        else:
            assert (got == want.to(torch.bfloat16)).double().mean() > 0.99  # the rest are near-ties


@pytest.mark.parametrize(("grads", "moments"), list(itertools.product(KINDS, KINDS)))
def test_a_clipped_gradient_is_the_rounded_product(grads: torch.dtype, moments: torch.dtype) -> None:
    """As if the product had been stored in the gradient's type first; the gradient itself stays as it is."""
    g = torch.Generator().manual_seed(1)
    start = torch.randn(50, 7, generator=g), torch.zeros(50, 7, dtype=moments), torch.zeros(50, 7, dtype=moments)
    grad = torch.randn(50, 7, generator=g).to(grads)
    factor = 0.7390625763  # not an FP32 number
    product = (grad.float() * torch.tensor(factor, dtype=torch.float32)).to(grads)
    ends = []
    for read, times in ((product, 1.0), (grad, factor)):
        p, m, v = (x.clone() for x in start)
        kept = read.clone()
        adamw_step_(p, read, m, v, AdamWStep(0.01, (0.9, 0.95), 1e-8, 0.1, 1, times))
        assert torch.equal(read, kept)
        ends.append((p, m, v))
    for one, two in zip(*ends, strict=True):
        assert torch.equal(one, two)
    assert not torch.equal(product, grad)


def test_refusals() -> None:
    x = torch.zeros(4, 4)
    numbers = AdamWStep(0.1, (0.9, 0.95), 1e-8, 0.0, 1)
    with pytest.raises(ValueError, match="contiguous BF16 or FP32 of one shape"):
        adamw_step_(x, torch.zeros(4), x, x, numbers)
    with pytest.raises(ValueError, match="contiguous"):
        adamw_step_(x.T[1:], x[1:], x[1:], x[1:], numbers)
