"""The section `[vllm]`: what only `rollout.engine = "vllm"` reads, and which other settings do not go with it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from jetrl.choices import CacheKind
from jetrl.config.base import Problem, Section
from jetrl.config.markers import Elsewhere, NoBits, NoEffectWhile

if TYPE_CHECKING:
    from jetrl.config.sections import Config

LOWEST_TEMPERATURE = 0.01  # vLLM samples at this one where a lower one (not 0) is asked for
HIGHEST_TEMPERATURE = 2.0  # vLLM refuses requests above it


class VLLMConfig(Section):
    """vLLM as the rollout's engine (docs/ENGINES.md)."""

    section: ClassVar[str] = "vllm"
    kv_cache: CacheKind = Field(
        default="bf16", description="vLLM's KV cache. fp8: one scale each for the queries, keys and values of a layer, "
        "measured again at every step. Training does not round keys and values.")
    kv_scale_tokens: Annotated[int, NoEffectWhile("vllm.kv_cache", ("bf16",))] = Field(
        default=8192, ge=1, description="How many tokens of the last rollout (prompts and answers) these scales are "
        "measured on.")
    partial_blocks: Literal["refuse", "bf16"] = Field(
        default="refuse", description="What to do about FP8 weights whose size is not a multiple of 128, which vLLM "
        "does not support. refuse: stop. bf16: vLLM computes these linears in BF16, from code * scale.")
    sleep: Annotated[bool, NoBits(), Elsewhere("TRL: vllm_enable_sleep_mode; verl: free_cache_engine")] = Field(
        default=True, description="Give vLLM's memory to training between rollouts; the weights are then sent again. "
        "No effect on a CPU.")
    enforce_eager: Annotated[bool, Elsewhere(same=("verl",))] = Field(
        default=False, description="No CUDA graphs and no torch.compile: starts faster, runs slower.")
    check_weights: Annotated[bool, NoBits()] = Field(
        default=False, description="For debugging, on a GPU: after each transfer, read all weights back from vLLM and "
        "compare their checksum with that of the published ones.")


def vllm_problems(config: Config) -> Iterator[Problem | str]:
    """What in a config does not go with its engine, as lines for `Section.problems`."""
    rollout = config.rollout
    for key in VLLMConfig.model_fields if ":" in rollout.engine else ():
        if getattr(config.vllm, key) != config.vllm.usual(key):
            why = f'has no effect while rollout.engine = "{rollout.engine}"; remove this key'
            yield Problem(f"vllm.{key}", why, ("rollout.engine",), void=True)
    if rollout.engine != "vllm":
        return
    for key, off in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
        if getattr(rollout, key) != off:
            yield (f"rollout.{key}: vLLM then gives log-probs of the truncated distribution, which the learner does "
                   f'not have; set {off:g}, or rollout.engine = "jetrl"')
    yield from _temperature_problems("rollout.temperature", rollout.temperature)
    if config.eval.temperature:  # 0: greedy, which vLLM knows as well
        yield from _temperature_problems("eval.temperature", config.eval.temperature)
    if config.quant.kv_cache == "fp8":
        yield ("quant.kv_cache: is how training rounds keys and values for jetrl's cache, and vLLM's has other scales; "
               "set vllm.kv_cache instead")


def _temperature_problems(key: str, temperature: float) -> Iterator[str]:
    if temperature < LOWEST_TEMPERATURE:
        yield (f"{key}: vLLM samples at {LOWEST_TEMPERATURE} or above, got {temperature}; raise it, or set "
               'rollout.engine = "jetrl"')
    if temperature > HIGHEST_TEMPERATURE:
        yield (f"{key}: vLLM samples at {HIGHEST_TEMPERATURE:g} or below, got {temperature}; lower it, or set "
               'rollout.engine = "jetrl"')
