"""The gap by depth on a GPU: decode kernels, graphs and pages of 128 over a conversation of some thousand tokens."""

from __future__ import annotations

import pytest

from jetrl.parity.depth import DepthWork, depths_of
from jetrl.parity.model_under_test import subject_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("precision", "kv_cache"), [("fp8", "fp8"), ("bf16", "bf16"), ("fp8", "bf16")])
def test_zero_at_every_depth(precision: str, kv_cache: str) -> None:
    (found,) = depths_of(
        subject_of("random:qwen3-0.6b:2", precision, "cuda", kv_cache), DepthWork(4096, 12), "", lambda text: None
    )
    assert found.bit_equal and sum(gaps.tokens for gaps in found.turns) > 500
