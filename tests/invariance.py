"""A row's bits depend on that row alone: the promise on which rollout and training agree."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tolerances import assert_bitwise_equal
from torch import Tensor


def assert_rows_independent(op: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """`op(x)[i]` has the same bits alone, in any order, in part of the batch, and next to huge and tiny rows."""
    whole = op(x)
    for i in range(len(x)):
        assert_bitwise_equal(op(x[i : i + 1]), whole[i : i + 1], f"row {i} alone")
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    assert_bitwise_equal(op(x[order]), whole[order], "rows in another order")
    for cut in (2, 3, len(x) // 2):
        assert_bitwise_equal(op(x[:cut]), whole[:cut], f"the first {cut} rows")
    padding = torch.zeros_like(x)
    padding[::2], padding[1::3] = 1e4, 1e-6
    assert_bitwise_equal(op(torch.cat((padding, x, padding)))[len(x) : 2 * len(x)], whole, "between other rows")
