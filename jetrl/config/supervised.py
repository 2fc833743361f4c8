"""What of a recipe has no effect with `method = "sft"` (docs/SFT.md)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from jetrl.config.base import Problem, Section

if TYPE_CHECKING:
    from jetrl.config.sections import Config

SECTIONS = ("rollout", "vllm", "environment", "rl", "teacher", "sft")
KEYS = (
    "task.reward", "task.reward_weights", "task.reward_calls", "task.max_prompt_length", "train.share_prompts",
    "train.compare_routing", "eval.temperature", "eval.num_samples", "eval.max_response_length", "eval.pass_reward",
    "eval.num_samples_kept", "checkpoint.replay_steps",
)


def of_rl_alone(config: Config) -> Iterator[str]:
    """The keys, in full, that only `method = "rl"` reads."""
    yield from (f"{name}.{key}" for name in SECTIONS for key in type(getattr(config, name)).model_fields)
    yield from KEYS


def supervised_problems(config: Config) -> Iterator[Problem]:
    """A key that has no effect with `method = "sft"`, and another value than it would have if nobody gave it."""
    if not config.supervised:
        return
    for full in of_rl_alone(config):
        name, _, key = full.partition(".")
        section: Section = getattr(config, name)
        if getattr(section, key) != section.usual(key):
            text = 'has no effect while method = "sft"; change that, or remove this key'
            yield Problem(full, text, ("method",), void=True)
