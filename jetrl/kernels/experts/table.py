"""The ops of mixtures of experts: which module computes each, by backend. A backend has all of them or none."""

from __future__ import annotations

from functools import partial

from jetrl.kernels.registry import Op

_op = partial(Op, hopper_scaled_mm=None)  # it has no grouped GEMMs, so none of these
_gemm = partial(_op, reference="experts.reference", hopper="experts.deepgemm", triton="experts.portable")

OPS = (
    _op("router_backward", reference="experts.reference", hopper="experts.route"),
    _op("route", reference="experts.reference", hopper="experts.route"),
    _op("route_backward", reference="experts.reference", hopper="experts.reference"),
    _op("route_sigmoid", reference="experts.reference", hopper="experts.route"),
    _op("route_sigmoid_backward", reference="experts.reference", hopper="experts.reference"),
    _op("group", reference="experts.reference", hopper="experts.route"),
    _op("group_quantize", reference="experts.reference", hopper="experts.few_tokens"),
    _op("dispatch", reference="experts.reference", hopper="experts.rows"),
    _op("dispatch_quantize", reference="experts.reference", hopper="experts.rows"),
    _op("dispatch_quantize_t", reference="experts.reference", hopper="experts.quantize"),
    _op("dispatch_backward", reference="experts.reference", hopper="experts.rows"),
    _op("combine", reference="experts.reference", hopper="experts.rows"),
    _op("combine_backward", reference="experts.reference", hopper="experts.rows"),
    _op("combine_backward_quantize", reference="experts.reference", hopper="experts.quantize"),
    _op("gate_rows", reference="experts.reference", hopper="experts.rows"),
    _op("swiglu_quantize_rows", reference="experts.reference", hopper="experts.rows"),
    _op("swiglu_rows", reference="experts.reference", hopper="experts.rows"),
    _op("swiglu_rows_backward", reference="experts.reference", hopper="experts.rows"),
    _op("swiglu_rows_backward_quantize", reference="experts.reference", hopper="experts.quantize"),
    _op("prepare_experts_fp8", reference="experts.reference", hopper="experts.operands"),
    _op("prepare_experts_fp8_t", reference="experts.reference", hopper="experts.operands"),
    _op("prepare_experts_bf16", reference="experts.reference", hopper="experts.operands"),
    _gemm("grouped_fp8_gemm"),
    _gemm("grouped_bf16_gemm"),
    _gemm("grouped_bf16_dgrad"),
    _op("quantize_rows_t", reference="experts.reference", hopper="experts.quantize"),
    _gemm("grouped_wgrad_into"),
    _gemm("grouped_bf16_wgrad_into"),
)
