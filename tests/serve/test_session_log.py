"""What a server's sessions leave on disk: every answer once, within bounds, and no end of the server when a disk is
full."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jetrl import UserError
from jetrl.report.sessions import OLD_FILE, SESSIONS_FILE, read_sessions
from jetrl.serve.session_log import MOST_TEXT, SessionLog, require_folder, spoken
from jetrl.serve.sessions import Session, Turn


def answered(log: SessionLog, session: Session, parent: Turn | None = None, said: Any = (("user", "a"),)) -> Turn:
    number = len(session.turns)
    turn = Turn(number + 1, parent, np.arange(2, dtype=np.int32), np.arange(3, dtype=np.int32),
                np.full(3, -0.1, np.float32), False, 4, "flow")
    assert session.add(turn) and not session.add(turn)
    log.turn(session, turn, said, "<s>a", ["x", "y", "\ud800"], "xyz")
    return turn


def test_what_is_written_is_read(tmp_path: Path) -> None:
    log, session = SessionLog(tmp_path / "s", 1 << 20), Session("mine")
    first = answered(log, session, said=[("user", "a" * 2 * MOST_TEXT)])
    answered(log, session, first)
    session.set_reward(0.5)
    log.reward(session), log.ended(session), log.close()
    log.ended(session)  # nothing more
    (talk,) = read_sessions(tmp_path / "s").talks
    assert talk.id == "mine" and talk.reward == 0.5 and talk.ended and sorted(talk.turns) == [0, 1]
    assert talk.turns[1]["after"] == 0 and talk.turns[1]["version"] == 4 and talk.turns[1]["finish"] == "length"
    assert talk.turns[0]["said"] == [["user", "a" * MOST_TEXT]] and talk.turns[0]["tokens"][:2] == ["x", "y"]
    assert np.float32(talk.turns[0]["logprobs"][0]) == np.float32(-0.1)
    assert os.stat(tmp_path / "s" / SESSIONS_FILE).st_mode & 0o077 == 0  # what users say is theirs


def test_the_record_is_bounded(tmp_path: Path) -> None:
    log = SessionLog(tmp_path, 8000)
    for i in range(60):
        answered(log, Session(f"s{i}"))
        sizes = [(tmp_path / name).stat().st_size for name in (SESSIONS_FILE, OLD_FILE) if (tmp_path / name).exists()]
        assert sum(sizes) <= 8000
    log.close()
    names = [talk.id for talk in read_sessions(tmp_path).talks]
    assert 5 < len(names) < 40 and names == [f"s{i}" for i in range(60 - len(names), 60)]


def test_a_disk_that_takes_no_more_ends_the_record_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = SessionLog(tmp_path, 1 << 20)

    def full(file: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("jetrl.serve.session_log.os.write", full)
    answered(log, Session("a")), answered(log, Session("b"))
    told = capsys.readouterr().err
    assert told.count("Sessions are no longer recorded") == 1 and "no space left" in told


def test_the_torn_line_of_a_server_that_was_killed_costs_no_other(tmp_path: Path) -> None:
    log = SessionLog(tmp_path, 1 << 20)
    answered(log, Session("whole")), log.close()
    with (tmp_path / SESSIONS_FILE).open("a") as file:
        file.write('{"server": "1", "sess')
    log = SessionLog(tmp_path, 1 << 20)
    answered(log, Session("next")), log.close()
    assert [talk.id for talk in read_sessions(tmp_path).talks] == ["whole", "next"]


def test_a_run_keeps_its_folder_and_its_report(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("")
    with pytest.raises(UserError, match="this is the folder of a run. Choose another one"):
        require_folder(tmp_path)


def test_a_folder_has_one_server(tmp_path: Path) -> None:
    log = SessionLog(tmp_path, 1 << 20)
    with pytest.raises(UserError, match="Choose another folder"):
        require_folder(tmp_path)
    log.close()
    require_folder(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--sessions .*file: File exists. Choose another folder"):
        require_folder(tmp_path / "file")


def test_a_message_as_text() -> None:
    calls = [{"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}]
    assert spoken({"role": "user", "content": "a"}) == "a" and spoken({"role": "tool"}) == ""
    assert spoken({"role": "assistant", "content": "b", "tool_calls": calls}).startswith('b\n[{"id": "c"')
