"""The attention block of Qwen3.5: `o(attention(rope(qk_norm(q, k)), v) * sigmoid(gate))` of the normed stream.

Of a head, the first `rotary_dim` places are rotated alone. Queries and keys are put in an order in which that is RoPE
of whole heads (`rope.rotary_order`), by the copy that takes the gates out from between the queries.

Legend: `T` packed tokens, `N` query heads, `G` key/value heads, `H` head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jetrl.kernels.attention.ops import Heads, attend, attend_cached, attend_heads
from jetrl.kernels.delta import ops as delta
from jetrl.kernels.pointwise import ops as pointwise
from jetrl.model.attention import Attention
from jetrl.model.block import Build, Context, Tap, no_tap
from jetrl.model.rope import rotary_order
from jetrl.types import PagedPlan, VarlenPlan


class GatedAttention(Attention):
    order: Tensor
    columns: Tensor

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        spec, (n, g) = build.spec, self.heads
        assert spec.attention_gate and spec.qk_norm and not spec.qkv_bias
        head = spec.head_dim
        with torch.device("cpu"):  # also where the parameters are only shapes
            order = torch.tensor(rotary_order(head, spec.rotary_dim or head))
            queries = torch.arange(n)[:, None] * 2 * head + order  # each with its gate behind it
            keys = 2 * n * head + torch.arange(g)[:, None] * head + order
            values = (2 * n + g) * head + torch.arange(g * head)
            columns = torch.cat([queries.flatten(), keys.flatten(), values])
        self.register_buffer("order", order, persistent=False)
        self.register_buffer("columns", columns, persistent=False)

    @property
    def _norms(self) -> tuple[Tensor, Tensor]:
        """The factors [H] of the norms of q and k, in the order of the places."""
        return self.q_norm.factor[self.order], self.k_norm.factor[self.order]

    def _gate(self, qkv: Tensor) -> Tensor:
        """The gates [T, N, H] of the projection."""
        (n, _), head = self.heads, self.spec.head_dim
        return qkv[:, : 2 * n * head].unflatten(-1, (n, 2, head))[:, :, 1]

    def forward(self, x: Tensor, residual: Tensor | None, context: Context, tap: Tap) -> tuple[Tensor, Tensor]:
        spec, at, batch = self.spec, self.at, context.batch
        qkv, residual = self._projected(x, residual, context, tap)
        if tap is no_tap:
            assert isinstance(batch.plan, VarlenPlan), "gradients are those of packed sequences"
            heads = Heads(
                self.heads, spec.head_dim, self._norms, spec.rms_norm_eps, context.tables, batch.positions,
                self.fp8_kv, self.columns, self.order,
            )
            masters = self.q_norm.weight, self.k_norm.weight
            a = attend_heads(qkv, masters, heads, batch.plan, self.layer, self.scale)
        else:
            q, k, v = self._tapped_heads(qkv, context, tap)
            a = attend(q, k, v, batch.plan, self.layer, self.scale)
        tap(f"{at}.attention", a.flatten(1))
        a = delta.output_gate(a, self._gate(qkv)).flatten(1)
        tap(f"{at}.output_gate", a)
        y = self.o(a, batch.side)
        tap(f"{at}.o", y)
        return y, residual

    def _tapped_heads(self, qkv: Tensor, context: Context, tap: Tap) -> tuple[Tensor, Tensor, Tensor]:
        at, positions = self.at, context.batch.positions
        (n, g), head, (cos, sin) = self.heads, self.spec.head_dim, context.tables
        q = qkv[:, : 2 * n * head].unflatten(-1, (n, 2, head))[:, :, 0].contiguous()
        k, v = qkv[:, 2 * n * head :].unflatten(-1, (2 * g, head)).split((g, g), dim=1)
        q, k = self._head_norm(self.q_norm, q), self._head_norm(self.k_norm, k)
        tap(f"{at}.q_norm", q)
        tap(f"{at}.k_norm", k)
        cos, sin = cos[positions], sin[positions]
        q, k = (pointwise.rope(t[..., self.order], cos, sin) for t in (q, k))
        tap(f"{at}.rope_q", q)
        tap(f"{at}.rope_k", k)
        return q, *self._rounded(k, v.contiguous(), tap)

    def infer(self, x: Tensor, residual: Tensor | None, context: Context) -> tuple[Tensor, Tensor]:
        spec, batch = self.spec, context.batch
        plan, side = batch.plan, batch.side
        y, residual = self.add_norm_for(self.qkv, x, residual, side)
        qkv = self.qkv.infer(y, side)
        cache = (plan.cache.layer(self.layer), plan.slots) if isinstance(plan, PagedPlan) else None
        q, k, v = pointwise.qkv_norm_rope(
            qkv.index_select(1, self.columns), self.heads, spec.head_dim, self._norms, spec.rms_norm_eps,
            context.tables, batch.positions, cache, self.fp8_kv,
        )
        if isinstance(plan, PagedPlan):
            a = attend_cached(q, plan, self.layer, self.scale)
        else:
            a = attend(q, k, v, plan, self.layer, self.scale)
        return self.o.infer(delta.output_gate(a, self._gate(qkv)).flatten(1), side), residual
