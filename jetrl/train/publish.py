"""Publishing: the optimizer step ends here. Quantize once; trainer and engine read the same tensors from then on."""

from __future__ import annotations

from jetrl.model.transformer import Transformer
from jetrl.types import WeightSet


def publish(model: Transformer, version: int, flow_digest: str, checksum: bool = False) -> WeightSet:
    """Round and quantize the master weights in place, and name the result for the engine.

    In one process nothing is copied: the engine holds the same modules. The checksum, a hash of all published bytes, is
    for checks and costs a pass over the weights.
    """
    model.publish()
    return WeightSet(version, flow_digest, model.checksum() if checksum else "")
