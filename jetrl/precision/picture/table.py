"""The flow as an aligned text table for an 80-column terminal: equal layers folded, one column for each side."""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jetrl.precision.flow import build_flow, diff_recipe, flow_digest, layer_ranges
from jetrl.precision.formats import Format
from jetrl.precision.graph import FlowEdge, FlowGraph, FlowNode, View
from jetrl.precision.recipe import Recipe
from jetrl.spec import ModelSpec

WIDTH = 80
_SHORT = {"act_1x128": "A8", "weight_128x128": "W8", "act_128x128": "X8", "wgrad_128x1": "T8", "kv_head": "K8"}


@dataclass(frozen=True, slots=True)
class Row:
    """One operator on both sides; the text is empty if a side lacks it. `layer` is None outside the layers."""

    layer: int | None
    name: str
    left: str
    right: str
    same: bool


def flow_text(spec: ModelSpec, recipe: Recipe, other: Recipe | None = None, sampler: str = "") -> str:
    """Training and rollout of `recipe` side by side, then its backward; with `other`, the two recipes view by view.
    `sampler`: the engine that samples, where it does not promise the bits of the training forward."""
    if other is not None:
        return _compare(spec, recipe, other)
    train, rollout = build_flow(spec, recipe, "train_forward"), build_flow(spec, recipe, "rollout")
    backward = build_flow(spec, recipe, "train_backward")
    num = len(diff_recipe(spec, recipe))
    different = f"DIFFERENT in {num} places (operators and edges)"
    same = f"equal formats, edge by edge; {sampler} samples and does not promise equal bits"
    verdict = different if num else same if sampler else "the same function, edge by edge"
    lines = [f"Flow {flow_digest(spec, recipe)}: {recipe.name}, {spec.family}, {spec.num_layers} layers"]
    lines += [f"Rollout and training forward: {verdict}", *_legend((train, rollout, backward)), ""]
    lines += _table(rows(train, rollout), ("training", "rollout"))
    lines += ["", "Backward (training only)", *_table(rows(backward, None), ("training",))]
    return "\n".join(lines + ["", "Where each operator rounds", *_roundings((rollout, backward))]) + "\n"


def _compare(spec: ModelSpec, recipe: Recipe, other: Recipe) -> str:
    views: tuple[View, ...] = ("rollout", "train_forward", "train_backward")
    graphs = [(build_flow(spec, recipe, view), build_flow(spec, other, view)) for view in views]
    names = (recipe.name, other.name) if recipe.name != other.name else (f"{recipe.name} (1)", f"{other.name} (2)")
    lines = [f"Flow 1 {flow_digest(spec, recipe)}: {recipe.name}", f"Flow 2 {flow_digest(spec, other)}: {other.name}"]
    lines += _legend([graph for both in graphs for graph in both])
    for view, (left, right) in zip(views, graphs, strict=True):
        found = [row for row in rows(left, right) if not row.same]
        lines += ["", f"{view}: " + (f"{len(found)} operators differ" if found else "equal")]
        lines += _table(found, names) if found else []
    return "\n".join(lines) + "\n"


def rows(left: FlowGraph, right: FlowGraph | None) -> list[Row]:
    """One row per operator, in the order of execution; parameters show as inputs of what reads them.

    A cache write and read are one row. They are the same as training's direct edge when they change no value.
    """
    sides = [_operators(left), _operators(right) if right is not None else {}]
    result = []
    for name in _merge(list(sides[0]), list(sides[1])):
        texts = [side.get(name, ("", None)) for side in sides]
        cache = name.endswith("_cache")
        both_cached = cache and all(text for text, _ in texts)
        same = texts[0] == texts[1] or right is None
        if cache and not both_cached:
            same = len(set(next(text for text, _ in texts if text).split(" -> "))) == 1
        shown = [text or ("direct" if cache else "-") for text, _ in texts]
        parts = name.split(".", 2)
        layer = int(parts[1]) if parts[0] == "layers" else None
        short = name if layer is None else parts[2]
        result.append(Row(layer, short, shown[0], shown[1] if right is not None else "", same))
    return result


