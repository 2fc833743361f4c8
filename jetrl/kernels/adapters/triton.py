"""Adapters as two Triton kernels, with one order of sums for any number of tokens (`swiglu.py` has a third).

    shrink  A x: chains of 512 of K, each from zero by the tensor core, 16 at a time; their sums added in FP32, in order
            of K, from zero; rounded to BF16
    expand  B u: one chain over the rank; times s, plus y in FP32, rounded to BF16; all projections in one launch

Few tokens would leave most of the device idle while a few programs walk along K. So each chain has a program of its
own then, which writes its sum [chains, T, P r], and `expand` adds these up before it multiplies: the same order, hence
the same bits. The programs of `shrink` also write the codes of x, where the linear reads FP8: no launch more. For many
tokens a program has all chains, and u is written (the backward pass reads it).

A decode step waits for memory most of the time. So A and B are asked for before the kernel before has ended, and all
sums of chains at once.

Products are by `mma.sync` for every size (tiles are too small, or warps too few, for `wgmma`). FP fusion is off, and a
chain's sum is never the accumulator that a product adds to. `tests/kernels/triton_adapter_cases.py` runs both in the
interpreter, `tests/gpu/test_adapter_hopper.py` on a GPU.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels take pointers and compile-time numbers, for which there are no types)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.kernels.adapters.ops import Begun, Places
from jetrl.kernels.experts.groups import Groups
from jetrl.kernels.launch import LAUNCH, ON_GPU, begin, fetch
from jetrl.kernels.qtensor import QTensor
from jetrl.kernels.quantize.triton import _FLOOR_BITS, new_codes, new_scale, quantize_act, quantize_group
from jetrl.precision.formats import BLOCK

CHAIN = 512  # elements of K whose products are added by the tensor core
FEW = 256  # tokens up to which each chain has a program
MOST_PLACES = 3  # projections of a linear: q, k and v
_STEP = BLOCK  # elements of K that are loaded at a time: a group of the quantizer


@triton.jit
def _expert_of(starts, row, EXPERTS: tl.constexpr, EB: tl.constexpr):
    """The expert whose group begins last at or before `row`; EXPERTS behind the last group."""
    expert = tl.arange(0, EB)
    ends = tl.load(starts + 1 + expert, mask=expert < EXPERTS, other=0x7FFFFFFF)
    return tl.sum((ends <= row).to(tl.int32), axis=0)


@triton.jit(do_not_specialize=["m", "scale_stride"])
def _shrink_kernel(
    x, a, out, codes, scale, starts, m, n, k_size, written, x_stride, codes_stride, scale_stride, T: tl.constexpr,
    R: tl.constexpr, STEP: tl.constexpr, STEPS: tl.constexpr, SPLIT: tl.constexpr, QUANT: tl.constexpr,
    FLOOR: tl.constexpr, POW2: tl.constexpr, EXPERTS: tl.constexpr, EB: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """T tokens by R rows of `a`: if SPLIT one chain of STEPS, to FP32 sums [chains, m, n]; else all, to `out` [m, n].

    QUANT: the programs of a chain share its groups of x, and write their codes. EXPERTS: tokens are rows that are
    grouped from `starts` [EXPERTS + 1] on, in multiples of T, and `a` has n rows for each expert.
    """
    row, token = tl.program_id(0) * R + tl.arange(0, R), tl.program_id(1) * T + tl.arange(0, T)
    k = tl.arange(0, STEP)
    if PDL and SPLIT and tl.program_id(1) == 0:  # A comes from memory, x from the kernel before
        ahead = tl.program_id(2) * (STEP * STEPS) + tl.arange(0, STEP * STEPS // 64) * 64
        fetch(a + tl.minimum(row, n - 1).to(tl.int64)[:, None] * k_size + tl.minimum(ahead, k_size - 1)[None, :])
    begin(PDL)
    alive, real = (token < m)[:, None], (row < n)[None, :]
    if EXPERTS:
        expert = _expert_of(starts, tl.program_id(1) * T, EXPERTS, EB)
        alive = alive & (expert < EXPERTS)
        a += tl.minimum(expert, EXPERTS - 1).to(tl.int64) * n * k_size
    at_x = x + token.to(tl.int64)[:, None] * x_stride + k[None, :]
    at_a = a + row.to(tl.int64)[None, :] * k_size + k[:, None]
    to = out + token.to(tl.int64)[:, None] * n + row[None, :]
    acc = tl.zeros((T, R), tl.float32)
    if SPLIT:
        first = tl.program_id(2) * STEPS
        for step in tl.range(first, first + STEPS, num_stages=STAGES):
            left = k_size - step * STEP
            tokens = tl.load(at_x + step * STEP, mask=alive & (k < left)[None, :], other=0.0)
            rows = tl.load(at_a + step * STEP, mask=real & (k < left)[:, None], other=0.0)
            acc = tl.dot(tokens, rows, acc)
        tl.store(to + tl.program_id(2).to(tl.int64) * m * n, acc, mask=alive & real)
        if QUANT:
            for i in range(tl.program_id(0), STEPS, tl.num_programs(0)):
                group = first + i
                if group * STEP < k_size:
                    quantize_group(
                        x, codes, scale, token.to(tl.int64), group, m, k_size, written, x_stride, codes_stride,
                        scale_stride, FLOOR, POW2,
                    )
    else:
        total = tl.zeros((T, R), tl.float32)
        for step in tl.range(0, tl.cdiv(k_size, STEP * STEPS) * STEPS, num_stages=STAGES):
            left = k_size - step * STEP
            tokens = tl.load(at_x + step * STEP, mask=alive & (k < left)[None, :], other=0.0)
            rows = tl.load(at_a + step * STEP, mask=real & (k < left)[:, None], other=0.0)
            acc = tl.dot(tokens, rows, acc)
            ends = step % STEPS == STEPS - 1
            total = tl.where(ends, total + acc, total)
            acc = tl.where(ends, 0.0, acc)
        tl.store(to, total.to(out.dtype.element_ty), mask=alive & real)


@triton.jit
def _as_it_lies(x):
    """`x`, BF16. "Not pure" is for Triton's choice of layouts, as in `quantize.triton.widened`: else each chain's sum
    would go through shared memory by itself, with barriers, to lie as a product wants it, and only then the next be
    asked for.
    """
    if ON_GPU:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.bfloat16, is_pure=False, pack=2)
    else:
        return x


@triton.jit
def left_of(
    u, token, alive, first, m, u_stride, r: tl.constexpr, R: tl.constexpr, RANK: tl.constexpr, CHAINS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """R columns of u from `first + r` on [T, R], rounded; with CHAINS from the sums of so many chains."""
    rank = r + tl.arange(0, R)
    mask = alive & (rank < RANK)[None, :]
    at = u + token[:, None] * u_stride + (first + rank)[None, :]
    if CHAINS:
        total = tl.zeros((token.shape[0], R), tl.float32)
        for c in tl.range(0, CHAINS, loop_unroll_factor=UNROLL):
            total = total + tl.load(at + c * (m * u_stride), mask=mask, other=0.0)
        return _as_it_lies(total.to(tl.bfloat16))
    else:
        return tl.load(at, mask=mask, other=0.0)


@triton.jit
def right_of(b, row, real, r: tl.constexpr, R: tl.constexpr, RANK: tl.constexpr):
    """R columns of B from r on, of some rows, turned [R, N]. Asked for before `left_of`: both are then under way."""
    rank = r + tl.arange(0, R)
    at = b + row.to(tl.int64)[None, :] * RANK + rank[:, None]
    return tl.load(at, mask=real & (rank < RANK)[:, None], other=0.0)


@triton.jit
def multiplied(left, right, acc, CHAINS: tl.constexpr):
    """The products added to `acc`."""
    if CHAINS:  # B waits in registers until u is there
        return tl.dot(left, _as_it_lies(right), acc)
    else:
        return tl.dot(left, right, acc)


@triton.jit
def fetch_rows(b, row, last, RANK: tl.constexpr):
    """`fetch` of rows of B up to `last`."""
    at = b + tl.minimum(row, last).to(tl.int64) * RANK
    for r in tl.static_range(0, RANK, 64):
        fetch(at + r)


@triton.jit(do_not_specialize=["m"])
def _expand_kernel(
    y, u, b, out, starts, scale, m, y_stride, out_stride, u_stride, start_0, start_1, start_2, size_0, size_1, size_2,
    T: tl.constexpr, N: tl.constexpr, R: tl.constexpr, RANK: tl.constexpr, CHAINS: tl.constexpr, UNROLL: tl.constexpr,
    EXPERTS: tl.constexpr, EB: tl.constexpr, PDL: tl.constexpr,
):
    """T tokens by N columns of a projection. With CHAINS `u` has the FP32 sums of so many chains [CHAINS, m, u_stride].
    EXPERTS as in `_shrink_kernel`; `b` has all projections' rows for each.
    """
    tiles_0, tiles_1 = tl.cdiv(size_0, N), tl.cdiv(size_1, N)
    tile, place, first = tl.program_id(0), 0, 0
    start, size = start_0, size_0
    if tile >= tiles_0:
        tile, place, first, start, size = tile - tiles_0, 1, size_0, start_1, size_1
        if tile >= tiles_1:
            tile, place, first, start, size = tile - tiles_1, 2, size_0 + size_1, start_2, size_2
    col = tile * N + tl.arange(0, N)
    if PDL and CHAINS and tl.program_id(1) == 0:
        fetch_rows(b, first + col, first + size - 1, RANK)
    begin(PDL)
    token = (tl.program_id(1) * T + tl.arange(0, T)).to(tl.int64)
    alive, real = (token < m)[:, None], (col < size)[None, :]
    if EXPERTS:
        expert = _expert_of(starts, tl.program_id(1) * T, EXPERTS, EB)
        alive = alive & (expert < EXPERTS)
        b += tl.minimum(expert, EXPERTS - 1).to(tl.int64) * (size_0 + size_1 + size_2) * RANK
    both = alive & real
    v = tl.load(y + token[:, None] * y_stride + (start + col)[None, :], mask=both, other=0.0)
    acc = tl.zeros((T, N), tl.float32)
    for r in tl.static_range(0, RANK, R):
        right = right_of(b, first + col, real, r, R, RANK)
        left = left_of(u, token, alive, place * RANK, m, u_stride, r, R, RANK, CHAINS, UNROLL)
        acc = multiplied(left, right, acc, CHAINS)
    sum = (v.to(tl.float32) + acc * scale).to(tl.bfloat16)
    tl.store(out + token[:, None] * out_stride + (start + col)[None, :], sum, mask=both)


def unrolled(chains: int, most: int) -> int:
    """How many chains' sums are asked for at a time, at most `most`: a divisor, as a remainder comes one by one."""
    whole = max(size for size in range(1, most + 1) if max(1, chains) % size == 0)
    return whole if whole >= min(chains, 6) else min(8, most)


