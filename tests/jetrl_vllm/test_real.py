"""rollout.engine = "vllm" with the real vLLM on a CPU, in BF16, where it is installed (docs/ENGINES.md says how)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
import transformers
import vllm_cases

from jetrl.config.vllm import HIGHEST_TEMPERATURE, LOWEST_TEMPERATURE
from jetrl.vllm.start import CPU_HEADS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM (docs/ENGINES.md)"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU: tests/gpu/test_vllm_hopper.py"),
]
ARCH: dict[str, object] = {"head_dim": 32}  # vLLM's attention on a CPU takes no smaller heads


def test_a_run_samples_with_the_published_weights(tmp_path: Path) -> None:
    """vLLM's log-probs are the learner's up to BF16's rounding, in each step: so it holds that step's weights. (With
    the weights of the start, the tied lm_head's alone even, it is off by 0.5 and more.)"""
    changes = {"precision": "bf16", "train.steps": 3, "rollout.stop": ["7"], "rl.rollout_is": "token"}
    rows, samples = vllm_cases.run(tmp_path, changes, ARCH)
    assert len(rows) == 4 and all(0 < row["parity/logprob_abs_diff_max"] < 0.02 for row in rows[1:])
    assert all(0.99 < row["correction/effective_sample_size"] <= 1 for row in rows[1:])
    assert all(row["perf/vllm_sync_s"] > 0 for row in rows)
    texts = [sample["completion"] for sample in samples]
    assert any(text.endswith("7") for text in texts) and not any("7" in text[:-1] for text in texts)


def test_temperatures_outside_the_limits_of_the_config_are_outside_vllms() -> None:
    code = (
        "import json; from vllm import SamplingParams\n"
        "def taken(value):\n"
        "    try:\n        return SamplingParams(temperature=value).temperature\n"
        "    except Exception as error:\n        return str(error)\n"
        "print('FOUND ' + json.dumps([taken(t) for t in (0.005, 0.01, 2.0, 2.01)]))"
    )
    lower, lowest, highest, refused = vllm_cases.found(code)
    assert (lower, lowest, highest) == (LOWEST_TEMPERATURE, LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE)
    assert "must be in [0, 2]" in refused


def test_the_head_sizes_on_a_cpu_are_vllms() -> None:
    code = (
        "import json; from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend as cpu\n"
        "print('FOUND ' + json.dumps(cpu.get_supported_head_sizes()))"
    )
    assert tuple(vllm_cases.found(code)) == CPU_HEADS


@pytest.mark.parametrize(("tokens", "starts"), [(255, False), (256, True)])
def test_the_smallest_cache(tmp_path: Path, tokens: int, starts: bool) -> None:
    """Of a sequence of 26 tokens: a page of 128, and one that vLLM keeps for itself."""
    changes = {"precision": "bf16", "train.steps": 1, "rollout.kv_cache_tokens": tokens}
    if starts:
        vllm_cases.run(tmp_path, changes, ARCH)
    else:
        with pytest.raises(AssertionError, match="Set rollout.kv_cache_tokens to 256 or more, or remove it"):
            vllm_cases.run(tmp_path, changes, ARCH)


def test_conversations(tmp_path: Path) -> None:
    rows, _ = vllm_cases.run(tmp_path, {"precision": "bf16"} | vllm_cases.talking(tmp_path), ARCH)
    assert all(0 < row["parity/logprob_abs_diff_max"] < 0.02 for row in rows[1:])
    assert all(row["environment/turns_mean"] == 3.0 for row in rows[1:])


@pytest.mark.parametrize("tied", [False, True])
def test_an_exported_folder_says_the_same_in_vllm_and_transformers(tmp_path: Path, tied: bool) -> None:
    """Greedy tokens in BF16; where they part, the logits are as close as BF16's rounding."""
    share, lost, error = vllm_cases.greedy_in_both(vllm_cases.exported(tmp_path, fp8=False, tied=tied), "cpu")
    assert share > 0.9 and lost < 2 * error, (share, lost, error)


def test_a_folder_of_adapters_says_the_same_in_vllm_and_transformers(tmp_path: Path) -> None:
    """vLLM serves it beside the base, as `jetrl export` leaves it. The base alone says something else."""
    base = vllm_cases.exported(tmp_path, fp8=False)
    adapters = vllm_cases.adapters_over(base, tmp_path / "adapters")
    share, lost, error = vllm_cases.greedy_in_both(base, "cpu", adapters)
    assert share > 0.85 and lost < 2 * error, (share, lost, error)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    tokens = torch.tensor([vllm_cases.PROMPTS[1]])
    with torch.no_grad():
        alone = model(tokens).logits
        vllm_cases.add_adapters(model, adapters)
        assert float((model(tokens).logits - alone).abs().max()) > 4 * error
