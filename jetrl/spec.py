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


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Everything that the model definition, the flow graph and the weight names need; sizes are counts of elements."""

    family: str  # "llama" | "qwen2" | "qwen3"; `precision/blocks.py` says what its layers consist of
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


def _shape(
    family: str, vocab: int, hidden: int, intermediate: int, layers: int, heads: tuple[int, int, int], theta: float,
    max_position: int, tied: bool, eps: float = 1e-6, llama3: bool = False,
) -> ModelSpec:
    num_heads, num_kv_heads, head_dim = heads
    return ModelSpec(
        family=family, vocab_size=vocab, hidden_size=hidden, intermediate_size=intermediate, num_layers=layers,
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, rms_norm_eps=eps,
        rope=RopeSpec(theta, 8.0) if llama3 else RopeSpec(theta), max_position=max_position, tie_embeddings=tied,
        qkv_bias=False, qk_norm=family == "qwen3",
    )


# The shapes of published models, for certificates and benchmarks with random weights. Source: their config.json files.
SHAPES = {
    "smollm2-135m": _shape("llama", 49152, 576, 1536, 30, (9, 3, 64), 1e5, 8192, True, 1e-5),
    "qwen3-0.6b": _shape("qwen3", 151936, 1024, 3072, 28, (16, 8, 128), 1e6, 40960, True),
    "qwen3-1.7b": _shape("qwen3", 151936, 2048, 6144, 28, (16, 8, 128), 1e6, 40960, True),
    "qwen3-8b": _shape("qwen3", 151936, 4096, 12288, 36, (32, 8, 128), 1e6, 40960, False),
    "qwen3-14b": _shape("qwen3", 151936, 5120, 17408, 40, (40, 8, 128), 1e6, 40960, False),
    "qwen3-32b": _shape("qwen3", 151936, 5120, 25600, 64, (64, 8, 128), 1e6, 40960, False),
    "llama-3.1-8b": _shape("llama", 128256, 4096, 14336, 32, (32, 8, 128), 5e5, 131072, False, 1e-5, True),
}
