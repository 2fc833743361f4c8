"""Golden numbers: log-probs by equality on any machine, and a short run's curve.

The forward pass is exact arithmetic, so its bits are the same everywhere. Gradients are float32 sums of the machine's
own matrix product, so what follows an optimizer step is compared with a tolerance, and rewards (counts) by equality.
`python tests/golden/test_golden.py` writes the file again.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from jetrl.kernels.logprob.ops import log_softmax
from jetrl.model.transformer import Transformer
from jetrl.model.weights import checksum, published
from jetrl.precision.recipe import build_recipe
from jetrl.spec import ModelSpec, RopeSpec
from jetrl.types import ForwardBatch, VarlenPlan

FILE = Path(__file__).with_name("golden.json")
SPEC = ModelSpec(
    family="qwen3", vocab_size=50, hidden_size=136, intermediate_size=200, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=32, rms_norm_eps=1e-6, rope=RopeSpec(1e4), max_position=64, tie_embeddings=True, qkv_bias=False,
    qk_norm=True,
)
KEYS = ("reward/mean", "response_length/mean", "policy/loss", "policy/entropy", "policy/grad_norm")
EXACT = KEYS[:2]


def forward(precision: str) -> dict[str, Any]:
    """Hash and some values of all log-probs of a model whose weights are made of integers (no random generator)."""
    model = Transformer(SPEC, build_recipe(precision, SPEC.num_layers))
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            values = (torch.arange(p.numel(), dtype=torch.int64) * 48271 + 7919 * i) % 2003 - 1001
            p.copy_((values.double() / 8008 if p.ndim == 2 else 1 + values.double() / 4004).view_as(p))
    model.publish()
    tokens = torch.arange(40) * 17 % 50
    plan = VarlenPlan(torch.tensor([0, 25, 40], dtype=torch.int32), (25, 15))
    with torch.no_grad():
        hidden = model(ForwardBatch(tokens, torch.cat((torch.arange(25), torch.arange(15))), plan, "train"))
        logprobs = log_softmax(model.logits(hidden)).numpy()
    digest = hashlib.sha256(np.ascontiguousarray(logprobs, dtype="<f4").tobytes()).hexdigest()
    return {"sha256": digest, "values": [float(v) for v in logprobs[::13, 7]], "checksum": checksum(published(model))}


def curve(precision: str, folder: Path) -> list[dict[str, float]]:
    from tiny import numbers, tiny_run

    run_dir = tiny_run(folder, {"precision": precision, "train.steps": 3, "train.lr": 1e-3})
    return [{k: row[k] for k in KEYS if k in row} for row in numbers(run_dir)[1:]]


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    return json.loads(FILE.read_text())


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_forward(golden: dict[str, Any], precision: str) -> None:
    assert forward(precision) == golden["forward"][precision]


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_curve(golden: dict[str, Any], precision: str, tmp_path: Path) -> None:
    expected = golden["curve"][precision]
    got = curve(precision, tmp_path)
    assert len(got) == len(expected) == 3
    for step, (row, want) in enumerate(zip(got, expected, strict=True), 1):
        assert row.keys() == want.keys() and len(row) == len(KEYS)
        for key, value in want.items():
            if key in EXACT:
                assert row[key] == value, f"step {step}, {key}: {row[key]}, expected {value}"
            else:
                assert row[key] == pytest.approx(value, rel=1e-4, abs=1e-7), f"step {step}, {key}"


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    record: dict[str, Any] = {"forward": {p: forward(p) for p in ("bf16", "fp8")}, "curve": {}}
    for flow in ("bf16", "fp8"):
        with tempfile.TemporaryDirectory() as temporary:
            record["curve"][flow] = curve(flow, Path(temporary))
    FILE.write_text(json.dumps(record, indent=1) + "\n")
