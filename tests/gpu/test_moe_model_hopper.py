"""Models with experts on a GPU: one sequence alone = packed = chunked = decoded, gradients, and certificates."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from jetrl.api import random_model
from jetrl.kernels.qtensor import QTensor
from jetrl.model import moe
from jetrl.model.linear import FlowLinear
from jetrl.model.master import accumulate_in
from jetrl.model.transformer import Transformer
from jetrl.parity.certificate import Workload, certify
from jetrl.precision.formats import kv_head
from jetrl.precision.recipe import Recipe
from jetrl.spec import SHAPES, ExpertSpec, ModelSpec, RopeSpec
from jetrl.types import ForwardBatch, VarlenPlan

pytestmark = pytest.mark.gpu
CUDA = "cuda"
# sizes that are no multiples of 128, with a dense layer between; and Qwen3-30B-A3B's, of two layers
ODD = ModelSpec(
    family="qwen3_moe", vocab_size=1003, hidden_size=456, intermediate_size=712, num_layers=3, num_heads=8,
    num_kv_heads=2, head_dim=64, rms_norm_eps=1e-6, rope=RopeSpec(1e4), max_position=2048, tie_embeddings=False,
    qkv_bias=False, qk_norm=True,
    experts=ExpertSpec(count=12, per_token=3, intermediate_size=200, normalized=False, dense_layers=(1,)),
)
SPECS = {"odd": ODD, "a3b": replace(SHAPES["qwen3-30b-a3b"], num_layers=2, vocab_size=8000)}
PRECISIONS = ["bf16", "fp8"]
FLOWS = [*PRECISIONS, "fp8 kv", "w8a16"]


def build(name: str, flow: str, masters: torch.dtype = torch.float32, **more: str) -> Transformer:
    spec = SPECS[name]
    recipe = Recipe(flow.removesuffix(" kv"), spec.num_layers, **more)
    if flow.endswith(" kv"):
        recipe = replace(recipe, kv_cache=kv_head(spec.head_dim))
    with torch.device(CUDA):
        model = Transformer(spec, recipe)
        generator = torch.Generator(CUDA).manual_seed(3)
    model = model.to(CUDA)
    with torch.no_grad():
        for p in model.parameters():  # routers that prefer some experts, norms that do something
            p.normal_(0, 0.04, generator=generator) if p.ndim == 2 else p.normal_(1, 0.1, generator=generator)
            p.data = p.data.to(masters)
    return model.publish()


def packed(model: Transformer, lengths: tuple[int, ...]) -> tuple[ForwardBatch, Tensor]:
    g = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.spec.vocab_size, (sum(lengths),), generator=g).to(CUDA)
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=CUDA)
    positions = torch.cat([torch.arange(n) for n in lengths]).to(CUDA)
    return ForwardBatch(tokens, positions, VarlenPlan(cu, lengths), "train"), tokens.roll(-1)


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("name", list(SPECS))
def test_certificate(name: str, flow: str) -> None:
    """All links, decoding in CUDA graphs included: 0 rows differ."""
    work = Workload(24, max_prompt=240, new_tokens=12, chunk=64, page_size=128, step_tokens=2048)
    certificate = certify(build(name, flow), work, name, lambda text: None)
    told = certificate.to_json()
    assert told["bit_equal"], told["links"]


@pytest.mark.parametrize("name", list(SPECS))
def test_taps_see_the_same_rows_as_fused_kernels(name: str) -> None:
    """Op by op, with gradients (tiles of 128), and the fused pass (tiles by load): the same hidden state."""
    model = build(name, "fp8")
    batch, _ = packed(model, (40, 3))
    seen: dict[str, Tensor] = {}
    with torch.no_grad():
        tapped = model(batch, tap=lambda n, v: seen.__setitem__(n, v))
        fused = model(batch)
    assert torch.equal(tapped, fused)
    assert torch.equal(model(batch).detach(), fused), "with gradients"
    k, d = model.spec.experts.per_token, model.spec.hidden_size
    assert seen["layers.0.dispatch"].shape == (43, k * d)
    assert torch.equal(seen["layers.0.dispatch"].view(43, k, d)[:, 1], seen["layers.0.mlp_norm"])


def values_of(q: QTensor) -> Tensor:
    """`reference.dequantize`, on the device."""
    scale = q.scale
    for dim, blocks in enumerate((q.row_blocks(), q.col_blocks())):
        scale = scale.repeat_interleave(torch.tensor([b - a for a, b in blocks], device=scale.device), dim)
    return q.codes.to(torch.float32) * scale


def learned(model: Transformer, lengths: tuple[int, ...]) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs and gradients."""
    model.zero_grad()
    batch, targets = packed(model, lengths)
    logp, entropy = model.token_logprobs(model(batch), targets, 1.0)
    (-logp.mean() - 0.01 * entropy.mean()).backward()
    return logp.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}


def gradients(model: Transformer) -> dict[str, Tensor]:
    return learned(model, (150, 77, 420))[1]


