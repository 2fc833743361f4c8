"""Gradients of Gated DeltaNet: plain FP32 forms of the ops, which autograd differentiates, on any device.

On a GPU those of the rule are `backward_triton.py`'s, and those of the convolution, the norm and the output gate
`backward_rows.py`'s; the tests compare them with these.
Gradients are outside parity: they pass straight through all roundings, and nothing of the forward pass is kept but its
inputs. They repeat to the bit on one machine: no sum is left to chance (no atomic additions).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from jetrl.kernels.delta.parts import CHUNK, HeadSizes, Parts

_L2_EPS = 1e-6


def padded(parts: Parts, device: torch.device) -> tuple[Tensor, Tensor]:
    """The rows of each sequence [B, L], its last one repeated up to whole chunks; and which are there."""
    longest = -(-max(parts.lengths) // CHUNK) * CHUNK
    count = torch.tensor(parts.lengths)
    place, first = torch.arange(longest), torch.tensor(parts.starts())
    index = first[:, None] + torch.minimum(place, (count - 1)[:, None])
    return index.to(device), (place < count[:, None]).to(device)


def gates(logits: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """`reference.delta_gates`."""
    b, a = logits.to(torch.float32).chunk(2, -1)
    return -a_log.to(torch.float32).exp() * F.softplus(a + dt_bias.to(torch.float32)), b.sigmoid()


def conv(x: Tensor, weight: Tensor, sizes: HeadSizes, parts: Parts) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.conv_heads` of whole sequences, FP32."""
    width, rows = weight.shape[1], torch.arange(len(x), device=x.device)
    local = torch.cat([torch.arange(n) for n in parts.lengths]).to(x.device)
    shifted, w = F.pad(x.to(torch.float32), (0, 0, width - 1, 0)), weight.to(torch.float32)
    total = shifted.new_zeros(())
    for i in range(width):  # a slice of the padded rows; those of another sequence are masked
        seen = (local >= width - 1 - i)[:, None]
        total = total + torch.where(seen, w[:, i] * shifted[i : i + len(rows)], 0.0)
    q, k, v = F.silu(total).split(sizes.columns, -1)
    q, k = (t.unflatten(-1, (sizes.key_heads, sizes.key_dim)) for t in (q, k))
    q, k = (t * (t.square().sum(-1, keepdim=True) + _L2_EPS).rsqrt() for t in (q, k))
    return q, k, v.unflatten(-1, (sizes.value_heads, sizes.value_dim))


def rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """`reference.delta_rule` of padded sequences, each with heads in front: q, k [B, Hv, L, dk], v [B, Hv, L, dv],
    g, beta [B, Hv, L], FP32 (or float64, for checks). L is a multiple of 64."""
    n, scale = CHUNK, k.shape[-1] ** -0.5
    state = v.new_zeros(*v.shape[:2], k.shape[-1], v.shape[-1])
    below = torch.ones(n, n, dtype=torch.bool, device=v.device).tril()
    out = []
    for at in range(0, v.shape[2], n):
        qc, kc, vc, bc = q[:, :, at : at + n], k[:, :, at : at + n], v[:, :, at : at + n], beta[:, :, at : at + n, None]
        sums = g[:, :, at : at + n].cumsum(-1)
        decay = torch.where(below, sums[..., :, None] - sums[..., None, :], -torch.inf).exp()
        gam = sums.exp()[..., None]
        lower = (bc * decay * (kc @ kc.mT)).tril(-1)
        right = bc * (vc - gam * (kc @ state))
        d = torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)
        out.append(scale * (gam * (qc @ state) + (decay * (qc @ kc.mT)) @ d))
        last = sums[..., -1:]
        state = last.exp()[..., None] * state + kc.mT @ ((last - sums).exp()[..., None] * d)
    return torch.cat(out, 2)


def conv_heads_backward(
    grads: tuple[Tensor, Tensor, Tensor], x: Tensor, weight: Tensor, sizes: HeadSizes, parts: Parts
) -> tuple[Tensor, Tensor]:
    """Gradients of `conv_heads` for x (its dtype) and the weight (FP32)."""
    with torch.enable_grad():
        x_leaf, w_leaf = (t.detach().to(torch.float32).requires_grad_() for t in (x, weight))
        found = conv(x_leaf, w_leaf, sizes, parts)
        dx, dw = torch.autograd.grad(found, (x_leaf, w_leaf), [t.to(torch.float32) for t in grads])
    return dx.to(x.dtype), dw


def gates_grads(
    grads: tuple[Tensor, Tensor], logits: Tensor, a_log: Tensor, dt_bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `delta_gates`, FP32, for the logits, A_log and dt_bias."""
    with torch.enable_grad():
        leaves = [t.detach().to(torch.float32).requires_grad_() for t in (logits, a_log, dt_bias)]
        d_logits, d_a, d_dt = torch.autograd.grad(gates(*leaves), leaves, grads)
    return d_logits, d_a, d_dt


def delta_rule_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, parts: Parts
) -> tuple[Tensor, ...]:
    """Gradients of `delta_rule` for its five inputs, in their dtypes: q and k summed over the value heads of a key
    head, in FP32."""
    index, there = padded(parts, v.device)
    repeat = v.shape[1] // k.shape[1]
    with torch.enable_grad():
        leaves = [t[index].transpose(1, 2).to(torch.float32).detach().requires_grad_() for t in (q, k, v, g, beta)]
        q_all, k_all = (t.repeat_interleave(repeat, 1) for t in leaves[:2])
        out = rule(q_all, k_all, *leaves[2:])
        d_out = grad[index].transpose(1, 2).to(torch.float32) * there[:, None, :, None]
        found = torch.autograd.grad(out, leaves, d_out)
    return tuple(d.transpose(1, 2)[there].to(t.dtype) for d, t in zip(found, (q, k, v, g, beta), strict=True))


def gated_norm_backward(grad: Tensor, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, ...]:
    """Gradients of `gated_norm` for x and the gate (their dtypes) and the weight (FP32)."""
    n, z, dy, w = (t.to(torch.float32) for t in (x, gate, grad, weight))
    inverse = (n.square().mean(-1, keepdim=True) + eps).rsqrt()
    n, sig = n * inverse, z.sigmoid()
    d_gate = dy * (n * w) * (sig * (1.0 + z * (1.0 - sig)))
    dn = dy * (z * sig)
    dw, gw = (dn * n).flatten(0, -2).sum(0), dn * w
    dx = (gw - n * (gw * n).mean(-1, keepdim=True)) * inverse
    return dx.to(x.dtype), d_gate.to(gate.dtype), dw


def output_gate_backward(grad: Tensor, x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `output_gate` for x and the gate, in their dtypes."""
    dy, sig = grad.to(torch.float32), gate.to(torch.float32).sigmoid()
    return (dy * sig).to(x.dtype), (dy * x.to(torch.float32) * (sig * (1.0 - sig))).to(gate.dtype)
