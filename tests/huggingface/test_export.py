"""Export: the codes are those that publishing trains with, and transformers dequantizes them to the same values."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from jetrl.errors import UserError
from jetrl.huggingface import read as hf
from jetrl.huggingface.export import export, fp8_weights, left_out, quantization_config
from jetrl.huggingface.files import GENERIC_TOKENIZERS
from jetrl.model.transformer import Transformer
from jetrl.model.weights import published
from jetrl.parity.rows import varlen
from jetrl.precision.formats import kv_head
from jetrl.precision.recipe import Recipe
from jetrl.spec import ModelSpec, RopeSpec

SPEC = ModelSpec(
    family="qwen3", vocab_size=60, hidden_size=256, intermediate_size=384, num_layers=3, num_heads=4, num_kv_heads=2,
    head_dim=64, rms_norm_eps=1e-6, rope=RopeSpec(theta=1e4), max_position=64, tie_embeddings=False, qkv_bias=False,
    qk_norm=True,
)
RECIPE = Recipe(name="fp8", num_layers=3, weight_scale="pow2", num_last_layers_in_bf16=1)


def model_of(spec: ModelSpec, recipe: Recipe) -> Transformer:
    return Transformer(spec, recipe).init_random(seed=3)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Transformer, Path]:
    root = tmp_path_factory.mktemp("export")
    model = model_of(SPEC, RECIPE)
    hf.save_model(root / "checkpoint" / "model", SPEC, model.state_dict(), dtype=torch.float32)
    return model, export(root / "checkpoint", root / "fp8", fp8=True, recipe=RECIPE)


def dequantize(code: Tensor, scale: Tensor) -> Tensor:
    rows, columns = code.shape
    return code.float() * scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]


def test_codes_and_scales_are_those_of_the_published_model(exported: tuple[Transformer, Path]) -> None:
    model, folder = exported
    file = load_file(folder / hf.SINGLE)
    table = hf.tensor_table(SPEC)
    modules = dict(model.named_modules())
    names = fp8_weights(SPEC, RECIPE)
    assert len(names) == 8 and not any(name.startswith("layers.2.") for name in names)
    for name in names:
        quantized = modules[name.removesuffix(".weight")].quantized
        pieces = [piece.name for piece in table[name]]
        codes = torch.cat([file[piece].view(torch.uint8) for piece in pieces])
        assert torch.equal(codes, quantized.codes.view(torch.uint8)), name
        assert torch.equal(torch.cat([file[piece + "_scale_inv"] for piece in pieces]), quantized.scale), name
        for piece in table[name]:
            assert file[piece.name].dtype == torch.float8_e4m3fn
            scale = file[piece.name + "_scale_inv"]
            assert scale.dtype == torch.float32
            assert tuple(scale.shape) == (-(-piece.shape[0] // 128), -(-piece.shape[1] // 128))
            assert torch.equal(scale, torch.exp2(torch.log2(scale).round())), "the recipe asks for powers of two"


W8A16 = Recipe(name="w8a16", num_layers=3, num_last_layers_in_bf16=1)


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_both_folders_of_w8a16_have_the_trained_policy(tmp_path: Path, fp8: bool) -> None:
    """The FP8 folder holds its codes; the BF16 folder their values, with which a model of plain BF16 has its bits."""
    model = model_of(SPEC, W8A16)
    hf.save_model(tmp_path / "m", SPEC, model.state_dict(), dtype=torch.float32)
    file = load_file(export(tmp_path / "m", tmp_path / "out", fp8, W8A16) / hf.SINGLE)
    for name, tensor in published(model).items():
        codes = tensor.scales is not None
        assert codes == ("_proj" in name and "layers.2." not in name)
        if codes and fp8:
            assert torch.equal(file[name].view(torch.uint8), tensor.values.view(torch.uint8)), name
            assert torch.equal(file[f"{name}_scale_inv"], tensor.scales), name
        else:
            value = dequantize(tensor.values, tensor.scales) if codes else tensor.values
            assert file[name].dtype == torch.bfloat16 and torch.equal(file[name].float(), value.float()), name
    if not fp8:
        plain = Transformer(SPEC, Recipe(name="bf16", num_layers=3))
        plain.load_state_dict(hf.load_state(tmp_path / "out", SPEC))
        batch = varlen([torch.arange(40)])
        with torch.no_grad():
            assert torch.equal(plain.publish()(batch), model(batch))


def test_values_are_near_the_weights_and_the_rest_is_bf16(exported: tuple[Transformer, Path]) -> None:
    model, folder = exported
    file = load_file(folder / hf.SINGLE)
    source = hf.to_hf(SPEC, model.state_dict())
    fp8 = {piece.name for name in fp8_weights(SPEC, RECIPE) for piece in hf.tensor_table(SPEC)[name]}
    assert file.keys() == source.keys() | {name + "_scale_inv" for name in fp8}
    for name, weight in source.items():
        if name in fp8:
            # E4M3 rounds to 4 bits, so to 1/16 of the value; below its normal range, to half of 2^-9.
            scale = file[name + "_scale_inv"]
            error = (dequantize(file[name], scale) - weight.bfloat16().float()).abs()
            floor = dequantize(torch.full_like(weight, 2.0**-10), scale)
            assert bool((error <= weight.bfloat16().float().abs() / 16 + floor).all()), name
        else:
            assert file[name].dtype == torch.bfloat16
            assert torch.equal(file[name], weight.bfloat16()), name


def test_transformers_dequantizes_to_our_values(exported: tuple[Transformer, Path]) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, FP8Linear

    _, folder = exported
    file = load_file(folder / hf.SINGLE)
    codes = {name: tensor for name, tensor in file.items() if tensor.dtype == torch.float8_e4m3fn}
    assert len(codes) == 2 * 7
    for name, code in codes.items():
        scale = file[name + "_scale_inv"]
        theirs = Fp8Dequantize(None)._dequantize_one(code, scale, output_dtype=torch.float32)
        assert torch.equal(theirs, dequantize(code, scale)), name
        module = FP8Linear(code.shape[1], code.shape[0], block_size=(128, 128))
        assert {"weight", "weight_scale_inv"} == {key for key, _ in module.named_parameters()}
        assert module.weight.dtype == code.dtype and module.weight.shape == code.shape
        assert module.weight_scale_inv.dtype == scale.dtype and module.weight_scale_inv.shape == scale.shape


def test_transformers_converts_exactly_the_fp8_modules(exported: tuple[Transformer, Path]) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import FP8Linear, replace_with_fp8_linear

    _, folder = exported
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    parsed = FineGrainedFP8Config.from_dict(dict(config))
    assert (parsed.activation_scheme, list(parsed.weight_block_size)) == ("dynamic", [128, 128])
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    replace_with_fp8_linear(model, parsed.modules_to_not_convert, parsed, pre_quantized=True)
    theirs = {name for name, module in model.named_modules() if isinstance(module, FP8Linear)}
    file = load_file(folder / hf.SINGLE)
    assert theirs == {n.removesuffix(".weight") for n, t in file.items() if t.dtype == torch.float8_e4m3fn}
    # vLLM compares full names, and takes a fused projection as skipped only where all its parts are.
    skipped = set(config["ignored_layers"])
    assert {f"model.layers.2.self_attn.{x}_proj" for x in "qkv"} <= skipped and "lm_head" in skipped
    assert config["modules_to_not_convert"] == config["ignored_layers"]


def test_transformers_loads_the_folder(exported: tuple[Transformer, Path]) -> None:
    pytest.importorskip("accelerate", reason="transformers needs accelerate to load FP8 folders")
    from transformers import AutoModelForCausalLM

    _, folder = exported
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map="cpu")
    loaded = dict(model.named_parameters())
    file = load_file(folder / hf.SINGLE)
    for name, tensor in loaded.items():
        scale = file.get(name + "_scale_inv")
        want = file[name] if scale is None else dequantize(file[name], scale).bfloat16()
        assert torch.equal(tensor, want), name


def test_jetrl_reads_the_fp8_folder(exported: tuple[Transformer, Path]) -> None:
    """`test_fp8.py` says with which codes."""
    assert hf.spec_from_folder(exported[1]) == SPEC


def test_bf16_export_is_the_rounded_model_with_its_files(tmp_path: Path) -> None:
    spec = replace(SPEC, hidden_size=40, intermediate_size=72)
    model = model_of(spec, Recipe(name="bf16", num_layers=3))
    hf.save_model(tmp_path / "m", spec, model.state_dict(), dtype=torch.float32, generation_config={"top_k": 5})
    (tmp_path / "m" / "chat_template.jinja").write_text("{{ messages }}")
    config = json.loads((tmp_path / "m" / "config.json").read_text()) | {"initializer_range": 0.5}
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    out = export(tmp_path / "m", tmp_path / "out", fp8=False)
    loaded = hf.load_state(out, spec)
    assert all(torch.equal(loaded[name], weight.bfloat16()) for name, weight in model.state_dict().items())
    written = hf.read_config(out)
    assert "quantization_config" not in written
    assert (written["dtype"], written["initializer_range"]) == ("bfloat16", 0.5)
    assert hf.read_generation_config(out) == {"top_k": 5}
    assert (out / "chat_template.jinja").read_text() == "{{ messages }}"


@pytest.mark.parametrize("name", GENERIC_TOKENIZERS)
def test_an_export_names_the_tokenizer_class_as_checkpoints_do(tmp_path: Path, name: str) -> None:
    """transformers 4 does not know TokenizersBackend, the name that transformers 5 writes."""
    hf.save_model(tmp_path / "m", SPEC, model_of(SPEC, Recipe(name="bf16", num_layers=3)).state_dict())
    (tmp_path / "m" / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name, "eos_token": "<eos>"}))
    out = export(tmp_path / "m", tmp_path / "out", fp8=False)
    written = json.loads((out / "tokenizer_config.json").read_text())
    assert written == {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}


def test_a_damaged_file_is_named_where_it_lies(small: Path) -> None:
    """Not by the place of its copy, which is gone when the message is read."""
    for text in ("{", "[]", '{"a": ' + "[" * 999):
        (small / "tokenizer_config.json").write_text(text)
        with pytest.raises(UserError, match=f"^{small}/tokenizer_config.json (is not valid JSON|holds a JSON l)"):
            export(small, small.parent / "out", fp8=False)
        assert sorted(path.name for path in small.parent.iterdir()) == ["m"]


@pytest.fixture
def small(tmp_path: Path) -> Path:
    spec = replace(SPEC, hidden_size=40, intermediate_size=72)
    hf.save_model(tmp_path / "m", spec, model_of(spec, Recipe(name="bf16", num_layers=3)).state_dict())
    return tmp_path / "m"


def test_only_known_files_are_copied(small: Path) -> None:
    for name in ("tokenizer.json", "chat_template.jinja", "tokenizer_extra.txt", "chat_template.bak", "README.md"):
        (small / name).write_text("{}")
    out = export(small, small.parent / "out", fp8=False)
    names = {path.name for path in out.iterdir()}
    assert names == {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"}
    assert left_out(small) == ["README.md", "chat_template.bak", "tokenizer_extra.txt"]


def linked(folder: Path, name: str, target: Path) -> None:
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(target)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", *hf.KNOWN_FILES])
def test_no_link_leads_out_of_the_folder(small: Path, name: str) -> None:
    """Whatever an export takes in: a link to any file of the user is refused, one to the inside of the folder taken."""
    elsewhere, out = small.parent / "elsewhere", small.parent / "out"
    (small / "inner").mkdir()
    for place in (elsewhere, small / "inner" / "file"):
        if (small / name).exists():
            shutil.copyfile(small / name, place)
        else:
            place.write_text("{}")
    linked(small, name, Path("inner/file"))
    export(small, out, fp8=False)
    assert not any(path.is_symlink() for path in out.iterdir())
    linked(small, name, elsewhere)
    with pytest.raises(UserError, match=f"'{name}', which leads by a link to .*elsewhere, outside of"):
        export(small, small.parent / "second", fp8=False)
    assert not (small.parent / "second").exists()


def test_a_checkpoint_whose_model_is_elsewhere_is_refused(small: Path, tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "model").symlink_to(small)
    with pytest.raises(UserError, match="'model', which leads by a link"):
        export(tmp_path / "checkpoint", tmp_path / "out", fp8=False)


def test_a_snapshot_of_the_hub_is_exported(small: Path, tmp_path: Path) -> None:
    """Its files are links into the blobs of the same repository."""
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / ("1" * 40), tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (small / "tokenizer.json").write_text("{}")
    for path in list(small.iterdir()):
        path.rename(blobs / path.name)
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    out = export(snapshot, tmp_path / "out", fp8=False)
    assert (out / "tokenizer.json").read_text() == "{}" and not (out / "model.safetensors").is_symlink()
    linked(snapshot, "vocab.txt", tmp_path / "secret")
    with pytest.raises(UserError, match="leads by a link to .*secret"):
        export(snapshot, tmp_path / "out", fp8=False)


def test_no_tokenizer_file_is_a_link_elsewhere(tmp_path: Path) -> None:
    """Checkpoints write what was read of it."""
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "tokenizer.json").write_text("{}")
    (tmp_path / "secret").write_text("secret")
    linked(tmp_path / "t", "chat_template.jinja", tmp_path / "secret")
    with pytest.raises(UserError, match="'chat_template.jinja', which leads by a link"):
        hf.load_tokenizer_from(tmp_path / "t")


def test_partial_blocks_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    spec = replace(SPEC, num_heads=3, num_kv_heads=3)  # Q, K, V of 192 rows
    hf.save_model(tmp_path / "m", spec, model_of(spec, Recipe(name="bf16", num_layers=3)).state_dict())
    with pytest.raises(UserError, match=r"12 weights are not: model.layers.0.self_attn.q_proj.weight \[192, 256\]"):
        export(tmp_path / "m", tmp_path / "out", fp8=True)
    assert not (tmp_path / "out").exists()
    export(tmp_path / "m", tmp_path / "out", fp8=False)


def test_the_format_of_the_cache_changes_nothing_that_is_written(
    exported: tuple[Transformer, Path], tmp_path: Path
) -> None:
    cached = replace(RECIPE, kv_cache=kv_head(SPEC.head_dim))
    hf.save_model(tmp_path / "m", SPEC, model_of(SPEC, cached).state_dict(), dtype=torch.float32)
    out = export(tmp_path / "m", tmp_path / "fp8", fp8=True, recipe=cached)
    names = sorted(path.name for path in exported[1].iterdir())
    assert names == sorted(path.name for path in out.iterdir()) and hf.SINGLE in names
    assert all((out / name).read_bytes() == (exported[1] / name).read_bytes() for name in names)


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a folder"):
        export(tmp_path / "none", tmp_path / "out", fp8=False)
    hf.save_model(tmp_path / "m", SPEC, model_of(SPEC, RECIPE).state_dict())
    with pytest.raises(UserError, match="is the folder to export"):
        export(tmp_path / "m", tmp_path / "m", fp8=False)
    with pytest.raises(UserError, match="recipe is for 4 layers, but .* has 3"):
        export(tmp_path / "m", tmp_path / "out", fp8=True, recipe=Recipe(name="fp8", num_layers=4))


def test_every_linear_is_either_fp8_or_listed() -> None:
    for recipe in (RECIPE, Recipe(name="fp8", num_layers=3), Recipe("fp8", 3, num_first_layers_in_bf16=3)):
        table = hf.tensor_table(SPEC)
        fp8 = {p.name.removesuffix(".weight") for name in fp8_weights(SPEC, recipe) for p in table[name]}
        kept = set(quantization_config(SPEC, recipe)["modules_to_not_convert"])
        linears = {p.name.removesuffix(".weight") for pieces in table.values() for p in pieces if "_proj." in p.name}
        assert fp8 | kept == linears | {"lm_head"} and not fp8 & kept


def test_nothing_is_exported_among_the_checkpoints_of_a_run(tmp_path: Path) -> None:
    checkpoints = tmp_path / "run" / "checkpoints"
    model = checkpoints / "step_000001" / "model"
    hf.save_model(model, SPEC, model_of(SPEC, RECIPE).state_dict())
    for step in (2, 3):
        shutil.copytree(checkpoints / "step_000001", checkpoints / f"step_00000{step}")
    (tmp_path / "run" / "config.toml").touch()
    (tmp_path / "link").symlink_to(checkpoints / "step_000001")
    before = (model / hf.SINGLE).read_bytes()
    inside = (model, model.parent, model.parent / "out", checkpoints, checkpoints / "mine", tmp_path / "link/model")
    for place in inside:
        with pytest.raises(UserError, match=f"^{place} is among the checkpoints of the run {tmp_path / 'run'}. Give"):
            export(checkpoints / "step_000002", place, fp8=False)
    assert (model / hf.SINGLE).read_bytes() == before and not (checkpoints / "mine").exists()
    copied = shutil.move(checkpoints / "step_000003", tmp_path / "copied")
    (copied / "state.json").touch()
    with pytest.raises(UserError, match=f"is in the checkpoint {copied}"):
        export(checkpoints / "step_000002", copied / "model", fp8=False)
    assert export(checkpoints / "step_000002", tmp_path / "run" / "out", fp8=False).is_dir()
