"""Norm, residual, RoPE and SwiGLU: forward and gradients with at most twice the BF16 baseline's error."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from invariance import assert_rows_independent
from tolerances import assert_at_most_twice, assert_bitwise_equal
from torch import Tensor

from jetrl.kernels.pointwise import ops as pointwise

EPS = 1e-6
Op = Callable[..., Tensor]


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16()


def plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS))


def plain_swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def plain_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    c, s = torch.cat((cos, cos), -1)[:, None].to(x.dtype), torch.cat((sin, sin), -1)[:, None].to(x.dtype)
    x1, x2 = x.chunk(2, -1)
    return x * c + torch.cat((-x2, x1), -1) * s


def check(name: str, ours: Op, plain: Op, inputs: list[Tensor]) -> None:
    """Values and all gradients of `ours`, against `plain` in float64, with `plain` in BF16 as the baseline."""

    def run(op: Op, dtype: torch.dtype) -> list[Tensor]:
        leaves = [t.to(dtype).requires_grad_() for t in inputs]
        y = op(*leaves)
        dy = normal(*y.shape, seed=99).to(y.dtype)
        return [y, *torch.autograd.grad(y, leaves, dy)]

    got, baseline, exact = run(ours, torch.bfloat16), run(plain, torch.bfloat16), run(plain, torch.float64)
    for i, (a, b, c) in enumerate(zip(got, baseline, exact, strict=True)):
        assert_at_most_twice(a, b, c, f"{name}: {'value' if i == 0 else f'gradient of input {i - 1}'}")


@pytest.mark.parametrize("shape", [(37, 64), (5, 4, 48), (3, 200)])
def test_rms_norm(shape: tuple[int, ...]) -> None:
    weight = normal(shape[-1], seed=1, scale=0.3) + 1
    check("rms_norm", lambda x, w: pointwise.rms_norm(x, w, w.detach(), EPS), plain_norm, [normal(*shape), weight])


def test_rms_norm_of_a_zero_row_and_of_tiny_values() -> None:
    weight = torch.ones(64, dtype=torch.bfloat16)
    x = torch.stack((torch.zeros(64), torch.full((64,), 1e-20), torch.full((64,), 1e15))).bfloat16().requires_grad_()
    y = pointwise.rms_norm(x, weight, weight, EPS)
    y.sum().backward()
    assert bool((y[0] == 0).all()) and bool(torch.isfinite(x.grad).all())
    assert y[1, 0].item() == pytest.approx(1e-17, rel=1e-2) and y[2, 0].item() == 1.0


def test_the_gradient_of_the_norm_weight_goes_to_the_master_in_its_dtype() -> None:
    master = torch.ones(32, requires_grad=True)
    pointwise.rms_norm(normal(4, 32), master, master.detach().bfloat16(), EPS).sum().backward()
    assert master.grad is not None and master.grad.dtype == torch.float32


def test_add() -> None:
    check("add", pointwise.add, lambda x, y: x + y, [normal(40, 64), normal(40, 64, seed=1)])


def test_fused_residual_norm_is_the_two_operators_bit_for_bit() -> None:
    x, residual, weight = normal(9, 96), normal(9, 96, seed=1, scale=4), normal(96, seed=2)
    total = pointwise.add(x, residual)
    with torch.no_grad():
        fused = pointwise.add_rms_norm(x, residual, weight, weight, EPS)
    with torch.enable_grad():
        apart = pointwise.add_rms_norm(x, residual, weight, weight, EPS)
    for normed, after in (fused, apart):
        assert_bitwise_equal(after, total)
        assert_bitwise_equal(normed, pointwise.rms_norm(total, weight, weight, EPS))


@pytest.mark.parametrize("used", [(True, True), (True, False), (False, True)])
def test_fused_residual_norm_has_the_gradients_of_the_two_operators(used: tuple[bool, bool]) -> None:
    weight, dy, stream = normal(96, seed=2), normal(9, 96, seed=3), normal(9, 96, seed=4)

    def run(fused: bool) -> list[Tensor | None]:
        x, residual, master = (t.requires_grad_() for t in (normal(9, 96), normal(9, 96, seed=1), weight.float()))
        if fused:
            normed, total = pointwise.add_rms_norm(x, residual, master, weight, EPS)
        else:
            total = pointwise.add(x, residual)
            normed = pointwise.rms_norm(total, master, weight, EPS)
        torch.autograd.backward([t for t, u in zip((normed, total), used, strict=True) if u],
                                [g for g, u in zip((dy, stream), used, strict=True) if u])
        return [x.grad, residual.grad, master.grad]

    for name, got, want in zip(("x", "residual", "weight"), run(True), run(False), strict=True):
        assert (got is None) == (want is None) == (name == "weight" and not used[0])
        if got is not None and want is not None:
            assert_bitwise_equal(got, want, name)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("tokens", [1, 7])
def test_heads_of_the_fused_projection_are_those_of_the_operators(tokens: int, normed: bool) -> None:
    """Values and gradients, bit for bit, in the layout that attention and the projection read."""
    (n, g, h), qkv = (3, 2, 8), normal(tokens, 7 * 8)
    weights = normal(h, seed=1), normal(h, seed=2)
    positions = torch.tensor([5, 0, 3, 3, 1, 9, 2])[:tokens]
    angles = torch.arange(10)[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.01])
    tables = angles.cos(), angles.sin()

    def run(fused: bool) -> list[Tensor]:
        x, masters = qkv.clone().requires_grad_(), tuple(w.float().requires_grad_() for w in weights)
        if fused:
            out = pointwise.norm_rope(
                x, (n, g), h, masters if normed else None, weights if normed else None, EPS, tables, positions
            )
        else:
            q, k, v = x.view(tokens, -1, h).split((n, g, g), 1)
            if normed:
                q, k = (pointwise.rms_norm(*part, EPS) for part in zip((q, k), masters, weights, strict=True))
            cos, sin = tables[0][positions], tables[1][positions]
            out = pointwise.rope(q, cos, sin), pointwise.rope(k, cos, sin), v.contiguous()
        torch.autograd.backward(out, [normal(*t.shape, seed=i) for i, t in enumerate(out)])
        return [*out, x.grad, *(m.grad for m in masters if normed)]

    for i, (got, want) in enumerate(zip(run(True), run(False), strict=True)):
        assert got.is_contiguous()
        assert_bitwise_equal(got, want, f"result {i}")


def test_rope_and_its_gradient_turn_back() -> None:
    angles = torch.arange(30)[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.01])
    cos, sin = angles.cos(), angles.sin()
    check("rope", lambda x: pointwise.rope(x, cos, sin), lambda x: plain_rope(x, cos, sin), [normal(30, 3, 8)])
    x = torch.randn(30, 3, 8, requires_grad=True)  # in FP32 the gradient of a rotation is the rotation back
    y = pointwise.rope(x, cos, sin)
    (back,) = torch.autograd.grad(y, x, y)
    assert torch.allclose(back, x, atol=1e-5)


def test_swiglu() -> None:
    check("swiglu", pointwise.swiglu, plain_swiglu, [normal(50, 128, scale=3)])


def test_swiglu_at_large_gates() -> None:
    gate = torch.tensor([-300.0, -88.0, -20.0, 0.0, 20.0, 88.0, 300.0]).bfloat16()
    x = torch.cat((gate, torch.full((7,), 2.0)))[None].bfloat16().requires_grad_()
    y = pointwise.swiglu(x)
    y.sum().backward()
    exact = x.detach().double().requires_grad_()
    plain_swiglu(exact).sum().backward()
    assert torch.allclose(y.double(), plain_swiglu(exact.detach()), rtol=1e-2, atol=1e-5)
    assert torch.allclose(x.grad.double(), exact.grad, rtol=2e-2, atol=1e-5)


def test_rows_do_not_depend_on_the_batch() -> None:
    weight, x = normal(72, seed=1), normal(11, 72, scale=2)
    with torch.no_grad():
        assert_rows_independent(lambda r: pointwise.rms_norm(r, weight, weight, EPS), x)
        assert_rows_independent(lambda r: pointwise.add_rms_norm(r, r, weight, weight, EPS)[0], x)
        assert_rows_independent(lambda r: pointwise.add(r, r), x)
        assert_rows_independent(pointwise.swiglu, x)
        cos, sin = torch.tensor([[0.6] * 4]), torch.tensor([[0.8] * 4])
        heads = x.view(11, 9, 8)
        assert_rows_independent(lambda r: pointwise.rope(r, cos.expand(len(r), 4), sin.expand(len(r), 4)), heads)


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="rows of 8, weight of 9"):
        pointwise.rms_norm(normal(2, 8), normal(9), normal(9), EPS)
    with pytest.raises(ValueError, match="odd width 7"):
        pointwise.swiglu(normal(2, 7))
