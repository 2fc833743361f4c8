"""Prose of the pages is in lines of at most 100 columns, and what fills lines again changes no word."""

from __future__ import annotations

from pathlib import Path

import pytest
from prose import WIDTH, filled, parts, reflowed, too_long

ROOT = Path(__file__).parents[1]
PAGES = sorted(path for folder in (".", "docs") for path in (ROOT / folder).glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_lines_of_prose_are_short(page: Path) -> None:
    lines = too_long(page.read_text(encoding="utf-8"))
    assert not lines, f"{len(lines)} lines are too long: run python tests/prose.py {page.relative_to(ROOT)}\n{lines[0]}"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_rows_of_tables_are_lines(page: Path) -> None:
    """What follows a row that was broken is no cell of it."""
    rows = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    assert not [row for row in rows if not row.endswith("|")]


WORD = "word " * 30


@pytest.mark.parametrize("text", [
    f"# {WORD}",
    f"| {WORD} | {WORD} |\n|---|---|\n| {WORD} | b |",
    f"Text.\n\n    {WORD}\n\n    {WORD}",
    f"```python\n{WORD}\n\n{WORD}\n```",
    f"<!-- {WORD} -->\n| {WORD} |",
    "x" * 150,
    f"- an item\n\n      {WORD}",
], ids=["heading", "table", "indented code", "fenced code", "comment", "a word", "code in an item"])
def test_what_is_no_prose_stays(text: str) -> None:
    assert reflowed(text) == text and not too_long(text)


@pytest.mark.parametrize("start, hang", [("", ""), ("- ", "  "), ("12. ", "    "), ("  - ", "    "), ("  ", "  ")])
def test_paragraphs_and_items_are_filled(start: str, hang: str) -> None:
    before = f"- outer\n{start}{WORD.strip()}" if start.startswith(" ") else f"{start}{WORD.strip()}"
    after = reflowed(before).split("\n")[1 if start.startswith(" ") and "-" in start else 0 :]
    assert too_long(before) and not too_long("\n".join(after)) and max(map(len, after)) <= WIDTH
    assert " ".join(after).split() == before.split("\n")[-1].split() or hang == "  " and start == hang
    assert all(line.startswith(hang) for line in after[1:]) or not start.strip()


def test_lines_do_not_begin_with_what_would_be_markup() -> None:
    for mark in ("-", "+", "256)", "4.", "#", ">", "|", "= 3"):
        lines = filled([f"{'x' * 96} a {mark} b"])
        assert len(lines) == 2 and not lines[1].startswith(mark), lines
    assert filled([f"{'x' * 90} `a b c d e f g h`"]) == ["x" * 90, "`a b c d e f g h`"], "code stays on one line"
    assert filled([f"{'x' * 90} [a b](docs/RUNS.md)."]) == ["x" * 90, "[a b](docs/RUNS.md)."]
    broken = [f"{WORD}  ", WORD]
    assert filled(broken) == broken, "line breaks that are meant"


def test_short_lines_stay_and_filling_twice_changes_nothing() -> None:
    text = f"Short\nlines.\n\n{WORD}\n\n- {WORD}\n- short\n  again\n"
    once = reflowed(text)
    assert once.startswith("Short\nlines.\n\n") and "- short\n  again\n" in once and reflowed(once) == once
    assert "".join("\n".join(block) for _, block in parts(once)).replace("\n", "") == once.replace("\n", "")
