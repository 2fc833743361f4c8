"""`jetrl serve --nproc 2`: two GPUs give equal answers, and each log-prob is the learner's.

`make test-gpu2`; without GPUs: `JETRL_TEST_RANKS=cpu`.
"""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from urllib import request

import numpy as np
import pytest
from serving import small_model

from jetrl import load_model
from jetrl.api import served_model
from jetrl.serve.address import FrontSettings, listen
from jetrl.serve.workers import require_gpus, running_workers, start_of
from jetrl.types import Request, SamplingParams

pytest.importorskip("starlette", reason="needs the extra serve")
pytestmark = [pytest.mark.gpu2, pytest.mark.timeout(600)]
DEVICE = os.environ.get("JETRL_TEST_RANKS", "cuda")


def test_both_gpus_give_the_learners_log_probs_and_equal_answers(tmp_path: Path) -> None:
    from jetrl.serve.server import front_process

    folder = small_model(tmp_path / "tiny", hidden_size=128, intermediate_size=256, head_dim=64)
    build = partial(served_model, str(folder), "tiny", "fp8", DEVICE, "", None, 0, 8, 8192)
    body = {"prompt": "one", "max_tokens": 40, "seed": 3, "logprobs": 0, "return_token_ids": True}

    def ask(url: str, session: int) -> Any:
        asked = request.Request(
            f"{url}/v1/completions", json.dumps(body | {"n": 1 + session % 3}).encode(),
            {"content-type": "application/json", "x-session-id": str(session)},
        )
        with request.urlopen(asked, timeout=300) as answer:
            return json.load(answer)["choices"]

    with running_workers(build, 2, require_gpus(2, DEVICE)) as workers:
        about, _ = start_of(workers)
        fronts = [worker.front for worker in workers]
        with front_process(listen("127.0.0.1", 0), fronts, about, FrontSettings()) as (url, _):
            try:
                with ThreadPoolExecutor(12) as pool:
                    found = list(pool.map(partial(ask, url), range(12)))
                with request.urlopen(f"{url}/metrics", timeout=60) as answer:
                    text = answer.read().decode()
            finally:
                for worker in workers:
                    worker.line.close()
    drawn = [line for line in text.splitlines() if line.startswith("jetrl_worker_generated_tokens_total{")]
    assert len(drawn) == 2 and not any(line.endswith(" 0") for line in drawn), text
    policy = load_model(folder, "fp8", DEVICE)
    for choice in (choice for choices in found for choice in choices):
        prompt, tokens = choice["prompt_token_ids"], choice["token_ids"]
        learner = policy.logprobs(prompt + tokens)[len(prompt) - 1 :].cpu().numpy()
        assert np.array(choice["logprobs"]["token_logprobs"]).astype(np.float32).tobytes() == learner.tobytes()
        seed, stream = choice["jetrl"]["stream"]
        (own,) = policy.engine.generate([Request(stream, tuple(prompt), SamplingParams(40, seed=seed))])
        assert own.tokens.tolist() == tokens