def _shrink(
    x: Tensor, a: Tensor, split: bool, codes: QTensor | None = None, pow2: bool = False,
    groups: Groups | None = None, dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """u, `dtype` [T, P r], or if `split` the sums of its chains, FP32 [chains, T, P r]; then `codes` is filled, too."""
    experts = 0 if groups is None else len(groups.counts)
    (m, k), n = x.shape, a.shape[0] // max(1, experts)
    assert x.dtype == a.dtype == torch.bfloat16 and a.is_contiguous() and x.stride(1) == 1
    assert split or codes is None
    assert not (split and experts)
    chains = triton.cdiv(k, CHAIN)
    shape = (chains, m, n) if split else (m, n)
    out = torch.empty(shape, dtype=torch.float32 if split else dtype, device=x.device)
    if not m:
        return out
    t = 16 if split or experts else 64
    r = 16 if split else min(64, max(16, triton.next_power_of_2(n)))
    q, scale = (codes.codes, codes.scale) if codes is not None else (x, x)
    _shrink_kernel[(triton.cdiv(n, r), triton.cdiv(m, t), chains if split else 1)](
        x, a, out, q.view(torch.uint8) if codes is not None else q, scale,
        x if groups is None else groups.starts, m, n, k, q.stride(0), x.stride(0), q.stride(0), scale.stride(1), T=t,
        R=r, STEP=_STEP, STEPS=CHAIN // _STEP, SPLIT=split, QUANT=codes is not None, FLOOR=_FLOOR_BITS, POW2=pow2,
        EXPERTS=experts, EB=triton.next_power_of_2(max(1, experts)),
        STAGES=CHAIN // _STEP + 1 if split else 3,  # all of a chain is under way at once
        num_warps=2,
        enable_fp_fusion=False, **LAUNCH,
    )
    return out


def _expand(
    y: Tensor, u: Tensor, b: Tensor, scale: float, places: Places, out: Tensor, chains: int,
    groups: Groups | None = None,
) -> Tensor:
    m, rank = y.shape[0], b.shape[1]
    assert y.dtype == out.dtype == b.dtype == torch.bfloat16 and y.stride(1) == out.stride(1) == 1
    assert b.is_contiguous() and u.is_contiguous() and len(places) <= MOST_PLACES
    if not m:
        return out
    rest = MOST_PLACES - len(places)
    starts = [start for (start, _), _ in places] + [0] * rest
    sizes = [stop - start for (start, stop), _ in places] + [0] * rest
    few = m <= 64 or groups is not None
    t, n = (16, 128) if few else (32, 256)
    tiles = sum(triton.cdiv(size, n) for size in sizes)
    experts = 0 if groups is None else len(groups.counts)
    _expand_kernel[(tiles, triton.cdiv(m, t))](
        y, u, b, out, y if groups is None else groups.starts, scale, m, y.stride(0), out.stride(0), u.shape[-1],
        *starts, *sizes, T=t, N=n, R=min(128, max(16, triton.next_power_of_2(rank))), RANK=rank, CHAINS=chains,
        UNROLL=unrolled(chains, 24 if few else 12), EXPERTS=experts, EB=triton.next_power_of_2(max(1, experts)),
        num_warps=2 if groups is not None else 4 if few else 8,
        enable_fp_fusion=False, **LAUNCH,
    )
    return out


def adapter_shrink(x: Tensor, a: Tensor) -> Tensor:
    """`reference.adapter_shrink`."""
    return _shrink(x, a, False)


def adapter_expand(y: Tensor, u: Tensor, b: Tensor, scale: float, places: Places, out: Tensor) -> Tensor:
    """`reference.adapter_expand`."""
    return _expand(y, u, b, scale, places, out, 0)


def adapter_begin(x: Tensor, a: Tensor, pow2: bool | None) -> Begun:
    """`reference.adapter_begin`."""
    if len(x) > FEW:
        return Begun(_shrink(x, a, False), None if pow2 is None else quantize_act(x, pow2))
    codes = None
    if pow2 is not None:
        rows, cols = x.shape
        groups = new_scale(rows, triton.cdiv(cols, BLOCK), x.device)
        codes = QTensor(new_codes(rows, cols, x.device), groups, "1x128", (rows,), (cols,))
    return Begun(_shrink(x, a, True, codes, bool(pow2)), codes)


def adapter_finish(y: Tensor, begun: Begun, b: Tensor, scale: float, places: Places) -> Tensor:
    """`reference.adapter_finish`."""
    return _expand(y, begun.left, b, scale, places, y, len(begun.left) if begun.left.ndim == 3 else 0)


def adapter_expand_backward(dy: Tensor, b: Tensor, scale: float, places: Places) -> Tensor:
    """`reference.adapter_expand_backward` by cuBLAS, which reads columns of `dy` where they are: reproducible, and
    gradients are not part of parity."""
    parts = [torch.mm(dy[:, start:stop], b[first:last], out_dtype=torch.float32)
             for (start, stop), (first, last) in places]
    return (parts[0] if len(parts) == 1 else torch.cat(parts, 1)).mul_(scale).to(dy.dtype)


def adapter_shrink_rows(x: Tensor, a: Tensor, groups: Groups) -> Tensor:
    """`reference.adapter_shrink_rows`; groups begin at multiples of 16, and rows behind the last stay as they are."""
    return _shrink(x, a, False, groups=groups)


def adapter_expand_rows(
    y: Tensor, u: Tensor, b: Tensor, scale: float, places: Places, groups: Groups, out: Tensor
) -> Tensor:
    """`reference.adapter_expand_rows`."""
    return _expand(y, u, b, scale, places, out, 0, groups)


def adapter_expand_rows_backward(dy: Tensor, b: Tensor, scale: float, places: Places, groups: Groups) -> Tensor:
    """`reference.adapter_expand_rows_backward`, by the kernel of `adapter_shrink_rows` and turned matrices."""
    matrices, parts = b.unflatten(0, (len(groups.counts), -1)), []
    for (start, stop), (first, last) in places:
        turned = matrices[:, first:last].transpose(1, 2).reshape(-1, last - first)
        parts.append(_shrink(dy[:, start:stop], turned.contiguous(), False, groups=groups, dtype=torch.float32))
    return (parts[0] if len(parts) == 1 else torch.cat(parts, 1)).mul_(scale).to(dy.dtype)
