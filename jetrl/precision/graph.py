"""FlowGraph: every operator of the model with its rounding point, every tensor between them with its format.

Built from a ModelSpec and a Recipe before any tensor exists. A node is an operator with one output; an edge is a tensor
that reaches an input of a node and is named after it (`layers.3.qkv.x` is what the GEMM `layers.3.qkv` reads as x).
Token ids and positions carry no rounding and have no edges. Views:

    rollout         embedding to log-prob, keys and values through the paged cache
    train_forward   the same, keys and values straight into attention
    train_backward  gradients, their quantizers, dgrad and wgrad, up to the optimizer (`saved`: of the forward)
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal, get_args

from jetrl.precision.formats import BF16, FP32, QUANTIZER_RULE, Format
from jetrl.precision.recipe import LinearRecipe, Recipe, Role
from jetrl.spec import ModelSpec
from jetrl.types import Side

View = Literal["rollout", "train_forward", "train_backward"]
Attribute = int | float | str | tuple[int, ...] | None

# Where each operator rounds, as `kernels/reference.py` defines it. The digest covers these words.
ROUNDING: Mapping[str, str] = {
    "parameter": "master weight rounded to bf16",
    "saved": "as in the forward",
    "embed": "none (a copy)",
    "rms_norm": "bf16 after x * inv_rms, bf16 after * weight",
    "quantize": f"scale amax / 448, one fp32 division, half to even ({QUANTIZER_RULE})",
    "gemm": "fp32 sum over K, rounded once to the output",
    "add": "fp32 addition, rounded once to bf16",
    "rope": "fp32 products and sum, rounded once to bf16",
    "cache_write": "none (a copy in the cache's format)",
    "cache_read": "none (a copy)",
    "attention": "fp32 scores, exact sums over keys, rounded once to bf16",
    "swiglu": "fp32 products, rounded once to bf16",
    "logprob": "fp32 logits / temperature; float64 log-sum-exp, rounded once to fp32",
    "concat": "none (a copy)",
    "logprob_backward": "fp32 logits made again; gradient of the logits rounded once to bf16",
    "rms_norm_backward": "fp32, rounded once to bf16",
    "rope_backward": "fp32 products and sum, rounded once to bf16",
    "attention_backward": "fp32, rounded once to bf16",
    "swiglu_backward": "fp32 products, rounded once to bf16",
    "weight_sum": "fp32 sum over tokens",
    "optimizer": "gradients and states in fp32; master weight in its own dtype",
}


@dataclass(frozen=True, slots=True)
class FlowNode:
    """One operator. `out` is the format of its only output; `attributes` are the sizes and constants that define it."""

    name: str
    op: str
    out: Format
    attributes: tuple[tuple[str, Attribute], ...] = ()

    @property
    def rounding(self) -> str:
        """Where and how the operator rounds."""
        return ROUNDING[self.op]


@dataclass(frozen=True, slots=True)
class FlowEdge:
    """One tensor on its way from `source` to the input `name` = `target.slot`."""

    name: str
    source: str
    target: str
    format: Format


@dataclass(frozen=True, slots=True)
class FlowGraph:
    """Operators in execution order and the tensors between them, for one view of one recipe."""

    view: View
    nodes: tuple[FlowNode, ...]
    edges: tuple[FlowEdge, ...]

    def node_map(self) -> dict[str, FlowNode]:
        """Nodes by name."""
        return {node.name: node for node in self.nodes}

    def edge_map(self) -> dict[str, FlowEdge]:
        """Edges by name."""
        return {edge.name: edge for edge in self.edges}

    def without_cache(self) -> FlowGraph:
        """The graph with each cache write and read replaced by the edge that they stand for, in the cache's format.

        This is what makes rollout and training comparable: training must read keys and values in that very format.
        """
        cache = {node.name for node in self.nodes if node.op in ("cache_write", "cache_read")}
        inputs = {edge.target: edge.source for edge in self.edges if edge.target in cache}
        edges = []
        for edge in self.edges:
            if edge.target in inputs:
                continue
            source = edge.source
            while source in inputs:
                source = inputs[source]
            edges.append(FlowEdge(edge.name, source, edge.target, edge.format))
        return FlowGraph(self.view, tuple(n for n in self.nodes if n.name not in inputs), tuple(edges))

    def digest(self) -> str:
        """16 hex digits of the SHA-256 of the graph as canonical JSON: operators, sizes, roundings, formats.

        Equal in every process and on every machine; the cache's paging, which changes no value, is left out.
        """
        graph = self.without_cache()
        nodes = {n.name: [n.op, n.rounding, asdict(n.out), dict(n.attributes)] for n in graph.nodes}
        edges = {e.name: [e.source, e.target, asdict(e.format)] for e in graph.edges}
        text = json.dumps([nodes, edges], sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def build_flow(spec: ModelSpec, recipe: Recipe, view: View) -> FlowGraph:
    """The graph of one view. Folding equal layers is left to the printer; this one names every layer."""
    assert spec.num_layers == recipe.num_layers, f"model of {spec.num_layers} layers, recipe for {recipe.num_layers}"
    assert view in get_args(View), f"view {view!r}, not one of {get_args(View)}"
    builder = _Backward(spec, recipe, view) if view == "train_backward" else _Forward(spec, recipe, view)
    builder.build()
    return FlowGraph(view, tuple(builder.nodes.values()), tuple(builder.edges))


class _Builder(ABC):
    def __init__(self, spec: ModelSpec, recipe: Recipe, view: View) -> None:
        self.spec, self.recipe = spec, recipe
        self.side: Side = "rollout" if view == "rollout" else "train"
        self.nodes: dict[str, FlowNode] = {}
        self.edges: list[FlowEdge] = []

    @abstractmethod
    def build(self) -> None:
        """Make all nodes and edges of the view."""

    def op(self, name: str, op: str, inputs: Mapping[str, str], out: Format = BF16, **attributes: Attribute) -> str:
        assert op in ROUNDING and name not in self.nodes, (op, name)
        self.nodes[name] = FlowNode(name, op, out, tuple(sorted(attributes.items())))
        for slot, source in inputs.items():
            self.edges.append(FlowEdge(f"{name}.{slot}", source, name, self.nodes[source].out))
        return name

    def leaf(self, name: str, op: str = "parameter", out: Format = BF16) -> str:
        """A node without inputs, made at its first use."""
        return name if name in self.nodes else self.op(name, op, {}, out)

    @property
    def head(self) -> str:
        return "embed.weight" if self.spec.tie_embeddings else "lm_head.weight"

    def linears(self) -> Mapping[Role, tuple[tuple[int, ...], int]]:
        """Output sections and input size of each linear of a layer."""
        s = self.spec
        return {
            "qkv": (s.qkv_sections, s.hidden_size),
            "o": ((s.hidden_size,), s.num_heads * s.head_dim),
            "gate_up": (s.gate_up_sections, s.hidden_size),
            "down": ((s.hidden_size,), s.intermediate_size),
        }


class _Forward(_Builder):
    def build(self) -> None:
        s = self.spec
        x = self.op("embed", "embed", {"weight": self.leaf("embed.weight")}, vocab=s.vocab_size, size=s.hidden_size)
        for layer in range(s.num_layers):
            x = self.layer(layer, x)
        x = self.norm("norm", x)
        inputs = {"x": x, "weight": self.leaf(self.head)}
        logits = self.op("lm_head", "gemm", inputs, FP32, out_sections=(s.vocab_size,), in_size=s.hidden_size)
        self.op("logprob", "logprob", {"logits": logits}, FP32)

    def norm(self, name: str, x: str) -> str:
        inputs = {"x": x, "weight": self.leaf(f"{name}.weight")}
        return self.op(name, "rms_norm", inputs, eps=self.spec.rms_norm_eps)

    def layer(self, layer: int, x: str) -> str:
        p = f"layers.{layer}"
        attention = self.attention(layer, p, self.norm(f"{p}.attn_norm", x))
        x = self.op(f"{p}.attn_add", "add", {"residual": x, "y": self.linear(layer, "o", attention)})
        gate_up = self.linear(layer, "gate_up", self.norm(f"{p}.mlp_norm", x))
        product = self.op(f"{p}.swiglu", "swiglu", {"gate_up": gate_up})
        return self.op(f"{p}.mlp_add", "add", {"residual": x, "y": self.linear(layer, "down", product)})

    def attention(self, layer: int, p: str, x: str) -> str:
        s = self.spec
        q = k = v = self.linear(layer, "qkv", x)
        if s.qkv_bias:
            q = k = v = self.op(f"{p}.qkv_bias", "add", {"x": q, "bias": self.leaf(f"{p}.qkv.bias")})
        if s.qk_norm:
            q, k = self.norm(f"{p}.q_norm", q), self.norm(f"{p}.k_norm", k)
        q = self.rope(f"{p}.rope_q", q)
        k = self.key_value(f"{p}.k", self.rope(f"{p}.rope_k", k))
        v = self.key_value(f"{p}.v", v)
        inputs = {"q": q, "k": k, "v": v}
        heads = (s.num_heads, s.num_kv_heads)
        return self.op(f"{p}.attention", "attention", inputs, heads=heads, head_dim=s.head_dim)

    def rope(self, name: str, x: str) -> str:
        rope = asdict(self.spec.rope)
        constants = rope if rope["factor"] is not None else {"theta": rope["theta"]}
        return self.op(name, "rope", {"x": x}, BF16, **constants)

    def key_value(self, name: str, x: str) -> str:
        """Contract 7: what the cache holds quantized, training quantizes too; the cache itself only copies."""
        cache = self.recipe.kv_cache
        if cache.is_quantized:
            x = self.op(f"{name}.quantize", "quantize", {"x": x}, cache)
        if self.side == "rollout":
            x = self.op(f"{name}_cache_write", "cache_write", {"x": x}, cache)
            x = self.op(f"{name}_cache_read", "cache_read", {"x": x}, cache)
        return x

    def linear(self, layer: int, role: Role, x: str) -> str:
        name = f"layers.{layer}.{role}"
        sections, in_size = self.linears()[role]
        weight = self.leaf(f"{name}.weight")
        linear = self.recipe.linear(layer, role, self.side)
        if linear is not None:
            x = self.op(f"{name}.quantize_x", "quantize", {"x": x}, linear.fprop.left)
            quantizer = f"{name}.quantize_weight"
            weight = self.op(quantizer, "quantize", {"x": weight}, linear.fprop.right, sections=sections)
        out = BF16 if linear is None else linear.out
        return self.op(name, "gemm", {"x": x, "weight": weight}, out, out_sections=sections, in_size=in_size)


class _Backward(_Builder):
    def build(self) -> None:
        last = self.spec.num_layers - 1
        self.gradients: dict[str, str] = {}
        inputs = {"hidden": self.saved("norm"), "head": self.leaf(self.head)}
        dy = self.op("logprob.backward", "logprob_backward", inputs)
        dy = self.bf16_linear("lm_head", self.head, dy, self.saved("norm"))
        dy = self.norm("norm", dy, self.saved(f"layers.{last}.mlp_add"))
        for layer in reversed(range(self.spec.num_layers)):
            dy = self.layer(layer, dy)
        self.weight_gradient("embed.weight", self.op("embed.wgrad", "weight_sum", {"dy": dy}, FP32))
        self.op("optimizer", "optimizer", self.gradients, FP32)

    def saved(self, name: str, out: Format = BF16) -> str:
        return self.leaf(f"{name}.saved", "saved", out)

    def weight_gradient(self, parameter: str, gradient: str) -> None:
        if parameter in self.gradients:  # a tied head: its gradient and the embedding's are added
            total = f"{parameter}.grad_sum"
            gradient = self.op(total, "add", {"x": self.gradients[parameter], "y": gradient}, FP32)
        self.gradients[parameter] = gradient

    def norm(self, name: str, dy: str, x: str) -> str:
        inputs = {"dy": dy, "x": x}
        self.weight_gradient(f"{name}.weight", self.op(f"{name}.wgrad", "weight_sum", inputs, FP32))
        return self.op(f"{name}.dgrad", "rms_norm_backward", inputs | {"weight": self.leaf(f"{name}.weight")})

    def layer(self, layer: int, dy: str) -> str:
        """`dy` is the gradient of the layer's output on the residual stream; returns that of its input."""
        p = f"layers.{layer}"
        dx = self.linear(layer, "down", dy, f"{p}.swiglu")
        dx = self.op(f"{p}.swiglu.dgrad", "swiglu_backward", {"dy": dx, "gate_up": self.saved(f"{p}.gate_up")})
        dx = self.linear(layer, "gate_up", dx, f"{p}.mlp_norm")
        dx = self.norm(f"{p}.mlp_norm", dx, self.saved(f"{p}.attn_add"))
        dy = self.op(f"{p}.attn_add.grad", "add", {"residual": dy, "y": dx})
        dx = self.attention(p, self.linear(layer, "o", dy, f"{p}.attention"))
        dx = self.linear(layer, "qkv", dx, f"{p}.attn_norm")
        dx = self.norm(f"{p}.attn_norm", dx, self.saved(f"layers.{layer - 1}.mlp_add" if layer else "embed"))
        return self.op(f"{p}.input.grad", "add", {"residual": dy, "y": dx})

    def attention(self, p: str, dy: str) -> str:
        """Gradients pass a quantizer of K and V unchanged (straight through)."""
        s, cache = self.spec, self.recipe.kv_cache
        key = f"{p}.k.quantize" if cache.is_quantized else f"{p}.rope_k"
        value = f"{p}.v.quantize" if cache.is_quantized else f"{p}.qkv_bias" if s.qkv_bias else f"{p}.qkv"
        inputs = {"dy": dy, "q": self.saved(f"{p}.rope_q")}
        inputs |= {"k": self.saved(key, cache), "v": self.saved(value, cache)}
        v = self.op(f"{p}.attention.dgrad", "attention_backward", inputs)
        q = self.op(f"{p}.rope_q.dgrad", "rope_backward", {"dy": v})
        k = self.op(f"{p}.rope_k.dgrad", "rope_backward", {"dy": v})
        if s.qk_norm:
            x = self.saved(f"{p}.qkv_bias" if s.qkv_bias else f"{p}.qkv")
            q, k = self.norm(f"{p}.q_norm", q, x), self.norm(f"{p}.k_norm", k, x)
        dy = self.op(f"{p}.qkv.dy", "concat", {"q": q, "k": k, "v": v})
        if s.qkv_bias:
            self.weight_gradient(f"{p}.qkv.bias", self.op(f"{p}.qkv_bias.wgrad", "weight_sum", {"dy": dy}, FP32))
        return dy

    def linear(self, layer: int, role: Role, dy: str, x: str) -> str:
        name = f"layers.{layer}.{role}"
        linear = self.recipe.linear(layer, role, self.side)
        if linear is None:
            return self.bf16_linear(name, f"{name}.weight", dy, self.saved(x))
        return self.fp8_linear(name, linear, dy, self.saved(x), self.linears()[role][0])

    def fp8_linear(self, name: str, linear: LinearRecipe, dy: str, x: str, sections: tuple[int, ...]) -> str:
        assert linear.saved_activation == linear.wgrad.right, "backward keeps x in the format that wgrad reads"
        dy_q = self.op(f"{name}.quantize_dy", "quantize", {"x": dy}, linear.dgrad.left, sections=sections)
        weight = self.saved(f"{name}.quantize_weight", linear.dgrad.right)
        dy_t = self.op(f"{name}.quantize_dy_t", "quantize", {"x": dy}, linear.wgrad.left)
        x_t = self.op(f"{name}.quantize_x_t", "quantize", {"x": x}, linear.saved_activation)
        self.weight_gradient(f"{name}.weight", self.op(f"{name}.wgrad", "gemm", {"dy": dy_t, "x": x_t}, FP32))
        return self.op(f"{name}.dgrad", "gemm", {"dy": dy_q, "weight": weight}, linear.grad)

    def bf16_linear(self, name: str, weight: str, dy: str, x: str) -> str:
        self.weight_gradient(weight, self.op(f"{name}.wgrad", "gemm", {"dy": dy, "x": x}, FP32))
        return self.op(f"{name}.dgrad", "gemm", {"dy": dy, "weight": self.leaf(weight)})
