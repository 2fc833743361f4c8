"""The Gated DeltaNet block: `out(norm(delta_rule(...)) * silu(z))` of the normed stream.

Legend: `T` packed tokens, `D` model, `C` channels of the convolution, `Hv`, `dv` value heads and their size.
`precision/blocks/gated_delta.py` has the formulas, `kernels/delta/reference.py` the definition.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from jetrl.kernels.delta import ops as delta
from jetrl.kernels.delta.parts import DeltaState, HeadSizes, Parts
from jetrl.model.block import Block, Build, Context, Piece, Tap, no_tap
from jetrl.model.moe import Router
from jetrl.model.published import Published
from jetrl.precision.blocks.gated_delta import CONV, DELTA
from jetrl.spec import ModelSpec
from jetrl.types import PagedPlan, VarlenPlan


class GatedDelta(Block):
    def __init__(self, build: Build) -> None:
        super().__init__(build)
        d = build.spec.delta
        assert d is not None
        self.sizes, self.layer = HeadSizes(d.key_heads, d.value_heads, d.key_dim, d.value_dim), build.layer
        self.qkvz = build.linear("qkvz")
        self.ba = Router((2 * d.value_heads, build.spec.hidden_size), build.master_dtype, build.dtype)
        self.conv = build.published(d.conv_channels, d.conv_width)
        self.a_log = Published((d.value_heads,), build.master_dtype, torch.float32)
        self.dt_bias = Published((d.value_heads,), build.master_dtype, torch.float32)
        self.out_norm = build.published(d.value_dim)
        self.out = build.linear("out")

    def forward(self, x: Tensor, residual: Tensor | None, context: Context, tap: Tap) -> tuple[Tensor, Tensor]:
        at, side = self.at, context.batch.side
        y, residual = self.add_norm(x, residual, tap)
        qkvz = self.qkvz(y, side)
        tap(f"{at}.qkvz", qkvz)
        logits = self.ba(y)
        tap(f"{at}.ba", logits)
        o = self._gated(qkvz, logits, context, tap)
        y = self.out(o, side)
        tap(f"{at}.out", y)
        return y, residual

    def infer(self, x: Tensor, residual: Tensor | None, context: Context) -> tuple[Tensor, Tensor]:
        side = context.batch.side
        y, residual = self._normed(x, residual)  # the logits read it in BF16
        o = self._gated(self.qkvz.infer(y, side), self.ba(y), context, no_tap)
        return self.out.infer(o, side), residual

    def _gated(self, qkvz: Tensor, logits: Tensor, context: Context, tap: Tap) -> Tensor:
        """What the output projection reads, [T, Hv * dv]."""
        at, plan = self.at, context.batch.plan
        channels = sum(self.sizes.columns)
        x, z = qkvz[:, :channels], qkvz[:, channels:].unflatten(-1, (self.sizes.value_heads, self.sizes.value_dim))
        if isinstance(plan, VarlenPlan) and plan.keys is not None:  # a part goes on from its stem: both are computed
            x, logits = x[plan.keys.rows], logits[plan.keys.rows]
        if (parts := context.made.get("delta_parts")) is None:
            parts = context.made["delta_parts"] = parts_of(plan)
        conv = kept = None
        if isinstance(plan, PagedPlan):
            conv = plan.cache.state(self.layer, CONV)
            kept = DeltaState(*(plan.cache.state(self.layer, name) for name in DELTA))
        q, k, v = delta.conv_heads(
            x, self.conv.masters["weight"].gradient, self.conv.published, self.sizes, parts, conv
        )
        masters = self.a_log.weight, self.dt_bias.weight
        g, beta = delta.delta_gates(logits, masters, self.a_log.published, self.dt_bias.published)
        o = delta.delta_rule(q, k, v, g, beta, parts, kept)
        if isinstance(plan, VarlenPlan) and plan.keys is not None:
            own = plan.keys.own
            q, k, v, g, beta, o = (t[own] for t in (q, k, v, g, beta, o))
        if tap is not no_tap:
            tap(f"{at}.conv_heads", torch.cat([t.flatten(1) for t in (q, k, v)], 1))
            tap(f"{at}.delta_gates", torch.cat([g, beta], 1))
        tap(f"{at}.delta_rule", o.flatten(1))
        o = delta.gated_norm(o, z, self.out_norm.weight, self.out_norm.published, self.spec.rms_norm_eps).flatten(1)
        tap(f"{at}.gated_norm", o)
        return o

    @staticmethod
    def initial(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor | None:
        """As Mamba 2 begins: decays between 1 and 16 a step of exp(uniform) from 0.001 to 0.1; torch's convolution."""
        uniform = torch.rand(shape, generator=generator) if name.startswith(("conv.", "a_log.", "dt_bias.")) else None
        if uniform is None:
            return None
        if name.startswith("conv."):
            return (2.0 * uniform - 1.0) * shape[1] ** -0.5
        if name.startswith("a_log."):
            return (1.0 + 15.0 * uniform).log()
        step = (math.log(0.001) + uniform * math.log(100.0)).exp()
        return step + torch.log(-torch.expm1(-step))  # the inverse of softplus

    @staticmethod
    def checkpoint_names(spec: ModelSpec, layer: int) -> dict[str, tuple[Piece, ...]]:
        d, D, at = spec.delta, spec.hidden_size, f"model.layers.{layer}."
        assert d is not None
        own, heads, inner = f"{at}linear_attn.", d.value_heads, d.value_size
        return {
            "norm.weight": (Piece(f"{at}input_layernorm.weight", (D,)),),
            "qkvz.weight": (
                Piece(f"{own}in_proj_qkv.weight", (d.conv_channels, D)), Piece(f"{own}in_proj_z.weight", (inner, D)),
            ),
            "ba.weight": tuple(Piece(f"{own}in_proj_{x}.weight", (heads, D)) for x in "ba"),
            "conv.weight": (Piece(f"{own}conv1d.weight", (d.conv_channels, 1, d.conv_width)),),
            "a_log.weight": (Piece(f"{own}A_log", (heads,), wide=True),),
            "dt_bias.weight": (Piece(f"{own}dt_bias", (heads,), wide=True),),
            "out_norm.weight": (Piece(f"{own}norm.weight", (d.value_dim,)),),
            "out.weight": (Piece(f"{own}out_proj.weight", (D, inner)),),
        }


def parts_of(plan: VarlenPlan | PagedPlan) -> Parts:
    """The sequences of a pass; packed parts that share a stem are sequences with the stem in front of each."""
    if isinstance(plan, PagedPlan):
        single = plan.query_lengths == (1,) * len(plan.query_lengths)  # a launch less in a decode step
        new = 1 if single else plan.cu_seqlens[1:] - plan.cu_seqlens[:-1]
        return Parts(plan.cu_seqlens, plan.query_lengths, plan.kv_lengths - new, plan.rows)
    of = plan if plan.keys is None else plan.keys
    return Parts(of.cu_seqlens, of.lengths)
