"""Tensor names: ours <-> Hugging Face's, one table for both directions, collected from the blocks.

Q, K, V and gate, up are the rows of one fused weight here.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from jetrl.model.block import Piece
from jetrl.model.blocks import MODULES
from jetrl.precision.blocks.layouts import blocks_of
from jetrl.precision.lora import Lora
from jetrl.spec import ModelSpec


def tensor_table(spec: ModelSpec) -> dict[str, tuple[Piece, ...]]:
    """Our parameter name -> the Hugging Face tensors whose rows it holds, in our order."""
    D, V = spec.hidden_size, spec.vocab_size
    table: dict[str, tuple[Piece, ...]] = {"embed.weight": (Piece("model.embed_tokens.weight", (V, D)),)}
    for layer in range(spec.num_layers):
        for block in blocks_of(spec, layer):
            names = MODULES[block.kind].checkpoint_names(spec, layer)
            table |= {f"layers.{layer}.{block.name}.{ours}": pieces for ours, pieces in names.items()}
    table["norm.weight"] = (Piece("model.norm.weight", (D,)),)
    if not spec.tie_embeddings:
        table["lm_head.weight"] = (Piece("lm_head.weight", (V, D)),)
    return table


def stored_types(spec: ModelSpec, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """By Hugging Face's name: in which type a tensor is written, beside others of `dtype`."""
    return {piece.name: piece.stored(dtype) for pieces in tensor_table(spec).values() for piece in pieces}


def adapter_table(spec: ModelSpec, lora: Lora | None) -> dict[str, tuple[Piece, ...]]:
    """Our name of each parameter of adapters -> the tensors whose rows it holds, as PEFT names them within the base."""
    table: dict[str, tuple[Piece, ...]] = {}
    for layer in range(spec.num_layers if lora is not None else 0):
        assert lora is not None
        for block in blocks_of(spec, layer):
            names = MODULES[block.kind].checkpoint_names(spec, layer)
            for role, linear in block.linears(spec).items():
                if (own := lora.of(linear.experts)) is None or not own.adapted(linear.projections):
                    continue
                whole, each = names[f"{role}.weight"], len(linear.out_sections)
                bases = [whole[first + i] for first in range(0, len(whole), each)
                         for i in own.adapted(linear.projections)]
                stems, at = [base.name.removesuffix("weight") for base in bases], f"layers.{layer}.{block.name}.{role}"
                table[f"{at}.lora.a.weight"] = tuple(
                    Piece(f"{stem}lora_A.weight", (own.rank, linear.in_size)) for stem in stems
                )
                table[f"{at}.lora.b.weight"] = tuple(
                    Piece(f"{stem}lora_B.weight", (base.shape[0], own.rank))
                    for stem, base in zip(stems, bases, strict=True)
                )
    return table


def adapted_projections(spec: ModelSpec, lora: Lora) -> list[str]:
    """Those of the adapters' targets that the model has."""
    present = {piece.name.split(".")[-3] for pieces in adapter_table(spec, lora).values() for piece in pieces}
    return [name for name in lora.targets if name in present]


def to_hf(spec: ModelSpec, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our state as Hugging Face tensors; fused weights become views of their rows. Names and shapes must fit `spec`."""
    table = tensor_table(spec)
    if state.keys() != table.keys():
        raise ValueError(f"state and spec differ in the parameters {sorted(state.keys() ^ table.keys())[:8]}")
    out: dict[str, Tensor] = {}
    for ours, pieces in table.items():
        rows = [piece.shape[0] for piece in pieces]
        shape = (sum(rows), *pieces[0].flat[1:])
        if tuple(state[ours].shape) != shape:
            raise ValueError(f"{ours} has shape {tuple(state[ours].shape)}; the spec asks for {shape}")
        parts = state[ours].detach().split(rows)
        out.update((piece.name, part.reshape(piece.shape)) for piece, part in zip(pieces, parts, strict=True))
    return out
