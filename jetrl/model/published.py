"""Parameters that the forward pass reads as rounded copies, refreshed by `publish`: vectors, tables, the embedding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from jetrl.kernels.gradient import grad_done, grad_dtype, grad_in_place
from jetrl.model.shards import gathered, shard_of


def rounded_into(held: Tensor | None, master: Tensor, dtype: torch.dtype) -> Tensor:
    """`master` rounded to `dtype`, in the memory of `held` if there is any. A master of that dtype is its own copy."""
    if master.dtype == dtype or held is None or held.shape != master.shape or held.device != master.device:
        return master.detach().to(dtype)
    return held.copy_(master.detach())


class Published(nn.Module):
    """A vector or table whose forward value is the BF16-rounded copy of its master, refreshed by `publish`."""

    def __init__(self, shape: tuple[int, ...], master_dtype: torch.dtype, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, dtype=master_dtype))
        self.dtype = dtype
        self.published: Tensor = torch.empty(0)

    @torch.no_grad()
    def publish(self) -> None:
        """Collective where the weight is sharded: the copy is whole on every rank."""
        shard = shard_of(self.weight)
        if shard is not None and shard.split:
            self.published = gathered(shard, self.published, self.weight.detach(), self.dtype)
            return
        self.published = rounded_into(self.published, self.weight, self.dtype)


class _Embed(torch.autograd.Function):
    """Rows of the published table; the gradient is summed in FP32, in token order, into the master."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, master: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.master = master
        return table[tokens]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor | None, None]:
        (tokens,), grad = ctx.saved_tensors, grad_in_place(ctx.master)
        if grad is None:
            dw = torch.zeros(ctx.master.shape, dtype=torch.float32, device=dy.device)
            dw.index_put_((tokens,), dy.to(torch.float32), accumulate=True)
            return None, dw.to(grad_dtype(ctx.master)), None
        # only rows in use are touched; `place` is one number for equal tokens (unique() would wait for the device)
        place = torch.searchsorted(tokens.sort().values, tokens)
        rows = torch.zeros(dy.shape, dtype=torch.float32, device=dy.device)
        rows.index_put_((place,), dy.to(torch.float32), accumulate=True)
        grad[tokens] = (grad[tokens].to(torch.float32) + rows[place]).to(grad.dtype)  # equal tokens write one value
        grad_done(ctx.master)
        return None, None, None


class Embedding(Published):
    """A published table [V, D]; `forward` looks up tokens [T] -> [T, D]."""

    def forward(self, tokens: Tensor) -> Tensor:
        return _Embed.apply(tokens, self.weight, self.published)
