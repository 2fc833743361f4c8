"""The model shape that the tests of `precision` share."""

from __future__ import annotations

from jetrl.spec import ModelSpec, RopeSpec

SPEC = ModelSpec(
    family="qwen3", vocab_size=1000, hidden_size=256, intermediate_size=320, num_layers=4, num_heads=4, num_kv_heads=2,
    head_dim=64, rms_norm_eps=1e-6, rope=RopeSpec(theta=1e6), max_position=4096, tie_embeddings=True, qkv_bias=False,
    qk_norm=True,
)
