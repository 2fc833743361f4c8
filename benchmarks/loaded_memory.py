"""Memory of a model that only samples and scores: its published weights, with and without masters.

    python benchmarks/loaded_memory.py [--write]

The bytes of published shapes are computed (`model.weights.published_bytes`, which tests compare with storages).
Measured is what loading a folder of SmolLM2-135M's shape, in BF16, on the CPU adds to a process: resident memory
afterwards and at its peak, where pages of the mapped file count, which the system can take back.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

RESULT = Path(__file__).parent / "results" / "loaded_memory.json"
SHAPE = "smollm2-135m"
MEASURE = """\
import gc, resource, sys
from pathlib import Path
import torch
from jetrl.huggingface import read as hf
from jetrl.model.transformer import Transformer
from jetrl.precision.recipe import build_recipe
from jetrl.run.setup import load_weights

def resident():
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

folder, masters = sys.argv[1], sys.argv[2] == "masters"
spec = hf.spec_from_folder(folder)
recipe = build_recipe("fp8", spec.num_layers)
before = resident()
model = Transformer(spec, recipe, master_dtype=torch.float32 if masters else None)
if masters:
    load_weights(model, folder)
    model.publish()
else:
    model.publish_values(hf.parameters_of(folder, spec))
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(resident() - before, peak - before)
"""


def computed() -> dict[str, dict[str, int]]:
    """Bytes of each shape: published alone in bf16 and fp8, and fp8 with FP32 masters as a training run holds it."""
    from jetrl.model.weights import published_bytes
    from jetrl.precision.blocks.layouts import linears_of
    from jetrl.precision.recipe import build_recipe
    from jetrl.spec import SHAPES

    rows = {}
    for shape, spec in SHAPES.items():
        bf16, fp8 = (published_bytes(spec, build_recipe(name, spec.num_layers)) for name in ("bf16", "fp8"))
        linears = [shape for layer in range(spec.num_layers) for shape in linears_of(spec, layer).values()]
        in_linears = sum(sum(linear.sections) * linear.in_size for linear in linears)
        codes = fp8 - (bf16 - 2 * in_linears)  # and their scales
        rows[shape] = {"parameters": bf16 // 2, "bf16": bf16, "fp8": fp8, "fp8_with_masters": 3 * bf16 + codes}
    return rows


def measured() -> dict[str, dict[str, int]]:
    """Bytes that loading adds to a fresh process, with and without masters."""
    from jetrl.api import random_model
    from jetrl.huggingface import read as hf

    model = random_model(SHAPE, "bf16", "cpu")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        hf.save_model(folder, model.spec, model.state_dict())
        rows = {}
        for held in ("masters", "published"):
            words = [sys.executable, "-c", MEASURE, str(folder), held]
            after, peak = map(int, subprocess.run(words, check=True, capture_output=True, text=True).stdout.split())
            rows[held] = {"resident": after, "peak": peak}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    arguments = parser.parse_args()
    result: dict[str, Any] = {"computed": computed(), "measured": {SHAPE: measured()}}
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.write:
        RESULT.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
