"""The Python API of the README: what is generated has, bit for bit, the log-probs that training computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import ARCH
from tolerances import assert_bitwise_equal

import jetrl
from jetrl import UserError, load_model, mismatch_metrics
from jetrl.api import Policy, random_model
from jetrl.model import hf
from jetrl.model.transformer import Transformer
from jetrl.precision.recipe import build_recipe
from jetrl.tasks.tokenizer import load_tokenizer

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
    with pytest.raises(UserError, match="no shape 'smollm'"):
        random_model("smollm", "fp8", "cpu")
