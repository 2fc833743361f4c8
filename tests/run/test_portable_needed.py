"""A run with the portable kernels: what it launches compiles for GPUs with little shared memory, and all of its GPUs
must be of one kind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from jetrl.errors import UserError
from jetrl.run import setup

ROOT = Path(__file__).parents[2]
CODE = """
import json, sys
sys.path[:0] = ["benchmarks", "tests", "tests/run"]
import portable_resources as made
from portable_run import launches
jobs = launches((8, 6), "w8a16")
names = sorted({job.arguments[1] for job in jobs})
rows = []
for job in jobs:
    module, name, given, more = job.arguments
    small = more.get("ROWS") == 16
    walk = module.endswith("delta.backward_triton") and name.startswith("_state")
    walk |= name == "_walk_kernel"
    if walk or name in ("_attention_kernel", "_gemm_kernel") and small and len(rows) < 4:
        import importlib
        rows.append({"name": name} | made.resources(getattr(importlib.import_module(module), name), given, more, 86))
print(json.dumps({"names": names, "makers": sorted({job.name.split()[0] for job in jobs}), "rows": rows}))
"""


def test_what_a_run_launches_compiles_for_a_card_with_little_shared_memory() -> None:
    """All by Triton, nothing of a library; those that decode, and those that walk over states, for sm_86 without
    spilled registers."""
    pytest.importorskip("triton")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", CODE]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["makers"] == ["Triton"]
    wanted = {f"_{name}_kernel" for name in (
        "attention", "conv", "fork", "gate", "gemm", "grouped", "keys", "queries", "rule", "token", "walk", "wgrad",
        "conv_inputs", "conv_sums", "decay", "gate_grads", "inverse", "key_grads", "pairs", "chunk_rows", "state_grads",
        "states",
    )}
    assert wanted <= set(found["names"])
    walks = {"_state_grads_kernel", "_states_kernel", "_walk_kernel"}
    assert {row["name"] for row in found["rows"]} == {"_attention_kernel", "_gemm_kernel", *walks}
    for row in found["rows"]:
        assert row["stack"] == 0 and row["shared"] <= 99 * 1024 and row["instruction"] == "mma", row


@pytest.mark.parametrize(("kinds", "refused"), [
    ([("triton", (8, 0)), ("triton", (8, 0))], ""), ([("hopper", (9, 0)), ("hopper", (9, 0))], ""),
    ([("triton", (8, 0)), ("triton", (8, 6))], "rank 0 has 8.0, rank 1 has 8.6"),
    ([("hopper", (9, 0)), ("triton", (8, 9))], "rank 0 has 9.0, rank 1 has 8.9"),
])
def test_all_gpus_of_a_run_are_of_one_kind(
    kinds: list[tuple[str, tuple[int, int]]], refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for kernels, own in kinds:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda own=own: own)
        said: list[Any] = []

        def gather(value: Any, said: list[Any] = said) -> list[Any]:
            said.append(value)
            return [(name, list(one)) for name, one in kinds]

        world: Any = SimpleNamespace(alone=False, gather=gather)
        config: Any = SimpleNamespace(device="cuda", kernels=kernels)
        if refused:
            with pytest.raises(UserError, match=f"of different kinds: by compute capability, {refused}"):
                setup.check_gpus(config, world)
        else:
            setup.check_gpus(config, world)
        assert said == [(kernels, list(own))]
