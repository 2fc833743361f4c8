"""`ModelSpec`: the shape of a decoder model as plain data, read from a Hugging Face `config.json`."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnSpec:
    """YaRN's scaling of the rotary embedding: frequencies below `beta_slow` turns in `original_max_position` tokens are
    divided by `factor`, those above `beta_fast` stay, and between them lies a ramp. `mscale` and `mscale_all_dim` scale
    cos and sin, and the scores of latent attention; 0: not given."""

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0

    def grown(self, mscale: float) -> float:
        """`0.1 mscale ln(factor) + 1`, or 1 where nothing is stretched."""
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    @property
    def of_tables(self) -> float:
        """What cos and sin are multiplied by."""
        if self.mscale and self.mscale_all_dim:
            return self.grown(self.mscale) / self.grown(self.mscale_all_dim)
        return self.grown(1.0)


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding: `theta`, and Llama 3's frequency scaling where `factor` is not None, or YaRN's."""

    theta: float
    factor: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    yarn: YarnSpec | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec:
    """Latent attention (MLA): keys and values of all heads are made of one latent of `rank` values for each token, and
    of a key of `rope` values that all heads share.

    Queries have `nope` values that meet the latent and `rope` that meet that key; they come of the stream, or of a
    latent of their own of `query_rank`. A head's values have size `value`. `eps` is that of the latents' norms, which
    transformers does not take from the config.
    """

    rank: int
    nope: int
    rope: int
    value: int
    query_rank: int | None = None
    eps: float = 1e-6

    @property
    def query(self) -> int:
        """The size of a head's query."""
        return self.nope + self.rope

    @property
    def row(self) -> int:
        """What is kept of a token: its latent and the shared key."""
        return self.rank + self.rope

    def scale(self, rope: RopeSpec) -> float:
        """What scores are multiplied by."""
        grown = 1.0
        if rope.yarn is not None and rope.yarn.mscale_all_dim:
            grown = rope.yarn.grown(rope.yarn.mscale_all_dim)
        return self.query**-0.5 * grown * grown


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSeekSpec:
    """What DeepSeek's layers of experts add: `scaling` of the chosen experts' weights, and `shared` experts, through
    which every token runs, as one MLP of their width together.

    `sigmoid`: scores are sigmoids of the logits (else their softmax). A `bias` for each expert is added for the choice
    alone. Experts lie in `groups`, of which a token may use `kept_groups`: those whose two best experts are best.
    """

    sigmoid: bool
    bias: bool
    scaling: float
    shared: int
    groups: int = 1
    kept_groups: int = 1


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
    deepseek: DeepSeekSpec | None = None
    gated_shared: int | None = None  # the width of one shared expert whose row is multiplied by sigmoid of its gate

    @property
    def shared_size(self) -> int:
        """The width of the shared experts together; 0: there are none."""
        if self.gated_shared is not None:
            return self.gated_shared
        return 0 if self.deepseek is None else self.deepseek.shared * self.intermediate_size

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

    family: str  # "llama", "qwen3_moe" and so on; what its layers are: `LAYOUTS` in `precision/blocks/layouts.py`
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
    latent: LatentSpec | None = None  # head_dim is then `latent.rope`, the part that rotates
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


def stated(spec: ModelSpec) -> dict[str, Any]:
    """A spec as plain data, without what a model does not have: digests and names of caches are made of it."""
    parts = {"experts", "latent", "deepseek", "gated_shared", "yarn"}

    def without(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {k: without(v) for k, v in value.items() if k not in parts or v is not None}

    return without(asdict(spec))


def _latent_shape(
    vocab: int, hidden: int, intermediate: int, layers: int, heads: int, latent: LatentSpec, experts: ExpertSpec,
    rope: RopeSpec, max_position: int, eps: float, family: str = "deepseek_v3",
) -> ModelSpec:
    return ModelSpec(
        family=family, vocab_size=vocab, hidden_size=hidden, intermediate_size=intermediate, num_layers=layers,
        num_heads=heads, num_kv_heads=heads, head_dim=latent.rope, rms_norm_eps=eps, rope=rope,
        max_position=max_position, tie_embeddings=False, qkv_bias=False, qk_norm=False, experts=experts, latent=latent,
    )


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
    max_position: int, tied: bool, theta: float = 1e7, experts: ExpertSpec | None = None,
) -> ModelSpec:
    """Qwen3.5: three layers of Gated DeltaNet, then one of gated attention. `delta`: key heads, value heads, size."""
    key_heads, value_heads, size = delta
    family = "qwen3_5_text" if experts is None else "qwen3_5_moe_text"
    spec = _shape(family, vocab, hidden, intermediate, layers, heads, theta, max_position, tied, experts=experts)
    linear = DeltaSpec(
        key_heads=key_heads, value_heads=value_heads, key_dim=size, value_dim=size, conv_width=4,
        layers=tuple(i for i in range(layers) if (i + 1) % 4),
    )
    return replace(
        spec, qk_norm=True, delta=linear, rotary_dim=heads[2] // 4, attention_gate=True, norm_offset=True
    )


_A3B = ExpertSpec(count=128, per_token=8, intermediate_size=768, normalized=True)
_TINY_EXPERTS = ExpertSpec(count=16, per_token=4, intermediate_size=96, normalized=True)

_GATED_A3B = ExpertSpec(count=256, per_token=8, intermediate_size=512, normalized=True, gated_shared=512)
_TINY_GATED = replace(_TINY_EXPERTS, gated_shared=160)

