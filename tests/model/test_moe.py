"""The mixture-of-experts block in models: training's bits in the rollout, gradients, folders, and what is refused."""

from __future__ import annotations

import hashlib
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from enlarged import enlarged
from tolerances import assert_bitwise_equal
from torch import Tensor

from jetrl.api import random_model
from jetrl.errors import UserError
from jetrl.huggingface import read as hf
from jetrl.huggingface.export import export, quantization_config
from jetrl.kernels.logprob.ops import log_softmax
from jetrl.kernels.reference import dequantize
from jetrl.kernels.update.gradient import Gradient, sent_to
from jetrl.model import moe
from jetrl.model.block import Routes
from jetrl.model.master import accumulate_in, masters_of
from jetrl.model.sharding import shard_model
from jetrl.model.transformer import Transformer
from jetrl.model.weights import checksum, published, published_bytes
from jetrl.parallel.world import World
from jetrl.parity.certificate import Workload, certify
from jetrl.parity.rows import varlen
from jetrl.precision.blocks.moe import MoE
from jetrl.precision.flow import build_flow, flow_digest, require_unified
from jetrl.precision.picture.draw import flow_svg, flow_text
from jetrl.precision.recipe import build_recipe
from jetrl.spec import SHAPES, ExpertSpec, ModelSpec, RopeSpec

# Layer 0 is dense by `step`, layer 1 has experts, layer 2 is dense, layer 3 is an MLP by its own mention.
EXPERTS = ExpertSpec(count=6, per_token=3, intermediate_size=72, normalized=True)
SPEC = ModelSpec(
    family="qwen3_moe", vocab_size=53, hidden_size=136, intermediate_size=200, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=16, rms_norm_eps=1e-6, rope=RopeSpec(1e4), max_position=64, tie_embeddings=False,
    qkv_bias=False, qk_norm=True, experts=EXPERTS,
)
MIXED = replace(SPEC, num_layers=4, experts=replace(EXPERTS, step=2, dense_layers=(3,), normalized=False))
WORK = Workload(num_sequences=4, max_prompt=20, new_tokens=6, chunk=5, page_size=4)


def model_of(precision: str, spec: ModelSpec = SPEC, dtype: torch.dtype = torch.bfloat16, **more: Any) -> Transformer:
    return enlarged(spec, build_recipe(precision, spec.num_layers, head_dim=spec.head_dim, **more), dtype)


def tokens_of(count: int) -> Tensor:
    return torch.randint(SPEC.vocab_size, (count,), generator=torch.Generator().manual_seed(2))


# ---- flow -----------------------------------------------------------------------------------------------------------


def test_layers_of_the_config() -> None:
    assert SPEC.expert_layers == (0, 1) and MIXED.expert_layers == (1,) and SHAPES["qwen3-8b"].expert_layers == ()
    assert SHAPES["qwen3-30b-a3b"].expert_layers == tuple(range(48))
    assert replace(SPEC, num_layers=6, experts=replace(EXPERTS, step=3)).expert_layers == (2, 5)


@pytest.mark.parametrize("precision", ["bf16", "fp8", "w8a16"])
def test_the_flow_shows_router_dispatch_experts_and_combine(precision: str) -> None:
    recipe = build_recipe(precision, 4)
    require_unified(MIXED, recipe)
    forward, backward = build_flow(MIXED, recipe, "train_forward"), build_flow(MIXED, recipe, "train_backward")
    edges = forward.edge_map()
    at = "layers.1."
    assert edges[f"{at}router.x"].source == edges[f"{at}dispatch.x"].source == f"{at}mlp_norm"
    assert edges[f"{at}route.logits"].format.dtype == edges[f"{at}combine.weights"].format.dtype == "float32"
    assert edges[f"{at}router.x"].format.dtype == edges[f"{at}router.weight"].format.dtype == "bfloat16"
    assert edges[f"{at}gate_up.x"].format.is_quantized == (precision == "fp8")
    assert edges[f"{at}mlp_add.y"].source == f"{at}combine"
    assert f"{at}router" in forward.node_map() and "layers.2.router" not in forward.node_map()
    assert dict(forward.node_map()[f"{at}gate_up"].attributes)["experts"] == 6
    parameters = {node.name for node in forward.nodes if node.op == "parameter"}
    assert parameters == {e.name.removeprefix("optimizer.") for e in backward.edges if e.target == "optimizer"}
    assert "grouped_gemm" in flow_text(MIXED, recipe) and "combine" in flow_text(MIXED, recipe)
    drawn = flow_svg(SPEC, build_recipe(precision, 2))
    words = [e.text or "" for e in ET.fromstring(drawn).iter("{http://www.w3.org/2000/svg}text")]
    for word in ("top 3 → fp32", "Σ weight · y → bf16", "router.wgrad", "router.weight", "dispatch.dgrad"):
        assert word in words, word


