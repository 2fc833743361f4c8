"""A rank that dies, hangs, raises or differs ends the whole run with one message and a status; `--resume` goes on."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from failing_ranks import CASES
from test_ranks_loop import assert_same_run

from jetrl.parallel import spawn, watch
from jetrl.report.recorder import read_metrics

HERE = Path(__file__).parent
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder of all cases, and how each ended."""
    root = tmp_path_factory.mktemp("failing")
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")} | {
        "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent)]),
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # which `launch.join` sets before torch is loaded; there it is loaded already
    }
    command = [sys.executable, str(HERE / "failing_ranks.py"), str(root)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    return root, json.loads(done.stdout.splitlines()[-1])


def said(folder: Path) -> list[str]:
    """What each rank wrote to standard error, where it wrote anything."""
    return [text for file in sorted(folder.glob("?.txt")) if (text := file.read_text())]


RANK_1 = r"rank 1 \(process \d+ on .*, last seen in \w+\)"
SILENT = RANK_1 + r": no sign of life\. The process was killed \(out of memory\?\), is stopped, or its machine .*"
LATE = RANK_1 + r" has not come to {} \(call \d+\), in which rank 0 has waited for 3 s\. If that phase may take .*"
STORE = r"rank 1 has lost the run's store \(.*\): the launcher or rank 0 has ended\."
TRACE = r"\nTraceback (.*\n)+"


@pytest.mark.parametrize(
    ("name", "ends", "message"),
    [
        ("killed in the rollout", {1, -9}, SILENT),
        ("killed in the update", {1, -9}, SILENT),
        ("first rank killed in the update", {1, -9}, STORE),
        ("first rank killed in the checkpoint", {1, -9}, STORE),
        ("stopped in the rollout", {1, -9}, SILENT),
        ("first rank stopped in the update", {1, -9},
         STORE.replace(r"\(.*\)", r"\(no answer for 8 s\)")[:-2] + " or is stopped, or its machine is gone."),
        ("hangs in the rollout", {1}, LATE.format("gather")),
        ("hangs in the update", {1}, LATE.format("send_rows")),
        ("out of memory", {1, 3}, r"rank 1: out of GPU memory in the phase update, .* CUDA out of memory\..*"),
        ("another config", {1, 2}, r"The ranks of this run differ: the config's digest is \w+ on rank 0, \w+ on .*"),
        ("another version", {1, 2}, r"The ranks of this run differ: jetrl's version is .* on rank 0, 0\.0\.1 on .*"),
        ("a reward that is wrong", {1, 2}, r"Reward function .*bad\.py:reward returned 7 scores for 8 completions\."),
        ("a bug in scoring", {1}, r"rank 0: KeyError: 'a part of the reward'" + TRACE + r"KeyError: 'a part of .*"),
        ("an environment that is absent", {1, 2},
         r"rank 1: environment\.name: .*absent\.py cannot be loaded: OSError: no such game server \(.*absent\.py, "
         r"line \d+\)"),
    ],
)
def test_one_message_and_a_status(
    name: str, ends: set[int], message: str, runs: tuple[Path, dict[str, Any]]
) -> None:
    root, found = runs
    (text,) = said(root / name)
    assert re.fullmatch(f"jetrl: {message}\n", text), text
    assert set(found[name]["ends"]) == ends and found[name]["seconds"] < 60
    if name.startswith("another"):
        assert not (root / name / "runs").exists(), "something was computed before the refusal"


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.resumed])
def test_resumed_it_has_the_bits_of_one_process(name: str, runs: tuple[Path, dict[str, Any]]) -> None:
    root, found = runs
    assert found[name]["resumed"]["ends"] == [0] * CASES[name].resumed
    assert_same_run(root / name / "runs" / "tiny", root / "one process" / "runs" / "tiny")


def test_more_ranks_than_prompts_and_sizes_that_nothing_divides(runs: tuple[Path, dict[str, Any]]) -> None:
    root, found = runs
    assert found["uneven, four ranks"]["ends"] == [0] * 4
    assert_same_run(root / "uneven, four ranks" / "runs" / "tiny", root / "uneven, one process" / "runs" / "tiny")


def test_conversations_that_fail_on_one_rank_are_counted(runs: tuple[Path, dict[str, Any]]) -> None:
    """As in one process: the run goes on with the others."""
    root, found = runs
    name = "an environment that fails"
    assert found[name]["ends"] == [0, 0] and not said(root / name)
    row = read_metrics(root / name / "runs" / "tiny")[1]
    assert 0 < row["environment/num_errors"] < 16 and row["parity/logprob_abs_diff_max"] == 0.0


def test_all_waits_together_are_less_than_a_minute() -> None:
    assert watch.SILENCE + watch.PATIENCE + watch.GRACE + 2 * watch.PERIOD + spawn._PATIENCE < 60
