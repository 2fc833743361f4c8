"""A folder that jetrl wrote says what its model was trained with (`huggingface.provenance`), and loading goes by it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny import ARCH
from tolerances import assert_bitwise_equal

from jetrl import UserError, __version__, load_model
from jetrl.chat.tokenizer import load_tokenizer
from jetrl.huggingface import export
from jetrl.huggingface import provenance as trained
from jetrl.huggingface import read as hf
from jetrl.model.transformer import Transformer
from jetrl.precision.recipe import Recipe, build_recipe

TOKENIZER = load_tokenizer("builtin:arithmetic")
SPEC = hf.spec_from_hf(ARCH | {"vocab_size": len(TOKENIZER)})
FP8_CACHE = build_recipe("fp8", 2, "pow2", "fp32", 1, 0, "fp8", 16, wgrad="tile")  # as a config has it


def written(path: Path, recipe: Recipe | None, base: dict[str, Any] | None = None) -> Path:
    state = Transformer(SPEC, build_recipe("bf16", 2)).init_random(4).state_dict()
    hf.save_model(path, SPEC, state, tokenizer=TOKENIZER, base_config=base, trained_with=recipe)
    return path


def test_what_is_written_by_hand() -> None:
    assert trained.record(FP8_CACHE) == {
        "version": __version__, "precision": "fp8", "kv_cache": "fp8", "weight_scale": "pow2",
        "activation_scale": "fp32", "num_first_layers_in_bf16": 1, "num_last_layers_in_bf16": 0,
    }
    assert trained.record(build_recipe("bf16", 2)) == {
        "version": __version__, "precision": "bf16", "kv_cache": "bf16",
    }
    assert trained.record(build_recipe("w8a16", 2, num_first_layers_in_bf16=1)) == {
        "version": __version__, "precision": "w8a16", "kv_cache": "bf16", "num_first_layers_in_bf16": 1,
        "num_last_layers_in_bf16": 0,
    }
    said = trained.trained_of({trained.KEY: trained.record(FP8_CACHE)}, "m")
    assert said is not None and said.precision == "fp8" and said.kv_cache == "fp8" and "version" not in said.quant
    assert trained.trained_of({}, "m") is None


def test_loading_goes_by_the_folder_and_what_is_asked_wins(tmp_path: Path) -> None:
    folder = written(tmp_path / "m", FP8_CACHE)
    own = load_model(folder)
    assert own.model.recipe == FP8_CACHE
    assert own.formats.count(f"as {folder / 'config.json'} says") == 2 and "KV cache fp8" in own.formats
    asked = load_model(folder, kv_cache="bf16")
    assert not asked.model.recipe.kv_cache.is_quantized and asked.model.recipe.weight_scale == "pow2"
    assert "KV cache bf16 (as asked)" in asked.formats and "precision fp8 (as " in asked.formats
    plain = load_model(folder, "bf16")
    assert plain.model.recipe == build_recipe("bf16", 2, wgrad="tile")
    assert plain.formats == "precision bf16 (as asked), KV cache bf16 (the default)"
    with pytest.raises(UserError, match="quant.kv_cache: has no effect"):
        load_model(folder, "bf16", kv_cache="fp8")
    silent = load_model(written(tmp_path / "n", None))
    assert silent.model.recipe == build_recipe("fp8", 2, wgrad="tile")
    assert silent.formats == "precision fp8 (the default), KV cache bf16 (the default)"
    ids = [3, 4, 5, 6]
    assert not bool((own.logprobs(ids) == silent.logprobs(ids)).all())
    given = load_model(tmp_path / "n", "fp8", kv_cache="fp8")
    assert_bitwise_equal(load_model(folder, "fp8", kv_cache="fp8").logprobs(ids), own.logprobs(ids))
    assert given.model.recipe.weight_scale == "fp32", "what nobody says has its default"


def test_w8a16_is_found_again_and_goes_to_other_precisions(tmp_path: Path) -> None:
    """What means nothing in the precision that is asked for is left out: neither refused nor taken over."""
    recipe = build_recipe("w8a16", 2, num_first_layers_in_bf16=1, kv_cache="fp8", head_dim=16, wgrad="tile")
    own = load_model(folder := written(tmp_path / "m", recipe))
    assert own.model.recipe == recipe and own.formats.count(f"as {folder / 'config.json'} says") == 2
    fp8 = load_model(folder, "fp8")
    assert fp8.model.recipe.num_first_layers_in_bf16 == 1 and fp8.model.recipe.kv_cache.is_quantized
    other = load_model(written(tmp_path / "n", FP8_CACHE), "w8a16")
    assert other.model.recipe == recipe, "weight_scale = pow2 is not said again"
    assert_bitwise_equal(other.logprobs([3, 4, 5]), own.logprobs([3, 4, 5]))


def test_transformers_loads_the_folder_and_its_config_keeps_the_key(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = written(tmp_path / "m", FP8_CACHE)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in load_model(folder).model.parameters())
    config = AutoConfig.from_pretrained(folder)
    assert getattr(config, trained.KEY)["kv_cache"] == "fp8"
    model.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())[trained.KEY] == trained.record(FP8_CACHE)
    TOKENIZER.save_pretrained(tmp_path / "again")
    assert load_model(tmp_path / "again").model.recipe == FP8_CACHE


def test_a_run_that_starts_from_such_a_folder_says_its_own(tmp_path: Path) -> None:
    first = written(tmp_path / "m", FP8_CACHE)
    base = hf.read_config(first)
    assert trained.KEY not in hf.hf_config(SPEC, base)
    second = written(tmp_path / "n", build_recipe("bf16", 2), base)
    assert hf.read_config(second)[trained.KEY] == trained.record(build_recipe("bf16", 2))


def test_an_export_says_what_its_source_said(tmp_path: Path) -> None:
    source = written(tmp_path / "m", FP8_CACHE)
    out = export.export(source, tmp_path / "out", fp8=False, trained_with=build_recipe("bf16", 2))
    assert hf.read_config(out)[trained.KEY] == trained.record(FP8_CACHE)
    silent = written(tmp_path / "n", None)
    assert trained.KEY not in hf.read_config(export.export(silent, tmp_path / "plain", fp8=False))
    out = export.export(silent, tmp_path / "of_run", fp8=False, trained_with=FP8_CACHE)
    assert hf.read_config(out)[trained.KEY] == trained.record(FP8_CACHE)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("fp8", "does not name a precision"), ({"kv_cache": "fp8"}, "does not name a precision"),
        ({"precision": "fp4"}, "jetrl_training.precision = 'fp4' is not one of bf16, fp8"),
        ({"precision": "fp8", "kv_cache": "int8"}, "jetrl_training.kv_cache = 'int8' is not one of bf16, fp8"),
        ({"precision": "fp8", "num_first_layers_in_bf16": -1}, "num_first_layers_in_bf16 = -1 is not a number"),
    ],
)
def test_values_that_jetrl_never_writes_are_refused(said: Any, message: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "m", None)
    config = json.loads((folder / "config.json").read_text()) | {trained.KEY: said}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=message) as caught:
        load_model(folder)
    assert str(folder / "config.json") in str(caught.value) and "remove the key" in str(caught.value)
