"""`jetrl docs`: all pages that anything names are there, in a clone and in an installed jetrl."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from types import SimpleNamespace

import pytest

from jetrl import pages
from jetrl.config.explain import find_settings, print_settings
from jetrl.errors import UserError
from jetrl.report.console import Output

ROOT = Path(__file__).parents[1]


def test_every_page_that_the_package_names_is_there() -> None:
    known = pages.pages()
    modules = [path.read_text() for path in (ROOT / "jetrl").rglob("*.py")]
    named = {name for text in modules for name in re.findall(r"docs/(\w+)\.md", text)}
    assert len(named) > 9 and named <= known.keys(), named - known.keys()
    assert known.keys() == {path.stem for path in (ROOT / "docs").glob("*.md")} >= {*pages._IN_ORDER}
    assert all(pages.title(path) for path in known.values())


@pytest.mark.parametrize("name", ["REWARDS", "rewards", "docs/REWARDS.md", "rewards.md"])
def test_a_page_is_found_as_messages_and_people_name_it(name: str) -> None:
    assert pages.page(name) == (ROOT / "docs/REWARDS.md").read_text()
    assert pages.page("from-trl").startswith("#")


def test_unknown_pages_and_installations_without_pages_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="no page 'REWARD'. Did you mean REWARDS?"):
        pages.page("REWARD")
    with pytest.raises(UserError, match="`jetrl docs` lists the pages"):
        pages.page("../pyproject.toml")
    monkeypatch.setattr(pages, "_next_to_the_package", list)
    monkeypatch.setattr(pages, "files", lambda _: None)
    with pytest.raises(UserError, match="has no pages. They come with the wheel"):
        pages.pages()


def test_the_pages_of_a_wheel_are_those_of_its_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Wherever it was installed to: pip puts them under its prefix, or under --target."""
    (tmp_path / "RUNS.md").write_text("# Runs\n")

    def listed(name: str) -> SimpleNamespace:
        path = PurePosixPath(name)
        return SimpleNamespace(as_posix=lambda: name, suffix=path.suffix, locate=lambda: tmp_path / path.name)

    monkeypatch.setattr(pages, "_next_to_the_package", list)
    monkeypatch.setattr(pages, "files", lambda _: [
        listed("jetrl/cli.py"), listed("../../../share/doc/jetrl/RUNS.md"), listed("jetrl-1.dist-info/NOTES.md"),
    ])
    assert pages.pages() == {"RUNS": tmp_path / "RUNS.md"} and pages.page("runs") == "# Runs\n"


def test_settings_name_the_command_that_prints_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert find_settings("task.reward")
    print_settings("task.reward", Output(width=200))
    assert "jetrl docs REWARDS" in " ".join(capsys.readouterr().out.split())
