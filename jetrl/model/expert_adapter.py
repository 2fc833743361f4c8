"""The adapters of experts: those of `adapter.py` for each, over rows that are grouped by expert.

Each row [R, K] meets the A and the B of its expert, so its bits depend on no other row. Gradients are those of
`adapter.py`, summed over each expert's rows; rows between groups are zeros, as all gradients of experts have them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from jetrl.kernels.adapters import ops
from jetrl.kernels.experts import ops as moe
from jetrl.kernels.experts.groups import Groups
from jetrl.model.adapter import Adapter
from jetrl.precision.lora import Lora


class _AdaptedRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor, a: Tensor, b: Tensor, adapter: ExpertAdapter, groups: Groups
    ) -> Tensor:
        u = ops.shrink_rows(x, adapter.a.published, groups)
        ctx.adapter, ctx.groups = adapter, groups
        ctx.save_for_backward(x, u)
        return adapter.expand_rows(y, u, groups, torch.empty_like(y) if adapter.covers(y) else y.clone())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x, u), adapter, groups, dy = ctx.saved_tensors, ctx.adapter, ctx.groups, dy.contiguous()
        du = ops.expand_rows_backward(dy, adapter.b.published, adapter.scale, adapter.places, groups)
        dx = moe.grouped_bf16_dgrad(du, adapter.a.published, groups) if ctx.needs_input_grad[0] else None

        def alone() -> Tensor:
            fresh = torch.zeros(adapter.a.weight.shape, dtype=torch.float32, device=x.device)
            moe.grouped_bf16_wgrad_into(du, x, groups, fresh)
            return fresh

        da = adapter.a.masters["weight"].gradient.add(
            lambda kept: moe.grouped_bf16_wgrad_into(du, x, groups, kept), alone
        )
        db = adapter.b.masters["weight"].gradient.add(
            lambda kept: adapter.add_rows_gradient(dy, u, groups, kept), lambda: adapter.rows_gradient(dy, u, groups)
        )
        return dx, dy, da, db, None, None


class ExpertAdapter(Adapter):
    """The adapters of all experts of a linear: `a` [E P r, K] and `b` [E * (sum of their rows), r], expert after
    expert. `sections` and `chosen` are those of one expert."""

    def __init__(
        self, lora: Lora, in_features: int, sections: tuple[int, ...], chosen: tuple[int, ...], experts: int,
        master_dtype: torch.dtype | None, dtype: torch.dtype,
    ) -> None:
        super().__init__(lora, in_features, sections, chosen, master_dtype, dtype, experts)
        self.experts = experts

    def covers(self, y: Tensor) -> bool:
        """Whether every column of `y` belongs to a projection with an adapter."""
        return sum(stop - start for (start, stop), _ in self.places) == y.shape[1]

    def rows(self, x: Tensor, y: Tensor, groups: Groups) -> Tensor:
        """The experts' output `y` [R, N] of `x` [R, K] with the adapters', with gradients where they are on; where they
        are off it takes the place of `y`."""
        if torch.is_grad_enabled():
            return _AdaptedRows.apply(x, y, self.a.weight, self.b.weight, self, groups)
        return self.expand_rows(y, ops.shrink_rows(x, self.a.published, groups), groups, y)

    def expand_rows(self, y: Tensor, u: Tensor, groups: Groups, out: Tensor) -> Tensor:
        """`y` with s * B u of each row's expert, in `out`."""
        return ops.expand_rows(y, u, self.b.published, self.scale, self.places, groups, out)

    def rows_gradient(self, dy: Tensor, u: Tensor, groups: Groups) -> Tensor:
        """dB in FP32."""
        parts = []
        for i, ((start, stop), _) in enumerate(self.places):
            size = (self.experts * (stop - start), self.rank)
            part = torch.zeros(size, dtype=torch.float32, device=dy.device)
            own = u[:, i * self.rank : (i + 1) * self.rank].contiguous()
            moe.grouped_bf16_wgrad_into(dy[:, start:stop].contiguous(), own, groups, part)
            parts.append(part.unflatten(0, (self.experts, -1)))
        return torch.cat(parts, 1).flatten(0, 1) * self.scale

    def add_rows_gradient(self, dy: Tensor, u: Tensor, groups: Groups, kept: Tensor) -> None:
        """dB, added to `kept` in FP32 and rounded to its type."""
        kept.copy_(kept.to(torch.float32) + self.rows_gradient(dy, u, groups))
