"""The attention block: o(attention(rope(qk_norm(qkv(x))))), with the KV cache on the rollout's side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING

from jetrl.precision.blocks.block import Block, Linear, TrainingPass
from jetrl.precision.blocks.states import PerToken, State
from jetrl.precision.formats import Format
from jetrl.precision.recipe import Role
from jetrl.spec import ModelSpec

if TYPE_CHECKING:
    from jetrl.precision.builder import BlockBackward, BlockForward


KEYS, VALUES = "keys", "values"


class Attention(Block):
    kind, name = "attention", "attn"
    roundings = {
        "rope": "fp32 products and sum, rounded once to bf16",
        "cache_write": "none (a copy in the cache's format)",
        "cache_read": "none (a copy)",
        "attention": "fp32 scores, exact sums over keys, rounded once to bf16",
        "concat": "none (a copy)",
        "rope_backward": "fp32 products and sum, rounded once to bf16",
        "attention_backward": "fp32, rounded once to bf16",
    }
    formulas = {"attention": "softmax(q kᵀ) v"}

    def linears(self, spec: ModelSpec) -> Mapping[Role, Linear]:
        return {
            "qkv": Linear(
                spec.qkv_sections, spec.hidden_size, bias=spec.qkv_bias, projections=("q_proj", "k_proj", "v_proj"),
            ),
            "o": Linear(
                (spec.hidden_size,), spec.num_heads * spec.head_dim, writes_residual=True, projections=("o_proj",),
            ),
        }

    def states(self, spec: ModelSpec, kv_cache: Format) -> Mapping[str, State]:
        heads = PerToken((spec.num_kv_heads, spec.head_dim), kv_cache)
        return {KEYS: heads, VALUES: heads}

    def forward(self, flow: BlockForward, x: str) -> str:
        s = flow.spec
        q = k = v = flow.linear("qkv", x)
        if s.qk_norm:
            q, k = flow.norm("q_norm", q), flow.norm("k_norm", k)
        q = self._rope(flow, "rope_q", q)
        k = self._key_value(flow, "k", self._rope(flow, "rope_k", k))
        v = self._key_value(flow, "v", v)
        heads = (s.num_heads, s.num_kv_heads)
        a = flow.op("attention", "attention", {"q": q, "k": k, "v": v}, heads=heads, head_dim=s.head_dim)
        return flow.linear("o", self._output(flow, a))

    def _output(self, flow: BlockForward, a: str) -> str:
        """What o reads of the attended heads."""
        return a

    def _rope(self, flow: BlockForward, name: str, x: str) -> str:
        rope = {key: value for key, value in asdict(flow.spec.rope).items() if key != "yarn"}
        constants = rope if rope["factor"] is not None else {"theta": rope["theta"]}
        if flow.spec.rotary_dim is not None:
            constants |= {"rotary_dim": flow.spec.rotary_dim}
        return flow.op(name, "rope", {"x": x}, **constants)

    def _key_value(self, flow: BlockForward, name: str, x: str) -> str:
        """If the cache holds it quantized, training quantizes it too; the cache itself only copies."""
        cache = flow.recipe.kv_cache
        if cache.is_quantized:
            x = flow.op(f"{name}.quantize", "quantize", {"x": x}, cache)
        if flow.side == "rollout":
            x = flow.op(f"{name}_cache_write", "cache_write", {"x": x}, cache)
            x = flow.op(f"{name}_cache_read", "cache_read", {"x": x}, cache)
        return x

    def backward(self, flow: BlockBackward, dy: str) -> str:
        """Gradients pass unchanged (straight through) a quantizer of K and V."""
        s, cache = flow.spec, flow.recipe.kv_cache
        dy, gate = self._output_backward(flow, dy)
        projection = "qkv_bias" if s.qkv_bias else "qkv"
        key, value = ("k.quantize", "v.quantize") if cache.is_quantized else ("rope_k", projection)
        inputs = {"dy": dy, "q": flow.saved("rope_q"), "k": flow.saved(key, cache), "v": flow.saved(value, cache)}
        v = flow.op("attention.dgrad", "attention_backward", inputs)
        q = flow.op("rope_q.dgrad", "rope_backward", {"dy": v})
        k = flow.op("rope_k.dgrad", "rope_backward", {"dy": v})
        if s.qk_norm:
            x = flow.saved(projection)
            q, k = flow.norm("q_norm", q, x), flow.norm("k_norm", k, x)
        return flow.linear("qkv", flow.op("qkv.dy", "concat", {"q": q, "k": k, "v": v} | gate), "attn_norm")

    def _output_backward(self, flow: BlockBackward, dy: str) -> tuple[str, dict[str, str]]:
        """The gradient of the attended heads, and what else reaches the projection."""
        return flow.linear("o", dy, "attention"), {}

    def saved_bytes(self, of: TrainingPass) -> float:
        """What qkv reads and gives, the heads after the rotary embedding unless they are made again, the output, which
        is o's input, and log-sums."""
        s = of.spec
        heads = sum(s.qkv_sections)
        total = of.kept_normed("qkv") + 2 * heads + (0 if of.lean else 2 * heads)
        output = s.num_heads * s.head_dim
        total += of.kept_input("o", output, elsewhere=True)
        return total + 2 * output + 4 * s.num_heads
