"""Latent attention for any GPU from sm_80 on: the kernels of `latent_triton` with other steps, and a backward pass in
plain Triton.

Keys are in tiles of 32, of which two fit in the 99 KB of shared memory that sm_86 and sm_89 have, and a program has as
many rows as one token has heads (at least 16), in every pass. So a row is computed by one and the same program whether
it is decoded, prefilled or trained. Prompts and training read their keys more often for that. Only pages that decoding
sequences share are read by programs of 32 rows, which have the same kind of instruction.

Legend: as in `latent_triton`.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from jetrl.kernels.attention import latent_triton, portable
from jetrl.kernels.attention.latent import STEPS as STEPS_OF
from jetrl.kernels.attention.latent import LatentSizes
from jetrl.kernels.attention.latent_products import Operand
from jetrl.kernels.attention.latent_triton import expanded_backward
from jetrl.types import PagedPlan, VarlenPlan

STEPS = STEPS_OF["triton"]


def prepare_latent(w: Tensor, sizes: LatentSizes, held: Any = None) -> Operand:
    """The published matrix itself. UserError for sizes that the kernels do not have."""
    return latent_triton.prepare_latent(w, sizes, held, STEPS)


def latent_attend(
    q: Tensor, row: Tensor, plan: VarlenPlan, scale: float, sizes: LatentSizes, need_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Packed sequences: `q` [T, N, L + R] over the rows [T, L + R] -> [T, N, L], and the log-sum-exp [N, T] FP32."""
    return latent_triton.latent_attend(q, row, plan, scale, sizes, need_lse, STEPS)


def latent_attend_cached(
    q: Tensor, row: Tensor | None, pages: Tensor, plan: PagedPlan, scale: float, sizes: LatentSizes
) -> Tensor:
    """Write the rows [T, L + R] (None: they are there) to `pages` [pages, page, L + R] at `plan.slots`; then `q` [T, N,
    L + R] over the pages of its sequences -> [T, N, L]."""
    return latent_triton.latent_attend_cached(q, row, pages, plan, scale, sizes, STEPS)


def latent_backward(
    grad: Tensor, q: Tensor, row: Tensor, w: Tensor, operand: Operand, plan: VarlenPlan, scale: float,
    sizes: LatentSizes, out: Tensor, lse: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`latent_reference.latent_backward`, deterministic, with `lse` of the forward pass."""
    return expanded_backward(_attend_backward, grad, q, row, w, plan, scale, sizes, out, lse)


def _attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, plan: VarlenPlan, scale: float, out: Tensor, lse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """`portable.attend_backward` of heads whose keys and values differ in size: zeros make up for it. `lse`: natural
    logarithms."""
    size, value = q.shape[2], v.shape[2]
    wide = max(size, value)
    q, k = (pad(x, (0, wide - size)).contiguous() for x in (q, k))
    grad, v, out = (pad(x, (0, wide - value)).contiguous() for x in (grad, v, out))
    assert lse is not None
    dq, dk, dv = portable.attend_backward(grad, q, k, v, plan, scale, out, lse * math.log2(math.e))
    return dq[..., :size].contiguous(), dk[..., :size], dv[..., :value]
