"""The attention block: `o(attention(rope(qk_norm(qkv(x)))))` of the normed stream; packed sequences or the cache.

Legend: `T` packed tokens, `D` model, `N` query heads, `G` key/value heads, `H` head size.
"""

from __future__ import annotations

from torch import Tensor

from jetrl.kernels.adapters.ops import Heads as AdaptedHeads
from jetrl.kernels.attention.ops import (
    Heads,
    attend,
    attend_cached,
    attend_cached_quantize,
    attend_heads,
    norm_rope_attend,
)
from jetrl.kernels.pointwise import ops as pointwise
from jetrl.kernels.qtensor import QTensor
from jetrl.model.block import Block, Build, Context, Piece, Tap, no_tap
from jetrl.model.normed import norm_before, normed_linear
from jetrl.model.published import Norm
from jetrl.spec import ModelSpec
from jetrl.types import PagedPlan, VarlenPlan


class Attention(Block):
    def __init__(self, build: Build) -> None:
        super().__init__(build)
        spec = build.spec
        self.layer, self.fp8_kv = build.layer, build.recipe.kv_cache.is_quantized
        self.heads, self.scale = (spec.num_heads, spec.num_kv_heads), spec.head_dim**-0.5
        self.makes_heads_again = True  # in the backward pass, from the projection; False: q, k and v are kept
        self.qkv = build.linear("qkv")
        if spec.qk_norm:
            self.q_norm = build.norm(spec.head_dim)
            self.k_norm = build.norm(spec.head_dim)
        self.o = build.linear("o")

    @property
    def _norms(self) -> tuple[Tensor, Tensor] | None:
        """The published weights [H] of the norms of q and k."""
        return (self.q_norm.factor, self.k_norm.factor) if self.spec.qk_norm else None

    def forward(self, x: Tensor, residual: Tensor | None, context: Context, tap: Tap) -> tuple[Tensor, Tensor]:
        spec, at, batch = self.spec, self.at, context.batch
        qkv, residual = self._projected(x, residual, context, tap)
        if tap is no_tap:
            masters = (self.q_norm.weight, self.k_norm.weight) if spec.qk_norm else None
            heads = Heads(
                self.heads, spec.head_dim, self._norms, spec.rms_norm_eps, context.tables, batch.positions, self.fp8_kv
            )
            assert isinstance(batch.plan, VarlenPlan), "gradients are those of packed sequences"
            attended = attend_heads if self.makes_heads_again else norm_rope_attend
            a = attended(qkv, masters, heads, batch.plan, self.layer, self.scale).flatten(1)
        else:
            q, k, v = self._tapped_heads(qkv, context, tap)
            a = attend(q, k, v, batch.plan, self.layer, self.scale).flatten(1)
        tap(f"{at}.attention", a)
        y = self.o(a, batch.side, keeps_input=True)  # attention's own gradient reads its output
        tap(f"{at}.o", y)
        return y, residual

    def _projected(
        self, x: Tensor, residual: Tensor | None, context: Context, tap: Tap
    ) -> tuple[Tensor, Tensor]:
        """The fused projection of the normed stream, and the stream."""
        side = context.batch.side
        before = norm_before(self.norm, self.spec.rms_norm_eps, self.qkv, residual, side) if tap is no_tap else None
        if before is not None:
            assert residual is not None
            return normed_linear(x, residual, self.qkv, before)
        y, residual = self.add_norm(x, residual, tap)
        qkv = self.qkv(y, side)
        tap(f"{self.at}.qkv", qkv)
        return qkv, residual

    def _tapped_heads(self, qkv: Tensor, context: Context, tap: Tap) -> tuple[Tensor, Tensor, Tensor]:
        """`pointwise.ops.norm_rope` op by op, with the same bits, so that a tap sees what is in between."""
        spec, at, positions = self.spec, self.at, context.batch.positions
        (n, g), (cos, sin) = self.heads, context.tables
        q, k, v = qkv.view(-1, n + 2 * g, spec.head_dim).split((n, g, g), dim=1)
        if spec.qk_norm:
            q, k = self._head_norm(self.q_norm, q), self._head_norm(self.k_norm, k)
            tap(f"{at}.q_norm", q)
            tap(f"{at}.k_norm", k)
        cos, sin = cos[positions], sin[positions]
        q, k = pointwise.rope(q, cos, sin), pointwise.rope(k, cos, sin)
        tap(f"{at}.rope_q", q)
        tap(f"{at}.rope_k", k)
        return q, *self._rounded(k, v.contiguous(), tap)

    def _rounded(self, k: Tensor, v: Tensor, tap: Tap) -> tuple[Tensor, Tensor]:
        """Keys and values as the cache has them."""
        if self.fp8_kv:
            k, v = pointwise.round_heads(k), pointwise.round_heads(v)
            tap(f"{self.at}.k.quantize", k)
            tap(f"{self.at}.v.quantize", v)
        return k, v

    def _head_norm(self, norm: Norm, x: Tensor) -> Tensor:
        return pointwise.rms_norm(x, norm.weight, norm.factor, self.spec.rms_norm_eps)

    def infer(self, x: Tensor, residual: Tensor | None, context: Context) -> tuple[Tensor, Tensor]:
        spec, batch = self.spec, context.batch
        plan, side = batch.plan, batch.side
        y, residual = self.add_norm_for(self.qkv, x, residual, side)
        cache = (plan.cache.layer(self.layer), plan.slots) if isinstance(plan, PagedPlan) else None
        heads = AdaptedHeads(
            self.heads, spec.head_dim, self._norms, spec.rms_norm_eps, context.tables, batch.positions, cache,
            self.fp8_kv,
        )
        if self.qkv.lora is not None and self.qkv.bias is None:
            q, k, v = self.qkv.lora.finish_heads(*self.qkv.base(y, side), heads)
        else:
            q, k, v = pointwise.qkv_norm_rope(self.qkv.infer(y, side), *heads)
        a: Tensor | QTensor
        if not isinstance(plan, PagedPlan):
            a = attend(q, k, v, plan, self.layer, self.scale).flatten(1)
        elif (recipe := self.o.recipes[side]) is None or not self.o.reads_codes(side):
            a = attend_cached(q, plan, self.layer, self.scale).flatten(1)
        else:
            a = attend_cached_quantize(q, plan, self.layer, self.scale, recipe.fprop.left.pow2)
        return self.o.infer(a, side), residual

    @staticmethod
    def checkpoint_names(spec: ModelSpec, layer: int) -> dict[str, tuple[Piece, ...]]:
        D, H, at = spec.hidden_size, spec.head_dim, f"model.layers.{layer}."
        qkv = list(zip("qkv", spec.qkv_sections, strict=True))
        names: dict[str, tuple[Piece, ...]] = {
            "norm.weight": (Piece(f"{at}input_layernorm.weight", (D,)),),
            "qkv.weight": tuple(Piece(f"{at}self_attn.{x}_proj.weight", (rows, D)) for x, rows in qkv),
        }
        if spec.qkv_bias:
            names["qkv.bias"] = tuple(Piece(f"{at}self_attn.{x}_proj.bias", (rows,)) for x, rows in qkv)
        if spec.qk_norm:
            names |= {f"{x}_norm.weight": (Piece(f"{at}self_attn.{x}_norm.weight", (H,)),) for x in "qk"}
        return names | {"o.weight": (Piece(f"{at}self_attn.o_proj.weight", (D, spec.num_heads * H)),)}
