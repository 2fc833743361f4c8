"""The interface of a layer's blocks: modules that each compute one residual branch with the norm before it.

The residual stream is carried next to the last branch's output, and the two are added at the next norm: `x` [T, D] is
the output not yet added to `residual` [T, D], and a block returns the same pair. A block's `precision.blocks.Block`
declares what it is made of (linears, flow nodes, names); `model/blocks.py` maps the one to the other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from jetrl.kernels.pointwise import ops as pointwise
from jetrl.kernels.qtensor import Coded, QTensor
from jetrl.model.adapter import Adapter
from jetrl.model.linear import FlowLinear
from jetrl.model.published import Norm, Published
from jetrl.precision.blocks import block as precision
from jetrl.precision.recipe import LinearRecipe, Recipe, Role
from jetrl.spec import ModelSpec
from jetrl.types import ForwardBatch, Side

Tap = Callable[[str, Tensor], None]


def no_tap(name: str, value: Tensor) -> None:
    """The default tap does nothing."""


class Piece(NamedTuple):
    """One tensor of a Hugging Face file; the pieces of one parameter are joined along rows.

    A tensor of more than two dimensions is a matrix here (`flat`). `wide`: it is written in FP32 whatever the others
    are, because that is how it is published.
    """

    name: str
    shape: tuple[int, ...]
    wide: bool = False

    @property
    def flat(self) -> tuple[int, ...]:
        """Its shape in our parameter: rows, and what each has."""
        return self.shape if len(self.shape) < 3 else (self.shape[0], prod(self.shape[1:]))

    def stored(self, dtype: torch.dtype) -> torch.dtype:
        """The type that it is written in, beside others of `dtype`."""
        return torch.float32 if self.wide else dtype


@dataclass(slots=True)
class Routes:
    """What the routers of one forward pass did, by layer: `logits` [T, E] FP32, with gradients if the pass has them,
    and the `chosen` experts [T, k] int64 by rank."""

    logits: dict[int, Tensor] = field(default_factory=dict)
    chosen: dict[int, Tensor] = field(default_factory=dict)

    def add(self, layer: int, logits: Tensor, chosen: Tensor) -> None:
        """Keep a layer's; a layer that activation checkpointing computes again adds nothing."""
        self.logits.setdefault(layer, logits)
        self.chosen.setdefault(layer, chosen)


@dataclass(frozen=True, slots=True)
class Context:
    """What all blocks of a forward pass share: the batch, the whole cos and sin tables of the rotary embedding, where
    routers note what they do (None: nowhere), and what the first block of a kind made of the batch for those after."""

    batch: ForwardBatch
    tables: tuple[Tensor, Tensor]
    routes: Routes | None = None
    made: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Build:
    """What a block is built from: its declaration, its layer, the model, and the dtypes of masters and of forward.

    `master_dtype` None: the model holds no masters. `adapter_dtype` is that of adapters' masters.
    """

    block: precision.Block
    layer: int
    spec: ModelSpec
    recipe: Recipe
    master_dtype: torch.dtype | None
    dtype: torch.dtype
    adapter_dtype: torch.dtype | None = None

    def published(self, *shape: int) -> Published:
        """A vector or table."""
        return Published(shape, self.master_dtype, self.dtype)

    def norm(self, size: int) -> Norm:
        """The weight of a norm of the stream or of heads; with the model's offset."""
        return Norm((size,), self.master_dtype, self.dtype, self.spec.norm_offset)

    def linear(self, role: Role) -> FlowLinear:
        """The linear that the block declares for this role, in the recipe's precision for each side."""
        shape, lora = self.block.linears(self.spec)[role], self.recipe.lora
        linear = FlowLinear(
            shape.in_size, shape.sections, shape.bias, self.recipes(role), self.master_dtype, self.dtype,
            self.recipe.weight_only(self.layer),
        )
        if lora is not None and (chosen := lora.adapted(shape.projections)):
            linear.lora = Adapter(lora, shape.in_size, shape.sections, chosen, self.adapter_dtype, self.dtype)
        return linear

    def recipes(self, role: Role) -> dict[Side, LinearRecipe | None]:
        """The precision of a linear on each side."""
        sides: tuple[Side, Side] = ("train", "rollout")
        return {side: self.recipe.linear(self.layer, role, side) for side in sides}


class Block(nn.Module, ABC):
    """One residual branch and its norm. Parameters are drawn and stored in the order in which `__init__` makes them."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        self.spec, self.at = build.spec, f"layers.{build.layer}"
        self.norm = build.norm(build.spec.hidden_size)
        self.norm_name = f"{self.at}.{build.block.name}_norm"

    @abstractmethod
    def forward(self, x: Tensor, residual: Tensor | None, context: Context, tap: Tap) -> tuple[Tensor, Tensor]:
        """With gradients; `tap(name, tensor)` gets every operator's output with its name in the flow graph."""

    @abstractmethod
    def infer(self, x: Tensor, residual: Tensor | None, context: Context) -> tuple[Tensor, Tensor]:
        """`forward` without gradients or taps: the same bits from fewer kernels."""

    @staticmethod
    @abstractmethod
    def checkpoint_names(spec: ModelSpec, layer: int) -> dict[str, tuple[Piece, ...]]:
        """Our parameter (its name in the block) -> the Hugging Face tensors whose rows it holds, in our order."""

    @staticmethod
    def initial(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor | None:
        """The FP32 value with which training from nothing begins, of a parameter of the block; None: as any other."""
        return None

    def add_norm(self, x: Tensor, residual: Tensor | None, tap: Tap) -> tuple[Tensor, Tensor]:
        """Adds `x` to the stream and norms it: returns (normed, stream)."""
        y, residual = self._normed(x, residual)
        tap(self.norm_name, y)
        return y, residual

    def add_norm_for(
        self, linear: FlowLinear, x: Tensor, residual: Tensor | None, side: Side
    ) -> tuple[Tensor | QTensor | Coded, Tensor]:
        """The norm before `linear`, for its `infer`: where that reads codes, they come from the same kernel."""
        reads, norm, eps = linear.reads(side), self.norm, self.spec.rms_norm_eps
        if reads.pow2 is None:
            return self._normed(x, residual)
        quantized = pointwise.add_rms_norm_coded if reads.values else pointwise.add_rms_norm_quantize
        return quantized(x, residual, norm.factor, eps, reads.pow2)

    def _normed(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        norm = self.norm
        return pointwise.add_rms_norm(x, residual, norm.weight, norm.factor, self.spec.rms_norm_eps)
