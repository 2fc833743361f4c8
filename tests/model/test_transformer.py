"""The model as a whole: publishing, checkpointing, accumulation over micro-batches, and rows that stand alone."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from tolerances import assert_bitwise_equal
from torch import Tensor

from jetrl.errors import UserError
from jetrl.huggingface import read as hf
from jetrl.kernels import reference
from jetrl.model.transformer import Transformer
from jetrl.model.weights import checksum, published
from jetrl.precision.formats import act_1x128
from jetrl.precision.recipe import Recipe, build_recipe
from jetrl.spec import ModelSpec, RopeSpec
from jetrl.types import ForwardBatch, VarlenPlan

SPEC = ModelSpec(
    family="qwen3", vocab_size=61, hidden_size=72, intermediate_size=136, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=16, rms_norm_eps=1e-6, rope=RopeSpec(1e4), max_position=64, tie_embeddings=True, qkv_bias=True,
    qk_norm=True,
)
LENGTHS = (20, 3, 1, 33, 12)


def model_of(precision: str = "fp8", spec: ModelSpec = SPEC, checkpointing: bool = False) -> Transformer:
    """`precision` with " kv8" behind it has an FP8 cache."""
    name, _, kv8 = precision.partition(" ")
    recipe = build_recipe(name, spec.num_layers, kv_cache="fp8" if kv8 else "bf16", head_dim=spec.head_dim)
    model = Transformer(spec, recipe, activation_checkpointing=checkpointing)
    model.init_random(1)
    with torch.no_grad():  # norms of one and biases of zero would hide what they do
        for p in model.parameters():
            if p.ndim == 1:
                p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())) * 0.2)
    return model.publish()


def sequences() -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(SPEC.vocab_size, (n,), generator=generator) for n in LENGTHS]


def batch_of(parts: list[Tensor]) -> ForwardBatch:
    lengths = tuple(len(p) for p in parts)
    plan = VarlenPlan(torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32), lengths)
    return ForwardBatch(torch.cat(parts), torch.cat([torch.arange(n) for n in lengths]), plan, "train")


def loss_of(model: Transformer, parts: list[Tensor], count: int) -> Tensor:
    """The parts' share of the mean negative log-prob of all sequences' next tokens."""
    batch = batch_of(parts)
    rows = torch.cat([torch.arange(len(p)) < len(p) - 1 for p in parts])
    logprobs, _ = model.token_logprobs(model(batch)[rows], batch.tokens.roll(-1)[rows], 0.8)
    return -logprobs.double().sum() / count


def gradients(model: Transformer, chunks: list[list[Tensor]]) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad(set_to_none=True)
    count = sum(len(p) - 1 for chunk in chunks for p in chunk)
    total = 0.0
    for chunk in chunks:
        loss = loss_of(model, chunk, count)
        loss.backward()
        total += loss.item()
    return total, {n: p.grad.clone() for n, p in model.named_parameters()}


def test_parameters_have_these_names_in_this_order() -> None:
    """The order counts: initial weights are drawn in it, optimizer states stored, and squares of gradients summed."""
    block = (
        "attn.norm.weight attn.qkv.weight attn.qkv.bias attn.q_norm.weight attn.k_norm.weight attn.o.weight "
        "mlp.norm.weight mlp.gate_up.weight mlp.down.weight"
    ).split()
    layers = [f"layers.{i}.{name}" for i in range(2) for name in block]
    names = [name for name, _ in model_of("fp8", replace(SPEC, tie_embeddings=False)).named_parameters()]
    assert names == ["embed.weight", *layers, "norm.weight", "lm_head.weight"]
    assert list(hf.tensor_table(SPEC)) == names[:-1]


def test_initial_weights() -> None:
    """The first of all numbers drawn go to the embedding; what writes the residual is scaled by 1 / sqrt(2 layers)."""
    model = Transformer(SPEC, build_recipe("bf16", SPEC.num_layers)).init_random(5)
    generator = torch.Generator().manual_seed(5)
    for name, p in model.named_parameters():
        if p.ndim == 1:
            assert bool((p == (0.0 if name.endswith("bias") else 1.0)).all()), name
        else:
            std = 0.01 if name.split(".")[-2] in ("o", "down") else 0.02  # sqrt(2 * 2) = 2
            assert_bitwise_equal(p.detach(), torch.randn(p.shape, generator=generator) * std, name)


@pytest.mark.parametrize("precision", ["bf16", "fp8", "fp8 kv8"])
def test_activation_checkpointing_changes_no_bit(precision: str) -> None:
    loss, plain = gradients(model_of(precision), [sequences()])
    again, recomputed = gradients(model_of(precision, checkpointing=True), [sequences()])
    assert loss == again
    for name, grad in plain.items():
        assert_bitwise_equal(recomputed[name], grad, name)
        assert float(grad.abs().sum()) > 0, f"{name} has no gradient at all"


def test_activation_checkpointing_keeps_less() -> None:
    def kept(checkpointing: bool) -> int:
        model, size = model_of("bf16", checkpointing=checkpointing), 0

        def count(t: Tensor) -> Tensor:
            nonlocal size
            size += t.numel() * t.element_size()
            return t

        with torch.autograd.graph.saved_tensors_hooks(count, lambda t: t):
            model(batch_of(sequences()))
        return size

    assert kept(True) < kept(False) / 3


def test_accumulation_over_micro_batches_is_one_large_batch() -> None:
    parts, model = sequences(), model_of("bf16")
    loss, large = gradients(model, [parts])
    accumulated, small = gradients(model, [parts[:2], parts[2:3], parts[3:]])
    assert accumulated == pytest.approx(loss, rel=1e-12)  # rows are bit-equal; only the order of the sum differs
    for name, grad in large.items():
        gap = float((small[name] - grad).norm() / grad.norm())
        assert gap < 1e-3, f"{name}: {gap}"


@pytest.mark.parametrize("precision", ["bf16", "fp8", "fp8 kv8"])
@pytest.mark.parametrize("change", [{}, {"tie_embeddings": False}, {"qk_norm": False, "qkv_bias": False}])
def test_a_sequence_alone_equals_itself_in_a_batch(precision: str, change: dict[str, bool]) -> None:
    model, parts = model_of(precision, replace(SPEC, **change)), sequences()
    with torch.no_grad():
        packed = model.logits(model(batch_of(parts))).split(LENGTHS)
        for i, part in enumerate(parts):
            assert_bitwise_equal(model.logits(model(batch_of([part]))), packed[i], f"sequence {i}")


@pytest.mark.parametrize("precision", ["bf16", "fp8", "fp8 kv8", "fp8_rollout", "fp8_rollout kv8"])
def test_sides(precision: str) -> None:
    model, batch = model_of(precision), batch_of(sequences())
    with torch.no_grad():
        train, rollout = model(batch), model(replace(batch, side="rollout"))
    assert torch.equal(train, rollout) == (not precision.startswith("fp8_rollout"))


def test_masters_count_from_publish_on() -> None:
    model, batch = model_of(), batch_of(sequences())
    with torch.no_grad():
        before, name = model.logits(model(batch)), checksum(published(model))
        for p in model.parameters():
            p.mul_(1.5)
        assert_bitwise_equal(model.logits(model(batch)), before, "before publish")
        assert checksum(published(model)) == name
        model.publish()
        assert not torch.equal(model.logits(model(batch)), before) and checksum(published(model)) != name


def test_one_step_against_the_gradient_lowers_the_loss() -> None:
    model = model_of("fp8")
    loss, grads = gradients(model, [sequences()])
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.sub_(grads[name] * 0.05)
    model.publish()
    assert gradients(model, [sequences()])[0] < loss - 0.01


@pytest.mark.parametrize("precision", ["fp8", "fp8 kv8"])
def test_tap_names_every_operator_in_order(precision: str) -> None:
    names: list[str] = []
    with torch.no_grad():
        model_of(precision)(batch_of(sequences()), lambda name, value: names.append(name))
    quantizers = "k.quantize v.quantize " if precision == "fp8 kv8" else ""
    layer = f"attn_norm qkv q_norm k_norm rope_q rope_k {quantizers}attention o mlp_norm gate_up swiglu down".split()
    assert names == ["embed", *(f"layers.{i}.{n}" for i in range(2) for n in layer), "norm"]


def test_an_fp8_cache_rounds_keys_and_values_alike_with_and_without_gradients_and_under_a_tap() -> None:
    model, batch = model_of("fp8 kv8"), batch_of(sequences())
    seen: dict[str, Tensor] = {}
    with torch.no_grad():
        alone = model(batch)
        assert_bitwise_equal(model(batch, lambda name, value: seen.update({name: value})), alone, "under a tap")
        assert not torch.equal(model_of("fp8")(batch), alone), "rounding has changed nothing"
    assert_bitwise_equal(model(batch).detach(), alone, "with gradients")
    g, h = SPEC.num_kv_heads, SPEC.head_dim
    for i in range(SPEC.num_layers):
        key, value = seen[f"layers.{i}.rope_k"], seen[f"layers.{i}.qkv"].view(len(batch.tokens), -1, h)[:, -g:]
        assert_bitwise_equal(seen[f"layers.{i}.k.quantize"], reference.round_heads(key), "keys")
        assert_bitwise_equal(seen[f"layers.{i}.v.quantize"], reference.round_heads(value), "values")


def test_a_cache_of_another_format_is_refused() -> None:
    for recipe in (build_recipe("fp8", 2, kv_cache="fp8", head_dim=32), Recipe("fp8", 2, kv_cache=act_1x128("pow2"))):
        with pytest.raises(AssertionError, match="no kernels for a KV cache in e4m3"):
            Transformer(SPEC, recipe)


def test_gradients_of_masters_that_have_moved_are_refused() -> None:
    """Without gradients the published weights are the model; with them, or in the API, a step was forgotten."""
    model, batch = model_of("fp8"), batch_of(sequences())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    gradients(model, [sequences()])
    model(batch).float().square().mean().backward()
    optimizer.step()
    with pytest.raises(UserError, match=r"master weight \S+ has changed .* model.publish\(\) after each"):
        model(batch)
    twin = copy.deepcopy(model)
    with pytest.raises(UserError, match="has changed"):
        twin(batch)
    twin.publish()(batch)
    model.publish()(batch)
    copy.deepcopy(model)(batch)