def test_the_digest_covers_what_experts_compute() -> None:
    recipe = build_recipe("fp8", 2)
    changes = [
        {"count": 7}, {"per_token": 2}, {"normalized": False}, {"intermediate_size": 80}, {"step": 2},
        {"dense_layers": (0,)},
    ]
    digests = {flow_digest(replace(SPEC, experts=replace(EXPERTS, **change)), recipe) for change in [{}, *changes]}
    assert len(digests) == 6  # without layer 0 by `step` and by `dense_layers` is one model
    assert MoE.roundings["combine"] == "fp32 products, added in fp32 by rank, rounded once to bf16"


def test_taps_have_the_names_of_the_flow() -> None:
    names: list[str] = []
    with torch.no_grad():
        model_of("fp8")(varlen([tokens_of(9)]), lambda name, value: names.append(name) or len(value) == 9)
    graph = build_flow(SPEC, build_recipe("fp8", 2), "train_forward").node_map()
    ours = ("router", "route", "dispatch", "gate_up", "swiglu", "down", "combine")
    assert names[-8:] == [f"layers.1.{n}" for n in ours] + ["norm"] and set(names) <= graph.keys()


# ---- bits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "spec", "more"),
    [("bf16", SPEC, {}), ("fp8", SPEC, {"kv_cache": "fp8"}), ("fp8", MIXED, {"num_first_layers_in_bf16": 2}),
     ("w8a16", SPEC, {}), ("w8a16", MIXED, {"kv_cache": "fp8"})],
    ids=["bf16", "fp8", "mixed", "w8a16", "w8a16 mixed"],
)
def test_rollout_equals_training_bit_for_bit(precision: str, spec: ModelSpec, more: dict[str, Any]) -> None:
    """Packed against alone, prefill in chunks through pages, decoding with preemption."""
    result = certify(model_of(precision, spec, **more), WORK, "test", lambda text: None)
    assert result.ok and [link.link for link in result.links] == ["a", "b", "c", "v", "s", "w"], result.links


def test_a_random_shape_has_a_certificate() -> None:
    """What `jetrl parity random:tiny-moe` does."""
    model = random_model("tiny-moe", "fp8", "cpu", layers=1, masters=False)
    assert certify(model, WORK, "random:tiny-moe", lambda text: None).ok and model.spec.experts is not None


def test_fp8_rollout_is_told_apart_and_routes_some_tokens_elsewhere() -> None:
    model = model_of("fp8_rollout")
    result = certify(model, WORK, "test", lambda text: None)
    assert [link.ok for link in result.links] == [True, False, False, False, True, False]
    batch, sides = varlen([tokens_of(60)]), (Routes(), Routes())
    with torch.no_grad():
        model(batch, routes=sides[0])
        model(replace(batch, side="rollout"), routes=sides[1])
    differ = [(a.sort(-1).values != b.sort(-1).values).any(-1).float().mean() for a, b in
              zip(sides[0].chosen.values(), sides[1].chosen.values(), strict=True)]
    assert len(differ) == 2 and 0 < max(differ) < 1


def test_the_short_and_the_long_way_have_the_same_bits() -> None:
    """Without gradients, under a tap, and as the learner does it."""
    for precision in ("bf16", "fp8"):
        model, batch = model_of(precision), varlen([tokens_of(30), tokens_of(11)])
        learner = model(batch).detach()
        with torch.no_grad():
            assert_bitwise_equal(model(batch), learner, "without gradients")
            assert_bitwise_equal(model(batch, lambda name, value: None), learner, "tapped")


