"""Flow graphs: rollout inside training edge by edge, exact differences of the mixed flow, and the digest."""

from __future__ import annotations

import dataclasses
import itertools
import os
import subprocess
import sys
from typing import Any

import pytest
from flow_shape import SPEC

from jetrl.errors import UserError
from jetrl.precision.blocks.layouts import roles_of
from jetrl.precision.flow import (
    FlowGraph,
    build_flow,
    diff,
    diff_recipe,
    flow_digest,
    fold_differences,
    layer_ranges,
    require_unified,
)
from jetrl.precision.formats import BF16, FP32, act_1x128, act_128x128, kv_head, weight_128x128, wgrad_128x1
from jetrl.precision.recipe import Recipe, build_recipe
from jetrl.spec import ModelSpec, RopeSpec

ROLES = roles_of(SPEC)
FAMILIES = [
    dataclasses.replace(SPEC, tie_embeddings=tied, qkv_bias=bias, qk_norm=norm)
    for tied, bias, norm in itertools.product((False, True), repeat=3)
]


def recipe(precision: str = "fp8", **knobs: Any) -> Recipe:
    return build_recipe(precision, SPEC.num_layers, **knobs)


def pair(spec: ModelSpec, r: Recipe) -> tuple[FlowGraph, FlowGraph]:
    return build_flow(spec, r, "rollout"), build_flow(spec, r, "train_forward")


@pytest.mark.parametrize("spec", FAMILIES)
@pytest.mark.parametrize("precision", ["bf16", "fp8", "w8a16"])
def test_unified_recipes_have_one_graph(spec: ModelSpec, precision: str) -> None:
    r = recipe(precision, num_first_layers_in_bf16=1)
    rollout, train = pair(spec, r)
    assert diff(rollout, train) == []
    require_unified(spec, r)
    # the reverse holds as well: nothing but the cache tells the two apart
    bare = rollout.without_cache()
    assert (bare.nodes, bare.edges) == (train.nodes, train.edges)
    assert len(rollout.nodes) == len(train.nodes) + 4 * spec.num_layers  # a write and a read of K and of V


def test_w8a16_is_the_flow_of_bf16_with_codes_of_weights() -> None:
    """Every other edge has the format that it has in BF16, in the backward pass, too: dgrad reads the codes."""
    r, plain = recipe("w8a16", num_last_layers_in_bf16=1), recipe("bf16")
    digests = {flow_digest(SPEC, x) for x in (r, plain, recipe("w8a16"), recipe("fp8", weight_scale="pow2"))}
    assert len(digests) == 4
    read = {f"layers.{i}.{role}" for i in range(SPEC.num_layers - 1) for role in ROLES}
    for view, ends in (("rollout", ".weight"), ("train_forward", ".weight"), ("train_backward", ".dgrad.weight")):
        edges, others = (build_flow(SPEC, x, view).edge_map() for x in (r, plain))
        codes = {name for name, edge in edges.items() if edge.format.is_quantized}
        assert codes == {f"{name}{ends}" for name in read}
        assert {edges[name].format for name in codes} == {weight_128x128("pow2")}
        assert all(edges[name].format == edge.format for name, edge in others.items() if name not in codes)
    assert (forward := build_flow(SPEC, r, "rollout").edge_map()) and forward["layers.0.qkv.weight"].source == (
        "layers.0.qkv.quantize_weight"
    )
    require_unified(SPEC, recipe("w8a16", kv_cache="fp8", head_dim=SPEC.head_dim))


@pytest.mark.parametrize("spec", FAMILIES)
@pytest.mark.parametrize("view", ["rollout", "train_forward", "train_backward"])
@pytest.mark.parametrize("precision", ["bf16", "fp8", "fp8_rollout"])
def test_graphs_are_well_formed(spec: ModelSpec, view: Any, precision: str) -> None:
    graph = build_flow(spec, recipe(precision, num_last_layers_in_bf16=1), view)
    seen: dict[str, int] = {node.name: i for i, node in enumerate(graph.nodes)}
    assert len(seen) == len(graph.nodes) and len(graph.edge_map()) == len(graph.edges)
    for edge in graph.edges:
        assert seen[edge.source] < seen[edge.target], f"{edge.name} runs against the order"
        assert edge.format == graph.node_map()[edge.source].out
    used = {edge.source for edge in graph.edges}
    ends = {"optimizer"} if view == "train_backward" else {"logprob"}
    assert {node.name for node in graph.nodes} - used == ends  # nothing is computed in vain


