"""What an export carries through unchanged: the parts of a published model that jetrl neither runs nor trains.

A Qwen3.5 folder holds a model with vision, and a head that predicts several tokens. The trained text model takes the
place of its text model, under the names that it has there; all other tensors are those of the folder, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jetrl.huggingface import hybrid
from jetrl.huggingface import read as hf

Tensors = Mapping[str, tuple[Tensor, torch.dtype]]


def is_whole(folder: Path) -> bool:
    """Whether a folder holds more than the text model."""
    return hf.read_config(folder).get("model_type") in hybrid.NESTED


def completed(
    folders: Iterable[Path | None], config: Mapping[str, Any], tensors: Tensors
) -> tuple[Mapping[str, Any], Tensors]:
    """Config and tensors of a text model within the model in the first of `folders` that holds more than one; its other
    tensors are read now. Without such a folder, the text model as it is."""
    folder = next((each for each in folders if each is not None and is_whole(each)), None)
    if folder is None:
        return config, tensors
    outer = {key: value for key, value in hf.read_config(folder).items() if key != "quantization_config"}
    text = {key: value for key, value in config.items() if key not in ("architectures", "quantization_config")}
    rest = hf.tensors_of(folder, lambda name: name.startswith(hybrid.CARRIED))
    named: dict[str, tuple[Tensor, torch.dtype]] = {hybrid.nested_name(name): held for name, held in tensors.items()}
    named |= {name: (tensor, tensor.dtype) for name, tensor in rest.items()}
    whole = {**outer, "text_config": text, "tie_word_embeddings": config["tie_word_embeddings"]}
    if given := config.get("quantization_config"):
        modules = [hybrid.nested_name(name) for name in given["modules_to_not_convert"]]
        modules += sorted(name.removesuffix(".weight") for name, t in rest.items() if t.ndim > 1)
        whole["quantization_config"] = {**given, "modules_to_not_convert": modules, "ignored_layers": modules}
    return whole, named
