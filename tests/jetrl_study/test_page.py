"""Scales, figures and the page: where things are drawn, and what the table says."""

from __future__ import annotations

import copy
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from jetrl.cli import app
from jetrl.report.recorder import Recorder
from jetrl_study import collect
from jetrl_study.command import study as study_command
from jetrl_study.figures import figures, interval
from jetrl_study.page import failure_rows, table, write_page
from jetrl_study.rules import RULES
from jetrl_study.svg import Line, chart, decades, doubling, forest, linear


def a_run(arm: str, seed: int, scores: list[float], gap: float) -> dict[str, Any]:
    steps = [0, 5, 10]
    series = {"steps": [5, 10], "values": [gap, gap]}
    return {
        "arm": arm, "seed": seed, "status": "finished", "step": 10, "failures": [],
        "series": {"parity/logprob_abs_diff_mean": series, "reward/mean": {"steps": [5, 10], "values": [0.2, None]}},
        "seconds": {"steps": [0, 5, 10], "values": [0.0, 50.0, 110.0]}, "by_position": {"1": gap, "2": gap, "4": gap},
        "held_out": {"steps": steps, "mean": scores, "scores": [], "solved": scores, "binary": True},
    }


def results() -> dict[str, Any]:
    arms = [{"name": "a", "label": "A <one>", "overrides": [], "break_exactness": []},
            {"name": "b", "label": "B", "overrides": [], "break_exactness": []}]
    difference = {"arm": "b", "against": "a", "seeds": [0, 1, 2], "mean": -0.1, "low": -0.2, "high": -0.01,
                  "verdict": "worse", "by_seed": [], "num_problems": 8}
    return {
        "study": {"name": "s", "about": "", "recipe": "r", "seeds": [0, 1], "overrides": [], "against": ["a"],
                  "arms": arms, "steps": 10},
        "version": "1", "written": "now", "environment": {"cpu": "C"}, "score": "accuracy", "rules": RULES,
        "outcomes": {"last": "", "mean": ""}, "method": {"min_seeds": 3, "resamples": 10, "level": 0.95},
        "runs": [a_run("a", 0, [0.1, 0.5, 0.9], 0.0), a_run("a", 1, [0.3, 0.5, 0.7], 0.0),
                 a_run("b", 0, [0.1, 0.2, 0.4], 0.02)],
        "differences": [difference | {"outcome": outcome} for outcome in ("last", "mean")],
    }


def test_scales() -> None:
    scale = linear([0.13, 0.91])
    assert [tick for tick, _ in scale.ticks] == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert scale.at(0.0) == 0.0 and scale.at(0.5) == pytest.approx(0.5)
    assert linear([3.0, 3.0]).at(3.0) == pytest.approx(0.5, abs=0.2)
    logarithmic = decades([0.0, 2e-3, 5e-2])
    assert logarithmic.at(0.0) == 0.0 and logarithmic.at(1e-3) == pytest.approx(1 / 3)
    assert logarithmic.at(0.1) == pytest.approx(1.0) and logarithmic.ticks[0] == (0.0, "0")
    assert decades([0.0, 0.0]).ticks == [(0.0, "0")]
    assert [doubling([1, 64]).at(v) for v in (1, 8, 64)] == [0.0, 0.5, 1.0] and doubling([1]).at(1) == 0


def test_everything_drawn_is_inside_its_picture() -> None:
    for title, _, picture, _ in figures(results()):
        root = ET.fromstring(picture)
        _, _, width, height = map(float, root.attrib["viewBox"].split())
        seen = 0
        for node in root.iter():
            for keys, most in ((("x", "cx", "x1", "x2"), width), (("y", "cy", "y1", "y2"), height)):
                for key in keys:
                    if key in node.attrib:
                        seen += 1
                        assert 0 <= float(node.attrib[key]) <= most, title
            for x, y in re.findall(r"([-\d.]+),([-\d.]+)", node.attrib.get("points", "")):
                seen += 1
                assert 0 <= float(x) <= width and 0 <= float(y) <= height, title
        assert seen > 10


def test_lines_are_means_and_bands_are_ranges() -> None:
    found = {title: picture for title, _, picture, _ in figures(results())}
    assert "Truncated importance weights" not in found  # no run has it
    several = results()
    assert "Mean ratio to the old policy" not in found
    several["runs"][0]["series"]["policy/ratio_mean"] = {"steps": [5, 10], "values": [1.0, 1.0]}
    assert "Mean ratio to the old policy" not in {title for title, *_ in figures(several)}, "one update: all are 1"
    several["runs"][0]["series"]["policy/ratio_mean"]["values"][1] = 0.9
    assert "Mean ratio to the old policy" in {title for title, *_ in figures(several)}
    assert "Change of log-probs by updates" not in found
    several["runs"][0]["series"]["policy/logprob_abs_change_mean"] = {"steps": [5, 10], "values": [0.0, 1e-3]}
    assert "Change of log-probs by updates" in {title for title, *_ in figures(several)}
    line, = re.findall(r'<g class="arm a0">.*?<polyline points="([^"]*)"', found["Held-out accuracy"], re.S)
    ys = [float(point.split(",")[1]) for point in line.split()]
    assert len(ys) == 3 and ys[0] > ys[1] > ys[2]
    assert ys[0] - ys[1] == pytest.approx(ys[1] - ys[2], abs=0.2)  # 0.2, 0.5, 0.8
    assert "A &lt;one&gt;" in found["Held-out accuracy"]
    gaps = found["Mean log-prob gap by position in the answer"]
    exact, = re.findall(r'<g class="arm a0">.*?<polyline points="([^"]*)"', gaps, re.S)
    assert len({point.split(",")[1] for point in exact.split()}) == 1  # on the line of zero


