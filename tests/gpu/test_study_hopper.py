"""Exactness broken on purpose, with the Hopper kernels: another quantizer, another attention, in graphs too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import numbers, tiny_run

from jetrl.kernels import quantize
from jetrl.study.perturb import quantize_otherwise
from jetrl.study.plan import ENGINES

pytestmark = pytest.mark.gpu
# Heads of 64 and answers of several pages, so that there are full pages to reverse.
LONG = {
    "device": "cuda", "train.steps": 2, "rollout.max_response_length": 400, "model.arch.head_dim": 64,
    "model.arch.hidden_size": 256, "model.arch.max_position_embeddings": 512, "eval.eval_interval": 2,
}


@pytest.mark.parametrize("rows, cols", [(1, 576), (300, 192), (64, 1536)])
def test_the_other_quantizer_keeps_layout_and_is_off_by_one_code(rows: int, cols: int) -> None:
    x = torch.randn(rows, cols, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).to(torch.bfloat16)
    usual, other = quantize.quantize_act(x), quantize_otherwise(x, quantize.quantize_act(x), False)
    assert other.scale.stride() == usual.scale.stride() and other.codes.stride() == usual.codes.stride()
    ulps = (usual.scale.contiguous().view(torch.int32) - other.scale.contiguous().view(torch.int32)).abs().max()
    a, b = (q.codes.view(torch.uint8).to(torch.int32) for q in (usual, other))
    assert int(ulps) <= 1 and int((a - b).abs().max()) <= 1
    on_host = quantize_otherwise(x.cpu(), quantize.quantize_act(x.cpu()), False)
    assert torch.equal(on_host.codes.view(torch.uint8), other.codes.cpu().view(torch.uint8))


@pytest.mark.parametrize("ways", [(), *ENGINES])
def test_a_run_has_a_gap_of_the_size_of_kernel_noise_and_repeats(ways: tuple[str, ...], tmp_path: Path) -> None:
    changes = LONG | ({"rollout.engine": ENGINES[ways]} if ways else {})
    found = numbers(tiny_run(tmp_path, changes, "broken"))
    gaps = [row["parity/logprob_abs_diff_mean"] for row in found if "parity/logprob_abs_diff_mean" in row]
    print(f"\n{'+'.join(ways) or 'exact':24} mean |d| {gaps}")
    assert len(gaps) == 2 and found == numbers(tiny_run(tmp_path / "again", changes, "broken"))
    assert all(1e-7 < gap < 3e-2 for gap in gaps) if ways else gaps == [0.0, 0.0]
