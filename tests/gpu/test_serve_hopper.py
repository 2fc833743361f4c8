"""`jetrl serve` over an engine on a GPU: the client's tokens and log-probs are the learner's."""

from __future__ import annotations

import json
from pathlib import Path
from urllib import request

import numpy as np
import pytest
from serving import served, small_model

from jetrl import load_model

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
