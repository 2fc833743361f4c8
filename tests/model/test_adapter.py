"""Adapters beside linears: the definition in slow words, gradients, rows alone, the base without them, names."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from tiny import ARCH
from tolerances import assert_at_most_twice, assert_bitwise_equal
from torch import Tensor

from jetrl.huggingface.config import spec_from_hf
from jetrl.kernels.experts import ops as moe
from jetrl.model.adapter import (
    Adapter,
    BaseHash,
    draw_adapters,
    first_values,
    is_adapter,
    publish_base,
    without_adapters,
)
from jetrl.model.expert_adapter import ExpertAdapter
from jetrl.model.linear import FlowLinear
from jetrl.model.master import accumulate_in, masters_of
from jetrl.model.names import adapted_projections, adapter_table, tensor_table
from jetrl.model.published import Published
from jetrl.model.sharding import fill
from jetrl.model.transformer import Transformer
from jetrl.model.weights import checksum, published, published_bytes
from jetrl.parity.certificate import Workload, certify
from jetrl.parity.rows import varlen
from jetrl.precision.blocks.layouts import linears_of
from jetrl.precision.lora import ATTENTION, GROUPS, MLP, Lora
from jetrl.precision.recipe import Recipe, build_recipe
from jetrl.spec import ModelSpec

EXPERTS = {"model_type": "qwen3_moe", "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 72}
BIASED = {"model_type": "qwen2", "tie_word_embeddings": False}
LORA = Lora(4, 12.0, GROUPS["all"])
RECIPES = [
    build_recipe("fp8", 2), build_recipe("fp8", 2, "pow2", num_first_layers_in_bf16=1, kv_cache="fp8", head_dim=16),
    build_recipe("bf16", 2), build_recipe("w8a16", 2), build_recipe("fp8", 2, wgrad="tile"),
]
BATCH = [torch.tensor([1, 2, 3, 4, 5, 6]), torch.tensor([9, 8, 7])]


def spec_of(**arch: object) -> ModelSpec:
    return spec_from_hf(ARCH | {"vocab_size": 50} | arch)


def model_of(recipe: Recipe, lora: Lora | None = LORA, drawn: bool = True, **arch: object) -> Transformer:
    model = Transformer(spec_of(**arch), replace(recipe, lora=lora))
    fill(model, model.random_values(7))
    if drawn:
        draw_adapters(model, 5)
    return model.publish()


def test_the_definition_in_slow_words() -> None:
    """y0 + s * B A x for each projection that has an adapter; the others are untouched."""
    torch.manual_seed(0)
    lora, x = Lora(4, 12.0, ("q_proj", "v_proj")), torch.randn(6, 24).bfloat16()
    y0 = torch.randn(6, 5 + 3 + 4).bfloat16()
    adapter = Adapter(lora, 24, (5, 3, 4), (0, 2), torch.float32, torch.bfloat16)
    for p in adapter.parameters():
        p.data.normal_()
    adapter.a.publish()
    adapter.b.publish()
    a, b = adapter.a.weight.bfloat16(), adapter.b.weight.bfloat16()
    want = y0.clone()
    for number, (start, stop), rows in ((0, (0, 5), (0, 5)), (1, (8, 12), (5, 9))):
        u = (x.double() @ a[4 * number : 4 * number + 4].double().T).float().bfloat16()
        t = (u.double() @ b[rows[0] : rows[1]].double().T).float()
        want[:, start:stop] = (y0[:, start:stop].float() + t * 3.0).bfloat16()
    with torch.no_grad():
        got = adapter(x, y0.clone())  # it takes the place of y
        for i in range(6):
            assert_bitwise_equal(adapter(x[i : i + 1], y0[i : i + 1].clone()), got[i : i + 1])
    assert_bitwise_equal(got[:, 5:8], y0[:, 5:8])
    assert_bitwise_equal(got, want)  # sums of so few values are exact in both
    with torch.enable_grad():
        assert_bitwise_equal(adapter(x, y0), got)


def test_gradients_against_float64() -> None:
    torch.manual_seed(1)
    lora, sections = Lora(4, 12.0, ("q_proj", "v_proj")), (16, 8, 24)
    adapter = Adapter(lora, 32, sections, (0, 2), torch.float32, torch.bfloat16)
    for p in adapter.parameters():
        p.data.normal_(0, 0.3)
        p.data.copy_(p.data.bfloat16())
    adapter.a.publish()
    adapter.b.publish()

    def plain(x: Tensor, y: Tensor, a: Tensor, b: Tensor) -> Tensor:
        q = (x @ a[:4].T) @ b[:16].T
        v = (x @ a[4:].T) @ b[16:].T
        return y + torch.cat([q, torch.zeros(len(x), 8, dtype=x.dtype), v], 1) * 3.0

    x, y, dy = torch.randn(40, 32).bfloat16(), torch.randn(40, 48).bfloat16(), torch.randn(40, 48).bfloat16()
    weights = [adapter.a.weight.detach(), adapter.b.weight.detach()]

    def run(dtype: torch.dtype) -> list[Tensor]:
        leaves = [t.to(dtype).requires_grad_() for t in (x, y, *weights)]
        return list(torch.autograd.grad(plain(*leaves), leaves, dy.to(dtype)))

    inputs = [x.clone().requires_grad_(), y.clone().requires_grad_()]
    got = torch.autograd.grad(adapter(*inputs), [*inputs, adapter.a.weight, adapter.b.weight], dy)
    for name, ours, baseline, true in zip("xyab", got, run(torch.bfloat16), run(torch.float64), strict=True):
        assert_at_most_twice(ours, baseline, true, name)
    accumulate_in(adapter, torch.float32)
    for times in (1, 2):  # in place, and twice as much the second time
        adapter(*inputs).backward(dy)
        for p, one in zip(adapter.parameters(), got[2:], strict=True):
            assert torch.allclose(p.grad, times * one, rtol=1e-6)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: f"{r.name}-{r.kv_cache.is_quantized}-{r.wgrad}")
@pytest.mark.parametrize("arch", [{}, BIASED, EXPERTS], ids=["tied", "biased", "experts"])
def test_a_certificate_with_drawn_adapters(recipe: Recipe, arch: dict[str, object]) -> None:
    """Packed, chunked, decoded, preempted, drafted, with shared prompts; and the adapters are seen."""
    model = model_of(recipe, **arch)
    found = certify(model, Workload(num_sequences=4, max_prompt=20, new_tokens=12), "drawn", lambda text: None)
    assert found.ok and len(found.links) == 6
    with torch.no_grad():
        assert not torch.equal(model(varlen(BATCH)), without_adapters(model)(varlen(BATCH)))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: f"{r.name}-{r.kv_cache.is_quantized}-{r.wgrad}")
@pytest.mark.parametrize("arch", [{}, BIASED, EXPERTS], ids=["tied", "biased", "experts"])
def test_only_adapters_have_gradients_and_those_of_training_mode_are_the_forward_pass_s(
    recipe: Recipe, arch: dict[str, object], checkpointing: bool
) -> None:
    model, batch = model_of(recipe, **arch), varlen(BATCH)
    model.activation_checkpointing = checkpointing
    accumulate_in(model, torch.float32)
    with torch.no_grad():
        expected = model(batch)
    hidden = model(batch)
    assert_bitwise_equal(hidden, expected)
    logp, entropy = model.token_logprobs(hidden, batch.tokens.roll(-1), 0.9)
    (logp.sum() + 0.1 * entropy.sum()).backward()
    having = {name for name, p in model.named_parameters() if p.grad is not None and bool(p.grad.any())}
    assert having == {name for name in masters_of(model) if is_adapter(name)} == set(adapter_table(model.spec, LORA))


@pytest.mark.parametrize("recipe", RECIPES[:4], ids=lambda r: f"{r.name}-{r.kv_cache.is_quantized}")
def test_the_base_is_that_of_a_model_without_adapters(recipe: Recipe) -> None:
    plain = Transformer(spec_of(), recipe, master_dtype=None).init_random(7)
    model, batch = model_of(recipe, drawn=False), varlen(BATCH)
    with torch.no_grad():
        assert_bitwise_equal(model(batch), plain(batch))  # B begins as zero
        base = without_adapters(model)
        draw_adapters(model, 5)
        model.publish()
        assert_bitwise_equal(base(batch), plain(batch))
        assert not torch.equal(model(batch), plain(batch))
    assert not base.holds_masters and checksum(published(base)) == checksum(published(plain))
    assert base.head.published.data_ptr() == model.head.published.data_ptr(), "no copy"


def test_the_digest_of_a_base_is_of_its_values_in_any_order_and_precision() -> None:
    found = set()
    for recipe, seed in ((RECIPES[0], 3), (RECIPES[2], 3), (RECIPES[3], 3), (RECIPES[0], 4)):
        model = model_of(recipe)
        values = [(name, value) for name, value in model_of(recipe).random_values(seed) if not is_adapter(name)]
        publish_base(model, values)
        hashes = BaseHash()
        assert list(hashes.through(reversed(values))) == values[::-1] and hashes.digest() == model.base_digest
        found.add((seed, model.base_digest))
        plain = Transformer(spec_of(), recipe, master_dtype=None).init_random(seed)
        with torch.no_grad():
            assert_bitwise_equal(without_adapters(model)(varlen(BATCH)), plain(varlen(BATCH)))
    assert len(found) == 2 and len({digest for _, digest in found}) == 2


def test_publishing_touches_adapters_alone_and_in_place() -> None:
    model = model_of(RECIPES[0])
    places, base = model.addresses(), checksum(published(without_adapters(model)))
    before = {name: tensor.values.clone() for name, tensor in published(model).items()}
    with torch.no_grad():
        for master in masters_of(model).values():
            if not master.frozen:
                master.param.add_(0.5)
    with pytest.raises(Exception, match="lora.a.weight has changed since the model was last published"):
        model(varlen(BATCH))
    model.publish()
    assert model.addresses() == places and checksum(published(without_adapters(model))) == base
    adapters = [linear.lora for linear in model.modules() if isinstance(linear, FlowLinear)]
    for table in (part for adapter in adapters for part in (adapter.a, adapter.b)):
        assert_bitwise_equal(table.published, table.weight.detach().bfloat16())
    changed = {name for name, tensor in published(model).items() if not torch.equal(
        tensor.values.view(torch.uint8), before[name].view(torch.uint8))}
    assert changed == {name for name in before if "lora_" in name}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_publishing_in_one_call_notices_what_has_changed(dtype: torch.dtype) -> None:
    """What it looked up holds from publish to publish; other memory, a copy of the model, a frozen table are seen."""
    def right(model: Transformer) -> None:
        model.publish()
        for module in model.modules():
            if isinstance(module, Published) and module.holds("weight"):
                assert_bitwise_equal(module.published, module.weight.detach().bfloat16())

    model = Transformer(spec_of(), replace(RECIPES[0], lora=LORA), master_dtype=dtype)
    fill(model, model.random_values(0))
    model.publish()
    parts = [m for m in model.modules() if isinstance(m, Published) and m.holds("weight")]
    assert len(parts) > 4
    for times in (1, 2, 3):
        held = model._adapters
        with torch.no_grad():
            parts[0].weight.add_(times)
        right(model)
        assert times == 1 or model._adapters is held, "looked up again"
    parts[1].weight.data = torch.full_like(parts[1].weight, 0.3)
    right(model)
    parts[2].weight = torch.nn.Parameter(torch.full_like(parts[2].weight, 0.7))
    right(model)
    twin = deepcopy(model)
    with torch.no_grad():
        parts[3].weight.add_(1.0)
    right(twin)
    right(model)
    parts[0].freeze("weight")
    kept = parts[0].published.clone()
    right(model)
    assert_bitwise_equal(parts[0].published, kept)


def test_published_names_are_those_of_peft() -> None:
    model = model_of(RECIPES[0], Lora(4, 12.0, ("q_proj", "v_proj", "down_proj")))
    names = published(model)
    at = "model.layers.1.self_attn.v_proj."
    linear = model.layers[1].attn.qkv
    assert_bitwise_equal(names[f"{at}lora_A.weight"].values, linear.lora.a.published[4:8])
    assert_bitwise_equal(names[f"{at}lora_B.weight"].values, linear.lora.b.published[64:96])
    assert f"{at.replace('v_proj', 'k_proj')}lora_A.weight" not in names
    held = sum(t.values.numel() * t.values.element_size() + (0 if t.scales is None else 4 * t.scales.numel())
               for t in names.values())
    assert held == published_bytes(model.spec, model.recipe)


@pytest.mark.parametrize("recipe", [RECIPES[0], RECIPES[1], RECIPES[2], RECIPES[3]], ids=lambda r: r.name)
def test_adapters_of_experts(recipe: Recipe) -> None:
    """A certificate, gradients of all of them in training mode, whose forward pass has the same bits, and none of the
    base; down alone leaves the norm's codes to gate and up."""
    down = Lora(4, 12.0, (*GROUPS["attention"], "down_proj"), expert_rank=3)
    for lora in (replace(LORA, expert_rank=3), down):
        model, batch = model_of(recipe, lora, **EXPERTS), varlen(BATCH)
        found = certify(model, Workload(num_sequences=3, max_prompt=14, new_tokens=8), "drawn", lambda text: None)
        assert found.ok
        accumulate_in(model, torch.float32)
        with torch.no_grad():
            expected = model(batch)
            assert not torch.equal(model_of(recipe, replace(lora, expert_rank=None), **EXPERTS)(batch), expected)
        hidden = model(batch)
        assert_bitwise_equal(hidden, expected)
        model.token_logprobs(hidden, batch.tokens.roll(-1), 0.9)[0].sum().backward()
        having = {name for name, p in model.named_parameters() if p.grad is not None and bool(p.grad.any())}
        assert having == {name for name in masters_of(model) if is_adapter(name)}
        assert having == set(adapter_table(model.spec, lora))


