"""`jetrl serve` over an engine on a GPU: the client's tokens and log-probs are the learner's."""

from __future__ import annotations

import json
from pathlib import Path
from urllib import request

import numpy as np
import pytest
from serving import served, small_model

from jetrl import load_model
from jetrl.api import served_model
from jetrl.types import Request, SamplingParams

pytest.importorskip("starlette", reason="needs the extra serve")
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


def test_log_probs_of_a_client_are_the_learners(tmp_path: Path) -> None:
    folder = small_model(tmp_path / "tiny", hidden_size=128, intermediate_size=256, head_dim=64)
    body = {"prompt": ["one", "another"], "max_tokens": 40, "n": 4, "logprobs": 0, "return_token_ids": True}
    with served(folder, device="cuda") as server:
        asked = request.Request(
            f"{server.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with request.urlopen(asked, timeout=300) as answer:
            choices = json.load(answer)["choices"]
        policy = load_model(folder, "fp8", "cuda")
        for choice in choices:
            prompt, tokens = choice["prompt_token_ids"], choice["token_ids"]
            learner = policy.logprobs(prompt + tokens)[len(prompt) - 1 :].cpu().numpy()
            assert np.array(choice["logprobs"]["token_logprobs"]).astype(np.float32).tobytes() == learner.tobytes()


def test_an_agent_goes_on_in_a_copy_of_the_page_that_its_answer_had_begun(tmp_path: Path) -> None:
    """Two agents go on from one answer, which ends in the middle of a page of 128: the learner's log-probs, and no more
    rows than the new tokens and the one that was drawn last."""
    folder = small_model(tmp_path / "tiny", hidden_size=128, intermediate_size=256, head_dim=64)
    engine, about, _ = served_model(str(folder), "tiny", "fp8", "cuda", "", None, 0, 8, 4096)
    policy, prompt = load_model(folder, "fp8", "cuda"), tuple(range(1, 181))
    (first,) = engine.generate([Request(0, prompt, SamplingParams(50, ignore_eos=True))])
    assert engine.stats is not None and about.max_position > 300
    history = (*prompt, *first.tokens.tolist())
    asked = [Request(i, (*history, i, i, i), SamplingParams(30, ignore_eos=True)) for i in (1, 2)]
    for asks, found in zip(asked, engine.generate(asked), strict=True):
        learner = policy.logprobs([*asks.tokens, *found.tokens.tolist()])[len(asks.tokens) - 1 :]
        assert found.logprobs.tobytes() == learner.cpu().numpy().tobytes()
    assert engine.stats.computed_tokens == 2 * (4 + 29)
