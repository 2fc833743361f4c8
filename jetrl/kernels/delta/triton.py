"""Gated DeltaNet on a GPU: the delta rule's forms, gates and norms; the convolution is in `conv.py`.

`reference.py` has the formulas. Sums are the tensor core's here (BF16 operands, an FP32 accumulator), so last bits are
not a CPU's. The rule has three forms: `general.py` for any pieces of sequences, `tokens.py` for one token of each, and
`packed.py` for whole ones of which no state is kept. A row has the same bits in all: the same products of the same
numbers, each with the same beginning and the same order, and nothing of other rows. Where a row lies in a tile, which
factor of a product is the left one, and which instruction multiplies, changes none of it.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels take pointers and compile-time numbers, for which there are no types)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.kernels import launch
from jetrl.kernels.delta.conv import conv_heads
from jetrl.kernels.delta.general import general_rule
from jetrl.kernels.delta.packed import packed_rule
from jetrl.kernels.delta.parts import CHUNK, DeltaState, Parts
from jetrl.kernels.delta.tokens import token_rule
from jetrl.kernels.tiles import kind_of


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, parts: Parts, kept: DeltaState | None
) -> Tensor:
    """See `reference.delta_rule`; BF16, heads of 16 to 128, a power of two."""
    assert all(t.is_contiguous() for t in (q, k, v, g, beta)) and v.dtype == torch.bfloat16
    if kept is not None and parts.single:
        return token_rule(q, k, v, g, beta, parts, kept)
    if kept is None and kind_of(launch.CAPABILITY) != "tcgen05":  # by which the general form moves states; not compared
        return packed_rule(q, k, v, g, beta, parts)
    return general_rule(q, k, v, g, beta, parts, kept)


# ---- gates and norms ------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["HV", "count"])
def _gates_kernel(z_p, a_p, dt_p, g_p, beta_p, HV, count, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    here, t, h = at < count, at // HV, at % HV
    b = tl.load(z_p + t * 2 * HV + h, mask=here, other=0.0)
    x = tl.load(z_p + t * 2 * HV + HV + h, mask=here, other=0.0) + tl.load(dt_p + h, mask=here, other=0.0)
    soft = tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))
    tl.store(g_p + at, -(tl.exp(tl.load(a_p + h, mask=here, other=0.0)) * soft), mask=here)
    tl.store(beta_p + at, tl.div_rn(1.0, tl.exp(-b) + 1.0), mask=here)


def delta_gates(logits: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """See `reference.delta_gates`."""
    heads = logits.shape[1] // 2
    g, beta = (torch.empty(len(logits), heads, dtype=torch.float32, device=logits.device) for _ in range(2))
    assert logits.is_contiguous() and a_log.dtype == dt_bias.dtype == torch.float32
    n = 256
    _gates_kernel[(triton.cdiv(g.numel(), n),)](
        logits, a_log, dt_bias, g, beta, heads, g.numel(), N=n, num_warps=4, enable_fp_fusion=False
    )
    return g, beta


@triton.jit(do_not_specialize=["stride"])
def _gate_kernel(
    x_p, gate_p, w_p, out_p, stride, step, H: tl.constexpr, D: tl.constexpr, B: tl.constexpr, EPS: tl.constexpr,
    NORM: tl.constexpr,
):
    """A (row, head). `NORM`: the RMSNorm of the head, times silu(gate); else the head, times sigmoid(gate)."""
    t, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    c = tl.arange(0, B)
    inside = c < D
    x = tl.load(x_p + (t * H + h) * D + c, mask=inside, other=0.0).to(tl.float32)
    z = tl.load(gate_p + t * stride + h * step + c, mask=inside, other=0.0).to(tl.float32)
    factor = tl.div_rn(1.0, tl.exp(-z) + 1.0)
    if NORM:
        inverse = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(x * x, axis=0) / D + EPS))
        w = tl.load(w_p + c, mask=inside, other=0.0).to(tl.float32)
        x = ((x * inverse).to(tl.bfloat16).to(tl.float32) * w).to(tl.bfloat16).to(tl.float32)
        factor = z * factor
    tl.store(out_p + (t * H + h) * D + c, (x * factor).to(tl.bfloat16), mask=inside)


def _gated(x: Tensor, gate: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    (count, heads, size), out = x.shape, torch.empty_like(x)
    assert x.is_contiguous() and gate.stride(2) == 1
    _gate_kernel[(count, heads)](
        x, gate, x if weight is None else weight, out, gate.stride(0), gate.stride(1), H=heads, D=size,
        B=triton.next_power_of_2(size), EPS=eps, NORM=weight is not None, num_warps=1, enable_fp_fusion=False,
    )
    return out


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `reference.gated_norm`."""
    return _gated(x, gate, weight, eps)


def output_gate(x: Tensor, gate: Tensor) -> Tensor:
    """See `reference.output_gate`."""
    return _gated(x, gate, None, 0.0)


__all__ = ["CHUNK", "conv_heads", "delta_gates", "delta_rule", "general_rule", "gated_norm", "output_gate"]
