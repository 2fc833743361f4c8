"""Latent attention and DeepSeek's experts in models (`latent_attention`, `deepseek_moe`)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from enlarged import enlarged
from tolerances import assert_bitwise_equal
from torch import Tensor

from jetrl.engine.state_pool import StatePool, page_bytes
from jetrl.errors import UserError
from jetrl.huggingface import read as hf
from jetrl.huggingface.export import export, quantization_config
from jetrl.kernels.attention import latent_reference
from jetrl.kernels.attention.latent import apart
from jetrl.kernels.dispatch import load_backend
from jetrl.model.deepseek_moe import DeepSeekMoE
from jetrl.model.latent_attention import LatentAttention
from jetrl.model.master import masters_of
from jetrl.model.sharding import fill, shard_model
from jetrl.model.transformer import Transformer
from jetrl.model.weights import checksum, published, published_bytes
from jetrl.parallel.world import World
from jetrl.parity.certificate import Workload, certify
from jetrl.parity.rows import varlen
from jetrl.precision.flow import build_flow
from jetrl.precision.formats import BF16
from jetrl.precision.recipe import build_recipe
from jetrl.run.fit.memory import sizes_of
from jetrl.spec import SHAPES, ModelSpec
from jetrl.types import ForwardBatch

V3 = replace(SHAPES["tiny-mla"], num_layers=2, vocab_size=53)  # q_lora, groups, YaRN, a shared expert, a dense layer
EXPERTS = replace(V3.experts, deepseek=replace(V3.experts.deepseek, groups=1, kept_groups=1, shared=2))
MOONLIGHT = replace(V3, latent=replace(V3.latent, query_rank=None), experts=EXPERTS)
SOFTMAX = replace(EXPERTS, normalized=False, deepseek=replace(EXPERTS.deepseek, sigmoid=False, bias=False, scaling=1.5))
V2 = replace(MOONLIGHT, family="deepseek_v2", experts=SOFTMAX)
WORK = Workload(num_sequences=4, max_prompt=20, new_tokens=6, chunk=5, page_size=4)


def model_of(precision: str, spec: ModelSpec = V3, dtype: torch.dtype = torch.bfloat16, **more: Any) -> Transformer:
    return enlarged(spec, build_recipe(precision, spec.num_layers, **more), dtype)


def loss_of(model: Transformer, batch: ForwardBatch) -> Tensor:
    """A sum over the hidden states with fixed weights."""
    hidden = model(batch).double()
    return (hidden * torch.randn(hidden.shape, generator=torch.Generator().manual_seed(3))).sum() / 100


def tokens_of(count: int) -> Tensor:
    return torch.randint(53, (count,), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(
    ("precision", "spec", "more"),
    [("bf16", V3, {}), ("fp8", V3, {}), ("fp8", MOONLIGHT, {"wgrad": "tile"}), ("bf16", V2, {}), ("fp8", V2, {}),
     ("w8a16", MOONLIGHT, {})],
    ids=["v3 bf16", "v3 fp8", "moonlight fp8", "v2 bf16", "v2 fp8", "moonlight w8a16"],
)
def test_rollout_equals_training_bit_for_bit(precision: str, spec: ModelSpec, more: dict[str, Any]) -> None:
    """Packed and alone, chunks through pages, decoding with preemption, drafts, shared prompts."""
    result = certify(model_of(precision, spec, **more), WORK, "test", lambda text: None)
    assert result.ok, result.links
    assert [link.link for link in result.links] == [*"abcvsw"]


def test_other_roundings_on_one_side_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training attends in FP32, the rollout in BF16."""
    plain = latent_reference.latent_attend

    def other(q: Tensor, row: Tensor, plan: Any, scale: float, sizes: Any, need_lse: bool) -> Any:
        out, lse = plain(q.float(), row.float(), plan, scale * (1 + 2**-7), sizes, need_lse)
        return out.to(q.dtype), lse

    monkeypatch.setattr(load_backend("reference"), "latent_attend", other)
    result = certify(model_of("bf16"), WORK, "test", lambda text: None)
    assert [link.link for link in result.links if not link.ok] == ["b", "c", "v", "w"]
    assert "first operator that differs is layers.0.attention" in result.links[1].first_difference


