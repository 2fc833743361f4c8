"""Which backend serves tensors on a device. Nothing is chosen by availability, and nothing falls back.

A backend has a function for each op of `registry.tables`, equal in meaning to the definition in `reference.py`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from jetrl.errors import UserError
from jetrl.kernels import tiles
from jetrl.kernels.registry import Backend, Op, load, tables
from jetrl.kernels.support import CAPABILITY, PORTABLE, capability, require

DEVICE_OF = {"reference": "cpu", "hopper": "cuda", "hopper_scaled_mm": "cuda", "triton": "cuda"}
_serving = {"cpu": "reference", "cuda": "auto"}  # by type of device; `select` changes it
_instead: dict[str, Any] = {}  # by type of device: what `served_by` has put there


@cache
def load_backend(name: str) -> Backend:
    """The ops of a backend, by name. What the machine lacks for it is a UserError."""
    if name not in DEVICE_OF:
        raise ValueError(f"unknown kernel backend {name!r}; known: {', '.join(DEVICE_OF)}")
    require(name)
    backend = load(name)
    if name != "reference":  # it has kernels, all loaded now: each is found on disk from here on whoever compiled it
        importlib.import_module("jetrl.kernels.compiling.keys").settle_all()
    return backend


@cache
def require_experts(name: str) -> Backend:
    """The backend `name`, if it has kernels for mixtures of experts; UserError else."""
    return _with(
        name, tables()["experts"],
        'mixtures of experts: set kernels = "hopper" on a GPU or "reference" on a CPU, or use a dense '
        "model"
    )


@cache
def require_latent(name: str) -> Backend:
    """The backend `name`, if it has kernels for latent attention; UserError else."""
    latent = [op for op in tables()["attention"] if "latent" in op.name]
    return _with(
        name, latent, 'latent attention (MLA): set kernels = "hopper" or "triton" on a GPU, "reference" on a CPU'
        ', or use a model without it'
    )


def _with(name: str, ops: Sequence[Op], what: str) -> Backend:
    """The backend `name`, if its rows have all these ops; UserError if they have none."""
    if missing := [op.name for op in ops if name in DEVICE_OF and op.module(name) is None]:
        assert len(missing) == len(ops), f"backend {name} lacks {missing}"
        raise UserError(f'kernels = "{name}" cannot compute {what}.')
    return load_backend(name)


def definition(name: str) -> str:
    """What the bits of a backend depend on besides its inputs, as text; empty for those that define none.

    The portable kernels have one order of sums for each kind of GPU: the flow's digest covers it, so that a run that
    moves to another kind says so.
    """
    found = capability() if name == PORTABLE else None
    return "" if found is None else tiles.definition(found)


def select(name: str) -> None:
    """From now on `name` serves its type of device, in the whole process: with two runs at once, the last call wins."""
    load_backend(name)
    _serving[DEVICE_OF[name]] = name


@contextmanager
def served_by(device: torch.device, ops: Any) -> Iterator[None]:
    """While the context lasts, `ops` has the ops for that type of device, in the whole process."""
    before = _instead.get(device.type)
    _instead[device.type] = ops
    try:
        yield
    finally:
        if before is None:
            del _instead[device.type]
        else:
            _instead[device.type] = before


def backend_of(x: Tensor) -> Backend:
    """The backend that serves the device of `x`."""
    device = x.device  # asked for once: this is called hundreds of times a step
    return _instead.get(device.type) or load_backend(_name_for(device))


def untapped_backend_of(x: Tensor) -> Backend:
    """The same, whatever `served_by` has put in its place: for what looks at a computation and is no part of it."""
    return load_backend(_name_for(x.device))


def experts_backend_of(x: Tensor) -> Backend:
    """The same, for the ops of mixtures of experts."""
    return require_experts(_name_for(x.device))


def _name_for(device: torch.device) -> str:
    name = _serving.get(device.type)
    if name is None:
        raise ValueError(f"no kernels for device {device}; supported: {', '.join(_serving)}")
    if name == "auto":  # nothing was selected: what `kernels = "auto"` takes
        _serving[device.type] = name = "hopper" if capability() in (None, CAPABILITY) else PORTABLE
    return name
