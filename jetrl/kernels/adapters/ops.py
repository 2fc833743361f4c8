"""What a low-rank adapter adds to a linear's output, without gradients (`model/adapter.py` has those).

    u = rounded(A x)          y = rounded(y0 + s * (B u))       in FP32, for each projection that has an adapter

`x` [T, K], `a` [P r, K] (one A below the other), `u` [T, P r], `b` [sum of the projections' rows, r], `y` [T, N], all
BF16. `places` has for each of the P projections its columns in y and its rows in b. A row's bits do not depend on the
other rows. Definition: `reference.py`.

The linear's own GEMM lies between `begin` and `finish`, which have the bits of `shrink` and `expand`.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from jetrl.kernels.dispatch import backend_of
from jetrl.kernels.experts.groups import Groups
from jetrl.kernels.qtensor import Coded, QTensor, Reads
from jetrl.types import LayerCache

Places = tuple[tuple[tuple[int, int], tuple[int, int]], ...]


class Begun(NamedTuple):
    """u, or what a backend makes it of later; and the codes of x, if they were asked for."""

    left: Tensor
    codes: QTensor | None


class Heads(NamedTuple):
    """How q, k and v come of the fused projection, and where they are kept: `pointwise.ops.qkv_norm_rope`'s arguments.
    """

    heads: tuple[int, int]
    head_dim: int
    norms: tuple[Tensor, Tensor] | None
    eps: float
    tables: tuple[Tensor, Tensor]
    positions: Tensor
    cache: tuple[LayerCache, Tensor] | None
    fp8_kv: bool


def shrink(x: Tensor, a: Tensor) -> Tensor:
    """u."""
    assert x.shape[1] == a.shape[1] and x.dtype == a.dtype
    return backend_of(x).adapter_shrink(x, a)


def expand(y: Tensor, u: Tensor, b: Tensor, scale: float, places: Places, out: Tensor) -> Tensor:
    """`y` with what adapters add, in `out`, whose other columns stay as they are; it may be `y` itself."""
    _check(y, u.shape[1], b, places)
    assert out.shape == y.shape and out.dtype == y.dtype and len(u) == len(y)
    return backend_of(y).adapter_expand(y, u, b, scale, places, out)


def begin(x: Tensor, a: Tensor, pow2: bool | None = None) -> Begun:
    """The first half, to be given to `finish`. With `pow2`, also `quantize_act(x, pow2)`, which the linear reads."""
    assert x.shape[1] == a.shape[1] and x.dtype == a.dtype
    return backend_of(x).adapter_begin(x, a, pow2)


def finish(y: Tensor, begun: Begun, b: Tensor, scale: float, places: Places) -> Tensor:
    """The second half, in place of `y`."""
    _check(y, begun.left.shape[-1], b, places)
    return backend_of(y).adapter_finish(y, begun, b, scale, places)


def finish_heads(
    qkv: Tensor, begun: Begun, b: Tensor, scale: float, places: Places, of: Heads
) -> tuple[Tensor, Tensor, Tensor]:
    """`pointwise.ops.qkv_norm_rope` of what `finish` makes of `qkv`. What is in `qkv` afterwards is not said."""
    _check(qkv, begun.left.shape[-1], b, places)
    return backend_of(qkv).adapter_finish_heads(qkv, begun, b, scale, places, of)


def finish_swiglu(
    y: Tensor, begun: Begun, b: Tensor, scale: float, places: Places, reads: Reads
) -> Tensor | QTensor | Coded:
    """`swiglu` of what `finish` makes of `y` [T, 2F]: gate, then up, of which at least one has an adapter. As the next
    linear `reads` it [T, F]: in BF16, in codes, or both. What is in `y` afterwards is not said."""
    _check(y, begun.left.shape[-1], b, places)
    assert reads.values or reads.pow2 is not None
    return backend_of(y).adapter_finish_swiglu(y, begun, b, scale, places, reads.pow2, reads.values)


def expand_backward(dy: Tensor, b: Tensor, scale: float, places: Places) -> Tensor:
    """The gradient of u [T, P r] from `dy` [T, N]: s times the sums over rows of B in FP32, rounded once."""
    _check(dy, len(places) * b.shape[1], b, places)
    return backend_of(dy).adapter_expand_backward(dy, b, scale, places)


# ---- of experts: each row of the grouped matrices [R, ...] by the adapters of its expert -----------------------------


def shrink_rows(x: Tensor, a: Tensor, groups: Groups) -> Tensor:
    """u [R, P r] of `x` [R, K] and `a` [E P r, K], expert after expert."""
    assert x.shape[1] == a.shape[1] and x.dtype == a.dtype and a.shape[0] % len(groups.counts) == 0
    return backend_of(x).adapter_shrink_rows(x, a, groups)


def expand_rows(
    y: Tensor, u: Tensor, b: Tensor, scale: float, places: Places, groups: Groups, out: Tensor
) -> Tensor:
    """`expand` of `y` [R, N], `u` [R, P r] and `b` [E * rows, r]; `places` are those of one expert."""
    _check(y, u.shape[1], b[: len(b) // len(groups.counts)], places)
    assert out.shape == y.shape and out.dtype == y.dtype and len(u) == len(y)
    return backend_of(y).adapter_expand_rows(y, u, b, scale, places, groups, out)


def expand_rows_backward(dy: Tensor, b: Tensor, scale: float, places: Places, groups: Groups) -> Tensor:
    """The gradient of u [R, P r], as `expand_backward` has it."""
    _check(dy, len(places) * b.shape[1], b[: len(b) // len(groups.counts)], places)
    return backend_of(dy).adapter_expand_rows_backward(dy, b, scale, places, groups)


def _check(y: Tensor, ranks: int, b: Tensor, places: Places) -> None:
    assert ranks == len(places) * b.shape[1] and places[-1][1][1] == b.shape[0] and b.dtype == y.dtype
    assert all(last - first == stop - start for (start, stop), (first, last) in places)
