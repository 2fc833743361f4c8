"""The layout of the picture: rows, places and shared boxes, for graphs that no block of the package makes."""

from __future__ import annotations

import flow_shape
import pytest

from jetrl.precision.flow import build_flow
from jetrl.precision.formats import BF16
from jetrl.precision.graph import FlowEdge, FlowGraph, FlowNode
from jetrl.precision.picture.layout import Layer, arrange
from jetrl.precision.recipe import build_recipe


def graph_of(edges: str, ops: dict[str, str] | None = None) -> FlowGraph:
    """Nodes `a`, `b` ... of layer 0 from `a>b b>c`; `x` is what the layer is given."""
    pairs = [pair.split(">") for pair in edges.split()]
    names = list(dict.fromkeys(name for pair in pairs for name in pair))
    at = {name: "embed" if name == "x" else f"layers.0.{name}" for name in names}
    nodes = tuple(FlowNode(at[name], (ops or {}).get(name, name), "", BF16) for name in names)
    made = tuple(FlowEdge(f"{at[b]}.{a}", at[a], at[b], BF16) for a, b in pairs)
    return FlowGraph("train_backward", nodes, made)


def places(layer: Layer) -> dict[str, tuple[int, int]]:
    return {box.name: (box.row, box.place) for box in layer.boxes}


def test_rows_are_the_longest_way_and_the_spine_stands_at_place_0() -> None:
    layer = arrange(graph_of("x>a a>b b>c a>c a>w c>d"), 0, 3)
    assert places(layer) == {"a": (0, 0), "b": (1, 0), "w": (1, 1), "c": (2, 0), "d": (3, 0)}
    assert layer.rows == 4
    ends = [(line.source and line.source.name, line.target and line.target.name) for line in layer.lines]
    assert ends[0] == (None, "a") and ends[-1] == ("d", None) and ("a", "c") in ends


def test_siblings_share_a_box_and_their_edges_a_line() -> None:
    ops = {"q": "norm", "k": "norm", "rq": "rope", "rk": "rope"}
    layer = arrange(graph_of("x>a a>q a>k q>rq k>rk rq>s rk>s a>s", ops), 0, 1)
    assert [box.titles for box in layer.boxes] == [("a",), ("q", "k"), ("rq", "rk"), ("s",)]
    into = [line.slots for line in layer.lines if line.target is layer.by_name["s"]]
    assert sorted(into) == [("a",), ("rq", "rk")]


def test_an_operator_that_reads_another_of_its_kind_has_its_own_box() -> None:
    layer = arrange(graph_of("x>n1 n1>n2 n2>e", {"n1": "norm", "n2": "norm"}), 0, 1)
    assert [box.titles for box in layer.boxes] == [("n1",), ("n2",), ("e",)]


@pytest.mark.parametrize("most", [2, 3])
def test_a_full_row_sends_what_is_beside_the_spine_on(most: int) -> None:
    layer = arrange(graph_of("x>a a>b b>c c>d a>u a>v a>w"), 0, most)
    for row in range(layer.rows):
        assert len([box for box in layer.boxes if box.row == row]) <= most
    assert len(set(places(layer).values())) == len(layer.boxes)


@pytest.mark.parametrize("precision", ["bf16", "fp8", "fp8_rollout"])
def test_every_operator_of_a_real_layer_has_one_place(precision: str) -> None:
    spec, recipe = flow_shape.SPEC, build_recipe(precision, flow_shape.SPEC.num_layers)
    for view, most in (("rollout", 1), ("train_forward", 1), ("train_backward", 3)):
        graph = build_flow(spec, recipe, view)
        layer = arrange(graph, 0, most)
        left_out = ("parameter", "saved", "cache_write")
        expected = {
            n.name.removeprefix("layers.0.") for n in graph.nodes
            if n.name.startswith("layers.0.") and n.op not in left_out and "quantize_weight" not in n.name
        }
        assert set(layer.by_name) == expected
        taken = [(box.row, box.place) for box in layer.boxes]
        assert len(set(taken)) == len(taken)
        if most == 1:
            assert [box.row for box in layer.boxes] == list(range(layer.rows))
