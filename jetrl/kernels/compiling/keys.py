"""Triton's keys of kernels on disk, made independent of the order in which a process compiles them.

A kernel is found on disk by a key that covers its source, the functions that it calls, and the constants that all of
them read. Triton 3.6 takes a called function's constants from what that function's own key noted, but does so before it
asks for that key. So a kernel gets one key if its functions had theirs before, and another if not: what one process
has compiled, another may not find. With the keys of called functions always first, each kernel has one key.
"""

from __future__ import annotations

import sys
from types import ModuleType

from triton.runtime.jit import JITFunction

_KERNELS = __name__.rsplit(".", 2)[0]  # the room in whose folders all kernels are


def settle(module: ModuleType) -> None:
    """Give all kernels of a module their keys, called functions first."""
    seen: set[int] = set()
    for value in list(vars(module).values()):
        if isinstance(value, JITFunction):
            _settle(value, seen)


def settle_all() -> None:
    """`settle` of all modules with kernels that are loaded: 60 ms."""
    for name, module in sorted(sys.modules.items()):
        if name.startswith(f"{_KERNELS}."):
            settle(module)


def _settle(function: JITFunction, seen: set[int]) -> None:
    if id(function) in seen:
        return
    seen.add(id(function))
    known = function.fn.__globals__
    for name in function.fn.__code__.co_names:
        if isinstance(called := known.get(name), JITFunction):
            _settle(called, seen)
    _ = function.cache_key  # computed once, then kept
