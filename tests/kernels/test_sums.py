"""Sums in one order; the Triton kernel is compared with the reference in `triton_cases.py`."""

from __future__ import annotations

import pytest
import torch

from jetrl.kernels.update.sums import add_in_order


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_add_in_order_rounds_every_sum(dtype: torch.dtype) -> None:
    one, half = 1.0, torch.finfo(dtype).eps / 2  # 1 + half rounds to 1; half + half does not vanish
    parts = torch.tensor([[half], [half], [one]], dtype=dtype)
    assert add_in_order(torch.tensor([one], dtype=dtype), parts).item() == 2.0
    assert add_in_order(None, parts).item() == 1.0 + 2 * half
    assert add_in_order(None, parts.flip(0)).item() == 1.0


def test_add_in_order_writes_into_its_total() -> None:
    total, parts = torch.ones(2, 3), torch.arange(12.0).view(2, 2, 3)
    assert add_in_order(total, parts) is total and torch.equal(total, 1 + parts[0] + parts[1])
    new = add_in_order(None, parts)
    new.zero_()
    assert torch.equal(parts, torch.arange(12.0).view(2, 2, 3))


def test_other_shapes_and_types_are_refused() -> None:
    for parts in (torch.zeros(2, 4), torch.zeros(2, 3, dtype=torch.bfloat16), torch.zeros(0, 3)):
        with pytest.raises(ValueError, match="a sum"):
            add_in_order(torch.zeros(3), parts)