def test_gradients_of_experts_against_float64() -> None:
    torch.manual_seed(1)
    experts, rank, groups = 3, 4, moe.group(torch.tensor([[0, 2], [2, 0], [0, 2], [2, 0], [0, 2]]), 3)
    adapter = ExpertAdapter(Lora(rank, 12.0, ("up_proj",)), 32, (16, 8), (1,), experts, torch.float32, torch.bfloat16)
    for p in adapter.parameters():
        p.data.normal_(0, 0.3)
        p.data.copy_(p.data.bfloat16())
    adapter.a.publish()
    adapter.b.publish()
    owner = torch.repeat_interleave(torch.arange(experts), groups.counts)

    def plain(x: Tensor, y: Tensor, a: Tensor, b: Tensor) -> Tensor:
        a, b = a.unflatten(0, (experts, -1))[owner], b.unflatten(0, (experts, -1))[owner]
        added = torch.einsum("nor,nr->no", b, torch.einsum("nrk,nk->nr", a, x)) * 3.0
        return torch.cat([y[:, :16], y[:, 16:] + added], 1)

    x, y, dy = torch.randn(10, 32).bfloat16(), torch.randn(10, 24).bfloat16(), torch.randn(10, 24).bfloat16()
    weights = [adapter.a.weight.detach(), adapter.b.weight.detach()]

    def run(dtype: torch.dtype) -> list[Tensor]:
        leaves = [t.to(dtype).requires_grad_() for t in (x, y, *weights)]
        return list(torch.autograd.grad(plain(*leaves), leaves, dy.to(dtype)))

    inputs = [x.clone().requires_grad_(), y.clone().requires_grad_()]
    got = torch.autograd.grad(adapter.rows(*inputs, groups), [*inputs, adapter.a.weight, adapter.b.weight], dy)
    for name, ours, baseline, true in zip("xyab", got, run(torch.bfloat16), run(torch.float64), strict=True):
        assert_at_most_twice(ours, baseline, true, name)
    assert not got[2].unflatten(0, (experts, -1))[1].any(), "no row has expert 1"
    accumulate_in(adapter, torch.float32)
    for times in (1, 2):  # in place, and twice as much the second time
        adapter.rows(*inputs, groups).backward(dy)
        for p, one in zip(adapter.parameters(), got[2:], strict=True):
            assert torch.allclose(p.grad, times * one, rtol=1e-6)


