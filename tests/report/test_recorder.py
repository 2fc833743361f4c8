"""Run folders: what is written comes back, killed runs lose one line at most, resumed runs equal unbroken ones."""

from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path

import pytest

from jetrl.errors import UserError
from jetrl.report import recorder as module
from jetrl.report.environment import git_commit
from jetrl.report.recorder import Recorder, group_rows, read_metrics, read_samples
from jetrl.types import Completion, Group, Problem, Prompt


def row(step: int) -> dict[str, float]:
    return {"reward/mean": 1 / (step + 3), "parity/logprob_abs_diff_max": 0.0, "policy/grad_norm": step * 1e-9}


def test_rows_come_back_exactly_and_are_strict_json(tmp_path: Path) -> None:
    values = {"reward/mean": 0.1 + 0.2, "policy/kl": math.nan, "policy/grad_norm": math.inf, "count": 3}
    with Recorder(tmp_path) as recorder:
        recorder.write(1, values)
    text = (tmp_path / "metrics.jsonl").read_text()
    assert text.startswith('{"step": 1, "reward/mean": 0.30000000000000004')
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    (back,) = read_metrics(tmp_path)
    assert back["reward/mean"] == 0.1 + 0.2 and math.isnan(back["policy/kl"]) and back["policy/grad_norm"] == math.inf
    assert back["count"] == 3 and isinstance(back["count"], int)


def test_each_row_is_on_disk_before_the_next(tmp_path: Path, make_rows) -> None:
    with Recorder(tmp_path) as recorder:
        for step in range(3):
            recorder.write(step, row(step))
            recorder.write_samples(step, make_rows(step, 3))
            assert [one["step"] for one in read_metrics(tmp_path)] == list(range(step + 1))
            assert len(list(read_samples(tmp_path))) == 12 * (step + 1)


def test_steps_must_rise(tmp_path: Path) -> None:
    with Recorder(tmp_path) as recorder:
        recorder.write(4, row(4))
        with pytest.raises(AssertionError, match="step 4 after that of step 4"):
            recorder.write(4, row(4))


