"""The room of training, which `jetrl.train(recipe, ...)` also calls: see `jetrl.trainer.train`.

The package has the name that one would give the function, so it is both. Nothing is imported before the call.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _Room(ModuleType):
    def __call__(self, recipe: Any = None, *unnamed: Any, **arguments: Any) -> Any:
        """Train to the last step; returns a `Result`. Arguments as of `jetrl.Trainer`."""
        return import_module("jetrl.trainer").train(recipe, *unnamed, **arguments)


sys.modules[__name__].__class__ = _Room
