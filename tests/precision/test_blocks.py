"""What blocks declare: their linears by the model card's formulas, their place in a layer, the frame around them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from flow_shape import SPEC

from jetrl.errors import UserError
from jetrl.precision.blocks.attention import Attention
from jetrl.precision.blocks.block import Linear
from jetrl.precision.blocks.gated_attention import GatedAttention
from jetrl.precision.blocks.gated_delta import GatedDelta
from jetrl.precision.blocks.gated_moe import GatedMoE
from jetrl.precision.blocks.layouts import (
    ATTENTION,
    DENSE_MLP,
    EXPERTS,
    LAYOUTS,
    blocks_of,
    linears_of,
    require_rewind,
    roles_of,
    states_of,
)
from jetrl.precision.blocks.mlp import MLP
from jetrl.precision.blocks.moe import MoE
from jetrl.precision.blocks.states import PerSequence, PerToken, State
from jetrl.precision.builder import build_flow
from jetrl.precision.flow import flow_digest, require_unified
from jetrl.precision.formats import BF16, FP32, Format, kv_head
from jetrl.precision.graph import ROUNDING
from jetrl.precision.picture.draw import flow_svg
from jetrl.precision.recipe import Role, build_recipe
from jetrl.spec import SHAPES, ExpertSpec, ModelSpec


def test_linears_of_a_layer() -> None:
    """4 heads of 64 with 2 pairs of key and value, width 256, feed-forward 320."""
    assert linears_of(SPEC, 3) == {
        ("attn", "qkv"): Linear((256, 128, 128), 256, projections=("q_proj", "k_proj", "v_proj")),
        ("attn", "o"): Linear((256,), 256, writes_residual=True, projections=("o_proj",)),
        ("mlp", "gate_up"): Linear((320, 320), 256, projections=("gate_proj", "up_proj")),
        ("mlp", "down"): Linear((256,), 320, writes_residual=True, projections=("down_proj",)),
    }
    assert linears_of(replace(SPEC, qkv_bias=True), 0)["attn", "qkv"].bias
    assert roles_of(SPEC) == ("qkv", "o", "gate_up", "down")


def test_every_family_has_its_layers() -> None:
    for family in ("llama", "qwen2", "qwen3"):
        assert blocks_of(replace(SPEC, family=family), 0) == (ATTENTION, DENSE_MLP)
    experts = ExpertSpec(count=4, per_token=2, intermediate_size=64, normalized=True, step=2)
    mixed = replace(SPEC, family="qwen3_moe", experts=experts)
    assert [blocks_of(mixed, i)[1] for i in range(4)] == [DENSE_MLP, EXPERTS, DENSE_MLP, EXPERTS]
    into, out = ("gate_proj", "up_proj"), ("down_proj",)
    assert linears_of(mixed, 1)["mlp", "gate_up"] == Linear((64, 64) * 4, 256, experts=4, projections=into)
    down = Linear((256,) * 4, 64, writes_residual=True, experts=4, projections=out)
    assert linears_of(mixed, 1)["mlp", "down"] == down
    assert Linear((64, 64) * 4, 256, experts=4).out_sections == Linear((64, 64), 256).out_sections == (64, 64)
    hybrid = SHAPES["qwen3.5-0.8b"]
    assert [type(blocks_of(hybrid, i)[0]) for i in range(5)] == [GatedDelta] * 3 + [GatedAttention, GatedDelta]
    assert linears_of(hybrid, 3)["attn", "qkv"].sections == (4096, 512, 512)
    assert linears_of(hybrid, 0)["delta", "qkvz"] == Linear(
        (6144, 2048), 1024, projections=("in_proj_qkv", "in_proj_z")
    )
    gated = SHAPES["qwen3.5-35b-a3b"]
    assert all(type(blocks_of(gated, i)[1]) is GatedMoE for i in range(40))
    assert linears_of(gated, 3)["mlp", "shared_gate_up"] == Linear((512, 512), 2048, projections=into)
    with pytest.raises(AssertionError, match="no layout for the family 'mamba'; there are llama, qwen2, qwen3"):
        blocks_of(replace(SPEC, family="mamba"), 0)
    with pytest.raises(AssertionError, match="layer 4 of 4"):
        blocks_of(SPEC, 4)


def test_no_block_redefines_where_a_common_operator_rounds() -> None:
    experts = ExpertSpec(count=4, per_token=2, intermediate_size=64, normalized=True)
    mixed = replace(SPEC, family="qwen3_moe", experts=experts)
    hybrid = SHAPES["tiny-hybrid"]
    for block, spec in (
        (ATTENTION, SPEC), (DENSE_MLP, SPEC), (EXPERTS, mixed), (GatedDelta(), hybrid), (GatedAttention(), hybrid),
        (GatedMoE(), SHAPES["tiny-hybrid-moe"]),
    ):
        assert not block.roundings.keys() & ROUNDING.keys()
        assert block.roundings.keys() <= {n.op for view in ("rollout", "train_backward")
                                          for n in build_flow(spec, build_recipe("fp8", 4), view).nodes}


class Second(MLP):
    """A feed-forward block with other names, so that it fits into a layer next to the first; its `up_2` has a bias."""

    name = "extra"

    def linears(self, spec: ModelSpec) -> Mapping[Role, Linear]:
        return {"up_2": Linear((64,), spec.hidden_size, bias=True), "down_2": Linear((spec.hidden_size,), 64)}

    def forward(self, flow, x):
        return flow.linear("down_2", flow.linear("up_2", x))

    def backward(self, flow, dy):
        return flow.linear("up_2", flow.linear("down_2", dy, "up_2_bias"), "extra_norm")


def test_a_block_of_experts_stands_where_the_mlp_does() -> None:
    assert MoE.name == MLP.name and MoE.kind != MLP.kind
    assert MoE.roundings["swiglu"] == MLP.roundings["swiglu"]


def test_layers_may_differ_and_have_any_number_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream runs through all of them: odd layers end with a third block, layer 2 has attention alone."""
    def layout(spec: ModelSpec, layer: int):
        return (Attention(),) if layer == 2 else (Attention(), MLP(), Second()) if layer % 2 else (Attention(), MLP())

    monkeypatch.setitem(LAYOUTS, "mixed", layout)
    spec, recipe = replace(SPEC, family="mixed"), build_recipe("fp8", 4)
    require_unified(spec, recipe)
    edges = build_flow(spec, recipe, "train_forward").edge_map()
    assert edges["layers.1.extra_norm.x"].source == edges["layers.1.extra_add.residual"].source == "layers.1.mlp_add"
    assert edges["layers.2.attn_norm.x"].source == "layers.1.extra_add"
    assert edges["layers.3.attn_norm.x"].source == "layers.2.attn_add"
    assert edges["norm.x"].source == "layers.3.extra_add"
    back = build_flow(spec, recipe, "train_backward").edge_map()
    assert back["norm.dgrad.x"].source == "layers.3.extra_add.saved"
    assert back["layers.1.mlp_add.grad.residual"].source == "layers.2.input.grad"
    assert back["layers.1.attn_add.grad.residual"].source == "layers.1.mlp_add.grad"
    assert back["layers.2.attn_norm.dgrad.x"].source == "layers.1.extra_add.saved"
    assert back["layers.2.input.grad.residual"].source == "layers.3.input.grad"
    assert back["optimizer.layers.1.up_2.bias"].source == "layers.1.up_2_bias.wgrad"
    parameters = {n.name for n in build_flow(spec, recipe, "rollout").nodes if n.op == "parameter"}
    assert {e.name.removeprefix("optimizer.") for e in back.values() if e.target == "optimizer"} == parameters
    assert flow_digest(spec, recipe) != flow_digest(SPEC, recipe)
    drawn = flow_svg(spec, build_recipe("fp8", 4, num_first_layers_in_bf16=1))  # layer 1, with three blocks
    assert "Precision flow fp8, layer 1" in drawn and ">extra_norm.dgrad<" in drawn and ">up_2.quantize_dy<" in drawn
    monkeypatch.setitem(LAYOUTS, "mixed", lambda spec, layer: (Attention(), MLP(), MLP()))
    with pytest.raises(AssertionError, match="two blocks of layer 0 have one name"):
        build_flow(spec, recipe, "rollout")