@pytest.mark.parametrize("cut", [1, 2, 20, "all"])
def test_a_resumed_run_leaves_the_same_bytes_as_an_unbroken_one(tmp_path: Path, make_rows, cut: int | str) -> None:
    """Killed while the row of step 6 was written, with a checkpoint at step 4."""

    def steps(recorder: Recorder, first: int, last: int) -> None:
        for step in range(first, last + 1):
            recorder.write_samples(step, make_rows(step, 8))
            recorder.write(step, row(step))

    with Recorder(tmp_path / "whole") as recorder:
        steps(recorder, 1, 8)
    with Recorder(tmp_path / "broken") as recorder:
        steps(recorder, 1, 6)
    for name in ("metrics.jsonl", "samples.jsonl"):
        path = tmp_path / "broken" / name
        lines = path.read_bytes().splitlines(keepends=True)
        keep = len(lines[-1]) if cut == "all" else cut
        path.write_bytes(b"".join(lines)[: -keep or None])
    with Recorder(tmp_path / "broken", resume=True) as recorder:
        recorder.drop_after(4)
        assert recorder.last_step == 4
        steps(recorder, 5, 8)
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert (tmp_path / "broken" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_torn_line_is_cut_but_a_whole_row_without_its_newline_stays(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "a": 1.5}\n{"step": 2, "a": 2.5}\n{"step": 3, "a": 3')
    assert [one["step"] for one in read_metrics(tmp_path)] == [1, 2]
    Recorder(tmp_path, resume=True).close()
    assert path.read_bytes() == b'{"step": 1, "a": 1.5}\n{"step": 2, "a": 2.5}\n'
    path.write_bytes(b'{"step": 1, "a": 1.5}\n{"step": 2, "a": 2.5}')
    with Recorder(tmp_path, resume=True) as recorder:
        assert recorder.last_step == 2
        recorder.write(3, {"a": 3.5})
    assert [one["a"] for one in read_metrics(tmp_path)] == [1.5, 2.5, 3.5]


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": \n{"step": 3}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 2, is no row"):
        read_metrics(tmp_path)


def test_a_used_folder_is_refused_and_kept(tmp_path: Path) -> None:
    with Recorder(tmp_path) as recorder:
        recorder.write(1, row(1))
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(UserError, match="already holds a run .1 rows.*checkpoint.resume=auto"):
        Recorder(tmp_path)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_reading_no_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run folder"):
        read_metrics(tmp_path / "nothing")
    assert list(read_samples(tmp_path)) == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux's /dev/full")
def test_a_full_disk_is_told_with_path_and_space(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with Recorder(tmp_path) as recorder, pytest.raises(UserError) as caught:
        recorder.write(1, row(1))
    message = str(caught.value)
    assert str(tmp_path / "metrics.jsonl") in message and "no space left" in message and "MiB free" in message
    assert isinstance(caught.value.__cause__, OSError) and caught.value.__cause__.errno == errno.ENOSPC


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="Choose another output_dir"):
        Recorder(tmp_path / "file" / "run")


def test_groups_become_rows(tmp_path: Path) -> None:
    problem = Problem("p", ({"role": "system", "content": "Be short."}, {"role": "user", "content": "1+1?"}), "2")
    first = Completion(0, (5, 6), (-0.5, -0.25), "2", "stop", 3, "d")
    second = Completion(1, (7,), (-1.5,), "\ud800", "length", 3, "d")  # a lone surrogate must not stop the run
    group = Group(Prompt(9, problem, (1, 2)), (first, second), (1.0, 0.0), (0.5, -0.5))
    rows = group_rows([group], lambda token: f"<{token}>")
    assert rows[0] == {
        "group": 9, "prompt": "system: Be short.\nuser: 1+1?", "answer": "2", "completion": "2",
        "tokens": ["<5>", "<6>"], "logprobs": [-0.5, -0.25], "reward": 1.0, "advantage": 0.5, "finish_reason": "stop",
    }  # fmt: skip
    with Recorder(tmp_path) as recorder:
        recorder.write_samples(2, rows)
    back = list(read_samples(tmp_path))
    assert [one["step"] for one in back] == [2, 2] and back[0] == {"step": 2, **rows[0]}
    assert back[1]["completion"] == "?" and back[1]["logprobs"] == [-1.5]


def test_a_sample_without_its_logprobs_is_refused(tmp_path: Path, make_rows) -> None:
    bad = {**make_rows(1, 2)[0], "logprobs": []}
    with Recorder(tmp_path) as recorder, pytest.raises(AssertionError, match="one log-prob a token"):
        recorder.write_samples(1, [bad])


def test_environment_keeps_the_first_start_when_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "describe_environment", lambda command: {"command": " ".join(command)})
    with Recorder(tmp_path) as recorder:
        recorder.write_environment(["jetrl", "train"], {"gpu": "H200"})
        recorder.write(7, row(7))
    with Recorder(tmp_path, resume=True) as recorder:
        recorder.write_environment(["jetrl", "resume"])
    environment = json.loads((tmp_path / "env.json").read_text())
    assert environment == {
        "command": "jetrl train", "gpu": "H200", "resumed": [{"after_step": 7, "command": "jetrl resume"}]
    }  # fmt: skip


def test_environment_names_versions(tmp_path: Path) -> None:
    import platform

    import numpy

    with Recorder(tmp_path) as recorder:
        recorder.write_environment(["jetrl", "train", "my run.toml"])
    environment = json.loads((tmp_path / "env.json").read_text())
    assert environment["python"] == platform.python_version()
    assert environment["packages"]["numpy"] == numpy.__version__
    assert environment["command"] == "jetrl train 'my run.toml'"
    assert environment["date"].endswith("+00:00") and environment["cpu"]


def test_a_foreign_checkout_is_not_taken_for_ours(tmp_path: Path) -> None:
    package = tmp_path / "lib" / "jetrl"
    package.mkdir(parents=True)
    assert git_commit(package) == (None, None)
