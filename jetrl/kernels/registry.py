"""Which module computes an op for which backend: the rows of the `table.py` of each folder of ops.

A row is all that an op needs to exist, so an op, or a folder of them, is added without a change elsewhere. Rows name
modules as text, and a backend imports its own alone: a CPU needs neither Triton nor DeepGEMM.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from functools import cache
from typing import Any

import jetrl.kernels

LIKE = {"hopper_scaled_mm": "hopper", "triton": "hopper"}  # where a row names none for the first: the second's


class Op:
    """An op, and by name of backend the module below `jetrl.kernels` with the function so called.

    None says that a backend does without the op. Nothing said is a mistake, unless `LIKE` has an answer.
    """

    def __init__(self, name: str, **modules: str | None) -> None:
        self.name, self.modules = name, modules

    def module(self, backend: str) -> str | None:
        """The full name of the module that has the function; None for a backend that does without.

        Raises LookupError where the row says neither.
        """
        named = self.modules.get(backend, self.modules.get(LIKE.get(backend, backend), ""))
        if named == "":
            raise LookupError(f"the row of the op {self.name} has no module for the backend {backend}, nor None")
        return None if named is None else f"{jetrl.kernels.__name__}.{named}"


class Backend:
    """The ops of a backend, each an attribute."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, op: str) -> Any:  # asked for what is not there
        raise AttributeError(f"the backend {self.name} has no op {op}")


@cache
def tables() -> dict[str, tuple[Op, ...]]:
    """The rows of each folder that has a `table.py`."""
    found = {}
    for folder in pkgutil.iter_modules(jetrl.kernels.__path__, f"{jetrl.kernels.__name__}."):
        if folder.ispkg and importlib.util.find_spec(table := f"{folder.name}.table"):
            found[folder.name.rpartition(".")[2]] = importlib.import_module(table).OPS
    names = [op.name for rows in found.values() for op in rows]
    assert len(set(names)) == len(names), f"ops with two rows: {sorted({n for n in names if names.count(n) > 1})}"
    return found


def load(name: str) -> Backend:
    """The backend with all ops that it has. Its modules are imported now."""
    backend = Backend(name)
    for rows in tables().values():
        for op in rows:
            if module := op.module(name):
                setattr(backend, op.name, getattr(importlib.import_module(module), op.name))
    return backend
