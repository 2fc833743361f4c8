"""The ops of attention, and of heads, keys and values before it: which module computes each, by backend."""

from __future__ import annotations

from functools import partial

from jetrl.kernels.registry import Op

_attend = partial(Op, reference="attention.reference", hopper="attention.by_head", triton="attention.portable")
_latent = partial(
    Op, reference="attention.latent_reference", hopper="attention.latent_triton", hopper_scaled_mm=None,
    triton="attention.latent_portable",
)

OPS = (
    _attend("attend"),
    _attend("attend_backward"),
    _attend("attend_cached"),
    _attend("attend_cached_quantize"),
    _attend("attend_varlen"),
    Op("advance", reference="attention.reference", hopper="attention.advance"),
    Op("round_heads", reference="reference", hopper="attention.cache"),
    Op("qkv_norm_rope", reference="attention.reference", hopper="attention.heads"),
    Op("qkv_norm_rope_backward", reference="attention.reference", hopper="attention.heads"),
    _latent("prepare_latent"),
    _latent("latent_absorb", triton="attention.latent_triton"),
    _latent("latent_lift", triton="attention.latent_triton"),
    _latent("latent_attend"),
    _latent("latent_attend_cached"),
    _latent("latent_backward"),
)
