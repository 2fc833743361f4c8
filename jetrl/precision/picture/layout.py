"""Where the operators of a layer stand in the picture: a layered layout of any flow graph, made from it alone.

Operators that do the same to siblings share a box (`q_norm, k_norm`). A box's row is the longest way to it from the
layer's input. The boxes of the longest way of all, the spine, stand below one another at place 0; others of the same
row stand beside them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from jetrl.precision.formats import Format
from jetrl.precision.graph import FlowEdge, FlowGraph, FlowNode

LEAVES = ("parameter", "saved")  # what a layer is given; they have no boxes


@dataclass(slots=True, eq=False)
class Box:
    """One or more sibling operators. `name`: that of the first, within the layer. `row` counts from the input on."""

    nodes: tuple[FlowNode, ...]
    titles: tuple[str, ...]
    row: int = 0
    place: int = 0

    @property
    def name(self) -> str:
        """The first operator's name within the layer."""
        return self.titles[0]

    @property
    def op(self) -> str:
        """What all of its operators do."""
        return self.nodes[0].op

    @property
    def out(self) -> Format:
        """The format of what they write."""
        return self.nodes[0].out


@dataclass(frozen=True, slots=True)
class Line:
    """Tensors of one format between two boxes. None as `source`: the layer's input; as `target`: its output."""

    source: Box | None
    target: Box | None
    format: Format
    names: tuple[str, ...]  # of the edges, within the layer
    slots: tuple[str, ...]


@dataclass(slots=True)
class Layer:
    """The boxes of one layer in one view, in the order of execution, and the lines between them."""

    boxes: list[Box]
    lines: list[Line]
    by_name: dict[str, Box] = field(init=False)

    def __post_init__(self) -> None:
        self.by_name = {title: box for box in self.boxes for title in box.titles}

    @property
    def rows(self) -> int:
        """How many rows it has."""
        return 1 + max(box.row for box in self.boxes)


def arrange(graph: FlowGraph, layer: int, most: int) -> Layer:
    """The layer's boxes, at most `most` in a row where some can move on."""
    prefix = f"layers.{layer}."
    graph = _without_writes(graph)
    operators = [n for n in graph.nodes if n.name.startswith(prefix) and n.op not in LEAVES]
    names = {node.name for node in operators}
    leaves = {node.name for node in graph.nodes if node.op in LEAVES}
    entering = [e for e in graph.edges if e.target in names and e.source not in leaves and not _is_weight(e)]
    operators = [n for n in operators if not n.name.endswith(".quantize_weight")]  # drawn with the weights
    groups = _siblings(operators, entering)
    boxes = [Box(tuple(g), tuple(n.name.removeprefix(prefix) for n in g)) for g in groups]
    of = {node.name: box for box in boxes for node in box.nodes}
    entering = [e for e in entering if e.target in of]
    lines = _lines(entering, of, prefix)
    _set_rows(boxes, lines, most)
    _set_places(boxes, lines)
    last = max(boxes, key=lambda box: box.row)
    lines.append(Line(last, None, last.out, (), ()))
    return Layer(boxes, lines)


def _without_writes(graph: FlowGraph) -> FlowGraph:
    """The cache as one operator: its reads, with what its writes read."""
    written = {n.name for n in graph.nodes if n.op == "cache_write"}
    inputs = {e.target: e.source for e in graph.edges if e.target in written}
    edges = tuple(
        FlowEdge(e.name, inputs.get(e.source, e.source), e.target, e.format) for e in graph.edges
        if e.target not in written
    )
    return FlowGraph(graph.view, tuple(n for n in graph.nodes if n.name not in written), edges)


def _is_weight(edge: FlowEdge) -> bool:
    return edge.name.endswith((".weight", ".quantize_weight.x"))


