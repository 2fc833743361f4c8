"""The recipes that come with the package, by name: `jetrl train quickstart` from any folder."""

from __future__ import annotations

import difflib
from pathlib import Path

from jetrl.errors import UserError

FOLDER = Path(__file__).parents[1] / "recipes"


def shipped() -> dict[str, Path]:
    """Name and file of each recipe, in order of the names."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.toml"))}


def find_recipe(text: str) -> Path:
    """The file that a user means: their own path if it exists, else the shipped recipe of this name.

    Raises UserError if there is neither, with the names or files that are close.
    """
    path, recipes = Path(text), shipped()
    if path.is_file() or not _is_name(text) and path.exists():
        return path
    if text in recipes:
        return recipes[text]
    if path.is_dir():
        return path  # its reader refuses it, with a hint about what is inside
    peers = [str(p) for p in sorted(path.parent.glob("*.toml"))] if path.parent.is_dir() else []
    close = [name for name in [path.stem] if name in recipes] or difflib.get_close_matches(text, [*recipes, *peers], 1)
    hint = f"Did you mean {close[0]}?" if close else "Give a TOML file, or one of `jetrl recipes`."
    raise UserError(f"{text}: there is no such file and no recipe of this name. {hint}")


def summary(path: Path) -> str:
    """The first line of a recipe's comment."""
    return path.read_text(encoding="utf-8").splitlines()[0].removeprefix("#").strip()


def _is_name(text: str) -> bool:
    return not any(sign in text for sign in "/\\")
