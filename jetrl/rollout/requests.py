"""Requests of a step or an evaluation, and what their completions say about lengths and speed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jetrl.config import Config
from jetrl.types import Group, Prompt, Request, SamplingParams

_STEP_STRIDE = 1 << 24  # request ids of a step: step * stride + number; evaluations use step 0 and steps are 1-based


def train_requests(prompts: Sequence[Prompt], config: Config, step: int) -> list[Request]:
    """`group_size` requests a prompt, prompt by prompt; ids name the random streams and never repeat in a run."""
    r = config.rollout
    sampling = SamplingParams(
        r.max_response_length, r.temperature, r.top_p, r.top_k, r.min_p, tuple(r.stop), seed=config.seed
    )
    return _requests(prompts, r.group_size, sampling, step * _STEP_STRIDE)


def eval_requests(prompts: Sequence[Prompt], config: Config) -> list[Request]:
    """`eval.num_samples` requests a held-out prompt; the same streams at every evaluation."""
    length = config.eval.max_response_length or config.rollout.max_response_length
    sampling = SamplingParams(length, config.eval.temperature, stop=tuple(config.rollout.stop), seed=config.seed)
    return _requests(prompts, config.eval.num_samples, sampling, 0)


def _requests(prompts: Sequence[Prompt], count: int, sampling: SamplingParams, first_id: int) -> list[Request]:
    assert len(prompts) * count <= _STEP_STRIDE, "more requests in a step than request ids"
    return [Request(first_id + i * count + j, p.tokens, sampling) for i, p in enumerate(prompts) for j in range(count)]


def gather(prompts: Sequence[Prompt], completions: Sequence[Any], count: int) -> list[Group]:
    """Completions in request order, back into groups of `count` a prompt."""
    assert len(completions) == len(prompts) * count
    return [Group(p, tuple(completions[i * count : (i + 1) * count])) for i, p in enumerate(prompts)]


def completion_stats(groups: Sequence[Group], seconds: float) -> dict[str, float]:
    """Response lengths, share cut off, and generated tokens a second of rollout."""
    lengths = [len(c.tokens) for g in groups for c in g.completions]
    truncated = sum(c.finish_reason == "length" for g in groups for c in g.completions)
    return {
        "response_length/mean": sum(lengths) / len(lengths),
        "response_length/max": float(max(lengths)),
        "response_length/frac_truncated": truncated / len(lengths),
        "perf/tokens_per_s_per_gpu": sum(lengths) / max(seconds, 1e-9),
    }
