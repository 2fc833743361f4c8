"""A block of one's own: an MLP with a squared ReLU (the Arcee family), defined and registered in this file alone.

`down(relu(up(x)) ** 2)` has other linears, operators and tensors than `MLP`. Three entries bring it to life: the
family's layers (`layouts.LAYOUTS`), its module (`model.blocks.MODULES`), and, to read and write folders, what
`model_type` says (`huggingface.config.FAMILIES`).
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from enlarged import enlarged
from tolerances import assert_bitwise_equal
from torch import Tensor

from jetrl.huggingface import read as hf
from jetrl.huggingface.config import FAMILIES, Family
from jetrl.huggingface.export import export, fp8_weights
from jetrl.kernels.logprob.ops import log_softmax
from jetrl.model.block import Block, Build, Context, Piece, Tap
from jetrl.model.blocks import MODULES
from jetrl.model.transformer import Transformer
from jetrl.model.weights import checksum, published
from jetrl.parity.certificate import Workload, certify
from jetrl.parity.rows import varlen
from jetrl.precision.blocks.block import Block as FlowBlock
from jetrl.precision.blocks.block import Linear
from jetrl.precision.blocks.layouts import ATTENTION, LAYOUTS, dense, roles_of
from jetrl.precision.builder import BlockBackward, BlockForward
from jetrl.precision.flow import build_flow, flow_digest, require_unified
from jetrl.precision.picture.draw import flow_svg, flow_text
from jetrl.precision.recipe import Role, build_recipe
from jetrl.spec import ModelSpec, RopeSpec

SPEC = ModelSpec(
    family="arcee", vocab_size=53, hidden_size=72, intermediate_size=136, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=16, rms_norm_eps=1e-6, rope=RopeSpec(1e4), max_position=64, tie_embeddings=False, qkv_bias=False,
    qk_norm=False,
)


class SquaredReLUFlow(FlowBlock):
    kind, name = "squared_relu", "mlp"
    roundings = {
        "squared_relu": "fp32 product, rounded once to bf16",
        "squared_relu_backward": "fp32 product, rounded once to bf16",
    }
    formulas = {"squared_relu": "max(x, 0)²"}

    def linears(self, spec: ModelSpec) -> Mapping[Role, Linear]:
        return {
            "up": Linear((spec.intermediate_size,), spec.hidden_size),
            "down": Linear((spec.hidden_size,), spec.intermediate_size, writes_residual=True),
        }

    def forward(self, flow: BlockForward, x: str) -> str:
        return flow.linear("down", flow.op("squared_relu", "squared_relu", {"x": flow.linear("up", x)}))

    def backward(self, flow: BlockBackward, dy: str) -> str:
        dx = flow.linear("down", dy, "squared_relu")
        dx = flow.op("squared_relu.dgrad", "squared_relu_backward", {"dy": dx, "x": flow.saved("up")})
        return flow.linear("up", dx, "mlp_norm")


class SquaredReLU(Block):
    def __init__(self, build: Build) -> None:
        super().__init__(build)
        self.up = build.linear("up")
        self.down = build.linear("down")

    def forward(self, x: Tensor, residual: Tensor | None, context: Context, tap: Tap) -> tuple[Tensor, Tensor]:
        side = context.batch.side
        y, residual = self.add_norm(x, residual, tap)
        for name, op in (
            ("up", lambda t: self.up(t, side)), ("squared_relu", squared_relu), ("down", lambda t: self.down(t, side)),
        ):
            y = op(y)
            tap(f"{self.at}.{name}", y)
        return y, residual

    def infer(self, x: Tensor, residual: Tensor | None, context: Context) -> tuple[Tensor, Tensor]:
        side = context.batch.side
        normed, residual = self.add_norm_for(self.up, x, residual, side)
        return self.down.infer(squared_relu(self.up.infer(normed, side)), side), residual

    @staticmethod
    def checkpoint_names(spec: ModelSpec, layer: int) -> dict[str, tuple[Piece, ...]]:
        D, F, at = spec.hidden_size, spec.intermediate_size, f"model.layers.{layer}."
        return {
            "norm.weight": (Piece(f"{at}post_attention_layernorm.weight", (D,)),),
            "up.weight": (Piece(f"{at}mlp.up_proj.weight", (F, D)),),
            "down.weight": (Piece(f"{at}mlp.down_proj.weight", (D, F)),),
        }


def squared_relu(x: Tensor) -> Tensor:
    return x.float().relu().square().to(x.dtype)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that another file needs to know."""
    blocks = (ATTENTION, SquaredReLUFlow())
    monkeypatch.setitem(LAYOUTS, "arcee", lambda spec, layer: blocks)
    monkeypatch.setitem(MODULES, "squared_relu", SquaredReLU)
    written = {"attention_bias": False, "mlp_bias": False}
    monkeypatch.setitem(FAMILIES, "arcee", Family("ArceeForCausalLM", 4096, written, hidden_act="relu2"))


def model_of(precision: str, spec: ModelSpec = SPEC, dtype: torch.dtype = torch.bfloat16) -> Transformer:
    return enlarged(spec, build_recipe(precision, spec.num_layers), dtype)