def test_formats_on_the_edges_of_one_layer() -> None:
    train = build_flow(SPEC, recipe(weight_scale="pow2"), "train_forward").edge_map()
    for role in ROLES:
        assert train[f"layers.3.{role}.quantize_x.x"].format == BF16
        assert train[f"layers.3.{role}.x"].format == act_1x128("fp32")
        assert train[f"layers.3.{role}.weight"].format == weight_128x128("pow2")
    assert train["layers.3.attn_add.y"].source == "layers.3.o"
    assert train["layers.3.attn_add.residual"].source == "layers.2.mlp_add"
    assert train["lm_head.weight"].source == "embed.weight" and train["lm_head.weight"].format == BF16
    assert train["logprob.logits"].format == FP32
    untied = build_flow(dataclasses.replace(SPEC, tie_embeddings=False), recipe(), "train_forward").edge_map()
    assert untied["lm_head.weight"].source == "lm_head.weight"


def test_wgrad_by_tiles_is_in_the_backward_flow_and_not_in_the_digest() -> None:
    rows, tiles = recipe(), recipe(wgrad="tile")
    graph = build_flow(SPEC, tiles, "train_backward")
    edges, nodes = graph.edge_map(), graph.node_map()
    for role in ROLES:
        assert edges[f"layers.0.{role}.wgrad.dy"].format == wgrad_128x1("fp32")
        assert edges[f"layers.0.{role}.wgrad.x"].format == act_128x128("fp32")
        assert nodes[f"layers.0.{role}.wgrad"].out == BF16
    assert flow_digest(SPEC, rows) == flow_digest(SPEC, tiles), "weights and log-probs are the same function"


def test_backward_formats_and_optimizer_inputs() -> None:
    r = recipe(num_last_layers_in_bf16=1)
    graph = build_flow(SPEC, r, "train_backward")
    edges = graph.edge_map()
    for role in ROLES:
        assert edges[f"layers.0.{role}.dgrad.dy"].format == act_1x128("fp32")
        assert edges[f"layers.0.{role}.dgrad.weight"].format == weight_128x128("fp32")
        assert edges[f"layers.0.{role}.wgrad.dy"].format == wgrad_128x1("fp32")
        assert edges[f"layers.0.{role}.wgrad.x"].format == wgrad_128x1("fp32")
        assert {edges[f"layers.3.{role}.wgrad.{slot}"].format for slot in ("dy", "x")} == {BF16}
        assert edges[f"layers.3.{role}.dgrad.dy"].format == BF16
    forward = build_flow(SPEC, r, "train_forward")
    parameters = {node.name for node in forward.nodes if node.op == "parameter"}
    gradients = {e.name.removeprefix("optimizer.") for e in graph.edges if e.target == "optimizer"}
    assert gradients == parameters
    assert all(e.format == FP32 for e in graph.edges if e.target == "optimizer")
    mixed = build_flow(SPEC, recipe("fp8_rollout"), "train_backward")
    assert mixed == build_flow(SPEC, recipe("bf16"), "train_backward")
    assert not [n for n in mixed.nodes if n.out.is_quantized]


@pytest.mark.parametrize("spec", [s for s in FAMILIES if not (s.qkv_bias and s.qk_norm)])
@pytest.mark.parametrize(("first", "last"), [(0, 0), (1, 1), (0, 3), (2, 2)])
def test_differences_of_the_mixed_flow_are_exact(spec: ModelSpec, first: int, last: int) -> None:
    r = recipe("fp8_rollout", num_first_layers_in_bf16=first, num_last_layers_in_bf16=last)
    expected = {
        (kind, f"layers.{layer}.{role}.{part}")
        for layer in range(first, 4 - last)
        for role in ROLES
        for kind, part in (
            ("missing", "quantize_x"),
            ("missing", "quantize_weight"),
            ("format", "x"),
            ("format", "weight"),
        )
    }
    differences = diff_recipe(spec, r)
    assert {(d.kind, d.name) for d in differences} == expected
    assert len(differences) == 16 * (4 - first - last)
    for d in differences:
        if d.kind == "format":
            assert d.rollout.startswith("reads e4m3[") and d.train == "reads bf16"


