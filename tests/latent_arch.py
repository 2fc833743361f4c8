"""Changes that make the tiny run's model one of latent attention with DeepSeek's experts."""

from __future__ import annotations

from typing import Any

LATENT: dict[str, Any] = {
    "model.arch.head_dim": None, "model.arch.num_key_value_heads": 4, "model.arch.model_type": "deepseek_v3",
    "model.arch.kv_lora_rank": 24, "model.arch.q_lora_rank": 32, "model.arch.qk_nope_head_dim": 16,
    "model.arch.qk_rope_head_dim": 8, "model.arch.v_head_dim": 12, "model.arch.n_routed_experts": 6,
    "model.arch.num_experts_per_tok": 2, "model.arch.n_shared_experts": 1, "model.arch.moe_intermediate_size": 72,
    "model.arch.first_k_dense_replace": 1, "model.arch.n_group": 2, "model.arch.topk_group": 1,
}
