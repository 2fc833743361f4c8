"""Latent attention on a GPU: the kernels' cases, gradients, and certificates of models with it, in CUDA graphs too."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from jetrl.kernels.attention import latent
from jetrl.kernels.attention.latent import LatentSizes, Up
from jetrl.kernels.update.gradient import Gradient
from jetrl.model.master import masters_of
from jetrl.model.transformer import Transformer
from jetrl.parity.certificate import Workload, certify
from jetrl.parity.rows import varlen
from jetrl.precision.recipe import Recipe
from jetrl.spec import SHAPES
from jetrl.types import VarlenPlan

pytestmark = pytest.mark.gpu
CUDA = "cuda"
sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))
MOONLIGHT = replace(SHAPES["moonlight-16b-a3b"], num_layers=2, vocab_size=8000)
SPECS = {
    "mini-v3": SHAPES["mini-v3"], "moonlight": MOONLIGHT,
    "v2-lite": replace(SHAPES["deepseek-v2-lite"], num_layers=2, vocab_size=8000, max_position=8192),
}


def names_of_cases() -> list[str]:
    import triton_latent_cases

    return [name for name, _ in triton_latent_cases.all_cases()]


@pytest.mark.parametrize("number", range(15))
def test_kernel_equals_its_definition(number: int) -> None:
    import triton_latent_cases

    cases = triton_latent_cases.all_cases()
    assert len(cases) == 34
    for name, case in cases[number::15]:
        print(name)
        case()


def build(name: str, precision: str) -> Transformer:
    spec = SPECS[name]
    with torch.device(CUDA):
        model = Transformer(spec, Recipe(precision, spec.num_layers))
    model = model.to(CUDA)
    generator = torch.Generator(CUDA).manual_seed(3)
    with torch.no_grad():
        for parameter, master in masters_of(model).items():
            if master.frozen:
                bias = torch.empty(master.param.shape, device=CUDA).normal_(0, 0.1, generator=generator)
                model.publish_frozen([(parameter, bias)])
                continue
            p = master.param
            p.normal_(0, 0.04, generator=generator) if p.ndim == 2 else p.normal_(1, 0.1, generator=generator)
    return model.publish()


@pytest.mark.parametrize("precision", ["bf16", "fp8", "w8a16"])
@pytest.mark.parametrize("name", list(SPECS))
def test_certificate(name: str, precision: str) -> None:
    """All links, decoding in CUDA graphs, drafts and sequences of several chunks included: 0 rows differ."""
    for work in (
        Workload(24, max_prompt=240, new_tokens=12, chunk=64, page_size=128, step_tokens=2048),
        Workload(4, max_prompt=2600, new_tokens=12, chunk=700, page_size=128, step_tokens=2048),
    ):
        told = certify(build(name, precision), work, name, lambda text: None).to_json()
        assert told["bit_equal"], told["links"]


def test_gradients_repeat_and_are_those_of_float64() -> None:
    """Of q, row and kv_b: within 1e-2 of the expanded form in float64."""
    s, lengths, scale = LatentSizes(16, 128, 64, 512, 128), (1, 300, 1500), 192**-0.5
    g = torch.Generator().manual_seed(1)
    q = torch.randn(sum(lengths), 16, 192, generator=g).to(CUDA, torch.bfloat16)
    row = torch.randn(sum(lengths), 576, generator=g).to(CUDA, torch.bfloat16)
    w = (torch.randn(16 * 256, 512, generator=g) * 0.04).to(CUDA, torch.bfloat16)
    grad = torch.randn(sum(lengths), 16 * 128, generator=g).to(CUDA, torch.bfloat16)
    ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=CUDA)

    def once() -> list[Tensor]:
        up = Up(Gradient(nn.Parameter(w.float())), w, latent.prepare(w, s))
        leaves = [t.clone().requires_grad_() for t in (q, row)]
        latent.latent_attention(*leaves, up, VarlenPlan(ends, lengths), scale, s).backward(grad)
        return [*(t.grad for t in leaves), up.gradient.param.grad]  # type: ignore[list-item]

    first, again = once(), once()
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    wide = [t.double().requires_grad_() for t in (q, row, w)]
    out, kv = [], (wide[1][:, :512] @ wide[2].T).view(-1, 16, 256)
    k = torch.cat((kv[..., :128], wide[1][:, None, 512:].expand(-1, 16, -1)), -1)
    for a, b, c in zip(wide[0].split(lengths), k.split(lengths), kv[..., 128:].split(lengths), strict=True):
        scores = torch.einsum("tnh,knh->ntk", a, b) * scale
        mask = torch.ones(len(a), len(a), dtype=torch.bool, device=CUDA).triu(1)
        out.append(torch.einsum("ntk,knv->tnv", torch.softmax(scores.masked_fill(mask, float("-inf")), -1), c))
    want = torch.autograd.grad(torch.cat(out).flatten(1), wide, grad.double())
    for got, exact in zip(first, want, strict=True):
        assert (got.double() - exact).norm() / exact.norm() < 1e-2


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_training_and_sampling_have_one_hidden_state(precision: str) -> None:
    """With gradients, without, and op by op under a tap."""
    model = build("moonlight", precision)
    tokens = torch.randint(8000, (300,), generator=torch.Generator().manual_seed(2)).to(CUDA)
    batch = varlen([tokens[:200], tokens[200:]])
    trained = model(batch)
    with torch.no_grad():
        assert torch.equal(model(batch), trained)
        assert torch.equal(model(batch, tap=lambda name, value: None), trained)
    trained.float().square().sum().backward()
    without = [name for name, m in masters_of(model).items() if not m.frozen and m.param.grad is None]
    assert without == ["lm_head.weight"]
