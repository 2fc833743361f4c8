"""The ops of adapters: which module computes each, by backend."""

from __future__ import annotations

from jetrl.kernels.registry import Op

OPS = (
    Op("adapter_shrink", reference="adapters.reference", hopper="adapters.triton"),
    Op("adapter_expand", reference="adapters.reference", hopper="adapters.triton"),
    Op("adapter_expand_backward", reference="adapters.reference", hopper="adapters.triton"),
    Op("adapter_shrink_rows", reference="adapters.reference", hopper="adapters.triton"),
    Op("adapter_expand_rows", reference="adapters.reference", hopper="adapters.triton"),
    Op("adapter_expand_rows_backward", reference="adapters.reference", hopper="adapters.triton"),
    Op("adapter_begin", reference="adapters.reference", hopper="adapters.triton"),
    Op("adapter_finish", reference="adapters.reference", hopper="adapters.triton"),
    Op("adapter_finish_heads", reference="adapters.reference", hopper="adapters.heads"),
    Op("adapter_finish_swiglu", reference="adapters.reference", hopper="adapters.swiglu"),
)
