"""The BF16 GEMM that reads a weight's codes has the bits of DeepGEMM on their values, for any input and size."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from jetrl.kernels.dispatch import load_backend
from jetrl.kernels.gemm import choice
from jetrl.kernels.gemm.coded_rows import ROWS, matmul, rows_for
from jetrl.kernels.qtensor import QTensor
from jetrl.kernels.quantize.ops import quantize_weight, weight_values

pytestmark = pytest.mark.gpu
CUDA = "cuda"
SIZES = [(4096, 4096), (6144, 4096), (24576, 1024), (4096, 12288), (4112, 384), (80, 128), (1152, 896)]
TOKENS = (1, 3, 8, 13, 29, 64, 65, 200)


@pytest.fixture(scope="module")
def ops():
    return load_backend("hopper")


def operands(n: int, k: int, kind: str) -> tuple[Tensor, QTensor]:
    """Activations of 200 tokens and a weight; `wide`: magnitudes far apart, so that most of a sum is rounded away;
    `codes`: every E4M3 number but NaN alike, subnormal ones too."""
    g = torch.Generator(CUDA).manual_seed(n + k)
    x = torch.randn(200, k, device=CUDA, generator=g)
    w = torch.randn(n, k, device=CUDA, generator=g) * 0.02
    if kind == "wide":
        x *= torch.exp2(torch.empty_like(x).uniform_(-20, 20, generator=g))
        w *= torch.exp2(torch.empty(n, 1, device=CUDA).uniform_(-30, 6, generator=g))
    q = quantize_weight(w.to(torch.bfloat16), (n,), True)
    if kind == "codes":
        every = torch.randint(0, 254, (n, k), dtype=torch.uint8, device=CUDA, generator=g)
        q.codes.view(torch.uint8).copy_(every + (every >= 127))
    return x.to(torch.bfloat16), q


def same(got: Tensor, want: Tensor) -> bool:
    return torch.equal(got.view(torch.int16), want.view(torch.int16))


@pytest.mark.parametrize("kind", ["plain", "wide", "codes"])
@pytest.mark.parametrize("rows", ROWS)
def test_bits_are_those_of_deepgemm(ops, rows: int, kind: str) -> None:
    tried = 0
    for n, k in SIZES:
        if rows_for(n, k, rows) != rows:
            continue
        x, q = operands(n, k, kind)
        values = weight_values(q)
        assert torch.equal(values.double(), q.codes.double() * wide(q.scale, n, k).double()), "code * scale, exactly"
        prepared = ops.prepare_bf16(values)
        for m in TOKENS:
            want = ops.bf16_gemm(x[:m].contiguous(), prepared, torch.bfloat16)
            assert want.float().abs().max() > 0
            assert same(matmul(x[:m], q.codes, q.scale, rows), want), (n, k, m)
            tried += 1
    assert tried >= 5 * len(TOKENS)


def wide(scale: Tensor, n: int, k: int) -> Tensor:
    return scale.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]


def test_a_chosen_gemm_goes_through_it_and_others_do_not(ops, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(choice, "CODED", {(768, 512): ((64, 32),), (512, 520): ((64, 32),)})
    monkeypatch.setattr(choice.coded_rows, "matmul", lambda *a: calls.append(1) or matmul(*a))
    for sections, k, m, chosen in (
        ((512, 128, 128), 512, 64, True), ((512, 128, 128), 512, 65, False), ((512, 64, 192), 512, 8, False),
        ((512,), 520, 8, False),
    ):
        calls.clear()
        w = torch.randn(sum(sections), k, device=CUDA).to(torch.bfloat16)
        q = quantize_weight(w, sections, True)
        prepared = ops.prepare_bf16(weight_values(q))
        x = torch.randn(m, k, device=CUDA).to(torch.bfloat16)
        got = ops.coded_gemm(x, q, prepared, torch.bfloat16)
        assert same(got, ops.bf16_gemm(x, prepared, torch.bfloat16)) and len(calls) == chosen


@pytest.mark.parametrize("coded", [(), ((64, 32),), ((1024, 64),)], ids=["values", "few", "all"])
@pytest.mark.parametrize("shape", ["smollm2-135m", "qwen3-0.6b"])
def test_a_model_that_decodes_by_codes_has_a_certificate(
    shape: str, coded: tuple[tuple[int, int], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    from jetrl.api import random_model
    from jetrl.parity.certificate import Workload, certify

    def chosen(n: int, k: int, tokens: int) -> int | None:
        rows = next((rows for most, rows in coded if tokens <= most), None)
        return None if rows is None else rows_for(n, k, rows)

    monkeypatch.setattr(choice, "coded", chosen)
    model = random_model(shape, "w8a16", CUDA, layers=2)
    work = Workload(num_sequences=24, max_prompt=150, new_tokens=40, chunk=64, page_size=128)
    result = certify(model, work, shape, lambda text: None)
    assert result.ok, result.links
