"""The ops of Gated DeltaNet and of gated attention: which module computes each, by backend."""

from __future__ import annotations

from jetrl.kernels.registry import Op

OPS = (
    Op("conv_heads", reference="delta.reference", hopper=None, triton="delta.triton"),
    Op("delta_gates", reference="delta.reference", hopper=None, triton="delta.triton"),
    Op("delta_rule", reference="delta.reference", hopper=None, triton="delta.triton"),
    Op("delta_rule_backward", reference="delta.backward", hopper=None, triton="delta.backward_triton"),
    Op("gated_norm", reference="delta.reference", hopper=None, triton="delta.triton"),
    Op("output_gate", reference="delta.reference", hopper=None, triton="delta.triton"),
)
