"""Blocks from outside with states of their own, on a Hopper GPU: decode graphs, bursts, forks, preemption, turns."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from doors.hybrid import register, spec_of
from enlarged import enlarged
from hash_model import learners_logprobs

from jetrl.engine.engine import PagedEngine
from jetrl.engine.settings import EngineSettings
from jetrl.parity.certificate import Workload, certify
from jetrl.precision.recipe import build_recipe
from jetrl.types import Request, SamplingParams, WeightSet

pytestmark = pytest.mark.gpu


class NoText:
    eos_token_id = None

    def decode(self, token_ids: list[int]) -> str:
        return ""


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_completions_have_the_learners_log_probs(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The block of one state for a sequence, between layers of attention with heads of 64."""
    register(monkeypatch)
    spec = replace(spec_of("moving_average", 3), hidden_size=256, intermediate_size=512, head_dim=64, vocab_size=128)
    model = enlarged(spec, build_recipe(precision, 3)).to("cuda")
    model.publish()
    assert certify(model, Workload(4, 40, 12, 7, 16), "test", lambda text: None).ok
    asked = [
        Request(i, tuple(range(1, 6 + i // 5)), SamplingParams(6 + 3 * (i % 7), ignore_eos=True, seed=1))
        for i in range(30)
    ]

    def preempt(step: int, running: tuple[int, ...]) -> tuple[int, ...]:
        return running[step % 2 :: 3] if step % 6 == 5 else ()

    found = []
    for sizes, force in (({}, None), ({"max_num_seqs": 5}, None), ({"max_num_seqs": 7, "page_size": 16}, preempt)):
        settings = EngineSettings(**{"page_size": 128} | sizes)
        engine = PagedEngine(model, NoText(), "flow", settings)
        engine.load(WeightSet(1, "flow", {}))
        found.append(engine.generate(asked, force_preempt=force))
    assert found[0] == found[1] == found[2]
    for r, c in zip(asked, found[0], strict=True):
        with torch.device("cuda"):
            learner = learners_logprobs(model, [*r.tokens, *c.tokens.tolist()])
        assert learner[len(r.tokens) - 1 :] == c.logprobs.tolist()
