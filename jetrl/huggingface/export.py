"""Export of a trained model: a plain BF16 folder, or DeepSeek's block FP8 with exactly the codes that were trained.

A model of `w8a16` is trained as code * 2^k, a BF16 number, so its BF16 folder has these values: the trained policy
itself for any program that computes in BF16.

FP8 layout of a projection [N, K]: `weight` float8_e4m3fn [N, K] and `weight_scale_inv` float32 [N/128, K/128], where
`value = weight * weight_scale_inv` (DeepSeek's name; it is the factor of the codes). Embeddings, lm_head, norms and the
layers that the recipe keeps in BF16 stay BF16 and are listed in `modules_to_not_convert`.
"""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jetrl.errors import UserError
from jetrl.huggingface import carried
from jetrl.huggingface import provenance as trained
from jetrl.huggingface import read as hf
from jetrl.huggingface.fp8 import refuse_second_export
from jetrl.huggingface.write import name_tokenizer_class
from jetrl.kernels.quantize.ops import quantize_weight, weight_values
from jetrl.model.block import Piece
from jetrl.precision.blocks.layouts import linears_of
from jetrl.precision.formats import BLOCK
from jetrl.precision.recipe import Recipe
from jetrl.spec import ModelSpec
from jetrl.untrusted import inside

HF_SUBFOLDER = "model"  # of a checkpoint
_DEEPSEEKS = ".kv_a_proj_with_mqa.weight"  # its 576 rows end with half a block in DeepSeek's own files, too


def export(
    source: str | Path,
    out: str | Path,
    fp8: bool,
    recipe: Recipe | None = None,
    max_shard_bytes: int = 5 * 10**9,
    trained_with: Recipe | None = None,
    base: Path | None = None,
) -> Path:
    """Write the model of `source` (a model folder, or a checkpoint with one in `model/`) to `out`, whole or not at all.

    `recipe` is the one that the model was trained with: it says which layers stay in BF16 and how scales are rounded.
    Without it every layer becomes FP8 with FP32 scales. Weights are rounded to BF16 first, as publishing does. What the
    model was trained with is noted in its config.json: what `source` says, else `trained_with`. Parts that jetrl does
    not train, such as vision, are taken from `base`, the folder that a run began with, or from `source` (`carried`).
    Next to weights and config, only files of `files.KNOWN_FILES` are copied. UserError where a file is a link that
    leads out of the folder.
    """
    folder, out = _model_folder(Path(source)), Path(out)
    if out.absolute().resolve() == folder.absolute().resolve():
        raise UserError(f"{out} is the folder to export; give another output path, so that the original is kept.")
    if out.is_symlink() and not out.exists():
        raise UserError(f"{out} is a link to {out.readlink()}, which does not exist. Give another output path.")
    refuse_checkpoints(out)
    spec = hf.spec_from_folder(folder)
    recipe = recipe or Recipe(name="fp8", num_layers=spec.num_layers)
    if fp8:
        if recipe.num_layers != spec.num_layers:
            raise UserError(f"the recipe is for {recipe.num_layers} layers, but {folder} has {spec.num_layers}.")
        _require_whole_blocks(spec, recipe)
        refuse_second_export(folder, hf.read_config(folder))
    hf.require_own(folder)
    extras = _copied(folder)
    if (tokenizer := folder / "tokenizer_config.json") in extras:
        hf.read_json(tokenizer)  # its copy is read and changed, under a name that is soon gone
    state = hf.load_state(folder, spec)
    given = hf.read_config(folder)
    config = hf.hf_config(spec, given)
    if (said := given.get(trained.KEY)) or trained_with is not None:
        config[trained.KEY] = said or trained.record(trained_with)  # type: ignore[arg-type]  # one of the two is there
    types = hf.stored_types(spec, torch.bfloat16)
    tensors = {name: (tensor, types[name]) for name, tensor in hf.to_hf(spec, state).items()}
    if fp8:
        config["quantization_config"] = quantization_config(spec, recipe)
        for ours in fp8_weights(spec, recipe):
            tensors.update(_quantized(spec, ours, state[ours], recipe.pow2_weights))
    elif recipe.name == "w8a16":
        for ours in fp8_weights(spec, recipe):
            tensors.update(_values(spec, ours, state[ours]))

    completed, written = carried.completed((folder, base), config, tensors)

    def copy(target: Path) -> None:
        for path in extras:
            shutil.copyfile(path, target / path.name)
        name_tokenizer_class(target)

    hf.write_folder(out, completed, written, copy, max_shard_bytes)
    return out


def note_for_vllm() -> str:
    """What to set before vLLM loads an FP8 folder in this environment; empty where nothing needs it."""
    if any(importlib.util.find_spec(module) is None for module in ("vllm", "deep_gemm")):
        return ""
    return (
        "To load it with vLLM in this environment, set VLLM_USE_DEEP_GEMM=0: with sgl-deep-gemm next to it vLLM loses "
        "the scales of FP8 weights."
    )


