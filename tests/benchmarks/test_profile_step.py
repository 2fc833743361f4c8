"""The benchmark that lists a step's kernels: its sums worked out by hand, and small models on the CPU."""

from __future__ import annotations

import profile_step
import pytest
from whole_model import recipe_for

from jetrl.config.shipped import find_recipe
from jetrl.spec import SHAPES


def test_kernels_are_summed_by_name_and_overlaps_are_busy_once() -> None:
    events = [("a", 0.0, 4.0), ("b", 3.0, 6.0), ("a", 10.0, 12.0), ("c", 11.0, 11.5)]
    found = profile_step.by_name(events, steps=2)
    assert [(k["name"], k["us"], k["calls"], k["us a call"]) for k in found.kernels] == [
        ("a", 3.0, 1.0, 3.0), ("b", 1.5, 0.5, 3.0), ("c", 0.25, 0.5, 0.5),
    ]
    assert sum(k["share"] for k in found.kernels) == pytest.approx(1.0)
    assert (found.total, found.busy, found.span) == (4.75, 4.0, 6.0)
    assert profile_step.by_name([], 1) == profile_step.Profiled([], 0.0, 0.0, 0.0)


def test_each_kind_of_shape_has_a_recipe_for_its_update() -> None:
    names = {"moonlight-16b-a3b": "moonlight", "qwen3.5-9b": "qwen3.5", "qwen3-8b": "8b", "qwen3-30b-a3b": "30b"}
    for shape, part in names.items():
        assert part in recipe_for(SHAPES[shape])
        assert find_recipe(recipe_for(SHAPES[shape])).is_file()


@pytest.mark.parametrize("what", ["decode", "update"])
def test_a_tiny_hybrid_runs_on_the_cpu(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    profile_step.main(["--tiny", "--shape=tiny-hybrid", "--layers=1", f"--what={what}", "--top=40"])
    case, header, *rows = capsys.readouterr().out.splitlines()
    assert case.startswith(f"shape=tiny-hybrid what={what} layers=1 precision=fp8")
    assert header.split() == ["us", "calls", "us", "a", "call", "share", "name"]
    assert len(rows) == 40 and any(row.split()[-1] == "aten::mm" for row in rows)
    assert 0 < float(rows[-1].split()[0]) <= float(rows[0].split()[0])
