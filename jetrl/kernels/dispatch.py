"""One table: which backend serves tensors on a device. Nothing is chosen by availability, and nothing falls back.

A backend is a module with the functions named in `OPS`, each equal in meaning to the definition in `reference.py`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from jetrl.errors import UserError
from jetrl.kernels.support import require

BACKENDS = {
    "reference": "jetrl.kernels.backends.reference",
    "hopper": "jetrl.kernels.backends.hopper",
    "hopper_scaled_mm": "jetrl.kernels.backends.hopper_scaled_mm",
}
DEVICE_OF = {"reference": "cpu", "hopper": "cuda", "hopper_scaled_mm": "cuda"}
_serving = {"cpu": "reference", "cuda": "hopper"}  # by type of device; `select` changes it
_instead: dict[str, Any] = {}  # by type of device: what `served_by` has put there
OPS = (
    "quantize_act", "quantize_act_t", "quantize_weight", "prepare_fp8", "prepare_fp8_t",
    "prepare_bf16", "fp8_gemm", "wgrad_gemm", "wgrad_rounded", "wgrad_into", "bf16_gemm", "bf16_dgrad", "bf16_wgrad",
    "bf16_wgrad_into", "coded_gemm", "sum_of_two",
    "rms_norm", "rms_norm_backward", "add_rms_norm", "add", "rope", "rope_backward", "round_heads", "swiglu",
    "swiglu_backward", "swiglu_backward_act", "attend", "attend_backward", "head_logits", "logprob_entropy",
    "logprob_backward",
    # several ops in one, the same bits as one after another
    "add_rms_norm_quantize", "add_rms_norm_kept", "normed_t", "swiglu_quantize", "qkv_norm_rope",
    "qkv_norm_rope_backward", "attend_cached", "attend_cached_quantize", "attend_varlen", "exp_weights", "logprobs",
    "advance", "adamw_step_", "row_squares", "add_in_order",
)
# Of mixture-of-experts layers; a backend may lack them all, and is refused for models with experts then.
EXPERT_OPS = (
    "router_backward", "route", "route_backward", "group", "group_quantize", "dispatch", "dispatch_quantize",
    "dispatch_quantize_t", "dispatch_backward", "combine", "combine_backward", "combine_backward_quantize",
    "swiglu_quantize_rows", "swiglu_rows", "swiglu_rows_backward", "swiglu_rows_backward_quantize",
    "prepare_experts_fp8", "prepare_experts_fp8_t", "prepare_experts_bf16", "grouped_fp8_gemm", "grouped_bf16_gemm",
    "grouped_bf16_dgrad", "quantize_rows_t", "grouped_wgrad_into", "grouped_bf16_wgrad_into",
)


@cache
def load_backend(name: str) -> ModuleType:
    """Import a backend by name. What the machine lacks for it is a UserError; a missing op is a bug of ours."""
    if name not in BACKENDS:
        raise ValueError(f"unknown kernel backend {name!r}; known: {', '.join(BACKENDS)}")
    require(name)
    module = importlib.import_module(BACKENDS[name])
    missing = [op for op in OPS if not hasattr(module, op)]
    assert not missing, f"backend {name} lacks {missing}"
    return module


@cache
def require_experts(name: str) -> ModuleType:
    """The backend `name`, if it has kernels for mixtures of experts; UserError else."""
    module = load_backend(name)
    if missing := [op for op in EXPERT_OPS if not hasattr(module, op)]:
        assert len(missing) == len(EXPERT_OPS), f"backend {name} lacks {missing}"
        raise UserError(
            f'kernels = "{name}" cannot compute mixtures of experts: set kernels = "hopper" on a GPU or "reference" '
            "on a CPU, or use a dense model."
        )
    return module


def select(name: str) -> None:
    """From now on `name` serves its type of device, in the whole process: with two runs at once, the last call wins."""
    load_backend(name)
    _serving[DEVICE_OF[name]] = name


@contextmanager
def served_by(device: torch.device, ops: Any) -> Iterator[None]:
    """While the context lasts, `ops` has the ops of `OPS` for that type of device, in the whole process."""
    before = _instead.get(device.type)
    _instead[device.type] = ops
    try:
        yield
    finally:
        if before is None:
            del _instead[device.type]
        else:
            _instead[device.type] = before


def backend_of(x: Tensor) -> ModuleType:
    """The backend that serves the device of `x`."""
    return _instead.get(x.device.type) or load_backend(_name_for(x))


def experts_backend_of(x: Tensor) -> ModuleType:
    """The same, for the ops of `EXPERT_OPS`."""
    return require_experts(_name_for(x))


def _name_for(x: Tensor) -> str:
    name = _serving.get(x.device.type)
    if name is None:
        raise ValueError(f"no kernels for device {x.device}; supported: {', '.join(_serving)}")
    return name
