"""Requests that are suspended and go on under other weights, on a Hopper GPU: bursts, decode graphs, drafts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hash_model import learners_logprobs
from tiny import ARCH, numbers, tiny_run, weights_hash

from jetrl.engine.engine import PagedEngine
from jetrl.engine.settings import EngineSettings
from jetrl.engine.speculation.speculator import build_speculator
from jetrl.model.transformer import Transformer
from jetrl.precision.recipe import build_recipe
from jetrl.run.replay.checks import replay
from jetrl.spec import ModelSpec, RopeSpec
from jetrl.types import Completion, Request, SamplingParams, WeightSet

pytestmark = pytest.mark.gpu

SPEC = ModelSpec(
    family="qwen3", vocab_size=128, hidden_size=256, intermediate_size=512, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=64, rms_norm_eps=1e-6, rope=RopeSpec(10_000.0), max_position=512, tie_embeddings=True, qkv_bias=False,
    qk_norm=True,
)


def test_a_run_that_carries_answers_over_is_exact_and_repeats(tmp_path: Path) -> None:
    changes = {
        "device": "cuda", "model.arch": ARCH | {"hidden_size": 128, "head_dim": 128}, "quant.kv_cache": "fp8",
        "rollout.overcommit": 1.0, "rollout.group_size": 2, "rollout.max_response_length": 40,
        "rl.rollout_is": "token", "train.steps": 5, "eval.eval_interval": 0, "checkpoint.save_interval": 1,
    }
    first = tiny_run(tmp_path / "a", changes)
    second = tiny_run(tmp_path / "b", changes | {"rollout.speculate": "on"})
    rows = numbers(first)[1:]
    assert all(row.get("parity/logprob_abs_diff_max", 0.0) == 0.0 for row in rows)
    assert max(row["rollout/frac_stale_tokens"] for row in rows) > 0
    assert weights_hash(first, 5) == weights_hash(second, 5)
    assert replay(first, 5, "logprobs").same and replay(first, 5, "rollout").same


class NoText:
    eos_token_id = None

    def decode(self, token_ids: list[int]) -> str:
        return ""


@pytest.mark.parametrize("drafts", ["off", "on"])
@pytest.mark.parametrize(("precision", "cache"), [("bf16", "bf16"), ("fp8", "fp8")])
def test_log_probs_are_the_learners_of_their_version(precision: str, cache: str, drafts: str) -> None:
    model = Transformer(SPEC, build_recipe(precision, 2, kv_cache=cache, head_dim=64)).init_random(0).to("cuda")
    first = {name: p.detach().clone() for name, p in model.named_parameters()}

    def to(version: int) -> None:
        generator = torch.Generator("cuda").manual_seed(version)
        with torch.no_grad():
            for name, p in model.named_parameters():
                noise = torch.randn(p.shape, generator=generator, device="cuda")
                p.copy_(first[name] * (1 + 0.2 * version * noise))
        model.publish()

    asked = [Request(i, tuple(range(1, 6 + i // 4)), SamplingParams(90, seed=i, ignore_eos=True)) for i in range(12)]
    to(0)
    settings = EngineSettings(page_size=64, max_num_seqs=8)
    engine = PagedEngine(model, NoText(), "flow", settings, build_speculator(drafts, 3, 8))
    engine.load(WeightSet(0, "flow", {}))
    engine.add(asked)
    done: list[Completion] = []
    for version in (1, 2):
        while engine.has_work and engine._scheduler.num_drawn_tokens < 250:
            engine.step()
        held = engine.suspend()
        done += engine.collect()
        assert engine._began is None and engine._scheduler.allocator.num_used == 0
        to(version)
        engine.load(WeightSet(version, "flow", {}))
        engine.resume(held)
    while engine.has_work:
        engine.step()
    done += engine.collect()
    assert len(done) == 12 and max(len(c.spans) for c in done) == 3
    for version in range(3):
        to(version)
        for c in done:
            prompt = asked[c.request_id].tokens
            with torch.device("cuda"):
                by = learners_logprobs(model, [*prompt, *c.tokens.tolist()])[len(prompt) - 1 :]
            spans = [*(c.spans or ((0, c.weight_version),)), (len(c.tokens), -1)]
            for (a, v), (b, _) in zip(spans, spans[1:], strict=False):
                assert v != version or by[a:b] == c.logprobs[a:b].tolist()
