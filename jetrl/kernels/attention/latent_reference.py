"""The definition of latent attention on a CPU: absorbed in forward passes, expanded in the backward one.

    enter    c, k of a row are normed and rotated, and q_rope is rotated; `pointwise`'s ops, by pairs side by side
    absorb   q~ = rounded(q_nope W_UK) | q_rope     head by head, sums by `reference.bf16_gemm`
    attend   a = rounded(softmax(scale q~ rowᵀ) c)  `reference`'s attention of one key head [L + R], whose values are
                                                    the first L of the same row
    lift     y = rounded(a W_UVᵀ)                   head by head

So a row's result depends on its query and on the rows before it alone. W_UK [P, L] and W_UV [V, L] of head n are the
rows of `kv_b` [N * (P + V), L] from n * (P + V) on.

The gradient is that of the expanded form: keys rounded(c W_UKᵀ) | k and values rounded(c W_UVᵀ) are made again, and
attention's own backward pass gives theirs, in FP32, rounded once; that of k is first summed over heads, in FP32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jetrl.kernels import reference as ref
from jetrl.kernels.attention.latent import Entry, LatentSizes, apart
from jetrl.kernels.attention.reference import attend_backward, attend_packed, attend_pages
from jetrl.kernels.gemm.reference import bf16_dgrad
from jetrl.kernels.qtensor import QTensor
from jetrl.kernels.quantize.reference import quantize_act
from jetrl.types import LayerCache, PagedPlan, VarlenPlan

Operand = tuple[list[ref.PreparedBF16], list[ref.PreparedBF16], ref.PreparedBF16]


def prepare_latent(w: Tensor, sizes: LatentSizes, held: Any = None) -> Operand:
    """The operands of `absorb`, `lift` and `expand`, of the published `kv_b` [N * (P + V), L]."""
    heads = w.view(sizes.heads, sizes.nope + sizes.value, sizes.rank)
    up_k = [ref.PreparedBF16(head[: sizes.nope].T.contiguous()) for head in heads]
    up_v = [ref.PreparedBF16(head[sizes.nope :].contiguous()) for head in heads]
    return up_k, up_v, ref.PreparedBF16(w)


def latent_enter(
    q: Tensor, kv: Tensor, operand: Operand, entry: Entry, sizes: LatentSizes
) -> tuple[Tensor, Tensor | None]:
    """`q` [T, N * (P + R)] and `kv` [T, L + R] of the projections -> absorbed, rotated queries [T, N, L + R], and the
    rows [T, L + R]; with `entry.cache` the rows are written there (slot -1: nowhere), and None is returned for them."""
    c, shared = kv.split((sizes.rank, sizes.rope), -1)
    cos, sin = (table[entry.positions] for table in entry.tables)
    nope, turned = q.reshape(-1, sizes.heads, sizes.nope + sizes.rope).split((sizes.nope, sizes.rope), -1)
    shared, turned = (ref.rope(apart(x), cos, sin) for x in (shared[:, None], turned))
    row = torch.cat((ref.rms_norm(c, entry.norm, entry.eps), shared[:, 0]), -1)
    absorbed = latent_absorb(torch.cat((nope, turned), -1), operand, sizes)
    if entry.cache is None:
        return absorbed, row
    _write(row, *entry.cache)
    return absorbed, None


def _write(row: Tensor, pages: Tensor, slots: Tensor) -> None:
    real = slots >= 0
    pages.flatten(0, 1)[slots[real]] = row[real]


def latent_absorb(q: Tensor, operand: Operand, sizes: LatentSizes) -> Tensor:
    """`q` [T, N, P + R] -> [T, N, L + R]."""
    nope, rope = q.split((sizes.nope, sizes.rope), -1)
    met = [ref.bf16_gemm(nope[:, n].contiguous(), w).to(q.dtype) for n, w in enumerate(operand[0])]
    return torch.cat((torch.stack(met, 1), rope), -1)


def latent_lift(a: Tensor, operand: Operand, sizes: LatentSizes) -> Tensor:
    """`a` [T, N, L] -> [T, N * V]."""
    return torch.cat([ref.bf16_gemm(a[:, n].contiguous(), w).to(a.dtype) for n, w in enumerate(operand[1])], -1)


def latent_lift_quantize(a: Tensor, operand: Operand, sizes: LatentSizes, pow2: bool) -> QTensor:
    """`quantize_act(latent_lift(...))`."""
    return quantize_act(latent_lift(a, operand, sizes), pow2)


def latent_attend(
    q: Tensor, row: Tensor, plan: VarlenPlan, scale: float, sizes: LatentSizes, need_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Packed sequences: `q` [T, N, L + R] over the rows [T, L + R] -> [T, N, L], and the log-sum-exp if there is one
    (None here)."""
    keys = row[:, None]
    return attend_packed(q, keys, keys[..., : sizes.rank], plan, scale), None


def latent_attend_cached(
    q: Tensor, row: Tensor | None, pages: Tensor, plan: PagedPlan, scale: float, sizes: LatentSizes
) -> Tensor:
    """Write the rows [T, L + R] to `pages` [pages, page, L + R] at `plan.slots` (-1: nowhere; None: all are there);
    then `q` [T, N, L + R] over the pages of its sequences -> [T, N, L]."""
    if row is not None:
        _write(row, pages, plan.slots)
    keys = pages[:, :, None]
    return attend_pages(q, LayerCache(keys, keys[..., : sizes.rank]), plan, scale)


def latent_backward(
    grad: Tensor, q: Tensor, row: Tensor, w: Tensor, operand: Operand, plan: VarlenPlan, scale: float,
    sizes: LatentSizes, out: Tensor, lse: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q [T, N, P + R], of the row [T, L + R], and of what `kv_b` gave [T, N * (P + V)], from `grad` of the
    output `out` [T, N * V]."""
    n = sizes.heads
    c, shared = row.split((sizes.rank, sizes.rope), -1)
    kv = ref.bf16_gemm(c.contiguous(), operand[2]).to(q.dtype).view(-1, n, sizes.nope + sizes.value)
    k_nope, v = kv.split((sizes.nope, sizes.value), -1)
    k = torch.cat((k_nope, shared[:, None].expand(-1, n, -1)), -1)
    dq, dk, dv = attend_backward(grad.view(-1, n, sizes.value), q, k, v.contiguous(), plan, scale)
    d_kv = torch.cat((dk[..., : sizes.nope], dv), -1).flatten(1)
    d_shared = dk[..., sizes.nope :].to(torch.float32).sum(1).to(row.dtype)
    return dq, torch.cat((bf16_dgrad(d_kv, w), d_shared), -1), d_kv
