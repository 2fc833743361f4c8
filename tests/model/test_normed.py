"""What the backward pass makes again instead of keeping: the bits of the ops one after another, and less kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tolerances import assert_bitwise_equal
from torch import Tensor

from jetrl.kernels.attention.ops import Heads, attend_heads, norm_rope_attend, varlen_plan
from jetrl.kernels.pointwise import ops as pointwise
from jetrl.model.fused_mlp import fused_mlp, fused_recipe, normed_mlp
from jetrl.model.linear import FlowLinear
from jetrl.model.master import accumulate_in
from jetrl.model.normed import norm_before, normed_linear
from jetrl.model.published import Norm
from jetrl.precision.recipe import build_recipe

T, D, F, EPS = 150, 136, 200, 1e-6
BF16 = torch.bfloat16


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def norm_of() -> Norm:
    norm = Norm((D,), torch.float32, BF16)
    with torch.no_grad():
        norm.weight.copy_(1 + 0.1 * normal(D, seed=7))
    norm.publish()
    return norm


def linear_of(role: str, size: int, sections: tuple[int, ...], bias: bool = False, **options: str) -> FlowLinear:
    recipe = build_recipe("fp8", 1, **options)
    layer = FlowLinear(size, sections, bias, {s: recipe.linear(0, role, s) for s in ("train", "rollout")},
                       torch.float32, BF16)
    with torch.no_grad():
        layer.weight.copy_(normal(sum(sections), size, seed=size) * 0.1)
        if layer.bias is not None:
            layer.bias.copy_(normal(sum(sections), seed=3))
    layer.publish()
    accumulate_in(layer, torch.float32)
    return layer


def kept_by(call: Callable[[], Any]) -> list[tuple[tuple[int, ...], torch.dtype]]:
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        call()
    return [(tuple(t.shape), t.dtype) for t in saved]


def compared(run: Callable[[bool, Tensor, Tensor], tuple[Tensor, Tensor, list[Any]]]) -> None:
    """`run(fused, x, residual)` gives the output, the stream and the parameters: all gradients, both ways."""
    results = []
    for fused in (True, False):
        x, residual = (normal(T, D, seed=s).to(BF16).requires_grad_() for s in (1, 2))
        for _ in range(2):  # the second adds to the first
            y, total, parameters = run(fused, x, residual)
            torch.autograd.backward([y, total], [normal(*y.shape, seed=4).to(BF16), normal(T, D, seed=5).to(BF16)])
        results.append([y.detach(), total.detach(), x.grad, residual.grad, *(p.grad for p in parameters)])
    for i, (got, want) in enumerate(zip(*results, strict=True)):
        assert got is not None
        assert_bitwise_equal(got, want, str(i))


@pytest.mark.parametrize("options", [{"wgrad": "tile"}, {"wgrad": "row"}, {"activation_scale": "pow2"}])
def test_a_norm_and_a_linear(options: dict[str, str]) -> None:
    held: dict[bool, Any] = {f: (norm_of(), linear_of("qkv", D, (F,), True, **options)) for f in (True, False)}

    def run(fused: bool, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor, list[Any]]:
        norm, linear = held[fused]
        if fused:
            before = norm_before(norm, EPS, linear, residual, "train")
            assert before is not None
            y, total = normed_linear(x, residual, linear, before)
        else:
            normed, total = pointwise.add_rms_norm(x, residual, norm.weight, norm.published, EPS)
            y = linear(normed, "train")
        return y, total, [norm.weight, linear.weight, linear.bias]

    compared(run)


@pytest.mark.parametrize("saved", ["bf16", "fp8"])
def test_a_norm_and_the_fused_feed_forward(saved: str) -> None:
    options = {"wgrad": "tile", "saved_gate_up": saved}
    held: dict[bool, Any] = {
        f: (norm_of(), linear_of("gate_up", D, (F, F), **options), linear_of("down", F, (D,), **options))
        for f in (True, False)
    }

    def run(fused: bool, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor, list[Any]]:
        norm, gate_up, down = held[fused]
        recipe = fused_recipe(gate_up, down, "train")
        assert recipe is not None
        if fused:
            before = norm_before(norm, EPS, gate_up, residual, "train")
            assert before is not None
            y, total = normed_mlp(x, residual, gate_up, down, recipe, before)
        else:
            normed, total = pointwise.add_rms_norm(x, residual, norm.weight, norm.published, EPS)
            y = fused_mlp(normed, gate_up, down, recipe)
        return y, total, [norm.weight, gate_up.weight, down.weight]

    compared(run)


def test_what_they_keep() -> None:
    norm, qkv, o = norm_of(), linear_of("qkv", D, (F,)), linear_of("o", D, (F,))
    x, residual = (normal(T, D, seed=s).to(BF16).requires_grad_() for s in (1, 2))
    before = norm_before(norm, EPS, qkv, residual, "train")
    assert before is not None
    stream = [((T, D), BF16), ((T,), torch.float32)]
    assert kept_by(lambda: normed_linear(x, residual, qkv, before)) == stream, "no codes"
    assert kept_by(lambda: o(x, "train", keeps_input=True)) == stream[:1], "what attention keeps anyway"
    assert norm_before(norm, EPS, qkv, None, "train") is None
    with torch.no_grad():
        assert norm_before(norm, EPS, qkv, residual, "train") is None
    qkv.weight.requires_grad_(False)
    assert norm_before(norm, EPS, qkv, residual, "train") is None


def test_an_input_that_is_kept_gives_the_same_gradients() -> None:
    results = []
    for keeps in (False, True):
        o, x = linear_of("o", D, (F,)), normal(T, D, seed=1).to(BF16).requires_grad_()
        o(x, "train", keeps_input=keeps).backward(normal(T, F, seed=2).to(BF16))
        results.append((x.grad, o.weight.grad))
    for got, want in zip(*results, strict=True):
        assert got is not None and want is not None
        assert_bitwise_equal(got, want, "gradient")


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("fp8_kv", [False, True])
@pytest.mark.parametrize("stems", [(), (-1, 0, 0)])
def test_heads_made_again(normed: bool, fp8_kv: bool, stems: tuple[int, ...]) -> None:
    n, g, h, lengths = 4, 2, 64, (20, 7, 13)
    starts = torch.tensor([0, 20, 27, 40], dtype=torch.int32)
    plan = varlen_plan(starts, lengths, stems)
    positions = torch.cat([torch.arange(m) + (20 if stems and i else 0) for i, m in enumerate(lengths)])
    angles = normal(64, h // 2, seed=9)
    results, kept = [], {}
    for call in (attend_heads, norm_rope_attend):
        masters = [torch.nn.Parameter(1 + 0.1 * normal(h, seed=s)) for s in (3, 4)] if normed else []
        norms = tuple(m.detach().to(BF16) for m in masters) or None
        heads = Heads((n, g), h, norms, EPS, (angles.cos(), angles.sin()), positions, fp8_kv)
        qkv = normal(40, (n + 2 * g) * h, seed=1).to(BF16).requires_grad_()
        saved: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t) or t, lambda t: t):
            out = call(qkv, tuple(masters) or None, heads, plan, 0, h**-0.5)
        kept[call] = sum(t.nbytes for t in saved if t.shape[0] == 40)
        out.backward(normal(40, n, h, seed=2).to(BF16))
        results.append([out.detach(), qkv.grad, *(m.grad for m in masters)])
    for i, (got, want) in enumerate(zip(*results, strict=True)):
        assert got is not None
        assert_bitwise_equal(got, want, str(i))
    assert kept[norm_rope_attend] - kept[attend_heads] >= 40 * (n + 2 * g) * h * 2, "q, k and v"
