"""The fused FP8 experts: the bits of dispatch, gate_up, SwiGLU, down and combine one after another."""

from __future__ import annotations

import pytest
import torch
from enlarged import enlarged
from tolerances import assert_bitwise_equal, sqnr_db
from torch import Tensor

from jetrl.kernels.experts import ops
from jetrl.kernels.experts.groups import Groups
from jetrl.model import moe
from jetrl.model.fused_experts import fused_experts, fused_experts_recipe
from jetrl.model.master import accumulate_in
from jetrl.model.moe import ExpertLinear
from jetrl.model.transformer import Transformer
from jetrl.parity.rows import varlen
from jetrl.precision.recipe import build_recipe
from jetrl.spec import ExpertSpec, ModelSpec, RopeSpec

D, F, E, K = 136, 72, 5, 2  # no multiples of 128
BF16 = torch.bfloat16


def normal(*shape: int, seed: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def experts(in_place: bool, precision: str = "fp8", **options: str) -> tuple[ExpertLinear, ExpertLinear]:
    recipe = build_recipe(precision, 1, **options)
    layers = []
    for role, size, sections in (("gate_up", D, (F, F)), ("down", F, (D,))):
        recipes = {side: recipe.linear(0, role, side) for side in ("train", "rollout")}
        layer = ExpertLinear(size, sections * E, E, recipes, torch.float32, BF16)
        with torch.no_grad():
            layer.weight.copy_(normal(*layer.weight.shape, seed=size) * 0.1)
        layer.publish()
        if in_place:
            accumulate_in(layer, torch.float32)
        layers.append(layer)
    return layers[0], layers[1]


def separate(x: Tensor, weights: Tensor, gate_up: ExpertLinear, down: ExpertLinear, groups: Groups) -> Tensor:
    rows = ops.swiglu(gate_up.rows(ops.dispatch(x, groups), groups, "train"), groups)
    return ops.combine(down.rows(rows, groups, "train"), weights, groups)


# tokens of each pair of experts: more than 128 rows, few and none; everything at the same two; one token; all equal
CROWDS = {
    "uneven": [[0, 3]] * 150 + [[3, 1]] * 7, "same": [[2, 4]] * 300, "one": [[4, 0]],
    "even": [[i % 5, (i + 1) % 5] for i in range(128)],
}


@pytest.mark.parametrize("crowd", list(CROWDS))
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("options", [{}, {"activation_scale": "pow2"}, {"wgrad": "tile"}], ids=["fp32", "pow2", "tile"])
def test_equals_the_ops_one_after_another(crowd: str, in_place: bool, options: dict[str, str]) -> None:
    chosen = torch.tensor(CROWDS[crowd])
    groups, size = ops.group(chosen, E), len(chosen)
    x, dy, results = normal(size, D, seed=1), normal(size, D, seed=2), []
    weights = normal(size, K, seed=3, dtype=torch.float32).softmax(-1)
    for fused in (True, False):
        gate_up, down = experts(in_place, **options)
        a, w = x.clone().requires_grad_(), weights.clone().requires_grad_()
        recipe = fused_experts_recipe(gate_up, down, "train")
        assert recipe is not None
        for _ in range(2):  # the second adds to the first
            y = fused_experts(a, w, gate_up, down, recipe, groups) if fused else separate(a, w, gate_up, down, groups)
            y.backward(dy)
        results.append((y.detach(), a.grad, w.grad, gate_up.weight.grad, down.weight.grad))
    for name, got, want in zip(("y", "dx", "weights", "gate_up", "down"), *results, strict=True):
        assert_bitwise_equal(got, want, name)
    assert all(t.abs().max() > 0 for t in results[0])


def test_gradients_are_those_of_the_function() -> None:
    gate_up, down = experts(True)
    chosen = torch.tensor(CROWDS["uneven"])
    groups, recipe = ops.group(chosen, E), fused_experts_recipe(gate_up, down, "train")
    x, dy = normal(157, D, seed=1).requires_grad_(), normal(157, D, seed=2)
    weights = normal(157, K, seed=3, dtype=torch.float32).softmax(-1).requires_grad_()
    assert recipe is not None
    fused_experts(x, weights, gate_up, down, recipe, groups).backward(dy)
    inputs = (x, weights, gate_up.weight, down.weight)
    exact = [t.detach().double().requires_grad_() for t in inputs]
    wide, narrow = exact[2].view(E, 2 * F, D)[chosen], exact[3].view(E, D, F)[chosen]
    gate, up = torch.einsum("tkfd,td->tkf", wide, exact[0]).chunk(2, -1)
    rows = torch.einsum("tkdf,tkf->tkd", narrow, torch.nn.functional.silu(gate) * up)
    (rows * exact[1][..., None]).sum(1).backward(dy.double())
    for name, got, want in zip(("x", "weights", "gate_up", "down"), inputs, exact, strict=True):
        assert 20 < sqnr_db(got.grad, want.grad) < 45, f"{name}: {sqnr_db(got.grad, want.grad):.1f} dB"


def test_what_it_keeps_for_the_backward_pass() -> None:
    gate_up, down = experts(True)
    groups, saved = ops.group(torch.tensor(CROWDS["uneven"]), E), []
    recipe = fused_experts_recipe(gate_up, down, "train")
    assert recipe is not None
    x, weights = normal(157, D, seed=1).requires_grad_(), torch.ones(157, K).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        fused_experts(x, weights, gate_up, down, recipe, groups)
    assert saved[0] is x or saved[0].data_ptr() == x.data_ptr(), "the tokens themselves"
    kept = [(tuple(t.shape), t.dtype) for t in saved[1:]]
    assert kept == [((157, K), torch.float32), ((314, 2 * F), BF16), ((314, D), BF16)]


def test_where_it_is_not_used() -> None:
    gate_up, down = experts(True)
    assert fused_experts_recipe(gate_up, down, "train") is not None
    gate_up.weight.requires_grad_(False)
    assert fused_experts_recipe(gate_up, down, "train") is None
    assert fused_experts_recipe(*experts(True, "bf16"), "train") is None
    mixed = experts(True)[0], experts(True, "bf16")[1]
    assert fused_experts_recipe(*mixed, "train") is None


# ---- models ---------------------------------------------------------------------------------------------------------

SPEC = ModelSpec(
    family="qwen3_moe", vocab_size=53, hidden_size=136, intermediate_size=200, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=16, rms_norm_eps=1e-6, rope=RopeSpec(1e4), max_position=512, tie_embeddings=False,
    qkv_bias=False, qk_norm=True, experts=ExpertSpec(count=6, per_token=3, intermediate_size=72, normalized=True),
)


def learned(model: Transformer, tokens: Tensor) -> dict[str, Tensor]:
    """The log-probs, and all gradients."""
    model.zero_grad()
    logp, entropy = model.token_logprobs(model(varlen([tokens]))[:-1], tokens[1:], 1.0)
    (-logp.mean() - 0.01 * entropy.mean()).backward()
    return {"logp": logp.detach()} | {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("count", [2, 200])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_model_learns_the_same(count: int, checkpointing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All log-probs and gradients, the routers' included."""
    tokens = torch.randint(SPEC.vocab_size, (count,), generator=torch.Generator().manual_seed(2))
    model = enlarged(SPEC, build_recipe("fp8", 2, head_dim=16), BF16)
    model.activation_checkpointing = checkpointing
    calls: list[int] = []
    monkeypatch.setattr(moe, "fused_experts", lambda *given: calls.append(1) or fused_experts(*given))
    fused = learned(model, tokens)
    assert len(calls) == (4 if checkpointing else 2)
    monkeypatch.setattr(moe, "fused_experts_recipe", lambda *given: None)
    for name, want in learned(model, tokens).items():
        assert_bitwise_equal(fused[name], want, name)
