"""What mkdocs calls while it builds the site (mkdocs.yml): pages made from the code, and links that lead out of docs/.

The reference of the command line and of Python is made anew at each build, so that it cannot go stale. A file of the
repository to which a page links comes along, so that the site needs no other server.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.structure.files import Files

ROOT = Path(__file__).parents[1]
BESIDE = {  # pages of the site that lie elsewhere in the repository
    "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md", "SECURITY.md": "SECURITY.md",
    "EXAMPLES.md": "examples/README.md",
}
RETURNED = ("jetrl.trainer.Result", "jetrl.trainer.StepResult", "jetrl.api.Generated")
COPIED = "repository"  # the folder of the site with other files of the repository

FENCED = re.compile(r"^(```.*?^```[^\n]*\n|(?: {4}[^\n]*\n|\n(?= {4}))+)", re.M | re.S)
NAMED = re.compile(rf"(?<!\[)`(docs/(\w+\.md)|({'|'.join(map(re.escape, BESIDE))}))`")
BARE = re.compile(r"(?<=[^\]]\()docs/(\w+\.md)(?=\))")  # (docs/RUNS.md), as descriptions of settings have it
LINK = re.compile(r"\]\(([^)\s#:]+)(#[\w-]+)?\)")


# ---- the reference of the command line -------------------------------------------------------------------------------

def cli_page() -> str:
    """Every command with its arguments and options, as `--help` has them."""
    import typer

    from jetrl.cli import app

    group: Any = typer.main.get_command(app)
    parts = ["# Command line\n", f"{_as_markdown(group.help)}\n", f"{_as_markdown(group.epilog)}\n"]
    for name, command in group.commands.items():
        parts.append(f"## jetrl {name}\n\n{_as_markdown(command.help)}\n")
        parts.append(_table("argument", [p for p in command.params if p.param_type_name == "argument"]))
        parts.append(_table("option", [p for p in command.params if p.param_type_name == "option"]))
    return "\n".join(part for part in parts if part)


def _table(kind: str, params: Iterable[Any]) -> str:
    rows = [f"| {_shown_name(p)} | {_cell(p.help)} | {_default(p)} |" for p in params if not p.hidden]
    return "\n".join([f"| {kind} | meaning | default |", "|---|---|---|", *rows, ""]) if rows else ""


def _shown_name(param: Any) -> str:
    if param.param_type_name == "argument":
        return f"`{param.name.upper()}`"
    return ", ".join(f"`{name}`" for name in param.opts)


def _default(param: Any) -> str:
    if param.required:
        return "required"
    return "" if param.default in (None, False, "", ()) or callable(param.default) else f"`{param.default}`"


def _cell(text: str | None) -> str:
    return _as_markdown(text).replace("|", "\\|").replace("\n", " ")


def _as_markdown(text: str | None) -> str:
    return re.sub(r"(?<!`)<(\w+)>", r"&lt;\1&gt;", (text or "").strip())


# ---- the reference of Python -----------------------------------------------------------------------------------------

def python_page() -> str:
    """The public names of `jetrl`, each where it is defined: mkdocstrings reads signatures and docstrings there."""
    import jetrl

    places = {"train": "jetrl.trainer", **jetrl._PUBLIC}
    parts = ["# Python API", "The public names of `import jetrl`. [PYTHON.md](../PYTHON.md) shows how they are used."]
    parts += [_member(f"jetrl.{name}", f"{places[name]}.{name}") for name in jetrl.__all__ if name in places]
    parts += ["## What they return", *(_member(path.rpartition(".")[2], path, 3) for path in RETURNED)]
    return "\n\n".join(parts) + "\n"


def _member(heading: str, path: str, level: int = 2) -> str:
    return f"::: {path}\n    options:\n      heading: {heading}\n      heading_level: {level}"


GENERATED: dict[str, Callable[[], str]] = {"reference/cli.md": cli_page, "reference/python.md": python_page}


# ---- links -----------------------------------------------------------------------------------------------------------

def linked(markdown: str, page: str) -> tuple[str, set[str]]:
    """The page with links that work in the site, and the files of the repository that they need beside it.

    `page`: its path from docs/; pages of BESIDE are seen from there as well. Code stays as it is.
    """
    needed: set[str] = set()

    def name(found: re.Match[str]) -> str:
        target = found[2] or found[3]
        known = (ROOT / found[1]).is_file() and target != page
        return f"[{found[0]}]({_up(page)}{target})" if known else found[0]

    def link(found: re.Match[str]) -> str:
        target, anchor = found[1], found[2] or ""
        path = ((ROOT / BESIDE.get(page, f"docs/{page}")).parent / target).resolve()
        if not path.is_relative_to(ROOT) or not path.exists():
            return found[0]  # mkdocs --strict names it, or it is a page made at the build
        inside = path.relative_to(ROOT).as_posix()
        for beside, place in BESIDE.items():
            if inside == place:
                return f"]({_up(page)}{beside}{anchor})"
        if inside.startswith("docs/"):
            return f"]({_up(page)}{inside.removeprefix('docs/')}{anchor})"
        if path.is_dir() or path.suffix == ".md":
            return "]"  # text in brackets: the site has no listing of a folder, and no page outside of its navigation
        needed.add(inside)
        return f"]({_up(page)}{COPIED}/{inside})"

    def prose(text: str) -> str:
        text = re.sub(r"^<!--.*-->$", "", text, flags=re.M)  # next to a table, a comment would make it text
        return NAMED.sub(name, BARE.sub(r"`docs/\1`", LINK.sub(link, text)))

    parts = FENCED.split(markdown + "\n")
    done = "".join(part if i % 2 else prose(part) for i, part in enumerate(parts))
    return done.removesuffix("\n"), needed


def _up(page: str) -> str:
    return "../" * page.count("/")


# ---- what mkdocs calls -----------------------------------------------------------------------------------------------

def on_config(config: Any) -> Any:
    """The repository's address is that of pyproject.toml; without one there is no link to it."""
    sys.path.insert(0, str(ROOT))  # jetrl of this clone, installed or not
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    config.site_description = project["description"]
    config.repo_url = project.get("urls", {}).get("Repository")
    return config


def on_files(files: Files, config: Any) -> Files:
    from mkdocs.structure.files import File

    for name, make in GENERATED.items():
        files.append(File.generated(config, name, content=make()))
    for name, place in BESIDE.items():
        files.append(File.generated(config, name, content=(ROOT / place).read_text(encoding="utf-8")))
    needed: set[str] = set()
    for file in files.documentation_pages():
        needed |= linked(file.content_string, file.src_uri)[1]
    for name in sorted(needed):
        files.append(File.generated(config, f"{COPIED}/{name}", abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    return linked(markdown, page.file.src_uri)[0]
