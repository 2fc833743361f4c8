"""The FP8 linear: its three GEMMs, what it keeps for backward, both sides of a flow, and the public module swap."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tolerances import assert_bitwise_equal, sqnr_db
from torch import Tensor, nn

from jetrl import api
from jetrl.errors import UserError
from jetrl.kernels import reference
from jetrl.kernels.gemm import ops as gemm
from jetrl.kernels.quantize.ops import quantize_act, quantize_act_t, quantize_weight
from jetrl.model.linear import FlowLinear
from jetrl.model.transformer import Transformer
from jetrl.precision.recipe import build_recipe
from jetrl.spec import ModelSpec, RopeSpec

T, K, SECTIONS = 150, 200, (130, 40, 40)
N = sum(SECTIONS)
BF16 = torch.bfloat16


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def linear(
    precision: str = "fp8", bias: bool = False, master: torch.dtype = torch.float32, **options: Any
) -> FlowLinear:
    recipe = build_recipe(precision, 1, **options)
    recipes = {s: recipe.linear(0, "qkv", s) for s in ("train", "rollout")}
    layer = FlowLinear(K, SECTIONS, bias, recipes, master, BF16, recipe.weight_only(0))
    with torch.no_grad():
        layer.weight.copy_(normal(N, K, seed=1) * 0.05)
        if layer.bias is not None:
            layer.bias.copy_(normal(N, seed=2))
    layer.publish()
    return layer


def run(layer: FlowLinear, side: str = "train") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Input, output, output gradient, input gradient; the weight's gradient is left in the layer."""
    x = normal(T, K, seed=3).to(BF16).requires_grad_()
    y = layer(x, side)
    dy = normal(T, N, seed=4).to(BF16)
    y.backward(dy)
    return x.detach(), y.detach(), dy, x.grad


@pytest.mark.parametrize("weight_scale", ["fp32", "pow2"])
@pytest.mark.parametrize("activation_scale", ["fp32", "pow2"])
def test_all_three_gemms_are_fp8(weight_scale: str, activation_scale: str) -> None:
    layer = linear(weight_scale=weight_scale, activation_scale=activation_scale)
    x, y, dy, dx = run(layer)
    pow2 = activation_scale == "pow2"
    w = quantize_weight(layer.weight.detach().to(BF16), SECTIONS, weight_scale == "pow2")
    assert_bitwise_equal(y, gemm.fp8_gemm(quantize_act(x, pow2), gemm.prepare_fp8(w), BF16), "fprop")
    expected = gemm.fp8_gemm(quantize_act(dy, pow2, SECTIONS), gemm.prepare_fp8_t(w), BF16)
    assert_bitwise_equal(dx, expected, "dgrad")
    expected = gemm.wgrad_gemm(quantize_act_t(dy, pow2), quantize_act_t(x, pow2))
    assert_bitwise_equal(layer.weight.grad, expected, "wgrad")
    exact = (x.double() @ layer.weight.double().T, dy.double() @ layer.weight.double(), dy.double().T @ x.double())
    for name, got, true in zip(("fprop", "dgrad", "wgrad"), (y, dx, layer.weight.grad), exact, strict=True):
        assert 24 < sqnr_db(got, true) < 40, f"{name}: {sqnr_db(got, true):.1f} dB is not what FP8 gives"


@pytest.mark.parametrize("master", [torch.float32, BF16], ids=["fp32", "bf16"])
def test_w8a16_is_the_bf16_linear_of_code_times_scale(master: torch.dtype) -> None:
    """A layer of BF16 whose weight is code * 2^k has its bits on both sides; the gradient goes to the master."""
    layer = linear("w8a16", bias=True, master=master)
    codes = quantize_weight(layer.weight.detach().to(BF16), SECTIONS, True)
    value = reference.dequantize(codes)
    assert_bitwise_equal(value.to(BF16).float(), value, "code * 2^k is a BF16 number")
    assert layer.quantized is not None
    assert_bitwise_equal(layer.quantized.codes.view(torch.uint8), codes.codes.view(torch.uint8), "codes")
    assert_bitwise_equal(layer.published, value.to(BF16), "published")
    assert not torch.equal(layer.weight.detach().to(BF16), layer.published)
    plain = linear("bf16", bias=True, master=master)
    with torch.no_grad():
        plain.weight.copy_(value)
    plain.publish()
    for side in ("train", "rollout"):
        layer.weight.grad = plain.weight.grad = None
        for got, expected in zip(run(layer, side), run(plain, side), strict=True):
            assert_bitwise_equal(got, expected, side)
        assert_bitwise_equal(layer.weight.grad, plain.weight.grad, "wgrad")
    with torch.no_grad():
        x = normal(T, K, seed=3).to(BF16)
        assert_bitwise_equal(layer.infer(x, "rollout"), layer(x, "train"), "without gradients")