def test_diff_sees_other_definitions_and_sources() -> None:
    rollout, _ = pair(SPEC, recipe())
    other_eps = build_flow(dataclasses.replace(SPEC, rms_norm_eps=1e-5), recipe(), "train_forward")
    found = diff(rollout, other_eps)
    assert {d.kind for d in found} == {"operator"} and len(found) == 4 * 4 + 1
    assert "eps=1e-06" in found[0].rollout and "eps=1e-05" in found[0].train
    untied = build_flow(dataclasses.replace(SPEC, tie_embeddings=False), recipe(), "train_forward")
    assert [str(d) for d in diff(rollout, untied)] == [
        "lm_head.weight: rollout reads embed.weight, training reads lm_head.weight"
    ]
    # without the norms of Q and K, training lacks these operators, and what followed them reads another tensor
    bare = diff(rollout, build_flow(dataclasses.replace(SPEC, qk_norm=False), recipe(), "train_forward"))
    names = {(d.kind, d.name) for d in bare if d.name.startswith("layers.0.")}
    assert {(kind, name.removeprefix("layers.0.")) for kind, name in names} == {
        ("missing", "q_norm"),
        ("missing", "k_norm"),
        ("missing", "q_norm.weight"),
        ("missing", "k_norm.weight"),
        ("source", "rope_q.x"),
        ("source", "rope_k.x"),
    }


def test_other_scales_on_the_two_sides_show_on_every_operand() -> None:
    rollout = build_flow(SPEC, recipe(activation_scale="pow2"), "rollout")
    found = diff(rollout, build_flow(SPEC, recipe(), "train_forward"))
    assert {d.name for d in found} == {f"layers.{i}.{role}.x" for i in range(4) for role in ROLES}
    assert {(d.rollout, d.train) for d in found} == {("reads e4m3[1x128,pow2]", "reads e4m3[1x128,fp32]")}


def test_an_fp8_cache_is_unified_only_if_training_quantizes_too() -> None:
    fp8_cache, form = recipe(kv_cache="fp8", head_dim=SPEC.head_dim), kv_head(SPEC.head_dim)
    require_unified(SPEC, fp8_cache)
    rollout, train = pair(SPEC, fp8_cache)
    assert diff(rollout, train) == []
    assert train.edge_map()["layers.0.attention.k"].format == form
    assert rollout.edge_map()["layers.0.attention.k"].source == "layers.0.k_cache_read"
    backward = build_flow(SPEC, fp8_cache, "train_backward").edge_map()
    assert backward["layers.0.attention.dgrad.v"].format == form
    found = diff(rollout, build_flow(SPEC, recipe(), "train_forward"))
    assert {(d.kind, d.name.split(".", 2)[2]) for d in found} == {
        ("missing", "k.quantize"),
        ("missing", "v.quantize"),
        ("format", "attention.k"),
        ("format", "attention.v"),
    }
    assert len(found) == 4 * 4
    assert flow_digest(SPEC, fp8_cache) != flow_digest(SPEC, recipe())


def test_require_unified_names_every_place() -> None:
    with pytest.raises(UserError) as error:
        require_unified(SPEC, recipe("fp8_rollout", num_first_layers_in_bf16=1))
    text = str(error.value)
    assert text.startswith("precision = 'fp8_rollout'") and "in 48 places" in text
    lines = [line.strip() for line in text.splitlines() if line.startswith("  ")]
    assert len(lines) == 16
    assert "layers 1-3, down.x: rollout reads e4m3[1x128,fp32], training reads bf16" in lines
    assert (
        "layers 1-3, o.quantize_weight: rollout has quantize -> e4m3[128x128,fp32], training has no such operator"
        in lines
    )
    assert "Use precision = 'fp8', 'w8a16' or 'bf16'" in text


def test_folding() -> None:
    assert layer_ranges([3, 0, 1, 2, 7, 9, 10]) == "0-3, 7, 9-10"
    assert layer_ranges([]) == ""
    differences = diff_recipe(SPEC, recipe("fp8_rollout", num_first_layers_in_bf16=3))
    assert fold_differences(differences)[0].startswith("layer 3, qkv.quantize_x: rollout has quantize")


KNOBS: list[dict[str, Any]] = [
    {"precision": "bf16"},
    {"precision": "fp8_rollout"},
    {"weight_scale": "pow2"},
    {"activation_scale": "pow2"},
    {"num_first_layers_in_bf16": 1},
    {"num_last_layers_in_bf16": 1},
    {"num_last_layers_in_bf16": 2},
    {"kv_cache": "fp8", "head_dim": SPEC.head_dim},
    {"kv_cache": "fp8", "head_dim": 128},
    {"precision": "fp8_rollout", "kv_cache": "fp8", "head_dim": SPEC.head_dim},
]


