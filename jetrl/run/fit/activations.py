"""What forward and backward pass keep and make beyond the weights, predicted from a config and a shape (`memory.py`).

Counted from what `model/` saves for its backward passes; the legend of sizes is that of `memory.py`.
"""

from __future__ import annotations

from functools import lru_cache

from jetrl.config import Config
from jetrl.precision.blocks.layouts import blocks_of
from jetrl.precision.formats import BLOCK
from jetrl.precision.recipe import Recipe
from jetrl.spec import ModelSpec

LOGITS, FORWARD_LOGITS = 1 << 29, 1 << 27  # elements of a chunk of logits, backward and forward, as in `hopper`
KEPT = 5 << 29  # bytes of softmax residuals, likewise
TRUNCATED_LOGITS = 1 << 24  # logits in which kept tokens are found together, as in `kernels.logprob.truncation` ...
TRUNCATING = 24  # ... and bytes for each: divided, weights in float64, flags, and what sorting takes


def expert_rows(spec: ModelSpec, tokens: int) -> int:
    """Rows of the grouped matrices of T tokens: k for each, and at most a tile of 128 less one for each expert."""
    if spec.experts is None:
        return 0
    chosen = tokens * spec.experts.per_token
    return (chosen + min(spec.experts.count, chosen) * (BLOCK - 1)) // BLOCK * BLOCK


def fuses_experts(recipe: Recipe, layer: int) -> bool:
    """Whether a layer's experts are computed by `model.fused_experts`."""
    into, out = (recipe.linear(layer, role, "train") for role in ("gate_up", "down"))
    return into is not None and into == out


@lru_cache(maxsize=256)
def saved_of_layer(spec: ModelSpec, recipe: Recipe, layer: int, lean: bool = True, tokens: int = 8192) -> float:
    """Bytes a token that the forward pass of a layer keeps for the backward pass; of `tokens`, which experts pad.

    Of each block: the residual stream (BF16), each linear's input (FP8 along tokens with a scale for 128, or BF16), and
    what stands between: qkv, the heads after the rotary embedding (unless `lean`), attention's output and log-sums;
    gate and up. Made again are an FP8 linear's input after a norm (`model.normed`), o's, and with wgrad by tiles
    (`model.fused_mlp`) SwiGLU's output. Of experts that for each row, with their outputs, and the router's input and
    logits; in FP8 (`model.fused_experts`) only their outputs and gate and up.
    """
    def linear(role: str, size: int) -> float:
        return size + size / 32 if recipe.linear(layer, role, "train") is not None else 2 * size

    def normed(role: str, fused: bool) -> float:
        return 4 if fused and recipe.linear(layer, role, "train") is not None else linear(role, d)

    d, total = spec.hidden_size, 0.0
    attended, heads = spec.num_heads * spec.head_dim, sum(spec.qkv_sections)
    for block in blocks_of(spec, layer):
        total += 2 * d
        if block.kind == "attention":
            total += normed("qkv", layer > 0) + 2 * heads + (0 if lean else 2 * heads)
            total += 2 * attended + 4 * spec.num_heads  # o's input is attention's output
        elif block.kind == "mlp":
            into = recipe.linear(layer, "down", "train")
            kept = 4 if into is None or not into.saved_out.is_quantized else 2 + 2 / 32
            tiles = into is not None and into.wgrad_tiles
            total += normed("gate_up", tiles) + kept * spec.intermediate_size
            total += 0 if tiles else linear("down", spec.intermediate_size)
        elif block.kind == "moe":
            assert spec.experts is not None
            f, k = spec.experts.intermediate_size, spec.experts.per_token
            inputs = 0.0 if fuses_experts(recipe, layer) else linear("gate_up", d) + linear("down", f)
            row = inputs + 4 * f + 2 * d + 4
            total += 2 * d + 4 * spec.experts.count + 20 * k + row * expert_rows(spec, tokens) / tokens
        else:  # a block that is not in this package
            total += sum(linear(role, w.in_size) + 2 * sum(w.sections) for role, w in block.linears(spec).items())
    return total


def activations(config: Config, spec: ModelSpec, recipe: Recipe, tokens: int) -> int:
    """What is kept of all layers at the end of the forward pass; with checkpointing two rows of each layer."""
    ends = 2 * 5 * spec.hidden_size  # the last norm, the rows that carry loss, and their gradient
    if config.train.activation_checkpointing:
        return tokens * (4 * spec.hidden_size * spec.num_layers + ends)
    lean = config.train.lean_backward
    return int(tokens * (ends + sum(saved_of_layer(spec, recipe, i, lean, tokens) for i in range(spec.num_layers))))


def passing(config: Config, spec: ModelSpec, recipe: Recipe, tokens: int) -> int:
    """The most that lm_head and backward pass make and free: chunks of logits, or one layer's gradients.

    A chunk is FP32 logits and, in the backward pass, their BF16 gradient. Without an entropy gradient the softmax's
    residuals wait for the backward pass, which makes logits again for the rest only. Gradients in BF16 are summed in
    FP32 by matrix: the lm_head's is the largest.
    """
    v, checkpointing = spec.vocab_size, config.train.activation_checkpointing
    summed = config.train.grad_dtype == "bfloat16"
    rows, forward = (max(128, n // v // 128 * 128) for n in (LOGITS, FORWARD_LOGITS))
    kept = min(KEPT // (2 * v), tokens) if not config.rl.entropy_coef else 0
    chunk = 4 * v * min(forward, tokens) if kept == tokens else 6 * v * min(rows, tokens)
    head = 2 * v * kept + max(chunk, 4 * v * spec.hidden_size if summed else 0)
    head += TRUNCATING * min(TRUNCATED_LOGITS, v * tokens) if config.rollout.logprobs == "sampled" else 0
    layer = tokens * (4 * spec.hidden_size + 10 * spec.intermediate_size)
    if spec.experts is not None:
        layer = max(layer, _passing_experts(spec, recipe, tokens, checkpointing, summed))
    if checkpointing:
        lean = config.train.lean_backward
        layer += int(tokens * max(saved_of_layer(spec, recipe, i, lean, tokens) for i in range(spec.num_layers)))
    return max(head, layer)


def _passing_experts(spec: ModelSpec, recipe: Recipe, tokens: int, checkpointing: bool, summed: bool) -> int:
    """What the backward pass of experts makes: gradients of rows with their codes both ways, the router's in FP32.

    Fused, these are at most the codes of combine's gradient along rows next to the gradients of SwiGLU's output and
    input and the codes of both ways, or codes both ways next to the gradient of the tokens' rows. Gradients in BF16
    take the sum of all experts in FP32; with checkpointing the codes for dgrad are made on the way.
    """
    assert spec.experts is not None
    d, f = spec.hidden_size, spec.experts.intermediate_size
    row = 6 * d + 8 * f
    if all(fuses_experts(recipe, layer) for layer in spec.expert_layers):
        row = max(d + 11 * f, 2 * d + 4 * f) * 33 // 32
    matrix = spec.experts.count * 2 * f * d
    made = matrix * ((4 if summed else 0) + (1 if checkpointing else 0))
    return expert_rows(spec, tokens) * row + 8 * tokens * d + made
