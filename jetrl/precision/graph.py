"""FlowGraph: every operator of the model with its rounding point, every tensor between them with its format.

Built from a ModelSpec and a Recipe before any tensor exists (`builder.py`). A node is an operator with one output; an
edge is a tensor that reaches an input of a node and is named after it (`layers.3.qkv.x` is what the GEMM `layers.3.qkv`
reads as x). Token ids and positions carry no rounding and have no edges. Views:

    rollout         embedding to log-prob, keys and values through the paged cache
    train_forward   the same, keys and values straight into attention
    train_backward  gradients, their quantizers, dgrad and wgrad, up to the optimizer (`saved`: of the forward)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal

from jetrl.precision.formats import QUANTIZER_RULE, Format

View = Literal["rollout", "train_forward", "train_backward"]
Attribute = int | float | str | tuple[int, ...] | None

# Where each operator rounds, as `kernels/reference.py` defines it. The digest covers these words. Operators that only
# one kind of block has are in that block's `roundings`.
ROUNDING: Mapping[str, str] = {
    "parameter": "master weight rounded to bf16",
    "saved": "as in the forward",
    "embed": "none (a copy)",
    "rms_norm": "bf16 after x * inv_rms, bf16 after * weight",
    "quantize": f"scale amax / 448, one fp32 division, half to even ({QUANTIZER_RULE})",
    "gemm": "fp32 sum over K, rounded once to the output",
    "grouped_gemm": "as a gemm, each row by its expert's matrix",
    "add": "fp32 addition, rounded once to bf16",
    "add_adapters": "fp32 sum over the rank, an fp32 product with scale, an fp32 addition, rounded once to bf16",
    "add_adapters_backward": "fp32 sum over the rows of b, an fp32 product with scale, rounded once to bf16",
    "scaled_gemm": "fp32 sum over tokens, an fp32 product with scale",
    "logprob": "fp32 logits / temperature; float64 log-sum-exp, rounded once to fp32",
    "logprob_backward": "p - onehot rounded once to bf16, times a factor of the row in fp32 (with an entropy gradient: "
    "the gradient of fp32 logits made again, rounded once to bf16)",
    "rms_norm_backward": "fp32, rounded once to bf16",
    "weight_sum": "fp32 sum over tokens",
    "optimizer": "gradients and states in fp32; master weight in its own dtype",
}


@dataclass(frozen=True, slots=True)
class FlowNode:
    """One operator.

    `rounding` says where and how it rounds, `out` is the format of its only output, `attributes` are the sizes and
    constants that define it.
    """

    name: str
    op: str
    rounding: str
    out: Format
    attributes: tuple[tuple[str, Attribute], ...] = ()


@dataclass(frozen=True, slots=True)
class FlowEdge:
    """One tensor from `source` to the input `name` = `target.slot`."""

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
        """The graph with each cache write and read replaced by the edge that they carry, in the cache's format.

        This makes rollout and training comparable: training must read keys and values in exactly that format.
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
