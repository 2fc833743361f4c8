"""Hugging Face folders: `config.json` <-> `ModelSpec`, tensor names <-> ours. What jetrl does not compute is refused.

Config: a key that would change the computation is refused by name; defaults of absent keys are those of transformers;
both layouts of the rotary keys are read (`rope_theta` with `rope_scaling`, and `rope_parameters` of transformers 5).
Tensors: one table names them for both directions; Q, K, V and gate, up are the rows of one fused weight here.
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
from jetrl.spec import ModelSpec, RopeSpec

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# Tokenizer and prompt files of a model folder: what an export copies.
TOKENIZER_FILES = (
    "tokenizer*", "vocab.*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*"
)  # fmt: skip
GENERIC_TOKENIZERS = ("PreTrainedTokenizerFast", "TokenizersBackend")  # the class's names in transformers 4 and 5
MODEL_FILES = ("config.json", "generation_config.json", "*.safetensors", INDEX, *TOKENIZER_FILES)
# float16 is widened to float32, since BF16 has fewer digits: what is read equals what is stored.
READ_DTYPES = {torch.bfloat16: torch.bfloat16, torch.float32: torch.float32, torch.float16: torch.float32}


# --------------------------------------------------------------------------------------------------------------- config

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_MAX_POSITION = {"llama": 2048, "qwen2": 32768, "qwen3": 32768}

# Read into the spec.
_SPEC_KEYS = frozenset(
    "model_type architectures vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads head_dim rms_norm_eps max_position_embeddings tie_word_embeddings rope_theta rope_scaling "
    "rope_parameters layer_types".split()
)
# The only value with which the model is the one that jetrl computes, and what it means otherwise.
_REQUIRED_VALUES: dict[str, tuple[Any, str]] = {
    "hidden_act": ("silu", "another activation function"),
    "attention_bias": (False, "a bias on the attention projections"),
    "mlp_bias": (False, "a bias on the MLP projections"),
    "attention_dropout": (0, "dropout in attention"),
    "hidden_dropout": (0, "dropout"),
    "pretraining_tp": (1, "projections summed in slices"),
    "use_sliding_window": (False, "sliding-window attention"),
    "partial_rotary_factor": (1, "rotary embedding of a part of the head"),
    "rope_interleaved": (False, "interleaved rotary embedding"),
    "scale_embeddings": (False, "scaled embeddings"),
    "is_decoder": (True, "a model that is no decoder"),
    "add_cross_attention": (False, "cross attention"),
    "is_encoder_decoder": (False, "an encoder"),
}
# Without effect on the logits: bookkeeping, token ids, initialization, what transformers returns, sliding-window sizes
# of models that do not use them, and sampling defaults that old configs carry.
_HARMLESS_KEYS = frozenset(
    "_name_or_path transformers_version torch_dtype dtype use_cache initializer_range bos_token_id eos_token_id "
    "pad_token_id unk_token_id sep_token_id decoder_start_token_id sliding_window max_window_layers is_llama_config "
    "transformers.js_config attn_implementation _attn_implementation _attn_implementation_autoset output_attentions "
    "output_hidden_states return_dict use_return_dict torchscript chunk_size_feed_forward gradient_checkpointing "
    "id2label label2id problem_type finetuning_task task_specific_params do_sample temperature top_p top_k min_p "
    "typical_p repetition_penalty length_penalty max_length min_length num_beams num_return_sequences early_stopping "
    "max_new_tokens no_repeat_ngram_size num_beam_groups diversity_penalty encoder_no_repeat_ngram_size unsloth_fixed "
    "unsloth_version".split()
)
_ROPE_KEYS = frozenset("rope_type type rope_theta partial_rotary_factor".split())
_LLAMA3_KEYS = frozenset("factor low_freq_factor high_freq_factor original_max_position_embeddings".split())


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """The model of a `config.json`; UserError names every key with which it would be another model."""
    family = config.get("model_type")
    if family not in ARCHITECTURES:
        raise UserError(f"model_type = {family!r} is not supported; jetrl runs {', '.join(ARCHITECTURES)} models.")
    _refuse_other_models(config, family)
    num_heads = _size(config, "num_attention_heads")
    hidden_size = _size(config, "hidden_size")
    num_kv_heads = _size(config, "num_key_value_heads", default=num_heads if family == "llama" else None)
    if num_heads % num_kv_heads:
        raise UserError(f"num_attention_heads = {num_heads} is no multiple of num_key_value_heads = {num_kv_heads}.")
    max_position = _size(config, "max_position_embeddings", default=_MAX_POSITION[family])
    return ModelSpec(
        family=family,
        vocab_size=_size(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_size(config, "intermediate_size"),
        num_layers=_size(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_head_dim(config, family, hidden_size, num_heads),
        rms_norm_eps=_positive(config, "rms_norm_eps", 1e-6),
        rope=_rope(config),
        max_position=max_position,
        tie_embeddings=_flag(config, "tie_word_embeddings"),
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
    )


def hf_config(
    spec: ModelSpec, base: Mapping[str, Any] | None = None, dtype: str = "bfloat16", tokenizer: Any = None
) -> dict[str, Any]:
    """The `config.json` of a spec: `spec_from_hf(hf_config(spec)) == spec`. Keys of `base` that say more stay.

    Rotary keys are written in both layouts, so that programs on transformers 4 and 5 read the same model.
    """
    config: dict[str, Any] = {key: value for key, value in (base or {}).items() if key != "quantization_config"}
    if base is not None and spec_from_hf(config) != spec:
        raise ValueError(f"base_config describes another model: {spec_from_hf(config)}, not {spec}")
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if config.get(key) is None:
            config[key] = getattr(tokenizer, key, None)
    config.update(
        architectures=[ARCHITECTURES[spec.family]],
        model_type=spec.family,
        torch_dtype=dtype,
        dtype=dtype,
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        hidden_act="silu",
        rms_norm_eps=spec.rms_norm_eps,
        max_position_embeddings=spec.max_position,
        tie_word_embeddings=spec.tie_embeddings,
        rope_theta=spec.rope.theta,
        rope_scaling=_rope_scaling(spec.rope),
        rope_parameters={"rope_theta": spec.rope.theta, **(_rope_scaling(spec.rope) or {"rope_type": "default"})},
    )
    if spec.family != "qwen2":
        config["attention_bias"] = False
    if spec.family == "llama":
        config["mlp_bias"] = False
    else:
        config["use_sliding_window"] = False
    return config


def _refuse_other_models(config: Mapping[str, Any], family: str) -> None:
    architectures = config.get("architectures") or [ARCHITECTURES[family]]
    if list(architectures) != [ARCHITECTURES[family]]:
        raise UserError(f"architectures = {architectures} is not supported; a {family} model for jetrl has "
                        f"[{ARCHITECTURES[family]!r}].")  # fmt: skip
    if config.get("quantization_config"):
        method = dict(config["quantization_config"]).get("quant_method", "unknown")
        raise UserError(
            f"quantization_config (quant_method = {method!r}): the weights are already quantized, also if jetrl "
            "exported them. Start from the BF16 model; jetrl quantizes it as the recipe says."
        )
    for key, (value, meaning) in _REQUIRED_VALUES.items():
        if config.get(key) is not None and config[key] != value:
            given = config[key]
            raise UserError(f"{key} = {given!r} asks for {meaning}, which is not supported; use {key} = {value!r}.")
    layer_types = config.get("layer_types") or []
    if other := sorted(set(layer_types) - {"full_attention"}):
        raise UserError(f"layer_types has {', '.join(other)}, which is not supported; only full_attention is.")
    if layer_types and len(layer_types) != config.get("num_hidden_layers"):
        raise UserError(f"layer_types has {len(layer_types)} entries for num_hidden_layers = "
                        f"{config.get('num_hidden_layers')}.")  # fmt: skip
    known = _SPEC_KEYS | _REQUIRED_VALUES.keys() | _HARMLESS_KEYS | {"quantization_config"}
    # A key that is off (null, false, zero, empty) asks for nothing.
    if unknown := sorted(key for key, value in config.items() if key not in known and value):
        raise UserError(
            f"{unknown[0]} = {config[unknown[0]]!r} is not known to jetrl for a {family} model and may change what it "
            f"computes (unknown keys: {', '.join(unknown)}). If the model does not need it, remove it from config.json."
        )


def _rope(config: Mapping[str, Any]) -> RopeSpec:
    """Rotary parameters from either layout; where both are given they must say the same."""
    read = [_rope_of(config, key) for key in ("rope_scaling", "rope_parameters") if config.get(key)]
    if not read:
        return RopeSpec(theta=_positive(config, "rope_theta", 10000.0))
    if read[0] != read[-1]:
        raise UserError(
            f"rope_scaling = {config['rope_scaling']} (rope_theta = {config.get('rope_theta')}) and rope_parameters = "
            f"{config['rope_parameters']} differ. Keep the one that the model was trained with."
        )
    return read[0]


def _rope_of(config: Mapping[str, Any], key: str) -> RopeSpec:
    rope = config[key]
    if not isinstance(rope, Mapping) or any(isinstance(value, Mapping) for value in rope.values()):
        raise UserError(f"{key} = {rope!r} is not supported; one set of rotary parameters for all layers is.")
    theta = _positive(rope if rope.get("rope_theta") is not None else config, "rope_theta", 10000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ("default", "llama3"):
        raise UserError(f"{key}: rope type {kind!r} is not supported; 'default' and 'llama3' are.")
    if rope.get("partial_rotary_factor") not in (None, 1):
        raise UserError(f"{key}: partial_rotary_factor = {rope['partial_rotary_factor']} is not supported; 1.0 is.")
    allowed = _ROPE_KEYS | (_LLAMA3_KEYS if kind == "llama3" else frozenset())
    if unknown := sorted(name for name, value in rope.items() if name not in allowed and value is not None):
        raise UserError(f"{key}: {unknown[0]} = {rope[unknown[0]]!r} is not supported with rope type {kind!r}.")
    if kind == "default":
        return RopeSpec(theta=theta)
    if missing := sorted(name for name in _LLAMA3_KEYS if rope.get(name) is None):
        raise UserError(f"{key}: rope type 'llama3' needs {', '.join(missing)}.")
    low, high = _positive(rope, "low_freq_factor", None), _positive(rope, "high_freq_factor", None)
    if low >= high:
        raise UserError(f"{key}: low_freq_factor = {low} must be below high_freq_factor = {high}.")
    return RopeSpec(
        theta=theta,
        factor=_positive(rope, "factor", None),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position=_size(rope, "original_max_position_embeddings"),
    )


def _rope_scaling(rope: RopeSpec) -> dict[str, Any] | None:
    if rope.factor is None:
        return None
    return {
        "rope_type": "llama3",
        "factor": rope.factor,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
        "original_max_position_embeddings": rope.original_max_position,
    }


def _head_dim(config: Mapping[str, Any], family: str, hidden_size: int, num_heads: int) -> int:
    if config.get("head_dim") is None:
        if family == "qwen3":
            return 128
        if hidden_size % num_heads:
            raise UserError(f"give head_dim: hidden_size = {hidden_size} is no multiple of {num_heads} heads.")
    head_dim = _size(config, "head_dim", default=hidden_size // num_heads)
    if head_dim % 2:
        raise UserError(f"head_dim = {head_dim} is odd; rotary embedding turns pairs, so it must be even.")
    return head_dim


def _size(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key) if config.get(key) is not None else default
    if value is None:
        raise UserError(f"{key} is missing; a model config needs it.")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"{key} = {value!r} must be a whole number of at least 1.")
    return value


def _positive(config: Mapping[str, Any], key: str, default: float | None) -> float:
    value = config.get(key) if config.get(key) is not None else default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise UserError(f"{key} = {value!r} must be a number above 0.")
    return float(value)


def _flag(config: Mapping[str, Any], key: str) -> bool:
    value = config.get(key)
    if not isinstance(value, bool | None):
        raise UserError(f"{key} = {value!r} must be true or false.")
    return bool(value)


# ---------------------------------------------------------------------------------------------------------------- names


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
            "*.safetensors); jetrl does not download models by name."
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
        for path in temporary.iterdir():
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
