"""Which module computes which kind of block, and the layer as a sequence of them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from jetrl.model.attention import Attention
from jetrl.model.block import Block, Build, Context, Tap
from jetrl.model.deepseek_moe import DeepSeekMoE
from jetrl.model.gated_attention import GatedAttention
from jetrl.model.gated_delta import GatedDelta
from jetrl.model.gated_moe import GatedMoE
from jetrl.model.latent_attention import LatentAttention
from jetrl.model.mlp import MLP
from jetrl.model.moe import MoE
from jetrl.precision.blocks.layouts import blocks_of
from jetrl.precision.recipe import Recipe
from jetrl.spec import ModelSpec

MODULES: dict[str, type[Block]] = {
    "attention": Attention, "gated_attention": GatedAttention, "gated_delta": GatedDelta, "mlp": MLP, "moe": MoE,
    "latent_attention": LatentAttention, "deepseek_moe": DeepSeekMoE, "sigmoid_moe": DeepSeekMoE,
    "gated_moe": GatedMoE,
}


class Layer(nn.Module):
    """One decoder layer: its blocks, one after another."""

    def __init__(
        self, layer: int, spec: ModelSpec, recipe: Recipe, master: torch.dtype | None, dtype: torch.dtype,
        adapter: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for block in blocks_of(spec, layer):
            build = Build(block, layer, spec, recipe, master, dtype, adapter)
            self.add_module(block.name, MODULES[block.kind](build))

    def blocks(self) -> Iterator[Block]:
        """The blocks in the order of execution."""
        return iter(self.children())  # type: ignore[arg-type]

    def forward(self, x: Tensor, residual: Tensor | None, context: Context, tap: Tap) -> tuple[Tensor, Tensor]:
        for block in self.blocks():
            x, residual = block(x, residual, context, tap)
        assert residual is not None
        return x, residual

    def infer(self, x: Tensor, residual: Tensor | None, context: Context) -> tuple[Tensor, Tensor]:
        for block in self.blocks():
            x, residual = block.infer(x, residual, context)
        assert residual is not None
        return x, residual
