"""Exactness broken on purpose, with the Hopper kernels: another quantizer, another attention, in graphs too."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny import numbers, tiny_run

from jetrl.kernels.attention.ops import attend_cached
from jetrl.kernels.quantize import ops as quantize
from jetrl.types import LayerCache, PagedPlan
from jetrl_study.perturb import pages_reversed, quantize_otherwise
from jetrl_study.plan import ENGINES

pytestmark = pytest.mark.gpu
# Heads of 64, as SmolLM2 has.
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


def test_reversed_pages_change_last_bits_and_nothing_else() -> None:
    draw = torch.Generator("cuda").manual_seed(2)
    keys, values = (torch.randn(8, 128, 3, 64, device="cuda", generator=draw).to(torch.bfloat16) for _ in range(2))
    q = torch.randn(2, 9, 64, device="cuda", generator=draw).to(torch.bfloat16)
    layer = LayerCache(keys, values, None)
    lengths = torch.tensor([700, 90], dtype=torch.int32, device="cuda")
    table = torch.tensor([[3, 1, 4, 0, 5, 7], [2, 0, 0, 0, 0, 0]], dtype=torch.int32, device="cuda")
    starts = torch.arange(3, dtype=torch.int32, device="cuda")
    cache = SimpleNamespace(layer=lambda index: layer, page_size=128)
    plan = PagedPlan(cache, starts, (1, 1), lengths, (6, 1), table, torch.arange(2, device="cuda"))
    usual, other = (attend_cached(q, p, 0, 0.125) for p in (plan, pages_reversed(plan, 128)))
    assert torch.equal(usual[1], other[1]) and not torch.equal(usual[0], other[0])
    torch.testing.assert_close(usual, other, atol=4e-3, rtol=2e-2)
