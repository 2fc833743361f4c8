"""A tile of keys in latent attention: what it adds to the running maximum, sum and output of each row.

All kernels of `latent_triton`, `latent_shared` and `latent_split` go through a chunk's tiles by these functions, from
the first to the last, so a row may change from one kernel to another between two tiles.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels take pointers and compile-time numbers, for which there are no types)
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def queries_of(q, at, alive, L: tl.constexpr, R: tl.constexpr):
    """[ROWS, L] and [ROWS, R]: rows `at` of `q` [.., L + R] where `alive`, else zeros."""
    here, row = alive[:, None], q + at[:, None] * (L + R)
    qc = tl.load(row + tl.arange(0, L)[None, :], mask=here, other=0.0)
    return qc, tl.load(row + (L + tl.arange(0, R))[None, :], mask=here, other=0.0)


@triton.jit
def scores_of(qc, qr, c, kr):
    """FP32 [ROWS, TILE], one chain: queries [ROWS, L] and [ROWS, R] over latents [TILE, L], shared keys [TILE, R]."""
    return tl.dot(qr, tl.trans(kr), tl.dot(qc, tl.trans(c)))


@triton.jit
def add_scores(s, c, top, total, acc, scale, TILE: tl.constexpr):
    """Of scores [ROWS, TILE], -inf where a row does not see a key, and columns of the latents [TILE, C]: new maxima
    [ROWS], sums [ROWS, 16] (of equal columns), and outputs [ROWS, C], not divided yet."""
    new = tl.maximum(top, tl.max(s, axis=1))
    known = tl.where(new == float("-inf"), 0.0, new)
    shrink = tl.exp2((top - known) * scale)
    p = tl.exp2((s - known[:, None]) * scale).to(c.dtype)
    total = tl.dot(p, tl.full([TILE, 16], 1.0, tl.float32).to(c.dtype), total * shrink[:, None])
    return new, total, tl.dot(p, c, acc * shrink[:, None])


@triton.jit
def add_tile(
    qc, qr, c, kr, seen, top, total, acc, scale, ROWS: tl.constexpr, TILE: tl.constexpr, MASK: tl.constexpr
):
    """`add_scores` of a whole tile. MASK: a row sees keys where `seen` [ROWS, TILE], else all of them."""
    s = scores_of(qc, qr, c, kr)
    if MASK:
        s = tl.where(seen, s, float("-inf"))
    return add_scores(s, c, top, total, acc, scale, TILE)
