"""Folders of adapters in PEFT's form: `adapter_config.json` and `adapter_model.safetensors`, without the base.

Names are PEFT's (`base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight`), values BF16: what was published.
What PEFT has no place for stands in a file of ours beside them, `jetrl_adapter.json`: the precision of the training,
and a digest of the base that the adapters were trained over.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from jetrl.huggingface.provenance import record
from jetrl.huggingface.write import sync
from jetrl.model.names import adapted_projections, adapter_table
from jetrl.precision.lora import Lora
from jetrl.precision.recipe import Recipe
from jetrl.spec import ModelSpec

CONFIG, WEIGHTS, RECORD = "adapter_config.json", "adapter_model.safetensors", "jetrl_adapter.json"
PREFIX = "base_model.model."  # of PEFT, before the base's own names
NOT_OURS = ("config.json",)  # of a model's small files: it is the base's


def adapter_config(lora: Lora, spec: ModelSpec, base: str, revision: str | None) -> dict[str, Any]:
    """The content of `adapter_config.json`; `base` is the folder or the name on the hub of what it was trained over."""
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "revision": revision,
        "r": lora.rank, "lora_alpha": int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
        "target_modules": adapted_projections(spec, lora), "use_rslora": lora.rslora,
        "lora_dropout": 0.0, "bias": "none", "use_dora": False, "fan_in_fan_out": False, "inference_mode": True,
        "init_lora_weights": True, "modules_to_save": None,
    }


def write_adapters(
    folder: Path, spec: ModelSpec, recipe: Recipe, whole: Callable[[str], Tensor], small: Mapping[str, bytes],
    base: tuple[str, str | None], digest: str | None,
) -> list[Path]:
    """Fill the existing `folder`; its files of tensors. `whole(our name)` gives a parameter with the rows of all ranks,
    `small` are the files of a model (`write.small_files`), and `base` names it, with its revision. All is synced."""
    assert recipe.lora is not None
    held: dict[str, Tensor] = {}
    for ours, pieces in adapter_table(spec, recipe.lora).items():
        parts = whole(ours).split([piece.shape[0] for piece in pieces])
        for piece, part in zip(pieces, parts, strict=True):
            held[PREFIX + piece.name] = part.to("cpu", torch.bfloat16, copy=True).contiguous()
    files = {name: content for name, content in small.items() if name not in NOT_OURS}
    files[CONFIG] = _json(adapter_config(recipe.lora, spec, *base))
    files[RECORD] = _json(record(recipe) | {"base": digest})
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
        sync(folder / name)
    save_file(held, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / WEIGHTS).chmod(folder.stat().st_mode & 0o666)  # safetensors makes files that only their owner reads
    sync(folder / WEIGHTS)
    return [folder / WEIGHTS]


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