def test_w8a16_publishes_into_the_same_memory() -> None:
    layer = linear("w8a16")
    assert layer.quantized is not None
    with torch.no_grad():
        before = layer.infer(normal(T, K).to(BF16), "rollout")
        held = (layer.published.data_ptr(), layer.quantized.codes.data_ptr(), layer.quantized.scale.data_ptr())
        layer.weight.mul_(3.0)
        assert_bitwise_equal(layer.infer(normal(T, K).to(BF16), "rollout"), before, "masters count from publish on")
        layer.publish()
        after = layer.infer(normal(T, K).to(BF16), "rollout")
    assert held == (layer.published.data_ptr(), layer.quantized.codes.data_ptr(), layer.quantized.scale.data_ptr())
    twin = linear("w8a16")
    with torch.no_grad():
        twin.weight.mul_(3.0)
        twin.publish()
        assert_bitwise_equal(after, twin.infer(normal(T, K).to(BF16), "rollout"), "operands are made again")
    assert not torch.equal(before, after)


@pytest.mark.parametrize("activation_scale", ["fp32", "pow2"])
def test_wgrad_by_tiles_changes_the_weight_gradient_only(activation_scale: str) -> None:
    by_rows = linear(activation_scale=activation_scale)
    layer = linear(activation_scale=activation_scale, wgrad="tile")
    (x, y, dy, dx), (_, y_rows, _, dx_rows) = run(layer), run(by_rows)
    assert_bitwise_equal(y, y_rows, "fprop")
    assert_bitwise_equal(dx, dx_rows, "dgrad")
    pow2 = activation_scale == "pow2"
    dy_t, x_t = quantize_act_t(dy, pow2), quantize_weight(x.T.contiguous(), None, pow2)
    a, b = reference.dequantize(dy_t).double(), reference.dequantize(x_t).double()
    torch.testing.assert_close(layer.weight.grad.double(), a @ b.T, rtol=2**-8, atol=1e-4)
    assert_bitwise_equal(layer.weight.grad, layer.weight.grad.to(BF16).float(), "rounded to BF16")
    true = dy.double().T @ x.double()
    assert 24 < sqnr_db(layer.weight.grad, true) < 40
    assert sqnr_db(layer.weight.grad, true) > sqnr_db(by_rows.weight.grad, true) - 1


def test_one_fp8_activation_is_kept_in_the_orientation_of_wgrad() -> None:
    layer, saved = linear(), []
    x = normal(T, K).to(BF16).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer(x, "train")
    kept = {(tuple(t.shape), t.dtype) for t in saved}
    assert kept == {((K, T), torch.float8_e4m3fn), ((K, 2), torch.float32)}  # codes along tokens


