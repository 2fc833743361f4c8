"""The site of docs/: links out of docs/, pages made from the code, and that a link which leads nowhere is found."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import typer

import jetrl
from jetrl.cli import app

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site() -> ModuleType:
    """docs/site.py, which mkdocs loads by its path, too."""
    spec = importlib.util.spec_from_file_location("docs_site", ROOT / "docs/site.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_the_command_line_has_every_command_and_option(site: ModuleType) -> None:
    page = site.cli_page()
    sections = {part.partition("\n")[0]: part for part in page.split("\n## jetrl ")[1:]}
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert list(sections) == list(commands)
    for name, command in commands.items():
        for option in (p for p in command.params if p.param_type_name == "option"):
            assert f"`{option.opts[0]}`" in sections[name], (name, option.opts)
    recipe, sequences = (next(p for p in commands[name].params if p.name == param)
                         for name, param in (("train", "recipe"), ("parity", "sequences")))
    assert f"| `RECIPE` | {recipe.help} | required |" in sections["train"]
    assert f"| `--sequences` | {sequences.help} | `6` |" in sections["parity"]


def test_the_page_of_python_has_every_public_name(site: ModuleType) -> None:
    page = site.python_page()
    for name in set(jetrl.__all__) - {"__version__"}:
        assert f"heading: jetrl.{name}\n" in page, name
    assert "::: jetrl.trainer.Trainer\n" in page and "::: jetrl.trainer.train\n" in page


def test_links_out_of_docs_bring_their_files(site: ModuleType) -> None:
    linked = site.linked
    assert linked("See [x](../SECURITY.md).", "RUNS.md") == ("See [x](SECURITY.md).", set())
    assert linked("[a](../Makefile)", "RUNS.md") == ("[a](repository/Makefile)", {"Makefile"})
    assert linked("[a](../examples/README.md)", "README.md") == ("[a](EXAMPLES.md)", set())
    assert linked("[a](tools.py)", "EXAMPLES.md") == ("[a](repository/examples/tools.py)", {"examples/tools.py"})
    assert linked("[a](docs/RUNS.md#stopping)", "CONTRIBUTING.md") == ("[a](RUNS.md#stopping)", set())
    assert linked("[a](RUNS.md), [b](https://a.b/c)", "PYTHON.md")[0] == "[a](RUNS.md), [b](https://a.b/c)"
    assert linked("[a](NOBODY.md)", "PYTHON.md")[0] == "[a](NOBODY.md)", "left to mkdocs, which refuses it"
    assert linked("As in `docs/RUNS.md`.", "LOG.md")[0] == "As in [`docs/RUNS.md`](RUNS.md)."
    assert linked("As in `docs/RUNS.md`.", "RUNS.md")[0] == "As in `docs/RUNS.md`.", "no page links to itself"
    assert linked("See (docs/RUNS.md).", "CONFIG.md")[0] == "See ([`docs/RUNS.md`](RUNS.md))."
    assert linked("A row in `docs/README.md`.", "CONTRIBUTING.md") == (
        "A row in [`docs/README.md`](README.md).", set()), "not the one at the top of the repository"
    assert linked("As in `docs/NOBODY.md`.", "LOG.md")[0] == "As in `docs/NOBODY.md`."


@pytest.mark.parametrize("code", ["```\n`docs/RUNS.md` [a](../Makefile)\n```", "Text.\n\n    `docs/RUNS.md`\n"])
def test_code_stays_as_it_is(site: ModuleType, code: str) -> None:
    assert site.linked(code, "LOG.md") == (code, set())


def test_a_link_that_leads_nowhere_ends_the_build(tmp_path: Path) -> None:
    """`make docs` on a copy of mkdocs.yml, with one page that is good and one that is not."""
    pytest.importorskip("mkdocs", reason='builds the site: pip install "jetrl[docs]"')
    settings = (ROOT / "mkdocs.yml").read_text().partition("\nplugins:\n")[0]
    (tmp_path / "docs").mkdir()
    (tmp_path / "mkdocs.yml").write_text(settings.replace("\nhooks: [docs/site.py]\n", "\n"))
    (tmp_path / "docs/index.md").write_text("# One\n\n[two](two.md#part)\n")
    for second, status in (("# Two\n\n## Part\n", 0), ("# Two\n", 1)):
        (tmp_path / "docs/two.md").write_text(second)
        command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == status, done.stderr
