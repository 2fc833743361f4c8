"""Named published tensors: another model rebuilt from them alone computes the same, and the checksum sees every bit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tolerances import assert_bitwise_equal
from torch import Tensor

from jetrl.huggingface import read as hf
from jetrl.huggingface.export import export
from jetrl.kernels.logprob.ops import log_softmax
from jetrl.model.transformer import Transformer
from jetrl.model.weights import checksum, published
from jetrl.parity.rows import varlen
from jetrl.precision.recipe import build_recipe
from jetrl.spec import ModelSpec, RopeSpec
from jetrl.train.publish import publish
from jetrl.types import WeightTensor

# Sizes that are no multiples of 128: heads of Q, K, V and rows of gate, up end in smaller blocks.
SPEC = ModelSpec(
    family="qwen3", vocab_size=61, hidden_size=200, intermediate_size=264, num_layers=3, num_heads=4, num_kv_heads=2,
    head_dim=48, rms_norm_eps=1e-6, rope=RopeSpec(1e4), max_position=64, tie_embeddings=True, qkv_bias=False,
    qk_norm=True,
)
QWEN2 = replace(SPEC, family="qwen2", qk_norm=False, qkv_bias=True, tie_embeddings=False)
WHOLE = replace(SPEC, hidden_size=256, intermediate_size=384, head_dim=64, tie_embeddings=False)


def model_of(precision: str, spec: ModelSpec = SPEC, **options: object) -> Transformer:
    model = Transformer(spec, build_recipe(precision, spec.num_layers, **options)).init_random(0)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3.0) if p.ndim == 2 else p.add_(torch.randn(p.shape, generator=generator) * 0.2)
    return model.publish()


def value(tensor: WeightTensor) -> Tensor:
    """`code * scale` in FP32, element by element: the definition, without a look at how blocks are stored."""
    if tensor.scales is None:
        return tensor.values.float()
    row, column = (torch.arange(n) // 128 for n in tensor.values.shape)
    assert tensor.scales.shape == (row[-1] + 1, column[-1] + 1)
    return tensor.values.float() * tensor.scales[row][:, column]


def logprobs_of(model: Transformer, side: str = "train") -> Tensor:
    tokens = torch.randint(SPEC.vocab_size, (40,), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        return log_softmax(model.logits(model(replace(varlen([tokens]), side=side))))


def copied(tensors: Mapping[str, WeightTensor]) -> dict[str, WeightTensor]:
    return {
        name: WeightTensor(t.values.clone(), None if t.scales is None else t.scales.clone())
        for name, t in tensors.items()
    }


def rebuilt(tensors: Mapping[str, WeightTensor], spec: ModelSpec, folder: Path, dtype: torch.dtype) -> Path:
    """A plain model folder of the dequantized tensors."""
    folder.mkdir()
    config = hf.hf_config(spec, dtype=str(dtype).removeprefix("torch."))
    hf.write_folder(folder / "m", config, {n: (value(t), dtype) for n, t in tensors.items()}, lambda target: None)
    return folder / "m"


@pytest.mark.parametrize("spec", [SPEC, QWEN2])
@pytest.mark.parametrize("precision", ["bf16", "fp8", "fp8_rollout", "w8a16"])
def test_transformers_computes_our_function_from_the_named_tensors(
    spec: ModelSpec, precision: str, tmp_path: Path
) -> None:
    """In FP32 our own model, loaded from the same values, agrees to rounding; so names, rows and blocks are right."""
    from transformers import AutoModelForCausalLM

    model = model_of(precision, spec)
    folder = rebuilt(published(model), spec, tmp_path / "f", torch.float32)
    plain = Transformer(spec, build_recipe("bf16", spec.num_layers), dtype=torch.float32)
    plain.load_state_dict(hf.load_state(folder, spec))
    tokens = torch.randint(SPEC.vocab_size, (40,), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(tokens[None]).logits[0]
    theirs = theirs.log_softmax(-1)
    assert (logprobs_of(plain.publish()) - theirs).abs().max() < 1e-4
    # against the published model itself: what is left is the rounding of activations
    gap = (logprobs_of(model, "rollout") - theirs).abs().max()
    assert 1e-4 < gap < (0.1 if precision in ("bf16", "w8a16") else 0.6), gap


@pytest.mark.parametrize("precision", ["bf16", "fp8", "fp8_rollout", "w8a16"])
def test_a_model_of_the_named_values_has_the_same_rollout_bits(precision: str, tmp_path: Path) -> None:
    """Powers of two times 4-bit codes are exact in BF16, and quantizing them again changes no value."""
    options = {} if precision == "bf16" else {"weight_scale": "pow2", "num_first_layers_in_bf16": 1}
    model = model_of(precision, **options)
    folder = rebuilt(published(model), SPEC, tmp_path / "f", torch.bfloat16)
    again = Transformer(SPEC, model.recipe)
    again.load_state_dict(hf.load_state(folder, SPEC))
    assert_bitwise_equal(logprobs_of(again.publish(), "rollout"), logprobs_of(model, "rollout"), "log-probs")


def test_which_tensors_are_codes() -> None:
    assert all(t.scales is None and t.values.dtype == torch.bfloat16 for t in published(model_of("bf16")).values())
    for precision in ("fp8", "fp8_rollout", "w8a16"):
        tensors = published(model_of(precision, QWEN2, num_last_layers_in_bf16=1))
        codes = {name for name, t in tensors.items() if t.values.dtype == torch.float8_e4m3fn}
        assert codes == {name for name, t in tensors.items() if t.scales is not None}
        assert codes == {n for n in tensors if n.endswith("_proj.weight") and not n.startswith("model.layers.2.")}
        assert {tensors[n].values.dtype for n in tensors.keys() - codes} == {torch.bfloat16}
        assert tensors.keys() == {p.name for pieces in hf.tensor_table(QWEN2).values() for p in pieces}
        assert len(tensors) == 3 + 3 * 12 and "lm_head.weight" in tensors


@pytest.mark.parametrize("precision", ["fp8", "fp8_rollout"])
def test_codes_are_those_of_the_fp8_export(precision: str, tmp_path: Path) -> None:
    model = model_of(precision, WHOLE, weight_scale="pow2", num_last_layers_in_bf16=1)
    hf.save_model(tmp_path / "m", WHOLE, model.state_dict(), dtype=torch.float32)
    file = load_file(export(tmp_path / "m", tmp_path / "fp8", True, model.recipe) / hf.SINGLE)
    tensors = published(model)
    assert file.keys() == {*tensors, *(f"{name}_scale_inv" for name, t in tensors.items() if t.scales is not None)}
    for name, t in tensors.items():
        assert_bitwise_equal(t.values.view(torch.uint8), file[name].view(torch.uint8), name)
        if t.scales is not None:
            assert_bitwise_equal(t.scales, file[f"{name}_scale_inv"], name)


def test_tensors_are_views_that_the_next_publishing_overwrites() -> None:
    model = model_of("fp8")
    first = publish(model, 3, "digest")
    assert (first.version, first.flow_digest) == (3, "digest")
    held, kept = dict(first.tensors), copied(first.tensors)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(-1.0)
    second = publish(model, 4, "digest")
    for name, t in second.tensors.items():
        assert t.values.data_ptr() == held[name].values.data_ptr(), name
        assert_bitwise_equal(held[name].values.float(), -kept[name].values.float(), name)
    names = [f"model.layers.0.self_attn.{x}_proj.weight" for x in "qkv"]
    places = [held[name].values for name in names]
    assert [b.data_ptr() - a.data_ptr() for a, b in zip(places, places[1:], strict=False)] == [192 * 200, 96 * 200]


def test_checksum_sees_every_published_bit_of_every_tensor() -> None:
    tensors = copied(published(model_of("fp8", QWEN2, num_last_layers_in_bf16=1)))
    name = checksum(tensors)
    assert len(name) == 16 and int(name, 16) >= 0
    for key, t in tensors.items():
        for part in (t.values, t.scales):
            if part is None:
                continue
            for at in (0, part.numel() * part.element_size() - 1):  # the first byte and the last
                place = part.view(torch.uint8).view(-1)
                place[at] ^= 1
                assert checksum(tensors) != name, (key, at)
                place[at] ^= 1
    assert checksum(tensors) == name


def test_checksum_depends_on_names_shapes_and_types_but_not_on_place_or_order(tmp_path: Path) -> None:
    tensors = published(model_of("fp8"))
    name, own = checksum(tensors), copied(tensors)
    assert checksum(own) == name == checksum(dict(reversed(list(own.items())))) == checksum(published(model_of("fp8")))
    save_file({n: t.values.contiguous() for n, t in own.items()}, tmp_path / "t.safetensors")
    read = load_file(tmp_path / "t.safetensors")
    assert checksum({n: WeightTensor(v, own[n].scales) for n, v in read.items()}) == name
    embed, norm = own["model.embed_tokens.weight"], own["model.norm.weight"]
    assert checksum(own | {"model.norm.weight": WeightTensor(norm.values.view(torch.float16))}) != name
    assert checksum(own | {"model.embed_tokens.weight": WeightTensor(embed.values.view(200, 61))}) != name
    own["model.norms.weight"] = own.pop("model.norm.weight")
    assert checksum(own) != name


def test_checksum_follows_the_masters_from_publish_on() -> None:
    model = model_of("fp8")
    name = checksum(published(model))
    for key, p in model.named_parameters():
        kept = p.detach().clone()
        with torch.no_grad():
            p.view(-1)[-1] += 1.0
            assert checksum(published(model)) == name, key
            assert checksum(published(model.publish())) != name, key
            p.copy_(kept)
            p.view(-1)[-1] += 1e-9  # below a BF16 rounding step
        assert checksum(published(model.publish())) == name, key
        with torch.no_grad():
            p.copy_(kept)


def test_unpublished_weights_are_refused() -> None:
    model = Transformer(SPEC, build_recipe("fp8", SPEC.num_layers))
    for name in ("model.norm.weight", "model.layers.0.mlp.up_proj.weight"):
        with pytest.raises(AssertionError, match=r"publish\(\) has not run"):
            published(model)[name]


def test_naming_costs_nothing_until_a_tensor_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[ModelSpec] = []
    monkeypatch.setattr("jetrl.model.weights.tensor_table", lambda spec: calls.append(spec) or hf.tensor_table(spec))
    tensors = publish(model_of("bf16"), 0, "digest").tensors
    assert not calls
    assert "model.norm.weight" in tensors and len(calls) == 1
    assert len(list(tensors.values())) == 2 + 3 * 11 and len(calls) == 1
