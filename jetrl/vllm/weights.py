"""Which weights vLLM gets, under which names, and what it holds of them.

vLLM's loader takes tensors by Hugging Face's names, and FP8 weights as `weight` (E4M3 codes) and `weight_scale_inv`
(FP32, one for each block of 128x128): what publishing gives, tensor by tensor. Nothing is quantized a second time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from jetrl.errors import UserError
from jetrl.huggingface.export import quantization_config
from jetrl.model.names import tensor_table
from jetrl.model.weights import checksum
from jetrl.precision.blocks.layouts import linears_of
from jetrl.precision.formats import BLOCK
from jetrl.precision.recipe import Recipe
from jetrl.spec import ModelSpec
from jetrl.types import WeightSet, WeightTensor

# vLLM's fused projections, and ours by Hugging Face's names, in vLLM's order of rows.
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_FUSED_IN = {part: fused for fused, parts in FUSED.items() for part in parts}


@dataclass(frozen=True, slots=True)
class Layout:
    """How vLLM holds the model: `fp8` are the weights that it gets as codes, `widened` those that are codes in the
    rollout's flow and that it gets as code * scale in BF16 (all of them under `w8a16`). By Hugging Face's names.

    `by_value`: vLLM rounds FP8 scales to powers of two itself, and may choose others with the same values. `unties`: a
    tied lm_head is a weight of its own there. On a CPU, vLLM packs the lm_head when it starts, and an update of the
    embedding alone would leave it as it was.
    """

    fp8: frozenset[str]
    widened: frozenset[str]
    by_value: bool
    unties: bool
    changes: dict[str, Any]  # to the model's config.json


def layout(spec: ModelSpec, recipe: Recipe, partial: Literal["refuse", "bf16"], device: str) -> Layout:
    """The layout of a model in a recipe. UserError for FP8 weights that vLLM refuses, unless `partial` is bf16."""
    if spec.delta is not None:
        raise UserError(
            'rollout.engine = "vllm": jetrl does not give the weights of Gated DeltaNet to vLLM yet. Set '
            'rollout.engine = "jetrl".'
        )
    if spec.latent is not None:
        raise UserError(
            f'rollout.engine = "vllm": weights of {spec.family} models (latent attention) cannot be given to vLLM yet. '
            'Set rollout.engine = "jetrl".'
        )
    table, fp8, widened, values = tensor_table(spec), set[str](), set[str](), set[str]()
    for layer in range(spec.num_layers):
        for block, role in linears_of(spec, layer):
            pieces = table[f"layers.{layer}.{block}.{role}.weight"]
            if recipe.weight_only(layer) is not None:
                values.update(piece.name for piece in pieces)
            elif recipe.linear(layer, role, "rollout") is not None:
                whole = all(size % BLOCK == 0 for piece in pieces for size in piece.shape)
                (fp8 if whole else widened).update(piece.name for piece in pieces)
    if widened and partial == "refuse":
        shapes = {piece.name: piece.shape for pieces in table.values() for piece in pieces}
        name = min(widened)
        raise UserError(
            f'rollout.engine = "vllm": vLLM\'s FP8 linears need sizes that are multiples of {BLOCK}; {len(widened)} '
            f'weights are not, such as {name} {list(shapes[name])}. Set precision = "bf16", or vllm.partial_blocks = '
            '"bf16" (vLLM then computes these in BF16, from code * scale), or rollout.engine = "jetrl".'
        )
    changes: dict[str, Any] = {}
    if unties := spec.tie_embeddings and device == "cpu":
        changes["tie_word_embeddings"] = False
    if fp8:
        quantization = quantization_config(spec, recipe)
        modules = [*quantization["ignored_layers"], *(name.removesuffix(".weight") for name in sorted(widened))]
        changes["quantization_config"] = quantization | {"ignored_layers": modules, "modules_to_not_convert": modules}
    by_value = bool(fp8) and recipe.weight_scale == recipe.activation_scale == "pow2"
    return Layout(frozenset(fp8), frozenset(widened | values), by_value, unties, changes)


def value(tensor: WeightTensor) -> Tensor:
    """`code * scale` of FP8 blocks, FP32 [N, K]."""
    assert tensor.scales is not None
    rows, columns = tensor.values.shape
    scales = tensor.scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return tensor.values.float() * scales


def sent(tensors: Mapping[str, WeightTensor], layout: Layout) -> Iterator[tuple[str, WeightTensor]]:
    """What vLLM gets, one tensor after the other, layer by layer. Codes and BF16 values are the published memory."""
    for name, tensor in tensors.items():
        yield name, WeightTensor(value(tensor).to(torch.bfloat16)) if name in layout.widened else tensor
    if layout.unties:
        yield "lm_head.weight", tensors["model.embed_tokens.weight"]


def checkpoint(tensors: Mapping[str, WeightTensor], layout: Layout) -> Iterator[tuple[str, Tensor]]:
    """The same as vLLM's loader reads it from a file."""
    for name, tensor in sent(tensors, layout):
        assert (tensor.scales is not None) == (name in layout.fp8), name
        yield name, tensor.values
        if tensor.scales is not None:
            yield f"{name}_scale_inv", tensor.scales


