"""Adapters as plain data: scale, which projections, and their nodes in the flow graph."""

from __future__ import annotations

from dataclasses import replace

import pytest
from flow_shape import SPEC

from jetrl.precision.builder import build_flow
from jetrl.precision.flow import diff_recipe, flow_digest
from jetrl.precision.graph import View
from jetrl.precision.lora import ATTENTION, GROUPS, LINEAR_ATTENTION, MLP, Lora, adapted_rows, edges, expanded
from jetrl.precision.picture.draw import flow_svg
from jetrl.precision.recipe import build_recipe
from jetrl.spec import ExpertSpec

LORA = Lora(8, 32.0, GROUPS["all"])


def test_scale() -> None:
    assert LORA.scale == 4.0 and replace(LORA, rank=16, rslora=True).scale == 8.0
    assert replace(LORA, rank=1).scale == 32.0


def test_targets_are_names_and_groups_in_the_order_of_the_model() -> None:
    groups = ("linear_attention", "mlp", "attention")
    assert expanded(("all",)) == ATTENTION + MLP + LINEAR_ATTENTION == expanded(groups)
    assert expanded(("down_proj", "attention", "q_proj")) == (*ATTENTION, "down_proj")
    lora = Lora(8, 32.0, expanded(("v_proj", "q_proj", "mlp")))
    assert lora.adapted(("q_proj", "k_proj", "v_proj")) == (0, 2)
    assert lora.adapted(("o_proj",)) == () == lora.adapted(())
    assert edges((4, 2, 3)) == [(0, 4), (4, 6), (6, 9)]


@pytest.mark.parametrize("precision", ["fp8", "w8a16", "bf16"])
def test_the_flow_has_them_on_both_sides_and_reads_the_bf16_input(precision: str) -> None:
    plain = build_recipe(precision, 4)
    recipe = replace(plain, lora=LORA)
    assert not diff_recipe(SPEC, recipe)
    digests = {flow_digest(SPEC, r) for r in (
        plain, recipe, replace(recipe, lora=replace(LORA, alpha=16.0)), replace(recipe, lora=replace(LORA, rank=16)),
        replace(recipe, lora=replace(LORA, targets=ATTENTION)))}
    assert len(digests) == 5
    views: tuple[View, View] = ("rollout", "train_forward")
    for view in views:
        edge = build_flow(SPEC, recipe, view).edge_map()
        assert edge["layers.1.qkv_shrink.x"].source == "layers.1.attn_norm", "not the quantizer's codes"
        assert edge["layers.1.down_shrink.x"].source == "layers.1.swiglu"
        assert edge["layers.1.o_expand.y"].source == "layers.1.o"
        assert edge["layers.1.attn_add.y"].source == "layers.1.o_expand"
        assert str(edge["layers.1.qkv_shrink.x"].format) == "bf16"
    assert "expand" in flow_svg(SPEC, recipe)


def test_adapters_of_experts_are_nodes_too_and_without_their_rank_nothing_differs() -> None:
    experts = ExpertSpec(count=4, per_token=2, intermediate_size=128, normalized=True)
    spec = replace(SPEC, family="qwen3_moe", experts=experts)
    recipe = build_recipe("fp8", 4, lora=LORA)
    assert LORA.of(4) is None and LORA.of(0) is LORA
    own = replace(LORA, expert_rank=4)
    assert own.of(4) == Lora(4, 32.0, GROUPS["all"]) and own.of(4).scale == 8.0 and own.of(0).scale == 4.0
    with_experts = replace(recipe, lora=own)
    assert flow_digest(spec, recipe) != flow_digest(spec, with_experts) and not diff_recipe(spec, with_experts)
    edge = build_flow(spec, with_experts, "rollout").edge_map()
    assert edge["layers.1.gate_up_shrink.x"].source == "layers.1.dispatch"
    assert edge["layers.1.down_expand.y"].source == "layers.1.down"
    assert edge["layers.1.combine.y"].source == "layers.1.down_expand"
    assert not any("gate_up_shrink" in name for name in build_flow(spec, recipe, "rollout").edge_map())
    rows = list(adapted_rows(Lora(2, 4.0, ("up_proj", "down_proj")), (3, 5, 3, 5), ("gate_proj", "up_proj"), 2))
    assert rows == [((3, 8), 0, 0), ((11, 16), 2, 5)]


def test_a_bias_comes_after_the_adapters() -> None:
    spec = replace(SPEC, qkv_bias=True)
    edge = build_flow(spec, build_recipe("fp8", 4, lora=LORA), "train_forward").edge_map()
    assert edge["layers.0.qkv_bias.x"].source == "layers.0.qkv_expand"


def test_only_adapters_reach_the_optimizer() -> None:
    for precision in ("fp8", "bf16"):
        flow = build_flow(replace(SPEC, qkv_bias=True), build_recipe(precision, 4, lora=LORA), "train_backward")
        names = {e.name.removeprefix("optimizer.") for e in flow.edges if e.target == "optimizer"}
        assert len(names) == 4 * 4 * 2 and all(".lora." in name for name in names)
        assert not any(n.name.endswith(("quantize_dy_t", "quantize_x_t")) for n in flow.nodes)
