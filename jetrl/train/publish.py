"""Publishing: the optimizer step ends here. Quantize once; trainer and engine read the same tensors from then on."""

from __future__ import annotations

from jetrl.model.flips import Flips
from jetrl.model.transformer import Transformer
from jetrl.model.weights import published
from jetrl.types import WeightSet

FLIPPED = "policy/code_flips"


def publish(model: Transformer, version: int, flow_digest: str, flips: Flips | None = None) -> WeightSet:
    """Round and quantize the master weights in place, and name every published tensor for the engine. `flips` counts
    the codes that change.

    Nothing is copied: the tensors are views of the model's memory, looked up when an engine asks for them.
    """
    model.publish(flips)
    return WeightSet(version, flow_digest, published(model))
