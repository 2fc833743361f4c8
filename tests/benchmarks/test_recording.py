"""Recordings of a terminal and their pictures: what is drawn is what the program wrote, and the end stays."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import recording
from recording import Screen, Style, frames_of, record, svg_of

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "pictures"


def text_of(frame: tuple[recording.Line, ...]) -> list[str]:
    return ["".join(text for text, _ in line) for line in frame]


def cast(path: Path, *events: tuple[float, str]) -> Path:
    lines = [{"version": 2, "width": 90, "height": 22}, *([at, "o", text] for at, text in events)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_live_display_overwrites_its_lines() -> None:
    screen = Screen()
    screen.write("first\r\n\x1b[2mstep 1\x1b[0m of 2\r\n\x1b[1A\x1b[2K\x1b[1Astep")
    screen.write("\r\x1b[2Ksecond\r\n\x1b[32mstep 2\x1b[0m")
    assert text_of(screen.shown()) == ["second", "step 2"]
    assert screen.shown()[1] == (("step 2", Style(colour="#3fb950")),)
    screen.write("\r>")
    assert text_of(screen.shown())[1] == ">tep 2", "a carriage return overwrites"


@pytest.mark.parametrize("codes, style", [
    ([1], Style(bold=True)), ([2, 36], Style("#39c5cf", dim=True)), ([38, 2, 1, 2, 255], Style("#0102ff")),
    ([38, 5, 237], Style("#3a3a3a")), ([1, 0], Style()), ([], Style()),
])
def test_styles_by_hand(codes: list[int], style: Style) -> None:
    assert Style().after(codes) == style


@pytest.mark.parametrize("text", ["\x1b[5m", "\x1b[3J", "\x1b[0K"])
def test_what_it_cannot_draw_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="does not know"):
        Screen().write(text)


def test_half_drawn_screens_are_left_out_and_the_end_is_kept(tmp_path: Path) -> None:
    path = cast(tmp_path / "a.cast", (0.0, "one"), (1.0, "\r\x1b[2Ktw"), (1.001, "o"), (2.0, " three"), (3.0, ""))
    assert [text_of(frame) for frame in frames_of(path, 9)] == [["one"], ["two"], ["two three"]]
    assert [text_of(frame) for frame in frames_of(path, 2)] == [["one"], ["two three"]]


def test_the_picture_shows_each_frame_in_turn(tmp_path: Path) -> None:
    frames = frames_of(cast(tmp_path / "a.cast", (0.0, "<one>"), (1.0, "\r\x1b[2Ktwo  x")), 9)
    picture = svg_of(frames, 20.0, "a & b", command="jetrl train")
    ElementTree.fromstring(picture)
    assert picture.count("<g class=\"f") == 2 and picture.count('class="f l"') == 1
    assert "&lt;one&gt;" in picture and picture.count("$ jetrl train<") == 1, "an equal line is drawn once"
    shares = re.findall(r"@keyframes k\d\{(.*?)\}\}", picture)
    assert shares == ["0.00%{visibility:visible}40.00%{visibility:hidden",
                      "0%{visibility:hidden}40.00%{visibility:visible"]
    assert "prefers-reduced-motion" in picture and "<script" not in picture and "http" not in picture.split(">", 1)[1]


def test_a_command_is_recorded_in_a_terminal(tmp_path: Path) -> None:
    path = tmp_path / "a.cast"
    code = "import sys, os; print(sys.stdout.isatty(), os.get_terminal_size().columns); sys.exit(3)"
    assert record(path, [sys.executable, "-c", code]) == 3
    assert text_of(frames_of(path, 5)[-1]) == ["True 90"]


@pytest.mark.parametrize("picture", sorted(PICTURES.glob("*")), ids=lambda path: path.name)
def test_pictures_are_small_and_show_no_path_of_a_machine(picture: Path) -> None:
    data = picture.read_bytes()
    assert len(data) <= 250_000
    if picture.suffix == ".svg":
        ElementTree.fromstring(data)
        assert not re.search(rb"/(root|home|tmp|work)/", data)