def test_the_sum_over_experts_has_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """If training added in another order, the certificate would say so; in FP32, where few bits are rounded away."""
    assert certify(model_of("bf16", dtype=torch.float32), WORK, "test", lambda text: None).ok
    right = moe.moe.combine

    def other(y: Tensor, weights: Tensor, groups: Any, shared: Tensor | None) -> Tensor:
        if not torch.is_grad_enabled():
            return right(y, weights, groups, shared)
        flipped = replace(groups, rows=groups.rows.flip(1))
        return right(y, weights.flip(1), flipped, shared)

    monkeypatch.setattr(moe.moe, "combine", other)
    result = certify(model_of("bf16", dtype=torch.float32), WORK, "test", lambda text: None)
    assert not any(link.ok for link in result.links if link.link != "s")  # s trains on both sides


def test_a_router_with_nan_ends_in_the_named_error() -> None:
    model = model_of("fp8")
    with torch.no_grad():
        model.get_parameter("layers.1.mlp.router.weight")[2, 5] = float("nan")
    model.publish()
    with pytest.raises(FloatingPointError, match="the model gave logits that are not finite, in rows"):
        certify(model, WORK, "test", lambda text: None)


@pytest.mark.parametrize(
    ("precision", "want"), [("bf16", "199cae6f63f6261c fcd782c7e513af49"), ("fp8", "f32d3945b04164a0 bcf401d0aaf42fbc")]
)
def test_bits_on_any_machine(precision: str, want: str) -> None:
    """Weights made of integers, no random generator: log-probs and published weights have these hashes."""
    model = Transformer(SPEC, build_recipe(precision, SPEC.num_layers))
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            values = (torch.arange(p.numel(), dtype=torch.int64) * 48271 + 7919 * i) % 2003 - 1001
            p.copy_((values.double() / 8008 if p.ndim == 2 else 1 + values.double() / 4004).view_as(p))
        hidden = model.publish()(varlen([torch.arange(25) * 17 % 53, torch.arange(15) * 11 % 53]))
        logprobs = log_softmax(model.logits(hidden)).numpy()
    digest = hashlib.sha256(np.ascontiguousarray(logprobs, dtype="<f4").tobytes()).hexdigest()[:16]
    assert f"{digest} {checksum(published(model))}" == want


# ---- gradients ------------------------------------------------------------------------------------------------------


