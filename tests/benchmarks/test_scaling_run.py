"""The scaling run: what has passed is not run again, nothing is begun that cannot end, a failure is told; every command
that it would start exists."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
from common import RESULTS, ROOT
from scaling_run import Part, against_goals, parts_of, run

COMMIT = "a" * 10


def part(name: str, marks: Path, status: int = 0, seconds: float = 1.0) -> Part:
    """A command that notes that it ran."""
    code = f"open({str(marks)!r}, 'a').write({name!r}); raise SystemExit({status})"
    return Part(name, seconds, [sys.executable, "-c", code])


def test_parts_run_once_and_what_failed_runs_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    marks, path = tmp_path / "marks", tmp_path / "scaling_run_4.json"
    parts = [part("a", marks), part("b", marks, status=3), part("c", marks, seconds=900.0)]
    assert run(parts, path, 500.0, False, COMMIT) == ["b", "c"] and marks.read_text() == "ab"
    assert "c: left, it takes some 900 s and 500 s are left" in capsys.readouterr().out
    assert {r["part"]: r["status"] for r in json.loads(path.read_text())["rows"]} == {"a": 0, "b": 3}
    parts[1] = part("b", marks)
    assert run(parts, path, math.inf, False, COMMIT) == [] and marks.read_text() == "abbc"
    assert run(parts, path, math.inf, False, COMMIT) == [] and marks.read_text() == "abbc", "all have passed"
    for again, commit in ((True, COMMIT), (False, "b" * 10)):
        assert run(parts[:1], path, math.inf, again, commit) == []
    assert marks.read_text() == "abbcaa"


@pytest.mark.parametrize("commit", [f"{COMMIT}+changes", "unknown"])
def test_a_checkout_with_changes_passes_nothing_over(tmp_path: Path, commit: str) -> None:
    marks = tmp_path / "marks"
    for _ in range(2):
        assert run([part("a", marks)], tmp_path / "s.json", math.inf, False, commit) == []
    assert marks.read_text() == "aa"


def test_another_command_has_not_passed(tmp_path: Path) -> None:
    """Such as that of the miniature."""
    for name in ("tiny", "whole"):
        one = part("a", tmp_path / name)
        assert run([one], tmp_path / "s.json", math.inf, False, COMMIT) == [] and (tmp_path / name).exists()


@pytest.mark.parametrize("gpus", [2, 4, 8])
@pytest.mark.parametrize("tiny", [False, True])
def test_commands_name_files_that_exist(gpus: int, tiny: bool, tmp_path: Path) -> None:
    for one in parts_of(gpus, tiny, tmp_path):
        assert all(Path(word).exists() for word in one.command if word.endswith(".py"))
        assert one.command[0] == sys.executable and (one.command[1] == "-m" or str(ROOT) in one.command[1])
    steps = next(one.command for one in parts_of(gpus, tiny, tmp_path) if one.name == "steps")
    assert [n for n in steps[steps.index("--ranks") + 1 :] if n.isdecimal()][: gpus.bit_length()] == [
        n for n in ("1", "2", "4", "8") if int(n) <= gpus
    ]


def test_steps_against_one_gpu() -> None:
    """Of the committed run: what docs/SCALING.md tells."""
    rows = against_goals(RESULTS / "scaling.json")
    assert [(row["GPUs"], row["goal"]) for row in rows] == [(1, ""), (2, 1.9), (4, 3.75)]
    assert [round(row["times one"], 2) for row in rows] == [1.0, 1.93, 3.85]