def held(parameters: Mapping[str, Tensor], expected: Mapping[str, WeightTensor]) -> dict[str, WeightTensor]:
    """vLLM's `parameters` under the names and shapes of `expected`, as views: fused projections are split, and the
    rows that vLLM adds to the vocabulary are left out."""
    found: dict[str, WeightTensor] = {}
    rows: dict[str, int] = {}

    def part(name: str, like: Tensor) -> Tensor:
        if name not in parameters:
            raise UserError(f"vllm.check_weights: vLLM has no weight {name}. Remove vllm.check_weights.")
        whole, start = parameters[name], rows.get(name, 0)
        if whole.ndim != like.ndim or whole.shape[1:] != like.shape[1:]:
            raise UserError(
                f"vllm.check_weights: vLLM keeps {name} in a layout of its own, {list(whole.shape)}, which cannot be "
                "compared. Remove vllm.check_weights."
            )
        rows[name] = start + like.shape[0]
        return whole[start : rows[name]]

    for name, tensor in expected.items():
        module, _, kind = name.rpartition(".")
        owner, _, last = module.rpartition(".")
        theirs = f"{owner}.{_FUSED_IN.get(last, last)}.{kind}" if owner else name
        values = part(theirs, tensor.values)
        found[name] = WeightTensor(
            values, None if tensor.scales is None else part(f"{theirs}_scale_inv", tensor.scales)
        )
    return found


def comparable(tensors: Mapping[str, WeightTensor], layout: Layout) -> dict[str, WeightTensor]:
    """What must have equal bits on both sides: codes and scales, or their products where vLLM chooses the scales."""
    if not layout.by_value:
        return dict(tensors)
    return {name: WeightTensor(value(t)) if t.scales is not None else t for name, t in tensors.items()}


def check(parameters: Mapping[str, Tensor], weights: WeightSet, layout: Layout) -> str:
    """The checksum that vLLM's parameters and the published weights share; UserError with the first that differs."""
    published = dict(sent(weights.tensors, layout))
    there = comparable(held(parameters, published), layout)
    here = comparable(published, layout)
    if (found := checksum(there)) == (expected := checksum(here)):
        return found
    wrong = [name for name in here if checksum({name: here[name]}) != checksum({name: there[name]})]
    raise UserError(
        f"vllm.check_weights: vLLM does not hold what was published as version {weights.version}: checksum {found}, "
        f"not {expected}; {len(wrong)} of {len(here)} tensors differ, the first is {wrong[0]}. Do not trust this run; "
        "please report it with the versions of jetrl and vLLM."
    )
