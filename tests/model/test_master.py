"""What belongs to a weight is in its `Master`, none of it on the parameter; and what is left of one that is frozen."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Sequence

import pytest
import torch
from tiny import ARCH
from tolerances import assert_bitwise_equal
from torch import Tensor, nn

from jetrl.errors import UserError
from jetrl.huggingface.config import spec_from_hf
from jetrl.model.critic import Critic
from jetrl.model.linear import FlowLinear
from jetrl.model.master import Master, accumulate_in, frozen_values, masters_of, own_rows, parts_of, values_for
from jetrl.model.sharding import digest, fill, shard_model
from jetrl.model.transformer import Transformer
from jetrl.model.weights import checksum, published, published_bytes
from jetrl.parallel.world import ALONE, World
from jetrl.parity.rows import varlen
from jetrl.precision.recipe import Recipe, build_recipe
from jetrl.run.setup import reference_of
from jetrl.types import ForwardBatch

EXPERTS = {"model_type": "qwen3_moe", "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 72}
BIASED = {"model_type": "qwen2", "tie_word_embeddings": False}
RECIPES = [
    build_recipe("fp8", 2), build_recipe("fp8", 2, "pow2", num_first_layers_in_bf16=1, kv_cache="fp8", head_dim=16),
    build_recipe("bf16", 2), build_recipe("fp8_rollout", 2), build_recipe("w8a16", 2),
]
BATCH = [torch.tensor([1, 2, 3, 4, 5, 6]), torch.tensor([9, 8, 7])]


class Pretend(World):
    """A rank whose others give nothing: their rows stay as they are."""

    def gather_rows(self, whole: Tensor, rows: Sequence[int]) -> None:
        assert sum(rows) == len(whole)


def model_of(recipe: Recipe = RECIPES[0], master: torch.dtype = torch.float32, **arch: object) -> Transformer:
    return Transformer(spec_from_hf(ARCH | {"vocab_size": 50} | arch), recipe, master_dtype=master).init_random(7)


def linears(name: str) -> bool:
    return name.startswith("layers.") and "norm" not in name and "router" not in name


def gradients(model: Transformer, batch: ForwardBatch) -> dict[str, Tensor]:
    logp, entropy = model.token_logprobs(model(batch), batch.tokens.roll(-1), 0.9)
    (logp.sum() + 0.1 * entropy.sum()).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_parameters_carry_nothing_hidden() -> None:
    model = model_of(master=torch.bfloat16)
    shard_model(model, ALONE)
    accumulate_in(model, torch.float32)
    model.publish()
    gradients(model, varlen(BATCH))
    gradients(model, varlen(BATCH))
    assert not any(p.__dict__ for p in model.parameters())


@pytest.mark.parametrize("arch", [{}, BIASED, EXPERTS], ids=["tied", "biased", "experts"])
def test_every_parameter_has_its_master_in_order(arch: dict[str, object]) -> None:
    model = model_of(**arch)
    model.plain = nn.Linear(3, 2)  # as a block of a user's own may have
    masters = masters_of(model)
    assert list(masters) == [name for name, _ in model.named_parameters()]
    assert all(master.param is model.get_parameter(name) and master.trained for name, master in masters.items())
    assert all(masters_of(model)[name] is master for name, master in masters.items() if "plain" not in name)


def test_what_takes_a_parameter_s_place_is_the_master_s_weight() -> None:
    model = model_of()
    accumulate_in(model, torch.float32)
    norm, qkv = model.norm, model.layers[0].attn.qkv
    norm.weight = nn.Parameter(norm.weight.detach() * 2)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    assert all(master.param is model.get_parameter(name) for name, master in masters_of(model).items())
    model.publish()
    gradients(model, varlen(BATCH))
    assert qkv.weight.grad is not None and qkv.weight.grad.any() and norm.weight.grad is not None


def test_a_copy_has_masters_of_its_own_that_know_the_same() -> None:
    model = model_of()
    shard_model(model, ALONE)
    accumulate_in(model, torch.float32)
    model.freeze(["layers.0.attn.qkv.weight"])
    twin = copy.deepcopy(model)
    theirs = masters_of(model)
    for name, master in masters_of(twin).items():
        assert master is not theirs[name] and master.param is twin.get_parameter(name) is not theirs[name].param
        assert master.frozen == theirs[name].frozen and master.shard is theirs[name].shard
        assert master.gradient.sources == theirs[name].gradient.sources
    got = gradients(twin, varlen(BATCH))
    assert not any(p.grad is not None for p in model.parameters())
    want = gradients(model, varlen(BATCH))
    assert got.keys() == want.keys() and all(torch.equal(got[name], value) for name, value in want.items())


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: f"{r.name}-{r.kv_cache.is_quantized}")
@pytest.mark.parametrize("arch", [{}, BIASED, EXPERTS], ids=["tied", "biased", "experts"])
def test_freezing_changes_no_bit_of_the_rest(recipe: Recipe, arch: dict[str, object], checkpointing: bool) -> None:
    """Forward passes are the same, and gradients those of a model in which the same parameters ask for none."""
    batch, twin, model = varlen(BATCH), model_of(recipe, **arch), model_of(recipe, **arch)
    chosen = [name for name in masters_of(model) if linears(name)]
    for name in chosen:
        twin.get_parameter(name).requires_grad_(False)
    model.freeze(linears)
    assert sorted(model.frozen()) == sorted(chosen)
    assert checksum(published(model)) == checksum(published(twin))
    for one in (model, twin):
        one.activation_checkpointing = checkpointing
        accumulate_in(one, torch.float32)
    with torch.no_grad():
        assert_bitwise_equal(model(batch), twin(batch))
    got, want = gradients(model, batch), gradients(twin, batch)
    assert got.keys() == want.keys() == masters_of(model).keys() - chosen
    for name, value in want.items():
        assert_bitwise_equal(got[name], value, name)
    before = checksum(published(model))
    with torch.no_grad():
        for one in (model, twin):
            for name in got:
                one.get_parameter(name).add_(0.01)
            one.publish()
    assert before != checksum(published(model)) == checksum(published(twin))


def test_the_master_is_gone_and_codes_are_left() -> None:
    model = model_of()
    masters = [weakref.ref(p) for name, p in model.named_parameters() if linears(name)]
    model.freeze(linears)
    gc.collect()
    assert masters and not any(one() is not None for one in masters)
    for name in model.frozen():
        linear = model.get_submodule(name.rpartition(".")[0])
        assert isinstance(linear, FlowLinear) and linear.weight.is_meta and not linear.published.numel()
        assert linear.quantized is not None
    held = masters_of(model)
    assert parts_of(model).keys() == own_rows(model).keys() - set(model.frozen())
    assert own_rows(model)["layers.0.attn.qkv.weight"] == (0, len(held["layers.0.attn.qkv.weight"].param))


def test_a_table_or_norm_that_is_frozen_is_its_published_copy() -> None:
    model = model_of(master=torch.float32).freeze(["embed.weight", "layers.1.mlp.norm.weight", "norm.weight"])
    for module in (model.embed, model.layers[1].mlp.norm, model.norm):
        assert module.weight.dtype == torch.bfloat16 and module.weight.data_ptr() == module.published.data_ptr()
    grads = gradients(model, varlen(BATCH))
    assert grads.keys() == masters_of(model).keys() - set(model.frozen())


def test_all_frozen_is_a_model_without_masters() -> None:
    model, bare = model_of(), Transformer(model_of().spec, RECIPES[0], master_dtype=None).init_random(7)
    model.freeze(lambda name: True)
    assert not model.holds_masters and checksum(published(model)) == checksum(published(bare))
    hidden = model(varlen(BATCH))
    assert_bitwise_equal(hidden, bare(varlen(BATCH)))
    for asked in (hidden.sum().backward, model.requires_grad_, model.state_dict):
        with pytest.raises(UserError, match="holds no master weights"):
            asked()
    assert published_bytes(model.spec, model.recipe) == published_bytes(bare.spec, bare.recipe)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: f"{r.name}-{r.kv_cache.is_quantized}")
@pytest.mark.parametrize("arch", [{}, BIASED, EXPERTS], ids=["tied", "biased", "experts"])
def test_the_value_of_a_frozen_weight_gives_its_bits_again(recipe: Recipe, arch: dict[str, object]) -> None:
    """A policy of it in BF16, as a checkpoint has it, is the policy. (A scale that is a power of two may halve, with
    codes twice as large.)"""
    model = model_of(recipe, **arch).freeze(lambda name: True)
    values = {name: make() for name, make in frozen_values(model).items()}
    assert values.keys() == masters_of(model).keys() and all(v.dtype == torch.bfloat16 for v in values.values())
    again = Transformer(model.spec, recipe, master_dtype=None).publish_values(values.items())
    with torch.no_grad():
        assert_bitwise_equal(again(varlen(BATCH)), model(varlen(BATCH)))
    if recipe not in (RECIPES[1], RECIPES[4]):
        assert checksum(published(again)) == checksum(published(model))


def test_frozen_before_it_has_values() -> None:
    """A model of shapes is frozen, cut and filled: no rank ever holds a master of what is frozen."""
    want = model_of().freeze(linears)
    for world in (ALONE, Pretend(1, 2)):
        with torch.device("meta"):
            model = Transformer(want.spec, want.recipe).freeze(linears)
        shard_model(model, world)
        fill(model, model.random_values(7), torch.device("cpu"))
        assert model.frozen() == want.frozen() and not any(p.is_meta for p in model.parameters() if p.requires_grad)
        for name in want.frozen():
            assert masters_of(model)[name].shard is None
            have, expected = (m.get_submodule(name.rpartition(".")[0]).quantized for m in (model, want))
            assert torch.equal(have.codes.view(torch.uint8), expected.codes.view(torch.uint8))
            assert torch.equal(have.scale, expected.scale)
        if world is ALONE:
            model.to("cpu").publish()
            assert checksum(published(model)) == checksum(published(want))
            assert digest(model, ALONE) == digest(want, ALONE) != digest(model_of(), ALONE)
            model.init_random(8)
            assert digest(model, ALONE) == digest(model_of_seed(8), ALONE)


def model_of_seed(seed: int) -> Transformer:
    return model_of().init_random(seed).freeze(linears)


def test_frozen_after_it_was_cut() -> None:
    model, whole = model_of(vocab_size=300), model_of(vocab_size=300)
    shard_model(model, Pretend(1, 2))
    assert len(model.embed.weight) == 300 - 256
    model.publish().freeze(["embed.weight"])
    assert model.embed.weight.shape == (300, 40) == whole.embed.weight.shape
    assert torch.equal(model.embed.weight[256:], whole.embed.published[256:])


def test_a_reference_and_a_critic_begin_with_what_is_frozen() -> None:
    model = model_of().freeze(linears)
    accumulate_in(model, torch.float32)
    reference = reference_of(model)
    assert reference.frozen() == model.frozen() and checksum(published(reference)) == checksum(published(model))
    body = Critic(model, shared=False).body
    assert body is not None and not body.frozen() and checksum(published(body)) == checksum(published(model))
    assert [name for name, _ in values_for(body, model)] == [name for name, _ in body.named_parameters()]


def test_what_is_frozen_stays_frozen_and_where_it_is() -> None:
    model = model_of(**BIASED).freeze(["layers.0.attn.qkv.weight", "layers.1.attn.qkv.bias", "norm.weight"])
    before = checksum(published(model))
    model.freeze(model.frozen())
    model.requires_grad_(False).requires_grad_(True)
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == model.frozen()
    for module in (model, model.layers[0].attn.qkv, model.layers[1].attn.qkv, model.norm):
        with pytest.raises(UserError, match="cannot move"):
            module.to(torch.float64)
        assert all(p.dtype != torch.float64 for p in model.parameters())
    assert checksum(published(model.to("cpu").publish())) == before
    for asked in (model.state_dict, lambda: model.load_state_dict({})):
        with pytest.raises(UserError, match=r"^3 of this model's .* frozen \(layers.0.attn.qkv.weight, layers.1"):
            asked()
    with torch.no_grad():
        model.embed.weight.add_(1)
    with pytest.raises(UserError, match="embed.weight has changed since"):
        model(varlen(BATCH))


def test_freezing_takes_the_value_that_the_master_has() -> None:
    model, other = model_of(), model_of()
    with torch.no_grad():
        for one in (model, other):
            one.layers[0].mlp.down.weight.mul_(-1)
    model.freeze(["layers.0.mlp.down.weight"])
    assert checksum(published(model)) == checksum(published(other.publish()))


def test_names_that_are_none_are_refused() -> None:
    model = model_of()
    with pytest.raises(UserError, match=r"no parameter lm_head.weight. It has embed.weight, layers.0.attn.norm.weight"):
        model.freeze(["lm_head.weight"])
    model.plain = nn.Linear(3, 2)
    with pytest.raises(UserError, match="plain.weight is not published: it belongs to no linear"):
        model.freeze(["plain.weight"])
    assert not model.frozen()


def test_a_frozen_master_has_no_part() -> None:
    with pytest.raises(AssertionError, match="no value of its own"):
        Master(nn.Parameter(torch.empty(2, device="meta"), requires_grad=False), frozen=True).part()
