"""The ops of attention, and of heads, keys and values before it: which module computes each, by backend."""

from __future__ import annotations

from functools import partial

from jetrl.kernels.registry import Op

_attend = partial(Op, reference="attention.reference", hopper="attention.by_head", triton="attention.portable")
_latent = partial(
    Op, reference="attention.latent_reference", hopper="attention.latent_triton", hopper_scaled_mm=None,
    triton="attention.latent_portable",
)

_products = partial(_latent, hopper="attention.latent_products", triton="attention.latent_products")

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
    _products("latent_enter"),
    _products("latent_absorb"),
    _products("latent_lift"),
    _products("latent_lift_quantize"),
    _latent("latent_attend"),
    _latent("latent_attend_cached"),
    _latent("latent_backward"),
)
