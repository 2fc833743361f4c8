"""Models whose weights are larger than at the start of training, so that every operator matters."""

from __future__ import annotations

import torch

from jetrl.model.transformer import Transformer
from jetrl.precision.recipe import Recipe
from jetrl.spec import ModelSpec


def enlarged(spec: ModelSpec, recipe: Recipe, dtype: torch.dtype = torch.bfloat16) -> Transformer:
    """A published model, the same for the same arguments."""
    model = Transformer(spec, recipe, dtype=dtype).init_random(0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(4.0) if p.ndim == 2 else p.add_(torch.randn(p.shape, generator=generator) * 0.2)
    return model.publish()
