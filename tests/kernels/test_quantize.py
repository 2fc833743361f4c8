"""Quantizers against a slow definition of their own: E4M3 from its bit fields, FP32 steps in numpy scalars."""

from __future__ import annotations

import bisect
import math

import numpy as np
import pytest
import torch
from tolerances import assert_bitwise_equal
from torch import Tensor

from jetrl.kernels.qtensor import QTensor
from jetrl.kernels.quantize import ops as quantize
from jetrl.kernels.reference import dequantize, row_scales, transpose

f32 = np.float32
# positive E4M3 values by code: 4 exponent bits with bias 7, 3 fraction bits, no infinity; code 127 is NaN
E4M3 = [(m / 8) * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8)][:127]


def slow_scale(values: list[float], pow2: bool) -> np.float32:
    amax = f32(max(f32(abs(v)) for v in values))
    scale = max(amax, f32(1e-12)) / f32(448)
    if pow2:
        fraction, exponent = math.frexp(float(scale))
        scale = f32(math.ldexp(1.0, exponent - 1 if fraction == 0.5 else exponent))
    return scale


def slow_code(value: float, scale: np.float32) -> int:
    q = float(f32(value) / scale)
    magnitude = min(abs(q), 448.0)
    above = bisect.bisect_left(E4M3, magnitude)
    if above == 0 or E4M3[above] == magnitude:
        code = above
    else:
        low, high = magnitude - E4M3[above - 1], E4M3[above] - magnitude
        code = above - 1 if low < high or (low == high and (above - 1) % 2 == 0) else above
    return code | (0x80 if math.copysign(1.0, q) < 0 else 0)


def slow_rows(x: Tensor, pow2: bool, edges: list[tuple[int, int]]) -> tuple[list[list[int]], list[list[np.float32]]]:
    codes, scales = [], []
    for row in x.float().tolist():
        scales.append([slow_scale(row[a:b], pow2) for a, b in edges])
        codes.append([slow_code(v, s) for (a, b), s in zip(edges, scales[-1], strict=True) for v in row[a:b]])
    return codes, scales


def assert_is(q: QTensor, codes: list[list[int]], scales: list[list[np.float32]]) -> None:
    assert_bitwise_equal(q.scale, torch.from_numpy(np.array(scales, dtype=f32)), "scales")
    assert_bitwise_equal(q.codes.view(torch.uint8), torch.tensor(codes, dtype=torch.uint8), "codes")


