"""The FP8 GEMM for few tokens has DeepGEMM's bits, for any input, shape and way to cut the weight."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from jetrl.kernels.dispatch import load_backend
from jetrl.kernels.gemm import choice

pytestmark = pytest.mark.gpu
CUDA = "cuda"
Operand = tuple[Tensor, Tensor]
# rows that end within a program's, groups of K that only stages of one, two or four can hold
SIZES = [(4096, 4096), (6144, 4096), (24576, 1024), (4096, 12288), (4112, 384), (80, 128), (18960, 1280)]
RANGES = {"plain": (-8, -6), "wide": (-24, 24), "tiny": (-76, -64)}  # of scales; tiny: products are subnormal


@pytest.fixture(scope="module")
def ops():
    return load_backend("hopper")


def operands(n: int, m: int, k: int, kind: str) -> tuple[Operand, Operand]:
    g = torch.Generator(CUDA).manual_seed(n + m + k)

    def codes(rows: int) -> Tensor:
        x = torch.randint(0, 254, (rows, k), dtype=torch.uint8, device=CUDA, generator=g)
        return (x + (x >= 127)).view(torch.float8_e4m3fn)  # all but the two NaNs

    def scales(rows: int) -> Tensor:
        return torch.exp2(torch.empty(rows, k // 128, device=CUDA).uniform_(*RANGES[kind], generator=g))

    units = torch.empty_strided((m, k // 128), (1, -(-m // 4) * 4), device=CUDA).copy_(scales(m))
    return (codes(m), units), (codes(n), scales(-(-n // 128)))


def deep(a: Operand, b: Operand) -> Tensor:
    import deep_gemm

    out = torch.empty(a[0].shape[0], b[0].shape[0], dtype=torch.bfloat16, device=CUDA)
    deep_gemm.fp8_gemm_nt(a, b, out, disable_ue8m0_cast=True)
    return out


def same(got: Tensor, want: Tensor) -> bool:
    return torch.equal(got.view(torch.int16), want.view(torch.int16))


@pytest.mark.parametrize("name", list(choice.VARIANTS))
@pytest.mark.parametrize("kind", list(RANGES))
def test_bits_are_those_of_deepgemm(ops, name: str, kind: str) -> None:
    from jetrl.kernels.gemm.few_rows import matmul

    tried = 0
    for (n, k), m in ((size, m) for size in SIZES for m in (1, 3, 8, 13, 29, 64)):
        shape = choice.shape_of(n, k, m, name)
        if shape is None:
            continue
        tried += 1
        a, b = operands(n, m, k, kind)
        want = deep(a, b)
        assert want.float().abs().max() > 0
        for early in (False, True):
            assert same(matmul(*a, *b, shape, early), want), (n, k, m, shape, early)
    assert tried > 20


def test_a_graph_whose_kernels_follow_each_other_at_once(ops) -> None:
    """Activations come from the kernel before while weights are already on their way."""
    from jetrl.kernels.gemm.few_rows import matmul

    shape = choice.shape_of(4096, 4096, 5, "half")
    assert shape is not None
    g = torch.Generator(CUDA).manual_seed(3)
    w = [torch.randn(4096, 4096, device=CUDA, generator=g).mul_(0.02).to(torch.bfloat16) for _ in range(4)]
    weights = [ops.prepare_fp8(ops.quantize_weight(x, False, (4096,))) for x in w]
    x = torch.empty(5, 4096, dtype=torch.bfloat16, device=CUDA)

    def layers(early: bool | None) -> Tensor:
        y = x
        for weight in weights * 3:
            q = ops.quantize_act(y)
            if early is None:
                y = deep((q.codes, q.scale), (weight.codes, weight.scale))
            else:
                y = matmul(q.codes, q.scale, weight.codes, weight.scale, shape, early)
        return y

    x.normal_()
    layers(True), layers(None)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = layers(True)
    for _ in range(20):
        x.normal_(generator=g)
        graph.replay()
        assert same(got, layers(None))


def test_a_chosen_gemm_goes_through_it(ops, monkeypatch: pytest.MonkeyPatch) -> None:
    w = torch.randn(576, 512, device=CUDA).to(torch.bfloat16)
    sections = (320, 192, 64)  # that end within blocks: rows are spread, and gathered again
    q = ops.quantize_weight(w, False, sections)
    held = ops.prepare_fp8(q)
    for m in (1, 6, 64, 65):
        x = ops.quantize_act(torch.randn(m, 512, device=CUDA).to(torch.bfloat16))
        want = ops.fp8_gemm(x, held, torch.bfloat16)
        calls, real = [], choice.matmul

        def counted(*args: object, calls: list[int] = calls, real=real) -> Tensor:
            calls.append(1)
            return real(*args)

        with monkeypatch.context() as patch:
            patch.setattr(choice, "CHOSEN", {tuple(held.codes.shape): ((64, "one"),)})
            patch.setattr(choice, "matmul", counted)
            assert same(ops.fp8_gemm(x, held, torch.bfloat16), want)
        assert len(calls) == (m <= 64)
