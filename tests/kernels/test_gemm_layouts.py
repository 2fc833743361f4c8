"""The prediction of DeepGEMM's layouts: few for a model, as its cost model implies; against the library on a GPU."""

from __future__ import annotations

import numpy as np
import pytest

from jetrl.kernels.gemm.layouts import Layout, layouts, representatives


def test_decode_steps_take_tiles_of_their_size() -> None:
    """By hand: up to 16 rows one tile of 16 rows wastes least; as the batch grows, so do the tiles."""
    rows = np.array([1, 16, 17, 33, 64, 65, 256, 8192])
    tiles = [one.rows for one in layouts("fp8", rows, 6144, 4096, 2)]
    assert tiles[:5] == [16, 16, 32, 64, 64] and tiles[-1] >= 128
    assert all(one.cluster_rows * one.cluster_columns == 1 for one in layouts("fp8", rows[:3], 6144, 4096, 2))


def test_a_layout_fits_in_shared_memory() -> None:
    for one in representatives("fp8", 8192, 24576, 4096, 2):
        tile = (one.rows + one.columns) * 128 + one.rows * 4
        assert one.stages * tile + one.rows * one.columns * 2 <= 232_448 and one.stages >= 3


@pytest.mark.parametrize("kind", ["fp8", "bf16", "wgrad"])
def test_the_choice_of_one_is_that_among_many(kind: str) -> None:
    rows = np.arange(1, 700, 13)
    bytes_ = 4 if kind == "wgrad" else 2
    together = layouts(kind, rows, 960, 640, bytes_)  # type: ignore[arg-type]
    assert together == [layouts(kind, rows[i : i + 1], 960, 640, bytes_)[0] for i in range(len(rows))]  # type: ignore[arg-type]


def test_few_kernels_serve_a_model() -> None:
    """The matrices of Qwen3-8B, forward and backward, for every number of rows up to 8,192."""
    found: set[Layout] = set()
    for n, k in ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (4096, 24576), (12288, 4096), (4096, 6144)):
        smallest = representatives("fp8", 8192, n, k, 2)
        found |= set(smallest)
        assert all(layouts("fp8", np.array([m]), n, k, 2) == [layout] for layout, m in smallest.items())
    assert len(found) == 31