def test_the_forest_has_its_zero_and_its_intervals() -> None:
    picture = ET.fromstring(forest([(0, "a", 0.0, -0.1, 0.1, "n"), (1, "b", 0.3, None, None, "m")], "difference"))
    nodes = list(picture.iter())
    zero, = (n.attrib["x1"] for n in nodes if n.attrib.get("class") == "zero")
    bars = [n for n in nodes if n.attrib.get("class") == "bar"]
    dots = [n.attrib["cx"] for n in nodes if n.tag.endswith("circle")]
    assert len(bars) == 1 and dots[0] == zero and float(dots[1]) > float(bars[0].attrib["x2"]) > float(zero)


def test_the_forest_leaves_room_for_its_notes() -> None:
    for note in ("n", "-12.5 [-31.2, +50.0] to step 105: not finished"):
        picture = ET.fromstring(forest([(0, "a", 0.0, -0.1, 0.1, note)], "difference"))
        at, = (float(n.attrib["x"]) for n in picture.iter() if n.tag.endswith("text") and n.text == note)
        assert at + 5.7 * len(note) < float(picture.attrib["viewBox"].split()[2]), "5.7 px a letter in a browser"


def test_the_table_and_the_failures() -> None:
    data = results()
    first, second = table(data)
    assert (first["seeds"], first["gap"], first["after"]) == ("2", "exactly 0", "80.0% (70.0 to 90.0)")
    assert (second["gap"], second["after"]) == ("2.00e-02", "40.0%")
    assert second["against"] == [[f"{one['outcome']} {interval(one)}" for one in data["differences"]]]
    assert first["against"] == [["–"]]
    assert (first["goal"], second["goal"]) == ("0:34", "1:41"), "to 0.37 in the seed that both have"
    assert interval(data["differences"][0]) == "-10.0 [-20.0, -1.0]: worse" and failure_rows(data) == []
    going = copy.deepcopy(data)
    going["runs"][1] |= {"status": "started"}
    assert (table(going)[0]["seeds"], table(going)[0]["after"]) == ("1 of 2", "90.0%"), "of the run that is done"
    going["runs"][0] |= {"status": "started"}
    assert (table(going)[0]["seeds"], table(going)[0]["after"]) == ("0 of 2", "80.0% (70.0 to 90.0)")
    failed = copy.deepcopy(data)
    failed["runs"][2]["failures"] = [{"rule": "accuracy", "step": 10, "text": "fell", "recovered": True}]
    assert failure_rows(failed) == [("B, seed 0", "step 10: accuracy: fell (recovered)")]


def test_a_page_of_unfinished_runs_says_so(tmp_path: Path) -> None:
    data = results()
    data["runs"][1]["status"] = "started"
    page = write_page(data, tmp_path / "deep" / "study.html").read_text()
    assert "not finished" in page and "2 runs done, 1 more begun" in page and 'data-arm="1"' in page
    assert page.count("<script>") == 1 and "src=" not in page and "A &lt;one&gt;" in page
    assert "not finished" not in write_page(results(), tmp_path / "all.html").read_text()


def test_without_points_there_is_no_line() -> None:
    assert chart([Line(0, "a", [1.0], [2.0])], linear([0.0, 1.0]), linear([2.0]), "x", "y").count("<circle") == 1


def test_the_command_lists_studies_and_refuses_nonsense() -> None:
    shown = CliRunner().invoke(app, ["study"])
    assert shown.exit_code == 0 and "quick\n" in shown.output and "h200_8k" in shown.output
    assert study_command.__doc__ is not None
    for arguments, message in [
        (["nothing"], "no study of this name"), (["quick", "--stop-after", "0"], "minutes above"),
        (["quick", "--stop-after", "nan"], "minutes above"),
        (["quick", "--arms", "bf17"], "no arm 'bf17'"),
    ]:
        found = CliRunner().invoke(app, ["study", *arguments])
        assert message in str(found.exception), arguments


def test_what_has_no_score_is_in_no_mean(tmp_path: Path) -> None:
    """heldout.jsonl with completions that nobody scored, and numbers that are none: not 0."""
    with Recorder(tmp_path) as recorder:
        for step in (0, 1):
            recorder.write(step, {"reward/mean": 0.5})
    rows = [
        {"step": 0, "task": "t", "problems": [1, 2, 3], "rewards": [[1.0, None], [None, None], ["NaN", 0.5]]},
        {"step": 1, "task": "t", "problems": [1], "rewards": [[None]]},
    ]
    (tmp_path / "heldout.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = collect._held_out(tmp_path, {0, 1})
    assert found["steps"] == [0] and found["scores"] == [{"1": 1.0, "3": 0.5}] and found["mean"] == [0.75]
