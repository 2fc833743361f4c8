"""Links of README, docs/ and the pages beside them lead to files that exist, and to headings in them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted(path for folder in (".", "docs", ".github", "examples") for path in (ROOT / folder).glob("*.md"))
LINK = re.compile(r"!?\[[^\]]*\]\(\s*([^)\s]+)[^)]*\)")
FENCED = re.compile(r"^```.*?^```|^(?: {4}[^\n]*\n)+", re.M | re.S)


def prose(page: str) -> str:
    """A page without its code."""
    return re.sub(r"`[^`\n]*`", "", FENCED.sub("", page))


def anchors(page: str) -> set[str]:
    """What links may name behind `#`: the headings of a page, written as GitHub and mkdocs write them."""
    headings = re.findall(r"^#+ +(.*?)\s*$", FENCED.sub("", page), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in LINK.findall(prose(text.replace("`](", "](").replace("[`", "["))):
        if re.match(r"https?://|mailto:", target):
            continue
        file, _, anchor = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        assert path.is_relative_to(ROOT) and path.exists(), f"{page.name}: a link to {target}"
        if anchor:
            assert anchor in anchors(path.read_text(encoding="utf-8")), f"{page.name}: no heading for {target}"


def test_pages_name_each_other_by_links() -> None:
    """Nobody can click `docs/REWARDS.md` in backticks. (The site makes links of it in records and generated pages.)"""
    unlinked = {"DECISIONS.md", "LOG.md", "CONFIG.md", "CHANGELOG.md"}
    for page in (path for path in PAGES if path.parent in (ROOT, ROOT / "docs") and path.name not in unlinked):
        found = re.findall(r"`docs/\w+\.md`", FENCED.sub("", page.read_text(encoding="utf-8")))
        assert not found, f"{page.name}: {found}"


def test_every_page_is_in_the_contents_and_in_the_navigation() -> None:
    contents = (ROOT / "docs/README.md").read_text(encoding="utf-8")
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    named = re.findall(r": (\S+\.md)$", navigation, re.M)
    assert len(named) == len(set(named)) > 20
    for page in {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}:
        assert f"({page})" in contents, f"docs/README.md does not link to {page}: add it to its table"
        assert page in named, f"mkdocs.yml has no place for docs/{page}: add it under nav"
