"""The ops of attention, and of heads, keys and values before it: which module computes each, by backend."""

from __future__ import annotations

from functools import partial

from jetrl.kernels.registry import Op

_attend = partial(Op, reference="attention.reference", hopper="attention.flash", triton="attention.portable")

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
    Op("prepare_latent", reference="attention.latent_reference", hopper=None),
    Op("latent_absorb", reference="attention.latent_reference", hopper=None),
    Op("latent_lift", reference="attention.latent_reference", hopper=None),
    Op("latent_attend", reference="attention.latent_reference", hopper=None),
    Op("latent_attend_cached", reference="attention.latent_reference", hopper=None),
    Op("latent_backward", reference="attention.latent_reference", hopper=None),
)
