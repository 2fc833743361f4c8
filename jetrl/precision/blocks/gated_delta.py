"""The Gated DeltaNet block of Qwen3.5: linear attention with one state for a sequence.

    qkv, z = x W;  b, a = x V                BF16 operands; the logits b, a of a head are FP32 under every recipe
    q, k, v = silu(conv(qkv))                a causal convolution of each channel; q and k divided by their L2 norms
    g = -exp(A_log) softplus(a + dt_bias);  beta = sigmoid(b)
    o = delta_rule(q, k, v, g, beta)         S_t = exp(g_t) S_(t-1) + beta_t k_t (v_t - exp(g_t) S_(t-1)' k_t)'
    y = out(norm(o) silu(z))

`kernels/delta/reference.py` says how: chunks of 64 tokens at absolute positions, the state moves at their ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from jetrl.precision.blocks.block import Block, Linear, TrainingPass
from jetrl.precision.blocks.states import PerSequence, State
from jetrl.precision.formats import BF16, FP32, Format
from jetrl.precision.recipe import Role
from jetrl.spec import DeltaSpec, ModelSpec

if TYPE_CHECKING:
    from jetrl.precision.builder import BlockBackward, BlockForward

# What a sequence keeps: rows before the convolution, and the parts of `kernels.delta.parts.DeltaState`, in its order.
CONV = "conv"
DELTA = ("delta_state", "delta_keys", "delta_updates", "delta_sums", "delta_errors", "delta_inverse")
CHUNK, BLOCK = 64, 16  # tokens between two moves of the state; rows that are solved at once


class GatedDelta(Block):
    kind, name = "gated_delta", "delta"
    roundings = {
        "conv_heads": "fp32 products added in order, silu, rounded once to bf16; q and k times 1 / l2 norm, rounded "
        "once more",
        "delta_gates": "fp32",
        "delta_rule": "bf16 operands of products, fp32 sums, an fp32 state that moves every 64 tokens; rounded once to "
        "bf16",
        "gated_norm": "bf16 after x * inv_rms, bf16 after * weight, fp32 product with silu, rounded once to bf16",
        "concat": "none (a copy)",
        "conv_heads_backward": "fp32, rounded once to bf16",
        "delta_gates_backward": "fp32",
        "delta_rule_backward": "fp32 on a CPU, fp32 sums of bf16 operands on a GPU; rounded once to the format of each "
        "input",
        "gated_norm_backward": "fp32, rounded once to bf16",
    }
    formulas = {
        "conv_heads": "silu(conv), l2 norms", "delta_gates": "decay, step size", "delta_rule": "gated delta rule",
        "gated_norm": "norm(x) · silu(z)",
    }

    def linears(self, spec: ModelSpec) -> Mapping[Role, Linear]:
        d = _delta(spec)
        return {
            "qkvz": Linear(
                (d.conv_channels, d.value_size), spec.hidden_size, projections=("in_proj_qkv", "in_proj_z")
            ),
            "out": Linear((spec.hidden_size,), d.value_size, writes_residual=True, projections=("out_proj",)),
        }

    def states(self, spec: ModelSpec, kv_cache: Format) -> Mapping[str, State]:
        d = _delta(spec)
        hk, hv, dk, dv = d.key_heads, d.value_heads, d.key_dim, d.value_dim
        shapes: tuple[tuple[tuple[int, ...], Format], ...] = (
            ((hv, dk, dv), FP32), ((hk, CHUNK, dk), BF16), ((hv, CHUNK, dv), BF16), ((hv, CHUNK), FP32),
            ((hv, BLOCK, dv), BF16), ((hv, BLOCK, BLOCK), FP32),
        )
        # Rows of the running block are written again when a sequence goes back within it; those before stay.
        rule = {name: PerSequence(shape, form, BLOCK) for name, (shape, form) in zip(DELTA, shapes, strict=True)}
        spare = BLOCK - 1
        return {CONV: PerSequence((d.conv_width - 1 + spare, d.conv_channels), BF16, BLOCK, spare)} | rule

    def forward(self, flow: BlockForward, x: str) -> str:
        d = _delta(flow.spec)
        heads, sizes = (d.key_heads, d.value_heads), (d.key_dim, d.value_dim)
        qkvz, logits = flow.linear("qkvz", x), flow.router("ba", x, 2 * d.value_heads)
        inputs = {"x": qkvz, "weight": flow.parameter("conv")}
        qkv = flow.op("conv_heads", "conv_heads", inputs, width=d.conv_width, heads=heads, head_dims=sizes)
        inputs = {"x": logits, "a_log": flow.parameter("a_log", FP32), "dt_bias": flow.parameter("dt_bias", FP32)}
        gates = flow.op("delta_gates", "delta_gates", inputs, FP32)
        inputs = {"qkv": qkv, "gates": gates}
        o = flow.op("delta_rule", "delta_rule", inputs, chunk=CHUNK, block=BLOCK, heads=heads, head_dims=sizes)
        inputs = {"x": o, "gate": qkvz, "weight": flow.parameter("out_norm")}
        return flow.linear("out", flow.op("gated_norm", "gated_norm", inputs, eps=flow.spec.rms_norm_eps))

    def backward(self, flow: BlockBackward, dy: str) -> str:
        dy = flow.linear("out", dy, "gated_norm")
        qkvz, logits = flow.saved("qkvz"), flow.saved("ba", FP32)
        inputs = {"dy": dy, "x": flow.saved("delta_rule"), "gate": qkvz, "weight": flow.parameter("out_norm")}
        flow.weight_sum("out_norm", {"dy": dy, "x": flow.saved("delta_rule"), "gate": qkvz}, "out_norm")
        dz = flow.op("gated_norm.dgrad", "gated_norm_backward", inputs)
        inputs = {"dy": dz, "qkv": flow.saved("conv_heads"), "gates": flow.saved("delta_gates", FP32)}
        d_rule = flow.op("delta_rule.dgrad", "delta_rule_backward", inputs)
        for name in ("a_log", "dt_bias"):
            flow.weight_sum(name, {"dy": d_rule, "x": logits}, name)
        d_logits = flow.op("delta_gates.dgrad", "delta_gates_backward", {"dy": d_rule, "x": logits}, FP32)
        flow.weight_sum("conv", {"dy": d_rule, "x": qkvz}, "conv")
        inputs = {"dy": d_rule, "x": qkvz, "weight": flow.parameter("conv")}
        d_qkv = flow.op("conv_heads.dgrad", "conv_heads_backward", inputs)
        dx = flow.linear("qkvz", flow.op("qkvz.dy", "concat", {"qkv": d_qkv, "z": dz}), "delta_norm")
        return flow.op("delta_norm.dy", "add", {"x": dx, "y": flow.router("ba", d_logits, "delta_norm")})

    def saved_bytes(self, of: TrainingPass) -> float:
        """What the linears read and give; q, k, v, the logits and gates, and the rule's output. All but the linears' is
        made for each answer to a shared prompt, from a copy of what the linear gives."""
        d = _delta(of.spec)
        total = of.kept_input("qkvz", of.spec.hidden_size) + 2 * (d.conv_channels + d.value_size)
        total += 2 * of.spec.hidden_size  # the logits read the norm's output
        copies = 2 * d.conv_channels if of.repeated > 1 else 0
        rule = copies + 16 * d.value_heads + 2 * d.conv_channels + 2 * d.value_size
        return total + of.repeated * rule + of.kept_input("out", d.value_size)

    def passing_bytes(self, of: TrainingPass) -> int:
        """That of the rule on a GPU (`kernels.delta.backward_triton`): a chunk's matrices, states and their gradients,
        and what it gives; that of the convolution: sums in FP32, and gradients on both sides."""
        d = _delta(of.spec)
        squares, rows = 8 * CHUNK, 2 * max(d.key_dim, d.value_dim) + 6 * d.value_dim
        heads = squares + rows + 4 * d.key_dim * d.value_dim // CHUNK + 32
        rule = d.value_heads * heads + 4 * d.key_heads * d.key_dim
        return max(super().passing_bytes(of), int(of.tokens * of.repeated) * max(rule, 8 * d.conv_channels))


def _delta(spec: ModelSpec) -> DeltaSpec:
    assert spec.delta is not None, f"a hybrid family, and no DeltaSpec in the spec of {spec.family}"
    return spec.delta
