"""The block of latent attention (MLA): `o(lift(attend(absorb(q), row)))`; packed sequences, or rows kept in pages.

Legend: `T` tokens, `D` model, `N` heads; of a head's query `P` values meet the latent and `R` the shared key, its value
has `V`; `L` the latent. A row is the latent and the shared key of a token, [L + R].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jetrl.kernels.attention import latent
from jetrl.kernels.attention.latent import Entry, LatentSizes, Up, apart
from jetrl.kernels.pointwise import ops as pointwise
from jetrl.kernels.qtensor import QTensor
from jetrl.model.block import Block, Build, Context, Piece, Tap, no_tap
from jetrl.model.normed import norm_before, normed_linear
from jetrl.model.published import Published
from jetrl.precision.blocks.latent import LATENT, latent_of
from jetrl.spec import ModelSpec
from jetrl.types import PagedPlan, VarlenPlan


class UpProjection(Published):
    """`kv_b` [N * (P + V), L], with which latents would become keys and values: BF16 under every recipe."""

    def __init__(self, sizes: LatentSizes, master_dtype: torch.dtype | None, dtype: torch.dtype) -> None:
        super().__init__((sizes.heads * (sizes.nope + sizes.value), sizes.rank), master_dtype, dtype)
        self.sizes = sizes
        self._operand: Any = None

    def publish(self) -> None:
        super().publish()
        if self._operand is not None:  # a captured decode step reads it directly
            self._operand = latent.prepare(self.published, self.sizes, self._operand)

    def publish_value(self, kind: str, value: Tensor | QTensor) -> None:
        super().publish_value(kind, value)
        self._operand = None

    def _apply(self, fn: Any, recurse: bool = True) -> UpProjection:
        self._operand = None
        super()._apply(fn, recurse)
        return self

    def up(self) -> Up:
        """What the ops of latent attention read."""
        if self._operand is None:
            self._operand = latent.prepare(self.published, self.sizes)
        return Up(self.masters["weight"].gradient, self.published, self._operand)


def sizes_of(spec: ModelSpec) -> LatentSizes:
    """The sizes that the ops of latent attention ask for."""
    m = latent_of(spec)
    return LatentSizes(spec.num_heads, m.nope, m.rope, m.rank, m.value)


class LatentAttention(Block):
    def __init__(self, build: Build) -> None:
        super().__init__(build)
        spec, m = build.spec, latent_of(build.spec)
        self.layer, self.latent, self.scale = build.layer, m, m.scale(spec.rope)
        self.sizes = sizes_of(spec)
        self.q_kv_a = build.linear("q_kv_a")
        if m.query_rank is not None:
            self.q_a_norm = build.published(m.query_rank)
            self.q_b = build.linear("q_b")
        self.kv_a_norm = build.published(m.rank)
        self.kv_b = UpProjection(self.sizes, build.master_dtype, build.dtype)
        self.o = build.linear("o")

    def forward(self, x: Tensor, residual: Tensor | None, context: Context, tap: Tap) -> tuple[Tensor, Tensor]:
        side = context.batch.side
        before = norm_before(self.norm, self.spec.rms_norm_eps, self.q_kv_a, residual, side) if tap is no_tap else None
        if before is not None:
            assert residual is not None
            projected, residual = normed_linear(x, residual, self.q_kv_a, before)
        else:
            y, residual = self.add_norm(x, residual, tap)
            projected = self.q_kv_a(y, side)
            tap(f"{self.at}.q_kv_a", projected)
        a = self._attended(projected, context, tap)
        y = self.o(a, side, keeps_input=True)  # attention's own gradient reads its output
        tap(f"{self.at}.o", y)
        return y, residual

    def infer(self, x: Tensor, residual: Tensor | None, context: Context) -> tuple[Tensor, Tensor]:
        m, batch, side, plan = self.latent, context.batch, context.batch.side, context.batch.plan
        y, residual = self.add_norm_for(self.q_kv_a, x, residual, side)
        q, kv = self.q_kv_a.infer(y, side).split(self.q_kv_a.sections, -1)
        if m.query_rank is not None:
            q = self.q_b.infer(self._latent_norm(self.q_a_norm, q), side)
        up, pages = self.kv_b.up(), self._pages(context)
        cache = (pages, plan.slots) if isinstance(plan, PagedPlan) and pages is not None else None
        entry = Entry(self.kv_a_norm.published, m.eps, context.tables, batch.positions, cache)
        q, row = latent.enter(q, kv, up, entry, self.sizes)
        a = latent.attend_absorbed(q, row, pages, plan, self.scale, self.sizes)
        pow2 = self.o.reads(side).pow2
        if pow2 is None or not self.o.reads_codes(side):
            return self.o.infer(latent.lift(a, up, self.sizes), side), residual
        return self.o.infer(latent.lift_quantize(a, up, self.sizes, pow2), side), residual

    def _pages(self, context: Context) -> Tensor | None:
        """Of this layer's rows; None for packed sequences, which keep none."""
        plan = context.batch.plan
        return plan.cache.state(self.layer, LATENT) if isinstance(plan, PagedPlan) else None

    def _attended(self, projected: Tensor, context: Context, tap: Tap) -> Tensor:
        """From the fused projection to the heads' outputs side by side, [T, N * V]."""
        plan, at = context.batch.plan, self.at
        q, row = self._heads(projected, context, tap)
        if torch.is_grad_enabled():
            assert isinstance(plan, VarlenPlan), "gradients are those of packed sequences"
            y = latent.latent_attention(q, row, self.kv_b.up(), plan, self.scale, self.sizes)
        else:
            up = self.kv_b.up()
            q = latent.absorb(q, up, self.sizes)
            tap(f"{at}.absorb", q)
            a = latent.attend_absorbed(q, row, self._pages(context), plan, self.scale, self.sizes)
            tap(f"{at}.attention", a)
            y = latent.lift(a, up, self.sizes)
        tap(f"{at}.lift", y)
        return y

    def _heads(self, projected: Tensor, context: Context, tap: Tap) -> tuple[Tensor, Tensor]:
        """The queries [T, N, P + R], and the rows [T, L + R]."""
        m, at, batch = self.latent, self.at, context.batch
        q, kv = projected.split(self.q_kv_a.sections, -1)
        if m.query_rank is not None:
            q = self._latent_norm(self.q_a_norm, q)
            tap(f"{at}.q_a_norm", q)
            q = self.q_b(q, batch.side)
            tap(f"{at}.q_b", q)
        c, shared = kv.split((m.rank, m.rope), -1)
        c = self._latent_norm(self.kv_a_norm, c)
        tap(f"{at}.kv_a_norm", c)
        cos, sin = (table[batch.positions] for table in context.tables)
        nope, turned = q.view(-1, self.sizes.heads, m.query).split((m.nope, m.rope), -1)
        shared, turned = (pointwise.rope(apart(x), cos, sin) for x in (shared[:, None], turned))
        tap(f"{at}.rope_k", shared)
        tap(f"{at}.rope_q", turned)
        return torch.cat((nope, turned), -1), torch.cat((c, shared[:, 0]), -1)

    def _latent_norm(self, norm: Published, x: Tensor) -> Tensor:
        return pointwise.rms_norm(x.contiguous(), norm.weight, norm.published, self.latent.eps)

    @staticmethod
    def checkpoint_names(spec: ModelSpec, layer: int) -> dict[str, tuple[Piece, ...]]:
        m, D, N, at = latent_of(spec), spec.hidden_size, spec.num_heads, f"model.layers.{layer}."
        queries, own = N * m.query, f"{at}self_attn."
        down = Piece(f"{own}kv_a_proj_with_mqa.weight", (m.row, D))
        names: dict[str, tuple[Piece, ...]] = {"norm.weight": (Piece(f"{at}input_layernorm.weight", (D,)),)}
        if m.query_rank is None:
            names["q_kv_a.weight"] = (Piece(f"{own}q_proj.weight", (queries, D)), down)
        else:
            names["q_kv_a.weight"] = (Piece(f"{own}q_a_proj.weight", (m.query_rank, D)), down)
            names["q_a_norm.weight"] = (Piece(f"{own}q_a_layernorm.weight", (m.query_rank,)),)
            names["q_b.weight"] = (Piece(f"{own}q_b_proj.weight", (queries, m.query_rank)),)
        return names | {
            "kv_a_norm.weight": (Piece(f"{own}kv_a_layernorm.weight", (m.rank,)),),
            "kv_b.weight": (Piece(f"{own}kv_b_proj.weight", (N * (m.nope + m.value), m.rank)),),
            "o.weight": (Piece(f"{own}o_proj.weight", (D, N * m.value)),),
        }
