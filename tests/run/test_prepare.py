"""What is refused before weights are read: sizes of matrices that a GPU's kernels do not have."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny import tiny_config

from jetrl.errors import UserError
from jetrl.precision.recipe import recipe_of
from jetrl.run.prepare import check_experts, check_sizes
from jetrl.spec import SHAPES, ExpertSpec, ModelSpec

SPEC = replace(SHAPES["qwen3-0.6b"], num_layers=3)
ODD = replace(SPEC, intermediate_size=3004)
EXPERTS = ExpertSpec(count=4, per_token=2, intermediate_size=100, normalized=True)


def check(folder: Path, spec: ModelSpec, kernels: str = "hopper", **changes: Any) -> None:
    config = tiny_config(folder, changes).model_copy(update={"kernels": kernels})
    check_sizes(config, spec, recipe_of(config, spec))


@pytest.mark.parametrize("precision", ["bf16", "w8a16", "fp8_rollout"])
def test_bf16_needs_rows_of_16_bytes_on_a_gpu(precision: str, tmp_path: Path) -> None:
    check(tmp_path, SPEC, precision=precision)
    check(tmp_path, ODD, "reference", precision=precision)
    with pytest.raises(UserError) as error:
        check(tmp_path, ODD, precision=precision)
    assert str(error.value) == (
        f'precision = "{precision}" computes layers.0.mlp.down in BF16, over rows of 3004 values; the kernels of a GPU '
        'need a multiple of 8. Set device = "cpu", or use another model.'
    )
    experts = replace(SPEC, family="qwen3_moe", experts=EXPERTS)
    with pytest.raises(UserError, match="layers.0.mlp.down in BF16, over rows of 100 values"):
        check(tmp_path, experts, precision=precision)


def test_fp8_pads_all_but_layers_in_bf16_and_the_head(tmp_path: Path) -> None:
    check(tmp_path, ODD, precision="fp8")
    with pytest.raises(UserError, match="layers.2.mlp.down in BF16"):
        check(tmp_path, ODD, **{"precision": "fp8", "quant.num_last_layers_in_bf16": 1})
    with pytest.raises(UserError, match="lm_head in BF16, over rows of 1020 values"):
        check(tmp_path, replace(SPEC, hidden_size=1020), precision="fp8")


@pytest.mark.parametrize(("change", "named"), [
    ({"key_dim": 24}, "linear_key_head_dim = 24: "), ({"conv_width": 6}, "linear_conv_kernel_dim = 6: "),
    ({"key_dim": 256, "value_dim": 8}, "linear_key_head_dim = 256, linear_value_head_dim = 8: "),
])
def test_states_without_a_kernel_are_refused_on_a_gpu(
    change: dict[str, int], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hybrid = SHAPES["tiny-hybrid"]
    assert hybrid.delta is not None
    odd = replace(hybrid, delta=replace(hybrid.delta, **change))
    config = tiny_config(tmp_path)
    check_experts(config.model_copy(update={"kernels": "reference"}), odd)
    check_experts(config.model_copy(update={"kernels": "triton"}), hybrid)
    with pytest.raises(UserError) as error:
        check_experts(config.model_copy(update={"kernels": "triton"}), odd)
    assert str(error.value) == (
        f"{named}the kernels of a GPU have heads of 16, 32, 64, 128 and convolutions over up to 5 tokens. Set device = "
        '"cpu", or use another model.'
    )
