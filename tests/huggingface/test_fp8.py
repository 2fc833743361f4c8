"""Folders in FP8 (`huggingface.fp8`): stored codes are those that are computed with, and masters give them back."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from jetrl.errors import Notice, UserError
from jetrl.huggingface import fp8
from jetrl.huggingface import read as hf
from jetrl.huggingface.export import export, fp8_weights
from jetrl.huggingface.fp8 import Again
from jetrl.kernels.qtensor import QTensor, blocks_of, is_pow2
from jetrl.kernels.quantize.ops import quantize_weight, weight_values
from jetrl.model.adapter import BaseHash
from jetrl.model.master import own_rows
from jetrl.model.sharding import fill, shard_model
from jetrl.model.transformer import Transformer
from jetrl.model.weights import coded_weights, published
from jetrl.parallel.world import World
from jetrl.precision.lora import Lora
from jetrl.precision.recipe import Recipe, build_recipe
from jetrl.spec import SHAPES, ModelSpec, RopeSpec

SPEC = ModelSpec(
    family="qwen3", vocab_size=60, hidden_size=256, intermediate_size=384, num_layers=3, num_heads=4, num_kv_heads=2,
    head_dim=64, rms_norm_eps=1e-6, rope=RopeSpec(theta=1e4), max_position=64, tie_embeddings=False, qkv_bias=False,
    qk_norm=True,
)
FP8 = Recipe(name="fp8", num_layers=3)
MLA = SHAPES["tiny-mla"]


def folder_of(path: Path, spec: ModelSpec = SPEC, recipe: Recipe = FP8, scale: Callable[[Tensor], Tensor] = lambda s: s,
              also: tuple[str, ...] = ()) -> Path:
    """A small model, stored by names of its own as FP8 blocks: what `recipe` has as codes, and weights `also`."""
    model = Transformer(spec, recipe).init_random(5)
    values = dict(model.random_values(5))
    hf.save_model(path, spec, values)
    tensors, table = load_file(path / hf.SINGLE), hf.tensor_table(spec)
    for ours in (*coded_weights(spec, recipe), *also):
        for piece in table[ours]:
            q = quantize_weight(tensors[piece.name], None, recipe.pow2_weights)
            tensors[piece.name], tensors[piece.name + "_scale_inv"] = q.codes, scale(q.scale)
    save_file(tensors, path / hf.SINGLE)
    config = json.loads((path / "config.json").read_text())
    said = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"}
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
    return path


def stored(folder: Path, spec: ModelSpec, ours: str) -> QTensor:
    tensors, names = load_file(folder / hf.SINGLE), [piece.name for piece in hf.tensor_table(spec)[ours]]
    scales = torch.cat([tensors[f"{name}_scale_inv"].float() for name in names])
    codes = torch.cat([tensors[name].view(torch.uint8) for name in names]).view(torch.float8_e4m3fn)
    return QTensor(codes, scales, "128x128", tuple(len(tensors[name]) for name in names), (codes.shape[1],))


def loaded(folder: Path, recipe: Recipe, *, masters: torch.dtype | None) -> Transformer:
    """A model as runs build it."""
    spec = hf.spec_from_folder(folder)
    coded = hf.stored_parameters(folder, spec, coded=coded_weights(spec, recipe))
    values = Again(recipe.pow2_weights, masters is not None).through(coded, folder)
    model = Transformer(spec, recipe, master_dtype=masters)
    if masters is None:
        return model.publish_values(values)
    fill(model, values)
    return model.publish()


def codes_of(model: Transformer, ours: str) -> QTensor:
    quantized = model.get_submodule(ours.removesuffix(".weight")).quantized
    assert isinstance(quantized, QTensor)
    return quantized


def same(a: QTensor, b: QTensor) -> tuple[bool, bool]:
    """Whether codes are equal, and scales."""
    return torch.equal(a.codes.view(torch.uint8), b.codes.view(torch.uint8)), torch.equal(a.scale, b.scale)


@pytest.fixture
def quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error", Notice)
        yield


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("spec", [SPEC, MLA], ids=["dense", "mla"])
def test_codes_go_straight_in_and_masters_give_them_back(spec: ModelSpec, dtype: torch.dtype, tmp_path: Path) -> None:
    """Every code of every weight, with scales that are stored in FP32 and, as Qwen does, in BF16."""
    recipe = Recipe("fp8", spec.num_layers)
    folder = folder_of(tmp_path / "m", spec, recipe, scale=lambda s: (s * 1.0037).to(dtype))
    names = fp8_weights(spec, recipe)
    assert names and set(names) == coded_weights(spec, recipe)
    straight, trained = loaded(folder, recipe, masters=None), loaded(folder, recipe, masters=torch.float32)
    half = loaded(folder, recipe, masters=torch.bfloat16)
    moved = 0.0
    for name in names:
        want = stored(folder, spec, name)
        assert same(codes_of(straight, name), want) == (True, True), name
        assert torch.equal(trained.get_parameter(name), weight_values(want, dtype=torch.float32))
        for model in (trained, half):
            assert same(codes_of(model, name), want)[0], name
            moved = max(moved, float((codes_of(model, name).scale / want.scale - 1).abs().max()))
    assert 2**-10 < moved <= 2**-8  # the one thing that BF16 changes
    for name, tensor in published(straight).items():
        assert (tensor.scales is not None) == (f"{name}_scale_inv" in load_file(folder / hf.SINGLE)), name


def test_any_code_comes_back_whatever_the_scale() -> None:
    """All finite codes beside a largest one, with scales over a binade: the master is rounded to BF16 in between."""
    every = torch.arange(256, dtype=torch.uint8)
    every = every[(every & 0x7F) != 0x7F].view(torch.float8_e4m3fn)
    for i, size in enumerate(torch.linspace(1.0, 2.0, 400).tolist()):
        codes = torch.zeros(2, 128, dtype=torch.uint8)
        codes.view(-1)[: len(every)] = every.view(torch.uint8)
        scale = torch.tensor([[size * 2.0 ** (i % 40 - 30)]])
        q = QTensor(codes.view(torch.float8_e4m3fn), scale, "128x128", (2,), (128,))
        value = weight_values(q, dtype=torch.float32)
        again = quantize_weight(value, None, False, None, torch.bfloat16)
        zero = (again.codes.float() == 0) & (q.codes.float() == 0)
        assert bool(((again.codes.view(torch.uint8) == q.codes.view(torch.uint8)) | zero).all()), size
        exact = quantize_weight(value)  # without that rounding
        assert bool((exact.codes.float() == q.codes.float()).all())


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e8m0fnu], ids=["fp32", "ue8m0"])
def test_powers_of_two_keep_their_values(dtype: torch.dtype, tmp_path: Path) -> None:
    pow2 = Recipe("fp8", 3, weight_scale="pow2")
    folder = folder_of(tmp_path / "m", SPEC, pow2, scale=lambda s: s.to(dtype))
    tensors = load_file(folder / hf.SINGLE)  # the stored scales are up to twice what ours would be
    halved = {name: (t.float() / 2).to(t.dtype) for name, t in tensors.items() if t.dtype == torch.float8_e4m3fn}
    save_file(tensors | halved, folder / hf.SINGLE)
    straight, trained = loaded(folder, pow2, masters=None), loaded(folder, pow2, masters=torch.float32)
    for name in fp8_weights(SPEC, pow2):
        want = stored(folder, SPEC, name)
        assert same(codes_of(straight, name), want) == (True, True) and is_pow2(want.scale).all()
        found = codes_of(trained, name)
        assert not torch.equal(found.scale, want.scale)
        assert torch.equal(weight_values(found), weight_values(want))
    weight_only = loaded(folder, Recipe("w8a16", 3), masters=None)
    for name in fp8_weights(SPEC, pow2):
        assert same(codes_of(weight_only, name), stored(folder, SPEC, name)) == (True, True)


def test_what_is_rounded_again_is_counted_and_told(tmp_path: Path) -> None:
    pow2, total = Recipe("fp8", 3, weight_scale="pow2"), 3 * (8 + 4 + 12 + 6)
    by_amax = folder_of(tmp_path / "a")
    with pytest.warns(Notice, match=rf"a: {total} of {total} blocks of its FP8 weights .* powers of two, which"):
        loaded(by_amax, pow2, masters=None)
    by_two = folder_of(tmp_path / "b", SPEC, pow2)
    with pytest.warns(Notice, match=r"of 90 blocks of .* Set quant.weight_scale = \"pow2\" to keep the codes"):
        loaded(by_two, FP8, masters=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error", Notice)
        loaded(by_two, FP8, masters=None)  # codes with scales of FP32 may have powers of two
    wide = load_file(by_amax / hf.SINGLE)
    name = "model.layers.1.mlp.down_proj.weight"
    codes = wide[name].view(torch.uint8)
    codes[:128, :128] &= 0x77  # none is 448
    save_file(wide | {name: codes.view(torch.float8_e4m3fn)}, by_amax / hf.SINGLE)
    with pytest.warns(Notice, match=r"a: 1 of 90 blocks of .* the stored scales are not the largest value / 448"):
        loaded(by_amax, FP8, masters=torch.float32)


@pytest.mark.usefixtures("quiet")
def test_what_the_flow_has_in_bf16_is_code_times_scale(tmp_path: Path) -> None:
    """`kv_b`, layers that a recipe keeps in BF16, and everything under bf16."""
    up = "layers.0.attn.kv_b.weight"
    folder = folder_of(tmp_path / "m", MLA, Recipe("fp8", 4), also=(up,))
    kept = Recipe("fp8", 4, num_last_layers_in_bf16=1)
    for recipe in (kept, Recipe("bf16", 4), Recipe("fp8_rollout", 4)):
        model = loaded(folder, recipe, masters=None)
        for name in (up, "layers.3.mlp.down.weight", "layers.1.attn.o.weight"):
            module, want = model.get_submodule(name.removesuffix(".weight")), stored(folder, MLA, name)
            if recipe is not kept or name != "layers.1.attn.o.weight":
                assert torch.equal(module.published, weight_values(want, dtype=torch.float32).bfloat16()), name
    rolled = codes_of(model, "layers.1.attn.o.weight")
    assert same(rolled, stored(folder, MLA, "layers.1.attn.o.weight")) == (True, True)


@pytest.mark.usefixtures("quiet")
def test_a_rank_reads_its_rows(tmp_path: Path) -> None:
    folder, whole = folder_of(tmp_path / "m"), {}
    for rank in range(3):
        with torch.device("meta"):
            model = Transformer(SPEC, FP8)
        shard_model(model, World(rank, 3))
        coded = coded_weights(SPEC, FP8)
        values = Again(False, True).through(hf.stored_parameters(folder, SPEC, own_rows(model), coded), folder)
        fill(model, values, torch.device("cpu"))
        for name in coded:
            whole.setdefault(name, []).append(model.get_parameter(name).detach())
    for name, parts in whole.items():
        assert torch.equal(torch.cat(parts), weight_values(stored(folder, SPEC, name), dtype=torch.float32)), name


@pytest.mark.usefixtures("quiet")
def test_a_frozen_base_has_the_stored_codes_and_one_digest(tmp_path: Path) -> None:
    """Adapters over an FP8 folder: its base is the published model, and is the same one for a BF16 flow."""
    folder, digests = folder_of(tmp_path / "m"), []
    for precision in ("fp8", "bf16"):
        recipe = build_recipe(precision, 3, lora=Lora(4, 8.0, ("q_proj", "o_proj"), False, None))
        model, hashes = Transformer(SPEC, recipe, master_dtype=torch.float32), BaseHash()
        coded = hf.stored_parameters(folder, SPEC, coded=coded_weights(SPEC, recipe))
        model.publish_frozen(hashes.through(coded))
        digests.append(hashes.digest())
        if precision == "fp8":
            for name in fp8_weights(SPEC, recipe):
                assert same(codes_of(model, name), stored(folder, SPEC, name)) == (True, True)
    assert digests[0] == digests[1]


def test_an_export_in_fp8_is_a_model_to_begin_with(tmp_path: Path) -> None:
    recipe = Recipe("fp8", 3, weight_scale="pow2", num_last_layers_in_bf16=1)
    model = Transformer(SPEC, recipe).init_random(3)
    hf.save_model(tmp_path / "m", SPEC, model.state_dict(), dtype=torch.float32)
    folder = export(tmp_path / "m", tmp_path / "fp8", fp8=True, recipe=recipe)
    for name, tensor in published(loaded(folder, recipe, masters=None)).items():
        theirs = published(model)[name]
        assert torch.equal(tensor.values.float(), theirs.values.float()), name
        assert tensor.scales is None or torch.equal(tensor.scales, theirs.scales), name
    with pytest.raises(UserError, match="is FP8 already .* Copy it, or export it in BF16"):
        export(folder, tmp_path / "again", fp8=True, recipe=recipe)
    plain = load_file(export(folder, tmp_path / "bf16", fp8=False) / hf.SINGLE)
    name = "model.layers.0.mlp.down_proj.weight"
    assert torch.equal(plain[name], weight_values(stored(folder, SPEC, "layers.0.mlp.down.weight")))
    assert "quantization_config" not in hf.read_config(tmp_path / "bf16")
    assert not any(key.endswith("_scale_inv") for key in plain)


@pytest.mark.parametrize(("change", "named"), [
    ({"weight_block_size": [64, 64]}, r"quant_method = 'fp8', weight_block_size = \[64, 64\]"),
    ({"weight_block_size": None}, "weight_block_size = None"),
    ({"activation_scheme": "static"}, "activation_scheme = 'static'"),
    ({"quant_method": "compressed-tensors"}, "quant_method = 'compressed-tensors'"),
    ({"fmt": "e5m2"}, "fmt = 'e5m2'"),
])  # fmt: skip
def test_other_layouts_are_refused_in_one_message(change: dict[str, Any], named: str) -> None:
    good = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    fp8.check(good | {"modules_to_not_convert": ["lm_head"], "scale_fmt": "ue8m0"})
    with pytest.raises(UserError, match=f"^quantization_config .*{named}.*already quantized.* Start from the BF16"):
        fp8.check(good | change)


def damage(folder: Path, name: str, changed: Callable[[Tensor], Tensor] | None) -> None:
    tensors = load_file(folder / hf.SINGLE)
    value = tensors.pop(name)
    save_file(tensors | ({} if changed is None else {name: changed(value).contiguous()}), folder / hf.SINGLE)


@pytest.mark.parametrize(("name", "changed", "message"), [
    ("down_proj.weight_scale_inv", None, r"down_proj.weight is stored as torch.float8_e4m3fn; jetrl starts from"),
    ("down_proj.weight", lambda c: c.bfloat16(), r"stored as torch.bfloat16 with .*down_proj.weight_scale_inv"),
    ("down_proj.weight_scale_inv", lambda s: s[:, :1], r"scale_inv is torch.float32 \[2, 1\]: jetrl reads one scale"),
    ("down_proj.weight_scale_inv", lambda s: s.double(), r"scale_inv is torch.float64"),
    ("down_proj.weight_scale_inv", lambda s: s * float("nan"), "holds values that are not finite"),
    ("down_proj.weight_scale_inv", lambda s: -s, "or a negative scale"),
    ("down_proj.weight", lambda c: torch.full(c.shape, 0x7F, dtype=torch.uint8).view(c.dtype), "are not finite"),
    ("down_proj.weight", lambda c: c[:, :128], r"has shape \[256, 128\], but config.json asks for \[256, 384\]"),
])  # fmt: skip
def test_damaged_folders(name: str, changed: Callable[[Tensor], Tensor] | None, message: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "m")
    damage(folder, f"model.layers.1.mlp.{name}", changed)
    with pytest.raises(UserError, match=message):
        hf.load_state(folder, SPEC)
    tensors = load_file(folder / hf.SINGLE)
    save_file(tensors | {"model.layers.9.x.weight_scale_inv": torch.ones(1)}, folder / hf.SINGLE)
    with pytest.raises(UserError, match="weight_scale_inv that a qwen3 model"):
        hf.load_state(folder, SPEC)


def test_tensors_that_are_carried_become_bf16() -> None:
    value = torch.randn(130, 256)
    q = quantize_weight(value)
    found = fp8.widened({"a.weight": q.codes, "a.weight_scale_inv": q.scale, "b": value})
    assert found.keys() == {"a.weight", "b"} and torch.equal(found["b"], value)
    assert torch.equal(found["a.weight"], weight_values(q, dtype=torch.float32).bfloat16())
    with pytest.raises(UserError, match="a.weight is FP8 without a.weight_scale_inv"):
        fp8.widened({"a.weight": q.codes})
    assert blocks_of((130,)) == [(0, 128), (128, 130)]