def _operators(graph: FlowGraph) -> dict[str, tuple[str, object]]:
    """Operators by name, each with its formats as text and with all that defines it."""
    inputs: dict[str, list[FlowEdge]] = {}
    for edge in graph.edges:
        inputs.setdefault(edge.target, []).append(edge)
    shown: dict[str, tuple[str, object]] = {}
    for node in graph.nodes:
        if node.op in ("parameter", "saved", "cache_read"):
            continue
        definition = (node.op, node.attributes, tuple((e.name, e.format) for e in inputs.get(node.name, [])), node.out)
        shown[node.name.removesuffix("_write")] = (_formula(node, inputs.get(node.name, [])), definition)
    return shown


def _formula(node: FlowNode, inputs: Sequence[FlowEdge]) -> str:
    formats = [short(edge.format) for edge in inputs]
    product = node.op in ("gemm", "grouped_gemm")
    if not product:
        formats = list(dict.fromkeys(formats))
    return f"{(' @ ' if product else ', ').join(formats)} -> {short(node.out)}"


def short(format: Format) -> str:
    """`A8`, `W8`, `T8`, `K8` for E4M3 along features, in tiles, along tokens, by heads; `p`: power-of-two scales."""
    return str(format) if format.block is None else _SHORT[format.name] + ("p" if format.pow2 else "")


def _legend(graphs: Iterable[FlowGraph]) -> list[str]:
    formats = {node.out for graph in graphs for node in graph.nodes if node.out.is_quantized}
    words = [f"{short(format)} = {format}" for format in sorted(formats, key=short)]
    lines = [""] if words else []
    for word in words:
        if lines[-1] and len(lines[-1]) + 3 + len(word) > WIDTH:
            lines.append("")
        lines[-1] += ("   " if lines[-1] else "") + word
    return lines


def _merge(left: list[str], right: list[str]) -> list[str]:
    """Both orders in one: common names keep their place, the others go where their side has them."""
    merged = []
    for tag, a, b, c, d in difflib.SequenceMatcher(None, left, right, autojunk=False).get_opcodes():
        merged += left[a:b] if tag == "equal" else left[a:b] + right[c:d]
    assert len(set(merged)) == len(merged), "the two graphs order the same operators differently"
    return merged


def _folded(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Sections with a title: equal layers in one section, at the place of the first."""
    layers: dict[int, list[Row]] = {}
    for row in rows:
        if row.layer is not None:
            layers.setdefault(row.layer, []).append(row)
    members: dict[tuple[tuple[str, str, str, bool], ...], list[int]] = {}
    for layer, content in layers.items():
        members.setdefault(tuple((r.name, r.left, r.right, r.same) for r in content), []).append(layer)
    sections: list[tuple[str, list[Row]]] = []
    printed: set[int] = set()
    for row in rows:
        if row.layer is None:
            if not sections or sections[-1][0]:
                sections.append(("", []))
            sections[-1][1].append(row)
        elif row.layer not in printed:
            same = next(group for group in members.values() if row.layer in group)
            sections.append((f"layer{'s' if len(same) > 1 else ''} {layer_ranges(same)}", layers[row.layer]))
            printed.update(same)
    return sections


def _table(rows: Sequence[Row], headings: Sequence[str]) -> list[str]:
    two = len(headings) == 2
    name = max(len(row.name) for row in rows) + 2
    left = max([len(headings[0]), *(len(row.left) for row in rows)])
    right = max([len(headings[1]), *(len(row.right) for row in rows)]) if two else 0

    def line(title: str, a: str, b: str, same: str) -> str:
        text = f"{title:<{name}}  {a:<{left}}" + (f"  {b:<{right}}  {same}" if two else "")
        return text.rstrip()

    lines = [line("operator", headings[0], headings[1] if two else "", "same?")]
    lines.append("-" * min(WIDTH, name + left + right + (11 if two else 2)))
    for title, content in _folded(rows):
        lines += [title] if title else []
        indent = "  " if title else ""
        lines += [line(indent + r.name, r.left, r.right, "yes" if r.same else "NO") for r in content]
    return lines


def _roundings(graphs: Iterable[FlowGraph]) -> list[str]:
    ops = {n.op: n.rounding for graph in graphs for n in graph.nodes if n.op not in ("saved", "concat")}
    width = max(map(len, ops)) + 2
    lines = []
    for op, rounding in ops.items():
        lines += textwrap.wrap(f"{op:<{width}}{rounding}", WIDTH, subsequent_indent=" " * width)
    return lines
