"""The ops of quantizers: which module computes each, by backend."""

from __future__ import annotations

from jetrl.kernels.registry import Op

OPS = (
    Op("quantize_act", reference="quantize.reference", hopper="quantize.triton"),
    Op("quantize_act_t", reference="quantize.reference", hopper="quantize.triton"),
    Op("quantize_weight", reference="quantize.reference", hopper="quantize.triton"),
)
