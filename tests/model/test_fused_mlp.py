"""The fused feed-forward of `quant.wgrad = "tile"`: the bits of gate_up, SwiGLU and down one after another."""

from __future__ import annotations

import pytest
import torch
from tolerances import assert_bitwise_equal, sqnr_db
from torch import Tensor

from jetrl.kernels.pointwise import ops as pointwise
from jetrl.model.fused_mlp import fused_mlp, fused_recipe
from jetrl.model.linear import FlowLinear
from jetrl.model.master import accumulate_in
from jetrl.precision.recipe import build_recipe

T, D, F = 150, 136, 200
BF16 = torch.bfloat16


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def linears(in_place: bool, **options: str) -> tuple[FlowLinear, FlowLinear]:
    recipe = build_recipe("fp8", 1, **{"wgrad": "tile"} | options)
    layers = []
    for role, size, sections in (("gate_up", D, (F, F)), ("down", F, (D,))):
        recipes = {side: recipe.linear(0, role, side) for side in ("train", "rollout")}
        layer = FlowLinear(size, sections, False, recipes, torch.float32, BF16)
        with torch.no_grad():
            layer.weight.copy_(normal(sum(sections), size, seed=size) * 0.1)
        layer.publish()
        if in_place:
            accumulate_in(layer, torch.float32)
        layers.append(layer)
    return layers[0], layers[1]


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("activation_scale", ["fp32", "pow2"])
def test_equals_the_ops_one_after_another(activation_scale: str, in_place: bool) -> None:
    x, dy = normal(T, D, seed=1).to(BF16), normal(T, D, seed=2).to(BF16)
    results = []
    for fused in (True, False):
        gate_up, down = linears(in_place, activation_scale=activation_scale)
        a = x.clone().requires_grad_()
        recipe = fused_recipe(gate_up, down, "train")
        assert recipe is not None
        for _ in range(2):  # the second adds to the first
            y = (
                fused_mlp(a, gate_up, down, recipe) if fused
                else down(pointwise.swiglu(gate_up(a, "train")), "train")
            )
            y.backward(dy)
        results.append((y.detach(), a.grad, gate_up.weight.grad, down.weight.grad))
    for name, got, want in zip(("y", "dx", "gate_up", "down"), *results, strict=True):
        assert_bitwise_equal(got, want, name)


def test_gradients_are_those_of_the_function() -> None:
    gate_up, down = linears(True)
    x, dy = normal(T, D, seed=1).to(BF16).requires_grad_(), normal(T, D, seed=2).to(BF16)
    recipe = fused_recipe(gate_up, down, "train")
    assert recipe is not None
    fused_mlp(x, gate_up, down, recipe).backward(dy)
    exact = [t.detach().double().requires_grad_() for t in (x, gate_up.weight, down.weight)]
    gate, up = (exact[0] @ exact[1].T).chunk(2, -1)
    ((torch.nn.functional.silu(gate) * up) @ exact[2].T).backward(dy.double())
    for name, got, want in zip(("x", "gate_up", "down"), (x, gate_up.weight, down.weight), exact, strict=True):
        assert 20 < sqnr_db(got.grad, want.grad) < 40, name


def test_what_it_keeps_for_the_backward_pass() -> None:
    gate_up, down = linears(True)
    recipe, saved = fused_recipe(gate_up, down, "train"), []
    assert recipe is not None
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        fused_mlp(normal(T, D, seed=1).to(BF16).requires_grad_(), gate_up, down, recipe)
    kept = [(tuple(t.shape), t.dtype) for t in saved]
    assert kept == [((D, T), torch.float8_e4m3fn), ((2, 2), torch.float32), ((T, 2 * F), BF16)]


def test_kept_in_fp8() -> None:
    """Both gradients read the rounded input of SwiGLU; the forward pass does not."""
    x, dy, results = normal(T, D, seed=1).to(BF16), normal(T, D, seed=2).to(BF16), {}
    for kind in ("bf16", "fp8"):
        gate_up, down = linears(True, saved_gate_up=kind)
        recipe, saved, a = fused_recipe(gate_up, down, "train"), [], x.clone().requires_grad_()
        assert recipe is not None
        with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t) or t, lambda t: t):
            y = fused_mlp(a, gate_up, down, recipe)
        y.backward(dy)
        results[kind] = (y.detach(), a.grad, gate_up.weight.grad, down.weight.grad)
        if kind == "fp8":
            kept = [(tuple(t.shape), t.dtype) for t in saved[2:]]
            assert kept == [((T, 2 * F), torch.float8_e4m3fn), ((T, 4), torch.float32)]
    assert_bitwise_equal(results["fp8"][0], results["bf16"][0], "forward")
    for name, got, want in zip(("dx", "gate_up", "down"), results["fp8"][1:], results["bf16"][1:], strict=True):
        assert 24 < sqnr_db(got, want) < 45, f"{name}: {sqnr_db(got, want):.1f} dB"


def test_where_it_is_not_used() -> None:
    gate_up, down = linears(True)
    down.weight.requires_grad_(False)
    assert fused_recipe(gate_up, down, "train") is None
    assert fused_recipe(*linears(True, wgrad="row"), "train") is None
