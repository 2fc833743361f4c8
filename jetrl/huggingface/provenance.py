"""What a model was trained with, as its folder says: the key `jetrl_training` of config.json.

A private key, which other programs keep and do not read. The usual key for the KV cache, `kv_cache_scheme` of
compressed-tensors and ModelOpt, promises one static scale per tensor, stored with the weights; ours are powers of
two for each token and head, made while decoding, so writing that key would be wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from jetrl import __version__
from jetrl.choices import CacheKind, Precision, ScaleKind
from jetrl.errors import UserError
from jetrl.precision.recipe import Recipe

KEY = "jetrl_training"
_CHOICES = {
    "precision": get_args(Precision), "kv_cache": get_args(CacheKind), "weight_scale": get_args(ScaleKind),
    "activation_scale": get_args(ScaleKind),
}
_COUNTS = ("num_first_layers_in_bf16", "num_last_layers_in_bf16")


@dataclass(frozen=True, slots=True)
class Trained:
    """The precision flow of a training run. `quant` are the keys of the config's [quant] that mean something in it."""

    precision: str
    quant: Mapping[str, Any]

    @property
    def kv_cache(self) -> str:
        return self.quant.get("kv_cache", "bf16")


def record(recipe: Recipe) -> dict[str, Any]:
    """The value of `jetrl_training` for a model that was trained with `recipe`."""
    said: dict[str, Any] = {"version": __version__, "precision": recipe.name}
    said["kv_cache"] = "fp8" if recipe.kv_cache.is_quantized else "bf16"
    if recipe.name != "bf16":
        keys = _COUNTS if recipe.name == "w8a16" else ("weight_scale", "activation_scale", *_COUNTS)
        said |= {key: getattr(recipe, key) for key in keys}
    return said


def trained_of(config: Mapping[str, Any], folder: str | Path) -> Trained | None:
    """What the config.json of `folder` says; None if it says nothing. UserError for values that jetrl never writes.
    """
    said = config.get(KEY)
    if said is None:
        return None
    where = f"{Path(folder) / 'config.json'}: {KEY}"
    cure = "Correct it, or remove the key and give precision and kv_cache yourself."
    if not isinstance(said, Mapping) or "precision" not in said:
        raise UserError(f"{where} = {said!r} does not name a precision. {cure}")
    for key, allowed in _CHOICES.items():
        if key in said and said[key] not in allowed:
            raise UserError(f"{where}.{key} = {said[key]!r} is not one of {', '.join(allowed)}. {cure}")
    for key in _COUNTS:
        value = said.get(key, 0)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise UserError(f"{where}.{key} = {value!r} is not a number of layers. {cure}")
    if said["precision"] == "bf16":
        return Trained("bf16", {})
    keys = [key for key in (*_CHOICES, *_COUNTS) if key != "precision"]
    return Trained(said["precision"], {key: said[key] for key in keys if key in said})
