"""Who holds an op of the CPU, for tests that replace it: the backend, and modules whose fused ops have it as a part."""

from __future__ import annotations

import sys
from typing import Any

from jetrl.kernels.dispatch import load_backend
from jetrl.kernels.registry import tables

DEFINITIONS = "jetrl.kernels.reference"  # stays as it is


def owners(op: str) -> list[Any]:
    """The objects on which `op` is to be replaced."""
    backend = load_backend("reference")
    named = {row.module("reference") for rows in tables().values() for row in rows} - {None, DEFINITIONS}
    modules = [sys.modules[str(name)] for name in sorted(map(str, named))]
    return [backend, *(module for module in modules if op in vars(module))]
