"""The ops of sums of gradients, their norm, the optimizer, and digests: which module computes each, by backend."""

from __future__ import annotations

from jetrl.kernels.registry import Op

OPS = (
    Op("adamw_step_", reference="reference", hopper="update.triton"),
    Op("row_squares", reference="update.reference", hopper="update.triton"),
    Op("add_in_order", reference="update.reference", hopper="update.triton"),
    Op("digests", reference="update.reference", hopper="update.triton"),
    Op("sum_of_two", reference="update.reference", hopper="update.triton"),
)
