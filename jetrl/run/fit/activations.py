"""What forward and backward pass keep and make beyond the weights, predicted from a config and a shape (`memory.py`).

Each block says what is its own (`precision.blocks.block.Block`: `saved_bytes`, `passing_bytes`); here it is added up,
with the residual stream, the lm_head and the logits. The legend of sizes is that of `memory.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from jetrl.config import Config
from jetrl.kernels.logprob.ops import FORWARD_ELEMENTS, KEPT_BYTES, LOGIT_ELEMENTS
from jetrl.kernels.logprob.truncation import MAX_ELEMENTS
from jetrl.precision.blocks.block import Block, TrainingPass
from jetrl.precision.blocks.layouts import blocks_of
from jetrl.precision.recipe import Recipe
from jetrl.spec import ModelSpec

TRUNCATING = 24  # bytes for each logit in which kept tokens are found: divided, weights in float64, flags, sorting

def asked(of: TrainingPass) -> Iterator[tuple[Block, TrainingPass]]:
    """The blocks of a layer, each with the pass as it meets it."""
    for number, block in enumerate(blocks_of(of.spec, of.layer)):
        yield block, replace(of, has_stream=of.layer > 0 or number > 0, block=block)


@lru_cache(maxsize=256)
def saved_of_layer(of: TrainingPass) -> float:
    """Bytes a token that the forward pass of a layer keeps for the backward pass: of each block the residual stream
    (BF16), and what it keeps itself."""
    return sum(2 * of.spec.hidden_size + block.saved_bytes(own) for block, own in asked(of))


def layers(config: Config, spec: ModelSpec, recipe: Recipe, tokens: int) -> list[TrainingPass]:
    """The pass of a micro-batch of so many tokens, layer by layer."""
    train = config.train
    return [
        TrainingPass(
            spec, recipe, layer, tokens, train.lean_backward, train.activation_checkpointing,
            train.grad_dtype == "bfloat16", _repeated(config),
        )
        for layer in range(spec.num_layers)
    ]


def _repeated(config: Config) -> float:
    """`TrainingPass.repeated` of prompts and answers of full length."""
    if not config.train.share_prompts:
        return 1.0
    prompt, answer, group = config.task.max_prompt_length, config.rollout.max_response_length, config.rollout.group_size
    return (prompt + group * (prompt + answer)) / (prompt + group * answer)


def activations(config: Config, spec: ModelSpec, recipe: Recipe, tokens: int) -> int:
    """What is kept of all layers at the end of the forward pass; with checkpointing two rows of each layer."""
    ends = 2 * 5 * spec.hidden_size  # the last norm, the rows that carry loss, and their gradient
    if config.train.activation_checkpointing:
        return tokens * (4 * spec.hidden_size * spec.num_layers + ends)
    return int(tokens * (ends + sum(saved_of_layer(of) for of in layers(config, spec, recipe, tokens))))


def passing(config: Config, spec: ModelSpec, recipe: Recipe, tokens: int) -> int:
    """The most that lm_head and backward pass make and free: chunks of logits, or one layer's gradients.

    A chunk is FP32 logits and, in the backward pass, their BF16 gradient. Without an entropy gradient the softmax's
    residuals wait for the backward pass, which makes logits again for the rest only. Gradients in BF16 are summed in
    FP32 by matrix: the lm_head's is the largest.
    """
    v, every = spec.vocab_size, layers(config, spec, recipe, tokens)
    rows, forward = (max(128, n // v // 128 * 128) for n in (LOGIT_ELEMENTS, FORWARD_ELEMENTS))
    kept = min(KEPT_BYTES // (2 * v), tokens) if not config.rl.entropy_coef else 0
    chunk = 4 * v * min(forward, tokens) if kept == tokens else 6 * v * min(rows, tokens)
    summed = config.train.grad_dtype == "bfloat16"
    head = 2 * v * kept + max(chunk, 4 * v * spec.hidden_size if summed else 0)
    head += TRUNCATING * min(MAX_ELEMENTS, v * tokens) if config.rollout.logprobs == "sampled" else 0
    layer = max(block.passing_bytes(own) for of in every for block, own in asked(of))
    if config.train.activation_checkpointing:
        layer += int(tokens * max(saved_of_layer(of) for of in every))
    return max(head, layer)
