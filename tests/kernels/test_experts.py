"""Ops of experts: routes by hand, rows with the dense kernels' bits, sums in one order, gradients by autograd."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from invariance import assert_rows_independent
from tolerances import assert_bitwise_equal
from torch import Tensor

from jetrl.errors import UserError
from jetrl.kernels import dispatch
from jetrl.kernels.experts import ops as moe
from jetrl.kernels.experts.groups import Groups
from jetrl.kernels.gemm import ops as gemm
from jetrl.kernels.quantize.ops import quantize_act, quantize_act_t, quantize_weight
from jetrl.kernels.registry import Op
from jetrl.kernels.update.gradient import Gradient

E, K, D, F = 5, 2, 136, 72  # experts, of a token, width and feed-forward (no multiples of 128)
f32 = np.float32


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def routed(tokens: int, seed: int = 3) -> tuple[Tensor, Tensor, Groups]:
    chosen, weights = moe.route(normal(tokens, E, seed=seed, dtype=torch.float32), K, True)
    return chosen, weights, moe.group(chosen, E)


# ---- route ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalized", [True, False])
def test_route_by_a_plain_softmax(normalized: bool) -> None:
    logits = normal(40, E, dtype=torch.float32) * 4
    chosen, weights = moe.route(logits, K, normalized)
    for z, experts, got in zip(logits.double().numpy(), chosen.tolist(), weights, strict=True):
        assert experts == sorted(range(E), key=lambda e: (-z[e], e))[:K]
        p = np.exp(z - z.max())
        want = p[experts] / (p[experts].sum() if normalized else p.sum())
        assert np.allclose(got, want, rtol=1e-6, atol=1e-10)
    assert_rows_independent(lambda z: moe.route(z, K, normalized)[1], logits)
    assert_rows_independent(lambda z: moe.route(z, K, normalized)[0], logits)


def test_ties_go_to_the_lower_index() -> None:
    rows = [[1.0, 3.0, 3.0, 1.0, 3.0], [0.0, -0.0, 0.0, 0.0, -1.0], [2.0] * 5, [-1.0, 5.0, -1.0, -1.0, 4.0]]
    chosen, weights = moe.route(torch.tensor(rows), 3, True)
    assert chosen.tolist() == [[1, 2, 4], [0, 1, 2], [0, 1, 2], [1, 4, 0]]
    assert weights[:3].tolist() == [[pytest.approx(1 / 3, abs=1e-7)] * 3] * 3


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_give_weights_that_are_not(bad: float) -> None:
    logits = normal(4, E, dtype=torch.float32)
    logits[1, 3] = bad
    chosen, weights = moe.route(logits, K, True)
    assert ((chosen >= 0) & (chosen < E)).all()
    assert weights[1].isnan().any() and weights[[0, 2, 3]].isfinite().all()
    clean = moe.route(logits[[0, 2, 3]], K, True)
    assert_bitwise_equal(weights[[0, 2, 3]], clean[1], "rows next to it")


@pytest.mark.parametrize("normalized", [True, False])
def test_gradient_of_the_weights(normalized: bool) -> None:
    logits, up = normal(30, E, dtype=torch.float32), normal(30, K, seed=1, dtype=torch.float32)
    z = logits.clone().requires_grad_()
    chosen, weights = moe.route(z, K, normalized)
    (weights * up).sum().backward()
    exact = logits.double().requires_grad_()
    kept = exact.softmax(-1).gather(-1, chosen)
    ((kept / kept.sum(-1, keepdim=True) if normalized else kept) * up.double()).sum().backward()
    assert z.grad is not None and z.grad.dtype == torch.float32
    assert (z.grad - exact.grad).abs().max() < 1e-6
    assert not chosen.requires_grad


def test_more_experts_for_a_token_than_there_are() -> None:
    with pytest.raises(ValueError, match="6 experts for each token, of 5"):
        moe.route(normal(3, E, dtype=torch.float32), 6, True)


# ---- groups ---------------------------------------------------------------------------------------------------------


def test_groups_by_hand() -> None:
    groups = moe.group(torch.tensor([[3, 0], [0, 4], [3, 0]]), E)
    assert groups.counts.tolist() == [3, 0, 0, 2, 1] and groups.starts.tolist() == [0, 3, 3, 3, 5, 6]
    assert groups.tokens.tolist() == [0, 1, 2, 0, 2, 1]  # expert 0: all three in the order of tokens; 3; 4
    assert groups.rows.tolist() == [[3, 0], [1, 5], [4, 2]]


def test_dispatch_copies_and_its_gradient_adds_by_rank() -> None:
    x, (_, _, groups) = normal(20, D).requires_grad_(), routed(20)
    rows = moe.dispatch(x, groups)
    assert_bitwise_equal(rows, x[groups.tokens])
    up = normal(*rows.shape, seed=1)
    rows.backward(up)
    first, second = (up[groups.rows[:, j]].float() for j in range(2))
    assert_bitwise_equal(x.grad, (first + second).bfloat16())
    with torch.no_grad():
        once, twice = moe.dispatch_quantize(x, groups, False), quantize_act(x[groups.tokens])
    assert_bitwise_equal(once.codes.view(torch.uint8), twice.codes.view(torch.uint8))
    assert_bitwise_equal(once.scale, twice.scale)


def test_combine_adds_in_fp32_by_rank_and_rounds_once() -> None:
    chosen = torch.tensor([[2, 0, 3], [0, 1, 2], [4, 3, 1], [1, 2, 3]])
    groups, weights = moe.group(chosen, E), normal(4, 3, seed=5, dtype=torch.float32)
    y = normal(12, D, seed=6)
    want = np.zeros((4, D), f32)
    for t in range(4):
        for j in range(3):
            product = weights[t, j].numpy() * y[groups.rows[t, j]].float().numpy()
            want[t] = product if j == 0 else want[t] + product
    assert_bitwise_equal(moe.combine(y, weights, groups), torch.from_numpy(want).bfloat16())
    backwards = (weights.flip(1), Groups(groups.rows.flip(1), groups.tokens, groups.starts, groups.counts))
    assert not torch.equal(moe.combine(y.float(), *backwards), torch.from_numpy(want)), "the order is visible in FP32"


def test_gradients_of_combine() -> None:
    _, weights, groups = routed(20)
    y, w = normal(40, D, seed=1, dtype=torch.float32).requires_grad_(), weights.clone().requires_grad_()
    up = normal(20, D, seed=2, dtype=torch.float32)
    moe.combine(y, w, groups).backward(up)
    exact_y, exact_w = y.detach().double().requires_grad_(), weights.double().requires_grad_()
    ((exact_y[groups.rows] * exact_w[..., None]).sum(1) * up).sum().backward()
    assert (y.grad - exact_y.grad).abs().max() < 1e-6 and (w.grad - exact_w.grad).abs().max() < 1e-4


# ---- GEMMs ----------------------------------------------------------------------------------------------------------


def weights_of(rows: int, columns: int, seed: int = 7) -> Tensor:
    return normal(E * rows, columns, seed=seed) / columns**0.5


@pytest.mark.parametrize("pow2", [False, True])
def test_rows_have_the_bits_of_a_gemm_with_their_expert(pow2: bool) -> None:
    _, _, groups = routed(30)
    w, x = weights_of(2 * F, D), normal(60, D)
    q = quantize_weight(w, (F, F) * E, pow2)
    fp8 = moe.grouped_fp8_gemm(quantize_act(x, pow2), moe.prepare_fp8(q, E), groups, torch.bfloat16)
    bf16 = moe.grouped_bf16_gemm(x, moe.prepare_bf16(w, E), groups, torch.float32)
    dy = normal(60, 2 * F, seed=8)
    dgrad = moe.grouped_fp8_gemm(quantize_act(dy, pow2, (F, F)), moe.prepare_fp8_t(q, E), groups, torch.bfloat16)
    plain = moe.grouped_bf16_dgrad(dy, w, groups)
    for e in range(E):
        at = slice(int(groups.starts[e]), int(groups.starts[e + 1]))
        mine = w[e * 2 * F : (e + 1) * 2 * F]
        alone = quantize_weight(mine, (F, F), pow2)
        want = gemm.fp8_gemm(quantize_act(x[at], pow2), gemm.prepare_fp8(alone), torch.bfloat16)
        assert_bitwise_equal(fp8[at], want, f"FP8, expert {e}")
        want = gemm.bf16_gemm(x[at], gemm.prepare_bf16(mine), torch.float32)
        assert_bitwise_equal(bf16[at], want, f"BF16, expert {e}")
        want = gemm.fp8_gemm(quantize_act(dy[at], pow2, (F, F)), gemm.prepare_fp8_t(alone), torch.bfloat16)
        assert_bitwise_equal(dgrad[at], want, f"dgrad, expert {e}")
        assert (plain[at].float() - dy[at].float() @ mine.float()).abs().max() < 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_gradients_are_those_of_each_experts_rows(dtype: torch.dtype) -> None:
    """Of an expert with more than 128 rows, with few, and with none, which keeps what it has."""
    chosen = torch.tensor([[0, 3]] * 150 + [[1, 3]] * 7)
    groups = moe.group(chosen, E)
    assert groups.counts.tolist() == [150, 7, 0, 157, 0]
    x, dy = normal(314, D), normal(314, F, seed=1)
    held = normal(E * F, D, seed=2, dtype=dtype)
    fp8, bf16 = held.clone(), held.clone()
    moe.grouped_wgrad_into(moe.quantize_rows_t(dy, groups, False), moe.quantize_rows_t(x, groups, False), groups, fp8)
    moe.grouped_bf16_wgrad_into(dy, x, groups, bf16)
    for e in range(E):
        at, mine = slice(int(groups.starts[e]), int(groups.starts[e + 1])), slice(e * F, (e + 1) * F)
        want, plain = held[mine].clone(), held[mine].clone()
        if groups.counts[e]:
            gemm.wgrad_into(quantize_act_t(dy[at]), quantize_act_t(x[at]), want)
            gemm.bf16_wgrad_into(dy[at], x[at], plain)
        assert_bitwise_equal(fp8[mine], want, f"FP8, expert {e}")
        assert_bitwise_equal(bf16[mine], plain, f"BF16, expert {e}")
    with pytest.raises(ValueError, match="cannot be added to"):
        moe.grouped_bf16_wgrad_into(dy, x, groups, held[: 4 * F])


@pytest.mark.parametrize("kind", ["fp8", "bf16"])
def test_a_token_does_not_depend_on_the_others(kind: str) -> None:
    """Alone, permuted, among huge and tiny ones: the sizes of groups and the places in them change no bit."""
    router, up, down = normal(E, D, seed=4), weights_of(2 * F, D), weights_of(D, F, seed=9)
    operand = gemm.prepare_bf16(router)
    q_up, q_down = quantize_weight(up, (F, F) * E), quantize_weight(down, (D,) * E)

    @torch.no_grad()
    def experts(x: Tensor) -> Tensor:
        chosen, weights = moe.route(moe.router_logits(x, Gradient(router), router, operand), K, False)
        groups = moe.group(chosen, E)
        rows = moe.dispatch(x, groups)
        if kind == "fp8":
            rows = moe.grouped_fp8_gemm(quantize_act(rows), moe.prepare_fp8(q_up, E), groups, torch.bfloat16)
            rows = quantize_act(rows[:, :F].contiguous())
            rows = moe.grouped_fp8_gemm(rows, moe.prepare_fp8(q_down, E), groups, torch.bfloat16)
        else:
            rows = moe.grouped_bf16_gemm(rows, moe.prepare_bf16(up, E), groups, torch.bfloat16)[:, :F]
            rows = moe.grouped_bf16_gemm(rows.contiguous(), moe.prepare_bf16(down, E), groups, torch.bfloat16)
        return moe.combine(rows, weights, groups)

    assert_rows_independent(experts, normal(9, D, seed=10))


@pytest.mark.parametrize("in_place", [False, True])
def test_gradients_of_the_router(in_place: bool) -> None:
    master = torch.nn.Linear(D, E, bias=False).weight
    gradient = Gradient(master, in_place=in_place)
    x, published = normal(20, D).requires_grad_(), master.detach().bfloat16()
    up = normal(20, E, seed=1, dtype=torch.float32)
    logits = moe.router_logits(x, gradient, published, gemm.prepare_bf16(published))
    assert logits.dtype == torch.float32
    exact = x.detach().double() @ published.double().T
    assert (logits - exact).abs().max() < 1e-5
    logits.backward(up)
    assert x.grad is not None and master.grad is not None
    assert (master.grad - up.double().T @ x.detach().double()).abs().max() < 1e-4
    assert_bitwise_equal(x.grad, (up @ published.float()).bfloat16())


# ---- backends -------------------------------------------------------------------------------------------------------


def test_a_backend_without_these_ops_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = dispatch.tables()["experts"]
    without = [Op(op.name, reference=None, hopper=None) for op in rows]
    monkeypatch.setattr(dispatch, "tables", lambda: {"experts": without})
    with pytest.raises(UserError, match=r'kernels = "hopper" cannot compute mixtures of experts: set'):
        dispatch.require_experts.__wrapped__("hopper")
    monkeypatch.setattr(dispatch, "tables", lambda: {"experts": [*without[1:], rows[0]]})
    with pytest.raises(AssertionError, match="backend hopper lacks"):
        dispatch.require_experts.__wrapped__("hopper")
