"""A block: one residual branch of a decoder layer, `x + branch(norm(x))`, as the flow graph sees it.

A layer is a sequence of blocks (`layouts.py` says which). A block declares its linears and writes its nodes of the
forward and of the backward graph; the norm before it and the addition after it are written for it, and the picture is
made from the graph. The module that computes it is found by `kind` in `model/blocks.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from jetrl.precision.blocks.states import State
from jetrl.precision.formats import Format
from jetrl.precision.recipe import LinearRecipe, Recipe, Role
from jetrl.spec import ModelSpec

if TYPE_CHECKING:
    from jetrl.precision.builder import BlockBackward, BlockForward


@dataclass(frozen=True, slots=True)
class Linear:
    """One linear of a block: W [sum(sections), in_size], the projections of `sections` fused in one GEMM.

    `writes_residual`: its output is the branch's output, so its initial weights are scaled by the depth. `experts`:
    W holds that many matrices, one below the other, and `sections` those of all of them; 0 is a plain linear.
    `projections`: what Hugging Face calls those of the sections, of one expert, where each may have an adapter
    (`precision.lora`).
    """

    sections: tuple[int, ...]
    in_size: int
    bias: bool = False
    writes_residual: bool = False
    experts: int = 0
    projections: tuple[str, ...] = ()

    @property
    def out_sections(self) -> tuple[int, ...]:
        """The sections of the output: those of one expert."""
        return self.sections[: len(self.sections) // max(1, self.experts)]


@dataclass(frozen=True, slots=True)
class TrainingPass:
    """Forward and backward pass of a micro-batch of `tokens` in one layer: what a prediction of memory asks about.

    lean        what the backward pass can make again is not kept (`train.lean_backward`)
    again       it makes the whole layer again, from its input (`train.activation_checkpointing`)
    summed      gradients are kept in BF16, and added up in FP32 matrix by matrix
    repeated    rows where shared prompts stand before each of their answers, as a multiple of the packed ones
                (`train.share_prompts`)
    has_stream  the block's norm adds to a residual stream, as all do but the model's first
    block       the block that is asked; None: the whole layer
    """

    spec: ModelSpec
    recipe: Recipe
    layer: int
    tokens: int
    lean: bool = True
    again: bool = False
    summed: bool = False
    repeated: float = 1.0
    has_stream: bool = True
    block: Block | None = None

    def linear(self, role: Role) -> LinearRecipe | None:
        """The formats of a linear; None: BF16."""
        return self.recipe.linear(self.layer, role, "train")

    def adapters(self, role: Role) -> int:
        """How many projections of a linear have an adapter."""
        lora, block = self.recipe.lora, self.block
        if lora is None or block is None:
            return 0
        linear = block.linears(self.spec)[role]
        own = lora.of(linear.experts)
        return 0 if own is None else len(own.adapted(linear.projections))

    def kept_input(self, role: Role, size: int, elsewhere: bool = False) -> float:
        """Bytes a token that a linear keeps of its input of `size` values: FP8 along tokens with a scale for 128 of
        them, or BF16. With adapters, the BF16 input, unless it is kept `elsewhere`, and A x; of a frozen linear without
        one nothing."""
        if self.recipe.lora is not None:
            number, block = self.adapters(role), self.block
            if not number or block is None:
                return 0
            own = self.recipe.lora.of(block.linears(self.spec)[role].experts)
            return (0 if elsewhere or own is None else 2 * size) + 2 * (0 if own is None else own.rank) * number
        if elsewhere:
            return 0
        return 2 * size if self.linear(role) is None else size + size / 32

    def kept_normed(self, role: Role, fused: bool = True) -> float:
        """The same of a linear after the block's norm; where both are one function (`fused`, and FP8), it is the
        inverse RMS of the row, in FP32."""
        one = fused and self.has_stream and self.linear(role) is not None and self.recipe.lora is None
        return 4 if one else self.kept_input(role, self.spec.hidden_size)


class Block(ABC):
    """Names that a block gives to nodes, rows and roles are local to the layer, without the prefix `layers.3.`.

    kind        names the block among all kinds
    name        its place in a layer: `attn` has the norm `attn_norm`, the addition `attn_add`, parameters `attn.*`
    roundings   where operators that only this kind of block has round; the flow digest covers these words
    formulas    what such an operator computes, for its box in the picture; `{name}` is an attribute of its node
    """

    kind: ClassVar[str]
    name: ClassVar[str]
    roundings: ClassVar[Mapping[str, str]] = {}
    formulas: ClassVar[Mapping[str, str]] = {}

    @abstractmethod
    def linears(self, spec: ModelSpec) -> Mapping[Role, Linear]:
        """Every linear by its role, in the order of execution."""

    def states(self, spec: ModelSpec, kv_cache: Format) -> Mapping[str, State]:
        """What a sequence keeps between two passes of the rollout, by name; `kv_cache` is the recipe's. None of it
        unless a block says so. Blocks of a layer have different names for it."""
        return {}

    @abstractmethod
    def forward(self, flow: BlockForward, x: str) -> str:
        """Write the nodes from the norm's output `x` to the branch's output; returns the latter."""

    @abstractmethod
    def backward(self, flow: BlockBackward, dy: str) -> str:
        """Write the nodes from the gradient `dy` of the branch's output to that of the norm's output."""

    def saved_bytes(self, of: TrainingPass) -> float:
        """Bytes a token that the forward pass keeps for the backward pass, besides the residual stream.

        Where a block does not say it: each linear's input and output.
        """
        linears = self.linears(of.spec).items()
        return sum(of.kept_input(role, linear.in_size) + 2 * sum(linear.out_sections) for role, linear in linears)

    def passing_bytes(self, of: TrainingPass) -> int:
        """The most bytes that the backward pass makes and frees. Where a block does not say it: an MLP's gradients."""
        gradients = 4 * of.spec.hidden_size + 10 * of.spec.intermediate_size
        return of.tokens * (gradients + self.adding_bytes(of.spec, of.recipe))

    def adding_bytes(self, spec: ModelSpec, recipe: Recipe) -> int:
        """The most bytes a token that the adapters of a linear make and free: of a projection B u in FP32, and both
        outputs."""
        lora = recipe.lora
        if lora is None:
            return 0
        adapted = [
            one for one in self.linears(spec).values()
            if not one.experts and lora.adapted(one.projections)
        ]
        return max((4 * max(one.sections) + 4 * sum(one.sections) for one in adapted), default=0)
