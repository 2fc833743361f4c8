"""RMSNorm, residual, RoPE and SwiGLU with their gradients. Definitions and rounding points: `reference.py`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from jetrl.kernels.dispatch import backend_of
from jetrl.kernels.qtensor import Coded, QTensor
from jetrl.kernels.update.gradient import grad_dtype
from jetrl.types import LayerCache


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, master: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps, ctx.dtype = eps, grad_dtype(master)
        return backend_of(x).rms_norm(x, weight, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight = ctx.saved_tensors
        dx, dw = backend_of(x).rms_norm_backward(grad.contiguous(), x, weight, ctx.eps)
        return dx, dw.to(ctx.dtype), None, None


def rms_norm(x: Tensor, master: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension with the published `weight` [D]; its gradient goes to `master`."""
    if x.shape[-1] != weight.shape[0]:
        raise ValueError(f"rms_norm: rows of {x.shape[-1]}, weight of {weight.shape[0]}")
    if not torch.is_grad_enabled():
        return backend_of(x).rms_norm(x, weight, eps)
    return _RMSNorm.apply(x, master, weight, eps)


class _AddRMSNorm(torch.autograd.Function):
    """The residual sum and its norm; in one kernel, backward adds the stream's gradient to the norm's."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor, master: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        normed, total = backend_of(x).add_rms_norm(x, residual, weight, eps)
        ctx.save_for_backward(total, weight)
        ctx.eps, ctx.dtype = eps, grad_dtype(master)
        ctx.set_materialize_grads(False)
        return normed, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, stream: Tensor | None) -> tuple[Any, ...]:
        if grad is None:  # nothing used the norm
            return stream, stream, None, None, None
        total, weight = ctx.saved_tensors
        more = None if stream is None else stream.contiguous()
        dx, dw = backend_of(total).rms_norm_backward(grad.contiguous(), total, weight, ctx.eps, more)
        return dx, dx, dw.to(ctx.dtype), None, None


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return backend_of(x).add(x, y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad


def add(x: Tensor, y: Tensor) -> Tensor:
    """Residual sum: FP32 addition, rounded to the dtype of `x`."""
    return _Add.apply(x, y)


def add_rms_norm(
    x: Tensor, residual: Tensor | None, master: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """`r = x + residual` (or x alone), then RMSNorm: returns (normed, r)."""
    if residual is None:
        return rms_norm(x, master, weight, eps), x
    if not torch.is_grad_enabled():
        return backend_of(x).add_rms_norm(x, residual, weight, eps)
    return _AddRMSNorm.apply(x, residual, master, weight, eps)


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return backend_of(x).rope(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return backend_of(grad).rope_backward(grad, cos, sin), None, None


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate-half RoPE of `x` [T, N, H] with FP32 `cos`, `sin` [T, H/2]."""
    return _Rope.apply(x, cos, sin)


class _RoundHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return backend_of(x).round_heads(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def round_heads(x: Tensor) -> Tensor:
    """`x` [T, G, H] as the FP8 KV cache holds it: quantized by heads, and back. Its gradient passes straight through.

    Definition: `reference.round_heads`. Rounding again changes no value.
    """
    return _RoundHeads.apply(x)


class _NormRope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, q_master: Tensor | None, k_master: Tensor | None, norms: tuple[Tensor, Tensor] | None,
        heads: tuple[int, int], head_dim: int, eps: float, tables: tuple[Tensor, Tensor], positions: Tensor,
        fp8_kv: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(qkv, positions, *tables, *(norms or ()))
        ctx.eps, ctx.dtypes = eps, [grad_dtype(m) for m in (q_master, k_master) if m is not None]
        return backend_of(qkv).qkv_norm_rope(qkv, heads, head_dim, norms, eps, tables, positions, None, fp8_kv)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        qkv, positions, cos, sin, *norms = ctx.saved_tensors
        d_qkv, d_norms = backend_of(qkv).qkv_norm_rope_backward(
            grads, qkv, tuple(norms) or None, ctx.eps, (cos, sin), positions
        )
        d_q, d_k = (d.to(t) for d, t in zip(d_norms, ctx.dtypes, strict=True)) if d_norms is not None else (None, None)
        return d_qkv, d_q, d_k, *[None] * 7  # gradients of rounded keys and values pass straight through


def norm_rope(
    qkv: Tensor, heads: tuple[int, int], head_dim: int, masters: tuple[Tensor, Tensor] | None,
    norms: tuple[Tensor, Tensor] | None, eps: float, tables: tuple[Tensor, Tensor], positions: Tensor,
    fp8_kv: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """`qkv_norm_rope` without a cache, with gradients: those of the norms' weights go to `masters`."""
    q_master, k_master = masters or (None, None)
    return _NormRope.apply(qkv, q_master, k_master, norms, heads, head_dim, eps, tables, positions, fp8_kv)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return backend_of(gate_up).swiglu(gate_up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        return backend_of(grad).swiglu_backward(grad.contiguous(), gate_up)


def swiglu(gate_up: Tensor) -> Tensor:
    """`gate * sigmoid(gate) * up` of `gate_up` [T, 2F] -> [T, F], rounded once."""
    if gate_up.shape[-1] % 2:
        raise ValueError(f"swiglu takes gate and up side by side, got an odd width {gate_up.shape[-1]}")
    return _SwiGLU.apply(gate_up)


# ---- several ops in one kernel, where no gradient is needed; the same bits as one after another ----------------------


def add_rms_norm_quantize(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, pow2: bool
) -> tuple[QTensor, Tensor]:
    """`quantize_act(add_rms_norm(x, residual))` and the new residual."""
    assert not torch.is_grad_enabled()
    return backend_of(x).add_rms_norm_quantize(x, residual, weight, eps, pow2)


def add_rms_norm_coded(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, pow2: bool
) -> tuple[Coded, Tensor]:
    """The norm's rows in BF16 and their codes, and the new residual."""
    assert not torch.is_grad_enabled()
    return backend_of(x).add_rms_norm_coded(x, residual, weight, eps, pow2)


def swiglu_quantize(gate_up: Tensor, pow2: bool) -> QTensor:
    """`quantize_act(swiglu(gate_up))`."""
    assert not torch.is_grad_enabled()
    return backend_of(gate_up).swiglu_quantize(gate_up, pow2)


def qkv_norm_rope(
    qkv: Tensor, heads: tuple[int, int], head_dim: int, norms: tuple[Tensor, Tensor] | None, eps: float,
    tables: tuple[Tensor, Tensor], positions: Tensor, cache: tuple[LayerCache, Tensor] | None, fp8_kv: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """QK-norm (`norms`: weights [H] of q and k), RoPE, and the write to the cache, of `qkv` [T, (N + 2G) * H].

    `heads` (N, G); `tables` cos and sin [positions, H/2]; `cache` (pages of the layer, slots [T]). Returns q [T, N, H]
    and k, v [T, G, H], or, with a cache, q and the cache's own keys and values. `fp8_kv`: the cache gets codes and
    scales; without a cache k and v come back as `round_heads` makes them, which is what an FP8 cache holds.
    """
    assert not torch.is_grad_enabled()
    return backend_of(qkv).qkv_norm_rope(qkv, heads, head_dim, norms, eps, tables, positions, cache, fp8_kv)
