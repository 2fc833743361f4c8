"""Sharded models without other processes: what a rank keeps, what a parameter keeps, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from jetrl.kernels.update.gradient import grad_dtype
from jetrl.model.critic import Critic
from jetrl.model.master import accumulate_in, masters_of, own_rows, parts_of
from jetrl.model.sharding import digest, fill, shard_like, shard_model, whole_value
from jetrl.model.transformer import Transformer
from jetrl.parallel.world import ALONE, World
from jetrl.precision.recipe import build_recipe
from jetrl.spec import ModelSpec, RopeSpec

SPEC = ModelSpec(
    family="qwen2", vocab_size=300, hidden_size=40, intermediate_size=136, num_layers=1, num_heads=4, num_kv_heads=2,
    head_dim=16, rms_norm_eps=1e-6, rope=RopeSpec(1e4), max_position=64, tie_embeddings=True, qkv_bias=True,
    qk_norm=False,
)


class Pretend(World):
    """A rank whose others give nothing: their rows stay as they are."""

    def gather_rows(self, whole: Tensor, rows: Sequence[int]) -> None:
        assert sum(rows) == len(whole) and whole.is_contiguous()


def model_of(master: torch.dtype = torch.float32, precision: str = "fp8") -> Transformer:
    return Transformer(SPEC, build_recipe(precision, 1), master_dtype=master).init_random(0)


def test_a_rank_keeps_its_rows_and_vectors() -> None:
    model, whole = model_of(), model_of().state_dict()
    shard_model(model, Pretend(1, 2))
    # blocks of qkv: 64 | 32 | 32; of gate_up: 128, 8 | 128, 8; the second rank owns the second half of the blocks
    own = {"embed.weight": 256, "layers.0.attn.qkv.weight": 96, "layers.0.mlp.gate_up.weight": 136}
    for name, value in model.state_dict().items():
        if value.ndim == 1:
            assert torch.equal(value, whole[name])
        else:
            assert torch.equal(value, whole[name][own.get(name, len(whole[name])) :]), name
            assert value.untyped_storage().nbytes() == 4 * value.numel()
    assert model.get_parameter("layers.0.attn.o.weight").shape == (0, 64)  # one block, the first rank's


def test_a_parameter_stays_what_it_was() -> None:
    model = model_of(torch.bfloat16)
    accumulate_in(model, torch.float32)
    model.get_parameter("layers.0.mlp.down.weight").requires_grad_(False)
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    shard_model(model, Pretend(0, 2))
    for name, master in masters_of(model).items():
        p = model.get_parameter(name)
        assert master.param is p and p.requires_grad == before[name] == master.trained
        assert grad_dtype(p) == torch.float32 and p.dtype == torch.bfloat16
        assert master.gradient.in_place and master.gradient.sources == (2 if name == "embed.weight" else 1)
    model.get_parameter("embed.weight").grad = torch.zeros(256, 40)  # refused if the type had been lost


def test_what_is_published_stays_in_its_memory_and_an_fp8_layer_keeps_no_bf16_copy() -> None:
    for precision, copies in (("fp8", False), ("bf16", True), ("fp8_rollout", True), ("w8a16", True)):
        model = model_of(precision=precision)
        shard_model(model, Pretend(0, 2))
        model.publish()
        addresses, qkv = model.addresses(), model.layers[0].attn.qkv
        assert model.publish().addresses() == addresses
        assert (qkv.published.shape == (128, 40)) is copies and (qkv.quantized is None) is (precision == "bf16")
        assert model.embed.published.shape == (300, 40)


def test_alone_nothing_changes_but_that_sections_are_known() -> None:
    model = model_of()
    before, published = dict(model.named_parameters()), model.addresses()
    shard_model(model, ALONE)
    shard_model(model, ALONE)  # as often as one likes
    assert all(p is before[name] for name, p in model.named_parameters()) and model.addresses() == published
    cut = masters_of(model)["layers.0.attn.qkv.weight"].shard
    assert cut is not None and cut.sections == (64, 32, 32) and not cut.split
    assert all(whole_value(m, m.param.dtype).data_ptr() == m.param.data_ptr() for m in masters_of(model).values())


def test_a_critic_and_a_reference_are_cut_as_the_policy() -> None:
    policy = model_of()
    shard_model(policy, Pretend(1, 2))
    critic = Critic(policy, shared=False)
    assert critic.body is not None and critic.head.weight.shape == (0, 40)
    for name, value in critic.body.state_dict().items():
        assert torch.equal(value, policy.state_dict()[name])
    reference = model_of()
    shard_like(reference, policy)
    reference.load_state_dict(policy.state_dict())
    plain = model_of()
    shard_like(plain, model_of())
    assert all(master.shard is None for master in masters_of(plain).values())


def test_a_model_is_cut_as_shapes_and_filled_with_its_rows() -> None:
    """What is made of shapes is what a whole model is after it was cut: values, flags, tables; and nothing more."""
    whole = model_of(torch.bfloat16)
    shard_model(whole, Pretend(1, 2))
    with torch.device("meta"):
        model = Transformer(SPEC, build_recipe("fp8", 1), master_dtype=torch.bfloat16)
    accumulate_in(model, torch.float32)
    shard_model(model, Pretend(1, 2))
    assert {p.device.type for p in model.parameters()} == {"meta"} and own_rows(model) == own_rows(whole)
    fill(model, model.random_values(0), torch.device("cpu"))
    for name, master in masters_of(model).items():
        p, other = model.get_parameter(name), masters_of(whole)[name]
        want = whole.get_parameter(name)
        assert torch.equal(p, want) and p.dtype == want.dtype and p.requires_grad, name
        assert p.untyped_storage().nbytes() == 2 * p.numel() and master.shard == other.shard, name
        assert master.param is p and master.gradient.in_place and grad_dtype(p) == torch.float32
        assert master.gradient.sources == other.gradient.sources
    assert torch.equal(model.cos, whole.cos) and model.cos.device.type == "cpu"
    assert parts_of(model)["embed.weight"].start == 256 and parts_of(model)["embed.weight"].size == (300, 40)
    model.init_random(1)
    assert torch.equal(model.embed.weight, model_of(torch.bfloat16).init_random(1).embed.weight[256:])


def test_values_that_do_not_fit_are_refused() -> None:
    model, whole = model_of(), {name: value + 1 for name, value in model_of().state_dict().items()}
    fill(model, whole.items())
    assert all(torch.equal(p, whole[name]) for name, p in model.named_parameters())
    shard_model(model, Pretend(1, 2))
    with pytest.raises(ValueError, match=r"embed.weight is \(300, 40\), the model has \(44, 40\) there"):
        fill(model, whole.items())
    with pytest.raises(ValueError, match=r"other is \(1,\), the model has nothing there"):
        fill(model, [("other", torch.zeros(1))])
    with pytest.raises(ValueError, match=r"no values for \['embed.weight', 'layers"):
        fill(model, [("norm.weight", whole["norm.weight"])])
    with pytest.raises(AssertionError, match="sharded already"):
        shard_model(model, Pretend(1, 3))


def test_the_digest_is_of_names_types_and_values() -> None:
    def of(model: Transformer) -> str:
        shard_model(model, ALONE)
        return digest(model, ALONE)

    first = of(model_of())
    assert of(model_of()) == first != of(model_of(torch.bfloat16))
    changed = model_of()
    changed.get_parameter("layers.0.mlp.gate_up.weight").data[-1, -1] += 1
    assert of(changed) != first