_LATENT = LatentSpec(rank=512, nope=128, rope=64, value=128)
_MOONLIGHT = ExpertSpec(
    count=64, per_token=6, intermediate_size=1408, normalized=True, dense_layers=(0,),
    deepseek=DeepSeekSpec(sigmoid=True, bias=True, scaling=2.446, shared=2),
)
_V2_LITE = ExpertSpec(
    count=64, per_token=6, intermediate_size=1408, normalized=False, dense_layers=(0,),
    deepseek=DeepSeekSpec(sigmoid=False, bias=False, scaling=1.0, shared=2),
)
_V2_YARN = YarnSpec(factor=40.0, original_max_position=4096, mscale=0.707, mscale_all_dim=0.707)
_FLASH = LatentSpec(rank=512, nope=192, rope=64, value=256, query_rank=768)
_GLM_FLASH = ExpertSpec(
    count=64, per_token=4, intermediate_size=1536, normalized=True, dense_layers=(0,),
    deepseek=DeepSeekSpec(sigmoid=True, bias=True, scaling=1.8, shared=1),
)
_TINY_LATENT = LatentSpec(rank=160, nope=32, rope=16, value=48, query_rank=96)
_TINY_V3 = ExpertSpec(
    count=16, per_token=4, intermediate_size=96, normalized=True, dense_layers=(0,),
    deepseek=DeepSeekSpec(sigmoid=True, bias=True, scaling=2.5, shared=1, groups=4, kept_groups=2),
)
_TINY_YARN = YarnSpec(factor=4.0, original_max_position=128, mscale=1.0, mscale_all_dim=1.0)

# The shapes of published models, for certificates and benchmarks with random weights. Source: their config.json files.
# "tiny-moe", "tiny-mla", "tiny-hybrid" and "tiny-hybrid-moe" are ours, for a CPU, with sizes that are no multiples of
# 128: experts, latent attention with all that DeepSeek-V3 adds, and Gated DeltaNet. "mini-v3" has its head sizes, for
# the kernels of a GPU.
SHAPES = {
    "smollm2-135m": _shape("llama", 49152, 576, 1536, 30, (9, 3, 64), 1e5, 8192, True, 1e-5),
    "qwen3-0.6b": _shape("qwen3", 151936, 1024, 3072, 28, (16, 8, 128), 1e6, 40960, True),
    "qwen3-1.7b": _shape("qwen3", 151936, 2048, 6144, 28, (16, 8, 128), 1e6, 40960, True),
    "qwen3-8b": _shape("qwen3", 151936, 4096, 12288, 36, (32, 8, 128), 1e6, 40960, False),
    "qwen3-14b": _shape("qwen3", 151936, 5120, 17408, 40, (40, 8, 128), 1e6, 40960, False),
    "qwen3-32b": _shape("qwen3", 151936, 5120, 25600, 64, (64, 8, 128), 1e6, 40960, False),
    "qwen3-30b-a3b": _shape("qwen3_moe", 151936, 2048, 6144, 48, (32, 4, 128), 1e6, 40960, False, experts=_A3B),
    "tiny-moe": _shape("qwen3_moe", 512, 192, 448, 4, (6, 2, 32), 1e4, 512, True, experts=_TINY_EXPERTS),
    "moonlight-16b-a3b": _latent_shape(
        163840, 2048, 11264, 27, 16, _LATENT, _MOONLIGHT, RopeSpec(5e4), 8192, 1e-5
    ),
    "deepseek-v2-lite": _latent_shape(
        102400, 2048, 10944, 27, 16, _LATENT, _V2_LITE, RopeSpec(1e4, yarn=_V2_YARN), 163840, 1e-6, "deepseek_v2"
    ),
    "glm-4.7-flash": _latent_shape(
        154880, 2048, 10240, 47, 20, _FLASH, _GLM_FLASH, RopeSpec(1e6), 202752, 1e-5, "glm4_moe_lite"
    ),
    "mini-v3": _latent_shape(
        1024, 512, 1024, 4, 16, replace(_LATENT, query_rank=256), replace(_TINY_V3, intermediate_size=128),
        RopeSpec(1e4, yarn=_TINY_YARN), 16384, 1e-6,
    ),
    "tiny-mla": _latent_shape(
        512, 192, 448, 4, 6, _TINY_LATENT, _TINY_V3, RopeSpec(1e4, yarn=_TINY_YARN), 512, 1e-6
    ),
    "qwen3.5-0.8b": _hybrid(248320, 1024, 3584, 24, (8, 2, 256), (16, 16, 128), 262144, True),
    "qwen3.5-2b": _hybrid(248320, 2048, 6144, 24, (8, 2, 256), (16, 16, 128), 262144, True),
    "qwen3.5-4b": _hybrid(248320, 2560, 9216, 32, (16, 4, 256), (16, 32, 128), 262144, True),
    "qwen3.5-9b": _hybrid(248320, 4096, 12288, 32, (16, 4, 256), (16, 32, 128), 262144, False),
    "qwen3.5-35b-a3b": _hybrid(
        248320, 2048, 512, 40, (16, 2, 256), (16, 32, 128), 262144, False, experts=_GATED_A3B
    ),
    "tiny-hybrid-moe": _hybrid(512, 192, 160, 4, (6, 2, 32), (2, 4, 32), 512, True, 1e4, _TINY_GATED),
    "tiny-hybrid": _hybrid(512, 192, 448, 4, (6, 2, 32), (2, 4, 32), 512, True, 1e4),
    "llama-3.1-8b": _shape("llama", 128256, 4096, 14336, 32, (32, 8, 128), 5e5, 131072, False, 1e-5, True),
    "llama-3.3-70b": _shape("llama", 128256, 8192, 28672, 80, (64, 8, 128), 5e5, 131072, False, 1e-5, True),
}
