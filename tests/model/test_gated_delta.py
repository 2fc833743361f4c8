"""Hybrids of Gated DeltaNet and gated attention: training's bits in the rollout, gradients, folders, refusals."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from enlarged import enlarged
from hash_model import BurstRunner, Letters, learners_logprobs
from safetensors.torch import load_file
from tolerances import assert_bitwise_equal
from torch import Tensor

from jetrl.api import random_model
from jetrl.engine.engine import PagedEngine
from jetrl.engine.settings import EngineSettings
from jetrl.engine.state_pool import grid_of, row_bytes
from jetrl.errors import UserError
from jetrl.huggingface import read as hf
from jetrl.huggingface.export import export, quantization_config
from jetrl.kernels.attention.ops import varlen_plan
from jetrl.kernels.delta import ops, reference
from jetrl.kernels.delta.parts import state_shapes
from jetrl.kernels.logprob.ops import log_softmax
from jetrl.kernels.update.gradient import Gradient, sent_to
from jetrl.model import gated_attention, gated_delta
from jetrl.model.master import masters_of
from jetrl.model.names import adapter_table
from jetrl.model.rope import rope_tables, rotary_order
from jetrl.model.transformer import Transformer
from jetrl.model.weights import checksum, published, published_bytes
from jetrl.parity.certificate import Workload, certify
from jetrl.parity.rows import varlen
from jetrl.precision.blocks.gated_delta import CONV, DELTA
from jetrl.precision.blocks.layouts import GATED_ATTENTION, GATED_DELTA, blocks_of, require_rewind, states_of
from jetrl.precision.blocks.states import PerSequence
from jetrl.precision.flow import build_flow, flow_digest, require_unified
from jetrl.precision.formats import FP32
from jetrl.precision.lora import Lora, expanded
from jetrl.precision.picture.draw import flow_svg
from jetrl.precision.recipe import build_recipe
from jetrl.spec import SHAPES, DeltaSpec, ModelSpec, RopeSpec
from jetrl.types import Completion, ForwardBatch, Request, SamplingParams, WeightSet
from jetrl.vllm.weights import layout

DELTA_SPEC = DeltaSpec(key_heads=2, value_heads=4, key_dim=8, value_dim=16, conv_width=4, layers=(0, 2))
SPEC = ModelSpec(
    family="qwen3_5_text", vocab_size=40, hidden_size=72, intermediate_size=136, num_layers=3, num_heads=4,
    num_kv_heads=2, head_dim=16, rms_norm_eps=1e-6, rope=RopeSpec(1e4), max_position=256, tie_embeddings=False,
    qkv_bias=False, qk_norm=True, delta=DELTA_SPEC, rotary_dim=8, attention_gate=True, norm_offset=True,
)
WORK = Workload(num_sequences=4, max_prompt=80, new_tokens=6, chunk=19, page_size=4)


def model_of(precision: str, dtype: torch.dtype = torch.bfloat16, spec: ModelSpec = SPEC, **more: Any) -> Transformer:
    return enlarged(spec, build_recipe(precision, spec.num_layers, head_dim=spec.head_dim, **more), dtype)


def tokens_of(count: int) -> Tensor:
    return torch.randint(SPEC.vocab_size, (count,), generator=torch.Generator().manual_seed(2))


# ---- flow -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["bf16", "fp8", "w8a16"])
def test_the_flow(precision: str) -> None:
    recipe = build_recipe(precision, 3)
    require_unified(SPEC, recipe)
    assert [blocks_of(SPEC, i)[0] for i in range(3)] == [GATED_DELTA, GATED_ATTENTION, GATED_DELTA]
    forward, backward = (build_flow(SPEC, recipe, view) for view in ("train_forward", "train_backward"))
    edges = forward.edge_map()
    assert edges["layers.0.ba.x"].source == "layers.0.delta_norm"
    assert edges["layers.0.ba.x"].format.dtype == "bfloat16"
    assert edges["layers.0.delta_rule.gates"].format.dtype == "float32"
    for name in ("qkvz", "out"):
        assert edges[f"layers.0.{name}.x"].format.is_quantized == (precision == "fp8")
    assert edges["layers.1.output_gate.gate"].source == "layers.1.qkv" and "layers.1.rope_q" in forward.node_map()
    assert dict(forward.node_map()["layers.1.rope_q"].attributes)["rotary_dim"] == 8
    assert dict(forward.node_map()["layers.0.delta_rule"].attributes)["chunk"] == 64
    parameters = {node.name for node in forward.nodes if node.op == "parameter"}
    assert parameters == {e.name.removeprefix("optimizer.") for e in backward.edges if e.target == "optimizer"}
    model = Transformer(SPEC, recipe, master_dtype=None)
    named = (re.sub(r"\.(attn|delta|mlp)\.norm\.", r".\1_norm.", name) for name, _ in model.named_parameters())
    assert parameters == {re.sub(r"\.(attn|delta|mlp)\.", ".", name) for name in named}
    words = [e.text or "" for e in ET.fromstring(flow_svg(SPEC, recipe)).iter("{http://www.w3.org/2000/svg}text")]
    assert any("gated delta rule" in word for word in words)


def test_the_digest_covers_what_is_computed() -> None:
    recipe = build_recipe("fp8", 3)
    changes: list[dict[str, Any]] = [
        {}, {"rotary_dim": 4}, {"norm_offset": False}, *({"delta": replace(DELTA_SPEC, **change)} for change in (
            {"key_heads": 4}, {"key_dim": 16}, {"conv_width": 3}, {"layers": (0,)},
        )),
    ]
    assert len({flow_digest(replace(SPEC, **change), recipe) for change in changes}) == len(changes)


def test_taps_have_the_names_of_the_flow_and_change_no_bit() -> None:
    seen: dict[str, Tensor] = {}
    model, batch = model_of("fp8"), varlen([tokens_of(70), tokens_of(9)])
    learner = model(batch).detach()
    with torch.no_grad():
        assert_bitwise_equal(model(batch, seen.__setitem__), learner, "tapped")
        assert_bitwise_equal(model(batch), learner, "without gradients")
    graph = build_flow(SPEC, model.recipe, "train_forward").node_map()
    assert seen.keys() <= graph.keys() and all(len(value) == 79 for value in seen.values())
    for layer, names in ((0, "qkvz ba conv_heads delta_gates delta_rule gated_norm out"),
                         (1, "qkv q_norm k_norm rope_q rope_k attention output_gate o")):
        assert {f"layers.{layer}.{name}" for name in names.split()} <= seen.keys()


# ---- bits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "more"), [("bf16", {}), ("fp8", {"kv_cache": "fp8"}), ("w8a16", {})], ids=["bf16", "fp8", "w8a16"]
)
def test_rollout_equals_training_bit_for_bit(precision: str, more: dict[str, Any]) -> None:
    """Packed, in pieces, decoded with preemption, shared prompts, over the ends of chunks."""
    result = certify(model_of(precision, **more), WORK, "test", lambda text: None)
    assert result.ok and [link.link for link in result.links] == ["a", "b", "c", "v", "s", "w"], result.links


def test_a_state_that_moves_elsewhere_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = reference._Walk._move

    def early(self: Any, who: Tensor) -> None:
        """As an engine does that keeps the state in BF16."""
        right(self, who)
        if torch.is_grad_enabled() is False and len(who) == 1:
            self.held.state[who] = self.held.state[who].to(torch.bfloat16).to(torch.float32)

    monkeypatch.setattr(reference._Walk, "_move", early)
    result = certify(model_of("bf16", torch.float32), WORK, "test", lambda text: None)
    assert not result.ok


def test_a_random_shape_has_a_certificate() -> None:
    """What `jetrl parity random:tiny-hybrid` does."""
    model = random_model("tiny-hybrid", "fp8", "cpu", layers=4, masters=False)
    assert certify(model, WORK, "random:tiny-hybrid", lambda text: None).ok and model.spec.delta is not None


def requests() -> list[Request]:
    """Groups whose prompts end before, at and behind the ends of blocks and chunks."""
    prompts = [tuple(1 + (i * n) % 38 for i in range(n)) for n in (5, 16, 61, 64, 66)]
    return [Request(100 + i, prompts[i // 4], SamplingParams(4 + i % 7, ignore_eos=i % 2 == 0)) for i in range(20)]


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_completions_have_the_learners_log_probs(precision: str) -> None:
    """Whatever the pages, slots, pieces, preemptions and bursts: groups fork a prompt's state, wait and begin again."""
    model = model_of(precision)

    def preempt(step: int, running: tuple[int, ...]) -> tuple[int, ...]:
        return running[step % 2 :: 3] if step % 6 == 5 else ()

    results: list[list[Completion]] = []
    for sizes, burst in (
        ({}, False), ({"max_num_seqs": 3}, True),
        ({"page_size": 8, "kv_cache_tokens": 320, "max_tokens_per_step": 21, "max_num_seqs": 4}, False),
    ):
        engine = PagedEngine(model, Letters(), "flow", EngineSettings(**sizes))
        engine.load(WeightSet(3, "flow", {}))
        if burst:
            engine.runner = BurstRunner(model, engine.settings)
        results.append(engine.generate(requests(), force_preempt=preempt if sizes and not burst else None))
    assert results[0] == results[1] == results[2]
    for r, c in zip(requests(), results[0], strict=True):
        assert learners_logprobs(model, [*r.tokens, *c.tokens.tolist()])[len(r.tokens) - 1 :] == c.logprobs.tolist()


