"""The published weights by Hugging Face name, for engines to alias, copy or receive, and their checksum."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from math import prod
from typing import get_args

import torch
from torch import Tensor

from jetrl.kernels.qtensor import QTensor
from jetrl.model.block import Piece
from jetrl.model.linear import FlowLinear
from jetrl.model.names import adapter_table, tensor_table
from jetrl.model.published import Published
from jetrl.model.transformer import Transformer
from jetrl.precision.blocks.layouts import linears_of
from jetrl.precision.formats import BLOCK
from jetrl.precision.recipe import Recipe
from jetrl.spec import ModelSpec
from jetrl.types import Side, WeightTensor


class PublishedWeights(Mapping[str, WeightTensor]):
    """A view of a model: nothing is computed until a tensor is read, and reading gives what is published at that time.

    A linear that the rollout computes in FP8 gives its E4M3 codes and block scales, even where training is BF16
    (`fp8_rollout`), and so does one of `w8a16`, whose BF16 GEMMs read code * scale. All others, norms, embedding and
    biases give the values in `dtype` (BF16). Fused projections are split into their rows. A tied lm_head is the
    embedding, and appears only under the embedding's name. Adapters come last, in BF16, named as PEFT does.
    """

    def __init__(self, model: Transformer) -> None:
        self._model = model
        self._places: dict[str, tuple[str, int]] | None = None  # Hugging Face's name -> our parameter, piece number
        self._table: dict[str, tuple[Piece, ...]] = {}

    def _place(self) -> dict[str, tuple[str, int]]:
        if self._places is None:
            spec = self._model.spec
            self._table = tensor_table(spec) | adapter_table(spec, self._model.recipe.lora)
            self._places = {
                piece.name: (ours, i) for ours, pieces in self._table.items() for i, piece in enumerate(pieces)
            }
        return self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._place())

    def __len__(self) -> int:
        return len(self._place())

    def __getitem__(self, name: str) -> WeightTensor:
        ours, number = self._place()[name]
        rows = [piece.shape[0] for piece in self._table[ours]]
        held = _held(self._model, ours)
        if not isinstance(held, QTensor):
            part = _part(held, rows, number)
            return WeightTensor(part.view(self._table[ours][number].shape))
        assert held.row_sections == tuple(rows), "blocks restart at each projection, so that they can be split"
        return WeightTensor(
            _part(held.codes, rows, number), _part(held.scale, [-(-n // BLOCK) for n in rows], number)
        )


def _part(fused: Tensor, rows: list[int], number: int) -> Tensor:
    return fused.narrow(0, sum(rows[:number]), rows[number])


def _held(model: Transformer, ours: str) -> Tensor | QTensor:
    """What the rollout's forward reads of one of our parameters."""
    owner, _, kind = ours.rpartition(".")
    module = model.get_submodule(owner)
    assert isinstance(module, FlowLinear | Published), ours
    if isinstance(module, FlowLinear):
        if kind == "bias":
            assert module.published_bias is not None, "publish() has not run"
            return module.published_bias
        if module.recipes["rollout"] is not None or module.weight_only:
            assert module.quantized is not None, "publish() has not run"
            return module.quantized
    assert module.published.numel(), "publish() has not run"
    return module.published


def published(model: Transformer) -> Mapping[str, WeightTensor]:
    """Every tensor that the rollout's forward reads, by its Hugging Face name, as views of the model's own memory."""
    return PublishedWeights(model)


def coded_weights(spec: ModelSpec, recipe: Recipe) -> frozenset[str]:
    """Our names of the weights of which a side reads codes."""
    return frozenset(
        f"layers.{layer}.{block}.{role}.weight" for layer in range(spec.num_layers)
        for block, role in linears_of(spec, layer)
        if recipe.weight_only(layer) is not None or any(recipe.linear(layer, role, side) for side in get_args(Side))
    )


def published_bytes(spec: ModelSpec, recipe: Recipe) -> int:
    """Bytes of all that a model without masters holds of its weights; the rotary tables come on top.

    A linear that a side computes in FP8 has E4M3 codes and an FP32 scale for each 128x128 block; one that a side
    computes in BF16 has BF16 values, and under `w8a16` both. The embedding, the lm_head, norms and biases are BF16.
    """
    tables = tensor_table(spec) | adapter_table(spec, recipe.lora)
    total = sum(p.stored(torch.bfloat16).itemsize * prod(p.shape) for pieces in tables.values() for p in pieces)
    for layer in range(spec.num_layers):
        for (_, role), shape in linears_of(spec, layer).items():
            sides = [recipe.linear(layer, role, side) for side in get_args(Side)]
            values, blocks = sum(shape.sections) * shape.in_size, -(-shape.in_size // BLOCK)
            if any(sides) or recipe.weight_only(layer) is not None:
                total += values + 4 * blocks * sum(-(-rows // BLOCK) for rows in shape.sections)
            if all(sides):
                total -= 2 * values
    return total


def checksum(tensors: Mapping[str, WeightTensor]) -> str:
    """16 hex digits of the SHA-256 over names, dtypes, shapes and all bytes, in sorted order of names.

    Equal checksums mean equal policies, wherever the tensors are. It reads all weights, copying them to the host.
    """
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        for part in (tensor.values,) if tensor.scales is None else (tensor.values, tensor.scales):
            digest.update(f"{name} {part.dtype} {list(part.shape)}\n".encode())
            digest.update(part.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]
