"""The ops of norms, residuals, RoPE and SwiGLU, and of several at once: which module computes each, by backend."""

from __future__ import annotations

from jetrl.kernels.registry import Op

OPS = (
    Op("rms_norm", reference="reference", hopper="pointwise.triton"),
    Op("rms_norm_backward", reference="pointwise.reference", hopper="pointwise.triton"),
    Op("add_rms_norm", reference="pointwise.reference", hopper="pointwise.triton"),
    Op("add", reference="reference", hopper="pointwise.triton"),
    Op("rope", reference="reference", hopper="pointwise.triton"),
    Op("rope_backward", reference="pointwise.reference", hopper="pointwise.triton"),
    Op("swiglu", reference="reference", hopper="pointwise.swiglu"),
    Op("swiglu_backward", reference="reference", hopper="pointwise.swiglu"),
    Op("swiglu_backward_act", reference="reference", hopper="pointwise.swiglu"),
    Op("swiglu_quantize", reference="pointwise.reference", hopper="pointwise.swiglu"),
    Op("add_rms_norm_quantize", reference="pointwise.reference", hopper="pointwise.triton"),
    Op("add_rms_norm_coded", reference="pointwise.reference", hopper="pointwise.triton"),
    Op("add_rms_norm_kept", reference="pointwise.reference", hopper="pointwise.normed"),
    Op("normed_t", reference="pointwise.reference", hopper="pointwise.normed"),
)
