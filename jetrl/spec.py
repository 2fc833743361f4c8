"""`ModelSpec`: the shape of a decoder model as plain data, read from a Hugging Face `config.json`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding: `theta`, and Llama 3's frequency scaling where `factor` is not None."""

    theta: float
    factor: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Everything that the model definition, the flow graph and the weight names need; sizes are counts of elements."""

    family: str  # "llama" | "qwen2" | "qwen3"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeSpec
    max_position: int
    tie_embeddings: bool
    qkv_bias: bool
    qk_norm: bool

    @property
    def qkv_sections(self) -> tuple[int, int, int]:
        """Rows of Q, K and V in the fused projection."""
        return (self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim, self.num_kv_heads * self.head_dim)

    @property
    def gate_up_sections(self) -> tuple[int, int]:
        """Rows of gate and up in the fused projection."""
        return (self.intermediate_size, self.intermediate_size)
