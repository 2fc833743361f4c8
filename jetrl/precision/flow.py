"""The comparison of rollout and training: differences edge by edge, the check for one flow, the digest."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from jetrl.errors import UserError
from jetrl.precision.builder import build_flow
from jetrl.precision.graph import FlowEdge, FlowGraph, FlowNode, View
from jetrl.precision.recipe import Recipe
from jetrl.spec import ModelSpec

__all__ = [
    "FlowDifference",
    "FlowEdge",
    "FlowGraph",
    "FlowNode",
    "View",
    "build_flow",
    "diff",
    "diff_recipe",
    "flow_digest",
    "fold_differences",
    "layer_ranges",
    "require_unified",
]

_COMPARED: tuple[View, View] = ("rollout", "train_forward")
_LAYER = re.compile(r"layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class FlowDifference:
    """One place where the rollout is not what training computes.

    missing    the operator `name` runs in the rollout only
    operator   the operator `name` exists on both sides with another definition (op, sizes or constants, rounding)
    format     the tensor `name` (an operator's input) has another format
    source     the tensor `name` comes from another operator, in the same format
    """

    kind: Literal["missing", "operator", "format", "source"]
    name: str
    rollout: str
    train: str

    def __str__(self) -> str:
        return f"{self.name}: {self.text}"

    @property
    def text(self) -> str:
        """The difference without the name of the place."""
        return f"rollout {self.rollout}, training {self.train}"


def diff(rollout: FlowGraph, train_forward: FlowGraph) -> list[FlowDifference]:
    """All differences in the order of execution; empty when the rollout is a subgraph of the training forward.

    The KV cache counts as the edge that it carries. What training has beyond the rollout does not count. An edge into
    an operator that training lacks is covered by the entry of that operator; each other edge gives at most one entry.
    """
    rollout, train_forward = rollout.without_cache(), train_forward.without_cache()
    nodes, edges = train_forward.node_map(), train_forward.edge_map()
    inputs: dict[str, list[FlowEdge]] = {}
    for edge in rollout.edges:
        inputs.setdefault(edge.target, []).append(edge)
    found = []
    for node in rollout.nodes:
        other = nodes.get(node.name)
        if other is None:
            found.append(FlowDifference("missing", node.name, f"has {node.op} -> {node.out}", "has no such operator"))
            continue
        if (node.op, node.attributes) != (other.op, other.attributes):
            found.append(FlowDifference("operator", node.name, _definition(node), _definition(other)))
        for edge in inputs.get(node.name, []):
            found += _diff_edge(edge, edges.get(edge.name))
    return found


def _diff_edge(edge: FlowEdge, other: FlowEdge | None) -> list[FlowDifference]:
    if other is None:
        return [FlowDifference("source", edge.name, f"reads {edge.source}", "has no such input")]
    if edge.format != other.format:
        return [FlowDifference("format", edge.name, f"reads {edge.format}", f"reads {other.format}")]
    if edge.source != other.source:
        return [FlowDifference("source", edge.name, f"reads {edge.source}", f"reads {other.source}")]
    return []


def _definition(node: FlowNode) -> str:
    return f"has {node.op}({', '.join(f'{key}={value}' for key, value in node.attributes)})"


def diff_recipe(spec: ModelSpec, recipe: Recipe) -> list[FlowDifference]:
    """The differences between the two sides of one recipe."""
    return diff(build_flow(spec, recipe, "rollout"), build_flow(spec, recipe, "train_forward"))


def layer_ranges(layers: Iterable[int]) -> str:
    """Sorted numbers as text: `0-2, 5`."""
    ranges: list[list[int]] = []
    for layer in sorted(set(layers)):
        if ranges and ranges[-1][1] == layer - 1:
            ranges[-1][1] = layer
        else:
            ranges.append([layer, layer])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)


def fold_differences(differences: Iterable[FlowDifference]) -> list[str]:
    """One line per difference, merged where layers share it: `layers 0-27, qkv.x: rollout ..., training ...`."""
    folded: dict[tuple[str, str], list[int]] = {}
    for difference in differences:
        match = _LAYER.match(difference.name)
        text = _LAYER.sub("", difference.text)
        folded.setdefault((difference.name[match.end() if match else 0 :], text), [])
        if match:
            folded[difference.name[match.end() :], text].append(int(match.group(1)))
    lines = []
    for (name, text), layers in folded.items():
        where = f"layer{'s' if len(layers) > 1 else ''} {layer_ranges(layers)}, " if layers else ""
        lines.append(f"{where}{name}: {text}")
    return lines


def require_unified(spec: ModelSpec, recipe: Recipe) -> None:
    """Raise UserError with the list of differing edges unless the rollout is a subgraph of the training forward."""
    differences = diff_recipe(spec, recipe)
    if not differences:
        return
    count = f"{len(differences)} place{'s' if len(differences) > 1 else ''}"
    raise UserError(
        f"precision = {recipe.name!r}: the rollout and the training forward compute different functions, in {count}:\n"
        + "".join(f"  {line}\n" for line in fold_differences(differences))
        + "Use precision = 'fp8', 'w8a16' or 'bf16', where both sides have one flow."
    )


def flow_digest(spec: ModelSpec, recipe: Recipe, kernels: str = "") -> str:
    """The name of a precision flow, 16 hex digits: weights and completions carry it, and a batch must match it.

    Covers the rollout and the training forward, so that the mixed flow is never mistaken for the unified one.
    `kernels`: what the bits of the kernels depend on besides the flow (`kernels.dispatch.definition`); empty for most.
    """
    digests = [build_flow(spec, recipe, view).digest() for view in _COMPARED] + ([kernels] if kernels else [])
    return hashlib.sha256("+".join(digests).encode()).hexdigest()[:16]
