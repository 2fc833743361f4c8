"""Log-probs of prompts: the learner's bits, whatever they are packed with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from serving import small_model

from jetrl.api import load_model
from jetrl.serve.scoring import prompt_logprobs


def test_prompts_have_the_learners_log_probs_in_any_batch(tmp_path: Path) -> None:
    policy = load_model(small_model(tmp_path / "tiny"), "fp8", "cpu")
    prompts = [np.array(one) for one in ([5, 6, 7, 8, 9], [1], [7, 7], [200, 3, 5] * 20)]
    found = prompt_logprobs(policy.model, prompts, 3)
    for prompt, one in zip(prompts, found, strict=True):
        assert torch.equal(torch.from_numpy(one.logprobs), policy.logprobs(prompt.tolist()))
        alone = prompt_logprobs(policy.model, [prompt], 3)[0]
        assert np.array_equal(one.top_tokens, alone.top_tokens) and one.top_tokens.shape == (len(prompt) - 1, 3)
        assert np.array_equal(one.top_logprobs, alone.top_logprobs)
        assert (np.diff(one.top_logprobs, axis=1) <= 0).all()
        best = one.top_tokens[:, 0] == prompt[1:]
        assert np.array_equal(one.top_logprobs[best, 0], one.logprobs[best])
    assert prompt_logprobs(policy.model, prompts)[0].top_logprobs.shape == (4, 0)
