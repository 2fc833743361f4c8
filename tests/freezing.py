"""Runs that freeze some of their parameters, for tests: which ones, and what the forward pass reads of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from jetrl.kernels.qtensor import QTensor
from jetrl.model.master import masters_of
from jetrl.model.transformer import Transformer
from jetrl.run import setup


def base(name: str) -> bool:
    """All linears: what LoRA freezes. Their FP8 weights have no master; norms, biases and embedding train."""
    return name.startswith("layers.") and name.endswith(("qkv.weight", "o.weight", "gate_up.weight", "down.weight"))


def lower(name: str) -> bool:
    """The embedding, the first layer, and a vector of the second: an x that asks for no gradient comes in above."""
    return name == "embed.weight" or name.startswith("layers.0.") or name in (
        "layers.1.attn.norm.weight", "layers.1.attn.qkv.bias"
    )


def build_frozen(monkeypatch: pytest.MonkeyPatch, which: Callable[[str], bool]) -> list[Transformer]:
    """Runs build their policy with these frozen, from the weights that they begin with; the policies of all runs."""
    made: list[Transformer] = []
    build = setup.build_model

    def frozen(*args: Any, weights: bool = True, **options: Any) -> Transformer:
        made.append(build(*args, weights=True, **options).freeze(which))
        return made[-1]

    monkeypatch.setattr(setup, "build_model", frozen)
    return made


def bits(model: Transformer, which: Callable[[str], bool]) -> dict[str, Tensor]:
    """What the forward pass reads of these parameters: codes and scales, or values."""
    found: dict[str, Tensor] = {}
    for name in filter(which, masters_of(model)):
        owner, _, kind = name.rpartition(".")
        module: Any = model.get_submodule(owner)
        if kind == "bias":
            found[name] = module.published_bias.clone()
            continue
        found[name] = module.published.clone()
        q = getattr(module, "quantized", None)
        # Weights alone in FP8 are read as values. A resumed run may have other codes with the same (`frozen_value`).
        if isinstance(q, QTensor) and not module.weight_only:
            found |= {f"{name} codes": q.codes.view(torch.uint8).clone(), f"{name} scale": q.scale.clone()}
    return found