def test_states_of_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values in the cache's format, where there is attention; nothing is kept of other blocks."""
    heads = PerToken((2, 64), kv_head(64))
    assert states_of(SPEC, kv_head(64)) == {(layer, name): heads for layer in range(4) for name in ("keys", "values")}
    assert states_of(SPEC)[3, "keys"].format == BF16
    require_rewind(SPEC)

    class Counting(MLP):
        kind, name = "counting", "count"

        def states(self, spec: ModelSpec, kv_cache: Format) -> Mapping[str, State]:
            return {"count": PerSequence((5, 2), grid=grid, spare=2)}

    grid = 16
    monkeypatch.setitem(LAYOUTS, "mixed", lambda spec, layer: (Counting(),) if layer == 1 else (DENSE_MLP,))
    spec = replace(SPEC, family="mixed")
    assert states_of(spec) == {(1, "count"): PerSequence((3, 2), FP32)}, "what is for going back is left out"
    assert states_of(spec, drafts=True) == {(1, "count"): PerSequence((5, 2), FP32, 16, 2)}
    require_rewind(spec)
    grid = 1
    with pytest.raises(UserError, match=r"rollout\.speculate: layers of the kind counting keep one state"):
        require_rewind(spec)
    again = type("Again", (Counting,), {"name": "again"})
    monkeypatch.setitem(LAYOUTS, "mixed", lambda spec, layer: (Counting(), again()))
    with pytest.raises(AssertionError, match="two blocks of layer 0 keep states of one name"):
        states_of(spec)
