"""The ops of linears: which module computes each, by backend."""

from __future__ import annotations

from functools import partial

from jetrl.kernels.registry import Op

_fp8 = partial(
    Op, reference="gemm.reference", hopper="gemm.deepgemm", hopper_scaled_mm="gemm.scaled_mm",
    triton="gemm.portable_fp8",
)
_bf16 = partial(Op, reference="gemm.reference", hopper="gemm.deepgemm", triton="gemm.portable")

OPS = (
    Op("prepare_fp8", reference="gemm.reference", hopper="gemm.operands"),
    Op("prepare_fp8_t", reference="gemm.reference", hopper="gemm.operands"),
    Op("prepare_bf16", reference="gemm.reference", hopper="gemm.operands"),
    _fp8("fp8_gemm"),
    _fp8("wgrad_gemm"),
    _fp8("wgrad_rounded"),
    _fp8("wgrad_into"),
    _bf16("bf16_gemm"),
    _bf16("bf16_dgrad"),
    _bf16("bf16_wgrad"),
    _bf16("bf16_wgrad_into"),
    _bf16("coded_gemm"),
)
