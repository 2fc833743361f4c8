"""Recipes: which linear is FP8 on which side, the formats of each GEMM, and what is refused."""

from __future__ import annotations

import itertools

import pytest

from jetrl.errors import UserError
from jetrl.precision.formats import BF16, FP32, act_1x128, act_128x128, kv_head, weight_128x128, wgrad_128x1
from jetrl.precision.recipe import build_recipe

ROLES = ("qkv", "o", "gate_up", "down")


@pytest.mark.parametrize(
    ("precision", "train", "rollout"), [("bf16", False, False), ("fp8", True, True), ("fp8_rollout", False, True),
    ("w8a16", False, False)]
)
def test_sides(precision: str, train: bool, rollout: bool) -> None:
    recipe = build_recipe(precision, num_layers=3)
    for layer, role in itertools.product(range(3), ROLES):
        assert (recipe.linear(layer, role, "train") is not None) == train
        assert (recipe.linear(layer, role, "rollout") is not None) == rollout


def test_formats_of_the_three_gemms() -> None:
    linear = build_recipe("fp8", 1, weight_scale="pow2", activation_scale="fp32").linear(0, "qkv", "train")
    assert linear is not None
    assert linear.fprop == (act_1x128("fp32"), weight_128x128("pow2"))
    assert linear.dgrad == (act_1x128("fp32"), weight_128x128("pow2"))
    assert linear.wgrad == (wgrad_128x1("fp32"), wgrad_128x1("fp32"))
    assert linear.saved_activation == linear.wgrad.right
    assert (linear.out, linear.grad) == (BF16, BF16)
    other = build_recipe("fp8", 1, weight_scale="fp32", activation_scale="pow2").linear(0, "down", "rollout")
    assert other is not None
    assert other.fprop == (act_1x128("pow2"), weight_128x128("fp32"))
    assert other.wgrad == (wgrad_128x1("pow2"), wgrad_128x1("pow2"))


def test_w8a16_has_codes_of_weights_alone() -> None:
    recipe = build_recipe("w8a16", 3, num_first_layers_in_bf16=1)
    assert [recipe.weight_only(layer) for layer in range(3)] == [None, weight_128x128("pow2"), weight_128x128("pow2")]
    assert recipe.pow2_weights and not recipe.quantizes_activations
    for precision, pow2 in (("bf16", False), ("fp8", False), ("fp8_rollout", False)):
        other = build_recipe(precision, 3)
        assert other.weight_only(1) is None and other.pow2_weights == pow2
        assert other.quantizes_activations == (precision != "bf16")
    assert build_recipe("fp8", 1, "pow2").pow2_weights


def test_wgrad_by_tiles() -> None:
    linear = build_recipe("fp8", 1, activation_scale="pow2", wgrad="tile").linear(0, "qkv", "train")
    rows = build_recipe("fp8", 1, activation_scale="pow2").linear(0, "qkv", "train")
    assert linear is not None and rows is not None
    assert linear.wgrad == (wgrad_128x1("pow2"), act_128x128("pow2")) and linear.saved_activation == linear.wgrad.right
    assert (linear.weight_grad, rows.weight_grad) == (BF16, FP32)
    assert linear.wgrad_tiles and not rows.wgrad_tiles and linear.with_row_wgrad() == rows
    assert (linear.fprop, linear.dgrad) == (rows.fprop, rows.dgrad)
    with pytest.raises(UserError, match="quant.wgrad = 'block' is not known; use one of 'row', 'tile'"):
        build_recipe("fp8", 1, wgrad="block")
    kept = build_recipe("fp8", 1, wgrad="tile", saved_gate_up="fp8").linear(0, "gate_up", "train")
    assert kept is not None and kept.saved_out == act_1x128("fp32") and linear.saved_out == BF16
    assert kept.with_row_wgrad().saved_out == BF16
    with pytest.raises(UserError, match="quant.saved_gate_up = 'fp8' has no effect with quant.wgrad = 'row'"):
        build_recipe("fp8", 1, saved_gate_up="fp8")


@pytest.mark.parametrize("precision", ["fp8", "fp8_rollout"])
@pytest.mark.parametrize(("first", "last"), [(0, 0), (1, 0), (0, 2), (2, 1), (3, 2)])
def test_first_and_last_layers_stay_bf16_on_both_sides(precision: str, first: int, last: int) -> None:
    recipe = build_recipe(precision, 5, num_first_layers_in_bf16=first, num_last_layers_in_bf16=last)
    quantized = [i for i in range(5) if recipe.linear(i, "o", "rollout") is not None]
    assert quantized == list(range(first, 5 - last))
    trained = [i for i in range(5) if recipe.linear(i, "o", "train") is not None]
    assert trained == (quantized if precision == "fp8" else [])


def test_too_many_bf16_layers_names_the_numbers() -> None:
    with pytest.raises(UserError) as error:
        build_recipe("fp8", 4, num_first_layers_in_bf16=3, num_last_layers_in_bf16=2)
    text = str(error.value)
    assert "num_first_layers_in_bf16 = 3" in text and "num_last_layers_in_bf16 = 2" in text
    assert "5 layers" in text and "the model has 4" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"precision": "fp4"}, "precision = 'fp4'"),
        ({"weight_scale": "ue8m0"}, "quant.weight_scale = 'ue8m0'"),
        ({"activation_scale": "bf16"}, "quant.activation_scale = 'bf16'"),
        ({"kv_cache": "e5m2"}, "quant.kv_cache = 'e5m2'"),
        ({"num_first_layers_in_bf16": -1}, "quant.num_first_layers_in_bf16 = -1"),
        ({"num_last_layers_in_bf16": -2}, "quant.num_last_layers_in_bf16 = -2"),
    ],
)
def test_wrong_values_are_named(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        build_recipe(**({"precision": "fp8", "num_layers": 4} | arguments))  # type: ignore[arg-type]


def test_kv_cache() -> None:
    assert build_recipe("fp8", 2).kv_cache == build_recipe("fp8", 2, kv_cache="bf16", head_dim=64).kv_cache == BF16
    for precision in ("fp8", "fp8_rollout"):
        recipe = build_recipe(precision, 2, kv_cache="fp8", head_dim=64)
        assert recipe.kv_cache == kv_head(64)
    with pytest.raises(UserError, match=r"quant.kv_cache = 'fp8' has no effect with precision = 'bf16'"):
        build_recipe("bf16", 2, kv_cache="fp8", head_dim=64)
    with pytest.raises(AssertionError, match="head size"):
        build_recipe("fp8", 2, kv_cache="fp8")


def test_layer_and_side_are_checked() -> None:
    recipe = build_recipe("fp8", 2)
    for arguments in ((2, "o", "train"), (-1, "o", "train"), (0, "o", "eval")):
        with pytest.raises(AssertionError):
            recipe.linear(*arguments)  # type: ignore[arg-type]
