"""Log-probs of the tokens of prompts: one forward pass of training over packed prompts. Nothing is drawn, and no page
of the cache is read or written, so the bits are the learner's, whatever else the engine does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from jetrl.errors import OutOfMemory
from jetrl.kernels.attention.ops import varlen_plan
from jetrl.model.transformer import Transformer
from jetrl.types import ForwardBatch


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Of a prompt of n tokens: float32 [n - 1], of each but the first, given those before it. `top_tokens` int32 and
    `top_logprobs` float32 [n - 1, K]: the most probable ones at its place."""

    logprobs: np.ndarray
    top_tokens: np.ndarray
    top_logprobs: np.ndarray


@torch.no_grad()
def prompt_logprobs(model: Transformer, prompts: Sequence[np.ndarray], top: int = 0) -> list[PromptLogprobs]:
    """Log-probs at temperature 1 of prompts (each of at least one token), with the `top` most probable tokens of each
    place. OutOfMemory where the device has no room for the pass."""
    device, lengths = model.head_weight.device, tuple(len(prompt) for prompt in prompts)
    edges = np.cumsum([0, *lengths])
    tokens = torch.from_numpy(np.concatenate(prompts).astype(np.int64)).to(device)
    positions = torch.cat([torch.arange(n) for n in lengths]).to(device)
    plan = varlen_plan(torch.from_numpy(edges.astype(np.int32)).to(device), lengths, ())
    rows = np.concatenate([np.arange(a, b - 1) for a, b in zip(edges, edges[1:], strict=False)])
    try:
        index = torch.from_numpy(rows).to(device)
        hidden = model(ForwardBatch(tokens, positions, plan, "train"))[index]
        targets = tokens[index + 1]
        logprobs, _ = model.token_logprobs(hidden, targets, 1.0)
        ids = model.top_tokens(hidden, top) if top else targets.new_empty(len(targets), 0)
        values = model.several_logprobs(hidden, targets, logprobs, ids, 1.0) if top else logprobs.new_empty(ids.shape)
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(
            f"The GPU has no room for a forward pass over {len(tokens)} tokens of prompts. Send shorter ones, or start "
            "the server with a smaller KV cache."
        ) from error
    cuts = [n - 1 for n in lengths]
    parts = [part.cpu().split(cuts) for part in (logprobs, ids.to(torch.int32), values)]
    return [PromptLogprobs(*(one.numpy() for one in each)) for each in zip(*parts, strict=True)]
