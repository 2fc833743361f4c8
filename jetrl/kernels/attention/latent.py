"""Latent attention with gradients: absorbed forward, expanded backward. Definition: `latent_reference.py`.

Legend: `T` tokens, `N` heads; a query has `P` values for the latent [L] and `R` for the shared key, a value `V`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from jetrl.errors import UserError
from jetrl.kernels.dispatch import backend_of
from jetrl.kernels.gemm import ops as gemm
from jetrl.kernels.qtensor import QTensor
from jetrl.kernels.update.gradient import Gradient
from jetrl.types import PagedPlan, VarlenPlan


class LatentSizes(NamedTuple):
    """N, P, R, L and V."""

    heads: int
    nope: int
    rope: int
    rank: int
    value: int


class Steps(NamedTuple):
    """Of a GPU's backend: keys of a tile, the least rows of a program where sequences have several tokens, steps on
    their way with few rows (where each may have a processor, and else), the most heads, and rows of a program that
    reads what sequences share."""

    tile: int
    rows: int
    stages: tuple[int, int]
    heads: int
    shared: int


STEPS = {
    "hopper": Steps(64, 64, (3, 2), 64, 64), "hopper_scaled_mm": Steps(64, 64, (3, 2), 64, 64),
    "triton": Steps(32, 16, (2, 2), 32, 32),
}
LEAST = 16  # the smallest part of a row that the kernels of a GPU take


def require_sizes(sizes: LatentSizes, steps: Steps) -> None:
    """UserError for sizes that the kernels of a GPU do not have."""
    wrong = [
        f"{name} = {size}" for name, size in (("kv_lora_rank", sizes.rank), ("qk_rope_head_dim", sizes.rope))
        if size & (size - 1) or size < LEAST
    ]
    if wrong or sizes.heads > steps.heads:
        raise UserError(
            f"latent attention on a GPU takes a latent and a shared key whose sizes are powers of two, and with these "
            f"kernels up to {steps.heads} heads; this model has {', '.join([*wrong, f'{sizes.heads} heads'])}. Set "
            'device = "cpu".'
        )


def require_page(page: int, steps: Steps) -> None:
    """UserError for pages that the kernels of a GPU do not read."""
    if page % steps.tile:
        raise UserError(
            f"rollout.page_size = {page}: latent attention on a GPU reads pages of whole tiles of {steps.tile} keys. "
            "Set it to 128."
        )


class Up(NamedTuple):
    """The matrix `kv_b` [N * (P + V), L]: where its gradient goes, what is published of it, and its operand."""

    gradient: Gradient
    published: Tensor
    operand: Any


def prepare(w: Tensor, sizes: LatentSizes, held: Any = None) -> Any:
    """The operand of `absorb` and `lift`; `held`: see `gemm.ops.prepare_fp8`."""
    return backend_of(w).prepare_latent(w, sizes, held)


def apart(x: Tensor) -> Tensor:
    """Pairs side by side [..., R] as the even values, then the odd ones: as the rotation by halves takes them."""
    return x.unflatten(-1, (-1, 2)).mT.flatten(-2).contiguous()


class Entry(NamedTuple):
    """What `enter` needs beside projections: weight [L] and epsilon of the latents' norm, cos and sin [positions, R/2],
    where tokens stand [T], and, where rows are kept, pages [pages, page, L + R] and slots [T] (-1: nowhere)."""

    norm: Tensor
    eps: float
    tables: tuple[Tensor, Tensor]
    positions: Tensor
    cache: tuple[Tensor, Tensor] | None


def enter(q: Tensor, kv: Tensor, up: Up, entry: Entry, sizes: LatentSizes) -> tuple[Tensor, Tensor | None]:
    """`q` [T, N * (P + R)] and `kv` [T, L + R] of the projections -> absorbed, rotated queries [T, N, L + R], and the
    rows [T, L + R]; with pages, the rows are written there, and None is returned for them. No gradient."""
    found: tuple[Tensor, Tensor | None] = backend_of(q).latent_enter(q, kv, up.operand, entry, sizes)
    return found


def absorb(q: Tensor, up: Up, sizes: LatentSizes) -> Tensor:
    """`q` [T, N, P + R], rotated -> [T, N, L + R]; no gradient."""
    return backend_of(q).latent_absorb(q, up.operand, sizes)


def lift(a: Tensor, up: Up, sizes: LatentSizes) -> Tensor:
    """`a` [T, N, L] -> [T, N * V]; no gradient."""
    return backend_of(a).latent_lift(a, up.operand, sizes)


def lift_quantize(a: Tensor, up: Up, sizes: LatentSizes, pow2: bool) -> QTensor:
    """`quantize_act(lift(...), pow2)`: what an FP8 linear reads of it."""
    found: QTensor = backend_of(a).latent_lift_quantize(a, up.operand, sizes, pow2)
    return found


def attend_absorbed(
    q: Tensor, row: Tensor | None, pages: Tensor | None, plan: VarlenPlan | PagedPlan, scale: float, sizes: LatentSizes
) -> Tensor:
    """`q` [T, N, L + R] over rows [T, L + R] -> [T, N, L], no gradient. `PagedPlan`: the rows are written to `pages`
    [pages, page, L + R] of the layer first (None: they are there), then each query attends to its sequence's."""
    backend = backend_of(q)
    if isinstance(plan, VarlenPlan):
        assert row is not None
        return backend.latent_attend(q, row, plan, scale, sizes, False)[0]
    assert pages is not None
    return backend.latent_attend_cached(q, row, pages, plan, scale, sizes)


class _LatentAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, row: Tensor, master: Tensor, up: Up, plan: VarlenPlan, scale: float, sizes: LatentSizes
    ) -> Tensor:
        backend = backend_of(q)
        absorbed = backend.latent_absorb(q, up.operand, sizes)
        a, lse = backend.latent_attend(absorbed, row, plan, scale, sizes, True)
        del absorbed
        out = backend.latent_lift(a, up.operand, sizes)
        ctx.save_for_backward(q, row, up.published, out, lse)
        ctx.rest = up, plan, scale, sizes
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, row, w, out, lse = ctx.saved_tensors
        up, plan, scale, sizes = ctx.rest
        dq, d_row, d_kv = backend_of(q).latent_backward(
            grad.contiguous(), q, row, w, up.operand, plan, scale, sizes, out, lse
        )
        dw = None
        if ctx.needs_input_grad[2]:
            c = row[:, : sizes.rank].contiguous()
            dw = up.gradient.add(lambda kept: gemm.bf16_wgrad_into(d_kv, c, kept), lambda: gemm.bf16_wgrad(d_kv, c))
        return dq, d_row, dw, None, None, None, None


def latent_attention(
    q: Tensor, row: Tensor, up: Up, plan: VarlenPlan, scale: float, sizes: LatentSizes
) -> Tensor:
    """`q` [T, N, P + R] and the rows [T, L + R] of packed sequences -> [T, N * V], with gradients."""
    return _LatentAttention.apply(q, row, up.gradient.param, up, plan, scale, sizes)