@pytest.mark.parametrize("arch", [{}, BIASED, EXPERTS], ids=["tied", "biased", "experts"])
def test_projections_are_named_as_hugging_face_s_files_name_them(arch: dict[str, object]) -> None:
    spec = spec_of(**arch)
    table = tensor_table(spec)
    for (block, role), linear in linears_of(spec, 1).items():
        pieces = table[f"layers.1.{block}.{role}.weight"]
        assert linear.projections == tuple(p.name.split(".")[-2] for p in pieces) or linear.experts
    assert adapted_projections(spec, LORA) == list(ATTENTION + (() if arch is EXPERTS else MLP))


def test_first_values_do_not_depend_on_the_base_s_and_begin_as_nothing() -> None:
    values = dict(first_values(model_of(RECIPES[0]), 3))
    assert all(bool(value.any()) == name.endswith(".a.weight") for name, value in values.items())
    assert all(float(v.abs().max()) <= v.shape[1] ** -0.5 for v in values.values())
    again = dict(first_values(model_of(RECIPES[2], None), 3))
    assert not again and dict(first_values(model_of(RECIPES[2]), 3)).keys() == values.keys()
    assert all(torch.equal(v, values[n]) for n, v in first_values(model_of(RECIPES[2]), 3))
    assert all(bool(v.any()) for _, v in first_values(model_of(RECIPES[0]), 3, drawn=True))


def test_a_linear_with_adapters_takes_no_codes() -> None:
    linear = model_of(RECIPES[0]).layers[0].attn.qkv
    assert isinstance(linear, FlowLinear) and not linear.reads_codes("rollout")
    assert model_of(RECIPES[0], None).layers[0].attn.qkv.reads_codes("rollout")
