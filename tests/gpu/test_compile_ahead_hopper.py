"""Kernels compiled ahead on a Hopper GPU, with caches of their own: the run that follows compiles next to nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
CODE = """
import json
import re
import sys
from pathlib import Path
from tiny import ARCH, tiny_config
from jetrl.kernels.support import caches
from jetrl.run.loop import StopRequest, run

def kernels():
    where = caches()
    return {
        "Triton": {f"{p.stem} {p.parent.name}" for p in where["Triton"].glob("*/*.cubin")},
        "DeepGEMM": {p.parent.name for p in where["DeepGEMM"].rglob("kernel.cubin")},
        "FlashAttention-4": {p.name for p in where["FlashAttention-4"].rglob("*.o")},
    }

def facts(key):
    # what tells a Triton kernel from others of its name: options of the compiler, types and attributes of arguments
    stem, folder = key.split(" ")
    path = caches()["Triton"] / folder
    options = json.loads((path / f"{stem}.json").read_text())
    text = next(p for p in (path / f"{stem}.{kind}" for kind in ("ttir", "ttgir")) if p.is_file()).read_text()
    head = next(line for line in text.splitlines() if "tt.func public" in line)
    arguments = re.sub(r" loc\\([^)]*\\)+", "", head).split("%")[1:]
    return {*arguments, *(f"{name}={value}" for name, value in options.items() if name not in ("hash", "name"))}

def explain(key, known):
    # the kernel of the same name, compiled ahead, that differs least, and in what
    mine, stem = facts(key), key.split(" ")[0]
    others = [facts(other) for other in known if other.split(" ")[0] == stem]
    near = min(others, key=lambda other: len(mine ^ other), default=set())
    return f"{stem}: of {len(others)} ahead; run {sorted(mine - near)}, ahead {sorted(near - mine)}"

if __name__ == "__main__":
    from jetrl.parallel.world import ALONE
    from jetrl.run.compiling.display import Compiling
    from jetrl.report.recorder import read_metrics
    from jetrl.run.compiling.ahead import compile_ahead
    from jetrl.run.prepare import load_spec
    folder = Path(sys.argv[1])
    config = tiny_config(folder, {
        "device": "cuda", "quant.kv_cache": "fp8", "train.compile_ahead": True, "rollout.max_num_seqs": 16,
        "model.arch": ARCH | {"hidden_size": 256, "intermediate_size": 512, "head_dim": 128},
    })
    compile_ahead(config, load_spec(config)[1], ALONE, Compiling)
    before = kernels()
    assert all(before.values()), f"nothing was compiled ahead by one of them: {before}"
    assert run(config, folder / "run", ["test"], StopRequest())
    row = read_metrics(folder / "run")[0]
    assert row["perf/compile_s"] < 1, f"the marker was not found: {row['perf/compile_s']} s"
    after = kernels()
    for name in before:
        new = sorted(after[name] - before[name])
        why = [explain(key, before[name]) for key in new] if name == "Triton" else new
        print(f"{name}: {len(before[name])} ahead, {len(new)} by the run", *why, sep="\\n  ")
    assert not after["FlashAttention-4"] - before["FlashAttention-4"]
    for name in ("Triton", "DeepGEMM"):
        assert len(after[name] - before[name]) <= len(after[name]) // 20, sorted(after[name] - before[name])
"""


def test_a_run_finds_its_kernels_on_disk(tmp_path: Path) -> None:
    variables = {
        name: str(tmp_path / "caches" / name / "kernels")
        for name in ("TRITON_CACHE_DIR", "DG_JIT_CACHE_DIR", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR")
    }
    environment = os.environ | variables | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=400
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "Not compiled ahead" not in done.stdout, done.stdout[-3000:]
