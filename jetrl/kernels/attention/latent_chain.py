"""A tile of keys in latent attention: what it adds to the running maximum, sum and output of each row.

All kernels of `latent_triton` and `latent_shared` go through a chunk's tiles by this one function, from the first to
the last, so a row may change from one kernel to another between two tiles.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels take pointers and compile-time numbers, for which there are no types)
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_tile(
    qc, qr, c, kr, seen, top, total, acc, scale, ROWS: tl.constexpr, TILE: tl.constexpr, MASK: tl.constexpr
):
    """Of queries [ROWS, L] and [ROWS, R] over latents [TILE, L] and shared keys [TILE, R]: new maxima [ROWS], sums
    [ROWS, 16] (of equal columns), and outputs [ROWS, L], not divided yet. MASK: a row sees keys where `seen` [ROWS,
    TILE], else all of them."""
    s = tl.dot(qr, tl.trans(kr), tl.dot(qc, tl.trans(c)))
    if MASK:
        s = tl.where(seen, s, float("-inf"))
    new = tl.maximum(top, tl.max(s, axis=1))
    known = tl.where(new == float("-inf"), 0.0, new)
    shrink = tl.exp2((top - known) * scale)
    p = tl.exp2((s - known[:, None]) * scale).to(c.dtype)
    total = tl.dot(p, tl.full([TILE, 16], 1.0, tl.float32).to(c.dtype), total * shrink[:, None])
    return new, total, tl.dot(p, c, acc * shrink[:, None])
