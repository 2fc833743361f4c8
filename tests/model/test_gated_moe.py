"""Hybrids with experts beside a gated shared one: training's bits in the rollout, gradients, the flow, adapters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from enlarged import enlarged
from hash_model import Letters, learners_logprobs
from tolerances import assert_bitwise_equal
from torch import Tensor

from jetrl.engine.engine import PagedEngine
from jetrl.engine.settings import EngineSettings
from jetrl.huggingface import read as hf
from jetrl.kernels.experts import ops
from jetrl.model.gated_moe import GatedMoE
from jetrl.model.transformer import Transformer
from jetrl.parity.certificate import Workload, certify
from jetrl.parity.rows import varlen
from jetrl.precision.blocks import gated_moe
from jetrl.precision.blocks.layouts import GATED_EXPERTS, blocks_of, linears_of
from jetrl.precision.flow import build_flow, flow_digest, require_unified
from jetrl.precision.lora import Lora
from jetrl.precision.recipe import build_recipe
from jetrl.spec import SHAPES, DeltaSpec, ExpertSpec
from jetrl.types import Request, SamplingParams, WeightSet

SPEC = replace(
    SHAPES["tiny-hybrid-moe"], vocab_size=40, hidden_size=72, intermediate_size=56, num_layers=2, num_heads=4,
    head_dim=16, rotary_dim=8, max_position=256, tie_embeddings=False,
    delta=DeltaSpec(key_heads=2, value_heads=4, key_dim=8, value_dim=16, conv_width=4, layers=(0,)),
    experts=ExpertSpec(count=6, per_token=2, intermediate_size=40, normalized=True, gated_shared=56),
)
WORK = Workload(num_sequences=3, max_prompt=70, new_tokens=5, chunk=19, page_size=4)


def model_of(precision: str, dtype: torch.dtype = torch.bfloat16, **more: Any) -> Transformer:
    recipe = build_recipe(precision, SPEC.num_layers, head_dim=SPEC.head_dim)
    return enlarged(SPEC, replace(recipe, **more), dtype)


def tokens_of(count: int) -> Tensor:
    return torch.randint(SPEC.vocab_size, (count,), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("precision", ["bf16", "fp8", "w8a16"])
def test_rollout_equals_training_bit_for_bit(precision: str) -> None:
    result = certify(model_of(precision), WORK, "test", lambda text: None)
    assert result.ok and [link.link for link in result.links] == ["a", "b", "c", "v", "s", "w"], result.links


def test_adapters_reach_the_experts_and_the_shared_one() -> None:
    lora = Lora(rank=2, alpha=4.0, targets=("gate_proj", "up_proj", "down_proj", "q_proj"), rslora=False, expert_rank=1)
    model = model_of("fp8", lora=lora)
    named = {name for name, _ in model.named_parameters() if ".lora." in name}
    assert {f"layers.{i}.mlp.{role}.lora.b.weight" for i in (0, 1) for role in ("down", "shared_down")} <= named
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("lora.b.weight"):
                p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1)) * 0.05)
    model.publish()
    assert certify(model, WORK, "test", lambda text: None).ok


def test_the_flow_and_its_digest() -> None:
    recipe = build_recipe("fp8", 2)
    require_unified(SPEC, recipe)
    assert [blocks_of(SPEC, i)[1] for i in range(2)] == [GATED_EXPERTS] * 2 and gated_moe.GatedMoE().kind == "gated_moe"
    forward, backward = (build_flow(SPEC, recipe, view) for view in ("train_forward", "train_backward"))
    edges = forward.edge_map()
    assert edges["layers.0.shared_gate.x"].source == "layers.0.mlp_norm"
    assert edges["layers.0.shared_gate.x"].format.dtype == "bfloat16"
    assert edges["layers.0.shared_gated.gate"].format.dtype == "float32"
    assert edges["layers.0.combine.shared"].source == "layers.0.shared_gated"
    parameters = {node.name for node in forward.nodes if node.op == "parameter"}
    assert parameters == {e.name.removeprefix("optimizer.") for e in backward.edges if e.target == "optimizer"}
    assert "layers.1.shared_gate.weight" in parameters
    wider = replace(SPEC, experts=replace(SPEC.experts, gated_shared=64))
    assert flow_digest(wider, recipe) != flow_digest(SPEC, recipe)
    assert linears_of(SPEC, 0)["mlp", "shared_down"].in_size == 56


def test_taps_have_the_names_of_the_flow_and_change_no_bit() -> None:
    seen: dict[str, Tensor] = {}
    model, batch = model_of("fp8"), varlen([tokens_of(40), tokens_of(9)])
    learner = model(batch).detach()
    with torch.no_grad():
        assert_bitwise_equal(model(batch, seen.__setitem__), learner, "tapped")
        assert_bitwise_equal(model(batch), learner, "without gradients")
    assert seen.keys() <= build_flow(SPEC, model.recipe, "train_forward").node_map().keys()
    assert {f"layers.1.{name}" for name in ("shared_gate", "shared_gated", "shared_down", "combine")} <= seen.keys()
    gate, row = seen["layers.1.shared_gate"], seen["layers.1.shared_down"]
    want = row.float() / (1.0 + torch.exp(-gate))
    assert (seen["layers.1.shared_gated"].float() - want).abs().max() <= 2**-8 * want.abs().max()


def test_gradients_are_those_of_transformers(tmp_path: Path) -> None:
    """In FP32; the choice of experts has none on either side."""
    from transformers import AutoModelForCausalLM

    model, tokens = model_of("bf16", torch.float32), tokens_of(70)
    hf.save_model(tmp_path / "m", SPEC, model.state_dict(), dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32)
    theirs(tokens[None]).logits[0].log_softmax(-1)[torch.arange(69), tokens[1:]].sum().backward()
    model.token_logprobs(model(varlen([tokens]))[:-1], tokens[1:], 1.0)[0].sum().backward()
    expected = {name: p.grad for name, p in theirs.named_parameters()}
    for name, pieces in hf.tensor_table(SPEC).items():
        if ".experts." in pieces[0].name:  # theirs are one tensor
            stem = pieces[0].name.split(".experts.")[0] + ".experts."
            wanted = expected.pop(f"{stem}{'gate_up_proj' if 'gate_up' in name else 'down_proj'}").flatten(0, 1)
        else:
            wanted = torch.cat([expected.pop(piece.name).view(piece.flat) for piece in pieces])
        (found,) = [p.grad for ours, p in model.named_parameters() if ours == name]
        assert (found - wanted).norm() < 3e-4 * wanted.norm(), name
    assert not expected


def test_completions_have_the_learners_log_probs() -> None:
    model = model_of("fp8")
    asked = [
        Request(i, tuple(1 + (k * 7) % 38 for k in range((5, 61, 64)[i // 3])), SamplingParams(4 + i, ignore_eos=True))
        for i in range(9)
    ]
    found = []
    for sizes in ({}, {"max_num_seqs": 4, "page_size": 8, "kv_cache_tokens": 320, "max_tokens_per_step": 21}):
        engine = PagedEngine(model, Letters(), "flow", EngineSettings(**sizes))
        engine.load(WeightSet(1, "flow", {}))
        found.append(engine.generate(asked))
    assert found[0] == found[1]
    for r, c in zip(asked, found[0], strict=True):
        assert learners_logprobs(model, [*r.tokens, *c.tokens.tolist()])[len(r.tokens) - 1 :] == c.logprobs.tolist()


def test_rows_are_multiplied_by_the_sigmoid_of_one_number_each() -> None:
    """By hand, and the gradients against autograd's."""
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()
    logits = torch.tensor([[0.0], [2.0], [-90.0]], requires_grad=True)
    y = ops.gate_rows(x, logits)
    torch.testing.assert_close(y[0], x[0] * 0.5)
    assert y[2].abs().max() < 1e-30
    y.square().sum().backward()
    plain, gate = (t.detach().clone().requires_grad_() for t in (x, logits))
    (plain * gate.sigmoid()).square().sum().backward()
    torch.testing.assert_close(x.grad, plain.grad)
    torch.testing.assert_close(logits.grad, gate.grad)
    names = GatedMoE.checkpoint_names(SPEC, 1)
    assert names["shared_gate.weight"][0] == ("model.layers.1.mlp.shared_expert_gate.weight", (1, 72), False)