@pytest.mark.parametrize("masters", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", list(SPECS))
def test_gradients_repeat_and_agree_with_bf16(name: str, masters: torch.dtype) -> None:
    """The measure is what weights of FP8 alone do to BF16's gradients: other experts for some tokens, and sums that
    nearly cancel (q_norm), amplify rounding by a factor of the model. FP8 rounds twice as many operands, so the cosine
    is about twice as far from 1: 0.9 to 1.9 times in small models on a CPU. A wrong gradient is many times as far.
    """
    results, models = {}, {}
    for precision in PRECISIONS:
        models[precision] = build(name, precision, masters)
        accumulate_in(models[precision], masters)
        first, second = gradients(models[precision]), gradients(models[precision])
        for p_name in first:
            assert first[p_name].isfinite().all() and first[p_name].abs().max() > 0, p_name
            assert torch.equal(first[p_name], second[p_name]), f"{precision} {p_name} is not the same twice"
        results[precision] = first
    quantized = dict(models["fp8"].named_modules())
    with torch.no_grad():
        for at, layer in models["bf16"].named_modules():
            if isinstance(layer, FlowLinear) and (q := quantized[at].quantized) is not None:
                layer.weight.copy_(values_of(q))
    rounded = gradients(models["bf16"].publish())
    wrong = []
    for p_name, want in results["bf16"].items():
        want = want.flatten().double()
        got, measure = results["fp8"][p_name].flatten().double(), rounded[p_name].flatten().double()
        off, least = (1 - torch.nn.functional.cosine_similarity(x, want, dim=0).item() for x in (got, measure))
        size = (got.norm() / want.norm()).item()
        if off > 4 * least + 0.002 or not 0.8 < size < 1.25:
            wrong.append(f"{p_name}: 1 - cosine {off:.4f}, by weights alone {least:.4f}, size {size:.3f}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("wgrad", ["row", "tile"])
@pytest.mark.parametrize("masters", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", list(SPECS))
def test_the_fused_experts_have_the_bits_of_separate_ops(
    name: str, masters: torch.dtype, wgrad: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probs and all gradients, with groups that are empty, short and long, next to rows of padding."""
    model, plain = build(name, "fp8", masters, wgrad=wgrad), moe.fused_experts
    accumulate_in(model, torch.float32)
    calls: list[int] = []
    monkeypatch.setattr(moe, "fused_experts", lambda *given: calls.append(1) or plain(*given))
    for lengths in ((1, 2), (150, 77, 420), (2000,)):  # one after another: gradients of all experts are large
        with monkeypatch.context() as separate:
            separate.setattr(moe, "fused_experts_recipe", lambda *given: None)
            want_logp, want = learned(model, lengths)
        calls.clear()
        logp, grads = learned(model, lengths)
        assert len(calls) == len(SPECS[name].expert_layers)
        assert torch.equal(logp, want_logp) and logp.isfinite().all(), f"log-probs of {lengths}"
        wrong = [n for n in want if not torch.equal(grads[n], want[n])]
        assert not wrong, f"{lengths}: {wrong}"


def test_gradients_agree_with_the_cpu() -> None:
    """The definitions on a CPU, in BF16: the same model, tokens and loss."""
    found = {}
    for device in ("cpu", CUDA):
        model = build("odd", "bf16")
        weights = {n: p.detach().cpu() for n, p in model.named_parameters()}
        if device == "cpu":
            model = Transformer(ODD, Recipe("bf16", ODD.num_layers))
            with torch.no_grad():
                for n, p in model.named_parameters():
                    p.copy_(weights[n])
            model.publish()
        batch, targets = packed(model, (60, 17))
        plan = VarlenPlan(batch.plan.cu_seqlens.to(device), batch.plan.lengths)
        batch = ForwardBatch(batch.tokens.to(device), batch.positions.to(device), plan, "train")
        (-model.token_logprobs(model(batch), targets.to(device), 1.0)[0].mean()).backward()
        found[device] = {n: p.grad.cpu().flatten().double() for n, p in model.named_parameters()}
    for n, want in found["cpu"].items():
        cosine = torch.nn.functional.cosine_similarity(found[CUDA][n], want, dim=0).item()
        assert cosine > (0.9 if "router" in n else 0.97), f"{n}: cosine {cosine}"


def test_publishing_again_keeps_what_graphs_hold() -> None:
    for precision in PRECISIONS:
        model = build("a3b", precision)
        batch, _ = packed(model, (9,))
        with torch.no_grad():
            model(batch)
            block = model.layers[0].mlp
            held = [block.gate_up._operand(precision), block.router._operand]
            at = [t.data_ptr() for o in held for t in (getattr(o, n, None) for n in ("codes", "scale", "weight"))
                  if t is not None]
            for p in model.parameters():
                p.mul_(1.5)
        model.publish()
        held = [block.gate_up._operand(precision), block.router._operand]
        again = [t.data_ptr() for o in held for t in (getattr(o, n, None) for n in ("codes", "scale", "weight"))
                 if t is not None]
        assert at == again


def test_random_shape_by_name() -> None:
    model = random_model("qwen3-30b-a3b", "fp8", CUDA, 1, "fp8")
    assert model.spec.experts is not None and model.spec.experts.count == 128
