"""Which kernels compute attention of a size of heads, with `kernels = "hopper"`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
from jetrl.kernels.compiling.recorded import spare_imports
spare_imports()  # of FlashAttention-4, which a CPU lacks
import torch
from jetrl.kernels.attention import by_head, flash, portable
from jetrl.kernels.registry import tables
for size in (64, 128, 192, 256):
    assert by_head._of(torch.empty(1, 2, size)) is (flash if size <= 192 else portable), size
names = {op.name for op in tables()["attention"] if op.module("hopper") == by_head.__name__}
assert names == {"attend", "attend_varlen", "attend_cached", "attend_cached_quantize", "attend_backward"}
"""


def test_wide_heads_are_portable_in_every_op() -> None:
    pytest.importorskip("triton")
    root = str(Path(__file__).parents[2])
    env = {**os.environ, "PYTHONPATH": root, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", CODE], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
