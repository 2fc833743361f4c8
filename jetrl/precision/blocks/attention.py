"""The attention block: o(attention(rope(qk_norm(qkv(x))))), with the KV cache on the rollout's side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING

from jetrl.precision.blocks.block import Block, Linear
from jetrl.precision.formats import Format
from jetrl.precision.graph import FlowEdge
from jetrl.precision.picture.pen import BOX_H, Graph, Pen
from jetrl.precision.picture.svg import class_of
from jetrl.precision.recipe import Role
from jetrl.spec import ModelSpec

if TYPE_CHECKING:
    from jetrl.precision.builder import BlockBackward, BlockForward

QK_SHIFT, V_SHIFT, LANE_W = -35, 78, 120  # lanes of Q with K and of V between qkv and attention


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

    def linears(self, spec: ModelSpec) -> Mapping[Role, Linear]:
        return {
            "qkv": Linear(spec.qkv_sections, spec.hidden_size, bias=spec.qkv_bias),
            "o": Linear((spec.hidden_size,), spec.num_heads * spec.head_dim, writes_residual=True),
        }

    # ---- flow -------------------------------------------------------------------------------------------------------

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
        return flow.linear("o", a)

    def _rope(self, flow: BlockForward, name: str, x: str) -> str:
        rope = asdict(flow.spec.rope)
        constants = rope if rope["factor"] is not None else {"theta": rope["theta"]}
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
        dy = flow.linear("o", dy, "attention")
        projection = "qkv_bias" if s.qkv_bias else "qkv"
        key, value = ("k.quantize", "v.quantize") if cache.is_quantized else ("rope_k", projection)
        inputs = {"dy": dy, "q": flow.saved("rope_q"), "k": flow.saved(key, cache), "v": flow.saved(value, cache)}
        v = flow.op("attention.dgrad", "attention_backward", inputs)
        q = flow.op("rope_q.dgrad", "rope_backward", {"dy": v})
        k = flow.op("rope_k.dgrad", "rope_backward", {"dy": v})
        if s.qk_norm:
            x = flow.saved(projection)
            q, k = flow.norm("q_norm", q, x), flow.norm("k_norm", k, x)
        return flow.linear("qkv", flow.op("qkv.dy", "concat", {"q": q, "k": k, "v": v}), "attn_norm")

    # ---- picture ----------------------------------------------------------------------------------------------------

    def rows(self, pen: Pen) -> list[str]:
        names = [*pen.linear_rows("qkv"), *(["qkv_bias"] if pen.spec.qkv_bias else [])]
        names += [*(["qk_norm"] if pen.spec.qk_norm else []), "rope"]
        names += ["kv_quantize"] if pen.recipe.kv_cache.is_quantized else []
        return [*names, "cache", "attention", *pen.linear_rows("o")]

    def draw_forward(self, pen: Pen, graph: Graph, x: float) -> str:
        pen.linear(graph, x, "qkv", "attn_norm")
        self._draw_lanes(pen, graph, x)
        return pen.linear(graph, x, "o", "attention")

    def _draw_lanes(self, pen: Pen, graph: Graph, x: float) -> None:
        """From qkv to attention in two lanes: Q and K through norm and RoPE, V past them; K and V through the cache."""
        above, y, c = "qkv", pen.rows, pen.canvas
        if pen.spec.qkv_bias:
            pen.operator(graph, x, "qkv_bias", "x", "qkv", "x + bias")
            above = "qkv_bias"
        first, v_top = above, y[above] + BOX_H / 2
        for row, name, title in (("qk_norm", "k_norm", "q_norm, k_norm"), ("rope", "rope_k", "rope_q, rope_k")):
            if row in y:
                edge = graph.edge(f"{name}.x")
                pen.box(graph, name, x + QK_SHIFT, y[row], LANE_W, title)
                kind = class_of(edge.format)
                c.arrow([(x + QK_SHIFT, y[above] + BOX_H / 2), (x + QK_SHIFT, y[row] - BOX_H / 2)], kind)
                word = "q, k " if above == first else ""
                c.label(x + QK_SHIFT + 7, y[row] - BOX_H / 2 - 10, f"{word}{edge.format}", f"label {kind}")
                above = row
        rope = y["rope"] + BOX_H / 2
        q, k = graph.edge("attention.q"), graph.edge("attention.k")
        top = y["attention"] - BOX_H / 2
        c.arrow([(x - 75, rope), (x - 75, top)], class_of(q.format))
        c.label(x - 69, top - 10, f"q {q.format}", f"label {class_of(q.format)}")
        v = graph.node("qkv_bias" if pen.spec.qkv_bias else "qkv")
        c.arrow([(x + V_SHIFT, v_top), (x + V_SHIFT, rope)], class_of(v.out), tip=False)
        c.label(x + V_SHIFT + 6, rope - BOX_H / 2 + 4, "v", f"label {class_of(v.out)}")
        self._draw_key_value(pen, graph, x, rope, k)
        pen.box(graph, "attention", x, y["attention"], formula="softmax(q kᵀ) v")

    def _draw_key_value(self, pen: Pen, graph: Graph, x: float, start: float, k: FlowEdge) -> None:
        c, y, top = pen.canvas, pen.rows, pen.rows["attention"] - BOX_H / 2
        differs = "attention.k" in pen.differs
        lanes = (x - 10, x + V_SHIFT)
        middle = (lanes[0] + lanes[1]) / 2
        stages = [("kv_quantize", "k.quantize", "quantize K, V"), ("cache", "k_cache_read", "KV cache")]
        before = graph.node("rope_k").out
        for row, name, title in stages:
            node = graph.find(name)
            if node is None:
                continue
            for lane in lanes:
                c.arrow([(lane, start), (lane, y[row] - BOX_H / 2)], class_of(before))
            kind = "quantizer" if node.op == "quantize" else ""
            sub = f"→ {_dtype(node.out)}" if node.op == "quantize" else _dtype(node.out)
            c.box(middle, y[row], 120, BOX_H, title, sub, kind, f"{node.name}: {node.rounding}")
            start, before = y[row] + BOX_H / 2, node.out
        for lane in lanes:
            c.arrow([(lane, start), (lane, top)], class_of(k.format, differs))
        mark = " ≠" if differs else ""
        c.label(lanes[0] + 6, top - 10, f"k, v {_dtype(k.format)}{mark}", f"label {class_of(k.format, differs)}")
        if graph.find("k_cache_read") is None:
            c.label(lanes[0] + 8, y["cache"] + 4, "no cache", "small")

    def draw_backward(self, pen: Pen, below: str) -> str:
        below = pen.linear_backward("o", below, "attention")
        below = pen.gradient("attention", "attention.dgrad", "dy", below)
        below = pen.gradient("rope", "rope_k.dgrad", "dy", below, "rope_q, rope_k .dgrad")
        if pen.spec.qk_norm:
            below = pen.gradient("qk_norm", "k_norm.dgrad", "dy", below, "q_norm, k_norm .dgrad")
        return pen.linear_backward("qkv", below, "attn_norm", "dq, dk, dv ")


def _dtype(format: Format) -> str:
    """The format without its block, where there is no room for it."""
    return str(format).split("[")[0]
