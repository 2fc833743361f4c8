"""The page of a server's sessions: trees from lines, what is left out, and what a browser draws of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from browser import ATTACK, drawn, needs_browser, section

from jetrl import UserError
from jetrl.report import sessions
from jetrl.report.html import write_report, write_sessions
from jetrl.report.sessions import OLD_FILE, SESSIONS_FILE, has_sessions, page_of, read_sessions, row_of, tiles


def line(session: str, **event: Any) -> str:
    return json.dumps({"server": "1.0", "time": 1_000_000.5, "session": session, **event}) + "\n"


def turn(session: str, number: int, after: int, said: Any, *tokens: str, **event: Any) -> str:
    given = {"read": "<read>", "text": "".join(tokens), "logprobs": [-0.5] * len(tokens), "finish": "stop"} | event
    return line(session, turn=number, after=after, said=said, tokens=list(tokens), **({"version": 7} | given))


def test_a_session_is_a_row_whose_turns_say_what_they_follow(tmp_path: Path) -> None:
    assert not has_sessions(tmp_path)
    (tmp_path / SESSIONS_FILE).write_text(
        turn("a", 0, -1, [["system", "be"], ["user", "1+1?"]], "x", "y") + line("b", ended=True)
        + turn("a", 1, 0, [["tool", "2"]], "z") + turn("a", 2, 0, [["tool", "2"]], "w")
        + turn("a", 3, 0, [["tool", "3"]], "v") + turn("a", 4, -1, [], "u") + line("a", reward=0.5)
        + '{"server": "1.0", "torn'
    )
    assert has_sessions(tmp_path)
    read = read_sessions(tmp_path)
    (talk,) = read.talks  # b has no answer
    row = row_of(talk)
    assert row["prompt"] == "be\n1+1?" and row["prompt_roles"] == [["system", 0], ["user", 3]] and row["reward"] == 0.5
    assert [(one["author"], one["text"], one.get("after")) for one in row["turns"]] == [
        ("policy", "xy", None), ("environment", "2", None), ("policy", "z", None), ("policy", "w", 1),
        ("environment", "3", 0), ("policy", "v", None), ("environment", "<read>", -1), ("policy", "u", None),
    ]
    assert row["tokens"] == ["x", "y", "z", "w", "v", "u"] and len(row["logprobs"]) == 6 and not talk.ended
    assert [number for _, number, _ in tiles(read)] == ["1", "5", "6", "0.500"]
    assert [remark for _, _, remark in tiles(read)] == ["1 not ended", "3 forks", "", "sessions with one: 1"]


def test_what_is_gone_is_counted_and_other_starts_are_other_sessions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / OLD_FILE).write_text(turn("a", 3, 2, [["user", "x"]], "lost") + turn("b", 0, -1, [["user", "x"]], "b"))
    (tmp_path / SESSIONS_FILE).write_text(
        turn("a", 0, -1, [["user", "x"]], "a", server="2.0") + turn("b", 1, 0, [["user", "y"]], "c")
        + line("b", ended=True)
    )
    read = read_sessions(tmp_path)
    assert [(talk.id, len(talk.turns), talk.ended) for talk in read.talks] == [("a", 1, False), ("b", 2, True)]
    parts, note = page_of(read)
    assert [len(part["groups"]) for part in parts] == [2] and "1 turns are left out" in note
    assert [one["rows"][0].get("open") for one in parts[0]["groups"]] == [True, None]
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 1)
    parts, note = page_of(read)
    assert parts[0]["groups"][0]["rows"][0]["id"] == "b" and note.startswith("1 of the 2 recorded sessions")


@pytest.mark.parametrize("bad", [
    "[]", "{}", "none", '{"server": "1", "session": 3, "time": 1}', line("a", reward="1").strip(),
    turn("a", 0, -1, [["user"]], "x").strip(), turn("a", 0, -1, [], "x", logprobs=[]).strip(),
    turn("a", 0, -1, [], "x", version="1").strip(),
])
def test_a_line_that_is_none_of_a_session_is_told(tmp_path: Path, bad: str) -> None:
    (tmp_path / SESSIONS_FILE).write_text(bad + "\n")
    with pytest.raises(UserError, match="line 1, is not of a session"):
        read_sessions(tmp_path)


def test_a_folder_without_an_answer_has_no_page(tmp_path: Path) -> None:
    (tmp_path / SESSIONS_FILE).write_text(line("a", reward=1))
    with pytest.raises(UserError, match="no session has an answer yet"):
        write_sessions(tmp_path, tmp_path / "r.html")


@needs_browser
def test_a_browser_draws_sessions_as_trees(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    folder.mkdir()
    (folder / SESSIONS_FILE).write_text(
        turn(ATTACK, 0, -1, [[ATTACK, ATTACK]], ATTACK, read=ATTACK)
        + turn("mine", 0, -1, [["system", "be short"], ["user", "1+1?"]], "first")
        + turn("mine", 1, 0, [["tool", "two"]], "second") + turn("mine", 2, 0, [["user", "no"]], "third")
        + line("mine", reward=0.25)
    )
    text = drawn(write_report([folder], folder / "report.html"), tmp_path)
    traces = section(text, "traces")
    assert "<img" not in text and ">1 to 2</option>" in traces
    assert traces.count('aria-current="true"') == 1 and "&lt;img src=x" in traces and "2 forks" not in traces
    page = folder / "report.html"  # the second session, as a click shows it
    click = "traces();\n$('trace-list').lastElementChild.click();\ndocument"
    page.write_text(page.read_text().replace("traces();\ndocument", click))
    traces = section(drawn(page, tmp_path), "traces")
    shown = traces.split('id="trace"')[1]
    assert all(f'class="node {role}"' in shown for role in ("system", "user", "tool", "policy"))
    assert 'reward <b class="">0.25</b>' in shown and 'session <b class="">mine</b>' in shown
    first, second = shown.split("Branch 2 of 2")
    assert "second" in first and "third" in second and "third" not in first