def refuse_checkpoints(out: Path) -> None:
    """UserError for a place among the checkpoints of a run: what lies there has hashes, and is removed as they age."""
    place = out.absolute().resolve()
    for folder in (place, *place.parents):
        if folder.name == "checkpoints" and (folder.parent / "config.toml").is_file():
            raise UserError(f"{out} is among the checkpoints of the run {folder.parent}. Give another output path.")
        if (folder / "state.json").is_file() and (folder / HF_SUBFOLDER).is_dir():
            raise UserError(f"{out} is in the checkpoint {folder}. Give another output path.")


def fp8_weights(spec: ModelSpec, recipe: Recipe) -> list[str]:
    """Our names of the weights that are FP8 in the recipe, in model order."""
    return [name for layer in range(spec.num_layers) if not recipe.is_bf16_layer(layer)
            for name in _linear_weights(spec, layer)]


def _linear_weights(spec: ModelSpec, layer: int) -> list[str]:
    return [f"layers.{layer}.{block}.{role}.weight" for block, role in linears_of(spec, layer)]


def quantization_config(spec: ModelSpec, recipe: Recipe) -> dict[str, Any]:
    """The `quantization_config` of the export; loaders differ in the name they read the list of BF16 modules from."""
    table, converted = hf.tensor_table(spec), set(fp8_weights(spec, recipe))
    # routers of experts, too, are matrices of a layer that stay as they are
    matrices = [ours for ours, pieces in table.items() if ours.startswith("layers.") and len(pieces[0].shape) == 2]
    kept = [piece.name for ours in matrices if ours not in converted for piece in table[ours]]
    modules = ["lm_head", *(name.removesuffix(".weight") for name in kept)]
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": modules,
        "ignored_layers": modules,
    }


def _quantized(
    spec: ModelSpec, ours: str, weight: Tensor, pow2: bool
) -> dict[str, tuple[Tensor, torch.dtype]]:
    """Codes and scales of one weight, split into the projections that are fused in it."""
    pieces, rows = _pieces(spec, ours)
    q = quantize_weight(weight.to(torch.bfloat16), rows, pow2)
    codes = q.codes.split(rows)
    scales = q.scale.split([-(-n // BLOCK) for n in rows])
    out: dict[str, tuple[Tensor, torch.dtype]] = {}
    for piece, code, scale in zip(pieces, codes, scales, strict=True):
        out[piece.name] = (code, torch.float8_e4m3fn)
        out[piece.name + "_scale_inv"] = (scale, torch.float32)
    return out


def _values(spec: ModelSpec, ours: str, weight: Tensor) -> dict[str, tuple[Tensor, torch.dtype]]:
    """What one weight of `w8a16` was trained as: the values of its codes, BF16."""
    pieces, rows = _pieces(spec, ours)
    values = weight_values(quantize_weight(weight.to(torch.bfloat16), rows, pow2=True)).split(rows)
    return {piece.name: (value, torch.bfloat16) for piece, value in zip(pieces, values, strict=True)}


def _pieces(spec: ModelSpec, ours: str) -> tuple[tuple[Piece, ...], tuple[int, ...]]:
    """The projections that are fused in a weight, and the rows of each."""
    pieces = hf.tensor_table(spec)[ours]
    return pieces, tuple(piece.shape[0] for piece in pieces)


def _require_whole_blocks(spec: ModelSpec, recipe: Recipe) -> None:
    """Refuse sizes with a partial last block, which jetrl trains but other programs misread.

    transformers derives the block from `rows / scale rows` when it dequantizes, so that 192 rows with 2 scales become
    two blocks of 96 (wrong values, no error); vLLM refuses such sizes in its fused projections. The rows of DeepSeek's
    `kv_a_proj_with_mqa` are the exception that programs know.
    """
    table = hf.tensor_table(spec)
    pieces = [piece for ours in fp8_weights(spec, recipe) for piece in table[ours]]
    partial = [
        piece for piece in pieces
        if any(size % BLOCK for size in (piece.shape[1:] if piece.name.endswith(_DEEPSEEKS) else piece.shape))
    ]
    if partial:
        shown = ", ".join(f"{piece.name} {list(piece.shape)}" for piece in partial[:3])
        raise UserError(
            f"FP8 export needs sizes that are multiples of {BLOCK}, since other programs misread a smaller last block; "
            f"{len(partial)} weights are not: {shown}{', ...' if len(partial) > 3 else ''}. Export this model in BF16."
        )


def _model_folder(source: Path) -> Path:
    if not (source / "config.json").is_file() and (source / HF_SUBFOLDER).is_dir():
        return inside(source, HF_SUBFOLDER)
    return source


def _copied(folder: Path) -> list[Path]:
    """The files that an export copies as they are. UserError for a link that leads out of the folder."""
    return [path for name in hf.KNOWN_FILES if (path := inside(folder, name)).is_file()]


def left_out(folder: Path) -> list[str]:
    """Names of the files of a model folder that its export does not have, such as a README or a tokenizer of others."""
    written = {"config.json", hf.INDEX, *hf.KNOWN_FILES}
    names = sorted(path.name for path in folder.iterdir() if not path.name.startswith(".") and path.name not in written)
    return [name for name in names if not name.endswith(".safetensors")]
