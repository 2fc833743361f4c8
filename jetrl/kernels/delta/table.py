"""The ops of Gated DeltaNet and of gated attention: which module computes each, by backend."""

from __future__ import annotations

from jetrl.kernels.registry import Op


def _backward(name: str, gpu: str) -> Op:
    return Op(f"{name}_backward", reference="delta.backward", hopper=gpu)


OPS = (
    Op("conv_heads", reference="delta.reference", hopper="delta.conv"),
    _backward("conv_heads", "delta.backward_rows"),
    Op("delta_gates", reference="delta.reference", hopper="delta.triton"),
    Op("delta_rule", reference="delta.reference", hopper="delta.triton"),
    _backward("delta_rule", "delta.backward_triton"),  # "delta.backward": plain torch, on any device
    Op("gated_norm", reference="delta.reference", hopper="delta.triton"),
    _backward("gated_norm", "delta.backward_rows"),
    Op("output_gate", reference="delta.reference", hopper="delta.triton"),
    _backward("output_gate", "delta.backward_rows"),
)
