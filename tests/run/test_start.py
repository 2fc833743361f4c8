"""What a command does before a run: its arguments for ranks, its folder."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tiny import tiny_config

from jetrl import cli
from jetrl.__main__ import main
from jetrl.parallel.world import ALONE
from jetrl.run.start import as_rank, placed, require_alike, without_nproc


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("train r --nproc 2 a.b=1", "train r a.b=1"),
        ("train --nproc=4 r --resume", "train r --resume"),
        ("train --nproc 2 --nproc 3 r", "train r"),
        ("train r", "train r"),
        ("parity m --nproc 2 --json", "parity m --json"),
    ],
)
def test_ranks_get_the_command_without_their_number(given: str, kept: str) -> None:
    assert without_nproc(given.split()) == kept.split()


def test_a_command_that_knows_no_ranks_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["jetrl", "export", "runs/x", "out"])
    for key, value in (("RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(key, value)
    with pytest.raises(SystemExit) as end:
        as_rank(lambda: pytest.fail("it ran"), str, False)
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert "jetrl export runs in one process; train, sft, eval, compare and parity can run in several." in said


def test_python_m_jetrl_is_the_command() -> None:
    assert main is cli.main


def test_a_taken_folder_is_left_alone(tmp_path: Path) -> None:
    config, said = tiny_config(tmp_path), []
    assert placed(config, said.append) == config and not said
    for name in ("tiny", "tiny-2"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "metrics.jsonl").write_text("{}\n")
    assert placed(config, said.append).name == "tiny-3" and len(said) == 1
    require_alike(ALONE, config)
