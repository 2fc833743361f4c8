"""What the blocks of latent attention (`blocks.latent`) and of DeepSeek's experts (`deepseek_moe`) declare."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import replace
from types import SimpleNamespace

import pytest

from jetrl.errors import UserError
from jetrl.precision.blocks.block import Linear, TrainingPass
from jetrl.precision.blocks.deepseek_moe import DeepSeekMoE, SigmoidMoE
from jetrl.precision.blocks.latent import LatentAttention
from jetrl.precision.blocks.layouts import DENSE_MLP, LATENT, SIGMOID_EXPERTS, SOFTMAX_EXPERTS, blocks_of, linears_of
from jetrl.precision.flow import build_flow, flow_digest, require_unified
from jetrl.precision.graph import ROUNDING
from jetrl.precision.picture.draw import flow_svg, flow_text
from jetrl.precision.recipe import build_recipe, recipe_of
from jetrl.spec import SHAPES, stated

V3 = SHAPES["tiny-mla"]


def test_linears_of_a_layer() -> None:
    """Moonlight: 16 heads of 128 + 64, a latent of 512. With a latent for queries there is one linear more."""
    spec = SHAPES["moonlight-16b-a3b"]
    attention = {
        ("attn", "q_kv_a"): Linear((3072, 576), 2048, projections=("q_proj",)),
        ("attn", "o"): Linear((2048,), 2048, writes_residual=True, projections=("o_proj",)),
    }
    assert dict(list(linears_of(spec, 0).items())[:2]) == attention
    assert list(linears_of(spec, 1)) == [
        *attention, ("mlp", "gate_up"), ("mlp", "down"), ("mlp", "shared_gate_up"), ("mlp", "shared_down")
    ]
    assert linears_of(spec, 1)["mlp", "shared_gate_up"].sections == (2816, 2816)
    assert linears_of(V3, 1)["attn", "q_kv_a"] == Linear((96, 176), 192)
    assert linears_of(V3, 1)["attn", "q_b"] == Linear((6 * 48,), 96)


def test_layers_of_the_families() -> None:
    assert blocks_of(V3, 0) == (LATENT, DENSE_MLP) and blocks_of(V3, 1) == (LATENT, SIGMOID_EXPERTS)
    assert blocks_of(SHAPES["deepseek-v2-lite"], 5) == (LATENT, SOFTMAX_EXPERTS)
    assert isinstance(LATENT, LatentAttention) and isinstance(SOFTMAX_EXPERTS, DeepSeekMoE)


@pytest.mark.parametrize("name", ["tiny-mla", "moonlight-16b-a3b", "deepseek-v2-lite"])
@pytest.mark.parametrize("precision", ["bf16", "fp8", "w8a16"])
def test_the_flow(name: str, precision: str) -> None:
    spec = replace(SHAPES[name], num_layers=2)
    recipe = build_recipe(precision, 2)
    require_unified(spec, recipe)
    forward, backward = build_flow(spec, recipe, "train_forward"), build_flow(spec, recipe, "train_backward")
    parameters = {node.name for node in forward.nodes if node.op == "parameter"}
    assert parameters == {e.name.removeprefix("optimizer.") for e in backward.edges if e.target == "optimizer"}
    edges, at = forward.edge_map(), "layers.1."
    assert edges[f"{at}attention.row"].source == f"{at}row" and edges[f"{at}attention.q"].source == f"{at}absorb"
    assert edges[f"{at}absorb.weight"].source == edges[f"{at}lift.weight"].source == f"{at}kv_b.weight"
    assert edges[f"{at}absorb.weight"].format.dtype == "bfloat16"  # under every recipe
    assert edges[f"{at}combine.shared"].source == f"{at}shared_down"
    assert (f"{at}route.bias" in edges) == spec.experts.deepseek.bias
    rollout = build_flow(spec, recipe, "rollout").edge_map()
    assert rollout[f"{at}attention.row"].source == f"{at}row_cache_read"
    back = backward.edge_map()
    assert back[f"{at}attention.dgrad.kv"].source == f"{at}kv_b"
    assert back[f"{at}kv_b.wgrad.x"].source == f"{at}kv_a_norm.saved"
    ops = {n.op for view in ("rollout", "train_backward") for n in build_flow(spec, recipe, view).nodes}
    for block in blocks_of(spec, 1):
        assert not block.roundings.keys() & ROUNDING.keys() and block.roundings.keys() <= ops
    assert "latent_attention" in flow_text(spec, recipe) or "lift" in flow_text(spec, recipe)
    words = [e.text or "" for e in ET.fromstring(flow_svg(spec, recipe)).iter("{http://www.w3.org/2000/svg}text")]
    assert any("W_UK" in word for word in words)


def test_the_digest_covers_latents_router_and_yarn() -> None:
    recipe, m, e = build_recipe("fp8", 4), V3.latent, V3.experts
    yarn = V3.rope.yarn
    changed = [
        V3, *(replace(V3, latent=replace(m, **c)) for c in ({"nope": 40}, {"value": 40}, {"eps": 1e-5}, {"rank": 168})),
        *(replace(V3, experts=replace(e, deepseek=replace(e.deepseek, **c)))
          for c in ({"scaling": 2.0}, {"groups": 2}, {"kept_groups": 1}, {"shared": 2}, {"bias": False})),
        *(replace(V3, rope=replace(V3.rope, yarn=replace(yarn, **c))) for c in ({"factor": 8.0}, {"mscale": 0.5})),
    ]
    assert len({flow_digest(spec, recipe) for spec in changed}) == len(changed)
    assert SigmoidMoE.roundings["frozen"] == "none (fp32)"


def test_an_fp8_cache_is_refused() -> None:
    quant = SimpleNamespace(kv_cache="fp8")
    with pytest.raises(UserError, match='quant.kv_cache = "fp8": this deepseek_v3 model keeps latents, which take 352'):
        recipe_of(SimpleNamespace(precision="fp8", quant=quant, lora=None), V3)


def test_memory_of_a_layer() -> None:
    """Kept bytes a token by hand, for Moonlight's attention in FP8: codes of the norm's output are made again."""
    spec = SHAPES["moonlight-16b-a3b"]
    of = TrainingPass(spec, build_recipe("fp8", 27), 1, 1000, block=LATENT)
    queries, row, output = 3072, 576, 2048
    assert LATENT.saved_bytes(of) == 4 + 2 * (2 * queries + 2 * row) + 2 * output + 4 * 16
    assert LATENT.passing_bytes(of) > 1000 * 16 * 2 * (192 + 192 + 128)
    more, less = (SIGMOID_EXPERTS.saved_bytes(replace(of, spec=s, block=SIGMOID_EXPERTS)) for s in (
        spec, replace(spec, experts=replace(spec.experts, deepseek=replace(spec.experts.deepseek, shared=0)))
    ))
    assert more - less == (2048 + 2816) * (1 + 1 / 32) + 4 * 2816 + 2 * 2048


def test_specs_as_plain_data_have_only_what_there_is() -> None:
    """Names of cached warm starts are made of it, so those of earlier models stay."""
    dense, experts = stated(SHAPES["qwen3-0.6b"]), stated(SHAPES["tiny-moe"])
    assert not {"experts", "latent"} & dense.keys() and "yarn" not in dense["rope"]
    assert "deepseek" not in experts["experts"] and stated(V3)["experts"]["deepseek"]["groups"] == 4
