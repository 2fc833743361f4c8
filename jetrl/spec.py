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
class ExpertSpec:
    """Mixture-of-experts layers: each token runs through `per_token` of `count` small MLPs, chosen by a router.

    `normalized`: the weights of a token's chosen experts are divided by their sum. Layer i has experts unless it is one
    of `dense_layers` or `i + 1` is no multiple of `step`; it is a plain MLP then.
    """

    count: int
    per_token: int
    intermediate_size: int
    normalized: bool
    step: int = 1
    dense_layers: tuple[int, ...] = ()

    def in_layer(self, layer: int) -> bool:
        """Whether a layer has experts."""
        return layer not in self.dense_layers and (layer + 1) % self.step == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Everything that the model definition, the flow graph and the weight names need; sizes are counts of elements."""

    family: str  # "llama" | "qwen2" | "qwen3" | "qwen3_moe"; what its layers are: `precision/blocks/layouts.py`
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
    experts: ExpertSpec | None = None

    @property
    def qkv_sections(self) -> tuple[int, int, int]:
        """Rows of Q, K and V in the fused projection."""
        return (self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim, self.num_kv_heads * self.head_dim)

    @property
    def gate_up_sections(self) -> tuple[int, int]:
        """Rows of gate and up in the fused projection."""
        return (self.intermediate_size, self.intermediate_size)

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """The layers with experts; none in a dense model."""
        return tuple(i for i in range(self.num_layers) if self.experts is not None and self.experts.in_layer(i))


def _shape(
    family: str, vocab: int, hidden: int, intermediate: int, layers: int, heads: tuple[int, int, int], theta: float,
    max_position: int, tied: bool, eps: float = 1e-6, llama3: bool = False, experts: ExpertSpec | None = None,
) -> ModelSpec:
    num_heads, num_kv_heads, head_dim = heads
    return ModelSpec(
        family=family, vocab_size=vocab, hidden_size=hidden, intermediate_size=intermediate, num_layers=layers,
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, rms_norm_eps=eps,
        rope=RopeSpec(theta, 8.0) if llama3 else RopeSpec(theta), max_position=max_position, tie_embeddings=tied,
        qkv_bias=False, qk_norm=family in ("qwen3", "qwen3_moe"), experts=experts,
    )


_A3B = ExpertSpec(count=128, per_token=8, intermediate_size=768, normalized=True)
_TINY_EXPERTS = ExpertSpec(count=16, per_token=4, intermediate_size=96, normalized=True)

# The shapes of published models, for certificates and benchmarks with random weights. Source: their config.json files.
# "tiny-moe" is ours: experts for a CPU, with sizes that are no multiples of 128.
SHAPES = {
    "smollm2-135m": _shape("llama", 49152, 576, 1536, 30, (9, 3, 64), 1e5, 8192, True, 1e-5),
    "qwen3-0.6b": _shape("qwen3", 151936, 1024, 3072, 28, (16, 8, 128), 1e6, 40960, True),
    "qwen3-1.7b": _shape("qwen3", 151936, 2048, 6144, 28, (16, 8, 128), 1e6, 40960, True),
    "qwen3-8b": _shape("qwen3", 151936, 4096, 12288, 36, (32, 8, 128), 1e6, 40960, False),
    "qwen3-14b": _shape("qwen3", 151936, 5120, 17408, 40, (40, 8, 128), 1e6, 40960, False),
    "qwen3-32b": _shape("qwen3", 151936, 5120, 25600, 64, (64, 8, 128), 1e6, 40960, False),
    "qwen3-30b-a3b": _shape("qwen3_moe", 151936, 2048, 6144, 48, (32, 4, 128), 1e6, 40960, False, experts=_A3B),
    "tiny-moe": _shape("qwen3_moe", 512, 192, 448, 4, (6, 2, 32), 1e4, 512, True, experts=_TINY_EXPERTS),
    "llama-3.1-8b": _shape("llama", 128256, 4096, 14336, 32, (32, 8, 128), 5e5, 131072, False, 1e-5, True),
    "llama-3.3-70b": _shape("llama", 128256, 8192, 28672, 80, (64, 8, 128), 5e5, 131072, False, 1e-5, True),
}
