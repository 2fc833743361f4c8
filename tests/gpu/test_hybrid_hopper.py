"""Hybrids with `kernels = "hopper"`: DeepGEMM, the delta rule in Triton, wide heads by portable attention."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import ARCH, numbers, tiny_run, weights_hash

from jetrl.kernels.attention.ops import varlen_plan
from jetrl.parity.certificate import Workload, certify
from jetrl.parity.model_under_test import subject_of

pytestmark = pytest.mark.gpu
FLOWS = (("bf16", ""), *product(("w8a16", "fp8"), ("bf16", "fp8")))  # precision, and format of the cache
LINEAR = {
    "model_type": "qwen3_5_text", "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 64,
}


@pytest.mark.parametrize("model", ["tiny-hybrid", "tiny-hybrid-moe", "qwen3.5-0.8b:4", "qwen3.5-9b:4"])
@pytest.mark.parametrize(("precision", "cache"), FLOWS, ids=str)
def test_certificates(model: str, precision: str, cache: str) -> None:
    """Alone = packed = chunks = decoding with preemption = graphs = drafts, over a hundred tokens and more."""
    subject = subject_of(f"random:{model}", precision, "cuda", cache, overrides=("kernels=hopper",))
    result = certify(subject.published(), Workload(8, 700, 140, 64, 128), model, lambda text: None)
    assert result.ok, [(link.link, link.first_difference) for link in result.links if not link.ok]


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("head_dim", [32, 256])
def test_runs_have_parity_zero_and_repeat(tmp_path: Path, precision: str, head_dim: int) -> None:
    arch = ARCH | LINEAR | {"hidden_size": 128, "head_dim": head_dim}
    settings: dict[str, Any] = {"device": "cuda", "kernels": "hopper", "model.arch": arch, "precision": precision}
    first, second = (tiny_run(tmp_path / name, settings) for name in ("a", "b"))
    rows = numbers(first)
    assert [row["parity/logprob_abs_diff_max"] for row in rows[1:]] == [0.0] * 4
    assert rows == numbers(second) and weights_hash(first, 4) == weights_hash(second, 4)


def test_wide_heads_have_the_portable_kernels_bits_forward_and_backward() -> None:
    from jetrl.kernels.attention import by_head, portable

    g = torch.Generator("cuda").manual_seed(1)
    q, grad = (torch.randn(200, 4, 256, generator=g, device="cuda").bfloat16() for _ in range(2))
    k, v = (torch.randn(200, 1, 256, generator=g, device="cuda").bfloat16() for _ in range(2))
    plan = varlen_plan(torch.tensor([0, 70, 200], dtype=torch.int32, device="cuda"), (70, 130))
    for module in (by_head, portable):
        assert torch.equal(
            module.attend_varlen(q, k, v, plan, 0.0625, False)[0], portable.attend(q, k, v, plan, 0, 0.0625)
        )
    ours, want = (m.attend_backward(grad, q, k, v, plan, 0.0625) for m in (by_head, portable))
    assert all(torch.equal(a, b) for a, b in zip(ours, want, strict=True))
