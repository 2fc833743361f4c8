"""What a layer consists of: for each model family, a function from spec and layer to the blocks, in order.

A new block is a subclass of `block.Block`; it needs an entry of `LAYOUTS` that uses it (and its module an entry in
`model/blocks.py`).
"""

from __future__ import annotations

from collections.abc import Callable

from jetrl.errors import UserError
from jetrl.precision.blocks.attention import Attention
from jetrl.precision.blocks.block import Block, Linear
from jetrl.precision.blocks.deepseek_moe import DeepSeekMoE, SigmoidMoE, deepseek_of
from jetrl.precision.blocks.gated_attention import GatedAttention
from jetrl.precision.blocks.gated_delta import GatedDelta
from jetrl.precision.blocks.gated_moe import GatedMoE
from jetrl.precision.blocks.latent import LatentAttention
from jetrl.precision.blocks.mlp import MLP
from jetrl.precision.blocks.moe import MoE
from jetrl.precision.blocks.states import PerSequence, State
from jetrl.precision.formats import BF16, Format
from jetrl.precision.recipe import Role
from jetrl.spec import ModelSpec

Layout = Callable[[ModelSpec, int], tuple[Block, ...]]

ATTENTION, DENSE_MLP, EXPERTS = Attention(), MLP(), MoE()
GATED_ATTENTION, GATED_DELTA, GATED_EXPERTS = GatedAttention(), GatedDelta(), GatedMoE()
LATENT, SOFTMAX_EXPERTS, SIGMOID_EXPERTS = LatentAttention(), DeepSeekMoE(), SigmoidMoE()


def dense(spec: ModelSpec, layer: int) -> tuple[Block, ...]:
    """Attention and an MLP, in every layer."""
    return (ATTENTION, DENSE_MLP)


def mixture(spec: ModelSpec, layer: int) -> tuple[Block, ...]:
    """Attention, and experts or an MLP as the spec says for this layer."""
    return (ATTENTION, EXPERTS if spec.experts is not None and spec.experts.in_layer(layer) else DENSE_MLP)


def hybrid(spec: ModelSpec, layer: int) -> tuple[Block, ...]:
    """Gated DeltaNet or gated attention, as the spec says for this layer, and an MLP, or experts where it has any."""
    assert spec.delta is not None, f"a hybrid family, and no DeltaSpec in the spec of {spec.family}"
    first = GATED_DELTA if layer in spec.delta.layers else GATED_ATTENTION
    return (first, DENSE_MLP if spec.experts is None else GATED_EXPERTS)


def deepseek(spec: ModelSpec, layer: int) -> tuple[Block, ...]:
    """Latent attention, and experts or an MLP as the spec says for this layer."""
    if spec.experts is None or not spec.experts.in_layer(layer):
        return (LATENT, DENSE_MLP)
    return (LATENT, SIGMOID_EXPERTS if deepseek_of(spec).sigmoid else SOFTMAX_EXPERTS)


LAYOUTS: dict[str, Layout] = {
    "llama": dense, "qwen2": dense, "qwen3": dense, "qwen3_moe": mixture, "deepseek_v2": deepseek,
    "deepseek_v3": deepseek, "glm4_moe_lite": deepseek, "qwen3_5_text": hybrid, "qwen3_5_moe_text": hybrid,
}


def blocks_of(spec: ModelSpec, layer: int) -> tuple[Block, ...]:
    """The blocks of a layer, in the order of execution."""
    assert 0 <= layer < spec.num_layers, f"layer {layer} of {spec.num_layers}"
    assert spec.family in LAYOUTS, f"no layout for the family {spec.family!r}; there are {', '.join(LAYOUTS)}"
    blocks = LAYOUTS[spec.family](spec, layer)
    assert len({block.name for block in blocks}) == len(blocks), f"two blocks of layer {layer} have one name"
    return blocks


def linears_of(spec: ModelSpec, layer: int) -> dict[tuple[str, Role], Linear]:
    """The linears of a layer by (name of the block, role), in the order of execution."""
    return {(b.name, role): linear for b in blocks_of(spec, layer) for role, linear in b.linears(spec).items()}


def states_of(spec: ModelSpec, kv_cache: Format = BF16, drafts: bool = False) -> dict[tuple[int, str], State]:
    """What a sequence keeps of all layers, by (layer, name), in an engine that makes drafts or none."""
    found: dict[tuple[int, str], State] = {}
    for layer in range(spec.num_layers):
        for block in blocks_of(spec, layer):
            declared = block.states(spec, kv_cache).items()
            states = {(layer, name): s.held(drafts) if isinstance(s, PerSequence) else s for name, s in declared}
            assert not states.keys() & found.keys(), f"two blocks of layer {layer} keep states of one name"
            found |= states
    return found


def require_rewind(spec: ModelSpec) -> None:
    """UserError if drafts cannot be taken back: where a state of a sequence is that of its last token alone."""
    kinds = {
        block.kind: None for layer in range(spec.num_layers) for block in blocks_of(spec, layer)
        if any(isinstance(state, PerSequence) and state.grid == 1 for state in block.states(spec, BF16).values())
    }
    if kinds:
        raise UserError(
            f"rollout.speculate: layers of the kind {' and '.join(kinds)} keep one state per sequence, which cannot go "
            "back from a wrong draft; set it to off."
        )


def roles_of(spec: ModelSpec, layer: int = 0) -> tuple[Role, ...]:
    """The roles of a layer's linears, in the order of execution."""
    return tuple(role for _, role in linears_of(spec, layer))
