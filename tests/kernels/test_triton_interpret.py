"""Triton kernels against the definitions, bit for bit, by Triton's interpreter on the CPU (no GPU needed)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


FILES = [
    ("triton_cases.py", 40), ("triton_cache_cases.py", 90), ("triton_experts_cases.py", 60),
    ("triton_attention_cases.py", 22), ("triton_gemm_cases.py", 5), ("triton_adapter_cases.py", 25),
    ("triton_portable_cases.py", 39), ("triton_portable_model.py", 6), ("triton_latent_cases.py", 43),
    ("triton_delta_cases.py", 14), ("triton_delta_backward_cases.py", 9),
]


@pytest.mark.parametrize(("file", "least"), FILES)
def test_kernels_equal_their_definitions_in_the_interpreter(file: str, least: int) -> None:
    pytest.importorskip("triton")
    # TRITON_INTERPRET is read when a kernel is defined, so the cases need a process of their own
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    root = HERE.parents[1]
    env["PYTHONPATH"] = os.pathsep.join([str(root), env.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, str(HERE / file)], env=env, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["failed"] == [] and result["cases"] >= least, done.stdout