def test_nothing_is_kept_or_quantized_for_backward_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rollout must not pay for an activation that no backward will read."""
    from jetrl.model import linear as module

    def refuse(*_: Any) -> None:
        raise AssertionError("quantized for wgrad without any gradient")

    layer, x = linear(), normal(T, K).to(BF16)
    trained = layer(x, "train").detach()
    monkeypatch.setattr(module, "quantize_act_t", refuse)
    with torch.no_grad():
        assert_bitwise_equal(layer(x, "rollout"), trained)
    layer.weight.requires_grad_(False)
    assert_bitwise_equal(layer(x, "train"), trained)


def test_bias_is_added_after_rounding_and_its_gradient_is_a_sum_over_tokens() -> None:
    layer = linear(bias=True)
    x, y, dy, _ = run(layer)
    bare = linear()(x, "train")
    assert layer.bias is not None
    assert_bitwise_equal(y, (bare.float() + layer.bias.detach().to(BF16).float()).to(BF16).detach())
    assert_bitwise_equal(layer.bias.grad, dy.float().sum(0))


@pytest.mark.parametrize(("precision", "equal"), [("bf16", True), ("fp8", True), ("fp8_rollout", False)])
def test_sides_of_a_flow(precision: str, equal: bool) -> None:
    layer, x = linear(precision), normal(T, K).to(BF16)
    with torch.no_grad():
        train, rollout = layer(x, "train"), layer(x, "rollout")
    assert torch.equal(train, rollout) == equal
    plain = gemm.bf16_gemm(x, gemm.prepare_bf16(layer.weight.detach().to(BF16)), BF16)
    assert torch.equal(train, plain) == (precision != "fp8")
    assert torch.equal(rollout, plain) == (precision == "bf16")


def test_bf16_linear_and_its_gradients() -> None:
    layer = linear("bf16")
    x, y, dy, dx = run(layer)
    w = layer.weight.detach().to(BF16).double()
    for name, got, true in (("y", y, x.double() @ w.T), ("dx", dx, dy.double() @ w),
                            ("dw", layer.weight.grad, dy.double().T @ x.double())):
        assert sqnr_db(got, true) > 50, name


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_bf16_masters_give_the_same_forward_and_rounded_gradients(precision: str) -> None:
    wide, narrow = linear(precision, bias=True), linear(precision, bias=True, master=BF16)
    assert_bitwise_equal(run(narrow)[1], run(wide)[1], "forward")
    for name in ("weight", "bias"):
        a, b = getattr(narrow, name), getattr(wide, name)
        assert a.dtype == BF16
        assert_bitwise_equal(a.grad, b.grad.to(BF16), name)


def test_forward_reads_what_was_published_not_the_master() -> None:
    layer, x = linear(), normal(4, K).to(BF16)
    with torch.no_grad():
        before = layer(x, "train")
        layer.weight.mul_(2)
        assert_bitwise_equal(layer(x, "train"), before)
        layer.publish()
        assert_bitwise_equal(layer(x, "train"), before * 2)  # a factor of 2 goes into the scale alone


@pytest.mark.parametrize(("first", "last", "fp8"), [(0, 0, [0, 1, 2, 3]), (1, 0, [1, 2, 3]), (1, 2, [1]), (4, 0, [])])
def test_first_and_last_layers_in_bf16(first: int, last: int, fp8: list[int]) -> None:
    spec = ModelSpec(
        family="qwen3", vocab_size=20, hidden_size=16, intermediate_size=24, num_layers=4, num_heads=2, num_kv_heads=1,
        head_dim=8, rms_norm_eps=1e-6, rope=RopeSpec(1e4), max_position=32, tie_embeddings=True, qkv_bias=False,
        qk_norm=True,
    )
    recipe = build_recipe("fp8", 4, num_first_layers_in_bf16=first, num_last_layers_in_bf16=last)
    model = Transformer(spec, recipe).init_random(0)
    for i, layer in enumerate(model.layers):
        for part in (layer.attn.qkv, layer.attn.o, layer.mlp.gate_up, layer.mlp.down):
            assert (part.quantized is not None) == (i in fp8)


# ---- any model ------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(72, 160), nn.GELU(), nn.Linear(160, 72, bias=False))
        self.lm_head = nn.Linear(72, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.lm_head(x + self.body(x))


def test_linears_of_any_model_become_fp8_and_train() -> None:
    torch.manual_seed(0)
    net = Net()
    x, target = torch.randn(3, 40, 72), torch.randint(10, (3, 40))
    plain = net(x).detach()
    assert api.quantize_linears(net) is net
    assert isinstance(net.body[0], api.FP8Linear) and isinstance(net.body[2], api.FP8Linear)
    assert type(net.lm_head) is nn.Linear
    assert net(x).dtype == torch.float32 and 20 < sqnr_db(net(x), plain) < 60
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    losses = []
    for _ in range(12):
        loss = nn.functional.cross_entropy(net(x).flatten(0, 1), target.flatten())
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None and bool(torch.isfinite(p.grad).all()) for p in net.parameters())
        optimizer.step()
        api.publish_linears(net)
    assert losses[-1] < 0.8 * losses[0], losses


def test_gradients_of_swapped_linears_are_close_to_the_originals() -> None:
    torch.manual_seed(1)
    net, twin = Net(), Net()
    twin.load_state_dict(net.state_dict())
    api.quantize_linears(net)
    x = torch.randn(64, 72)
    net(x).square().mean().backward()
    twin(x).square().mean().backward()
    inner = net.body[0]
    assert 18 < sqnr_db(inner.weight.grad, twin.body[0].weight.grad) < 45
    assert 18 < sqnr_db(inner.bias.grad, twin.body[0].bias.grad)


def test_new_weights_count_from_publish_linears_on() -> None:
    net, x = Net(), torch.randn(5, 72)
    api.quantize_linears(net)
    before = net(x).detach()
    with torch.no_grad():
        net.body[0].weight.neg_()
    with pytest.raises(UserError, match=r"The weight of an FP8Linear .*publish_linears\(model\) after each optimizer"):
        net(x)
    api.publish_linears(net)
    assert not torch.equal(net(x), before)


def test_a_bf16_bias_too_counts_from_publish_linears_on() -> None:
    """A BF16 master is its own rounding; the published bias must not change with it before the weight does."""
    net, x = Net().to(torch.bfloat16), torch.randn(5, 72, dtype=torch.bfloat16)
    api.quantize_linears(net)
    before, first = net(x).detach(), net.body[0].published_bias.clone()
    with torch.no_grad():
        net.body[0].bias.add_(1)
    with pytest.raises(UserError, match="The bias of an FP8Linear"), torch.no_grad():
        net(x)
    assert torch.equal(net.body[0].published_bias, first), "it must not change with the master"
    api.publish_linears(net)
    assert not torch.equal(net(x), before)


def test_parameters_keep_their_names_so_that_checkpoints_load_either_way() -> None:
    torch.manual_seed(0)
    net, x = Net(), torch.randn(5, 72)
    names, values = list(net.state_dict()), {k: v.clone() for k, v in net.state_dict().items()}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    api.quantize_linears(net)
    assert list(net.state_dict()) == names and list(dict(net.named_parameters())) == names
    assert {id(p) for p in net.parameters()} == {id(p) for g in optimizer.param_groups for p in g["params"]}
    first = net(x).detach()
    Net().load_state_dict(net.state_dict())  # back into plain linears
    other = Net()
    net.load_state_dict(other.state_dict())  # a checkpoint from before: counts at once
    assert torch.equal(net(x), api.quantize_linears(other)(x)) and not torch.equal(net(x), first)
    net.load_state_dict(values)
    assert torch.equal(net(x), first)
    assert torch.equal(net.double().float()(x), first), "moved or cast, it publishes again"
    assert (net.body[0].in_features, net.body[0].out_features) == (72, net.body[0].weight.shape[0])


def test_a_model_without_linears_is_refused() -> None:
    with pytest.raises(ValueError, match="no nn.Linear to replace"):
        api.quantize_linears(nn.Sequential(nn.ReLU()))
    with pytest.raises(ValueError, match="skipped: .*'0'"):
        api.quantize_linears(nn.Sequential(nn.Linear(8, 8)), skip=("0",))


STEPS: dict[str, Callable[[list[nn.Parameter]], Any]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, foreach=False).step(),
    "sgd foreach": lambda p: torch.optim.SGD(p, lr=0.1, foreach=True).step(),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.1, fused=True).step(),
    "adamw": lambda p: torch.optim.AdamW(p, foreach=False).step(),
    "adamw foreach": lambda p: torch.optim.AdamW(p, foreach=True).step(),
    "adamw fused": lambda p: torch.optim.AdamW(p, fused=True).step(),
    "decay alone": lambda p: torch._foreach_mul_(p, 0.5),
    "another storage": lambda p: setattr(p[0], "data", p[0].data.clone()),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_forward_pass_of_weights_that_have_moved_is_refused(name: str) -> None:
    """Where nothing published the step, the losses would stay what they were."""
    torch.manual_seed(0)
    net, x = Net(), torch.randn(5, 72)
    api.quantize_linears(net)
    net(x).square().mean().backward()
    net(x)  # gradients alone move nothing
    with torch.no_grad():
        STEPS[name](list(net.parameters()))
    for grad in (True, False):
        with pytest.raises(UserError, match="publish_linears"), torch.set_grad_enabled(grad):
            net(x)
    api.publish_linears(net)
    net(x)


def test_copies_know_what_was_published_of_them() -> None:
    net, x = Net(), torch.randn(5, 72)
    api.quantize_linears(net)
    expected = net(x)
    file = io.BytesIO()
    torch.save(net, file)
    for twin in (copy.deepcopy(net), torch.load(io.BytesIO(file.getvalue()), weights_only=False)):
        assert torch.equal(twin(x), expected)
        with torch.no_grad():
            twin.body[0].weight.mul_(2)
        for moved in (twin, copy.deepcopy(twin)):
            with pytest.raises(UserError, match="publish_linears"):
                moved(x)
        assert torch.equal(net(x), expected)
    net.body[0].weight = nn.Parameter(net.body[0].weight.detach().clone())
    with pytest.raises(UserError, match="publish_linears"):
        net(x)