def gradients(model: Transformer, tokens: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    hidden = model(varlen([tokens]))
    model.token_logprobs(hidden[:-1], tokens[1:], 1.0)[0].sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("step", [1, 2])
def test_values_and_gradients_are_those_of_transformers(tmp_path: Path, normalized: bool, step: int) -> None:
    """In FP32, where both agree to rounding."""
    from transformers import AutoModelForCausalLM

    spec = replace(SPEC, experts=replace(EXPERTS, normalized=normalized, step=step))
    model, tokens = model_of("bf16", spec, torch.float32), tokens_of(40)
    hf.save_model(tmp_path / "m", spec, model.state_dict(), dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32)
    want = theirs(tokens[None]).logits[0].log_softmax(-1)
    with torch.no_grad():
        assert (log_softmax(model.logits(model(varlen([tokens])))) - want).abs().max() < 1e-4
    ours = gradients(model, tokens)
    want[torch.arange(39), tokens[1:]].sum().backward()
    expected = {name: p.grad for name, p in theirs.named_parameters()}
    for layer in spec.expert_layers:  # transformers holds the experts of a layer as one tensor
        at = f"model.layers.{layer}.mlp.experts."
        gate_up, down = expected.pop(f"{at}gate_up_proj"), expected.pop(f"{at}down_proj")
        for e in range(EXPERTS.count):
            expected[f"{at}{e}.gate_proj.weight"], expected[f"{at}{e}.up_proj.weight"] = gate_up[e].chunk(2)
            expected[f"{at}{e}.down_proj.weight"] = down[e]
    for name, pieces in hf.tensor_table(spec).items():
        wanted = torch.cat([expected.pop(piece.name) for piece in pieces])
        assert (ours[name] - wanted).norm() < 1e-4 * wanted.norm(), name
    assert not expected


def test_fp8_gradients_are_near_those_of_bf16_and_of_fp32() -> None:
    tokens = tokens_of(60)
    fp32, bf16, fp8 = (
        gradients(model_of(p, dtype=t), tokens)
        for p, t in (("bf16", torch.float32), ("bf16", torch.bfloat16), ("fp8", torch.bfloat16))
    )
    assert fp32.keys() == bf16.keys() == fp8.keys() and "layers.0.mlp.router.weight" in fp8
    for name, exact in fp32.items():
        assert (bf16[name] - exact).norm() < 0.35 * exact.norm(), name
        assert not torch.equal(fp8[name], bf16[name]) and torch.nn.functional.cosine_similarity(
            fp8[name].flatten(), exact.flatten(), dim=0
        ) > 0.7, name


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_gradients_added_in_place_are_those_of_autograd(precision: str) -> None:
    tokens, model = tokens_of(40), model_of(precision)
    plain = gradients(model, tokens)
    accumulate_in(model, torch.float32)
    for name, grad in gradients(model, tokens).items():
        assert_bitwise_equal(grad, plain[name], name)


class Sink:
    """Takes gradients as ranks do: whole matrices, and word when each is complete."""

    def __init__(self) -> None:
        self.held: dict[Gradient, Tensor] = {}
        self.complete: list[Gradient] = []

    def buffer(self, gradient: Gradient) -> Tensor:
        return self.held.setdefault(gradient, torch.zeros(gradient.param.shape))

    def done(self, gradient: Gradient) -> None:
        self.complete.append(gradient)


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_a_sink_gets_each_matrix_once_and_hears_of_it(precision: str) -> None:
    tokens, model, sink = tokens_of(40), model_of(precision), Sink()
    plain = gradients(model, tokens)
    matrices = {name: m.gradient for name, m in masters_of(model).items() if m.param.ndim == 2}
    with sent_to(sink, matrices.values()):
        assert gradients(model, tokens).keys() == plain.keys() - matrices.keys()
    for name, p in matrices.items():
        assert_bitwise_equal(sink.held[p], plain[name], name)
        assert sum(other is p for other in sink.complete) == 1, name


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_activation_checkpointing_changes_no_bit_and_routes_are_noted_once(precision: str) -> None:
    tokens, model = tokens_of(40), model_of(precision)
    plain, routes = gradients(model, tokens), Routes()
    model.activation_checkpointing = True
    model.zero_grad()
    hidden = model(varlen([tokens]), routes=routes)
    noted = dict(routes.logits)
    model.token_logprobs(hidden[:-1], tokens[1:], 1.0)[0].sum().backward()
    for name, p in model.named_parameters():
        assert_bitwise_equal(p.grad, plain[name], name)
    assert noted.keys() == {0, 1} and all(routes.logits[i] is noted[i] for i in noted)


def test_frozen_experts_get_no_gradient() -> None:
    model, tokens = model_of("fp8"), tokens_of(20)
    frozen = [n for n, _ in model.named_parameters() if ".gate_up." in n or ".router." in n]
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    assert gradients(model, tokens).keys() == dict(model.named_parameters()).keys() - set(frozen)


# ---- weights --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [SPEC, MIXED], ids=["all", "mixed"])
def test_folders_of_several_files_and_models_without_masters(spec: ModelSpec, tmp_path: Path) -> None:
    model = model_of("fp8", spec)
    hf.save_model(tmp_path / "m", spec, model.state_dict(), dtype=torch.float32, max_shard_bytes=300_000)
    assert len(list((tmp_path / "m").glob("*.safetensors"))) > 2 and hf.spec_from_folder(tmp_path / "m") == spec
    bare = Transformer(spec, model.recipe, master_dtype=None).publish_values(hf.parameters_of(tmp_path / "m", spec))
    assert checksum(published(bare)) == checksum(published(model))
    batch = varlen([tokens_of(30)])
    with torch.no_grad():
        assert_bitwise_equal(bare(batch), model(batch), "hidden states of the model that came back")
    held = sum(t.untyped_storage().nbytes() for m in bare.published_modules() for t in (
        (m.quantized.codes, m.quantized.scale, m.published) if getattr(m, "quantized", None) else (m.published,)))
    assert held == published_bytes(spec, model.recipe)


def test_a_checkpoint_without_one_experts_tensor_is_refused_by_name(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    hf.save_model(tmp_path / "m", SPEC, model_of("bf16").state_dict())
    file = tmp_path / "m" / hf.SINGLE
    name = "model.layers.1.mlp.experts.4.up_proj.weight"
    save_file({k: v for k, v in load_file(file).items() if k != name}, file)
    with pytest.raises(UserError, match=rf"lacks {name} for the qwen3_moe model"):
        hf.load_state(tmp_path / "m", SPEC)


def test_experts_are_exported_in_fp8_with_the_codes_that_were_published(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    spec = replace(SPEC, hidden_size=128, head_dim=64, experts=replace(EXPERTS, intermediate_size=128))
    model = model_of("fp8", spec)
    hf.save_model(tmp_path / "m", spec, model.state_dict(), dtype=torch.float32)
    file = load_file(export(tmp_path / "m", tmp_path / "fp8", True, model.recipe) / hf.SINGLE)
    for name in ("gate_proj", "up_proj", "down_proj"):
        name = f"model.layers.1.mlp.experts.5.{name}.weight"
        held = published(model)[name]
        assert held.scales is not None
        assert_bitwise_equal(held.values.view(torch.uint8), file[name].view(torch.uint8), name)
        assert_bitwise_equal(held.scales, file[name + "_scale_inv"], name)
    if find_spec("accelerate"):  # transformers needs it to load FP8 folders; it joins a layer's experts
        from transformers import AutoModelForCausalLM

        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "fp8", dtype=torch.bfloat16, device_map="cpu")
        want = model.layers[1].mlp.gate_up.quantized
        assert torch.equal(
            theirs.get_parameter("model.layers.1.mlp.experts.gate_up_proj").flatten(0, 1), dequantize(want).bfloat16()
        )
    router = "model.layers.0.mlp.gate"
    assert file[f"{router}.weight"].dtype == torch.bfloat16 and published(model)[f"{router}.weight"].scales is None
    assert router in quantization_config(spec, model.recipe)["modules_to_not_convert"]


class Pretend(World):
    """A rank whose others give nothing: their rows stay as they are."""

    def gather_rows(self, whole: Tensor, rows: Sequence[int]) -> None:
        assert sum(rows) == len(whole) and whole.is_contiguous()


def test_ranks_own_whole_blocks_of_experts_and_quantize_them_alone() -> None:
    whole = model_of("fp8")
    state = whole.state_dict()
    for rank in range(2):
        model = model_of("fp8")
        shard_model(model, Pretend(rank, 2))
        model.publish()
        layer, full = model.layers[0].mlp, whole.layers[0].mlp
        # 6 experts with gate and up of one block each: three experts a rank; the router's 6 rows are one block
        own, rows = slice(rank * 3 * 144, (rank + 1) * 3 * 144), slice(rank * 6, rank * 6 + 6)
        assert_bitwise_equal(layer.gate_up.weight.data, state["layers.0.mlp.gate_up.weight"][own])
        codes, mine = full.gate_up.quantized, layer.gate_up.quantized
        assert_bitwise_equal(mine.codes[own].view(torch.uint8), codes.codes[own].view(torch.uint8))
        assert_bitwise_equal(mine.scale[rows], codes.scale[rows])
        assert len(layer.router.weight) == (6, 0)[rank]


def test_publishing_again_is_read_by_experts_and_router() -> None:
    """What GEMMs have prepared is renewed with every publish."""
    model, batch = model_of("fp8"), varlen([tokens_of(20)])
    with torch.no_grad():
        before = model(batch)
        for name in ("router", "gate_up", "down"):
            model.get_parameter(f"layers.0.mlp.{name}.weight").mul_(-1.5)
            model.publish()
            after = model(batch)
            assert not torch.equal(before, after), name
            before = after
        again = Transformer(SPEC, model.recipe)
        again.load_state_dict(model.state_dict())
        assert_bitwise_equal(again.publish()(batch), before)