def hard_rows() -> Tensor:
    """Random rows; ties and edges of every code under an exact scale; zeros; denormals; tiny, huge and mixed values."""
    generator = torch.Generator().manual_seed(0)
    middles = [(a + b) / 2 for a, b in zip(E4M3[:-1], E4M3[1:], strict=True)]
    ties = torch.tensor(([448.0] + middles)[:127] + [-448.0])
    codes = torch.tensor(E4M3 + [-448.0])
    rows = [torch.randn(300, generator=generator) * s for s in (1.0, 1e-20, 1e20, 3e-6)]
    rows += [torch.cat((ties, ties * 2.0**-20, -ties[:44])), torch.cat((codes, -codes * 4, codes[:44]))]
    rows += [torch.zeros(300), torch.full((300,), 1e-40), torch.full((300,), 3.3e38)]
    rows += [torch.cat((torch.full((1,), 3.3e38), torch.full((299,), 1e-30)))]
    rows += [torch.cat((torch.zeros(200), -torch.ones(100)))]
    return torch.stack(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pow2", [False, True])
def test_rows_equal_the_slow_definition(pow2: bool, dtype: torch.dtype) -> None:
    x = hard_rows().to(dtype)
    edges = [(0, 128), (128, 256), (256, 300)]
    assert_is(quantize.quantize_act(x, pow2), *slow_rows(x, pow2, edges))
    q = quantize.quantize_act_t(x.T.contiguous(), pow2)
    assert_is(q, *slow_rows(x, pow2, edges))
    assert (q.granularity, q.row_sections, q.col_sections) == ("1x128", (len(x),), (300,))


@pytest.mark.parametrize("pow2", [False, True])
def test_sections_restart_the_blocks(pow2: bool) -> None:
    x = hard_rows()
    edges = [(0, 128), (128, 130), (130, 170), (170, 298), (298, 300)]
    assert_is(quantize.quantize_act(x, pow2, (130, 40, 130)), *slow_rows(x, pow2, edges))


@pytest.mark.parametrize("pow2", [False, True])
@pytest.mark.parametrize("sections", [None, (130, 20, 20), (128, 42)])
def test_weights_equal_the_slow_definition(sections: tuple[int, ...] | None, pow2: bool) -> None:
    w = (torch.randn(170, 200, generator=torch.Generator().manual_seed(1)) * 0.02).bfloat16()
    w[:128, 128:] *= 100
    q = quantize.quantize_weight(w, sections, pow2)
    rows = {None: [(0, 128), (128, 170)], (130, 20, 20): [(0, 128), (128, 130), (130, 150), (150, 170)],
            (128, 42): [(0, 128), (128, 170)]}[sections]
    columns = [(0, 128), (128, 200)]
    values = w.float()
    scales = [[slow_scale(values[a:b, c:d].flatten().tolist(), pow2) for c, d in columns] for a, b in rows]
    codes = []
    for (a, b), scale in zip(rows, scales, strict=True):
        for row in values[a:b].tolist():
            codes.append([slow_code(v, s) for (c, d), s in zip(columns, scale, strict=True) for v in row[c:d]])
    assert_is(q, codes, scales)
    assert [len(r) for r in (q.row_blocks(), q.col_blocks())] == [len(rows), 2]
    assert_bitwise_equal(dequantize(transpose(q)), dequantize(q).T.contiguous(), "transposed")


def test_nan_and_infinity_spoil_their_own_block_only() -> None:
    x = torch.randn(3, 300, generator=torch.Generator().manual_seed(2))
    clean = quantize.quantize_act(x)
    x[0, 5], x[1, 140] = float("nan"), float("inf")
    q = quantize.quantize_act(x)
    assert math.isnan(q.scale[0, 0]) and bool(q.codes[0, :128].float().isnan().all())
    assert math.isinf(q.scale[1, 1]) and math.isnan(q.codes[1, 140].float())
    blocks = (slice(0, 128), slice(128, 256), slice(256, 300))
    for row, block in ((0, 1), (0, 2), (1, 0), (1, 2), (2, 0)):
        columns = blocks[block]
        assert_bitwise_equal(q.scale[row, block], clean.scale[row, block])
        assert_bitwise_equal(q.codes[row, columns].view(torch.uint8), clean.codes[row, columns].view(torch.uint8))


@pytest.mark.parametrize("pow2", [False, True])
def test_values_are_within_half_a_step(pow2: bool) -> None:
    x = torch.randn(40, 300, generator=torch.Generator().manual_seed(3))
    q = quantize.quantize_act(x, pow2)
    scale = row_scales(q).repeat_interleave(torch.tensor([128, 128, 44]), dim=1)
    bound = torch.maximum(x.abs() * 2.0**-4, scale * 2.0**-10) * (1 + 1e-5)
    assert bool(((dequantize(q) - x).abs() <= bound).all())
    if pow2:
        assert bool((q.scale.frexp().mantissa == 0.5).all()), "a scale that is no power of two"
        assert bool((q.scale >= quantize.quantize_act(x).scale).all())
    else:
        assert bool((q.codes.float().abs().view(40, -1)[:, :128].amax(1) == 448).all()), "the largest value is code 448"


def test_a_row_does_not_depend_on_its_batch() -> None:
    x = hard_rows()
    whole = quantize.quantize_act(x)
    for i in range(len(x)):
        alone = quantize.quantize_act(x[i : i + 1])
        assert_bitwise_equal(alone.scale, whole.scale[i : i + 1], f"row {i}")
        assert_bitwise_equal(alone.codes.view(torch.uint8), whole.codes[i : i + 1].view(torch.uint8), f"row {i}")


def test_tokens_behind_a_group_of_128_do_not_change_it() -> None:
    x = torch.randn(200, 3, generator=torch.Generator().manual_seed(4))
    short, long = quantize.quantize_act_t(x[:128]), quantize.quantize_act_t(x)
    assert_bitwise_equal(long.scale[:, :1], short.scale)
    assert_bitwise_equal(long.codes[:, :128].view(torch.uint8), short.codes.view(torch.uint8))


@pytest.mark.parametrize("x", [torch.zeros(3), torch.zeros(3, 3).double(), torch.zeros(2, 2).long()])
def test_what_is_no_matrix_of_floats_is_refused(x: Tensor) -> None:
    with pytest.raises(ValueError, match="BF16 or FP32 matrix"):
        quantize.quantize_act(x)


def test_sections_that_do_not_fit_are_refused_with_the_sizes() -> None:
    with pytest.raises(ValueError, match=r"sections \(100, 20\) sum to 120, the matrix has 128"):
        quantize.quantize_weight(torch.zeros(128, 64), (100, 20))