def test_shared_prompts_have_the_rows_of_whole_sequences() -> None:
    """Two samples that go on from one prompt of 70 tokens: packed once, and twice."""
    model, stem, ends = model_of("fp8"), tokens_of(70), (tokens_of(90)[70:], tokens_of(99)[90:])
    lengths = (70, len(ends[0]), len(ends[1]))
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    plan = varlen_plan(starts, lengths, (-1, 0, 0))
    positions = torch.cat([torch.arange(70), *(70 + torch.arange(len(end)) for end in ends)])
    batch = ForwardBatch(torch.cat([stem, *ends]), positions, plan, "train")
    with torch.no_grad():
        shared = model(batch).split(lengths)
        for end, rows in zip(ends, shared[1:], strict=True):
            whole = model(varlen([torch.cat([stem, end])]))
            assert_bitwise_equal(whole[:70], shared[0])
            assert_bitwise_equal(whole[70:], rows)
    for one in model(batch)[70:].detach().split(lengths[1:]):
        assert one.isfinite().all()


# ---- gradients ------------------------------------------------------------------------------------------------------


def gradients(model: Transformer, tokens: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    hidden = model(varlen([tokens]))
    model.token_logprobs(hidden[:-1], tokens[1:], 1.0)[0].sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_values_and_gradients_are_those_of_transformers(tmp_path: Path) -> None:
    """In FP32, where both agree to rounding."""
    from transformers import AutoModelForCausalLM

    model, tokens = model_of("bf16", torch.float32), tokens_of(80)
    hf.save_model(tmp_path / "m", SPEC, model.state_dict(), dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32)
    want = theirs(tokens[None]).logits[0].log_softmax(-1)
    with torch.no_grad():
        assert (log_softmax(model.logits(model(varlen([tokens])))) - want).abs().max() < 1e-4
    ours = gradients(model, tokens)
    want[torch.arange(79), tokens[1:]].sum().backward()
    expected = {name: p.grad for name, p in theirs.named_parameters()}
    for name, pieces in hf.tensor_table(SPEC).items():
        wanted = torch.cat([expected.pop(piece.name).view(piece.flat) for piece in pieces])
        assert (ours[name] - wanted).norm() < 2e-4 * wanted.norm(), name
    assert not expected


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_gradients_repeat_and_a_sink_gets_each_matrix_once(precision: str) -> None:
    tokens, model = tokens_of(70), model_of(precision)
    plain = gradients(model, tokens)
    assert plain.keys() == dict(model.named_parameters()).keys()
    model.activation_checkpointing = True
    for name, grad in gradients(model, tokens).items():
        assert_bitwise_equal(grad, plain[name], name)
    held: dict[Gradient, Tensor] = {}
    complete: list[Gradient] = []

    class Sink:
        def buffer(self, gradient: Gradient) -> Tensor:
            return held.setdefault(gradient, torch.zeros(gradient.param.shape))

        def done(self, gradient: Gradient) -> None:
            complete.append(gradient)

    matrices = {name: m.gradient for name, m in masters_of(model).items() if m.param.ndim == 2}
    assert "layers.0.delta.conv.weight" in matrices
    with sent_to(Sink(), matrices.values()):
        assert gradients(model, tokens).keys() == plain.keys() - matrices.keys()
    for name, p in matrices.items():
        assert_bitwise_equal(held[p], plain[name], name)
        assert sum(other is p for other in complete) == 1, name


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_adapters_of_every_projection(precision: str) -> None:
    """They get the gradients that their merged weights give, and training's bits in the rollout."""
    lora = Lora(2, 4.0, expanded(["all"]))
    recipe = replace(build_recipe(precision, SPEC.num_layers, head_dim=SPEC.head_dim), lora=lora)
    model, gen = enlarged(SPEC, recipe, torch.bfloat16), torch.Generator().manual_seed(1)
    adapters = {name: p for name, p in model.named_parameters() if ".lora." in name}
    for at in ("0.delta.qkvz", "0.delta.out", "1.attn.qkv", "1.attn.o", "2.mlp.down"):
        assert {f"layers.{at}.lora.{ab}.weight" for ab in "ab"} <= adapters.keys()
    assert adapters["layers.0.delta.qkvz.lora.a.weight"].shape == (4, 72)  # qkv and z, each of rank 2
    with torch.no_grad():
        for name, p in adapters.items():
            if name.endswith("b.weight"):
                p.copy_(torch.randn(p.shape, generator=gen) * 0.1)
    model.publish()
    assert certify(model, WORK, "test", lambda text: None).ok
    found = gradients(model, tokens_of(70))
    assert found.keys() >= adapters.keys() and all(found[name].abs().max() > 0 for name in adapters)
    table = adapter_table(SPEC, lora)["layers.2.delta.qkvz.lora.b.weight"]
    assert [piece.name for piece in table] == [
        f"model.layers.2.linear_attn.in_proj_{x}.lora_B.weight" for x in ("qkv", "z")
    ]


# ---- parts of it ----------------------------------------------------------------------------------------------------


def test_a_part_of_a_head_is_rotated() -> None:
    """In the order of places, RoPE of the whole head is RoPE of its first four places, by hand."""
    order, (cos, sin) = rotary_order(8, 4), rope_tables(RopeSpec(1e4), 8, 50, 4)
    assert order == [0, 1, 4, 5, 2, 3, 6, 7]
    x = torch.randn(1, 1, 8, generator=torch.Generator().manual_seed(0))
    turned = gated_attention.pointwise.rope(x[..., order], cos[[7]], sin[[7]])[0, 0]
    want = x[0, 0].clone()
    for pair, frequency in enumerate((1.0, 1e-2)):  # 1e4 ** (-2 i / 4)
        c, s = torch.cos(torch.tensor(7 * frequency)), torch.sin(torch.tensor(7 * frequency))
        a, b = x[0, 0, pair], x[0, 0, pair + 2]
        want[pair], want[pair + 2] = a * c - b * s, b * c + a * s
    torch.testing.assert_close(turned, want[order])
    assert rotary_order(8, 8) == list(range(8))


def test_norms_multiply_by_one_plus_the_weight() -> None:
    model = model_of("bf16")
    norm = model.layers[0].delta.norm
    assert norm.offset and torch.equal(norm.factor, norm.published.float() + 1.0) and norm.factor.dtype == torch.float32
    place = norm.factor.data_ptr()
    with torch.no_grad():
        norm.weight.mul_(2.0)
    model.publish()
    assert torch.equal(norm.factor, norm.weight.bfloat16().float() + 1.0) and norm.factor.data_ptr() == place
    plain = Transformer(SPEC, model.recipe).init_random(0)
    assert not plain.norm.weight.any() and plain.layers[1].attn.q_norm.weight.abs().max() == 0
    delta = plain.layers[0].delta
    assert torch.equal(delta.out_norm.weight, torch.ones(16))
    step = torch.nn.functional.softplus(delta.dt_bias.weight)
    assert step.min() > 9e-4 and step.max() < 0.11
    assert 0.0 <= delta.a_log.weight.min() <= delta.a_log.weight.max() <= 2.8
    assert delta.conv.weight.abs().max() <= 0.5 and delta.conv.weight.std() > 0.2
    assert delta.a_log.published.dtype == delta.dt_bias.published.dtype == torch.float32


def test_what_a_sequence_keeps() -> None:
    """70 MB for the 9B model, in 24 layers."""
    states = states_of(SPEC)
    assert states[0, CONV] == PerSequence((3, 2 * 2 * 8 + 4 * 16), states[0, CONV].format)
    shapes = state_shapes(gated_delta.HeadSizes(2, 4, 8, 16))
    assert [(states[0, name].shape, states[0, name].format == FP32) for name in DELTA] == list(shapes)
    assert (1, CONV) not in states and (1, "keys") in states and (0, "keys") not in states
    assert 68e6 < row_bytes(SHAPES["qwen3.5-9b"], torch.bfloat16) < 82e6
    plain, more = (row_bytes(SHAPES["qwen3.5-9b"], torch.bfloat16, drafts) for drafts in (False, True))
    assert more - plain == 24 * 15 * 8192 * 2, "15 more rows before the convolution, so that drafts can be taken back"
    assert (grid_of(SPEC), grid_of(SPEC, drafts=True)) == (1, 16)
    require_rewind(SPEC)


# ---- folders --------------------------------------------------------------------------------------------------------


def test_folders(tmp_path: Path) -> None:
    model = model_of("fp8")
    hf.save_model(tmp_path / "m", SPEC, model.state_dict(), dtype=torch.bfloat16)
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    at = "model.layers.0.linear_attn."
    assert tensors[f"{at}conv1d.weight"].shape == (96, 1, 4) and tensors[f"{at}A_log"].dtype == torch.float32
    assert tensors[f"{at}in_proj_qkv.weight"].shape == (96, 72)
    assert tensors[f"{at}in_proj_b.weight"].dtype == torch.bfloat16
    assert hf.spec_from_folder(tmp_path / "m") == SPEC
    bare = Transformer(SPEC, model.recipe, master_dtype=None).publish_values(hf.parameters_of(tmp_path / "m", SPEC))
    assert checksum(published(bare)) == checksum(published(model))
    assert published(model)[f"{at}conv1d.weight"].values.shape == (96, 1, 4)
    held = sum(t.values.nbytes + (0 if t.scales is None else t.scales.nbytes) for t in published(bare).values())
    assert published_bytes(SPEC, model.recipe) == held
    with torch.no_grad():
        assert_bitwise_equal(bare(varlen([tokens_of(70)])), model(varlen([tokens_of(70)])))
    kept = quantization_config(SPEC, model.recipe)["modules_to_not_convert"]
    assert f"{at}in_proj_b" in kept and f"{at}in_proj_a" in kept and f"{at}in_proj_qkv" not in kept
    export(tmp_path / "m", tmp_path / "out", fp8=False)
    again = load_file(tmp_path / "out" / "model.safetensors")
    assert again.keys() == tensors.keys() and all(torch.equal(again[name], tensors[name]) for name in tensors)


# ---- refusals -------------------------------------------------------------------------------------------------------


def test_refusals() -> None:
    with pytest.raises(UserError, match="does not give the weights of Gated DeltaNet to vLLM yet"):
        layout(SPEC, build_recipe("bf16", 3), "refuse", "cpu")
    assert ops.delta_rule.__doc__ and json.dumps(SPEC.delta.layers) == "[0, 2]"  # type: ignore[union-attr]