def tokens_of(count: int) -> Tensor:
    return torch.randint(SPEC.vocab_size, (count,), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_its_flow_is_built_compared_and_drawn(precision: str) -> None:
    recipe = build_recipe(precision, SPEC.num_layers)
    require_unified(SPEC, recipe)
    assert roles_of(SPEC) == ("qkv", "o", "up", "down")
    forward, backward = build_flow(SPEC, recipe, "train_forward"), build_flow(SPEC, recipe, "train_backward")
    parameters = {node.name for node in forward.nodes if node.op == "parameter"}
    assert parameters == {e.name.removeprefix("optimizer.") for e in backward.edges if e.target == "optimizer"}
    edges = forward.edge_map()
    assert edges["layers.1.squared_relu.x"].source == "layers.1.up"
    assert edges["layers.1.mlp_add.residual"].source == "layers.1.attn_add"
    assert flow_digest(SPEC, recipe) != flow_digest(replace(SPEC, family="llama"), recipe)
    words = [e.text or "" for e in ET.fromstring(flow_svg(SPEC, recipe)).iter("{http://www.w3.org/2000/svg}text")]
    assert "max(x, 0)² → bf16" in words and "up.wgrad" in words and not any("gate" in word for word in words)
    assert "squared_relu" in flow_text(SPEC, recipe) and "swiglu" not in flow_text(SPEC, recipe)


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_rollout_equals_training_bit_for_bit(precision: str) -> None:
    """Packed against alone, prefill in chunks through pages, decoding with preemption."""
    work = Workload(num_sequences=4, max_prompt=20, new_tokens=6, chunk=5, page_size=4)
    result = certify(model_of(precision), work, "test", lambda text: None)
    assert result.ok, result.links
    assert [link.link for link in result.links] == ["a", "b", "c", "v", "s", "w"]


def test_fp8_rollout_is_told_apart() -> None:
    assert not certify(model_of("fp8_rollout"), Workload(4, 20, 6, 5, 4), "test", lambda text: None).ok


def test_taps_have_the_names_of_the_flow() -> None:
    names: list[str] = []
    with torch.no_grad():
        model_of("fp8")(varlen([tokens_of(9)]), lambda name, value: names.append(name))
    graph = build_flow(SPEC, build_recipe("fp8", SPEC.num_layers), "train_forward").node_map()
    assert names[-4:] == [f"layers.1.{n}" for n in ("up", "squared_relu", "down")] + ["norm"]
    assert set(names) <= graph.keys()


def test_a_folder_goes_out_and_comes_back(tmp_path: Path) -> None:
    model = model_of("fp8")
    hf.save_model(tmp_path / "m", SPEC, model.state_dict(), dtype=torch.float32)
    spec = hf.spec_from_folder(tmp_path / "m")
    assert spec == SPEC
    again = Transformer(spec, model.recipe)
    again.load_state_dict(hf.load_state(tmp_path / "m", spec))
    batch = varlen([tokens_of(30)])
    with torch.no_grad():
        assert_bitwise_equal(again.publish()(batch), model(batch), "hidden states of the model that came back")
    assert checksum(published(again)) == checksum(published(model))


def test_its_fp8_weights_are_exported_and_published(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    spec = replace(SPEC, hidden_size=128, intermediate_size=256, head_dim=64)
    model = model_of("fp8", spec)
    assert fp8_weights(spec, model.recipe)[:4] == [
        "layers.0.attn.qkv.weight", "layers.0.attn.o.weight", "layers.0.mlp.up.weight", "layers.0.mlp.down.weight",
    ]
    hf.save_model(tmp_path / "m", spec, model.state_dict(), dtype=torch.float32)
    file = load_file(export(tmp_path / "m", tmp_path / "fp8", True, model.recipe) / hf.SINGLE)
    name = "model.layers.1.mlp.up_proj.weight"
    held = published(model)[name]
    assert held.scales is not None
    assert_bitwise_equal(held.values.view(torch.uint8), file[name].view(torch.uint8), "codes")
    assert_bitwise_equal(held.scales, file[name + "_scale_inv"], "scales")


def test_values_and_gradients_are_those_of_transformers(tmp_path: Path) -> None:
    """In FP32, where both agree to rounding."""
    from transformers import AutoModelForCausalLM

    model, tokens = model_of("bf16", dtype=torch.float32), tokens_of(40)
    hf.save_model(tmp_path / "m", SPEC, model.state_dict(), dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32)
    want = theirs(tokens[None]).logits[0].log_softmax(-1)
    hidden = model(varlen([tokens]))
    with torch.no_grad():
        assert (log_softmax(model.logits(hidden)) - want).abs().max() < 1e-4
    model.token_logprobs(hidden[:-1], tokens[1:], 1.0)[0].sum().backward()
    want[torch.arange(39), tokens[1:]].sum().backward()
    expected = {name: p.grad for name, p in theirs.named_parameters()}
    for ours, pieces in hf.tensor_table(SPEC).items():
        grad = model.get_parameter(ours).grad
        wanted = torch.cat([expected[piece.name] for piece in pieces])
        assert grad is not None and (grad - wanted).norm() < 1e-4 * wanted.norm(), ours


def test_other_families_keep_their_layers() -> None:
    assert LAYOUTS["qwen3"] is dense
    with pytest.raises(AssertionError, match="no layout for the family 'mamba'"):
        Transformer(replace(SPEC, family="mamba"), build_recipe("bf16", SPEC.num_layers))
