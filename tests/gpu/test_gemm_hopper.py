"""DeepGEMM adapter: values against float64, independence of the batch, padding of odd sizes, no hidden kernels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from jetrl.kernels import reference as ref
from jetrl.kernels.dispatch import load_backend

pytestmark = pytest.mark.gpu
CUDA = "cuda"


@pytest.fixture(scope="module")
def ops():
    return load_backend("hopper")


def matrix(rows: int, cols: int, seed: int) -> Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def relative_error(got: Tensor, want: Tensor) -> float:
    got, want = got.double().cpu(), want.double().cpu()
    return ((got - want).norm() / want.norm()).item()


SHAPES = [
    (256, (512,)), (576, (576, 192, 192)), (576, (1536, 1536)), (1536, (576,)), (128, (64, 32, 32)), (72, (200, 40)),
    (2048, (2048, 512, 512)), (80, (88,)),
]


@pytest.mark.parametrize(("k", "sections"), SHAPES)
@pytest.mark.parametrize("pow2", [False, True])
def test_fprop_and_dgrad_match_the_definition(ops, k: int, sections: tuple[int, ...], pow2: bool) -> None:
    n = sum(sections)
    x, w, dy = matrix(37, k, 1), matrix(n, k, 2), matrix(37, n, 3)
    q = ops.quantize_weight(w.to(CUDA), pow2, sections)
    y = ops.fp8_gemm(ops.quantize_act(x.to(CUDA), pow2), ops.prepare_fp8(q), torch.bfloat16)
    want = ref.fp8_gemm(ref.quantize_1x128(x, pow2), ref.quantize_128x128(w, pow2, sections))
    assert y.shape == want.shape and y.is_contiguous()
    assert relative_error(y, want) < 3e-3  # the rounding to BF16 is 1.7e-3 of it
    dx = ops.fp8_gemm(ops.quantize_act(dy.to(CUDA), pow2, sections), ops.prepare_fp8_t(q), torch.bfloat16)
    want = ref.fp8_gemm(
        ref.quantize_1x128(dy, pow2, sections), ref.transpose(ref.quantize_128x128(w, pow2, sections))
    )
    assert dx.shape == want.shape
    assert relative_error(dx, want) < 3e-3


@pytest.mark.parametrize(("n", "k", "t"), [(256, 512, 384), (960, 576, 130), (64, 128, 1), (4096, 2048, 1000)])
def test_wgrad_matches_the_definition(ops, n: int, k: int, t: int) -> None:
    dy, x = matrix(t, n, 4), matrix(t, k, 5)
    dw = ops.wgrad_gemm(ops.quantize_act_t(dy.to(CUDA)), ops.quantize_act_t(x.to(CUDA)))
    want = ref.fp8_gemm(ref.quantize_128x1(dy), ref.quantize_128x1(x))
    assert dw.dtype == torch.float32 and dw.shape == want.shape
    assert relative_error(dw, want) < 5e-4  # wgmma adds E4M3 products with some 14 bits below the largest


@pytest.mark.parametrize(("n", "k", "t"), [(256, 512, 384), (960, 576, 130), (64, 136, 1), (4096, 2048, 1000)])
@pytest.mark.parametrize("pow2", [False, True])
def test_wgrad_by_tiles_matches_the_definition(ops, n: int, k: int, t: int, pow2: bool) -> None:
    dy, x = matrix(t, n, 4), matrix(t, k, 5)
    dy_t, x_t = ops.quantize_act_t(dy.to(CUDA), pow2), ops.quantize_act_t(x.to(CUDA), pow2, True)
    dw = ops.wgrad_gemm(dy_t, x_t)
    want = ref.wgrad(ref.quantize_128x1(dy, pow2), ref.quantize_128x128(x.T.contiguous(), pow2))
    assert dw.dtype == torch.float32 and dw.shape == want.shape
    assert relative_error(dw, want) < 3e-3  # the rounding to BF16
    for dtype in (torch.float32, torch.bfloat16):
        before = matrix(n, k, 6).to(CUDA, dtype) * 30
        grad = before.clone()
        ops.wgrad_into(dy_t, x_t, grad)
        assert torch.equal(grad, (before.float() + dw).to(dtype)), "what the GEMM wrote is added once"


@pytest.mark.parametrize(("k", "sections"), [(576, (576, 192, 192)), (4096, (4096, 1024, 1024)), (1536, (576,))])
def test_fp8_rows_do_not_depend_on_the_batch(ops, k: int, sections: tuple[int, ...]) -> None:
    w = ops.prepare_fp8(ops.quantize_weight(matrix(sum(sections), k, 6).to(CUDA), False, sections))
    x = matrix(2048, k, 7).to(CUDA)
    whole = ops.fp8_gemm(ops.quantize_act(x), w, torch.bfloat16)
    for m in (1, 2, 3, 7, 16, 17, 33, 64, 65, 100, 128, 200, 256, 511, 1024):
        part = ops.fp8_gemm(ops.quantize_act(x[:m]), w, torch.bfloat16)
        assert torch.equal(part, whole[:m]), f"M = {m}"


@pytest.mark.parametrize(("k", "n"), [(576, 49152), (4096, 8192), (64, 13), (2048, 1001)])
def test_bf16_rows_do_not_depend_on_the_batch(ops, k: int, n: int) -> None:
    w, x = matrix(n, k, 8), matrix(700, k, 9)
    prepared = ops.prepare_bf16(w.to(CUDA))
    for dtype in (torch.bfloat16, torch.float32):
        whole = ops.bf16_gemm(x.to(CUDA), prepared, dtype)
        assert whole.shape == (700, n)
        for m in (1, 2, 5, 16, 31, 64, 65, 128, 257, 512):
            assert torch.equal(ops.bf16_gemm(x[:m].to(CUDA), prepared, dtype), whole[:m]), f"M = {m}, {dtype}"
        assert relative_error(whole, x.double() @ w.double().T) < (3e-3 if dtype == torch.bfloat16 else 1e-5)


def test_bf16_gradients(ops) -> None:
    dy, x, w = matrix(300, 192, 10), matrix(300, 576, 11), matrix(192, 576, 12)
    assert relative_error(ops.bf16_dgrad(dy.to(CUDA), w.to(CUDA)), dy.double() @ w.double()) < 3e-3
    dw = ops.bf16_wgrad(dy.to(CUDA), x.to(CUDA))
    assert dw.dtype == torch.float32
    assert relative_error(dw, dy.double().T @ x.double()) < 1e-5


@pytest.mark.parametrize(("n", "k", "t"), [(256, 512, 384), (960, 576, 130), (44, 136, 1), (4096, 2048, 1000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_gradients_are_added_in_place(ops, n: int, k: int, t: int, dtype: torch.dtype) -> None:
    dy, x = matrix(t, n, 4).to(CUDA), matrix(t, k, 5).to(CUDA)
    before = matrix(n, k, 6).to(CUDA, dtype) * 30
    dy_t, x_t = ops.quantize_act_t(dy), ops.quantize_act_t(x)
    grad = before.clone()
    ops.wgrad_into(dy_t, x_t, grad)
    want = (before.float() + ops.wgrad_gemm(dy_t, x_t)).to(dtype)
    assert torch.equal(grad, want), "the kernel adds its own sum, once"
    results = []
    for _ in range(2):
        grad = before.clone()
        ops.bf16_wgrad_into(dy, x, grad)
        results.append(grad)
    exact = before.double() + dy.double().T @ x.double()
    assert relative_error(grad, exact) < (1e-6 if dtype == torch.float32 else 3e-3)
    assert relative_error(grad.double() - before.double(), exact - before.double()) < 0.3, "something else was added"
    assert torch.equal(*results)


def test_adding_a_gradient_in_place_is_one_kernel(ops) -> None:
    """No zeros, no copy, no cast: that is what it is for."""
    from torch.profiler import ProfilerActivity, profile

    dy, x = matrix(512, 256, 4).to(CUDA), matrix(512, 384, 5).to(CUDA)
    dy_t, x_t, grad = ops.quantize_act_t(dy), ops.quantize_act_t(x), torch.zeros(256, 384, device=CUDA)
    for add in (lambda: ops.wgrad_into(dy_t, x_t, grad), lambda: ops.bf16_wgrad_into(dy, x, grad)):
        add()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as p:
            add()
            torch.cuda.synchronize()
        kernels = [e.name for e in p.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        assert len(kernels) == 1, kernels


def test_one_kernel_a_gemm(ops) -> None:
    """Scales come in the layout that the GEMM reads: no transform kernel, no copy."""
    from torch.profiler import ProfilerActivity, profile

    w = ops.prepare_fp8(ops.quantize_weight(matrix(1024, 512, 13).to(CUDA)))
    q = ops.quantize_act(matrix(333, 512, 14).to(CUDA))
    for _ in range(2):
        ops.fp8_gemm(q, w, torch.bfloat16)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as p:
        ops.fp8_gemm(q, w, torch.bfloat16)
        torch.cuda.synchronize()
    kernels = [e.name for e in p.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert len(kernels) == 1 and "gemm" in kernels[0], kernels


def test_what_the_kernels_cannot_do_is_refused(ops) -> None:
    w = ops.prepare_fp8(ops.quantize_weight(matrix(128, 128, 15).to(CUDA)))
    q = ops.quantize_act(matrix(4, 128, 16).to(CUDA))
    with pytest.raises(ValueError, match="BF16"):
        ops.fp8_gemm(q, w, torch.float32)
    with pytest.raises(ValueError, match="multiple of 8"):
        ops.prepare_bf16(matrix(16, 20, 17).to(CUDA))


@pytest.mark.parametrize(("k", "sections"), [(512, (256,)), (576, (576, 192, 192)), (2048, (2048, 512, 512))])
def test_torch_scaled_mm_computes_the_same(ops, k: int, sections: tuple[int, ...]) -> None:
    from jetrl.kernels.gemm import scaled_mm

    x, w, dy = matrix(48, k, 1), matrix(sum(sections), k, 2), matrix(48, sum(sections), 3)
    q = ops.quantize_weight(w.to(CUDA), False, sections)
    y = scaled_mm.fp8_gemm(ops.quantize_act(x.to(CUDA)), ops.prepare_fp8(q), torch.bfloat16)
    want = ref.fp8_gemm(ref.quantize_1x128(x), ref.quantize_128x128(w, False, sections))
    assert relative_error(y, want) < 3e-3
    dw = scaled_mm.wgrad_gemm(ops.quantize_act_t(dy.to(CUDA)), ops.quantize_act_t(x.to(CUDA)))
    assert relative_error(dw, ref.fp8_gemm(ref.quantize_128x1(dy), ref.quantize_128x1(x))) < 5e-4


@pytest.mark.parametrize("m", [1, 2, 7, 64, 131])
def test_torch_scaled_mm_takes_any_number_of_rows(ops, m: int) -> None:
    from jetrl.kernels.gemm import scaled_mm

    x, w = matrix(m, 576, 1), matrix(960, 576, 2)
    q = ops.quantize_weight(w.to(CUDA), False, (576, 192, 192))
    y = scaled_mm.fp8_gemm(ops.quantize_act(x.to(CUDA)), ops.prepare_fp8(q), torch.bfloat16)
    want = ref.fp8_gemm(ref.quantize_1x128(x), ref.quantize_128x128(w, False, (576, 192, 192)))
    assert relative_error(y, want) < 3e-3