def test_digest_changes_with_each_knob_of_the_recipe() -> None:
    digests = [flow_digest(SPEC, recipe())] + [flow_digest(SPEC, recipe(**knobs)) for knobs in KNOBS]
    assert len(set(digests)) == len(digests)
    assert all(len(d) == 16 and int(d, 16) >= 0 for d in digests)


@pytest.mark.parametrize(
    "change",
    [
        {"rms_norm_eps": 1e-5},
        {"hidden_size": 384},
        {"intermediate_size": 384},
        {"vocab_size": 1001},
        {"num_heads": 8},
        {"num_kv_heads": 1},
        {"head_dim": 128},
        {"tie_embeddings": False},
        {"qkv_bias": True},
        {"qk_norm": False},
        {"rope": RopeSpec(theta=1e4)},
        {"rope": RopeSpec(theta=1e6, factor=8.0)},
    ],
)
def test_digest_changes_with_what_the_model_computes(change: dict[str, Any]) -> None:
    assert flow_digest(dataclasses.replace(SPEC, **change), recipe()) != flow_digest(SPEC, recipe())


def test_digest_does_not_change_with_what_changes_no_value() -> None:
    same = [
        (dataclasses.replace(SPEC, max_position=8192), recipe()),
        (dataclasses.replace(SPEC, family="llama"), recipe()),
        (dataclasses.replace(SPEC, rope=RopeSpec(theta=1e6, high_freq_factor=2.0)), recipe()),  # unused: no factor
    ]
    assert {flow_digest(s, r) for s, r in same} == {flow_digest(SPEC, recipe())}
    # scales of a flow without FP8
    bf16 = flow_digest(SPEC, recipe("bf16"))
    assert flow_digest(SPEC, recipe("bf16", weight_scale="pow2", activation_scale="pow2")) == bf16
    assert flow_digest(SPEC, recipe("fp8", num_first_layers_in_bf16=2, num_last_layers_in_bf16=2)) == bf16
    # paging: the rollout's graph and training's forward are one value
    rollout, train = pair(SPEC, recipe())
    assert rollout.digest() == train.digest()


def test_digest_of_a_flow_with_a_cache_in_bf16_is_what_it_was_before_there_was_another() -> None:
    """Checkpoints hold these digests."""
    wanted = {"bf16": "9e6cb20dd7ece091", "fp8": "a1516c97539d28fa", "fp8_rollout": "0ac4e735f6db8d9a"}
    assert {name: flow_digest(SPEC, recipe(name)) for name in wanted} == wanted
    assert flow_digest(SPEC, recipe(kv_cache="bf16", head_dim=SPEC.head_dim)) == wanted["fp8"]


def test_digest_covers_what_kernels_depend_on() -> None:
    """Kernels that define no order of their own leave it as it was."""
    plain, a100, l40s = (flow_digest(SPEC, recipe(), kernels) for kernels in ("", "triton 1 sm_80", "triton 1 sm_89"))
    assert plain == flow_digest(SPEC, recipe()) and len({plain, a100, l40s}) == 3


def test_digest_is_stable_over_processes() -> None:
    code = (
        "from jetrl.precision.flow import flow_digest; from jetrl.precision.recipe import build_recipe;"
        f"from jetrl.spec import ModelSpec, RopeSpec; print(flow_digest({SPEC!r}, build_recipe('fp8', 4)))"
    )
    for seed in ("0", "1"):
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        assert out.stdout.strip() == flow_digest(SPEC, recipe())


def test_digest_covers_the_quantizer_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    before = flow_digest(SPEC, recipe()), flow_digest(SPEC, recipe("bf16"))
    monkeypatch.setattr("jetrl.precision.formats.QUANTIZER_RULE", "another_rule")
    assert flow_digest(SPEC, recipe()) != before[0]
    assert flow_digest(SPEC, recipe("bf16")) == before[1]


def test_recipe_of_another_depth_is_refused() -> None:
    with pytest.raises(AssertionError, match="model of 4 layers, recipe for 3"):
        build_flow(SPEC, build_recipe("fp8", 3), "rollout")
