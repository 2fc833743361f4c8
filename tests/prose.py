"""Lines of prose in Markdown: which are too long, and the same text in lines that are not.

`python tests/prose.py FILE...` rewrites files. Paragraphs and list items with a line of more than 100 columns are
filled again; tables, code, headings, comments and all other paragraphs stay as they are.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

WIDTH = 100
ITEM = re.compile(r"( *)([-*+]|\d+[.)])( +)")
# What stays on one line: code, and a link whose text is short. A word may be glued to both.
ATOM = re.compile(r"(?:`+[^`]+`+|!?\[[^\]]{1,40}\]\([^)\s]*\)|[^\s`\[]|[`\[])+")
# At the start of a line these would be something else than text.
MARKUP = re.compile(r"(?:[-+*>|=]+|#+|\d+[.)])$|[|>]|<!--|```")


def parts(text: str) -> Iterator[tuple[bool, list[str]]]:
    """(whether it is prose, its lines): paragraphs and items one by one; lines of anything else."""
    lines, fence, code, block = text.split("\n"), "", False, list[str]()
    inside = False  # of a list, where indented text is no code
    for i, line in enumerate(lines):
        mark = re.match(r" *(```+|~~~+)", line)
        blank = not line.strip()
        if fence or mark:
            other = True
            fence = "" if fence and mark and mark[1].startswith(fence) else fence or (mark[1] if mark else "")
        elif blank:
            other = True
        else:
            after_blank = i == 0 or not lines[i - 1].strip() or code
            code = line.startswith(" " * (6 if inside else 4)) and after_blank and not block
            other = code or bool(re.match(r" *(\||#+ |<!--|<[a-z/]|\[[^\]]+\]: |---+$|===+$)", line)) and not block
            other = other or bool(re.match(r" *(\||<!--)", line))
            if not code:
                inside = bool(ITEM.match(line)) or inside and line.startswith(" ") or bool(block) and inside
        if other or ITEM.match(line) and not code:
            if block:
                yield True, block
                block = []
        if other:
            yield False, [line]
        else:
            block.append(line)
    if block:
        yield True, block


def too_long(text: str) -> list[str]:
    """Lines of prose of more than WIDTH columns that could be shorter."""
    blocks = [block for prose, block in parts(text) if prose]
    return [line for block in blocks for line in block if len(line) > WIDTH and filled(block) != block]


def filled(block: list[str]) -> list[str]:
    """A paragraph or item in lines of at most WIDTH columns, as far as its words allow."""
    item = ITEM.match(block[0])
    first = item[0] if item else re.match(r" *", block[0])[0]  # type: ignore[index]  # matches always
    hang = " " * len(first) if item else first
    if any(line.endswith(("  ", "\\")) for line in block[:-1]):  # line breaks that are meant
        return block
    words = ATOM.findall(" ".join([block[0][len(first):], *(line.strip() for line in block[1:])]))
    lines = [[words[0]]]
    for word in words[1:]:
        if len(hang) + len(" ".join([*lines[-1], word])) <= WIDTH:
            lines[-1].append(word)
        elif MARKUP.match(word) and len(lines[-1]) > 1:  # not at the start of a line: the word before it goes with it
            lines.append([lines[-1].pop(), word])
        else:
            lines.append([word])
    return [(hang if i else first) + " ".join(line) for i, line in enumerate(lines)]


def reflowed(text: str) -> str:
    lines = list[str]()
    for prose, block in parts(text):
        lines += filled(block) if prose and any(len(line) > WIDTH for line in block) else block
    return "\n".join(lines)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        page = Path(name)
        page.write_text(reflowed(page.read_text(encoding="utf-8")), encoding="utf-8")
