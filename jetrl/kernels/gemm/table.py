"""The ops of linears: which module computes each, by backend."""

from __future__ import annotations

from jetrl.kernels.registry import Op

OPS = (
    Op("prepare_fp8", reference="gemm.reference", hopper="gemm.operands"),
    Op("prepare_fp8_t", reference="gemm.reference", hopper="gemm.operands"),
    Op("prepare_bf16", reference="gemm.reference", hopper="gemm.operands"),
    Op("fp8_gemm", reference="gemm.reference", hopper="gemm.deepgemm", hopper_scaled_mm="gemm.scaled_mm"),
    Op("wgrad_gemm", reference="gemm.reference", hopper="gemm.deepgemm", hopper_scaled_mm="gemm.scaled_mm"),
    Op("wgrad_rounded", reference="gemm.reference", hopper="gemm.deepgemm", hopper_scaled_mm="gemm.scaled_mm"),
    Op("wgrad_into", reference="gemm.reference", hopper="gemm.deepgemm", hopper_scaled_mm="gemm.scaled_mm"),
    Op("bf16_gemm", reference="gemm.reference", hopper="gemm.deepgemm", triton="gemm.portable"),
    Op("bf16_dgrad", reference="gemm.reference", hopper="gemm.deepgemm", triton="gemm.portable"),
    Op("bf16_wgrad", reference="gemm.reference", hopper="gemm.deepgemm", triton="gemm.portable"),
    Op("bf16_wgrad_into", reference="gemm.reference", hopper="gemm.deepgemm", triton="gemm.portable"),
    Op("coded_gemm", reference="gemm.reference", hopper="gemm.deepgemm"),
)
