"""Run folders: what is written comes back, killed runs lose one line at most, resumed runs equal unbroken ones."""

from __future__ import annotations

import errno
import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jetrl.errors import UserError
from jetrl.report import recorder as module
from jetrl.report.environment import git_commit
from jetrl.report.recorder import (
    Recorder,
    failed_rows,
    group_rows,
    read_eval_samples,
    read_held_out,
    read_metrics,
    read_samples,
    unscored_rows,
)
from jetrl.types import Group, Problem, Prompt, Segment, Trajectory


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
        recorder.drop_after(4, first=1)
        assert recorder.last_step == 4
        steps(recorder, 5, 8)
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert (tmp_path / "broken" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_rows_that_are_missing_before_the_checkpoint_are_reported(tmp_path: Path) -> None:
    with Recorder(tmp_path / "run") as recorder:
        for step in (1, 2, 3):
            recorder.write(step, row(step))
    with Recorder(tmp_path / "run", resume=True) as recorder:
        with pytest.warns(UserWarning, match="lacks the rows of steps 4, 5 before the checkpoint of step 5"):
            recorder.drop_after(5, first=1)
        with pytest.warns(UserWarning, match="lacks the rows of steps 0, 4, 5 before"):
            recorder.drop_after(5)
    (tmp_path / "run" / "metrics.jsonl").write_bytes(b"")
    with Recorder(tmp_path / "run", resume=True) as recorder:
        with pytest.warns(UserWarning, match=r"lacks the rows of steps 1, 2, 3, 4, 5, \.\.\. before the .* of step 7"):
            recorder.drop_after(7, first=1)
        recorder.write(8, row(8))


def test_evaluations_that_are_missing_are_reported(tmp_path: Path) -> None:
    with Recorder(tmp_path / "run") as recorder:
        for step in (0, 1, 2):
            recorder.write(step, row(step) | ({"eval/t/avg@1": 0.5} if step != 1 else {}))
            recorder.write_held_out(step, {"task": "t", "problems": [4], "rewards": [[1.0]]} if step == 2 else None)
    with Recorder(tmp_path / "run", resume=True) as recorder:
        with pytest.warns(UserWarning, match=r"heldout\.jsonl lacks the rows of steps 0 before the .* of step 2"):
            recorder.drop_after(2)


@pytest.mark.parametrize("line", [b'{"step": 2, "comp\n', b'{"step": "2"}\n'])
def test_a_damaged_line_of_samples_is_told_at_a_resume_and_unlocks_the_folder(tmp_path: Path, line: bytes) -> None:
    with Recorder(tmp_path) as recorder:
        recorder.write(1, row(1))
    (tmp_path / "samples.jsonl").write_bytes(b'{"step": 1}\n' + line)
    with pytest.raises(UserError, match=r"samples\.jsonl, line 2, is not a row"), Recorder(tmp_path, True) as recorder:
        recorder.drop_after(1)
    Recorder(tmp_path, resume=True).close()


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
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 2, is not a row"):
        read_metrics(tmp_path)


def test_a_used_folder_is_refused_and_kept(tmp_path: Path) -> None:
    with Recorder(tmp_path) as recorder:
        recorder.write(1, row(1))
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(UserError, match="already holds a run .1 rows.*checkpoint.resume=auto"):
        Recorder(tmp_path)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_reading_no_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nothing: there is no such folder"):
        read_metrics(tmp_path / "nothing")
    with pytest.raises(UserError, match="not a run folder"):
        read_metrics(tmp_path)
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


def named(token: int) -> str:
    return f"<{token}>"


def plain_group(*advantages: float | tuple[float, ...]) -> Group:
    """Two answers to `1+1?`, the second cut off."""
    problem = Problem("p", ({"role": "system", "content": "Be short."}, {"role": "user", "content": "1+1?"}), "2")
    asked = Segment("environment", (1, 2), "<|user|>1+1?")
    first = Segment("policy", (5, 6), "2", (-0.5, -0.25))
    second = Segment("policy", (7,), "\ud800", (-1.5,))  # a lone surrogate must not stop the run
    trajectories = (Trajectory((asked, first), "stop", "d"), Trajectory((asked, second), "length", "d"))
    return Group(Prompt(9, problem, (1, 2)), trajectories, (1.0, 0.0), advantages)


def test_plain_answers_become_rows(tmp_path: Path) -> None:
    rows = group_rows([plain_group(0.5, -0.5)], named)
    with Recorder(tmp_path) as recorder:
        recorder.write_samples(2, rows)
    lines = (tmp_path / "samples.jsonl").read_bytes().splitlines()
    assert lines[0] == (  # byte for byte what runs wrote before there were conversations
        b'{"step": 2, "group": 9, "prompt": "system: Be short.\\nuser: 1+1?", "answer": "2", "completion": "2", '
        b'"tokens": ["<5>", "<6>"], "logprobs": [-0.5, -0.25], "reward": 1.0, "advantage": 0.5, '
        b'"finish_reason": "stop"}'
    )
    back = list(read_samples(tmp_path))
    assert back[0] == {"step": 2, **rows[0]}
    assert back[1]["completion"] == "?" and back[1]["logprobs"] == [-1.5] and back[1]["finish_reason"] == "length"


def conversation() -> tuple[Prompt, Trajectory]:
    prompt = Prompt(4, Problem("p", "1+1?", "2"), (1, 2))
    segments = (
        Segment("environment", (1, 2), "Q: 1+1?"),
        Segment("policy", (5, 6), "three", (-0.5, math.nan), reward=-0.25),
        Segment("environment", (8, 8, 8), " No. "),
        Segment("policy", (7,), "two", (-1.5,)),
    )
    return prompt, Trajectory(segments, "turns", "d")


def test_conversations_become_rows_with_turns(tmp_path: Path) -> None:
    prompt, talk = conversation()
    single = Trajectory(talk.segments[:2], "stop", "d")
    group = Group(prompt, (talk, single), (0.75, math.inf), ((1.0, -2.0, 4.0), (3.0, 0.5)))
    rows = group_rows([group], named)
    turns = [
        {"author": "policy", "text": "three", "tokens": ["<5>", "<6>"], "logprobs": [-0.5, math.nan], "reward": -0.25},
        {"author": "environment", "text": " No. "},
        {"author": "policy", "text": "two", "tokens": ["<7>"], "logprobs": [-1.5]},
    ]
    nan = repr(math.nan)  # unequal to itself, so compared as text
    assert repr(rows[0]["turns"]) == repr(turns) and repr(rows[0]["logprobs"]) == f"[-0.5, {nan}, -1.5]"
    assert (rows[0]["prompt"], rows[0]["completion"]) == ("Q: 1+1?", "three No. two")
    assert rows[0]["tokens"] == ["<5>", "<6>", "<7>"] and rows[0]["finish_reason"] == "turns"
    assert rows[0]["advantage"] == 1.0 and rows[0]["advantages"] == [1.0, -2.0, 4.0]  # (1 - 2 + 4) / 3
    assert rows[1]["prompt"] == "Q: 1+1?" and len(rows[1]["turns"]) == 1  # told as its neighbour is
    with Recorder(tmp_path) as recorder:
        recorder.write_samples(1, rows)
    text = (tmp_path / "samples.jsonl").read_text()
    json.loads(text.splitlines()[0], parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    back = list(read_samples(tmp_path))
    assert repr(back[0]) == repr({"step": 1, **rows[0]}) and back[1]["reward"] == math.inf


def test_turns_say_who_wrote_them_and_with_which_weights() -> None:
    """Roles with their first character where the text is its messages; with line breaks (chat) and without."""
    def said(text: str, *messages: tuple[str, str]) -> Segment:
        given = tuple({"role": role, "content": content} for role, content in messages)
        return Segment("environment", (1, 2), text, messages=given)

    prompt = Prompt(4, Problem("p", "", ""), ())
    turns = (
        said("Be short.\n1+1?", ("system", "Be short."), ("user", "1+1?")),
        Segment("policy", (5, 6), "three", (-0.5, -1.0), spans=((0, 3), (1, 4))),
        said("No.Again.", ("tool", "No."), ("user", "Again.")),
        Segment("policy", (7,), "two", (-1.5,)),
        said("a text of its own", ("tool", "No.")),
    )
    (row,) = group_rows([Group(prompt, (Trajectory(turns, "stop", "d"),), (1.0,), (0.0,))], named)
    assert row["prompt_roles"] == [["system", 0], ["user", 10]]
    assert [turn.get("roles") for turn in row["turns"]] == [None, [["tool", 0], ["user", 3]], None, None]
    assert [turn.get("versions") for turn in row["turns"]] == [[[0, 3], [1, 4]], None, None, None]


@pytest.mark.parametrize(
    ("problem", "tokens"),
    [("", (1, 2)), ("", ()), ("1+1?", (1, 9)), ((), (1, 2))],
    ids=["no prompt", "no tokens", "another prompt", "no messages"],
)
def test_a_prompt_that_the_environment_wrote_makes_a_conversation(problem: Any, tokens: tuple[int, ...]) -> None:
    _, talk = conversation()
    single = Trajectory(talk.segments[:2], "stop", "d")
    (row,) = group_rows([Group(Prompt(4, Problem("p", problem, ""), tokens), (single,), (1.0,), (0.0,))], named)
    assert row["prompt"] == "Q: 1+1?" and [turn["author"] for turn in row["turns"]] == ["policy"]


def test_the_rendered_prompt_is_in_the_first_row_of_a_group() -> None:
    """What the policy read, special tokens and all: once for a group, and again where another prompt stood."""
    def decode(tokens: Any) -> str:
        return "".join(map(named, tokens))

    rows = group_rows([plain_group(0.5, -0.5)], named, decode)
    assert rows[0]["prompt_rendered"] == "<1><2>" and "prompt_rendered" not in rows[1]
    prompt, talk = conversation()
    single = Trajectory((Segment("environment", (3,), "Q"), *talk.segments[1:2]), "stop", "d")
    rows = group_rows([Group(prompt, (talk, talk, single), (1.0, 1.0, 0.0), (0.0, 0.0, 0.0))], named, decode)
    assert [row.get("prompt_rendered") for row in rows] == ["<1><2>", None, "<3>"]
    assert [turn.get("rendered") for turn in rows[0]["turns"]] == [None, "<8><8><8>", None]
    unborn = Trajectory((), "timeout", "d", "no reply within 60 s")
    rows = failed_rows([(prompt, talk), (prompt, unborn)], named, decode)
    assert [row.get("prompt_rendered") for row in rows] == ["<1><2>", None]
    assert rows[0]["turns"][1]["rendered"] == "<8><8><8>"


def test_a_plain_answer_with_an_advantage_for_each_token_keeps_them() -> None:
    rows = group_rows([plain_group((0.1, 0.2), (-1.0,))], named)
    assert rows[0]["advantages"] == [0.1, 0.2] and rows[0]["advantage"] == math.fsum((0.1, 0.2)) / 2
    assert "turns" not in rows[0] and rows[1]["advantage"] == -1.0


def test_failed_trajectories_become_rows_without_reward(tmp_path: Path) -> None:
    prompt, talk = conversation()
    broken = Trajectory(talk.segments[:3], "error", "d", "KeyError: 'x'")
    unborn = Trajectory((), "timeout", "d", "no reply within 60 s")
    rows = failed_rows([(prompt, broken), (prompt, unborn)], named)
    with Recorder(tmp_path) as recorder:
        recorder.write_samples(1, rows)
    first, second = read_samples(tmp_path)
    assert first["reward"] is first["advantage"] is second["reward"] is None
    assert (first["finish_reason"], first["error"], first["group"]) == ("error", "KeyError: 'x'", 4)
    assert first["tokens"] == ["<5>", "<6>"]
    assert [turn["author"] for turn in first["turns"]] == ["policy", "environment"]
    assert (second["finish_reason"], second["turns"], second["tokens"], second["completion"]) == ("timeout", [], [], "")
    assert second["prompt"] == "1+1?"  # all that there is before the environment has said a word


def test_turns_and_advantages_must_fit_the_tokens(tmp_path: Path) -> None:
    prompt, talk = conversation()
    (row,) = group_rows([Group(prompt, (talk,), (1.0,), ((1.0, 2.0, 3.0),))], named)
    with Recorder(tmp_path) as recorder:
        with pytest.raises(AssertionError, match="one advantage per token"):
            recorder.write_samples(1, [{**row, "advantages": [1.0]}])
        with pytest.raises(AssertionError, match="one log-prob a token"):
            recorder.write_samples(1, [{**row, "turns": [{**row["turns"][0], "logprobs": []}]}])
    assert list(read_samples(tmp_path)) == []


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
    resumed = [{"after_step": 7, "command": "jetrl resume"}]
    assert environment == {"command": "jetrl train", "gpu": "H200", "resumed": resumed}


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


def test_a_row_is_amended_whole_or_not_at_all(tmp_path: Path) -> None:
    with Recorder(tmp_path) as recorder:
        recorder.write(0, {"a": 1.0, "time/step": 2.0})
        recorder.write(1, {"a": math.nan, "time/step": 3.0})
        recorder.amend({"eval/x/avg@1": 0.5, "time/eval": 4.0, "time/step": 4.0})
        assert recorder.last_row()["eval/x/avg@1"] == 0.5
        recorder.write(2, {"a": 5.0})
    rows = read_metrics(tmp_path)
    assert rows[0] == {"step": 0, "a": 1.0, "time/step": 2.0} and rows[2] == {"step": 2, "a": 5.0}
    assert math.isnan(rows[1].pop("a"))
    assert rows[1] == {"step": 1, "time/step": 7.0, "eval/x/avg@1": 0.5, "time/eval": 4.0}
    assert not list(tmp_path.glob(".*.tmp"))


def test_held_out_rows_are_kept_with_their_steps(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        for step, rewards in [(0, [[1.0], [float("nan")]]), (1, None), (2, [[0.5, 1.0], [0.0, 0.0]])]:
            recorder.write_held_out(step, rewards and {"task": "t", "problems": [4, 7], "rewards": rewards})
            recorder.write(step, {"x": 1.0})
    rows = read_held_out(tmp_path / "run")
    assert sorted(rows) == [0, 2] and rows[2]["rewards"] == [[0.5, 1.0], [0.0, 0.0]] and rows[2]["problems"] == [4, 7]
    assert math.isnan(rows[0]["rewards"][1][0])
    with Recorder(tmp_path / "run", resume=True) as recorder:
        recorder.drop_after(1)
    assert sorted(read_held_out(tmp_path / "run")) == [0] and read_held_out(tmp_path) == {}


def test_completions_of_evaluations_are_kept_with_their_steps(tmp_path: Path, make_rows) -> None:
    with Recorder(tmp_path / "run") as recorder:
        for step in (0, 1, 2):
            recorder.write_eval_samples(step, make_rows(step, 2))
            recorder.write(step, {"x": 1.0})
        recorder.write_eval_samples(5, [])
    before = list(read_eval_samples(tmp_path / "run"))
    assert {one["step"] for one in before} == {0, 1, 2}
    with Recorder(tmp_path / "run", resume=True) as recorder:
        recorder.drop_after(1)
    assert list(read_eval_samples(tmp_path / "run")) == [one for one in before if one["step"] <= 1]
    assert list(read_eval_samples(tmp_path)) == []


def test_null_scores_of_the_held_out_are_read(tmp_path: Path) -> None:
    with Recorder(tmp_path / "run") as recorder:
        recorder.write_held_out(0, {"task": "t", "problems": [4], "rewards": [[None, 1.0]]})
    assert read_held_out(tmp_path / "run")[0]["rewards"] == [[None, 1.0]]


def test_rows_tell_functions_apart() -> None:
    opening = Segment("environment", (1,), "p")
    answers = [Trajectory((opening, Segment("policy", (i,), "x", (-1.0,))), "stop", "", "e") for i in (2, 3)]
    scores, extra = {"right": (1.0, None), "short": (0.0, 0.5)}, {"note": ("a", None)}
    group = Group(Prompt(3, Problem("i", "p", "a"), (1,)), tuple(answers), (1.0, 0.5), (0.5, -0.5), scores, (), extra)
    rows = group_rows([group], str)
    assert [row["rewards"] for row in rows] == [{"right": 1.0, "short": 0.0}, {"right": None, "short": 0.5}]
    assert [row["extra"] for row in rows] == [{"note": "a"}, {"note": None}]
    left = unscored_rows([replace(group, rewards=(), advantages=())], str, conversations=False)
    assert [(row["reward"], row["advantage"], row["error"]) for row in left] == [(None, None, "e")] * 2
    assert [row["rewards"] for row in left] == [row["rewards"] for row in rows] and "turns" not in left[0]
    plain = group_rows([replace(group, scores={}, extra={})], str)
    assert not any(key in row for row in plain for key in ("rewards", "extra"))
    assert group.first(1) == replace(
        group, trajectories=group.trajectories[:1], rewards=(1.0,), advantages=(0.5,),
        scores={"right": (1.0,), "short": (0.0,)}, extra={"note": ("a",)},
    )
