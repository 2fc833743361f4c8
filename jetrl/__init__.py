"""`jetrl`: reinforcement learning of language models in low precision, with rollout and training bit for bit the same.

The public names are imported on first use, so that `jetrl --help` does not load torch.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

# OpenMP threads that spin for long while waiting are 100 times slower when another program holds a core; threads that
# sleep at once take twice the time on an idle machine. So they spin for some 20 us, then sleep. This works only
# before torch is loaded, and what the user has set wins.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")

__version__ = "0.2.0"

_PUBLIC = {
    "load_model": "jetrl.api",
    "Policy": "jetrl.api",
    "quantize_linears": "jetrl.api",
    "publish_linears": "jetrl.api",
    "FP8Linear": "jetrl.api",
    "mismatch_metrics": "jetrl.rl.mismatch",
    "UserError": "jetrl.errors",
    "Trainer": "jetrl.trainer",
    "Callback": "jetrl.callbacks",
}
__all__ = ["__version__", "train", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name == "train":  # the room of this name, which can be called
        return import_module("jetrl.train")
    if name not in _PUBLIC:
        raise AttributeError(f"module 'jetrl' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
