"""`ModelSpec`: the shape of a decoder model as plain data, read from a Hugging Face `config.json`."""

from __future__ import annotations

from dataclasses import dataclass, replace


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
class DeltaSpec:
    """Layers of Gated DeltaNet: `key_heads` of size `key_dim`, each for consecutive ones of `value_heads` of size
    `value_dim`, after a causal convolution over `conv_width` tokens. The other layers have attention."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    layers: tuple[int, ...]

    @property
    def conv_channels(self) -> int:
        """Of queries, keys and values, which the convolution reads."""
        return 2 * self.key_heads * self.key_dim + self.value_size

    @property
    def value_size(self) -> int:
        """Of all value heads."""
        return self.value_heads * self.value_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Everything that the model definition, the flow graph and the weight names need; sizes are counts of elements."""

    family: str  # "llama", "qwen2", ..., "qwen3_5_text"; what its layers are: `precision/blocks/layouts.py`
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
    delta: DeltaSpec | None = None
    rotary_dim: int | None = None  # of each head, from its beginning; None: all of it
    attention_gate: bool = False  # attention's output is multiplied by sigmoid(gate), projected next to the queries
    norm_offset: bool = False  # norms of the stream and of q and k multiply by 1 + weight

    @property
    def qkv_sections(self) -> tuple[int, int, int]:
        """Rows of Q, K and V in the fused projection; those of Q are each head's query and, with one, its gate."""
        queries = self.num_heads * self.head_dim * (2 if self.attention_gate else 1)
        return (queries, self.num_kv_heads * self.head_dim, self.num_kv_heads * self.head_dim)

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


def _hybrid(
    vocab: int, hidden: int, intermediate: int, layers: int, heads: tuple[int, int, int], delta: tuple[int, int, int],
    max_position: int, tied: bool, theta: float = 1e7,
) -> ModelSpec:
    """Qwen3.5: three layers of Gated DeltaNet, then one of gated attention. `delta`: key heads, value heads, size."""
    key_heads, value_heads, size = delta
    spec = _shape("qwen3_5_text", vocab, hidden, intermediate, layers, heads, theta, max_position, tied)
    linear = DeltaSpec(
        key_heads=key_heads, value_heads=value_heads, key_dim=size, value_dim=size, conv_width=4,
        layers=tuple(i for i in range(layers) if (i + 1) % 4),
    )
    return replace(
        spec, qk_norm=True, delta=linear, rotary_dim=heads[2] // 4, attention_gate=True, norm_offset=True
    )


_A3B = ExpertSpec(count=128, per_token=8, intermediate_size=768, normalized=True)
_TINY_EXPERTS = ExpertSpec(count=16, per_token=4, intermediate_size=96, normalized=True)

# The shapes of published models, for certificates and benchmarks with random weights. Source: their config.json files.
# "tiny-moe" and "tiny-hybrid" are ours: experts, and Gated DeltaNet, for a CPU, with sizes that are no multiples of 128.
SHAPES = {
    "smollm2-135m": _shape("llama", 49152, 576, 1536, 30, (9, 3, 64), 1e5, 8192, True, 1e-5),
    "qwen3-0.6b": _shape("qwen3", 151936, 1024, 3072, 28, (16, 8, 128), 1e6, 40960, True),
    "qwen3-1.7b": _shape("qwen3", 151936, 2048, 6144, 28, (16, 8, 128), 1e6, 40960, True),
    "qwen3-8b": _shape("qwen3", 151936, 4096, 12288, 36, (32, 8, 128), 1e6, 40960, False),
    "qwen3-14b": _shape("qwen3", 151936, 5120, 17408, 40, (40, 8, 128), 1e6, 40960, False),
    "qwen3-32b": _shape("qwen3", 151936, 5120, 25600, 64, (64, 8, 128), 1e6, 40960, False),
    "qwen3-30b-a3b": _shape("qwen3_moe", 151936, 2048, 6144, 48, (32, 4, 128), 1e6, 40960, False, experts=_A3B),
    "tiny-moe": _shape("qwen3_moe", 512, 192, 448, 4, (6, 2, 32), 1e4, 512, True, experts=_TINY_EXPERTS),
    "qwen3.5-0.8b": _hybrid(248320, 1024, 3584, 24, (8, 2, 256), (16, 16, 128), 262144, True),
    "qwen3.5-2b": _hybrid(248320, 2048, 6144, 24, (8, 2, 256), (16, 16, 128), 262144, True),
    "qwen3.5-4b": _hybrid(248320, 2560, 9216, 32, (16, 4, 256), (16, 32, 128), 262144, True),
    "qwen3.5-9b": _hybrid(248320, 4096, 12288, 32, (16, 4, 256), (16, 32, 128), 262144, False),
    "tiny-hybrid": _hybrid(512, 192, 448, 4, (6, 2, 32), (2, 4, 32), 512, True, 1e4),
    "llama-3.1-8b": _shape("llama", 128256, 4096, 14336, 32, (32, 8, 128), 5e5, 131072, False, 1e-5, True),
}
