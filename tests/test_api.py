"""The Python API of the README: what is generated has, bit for bit, the log-probs that training computes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import ARCH, tiny_config, tiny_run
from tolerances import assert_bitwise_equal

import jetrl
from jetrl import UserError, load_model, mismatch_metrics
from jetrl.api import (
    Policy,
    evaluate_checkpoint,
    evaluated_config,
    evaluation_config,
    load_for_parity,
    random_model,
)
from jetrl.chat.tokenizer import load_tokenizer
from jetrl.config import to_toml
from jetrl.huggingface import read as hf
from jetrl.model.transformer import Transformer
from jetrl.parallel.world import ALONE
from jetrl.parity.certificate import Workload
from jetrl.parity.model_under_test import subject_of
from jetrl.parity.ranks import certified
from jetrl.precision.recipe import build_recipe
from jetrl.rollout.rollout import Rollout
from jetrl.run import gather, setup

PROMPTS = ["12+34=", "7+8=", "99+1=", "12+34="]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = load_tokenizer("builtin:arithmetic")
    spec = hf.spec_from_hf(ARCH | {"vocab_size": len(tokenizer)})
    model = Transformer(spec, build_recipe("bf16", spec.num_layers)).init_random(4)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(6.0 if p.ndim == 2 else 1.0)  # a policy that prefers some tokens
    path = tmp_path_factory.mktemp("model") / "m"
    hf.save_model(path, spec, model.state_dict(), tokenizer=tokenizer)
    return path


@pytest.fixture(scope="module", params=["bf16", "fp8"])
def policy(request: pytest.FixtureRequest, folder: Path) -> Policy:
    return load_model(folder, precision=request.param)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_recorded_logprobs_are_those_of_the_training_forward(policy: Policy, temperature: float) -> None:
    completions = policy.generate(PROMPTS, max_tokens=12, temperature=temperature, seed=3)
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        start = policy.tokenizer.encode(prompt, add_special_tokens=False)
        learned = policy.logprobs(start + list(completion.tokens), temperature)[len(start) - 1 :]
        assert_bitwise_equal(torch.tensor(completion.logprobs), learned, prompt)
        assert type(completion.tokens) is type(completion.logprobs) is tuple, "Python's own, for == and JSON"
        assert {type(t) for t in completion.tokens} == {int} and {type(p) for p in completion.logprobs} == {float}
        assert json.loads(json.dumps(completion.logprobs)) == learned.tolist() and completion in {*completions}
        assert mismatch_metrics(learned, completion.logprobs)["parity/logprob_abs_diff_max"] == 0.0
        assert completion.text == policy.tokenizer.decode(list(completion.tokens)).replace(
            policy.tokenizer.eos_token or "", ""
        )


def test_truncated_sampling_records_the_full_distribution(policy: Policy) -> None:
    for options in ({"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.3}):
        (completion,) = policy.generate([[3, 4, 5]], max_tokens=10, **options)
        assert_bitwise_equal(torch.tensor(completion.logprobs), policy.logprobs([3, 4, 5, *completion.tokens])[2:])


def test_a_sample_depends_on_seed_and_place_alone(policy: Policy) -> None:
    together = policy.generate(PROMPTS, max_tokens=8, seed=1)
    assert policy.generate(PROMPTS[:2], max_tokens=8, seed=1) == together[:2]
    assert policy.generate(PROMPTS, max_tokens=8, seed=2) != together
    assert together[0].tokens != together[3].tokens, "two places share a random stream"
    greedy = policy.generate(PROMPTS, max_tokens=8, temperature=0.0)
    assert greedy[0].tokens == greedy[3].tokens


def test_fp8_rollout_has_a_gap(folder: Path) -> None:
    policy = load_model(folder, precision="fp8_rollout")
    (completion,) = policy.generate([[3, 4, 5]], max_tokens=10)
    learned = policy.logprobs([3, 4, 5, *completion.tokens])[2:]
    assert mismatch_metrics(learned, completion.logprobs)["parity/logprob_abs_diff_max"] > 1e-4


def test_an_fp8_cache_has_no_gap(folder: Path) -> None:
    policy = load_model(folder, kv_cache="fp8")
    (completion,) = policy.generate([[3, 4, 5]], max_tokens=10)
    learned = policy.logprobs([3, 4, 5, *completion.tokens])[2:]
    assert_bitwise_equal(torch.tensor(completion.logprobs), learned)
    plain = load_model(folder).logprobs([3, 4, 5, *completion.tokens])[2:]
    assert not torch.equal(plain, learned), "the cache's format has changed nothing"
    assert random_model("smollm2-135m", "fp8", "cpu", 1, kv_cache="fp8").recipe.kv_cache.block == (1, 64)
    with pytest.raises(UserError, match="quant.kv_cache: has no effect"):
        load_model(folder, precision="bf16", kv_cache="fp8")


def test_mistakes(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="fp4"):
        load_model(folder, precision="fp4")
    with pytest.raises(UserError, match="nowhere"):
        load_model(tmp_path / "nowhere")
    with pytest.raises(AttributeError, match="no attribute 'load_modell'"):
        jetrl.load_modell  # noqa: B018
    with pytest.raises(UserError, match=r"\b64\b|position"):
        load_model(folder).generate([[1] * 40], max_tokens=60)


def test_every_public_name_can_be_imported() -> None:
    for name in jetrl.__all__:
        assert getattr(jetrl, name) is not None


def test_a_random_model_of_a_published_shape_with_fewer_layers() -> None:
    model = random_model("smollm2-135m", "fp8", "cpu", layers=1)
    assert len(model.layers) == 1 and model.spec.num_layers == 1 and model.spec.hidden_size == 576
    assert model.layers[0].attn.qkv.quantized is not None and model.layers[0].attn.qkv.weight.std() > 0.01
    with pytest.raises(UserError, match=r"no shape 'smollm2-135' \(did you mean smollm2-135m\?\); known: "):
        random_model("smollm2-135", "fp8", "cpu")


# ---- evaluation of a folder -----------------------------------------------------------------------------------------


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> list[Rollout]:
    """The rollouts of all evaluations that follow."""
    seen: list[Rollout] = []
    real = gather.roll_out
    monkeypatch.setattr(gather, "roll_out", lambda *args: seen.append(real(*args)) or seen[-1])
    return seen


def recipe_at(path: Path, changes: dict[str, Any]) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(to_toml(tiny_config(path.parent, {"eval.temperature": 1.0} | changes)))
    return path


def texts(rollout: Rollout) -> list[str]:
    return [turn.text for group in rollout.groups for t in group.trajectories for turn in t.turns]


def test_an_evaluation_takes_the_architecture_from_the_folder(
    folder: Path, sampled: list[Rollout], tmp_path: Path
) -> None:
    """A recipe of another model gives what a recipe of this folder gives, whatever its [model] says."""
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    config = json.loads((other / "config.json").read_text())
    config |= {"rope_theta": 100.0, "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"}}
    (other / "config.json").write_text(json.dumps(config))
    by_path = recipe_at(tmp_path / "a" / "path.toml", {"model": {"path": str(other)}})
    by_arch = recipe_at(tmp_path / "b" / "arch.toml", {"model.arch.num_hidden_layers": 1})
    wanted, plain, found = (evaluate_checkpoint(*which, [])[2] for which in (
        (other, by_path), (folder, by_path), (other, by_arch)))
    assert found == wanted and texts(sampled[2]) == texts(sampled[0]) != texts(sampled[1]) and plain
    of_experts = recipe_at(tmp_path / "c" / "experts.toml", {"train.router_aux_loss_coef": 0.01})
    assert evaluate_checkpoint(other, of_experts, [])[2] == wanted  # what only training reads does not matter
    (other / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(UserError, match=r"other.config\.json: quantization_config.*already quantized"):
        evaluate_checkpoint(other, by_arch, [])


@pytest.mark.parametrize("override", [
    "model.arch.rope_theta=5.0", "model.arch={model_type='qwen3'}", "model.path=nowhere", "model.revision=main",
    "model.init_seed=3",
])
def test_an_override_of_another_model_is_refused_in_an_evaluation(folder: Path, tmp_path: Path, override: str) -> None:
    recipe = recipe_at(tmp_path / "tiny.toml", {})
    key = override.partition("=")[0]
    with pytest.raises(UserError, match=f"^{key} has no effect on an evaluation: {folder} is evaluated as its own"):
        evaluate_checkpoint(folder, recipe, [override])


def test_an_evaluation_takes_what_the_recipe_says_anyway(folder: Path, tmp_path: Path) -> None:
    recipe = recipe_at(tmp_path / "tiny.toml", {})
    plain = evaluation_config(folder, recipe, [])
    for override in ("model.revision=none", "model.init_seed=0", "model.path=none", "quant.kv_cache=bf16"):
        assert evaluation_config(folder, recipe, [override]) == plain


@pytest.mark.parametrize("precision", ["bf16", "fp8", "fp8_rollout"])
def test_a_model_is_loaded_with_the_cache_that_its_precision_has_anyway(folder: Path, precision: str) -> None:
    assert "KV cache bf16 (as asked)" in load_model(folder, precision, kv_cache="bf16").formats


def test_an_evaluation_takes_the_folders_tokenizer(folder: Path, tmp_path: Path) -> None:
    config, builtin = tiny_config(tmp_path), "builtin:arithmetic"

    def tokenizer_of(where: Path, changes: dict[str, Any], *overrides: str) -> str | None:
        model = evaluated_config(tiny_config(tmp_path, changes), where, overrides).model
        assert model.path == str(where) and model.arch is None
        return model.tokenizer

    own, bare = tmp_path / "own", tmp_path / "bare"
    for copy in (own, bare):
        shutil.copytree(folder, copy)
    (bare / "tokenizer.json").unlink()
    (own / "tokenizer.json").write_text((own / "tokenizer.json").read_text().replace('"^"', '"$"'))
    assert config.model.tokenizer == builtin == tokenizer_of(folder, {}), "the same: the built-in one stays"
    assert tokenizer_of(own, {}) is None and tokenizer_of(bare, {}) == builtin
    assert tokenizer_of(own, {}, f"model.tokenizer={builtin}") == builtin
    assert tokenizer_of(bare, {"model": {"path": str(own)}}) == str(own)
    assert tokenizer_of(own, {"model": {"path": str(folder)}}) is None


def test_an_evaluation_of_a_runs_checkpoint_is_the_runs_own(
    folder: Path, sampled: list[Rollout], tmp_path: Path
) -> None:
    for name, model in (("arch", {}), ("path", {"model": {"path": str(folder)}})):
        run_dir = tiny_run(tmp_path / name, model | {"train.steps": 2, "train.lr": 1e-2, "eval.temperature": 1.0})
        last = [rollout for rollout in sampled if len(rollout.groups[0].trajectories) == 1][-1]
        assert last is sampled[-1], "the run ends with an evaluation"
        evaluate_checkpoint(run_dir, None, [])
        assert sampled[-1] is not last and texts(sampled[-1]) == texts(last)


def test_logits_that_are_not_finite_end_in_a_message(folder: Path, tmp_path: Path) -> None:
    """Finite in the file, and infinite in BF16."""
    copy, spec = tmp_path / "copy", hf.spec_from_folder(folder)
    state = {name: value.float() for name, value in hf.load_state(folder, spec).items()}
    state["layers.1.mlp.gate_up.weight"][3, 5] = 3.4e38
    hf.save_model(copy, spec, state, load_tokenizer("builtin:arithmetic"), torch.float32)
    recipe, told = recipe_at(tmp_path / "r" / "tiny.toml", {}), f"^{copy}: the model gave logits that are not finite"
    with pytest.raises(UserError, match=told):
        evaluate_checkpoint(copy, recipe, [])
    with pytest.raises(UserError, match=told):
        certified(ALONE, lambda: subject_of(str(copy), "", "cpu"), lambda page: Workload(2, 8, 4, 7, page), "", print)


def test_a_model_far_larger_than_its_weights_is_not_built(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2048}))
    monkeypatch.setattr(setup, "Transformer", lambda *_, **__: pytest.fail("it was built"))
    for call in (load_model, lambda path: load_for_parity(str(path), "", "cpu")):
        with pytest.raises(UserError, match=f"^{copy} lacks model.layers.10.input_layernorm.weight, .* more for the"):
            call(copy)
    (copy / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    with pytest.raises(UserError, match=f"^{copy} holds model.layers.1.input_layernorm.weight, .* does not have"):
        load_model(copy)


@pytest.mark.parametrize(("key", "value", "told"), [
    ("rms_norm_eps", float("nan"), "rms_norm_eps = nan must be a number above 0"),
    ("num_hidden_layers", 2.0, "num_hidden_layers = 2.0 must be a whole number"),
    ("model_type", "mixtral", "model_type = 'mixtral' is not supported"),
])
def test_a_refused_config_json_is_named(folder: Path, tmp_path: Path, key: str, value: Any, told: str) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {key: value}))
    recipe = recipe_at(tmp_path / "r" / "tiny.toml", {})
    for call in (lambda: load_for_parity(str(copy), "", "cpu"), lambda: load_model(copy),
                 lambda: evaluate_checkpoint(copy, recipe, [])):
        with pytest.raises(UserError, match=f"^{copy / 'config.json'}: {told}"):
            call()


def test_a_policy_whose_masters_have_moved_is_refused_until_they_are_published(folder: Path) -> None:
    policy = load_model(folder, masters=True)
    before = policy.logprobs([1, 2, 3])
    with torch.no_grad():
        for p in policy.model.parameters():
            p.mul_(1.1)
    for use in (lambda: policy.logprobs([1, 2, 3]), lambda: policy.generate([[1, 2]], max_tokens=2)):
        with pytest.raises(UserError, match=r"model.publish\(\) after each optimizer step"):
            use()
    policy.model.publish()
    assert not torch.equal(policy.logprobs([1, 2, 3]), before)
