"""Other last bits on purpose: the recipe, the flow's digest and the weights are equal, and the log-probs are not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import numbers, tiny_config, tiny_run

from jetrl.kernels.dispatch import backend_of, load_backend, served_by
from jetrl.kernels.quantize import ops as quantize
from jetrl.precision.formats import E4M3_MAX
from jetrl.run.setup import build
from jetrl.types import PagedPlan
from jetrl_study.perturb import OtherOps, pages_reversed, quantize_otherwise
from jetrl_study.plan import ENGINES


@pytest.mark.parametrize("pow2", [False, True])
@pytest.mark.parametrize("cols", [128, 200, 40])
def test_the_other_quantizer_is_off_by_one_code_at_most(cols: int, pow2: bool) -> None:
    x = torch.randn(64, cols, generator=torch.Generator().manual_seed(cols)).to(torch.bfloat16)
    usual = quantize.quantize_act(x, pow2)
    other = quantize_otherwise(x, quantize.quantize_act(x, pow2), pow2)
    assert (other.codes.shape, other.scale.shape) == (usual.codes.shape, usual.scale.shape)
    near = (usual.scale.view(torch.int32) - other.scale.view(torch.int32)).abs()
    assert int(near.max()) <= 1 or pow2  # last bits; a power of two may be the next one
    a, b = (q.codes.view(torch.uint8).to(torch.int32) for q in (usual, other))
    changed = (a != b).float().mean().item()
    if not pow2 or torch.equal(usual.scale, other.scale):
        assert int((a - b).abs().max()) == 1, "a code has its neighbour of the same sign"
    assert 0 < changed < 0.2
    groups = torch.arange(cols) // 128
    errors = [(q.codes.float() * q.scale[:, groups] - x.float()).abs() / q.scale[:, groups] for q in (usual, other)]
    assert all(error.max() <= E4M3_MAX / 28 + 1e-3 for error in errors), "both round to the nearest"  # half of 32


def test_full_pages_are_read_from_the_last_to_the_first() -> None:
    table = torch.tensor([[5, 6, 7, 8], [1, 2, 3, 0], [9, 0, 0, 0], [4, 0, 0, 0]], dtype=torch.int32)
    lengths = torch.tensor([13, 12, 3, 0], dtype=torch.int32)  # of pages of four; the last row is padding
    plan = PagedPlan(None, torch.arange(5, dtype=torch.int32), (1,) * 4, lengths, (4, 3, 1, 0), table, torch.arange(4))
    assert pages_reversed(plan, 4).block_table.tolist() == [[7, 6, 5, 8], [2, 1, 3, 0], [9, 0, 0, 0], [4, 0, 0, 0]]


def test_ops_are_other_ones_only_within_the_context() -> None:
    x = torch.zeros(1)
    base, other = load_backend("reference"), OtherOps(load_backend("reference"), ("quantizer",))
    with served_by(x.device, other):
        assert backend_of(x) is other
        with pytest.raises(RuntimeError), served_by(x.device, "inner"):
            raise RuntimeError
        assert backend_of(x) is other
    assert backend_of(x) is base and other.rope is base.rope


@pytest.mark.parametrize("ways", ENGINES)
def test_a_run_has_a_gap_of_the_size_of_kernel_noise_and_repeats(ways: tuple[str, ...], tmp_path: Path) -> None:
    steps = {"train.steps": 2}
    changes = {**steps, "rollout.engine": ENGINES[ways]}
    found = numbers(tiny_run(tmp_path, changes, "broken"))
    for row in found[1:]:
        assert 1e-7 < row["parity/logprob_abs_diff_mean"] < 2e-2 and row["parity/frac_tokens_different"] > 0.5
    assert found == numbers(tiny_run(tmp_path / "again", changes, "broken"))
    exact = numbers(tiny_run(tmp_path / "exact", steps, "exact"))
    assert all(row["parity/logprob_abs_diff_max"] == 0 for row in exact[1:])
    assert exact[1]["reward/mean"] != 0


def test_the_flow_is_the_same_and_the_session_says_that_bits_are_not_kept(tmp_path: Path) -> None:
    exact = build(tiny_config(tmp_path))
    broken = build(tiny_config(tmp_path, {"rollout.engine": ENGINES["attention", "quantizer"]}))
    assert broken.flow_digest == exact.flow_digest
    assert exact.unified and not broken.unified and not broken.engine.keeps_bits
    assert "broken on purpose" in broken.engine.about and "attention and quantizer" in broken.engine.about