def test_taps_have_the_names_of_the_flow() -> None:
    names: list[str] = []
    with torch.no_grad():
        model_of("fp8")(varlen([tokens_of(9)]), lambda name, value: names.append(name) or len(value) == 9)
    graph = build_flow(V3, build_recipe("fp8", 2), "train_forward").node_map()
    assert set(names) <= graph.keys()
    own = [name.removeprefix("layers.1.") for name in names if name.startswith("layers.1.")]
    assert own == [
        "attn_norm", "q_kv_a", "q_a_norm", "q_b", "kv_a_norm", "rope_k", "rope_q", "absorb", "attention", "lift", "o",
        "mlp_norm", "router", "route", "dispatch", "gate_up", "swiglu", "down", "shared_gate_up", "shared_swiglu",
        "shared_down", "combine",
    ]


def test_pairs_side_by_side_come_apart() -> None:
    assert apart(torch.arange(6.0)[None]).tolist() == [[0, 2, 4, 1, 3, 5]]


@pytest.mark.parametrize("spec", [V3, MOONLIGHT, V2], ids=["v3", "moonlight", "v2"])
def test_gradients_follow_the_loss(spec: ModelSpec) -> None:
    """Every parameter has a gradient, and in FP32 a small step along it changes the loss as it says."""
    model, batch = model_of("bf16", spec, torch.float32), varlen([tokens_of(12), tokens_of(5)])
    trained = {name: m.param for name, m in masters_of(model).items() if not m.frozen}

    loss_of(model, batch).backward()
    without = [name for name, p in trained.items() if p.grad is None or not p.grad.any()]
    assert without == ["lm_head.weight"]
    checked = ("kv_b", "q_kv_a", "q_b", "kv_a_norm", "q_a_norm", "shared_gate_up", "router", "o")
    for name in checked:
        of = [p for n, p in trained.items() if f".{name}." in n]
        if not of:
            assert name in ("q_b", "q_a_norm") and spec.latent.query_rank is None, name
            continue
        grads = [p.grad.clone() for p in of]
        size = sum(float(g.square().sum()) for g in grads) ** 0.5
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                for p, g in zip(of, grads, strict=True):
                    p.add_(g, alpha=sign * 2e-4 / size)
                model.publish()
                values.append(float(loss_of(model, batch)))
                for p, g in zip(of, grads, strict=True):
                    p.add_(g, alpha=-sign * 2e-4 / size)
        assert (values[0] - values[1]) / 4e-4 == pytest.approx(size, rel=0.05), name


@pytest.mark.parametrize("spec", [V3, MOONLIGHT], ids=["v3", "moonlight"])
def test_fp8_gradients_point_where_bf16_ones_do(spec: ModelSpec) -> None:
    batch, found = varlen([tokens_of(40)]), []
    for precision in ("bf16", "fp8"):
        model = model_of(precision, spec)
        loss_of(model, batch).backward()
        found.append({name: p.grad.flatten() for name, p in model.named_parameters() if p.grad is not None})
    for name, exact in found[0].items():
        if not name.endswith("router.weight"):  # other experts for a token move whole rows
            cosine = torch.nn.functional.cosine_similarity(exact.double(), found[1][name].double(), dim=0)
            assert cosine > 0.8, (name, float(cosine))


