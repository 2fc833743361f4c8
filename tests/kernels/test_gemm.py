"""GEMMs: FP8 equal to the exact integer product of its codes, BF16 equal to the exact sum, rows independent."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from invariance import assert_rows_independent
from tolerances import assert_at_most_twice, assert_bitwise_equal, sqnr_db
from torch import Tensor

from jetrl.kernels.dispatch import load_backend
from jetrl.kernels.gemm import ops as gemm
from jetrl.kernels.qtensor import QTensor
from jetrl.kernels.quantize.ops import quantize_act, quantize_act_t, quantize_weight
from jetrl.kernels.reference import row_scales

f32 = np.float32
SHAPES = [(5, 128, 128), (7, 200, 96), (1, 33, 300), (130, 260, 129)]  # M, N, K


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def slow_fp8(a: QTensor, b: QTensor) -> Tensor:
    """Integer dot products of each group (codes are multiples of 2**-9), then the documented FP32 steps, in order."""
    ia, ib = ((q.codes.float().numpy() * 512).astype(np.int64) for q in (a, b))
    sa, sb = row_scales(a).numpy(), row_scales(b).numpy()
    out = None
    for g, (start, stop) in enumerate(a.col_blocks()):
        exact = ia[:, start:stop] @ ib[:, start:stop].T  # below 2**43, so float64 and FP32 round it once
        part = ((exact.astype(np.float64) / 2.0**18).astype(f32) * sa[:, g : g + 1]) * sb[:, g]
        out = part if out is None else out + part
    return torch.from_numpy(out)


@pytest.mark.parametrize("pow2", [False, True])
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_fprop_and_dgrad_are_the_exact_product_of_the_codes(m: int, n: int, k: int, pow2: bool) -> None:
    x, w, dy = normal(m, k), normal(n, k, seed=1), normal(m, n, seed=2)
    x[0] *= 300
    w_q = quantize_weight(w, None, pow2)
    got = gemm.fp8_gemm(quantize_act(x, pow2), gemm.prepare_fp8(w_q), torch.float32)
    assert_bitwise_equal(got, slow_fp8(quantize_act(x, pow2), w_q), "fprop")
    w_t = QTensor(w_q.codes.T.contiguous(), w_q.scale.T.contiguous(), "128x128", (k,), (n,))
    got = gemm.fp8_gemm(quantize_act(dy, pow2), gemm.prepare_fp8_t(w_q), torch.float32)
    assert_bitwise_equal(got, slow_fp8(quantize_act(dy, pow2), w_t), "dgrad")


@pytest.mark.parametrize("tokens", [1, 128, 300])
def test_wgrad_is_the_exact_product_of_the_codes(tokens: int) -> None:
    dy, x = normal(tokens, 70), normal(tokens, 130, seed=1)
    dy_t, x_t = quantize_act_t(dy), quantize_act_t(x)
    assert_bitwise_equal(gemm.wgrad_gemm(dy_t, x_t), slow_fp8(dy_t, x_t))


def test_output_is_rounded_once() -> None:
    x, w = quantize_act(normal(9, 256)), gemm.prepare_fp8(quantize_weight(normal(40, 256, seed=1)))
    assert_bitwise_equal(gemm.fp8_gemm(x, w, torch.bfloat16), gemm.fp8_gemm(x, w, torch.float32).bfloat16())
    x, w = normal(9, 256), gemm.prepare_bf16(normal(40, 256, seed=1))
    assert_bitwise_equal(gemm.bf16_gemm(x, w, torch.bfloat16), gemm.bf16_gemm(x, w, torch.float32).bfloat16())


@pytest.mark.parametrize("outliers", [False, True])
def test_fp8_noise_against_the_bf16_product(outliers: bool) -> None:
    x, w = normal(64, 384), normal(256, 384, seed=1)
    if outliers:  # one channel a hundred times larger: blocks keep the damage to a third of K
        x[:, 7] *= 100
    exact = x.double() @ w.double().T
    fp8 = gemm.fp8_gemm(quantize_act(x), gemm.prepare_fp8(quantize_weight(w)), torch.bfloat16)
    assert sqnr_db(fp8, exact) > 27, sqnr_db(fp8, exact)
    wide = quantize_act(x), gemm.prepare_fp8(quantize_weight(w, None, pow2=True))
    assert sqnr_db(gemm.fp8_gemm(*wide, torch.bfloat16), exact) > 27


def test_bf16_gemm_is_the_exact_sum_rounded_once() -> None:
    x, w = normal(3, 200), normal(4, 200, seed=1)
    got = gemm.bf16_gemm(x, gemm.prepare_bf16(w), torch.float32)
    for i in range(3):
        for j in range(4):
            pairs = zip(x[i].tolist(), w[j].tolist(), strict=True)
            true = float(sum(Fraction(a) * Fraction(b) for a, b in pairs))
            scale = float(x[i].abs().max() * w[j].abs().max()) * 200
            assert abs(got[i, j].item() - true) <= 2.0**-24 * abs(true) + 2.0**-20 * scale
    assert_at_most_twice(got.bfloat16(), x @ w.T, x.double() @ w.double().T, "against torch's BF16 product")


@pytest.mark.parametrize("k", [96, 128, 2100])
def test_rows_do_not_depend_on_the_batch(k: int) -> None:
    x, w = normal(13, k), normal(50, k, seed=1)
    fp8, bf16 = gemm.prepare_fp8(quantize_weight(w)), gemm.prepare_bf16(w)
    assert_rows_independent(lambda r: gemm.fp8_gemm(quantize_act(r), fp8, torch.bfloat16), x)
    assert_rows_independent(lambda r: gemm.bf16_gemm(r, bf16, torch.float32), x)


def test_the_number_of_threads_changes_no_bit() -> None:
    x, w = normal(130, 500), normal(300, 500, seed=1)
    fp8, bf16 = gemm.prepare_fp8(quantize_weight(w)), gemm.prepare_bf16(w)
    results, before = [], torch.get_num_threads()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append((gemm.fp8_gemm(quantize_act(x), fp8, torch.float32), gemm.bf16_gemm(x, bf16, torch.float32)))
    torch.set_num_threads(before)
    for one in results[1:]:
        assert_bitwise_equal(one[0], results[0][0], "fp8")
        assert_bitwise_equal(one[1], results[0][1], "bf16")


def test_bf16_gradients_against_torch() -> None:
    ops = load_backend("reference")
    x, w, dy = normal(40, 96), normal(60, 96, seed=1), normal(40, 60, seed=2)
    assert_at_most_twice(ops.bf16_dgrad(dy, w), dy @ w, dy.double() @ w.double(), "dgrad")
    assert_at_most_twice(ops.bf16_wgrad(dy, x), dy.T @ x, dy.double().T @ x.double(), "wgrad")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_gradients_are_added_in_fp32_and_rounded_once(dtype: torch.dtype) -> None:
    dy, x, before = normal(150, 70), normal(150, 130, seed=1), normal(70, 130, seed=2).to(dtype) * 300
    dy_t, x_t = quantize_act_t(dy), quantize_act_t(x)
    grad = before.clone()
    gemm.wgrad_into(dy_t, x_t, grad)
    assert_bitwise_equal(grad, (before.float() + gemm.wgrad_gemm(dy_t, x_t)).to(dtype), "fp8")
    grad = before.clone()
    gemm.bf16_wgrad_into(dy, x, grad)
    assert_bitwise_equal(grad, (before.float() + gemm.bf16_wgrad(dy, x)).to(dtype), "bf16")


def test_gradients_that_do_not_fit_are_refused() -> None:
    dy, x = normal(8, 5), normal(8, 6)
    for grad in (torch.zeros(6, 5), torch.zeros(6, 5).T):  # the second has the shape, but not the layout
        with pytest.raises(ValueError, match=r"gradient \(5, 6\) of 8 and 8 tokens cannot be added"):
            gemm.bf16_wgrad_into(dy, x, grad)
        with pytest.raises(ValueError, match=r"gradient \(5, 6\) of 8 and 8 tokens cannot be added"):
            gemm.wgrad_into(quantize_act_t(dy), quantize_act_t(x), grad)


def test_token_counts_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match=r"token counts differ: \(8, 4\) and \(8, 5\)"):
        gemm.wgrad_gemm(quantize_act_t(normal(4, 8)), quantize_act_t(normal(5, 8)))
