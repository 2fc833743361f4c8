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
from jetrl.precision.recipe import Role
from jetrl.spec import ModelSpec

if TYPE_CHECKING:
    from jetrl.precision.builder import BlockBackward, BlockForward


@dataclass(frozen=True, slots=True)
class Linear:
    """One linear of a block: W [sum(sections), in_size], the projections of `sections` fused in one GEMM.

    `writes_residual`: its output is the branch's output, so its initial weights are scaled by the depth. `experts`:
    W holds that many matrices, one below the other, and `sections` those of all of them; 0 is a plain linear.
    """

    sections: tuple[int, ...]
    in_size: int
    bias: bool = False
    writes_residual: bool = False
    experts: int = 0

    @property
    def out_sections(self) -> tuple[int, ...]:
        """The sections of the output: those of one expert."""
        return self.sections[: len(self.sections) // max(1, self.experts)]


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
