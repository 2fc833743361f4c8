"""The printed table and the picture: what they say is what the graphs say, and nothing overlaps."""

from __future__ import annotations

import dataclasses
import itertools
import re
import xml.etree.ElementTree as ET

import flow_shape
import pytest

from jetrl.precision.blocks.layouts import roles_of
from jetrl.precision.flow import build_flow, diff_recipe, flow_digest
from jetrl.precision.picture.draw import flow_svg, flow_text
from jetrl.precision.picture.table import rows
from jetrl.precision.recipe import Recipe, build_recipe
from jetrl.spec import ModelSpec

SPEC = dataclasses.replace(flow_shape.SPEC, num_layers=5)
FP8 = build_recipe("fp8", 5, num_first_layers_in_bf16=1, num_last_layers_in_bf16=1)
MIXED = build_recipe("fp8_rollout", 5, num_first_layers_in_bf16=1)
BF16 = build_recipe("bf16", 5)
FP8_CACHE = build_recipe("fp8", 5, "pow2", "pow2", kv_cache="fp8", head_dim=SPEC.head_dim)
RECIPES = [FP8, MIXED, BF16, FP8_CACHE]
FAMILIES = [dataclasses.replace(SPEC, qkv_bias=b, qk_norm=n) for b, n in itertools.product((False, True), repeat=2)]
SVG = "{http://www.w3.org/2000/svg}"


# ---- table ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
def test_rows_marked_different_are_those_of_the_diff(recipe: Recipe) -> None:
    train, rollout = build_flow(SPEC, recipe, "train_forward"), build_flow(SPEC, recipe, "rollout")
    marked = {f"layers.{r.layer}.{r.name}" for r in rows(train, rollout) if not r.same}
    places = set()
    for d in diff_recipe(SPEC, recipe):
        places.add(d.name if d.kind in ("missing", "operator") else d.name.rsplit(".", 1)[0])
    assert marked == places
    assert len(marked) == (3 * 4 * 4 if recipe is MIXED else 0)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("spec", FAMILIES)
def test_table_fits_a_terminal(spec: ModelSpec, recipe: Recipe) -> None:
    for text in (flow_text(spec, recipe), flow_text(spec, recipe, MIXED)):
        assert max(map(len, text.splitlines())) <= 80
        assert all(line == line.rstrip() for line in text.splitlines())
    assert flow_digest(spec, recipe) in flow_text(spec, recipe).splitlines()[0]


def test_table_of_the_unified_flow() -> None:
    text = flow_text(SPEC, FP8)
    lines = text.splitlines()
    assert "Rollout and training forward: the same function, edge by edge" in lines
    assert lines.count("layers 0, 4") == lines.count("layers 1-3") == 2  # forward and backward
    assert re.search(r"^  qkv +A8 @ W8 -> bf16 +A8 @ W8 -> bf16 +yes$", text, re.M)
    assert re.search(r"^  k_cache +direct +bf16 -> bf16 +yes$", text, re.M)
    assert re.search(r"^  down.wgrad +T8 @ T8 -> fp32$", text, re.M)
    assert re.search(r"^lm_head +bf16 @ bf16 -> fp32 +bf16 @ bf16 -> fp32 +yes$", text, re.M)
    assert not re.search(r"\bNO$", text, re.M)
    assert "A8 = e4m3[1x128,fp32]   T8 = e4m3[128x1,fp32]   W8 = e4m3[128x128,fp32]" in lines
    assert re.search(r"^swiglu +fp32 products, rounded once to bf16$", text, re.M)


def test_table_of_the_mixed_flow() -> None:
    text = flow_text(SPEC, MIXED)
    assert "DIFFERENT in 64 places" in text
    assert len(re.findall(r" NO$", text, re.M)) == 12
    assert re.search(r"^  o +bf16 @ bf16 -> bf16 +A8 @ W8 -> bf16 +NO$", text, re.M)
    assert re.search(r"^  o.quantize_x +- +bf16 -> A8 +NO$", text, re.M)


def test_table_of_two_recipes_shows_only_what_differs() -> None:
    pow2 = build_recipe("fp8", 5, weight_scale="pow2")
    text = flow_text(SPEC, build_recipe("fp8", 5), pow2)
    assert "rollout: 40 operators differ" in text and "train_backward: 20 operators differ" in text
    assert "fp8 (1)" in text and "W8p = e4m3[128x128,pow2]" in text
    assert re.search(r"^  down.dgrad +A8 @ W8 -> bf16 +A8 @ W8p -> bf16 +NO$", text, re.M)
    assert "wgrad" not in text  # its operands have the scales of activations
    assert "rollout: equal" in flow_text(SPEC, FP8, FP8)
    against = flow_text(SPEC, build_recipe("fp8", 5), build_recipe("fp8_rollout", 5))
    assert "rollout: equal" in against and "train_forward: 60 operators differ" in against


