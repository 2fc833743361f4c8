"""What an export carries through unchanged: the parts of a published model that jetrl neither runs nor trains.

A Qwen3.5 folder holds a model with vision, and a head that predicts several tokens. The trained text model takes the
place of its text model, under the names that it has there. DeepSeek's folders have layers for drafts of further tokens
(MTP) behind the model's own. All such tensors are those of the folder, bit for bit; only an export in BF16 has FP8 ones
as BF16 values, since its config says nothing of scales.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jetrl.huggingface import deepseek, fp8, hybrid
from jetrl.huggingface import read as hf

Tensors = Mapping[str, tuple[Tensor, torch.dtype]]


def is_whole(folder: Path) -> bool:
    """Whether a folder holds more than the model that is trained."""
    return bool(names_of(folder)) or hf.read_config(folder).get("model_type") in hybrid.NESTED


def may_hold_more(folder: Path) -> bool:
    """The same by config.json alone, whose weights need not be there."""
    config = hf.read_config(folder)
    return config.get("model_type") in hybrid.NESTED or deepseek.mtp_layers(config) > 0


def names_of(folder: Path) -> list[str]:
    """The tensors of a folder that are no part of the model that is trained, in order of their names."""
    spec = hf.spec_from_folder(folder)
    return sorted(name for name in hf.tensor_files(folder) if hf.is_carried(name, spec))


def completed(
    folders: Iterable[Path | None], config: Mapping[str, Any], tensors: Tensors
) -> tuple[Mapping[str, Any], Tensors]:
    """Config and tensors of a trained model within the model in the first of `folders` that holds more than one; its
    other tensors are read now. Without such a folder, the trained model as it is."""
    folder = next((each for each in folders if each is not None and is_whole(each)), None)
    if folder is None:
        return config, tensors
    base, names = hf.read_config(folder), set(names_of(folder))
    rest = hf.tensors_of(folder, lambda name: name in names)
    if not config.get("quantization_config"):
        rest = fp8.widened(rest)
    if base.get("model_type") not in hybrid.NESTED:
        layers = {key: base[key] for key in deepseek.MTP_KEYS if base.get(key) is not None}
        whole, named = {**config, **layers}, dict(tensors)
    else:
        outer = {key: value for key, value in base.items() if key != "quantization_config"}
        text = {key: value for key, value in config.items() if key not in ("architectures", "quantization_config")}
        whole = {**outer, "text_config": text, "tie_word_embeddings": config["tie_word_embeddings"]}
        named = {hybrid.nested_name(name): held for name, held in tensors.items()}
    named |= {name: (tensor, tensor.dtype) for name, tensor in rest.items()}
    if given := config.get("quantization_config"):
        whole["quantization_config"] = {**given, **_kept(given["modules_to_not_convert"], base, rest)}
    return whole, named


def _kept(modules: Iterable[str], base: Mapping[str, Any], rest: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """The lists of modules that are not FP8, with the carried ones."""
    nested = base.get("model_type") in hybrid.NESTED
    found = [hybrid.nested_name(name) if nested else name for name in modules]
    plain = (name for name, t in rest.items() if t.ndim > 1 and name + fp8.SUFFIX not in rest)
    found += sorted(name.removesuffix(".weight") for name in plain if not name.endswith(fp8.SUFFIX))
    return {"modules_to_not_convert": found, "ignored_layers": found}
