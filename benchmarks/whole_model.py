"""What benchmarks of whole models share: an engine and its requests, and an update with its batch.

The models are random ones of a published shape. `profile_step.py` lists their kernels.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from bench_update import FLOW, groups_of
from common import NoText

from jetrl.config import Config, load_config, resolve
from jetrl.config.shipped import find_recipe
from jetrl.engine.engine import PagedEngine
from jetrl.engine.settings import EngineSettings
from jetrl.engine.sharing import Merge
from jetrl.model.master import accumulate_in, masters_of
from jetrl.model.moe import routers_of
from jetrl.model.transformer import Transformer
from jetrl.run.fit.advice import on_gpu
from jetrl.spec import ModelSpec
from jetrl.train.optim import build_optimizer
from jetrl.train.packing import pack
from jetrl.train.passes import estimate
from jetrl.train.publish import publish
from jetrl.train.step import Learner, update
from jetrl.types import Request, SamplingParams, WeightSet

GIB = 2**30


def recipe_for(spec: ModelSpec) -> str:
    """The shipped recipe whose update a model of this shape has."""
    if spec.latent is not None:
        return "grpo_moonlight_16b_a3b"
    if spec.delta is not None:
        return "gsm8k_qwen3.5_9b"
    return "gsm8k_qwen3_8b" if spec.experts is None else "gsm8k_qwen3_30b_a3b"


def requests_of(
    spec: ModelSpec, sequences: int, prompt: int, new: int, group: int = 1, seed: int = 1
) -> list[Request]:
    """Random prompts, each for `group` sequences, which never stop early."""
    g, sampling = np.random.default_rng(seed), SamplingParams(new, ignore_eos=True)
    prompts = [tuple(g.integers(1, spec.vocab_size, prompt).tolist()) for _ in range(sequences // group)]
    return [Request(i, prompts[i // group], sampling) for i in range(sequences)]


def engine_of(model: Transformer, sequences: int, tokens: int, merge: Merge = "auto", group: int = 1) -> PagedEngine:
    """An engine with its weights loaded, for `sequences` of up to `tokens` tokens; `group` of them share a prompt."""
    on_cuda = model.cos.device.type == "cuda"
    settings = EngineSettings(
        page_size=128 if on_cuda else 16, share_beginnings=group > 1, max_num_seqs=sequences,
        max_tokens_per_step=8192, merge_prefix=merge, kv_cache_tokens=None if on_cuda else 16 * sequences * tokens,
    )
    engine = PagedEngine(model, NoText(), FLOW, settings)
    engine.load(WeightSet(1, FLOW, {}))
    return engine


def update_config(
    spec: ModelSpec, precision: str, device: str, length: int, micro: int, kernels: str = "auto", offload: bool = True
) -> Config:
    """The update of the shape's recipe with BF16 masters and moments, for sequences of `length` and micro-batches of
    `micro` tokens, without a reference. `offload`: the moments lie in host memory."""
    prompt = min(512, length // 2)
    config = load_config(find_recipe(recipe_for(spec)), [
        f"precision={precision}", *(["quant.kv_cache=bf16"] if precision == "fp8" else []),
        f"kernels={kernels}", "train.master_dtype=bfloat16", "train.grad_dtype=bfloat16",
        "train.optimizer_dtype=bfloat16", f"train.offload_optimizer={str(offload).lower()}", "rl.kl_coef=0",
        "train.reduction=fast", f"train.max_tokens_per_gpu={micro}", f"rollout.max_response_length={length - prompt}",
        f"task.max_prompt_length={prompt}",
    ])
    if device == "cuda":
        return on_gpu(config)
    return resolve(config.model_copy(update={"device": "cpu", "kernels": "auto"}), cuda_available=False)


def update_of(model: Transformer, config: Config, tokens: int, length: int) -> Callable[[], None]:
    """`train.step.update` and publishing, of `tokens` in sequences of `length`. Routers are frozen."""
    model.freeze(routers_of(model))
    accumulate_in(model, torch.bfloat16)
    learner = Learner(model, build_optimizer(masters_of(model), config.train))
    groups = groups_of(tokens, length, model.spec.vocab_size, min(512, length // 2))
    most = config.train.max_tokens_per_gpu
    batches = pack(groups, max_tokens_per_gpu=most, flow_digest=FLOW, weight_version=0)
    _, (batch,), _ = estimate(groups, batches, learner, None, config, True)

    def step() -> None:
        update(learner, [batch], config, 1)
        publish(model, 0, FLOW)

    return step