def _siblings(operators: Sequence[FlowNode], edges: Iterable[FlowEdge]) -> list[list[FlowNode]]:
    """Operators in groups that get one box: the same op and format, neither reads the other, and both read the same
    boxes or are read by the same ones."""
    group = {node.name: node.name for node in operators}
    before: dict[str, set[str]] = {node.name: set() for node in operators}
    after: dict[str, set[str]] = {node.name: set() for node in operators}
    above: dict[str, set[str]] = {node.name: set() for node in operators}  # everything that it depends on
    for edge in edges:
        if edge.target in group and edge.source in group:
            before[edge.target].add(edge.source)
            after[edge.source].add(edge.target)
    for node in operators:
        above[node.name] = before[node.name].union(*(above[name] for name in before[node.name]))

    def alike(a: FlowNode, b: FlowNode) -> bool:
        if (a.op, a.out) != (b.op, b.out) or group[a.name] == group[b.name]:
            return False
        if a.name in above[b.name] or not before[a.name] or not before[b.name]:
            return False
        return any(
            {group[n] for n in near[a.name]} == {group[n] for n in near[b.name]} != set() for near in (before, after)
        )

    changed = True
    while changed:
        changed = False
        for a, b in combinations(operators, 2):
            if alike(a, b):
                old, new = group[b.name], group[a.name]
                group = {name: new if first == old else first for name, first in group.items()}
                changed = True
    found: dict[str, list[FlowNode]] = {}
    for node in operators:
        found.setdefault(group[node.name], []).append(node)
    return list(found.values())


def _lines(edges: Iterable[FlowEdge], of: dict[str, Box], prefix: str) -> list[Line]:
    """Edges between the same boxes in the same format as one line."""
    found: dict[tuple[int, int, Format], list[FlowEdge]] = {}
    for edge in edges:
        found.setdefault((id(of.get(edge.source)), id(of[edge.target]), edge.format), []).append(edge)
    return [
        Line(
            of.get(first.source), of[first.target], first.format,
            tuple(e.name.removeprefix(prefix) for e in (first, *rest)),
            tuple(dict.fromkeys(e.name.rsplit(".", 1)[1] for e in (first, *rest))),
        )
        for first, *rest in found.values()
    ]


def _set_rows(boxes: Sequence[Box], lines: Sequence[Line], most: int) -> None:
    into: dict[int, list[Box | None]] = {id(box): [] for box in boxes}
    for line in lines:
        into[id(line.target)].append(line.source)
    least = {id(box): 0 for box in boxes}  # where a full row sent it
    while True:
        for _ in boxes:  # at most as many rounds as boxes; siblings may stand after what they read
            rows = {
                id(box): max([least[id(box)], *(s.row + 1 for s in into[id(box)] if s is not None)]) for box in boxes
            }
            if all(box.row == rows[id(box)] for box in boxes):
                break
            for box in boxes:
                box.row = rows[id(box)]
        for box in boxes:
            if not into[id(box)]:  # reads only what the layer is given: next to where it is needed
                users = [line.target.row for line in lines if line.source is box and line.target is not None]
                box.row = max(0, min(users, default=1) - 1)
        spine = _spine(boxes, lines)
        full = [
            box for row in range(max(b.row for b in boxes) + 1)
            if len(there := [b for b in boxes if b.row == row]) > most
            for box in [b for b in there if id(b) not in spine and into[id(b)]][-1:]
        ]
        if not full:
            return
        least[id(full[0])] = full[0].row + 1


def _spine(boxes: Sequence[Box], lines: Sequence[Line]) -> set[int]:
    """The boxes of a longest way to the last row."""
    box: Box | None = max(boxes, key=lambda b: b.row)
    found: set[int] = set()
    while box is not None:
        found.add(id(box))
        row = box.row
        above = [line.source for line in lines if line.target is box and line.source is not None]
        box = max((b for b in above if b.row < row), key=lambda b: b.row, default=None)
    return found


def _set_places(boxes: Sequence[Box], lines: Sequence[Line]) -> None:
    spine = _spine(boxes, lines)
    for row in range(max(box.row for box in boxes) + 1):
        there = [box for box in boxes if box.row == row]
        others = [box for box in there if id(box) not in spine]
        read = {id(b): [line.source.place for line in lines if line.target is b and line.source] for b in others}
        others.sort(key=lambda b: (min(read[id(b)], default=len(boxes)), not read[id(b)]))
        for place, box in enumerate(others, len(there) > len(others)):
            box.place = place