def test_the_bias_is_fp32_frozen_and_decides(tmp_path: Path) -> None:
    model = model_of("fp8")
    (block,) = [m for m in model.modules() if isinstance(m, DeepSeekMoE)]
    assert model.frozen() == ["layers.1.mlp.router_bias.weight"] and model.holds_masters
    assert block.router_bias.published.dtype == torch.float32
    logits = torch.zeros(1, 16)
    bias = torch.zeros(16)
    bias[7] = 6.817 + 2**-18  # BF16 would not hold it
    block.router_bias.publish_value("weight", bias)
    assert block.choose(logits)[0][0, 0] == 7 and block.router_bias.published[7] == bias[7]
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert published(model)[name].values.dtype == torch.float32
    before = checksum(published(model))
    bias[7] += 2**-18
    block.router_bias.publish_value("weight", bias)
    assert checksum(published(model)) != before
    block.router.publish()  # an update changes nothing of it
    assert block.router_bias.published[7] == bias[7]


def test_folders_hold_the_model(tmp_path: Path) -> None:
    """Written, read, exported in BF16: the bias to its last bit, and the log-probs."""
    model = model_of("bf16")
    (block,) = [m for m in model.modules() if isinstance(m, DeepSeekMoE)]
    block.router_bias.publish_value("weight", torch.linspace(6.8, 7.0, 16))
    model.requires_grad_(False)
    frozen = {"layers.1.mlp.router_bias.weight": block.router_bias.published}
    state = {name: frozen.get(name, m.param.detach()).clone() for name, m in masters_of(model).items()}
    hf.save_model(tmp_path / "a", V3, state)
    export(tmp_path / "a", tmp_path / "b", fp8=False)
    batch = varlen([tokens_of(9)])
    for folder in ("a", "b"):
        spec = hf.spec_from_folder(tmp_path / folder)
        assert spec == V3
        other = Transformer(spec, build_recipe("bf16", 2))
        fill(other, ((name, value.float()) for name, value in hf.parameters_of(tmp_path / folder, spec)))
        assert_bitwise_equal(other.publish()(batch), model(batch))
    with pytest.raises(UserError, match="FP8 export needs sizes that are multiples of 128"):
        export(tmp_path / "a", tmp_path / "c", fp8=True)


def test_what_stays_bf16_is_named_in_fp8_exports() -> None:
    kept = quantization_config(V3, build_recipe("fp8", 2))["ignored_layers"]
    assert "model.layers.1.self_attn.kv_b_proj" in kept and "model.layers.1.mlp.gate" in kept
    assert "model.layers.1.self_attn.kv_a_proj_with_mqa" not in kept


def test_a_token_takes_one_row_of_the_cache() -> None:
    spec = SHAPES["moonlight-16b-a3b"]
    assert page_bytes(spec, 1, torch.bfloat16, BF16) == 27 * 1152
    pool = StatePool(replace(V3, num_layers=3), 5, 4, torch.bfloat16, torch.device("cpu"))
    assert pool.state(2, "latent").shape == (5, 4, V3.latent.row) and pool.num_bytes == 3 * 5 * 4 * 176 * 2


def test_sizes_of_the_published_models() -> None:
    """Totals as on the models' cards, in billions."""
    for name, total in (("moonlight-16b-a3b", 15.96), ("deepseek-v2-lite", 15.71), ("glm-4.7-flash", 29.94)):
        spec = SHAPES[name]
        sizes = sizes_of(spec, build_recipe("fp8", spec.num_layers))
        assert (sum(m.size for m in sizes.matrices) + sum(sizes.vectors)) / 1e9 == pytest.approx(total, abs=0.006), name
    spec = SHAPES["moonlight-16b-a3b"]
    assert published_bytes(spec, build_recipe("fp8", 27)) < 18 * 2**30


def test_ranks_hold_rows_of_its_matrices() -> None:
    model = model_of("bf16", MOONLIGHT)
    assert any(isinstance(m, LatentAttention) for m in model.modules())
    shard_model(model, World(1, 2))
    rows = masters_of(model)["layers.0.attn.kv_b.weight"]
    assert rows.whole_shape() == (6 * 80, 160) and len(rows.param) < 6 * 80
