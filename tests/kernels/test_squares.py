"""Sums of squares by rows; the Triton kernel is compared with this in `triton_cases.py`."""

from __future__ import annotations

import pytest
import torch

from jetrl.kernels.update.squares import ROW, row_squares


@pytest.mark.parametrize("size", [1, ROW, ROW + 1, 5_000_000])
def test_rows_add_up(size: int) -> None:
    x = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(torch.bfloat16)
    out = torch.full((-(-size // ROW),), float("nan"), dtype=torch.float64)
    row_squares(x, out)
    for i in {0, len(out) // 2, len(out) - 1}:
        assert out[i].item() == pytest.approx(x[i * ROW : (i + 1) * ROW].double().square().sum().item(), rel=1e-14)
    assert out.sum().item() == pytest.approx(x.double().square().sum().item(), rel=1e-13)


def test_the_wrong_room_is_refused() -> None:
    with pytest.raises(ValueError, match=r"float64 \[2\]"):
        row_squares(torch.zeros(ROW + 1), torch.zeros(1, dtype=torch.float64))