# ---- picture --------------------------------------------------------------------------------------------------------


def texts(root: ET.Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{SVG}text")]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("spec", FAMILIES)
def test_svg_is_well_formed_and_self_contained(spec: ModelSpec, recipe: Recipe) -> None:
    svg = flow_svg(spec, recipe)
    root = ET.fromstring(svg)
    assert root.tag == f"{SVG}svg"
    words = texts(root)
    assert f"digest {flow_digest(spec, recipe)}" in words
    assert "prefers-color-scheme: dark" in svg
    assert svg.count("http") == 1 and "href" not in svg and "<script" not in svg
    assert all(f"{role}.wgrad" in words and f"{role}.weight" in words for role in roles_of(spec))
    assert ("k_norm" in " ".join(words)) == spec.qk_norm and ("qkv_bias" in words) == spec.qkv_bias


def test_svg_marks_differences_and_only_those() -> None:
    mixed = ET.fromstring(flow_svg(SPEC, MIXED))
    lines = [e for e in mixed.iter(f"{SVG}path") if e.get("class") == "line differs"]
    assert len(lines) == 4 * 4 + 1  # x and weight of four linears on two sides, and the legend
    marked = [t for t in texts(mixed) if t.endswith(" ≠")]
    assert sorted(set(marked)) == ["bf16 ≠", "differs ≠", "e4m3[128x128,fp32] ≠", "e4m3[1x128,fp32] ≠"]
    assert texts(mixed).count("no quantizer") == 4
    assert "≠  Rollout and training differ in 64 places (red, dashed)" in texts(mixed)
    unified = ET.fromstring(flow_svg(SPEC, FP8))
    assert [t for t in texts(unified) if "≠" in t] == ["differs ≠"]
    assert any(t.startswith("✓") for t in texts(unified))
    sampled = texts(ET.fromstring(flow_svg(SPEC, FP8, "vllm")))
    assert not any(t.startswith("✓") for t in sampled)
    promise = "Equal formats, edge by edge. vllm samples and does not promise equal bits"
    assert promise in sampled and promise.lower().replace(". ", "; ") in flow_text(SPEC, FP8, sampler="vllm").lower()
    assert "64 places" in " ".join(texts(ET.fromstring(flow_svg(SPEC, MIXED, "vllm"))))


def test_svg_draws_an_fp8_layer_and_names_the_others() -> None:
    words = texts(ET.fromstring(flow_svg(SPEC, FP8)))
    note = next(t for t in words if t.startswith("Drawn:"))
    assert note == "Drawn: layer 1, equal in layers 1-3. Layers 0, 4: every GEMM in bf16 on both sides."
    assert "qkv.quantize_dy_t" in words and "→ e4m3[128x1,fp32]" in words
    assert not any("e4m3[1" in t for t in texts(ET.fromstring(flow_svg(SPEC, BF16))))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("spec", FAMILIES)
def test_labels_overlap_neither_each_other_nor_boxes(spec: ModelSpec, recipe: Recipe) -> None:
    root = ET.fromstring(flow_svg(spec, recipe))
    width = float(root.get("width", "0"))
    areas = []
    for e in root.iter(f"{SVG}rect"):
        if e.get("class") != "page":
            x, y, w, h = (float(e.get(key, "0")) for key in ("x", "y", "width", "height"))
            areas.append(("box", x, y, x + w, y + h))
    boxes = list(areas)
    for e in root.iter(f"{SVG}text"):
        if "label" in (e.get("class") or ""):
            length, x, y = 6.65 * len(e.text or ""), float(e.get("x", "0")), float(e.get("y", "0"))
            x -= {"start": 0.0, "middle": length / 2, "end": length}[e.get("text-anchor", "start")]
            areas.append((e.text or "", x, y - 9, x + length, y + 2))
    for name, x0, _, x1, _ in areas:
        assert 0 <= x0 and x1 <= width, f"{name!r} leaves the page: {x0} to {x1} of {width}"
    for a, b in itertools.combinations(areas, 2):
        apart = a[3] <= b[1] or b[3] <= a[1] or a[4] <= b[2] or b[4] <= a[2]
        assert apart, f"{a} overlaps {b}"
    for e in root.iter(f"{SVG}g"):  # a box's own lines of text fit inside it
        rect = next(e.iter(f"{SVG}rect"))
        for text in e.iter(f"{SVG}text"):
            size = 5.9 if text.get("class") == "small" else 7.0
            assert size * len(text.text or "") <= float(rect.get("width", "0")), text.text
    assert len(boxes) > 30
