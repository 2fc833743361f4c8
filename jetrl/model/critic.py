"""The critic of PPO: V of each row, from hidden states of the policy (shared) or of its own model (separate).

    V_t = hidden_t @ w      w [1, D] published in BF16; FP32 sum over D, not rounded again

A separate critic has the policy's architecture in the policy's precision flow, with its own master weights and without
an lm_head. A row's value does not depend on the other rows, so packing changes none of its bits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from jetrl.errors import UserError
from jetrl.kernels.gemm import ops as gemm
from jetrl.kernels.logprob import ops as logprob
from jetrl.kernels.update.gradient import Gradient
from jetrl.model.master import values_for
from jetrl.model.published import Note
from jetrl.model.sharding import fill, shard_like
from jetrl.model.transformer import Published, Transformer
from jetrl.types import ForwardBatch


class _Values(torch.autograd.Function):
    """`hidden @ w` in FP32; the gradient of `hidden` is rounded once, that of w is summed in FP32 over the rows."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, master: Tensor, gradient: Gradient, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.gradient = gradient
        return logprob.head_logits(hidden, gemm.prepare_bf16(weight))[:, 0].contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dv: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        hidden, weight = ctx.saved_tensors
        d_hidden = (dv[:, None] * weight.to(torch.float32)).to(hidden.dtype)
        d_weight = dv[None] @ hidden.to(torch.float32)
        return d_hidden, ctx.gradient.add(lambda kept: kept.add_(d_weight), lambda: d_weight), None, None


class Critic(nn.Module):
    """A value head and, unless it is shared with the policy, its own model. Starts with V = 0 everywhere."""

    def __init__(self, policy: Transformer, shared: bool) -> None:
        super().__init__()
        master = policy.master_dtype
        assert master is not None, "a critic is trained with a policy that has masters"
        self.body: Transformer | None = None
        self._note = Note()
        with torch.device("meta"):  # a rank makes its own rows only
            if not shared:
                spec = replace(policy.spec, tie_embeddings=True)  # no lm_head: nothing reads it
                self.body = Transformer(
                    spec, policy.recipe, master_dtype=master, dtype=policy.dtype,
                    activation_checkpointing=policy.activation_checkpointing,
                    lean_backward=policy.lean_backward,
                )
            self.head = Published((1, policy.spec.hidden_size), master, policy.dtype)
        shard_like(self, policy)
        device = policy.head_weight.device
        fill(self, ((name, torch.zeros(p.shape, device=device)) for name, p in self.named_parameters()), device)
        self.to(device)
        self.start_from(policy)

    @torch.no_grad()
    def start_from(self, policy: Transformer) -> Critic:
        """Copy the policy's weights (after the warm start), with V = 0 again. Publishes."""
        if self.body is not None:
            fill(self.body, values_for(self.body, policy))
        self.head.weight.zero_()
        return self.publish()

    def publish(self) -> Critic:
        """Refresh the copies that the forward pass reads."""
        if self.body is not None:
            self.body.publish()
        self.head.publish()
        self._note.take([("critic.head", self.head.weight)])
        return self

    def values(self, hidden: Tensor) -> Tensor:
        """V [T] FP32 of final hidden states [T, D]; differentiable. UserError if the head has moved since `publish`."""
        if torch.is_grad_enabled() and self._note.moved() is not None:
            raise UserError(
                "The critic's head has changed since it was last published. Call critic.publish() after each step."
            )
        gradient = self.head.masters["weight"].gradient
        return _Values.apply(hidden, self.head.weight, gradient, self.head.published)

    def forward(self, batch: ForwardBatch) -> Tensor:
        """V [T] FP32 of every row, by the critic's own model."""
        assert self.body is not None, "a shared critic reads the policy's hidden states: call `values`"
        return self.values(self.body(batch))
