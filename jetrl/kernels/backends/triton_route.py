"""Routing as Triton kernels: the experts of a token, and the rows of each expert, bit-equal to `reference_moe`.

Groups are padded: an expert's rows begin at a multiple of `block`, the rows that one tile of a grouped GEMM covers. The
number of rows R of grouped matrices is a bound from the sizes alone, so the host never waits for a count, and a CUDA
graph may capture all of it. Kernels find on the device where groups begin and end.

Legend: `T` tokens, `E` experts, `k` experts of a token, `R` rows; `H` is a table [tokens, experts] of ones and zeros.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels take pointers and compile-time numbers, for which there are no types)
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.kernels.backends.triton_launch import LAUNCH, begin
from jetrl.kernels.backends.triton_logprob import numerators
from jetrl.kernels.backends.triton_quant import padded
from jetrl.kernels.groups import Groups
from jetrl.precision.formats import BLOCK

_TABLE = 1 << 15  # elements of H that one program holds
_LEAST = tl.constexpr(-(1 << 63))
_BLOCKS = (16, 32, 64, BLOCK)  # rows of a tile


@dataclass(frozen=True, slots=True)
class PaddedGroups(Groups):
    """Groups whose starts are multiples of `block`; `tokens` is -1 in rows of padding. int32 but for `rows`."""

    ends: Tensor  # [E], starts + counts
    sizes: Tensor  # [E], the counts rounded up
    block: int

    @property
    def total(self) -> Tensor:
        """[1], where the last group ends; no kernel reads rows beyond."""
        return self.starts[-1:]


@triton.jit
def _route_kernel(
    logits, chosen, weights, T, E, stride, K: tl.constexpr, KB: tl.constexpr, R: tl.constexpr, EB: tl.constexpr,
    NORMALIZED: tl.constexpr, PDL: tl.constexpr,
):
    begin(PDL)
    rows = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    expert = tl.arange(0, EB)
    alive, inside = (rows < T)[:, None], (expert < E)[None, :]
    z = tl.load(logits + rows[:, None] * stride + expert[None, :], mask=alive & inside, other=float("-inf"))
    nan = tl.max((z != z).to(tl.int32), axis=1)
    top = tl.where(nan > 0, float("nan"), tl.max(z, axis=1))
    n = tl.where(inside, numerators(z, top[:, None]), 0.0)
    # integers in the order of the logits: NaN first, the two zeros equal; of equal ones the lower index is larger
    bits = tl.where(z == 0.0, 0.0, z).to(tl.int32, bitcast=True)
    bits = tl.where(z != z, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    key = tl.where(inside, (bits.to(tl.int64) << 32) + (0x7FFFFFFF - expert)[None, :], _LEAST)
    rank = tl.arange(0, KB)[None, :]
    kept = tl.zeros((R, KB), dtype=tl.float64)
    picked = tl.zeros((R, KB), dtype=tl.int64)
    for j in tl.static_range(K):
        best = 0x7FFFFFFF - (tl.max(key, axis=1) & 0xFFFFFFFF)
        here = expert[None, :] == best[:, None]
        value = tl.sum(tl.where(here, n, 0.0), axis=1)
        kept = tl.where(rank == j, value[:, None], kept)
        picked = tl.where(rank == j, best[:, None], picked)
        key = tl.where(here, _LEAST, key)
    total = tl.sum(kept, axis=1) if NORMALIZED else tl.sum(n, axis=1)
    at = rows[:, None] * K + rank
    written = alive & (rank < K)
    tl.store(weights + at, (kept / total[:, None]).to(tl.float32), mask=written)
    tl.store(chosen + at, picked, mask=written)


@triton.jit
def _table(chosen, first, T, K: tl.constexpr, TB: tl.constexpr, EB: tl.constexpr):
    """H of `TB` tokens from `first` on, int32."""
    token = first + tl.arange(0, TB)
    expert = tl.arange(0, EB)
    h = tl.zeros((TB, EB), dtype=tl.int32)
    for j in tl.static_range(K):
        e = tl.load(chosen + token.to(tl.int64) * K + j, mask=token < T, other=-1).to(tl.int32)
        h += (e[:, None] == expert[None, :]).to(tl.int32)
    return h


@triton.jit
def _place(chosen, rows, tokens, row_of, first, T, K: tl.constexpr, TB: tl.constexpr, EB: tl.constexpr):
    """Write both directions of the map: `row_of` [TB, EB] is the row of a token at an expert, if it is there."""
    token = first + tl.arange(0, TB)
    expert = tl.arange(0, EB)
    for j in tl.static_range(K):
        at = token.to(tl.int64) * K + j
        e = tl.load(chosen + at, mask=token < T, other=-1).to(tl.int32)
        row = tl.sum(tl.where(e[:, None] == expert[None, :], row_of, 0), axis=1)
        tl.store(rows + at, row.to(tl.int64), mask=token < T)
        tl.store(tokens + row, token, mask=token < T)


@triton.jit
def _bounds(count, starts, counts, ends, sizes, E, BLOCK: tl.constexpr, EB: tl.constexpr, STORE: tl.constexpr):
    """Where each expert's rows begin, from `count` [EB]; STORE writes it and what follows from it."""
    expert = tl.arange(0, EB)
    size = (count + (BLOCK - 1)) // BLOCK * BLOCK
    stop = tl.cumsum(size, axis=0)
    start = stop - size
    if STORE:
        inside = expert < E
        tl.store(starts + expert, start, mask=inside)
        tl.store(starts + expert + 1, stop, mask=expert == E - 1)
        tl.store(counts + expert, count, mask=inside)
        tl.store(ends + expert, start + count, mask=inside)
        tl.store(sizes + expert, size, mask=inside)
    return start


@triton.jit
def _group_kernel(
    chosen, rows, tokens, starts, counts, ends, sizes, T, E, R, K: tl.constexpr, BLOCK: tl.constexpr,
    TB: tl.constexpr, EB: tl.constexpr, B: tl.constexpr, PDL: tl.constexpr,
):
    """Everything at once, for few tokens."""
    begin(PDL)
    for at in range(0, R, B):
        row = at + tl.arange(0, B)
        tl.store(tokens + row, -1, mask=row < R)
    h = _table(chosen, 0, T, K, TB, EB)
    start = _bounds(tl.sum(h, axis=0), starts, counts, ends, sizes, E, BLOCK, EB, True)
    tl.debug_barrier()  # every -1 is written
    _place(chosen, rows, tokens, tl.cumsum(h, axis=0) - h + start[None, :], 0, T, K, TB, EB)


@triton.jit
def _count_kernel(
    chosen, tokens, before, T, E, R, K: tl.constexpr, TB: tl.constexpr, EB: tl.constexpr, B: tl.constexpr,
):
    """Of `TB` tokens, how many each expert gets."""
    part, expert = tl.program_id(0), tl.arange(0, EB)
    count = tl.sum(_table(chosen, part * TB, T, K, TB, EB), axis=0)
    tl.store(before + part * E + expert, count, mask=expert < E)
    for at in range(part * B, R, tl.num_programs(0) * B):
        row = at + tl.arange(0, B)
        tl.store(tokens + row, -1, mask=row < R)


@triton.jit
def _scan_kernel(before, totals, parts, E, PB: tl.constexpr, XB: tl.constexpr):
    """`before` [parts, E]: counts become the sums of the parts before, in place."""
    expert = tl.program_id(0) * XB + tl.arange(0, XB)
    inside = (expert < E)[None, :]
    total = tl.zeros((XB,), dtype=tl.int32)
    for first in range(0, parts, PB):
        part = (first + tl.arange(0, PB))[:, None]
        at = before + part * E + expert[None, :]
        count = tl.load(at, mask=inside & (part < parts), other=0)
        tl.store(at, tl.cumsum(count, axis=0) - count + total[None, :], mask=inside & (part < parts))
        total += tl.sum(count, axis=0)
    tl.store(totals + expert, total, mask=expert < E)


@triton.jit
def _place_kernel(
    chosen, rows, tokens, before, totals, starts, counts, ends, sizes, T, E, K: tl.constexpr, BLOCK: tl.constexpr,
    TB: tl.constexpr, EB: tl.constexpr,
):
    part, expert = tl.program_id(0), tl.arange(0, EB)
    total = tl.load(totals + expert, mask=expert < E, other=0)
    if part == 0:
        start = _bounds(total, starts, counts, ends, sizes, E, BLOCK, EB, True)
    else:
        start = _bounds(total, starts, counts, ends, sizes, E, BLOCK, EB, False)
    start += tl.load(before + part * E + expert, mask=expert < E, other=0)
    h = _table(chosen, part * TB, T, K, TB, EB)
    _place(chosen, rows, tokens, tl.cumsum(h, axis=0) - h + start[None, :], part * TB, T, K, TB, EB)


def route(logits: Tensor, per_token: int, normalized: bool) -> tuple[Tensor, Tensor]:
    """`reference_moe.route`, bit-equal."""
    assert logits.dtype == torch.float32 and logits.stride(1) == 1
    tokens, experts = logits.shape
    chosen = torch.empty(tokens, per_token, dtype=torch.int64, device=logits.device)
    weights = torch.empty(tokens, per_token, dtype=torch.float32, device=logits.device)
    r = 1 if tokens <= 512 else 4
    if tokens:
        _route_kernel[(triton.cdiv(tokens, r),)](
            logits, chosen, weights, tokens, experts, logits.stride(0), K=per_token,
            KB=triton.next_power_of_2(per_token), R=r, EB=triton.next_power_of_2(experts), NORMALIZED=normalized,
            num_warps=4 if r > 1 else 1, enable_fp_fusion=False, **LAUNCH,
        )
    return chosen, weights


def tile_rows(tokens: int, per_token: int, experts: int) -> int:
    """Rows of a tile of grouped GEMMs. A row's bits do not depend on it, so it follows the load of the mean expert.

    A tile that is mostly padding costs time, one that splits a group reads the expert's matrix once more. With
    gradients it is 128: wgrad takes whole groups of 128 rows.
    """
    if torch.is_grad_enabled():
        return BLOCK
    return next((b for b in _BLOCKS if b * experts >= 2 * tokens * per_token), BLOCK)


def group(chosen: Tensor, num_experts: int, block: int | None = None) -> PaddedGroups:
    """`reference_moe.group`, padded; the experts of a token must be distinct.

    R = T * k + min(E, T * k) * (block - 1), rounded down to a multiple of `block`: more rows no choice can need.
    """
    tokens, k = chosen.shape
    block = block or tile_rows(tokens, k, num_experts)
    assert chosen.is_contiguous() and chosen.dtype == torch.int64 and block in _BLOCKS
    size = (tokens * k + min(num_experts, tokens * k) * (block - 1)) // block * block
    device, e = chosen.device, padded(num_experts, 4)
    rows = torch.empty(tokens, k, dtype=torch.int64, device=device)
    of_row = torch.empty(size, dtype=torch.int32, device=device)
    held = torch.empty(4, e + 4, dtype=torch.int32, device=device)
    starts, counts, ends, sizes = held[0, : num_experts + 1], *(held[i, :num_experts] for i in (1, 2, 3))
    groups = PaddedGroups(rows, of_row, starts, counts, ends, sizes, block)
    width = triton.next_power_of_2(num_experts)
    some = triton.next_power_of_2(max(tokens, 1))
    if not tokens:
        held.zero_()
    elif some * width <= _TABLE:
        _group_kernel[(1,)](
            chosen, rows, of_row, starts, counts, ends, sizes, tokens, num_experts, size, K=k, BLOCK=block, TB=some,
            EB=width, B=1024, num_warps=max(4, min(16, some * width // 1024)), **LAUNCH,
        )
    else:
        _group_many(chosen, groups, num_experts, max(16, _TABLE // 2 // width), width)
    return groups


def _group_many(chosen: Tensor, groups: PaddedGroups, experts: int, at_once: int, width: int) -> None:
    """Three kernels: counts of `at_once` tokens each, their sums, and the rows."""
    tokens, k = chosen.shape
    parts = triton.cdiv(tokens, at_once)
    before = torch.empty(parts + 1, experts, dtype=torch.int32, device=chosen.device)
    totals = before[parts]
    _count_kernel[(parts,)](
        chosen, groups.tokens, before, tokens, experts, len(groups.tokens), K=k, TB=at_once, EB=width, B=1024,
        num_warps=8,
    )
    _scan_kernel[(triton.cdiv(experts, 8),)](before, totals, parts, experts, PB=128, XB=8, num_warps=4)
    _place_kernel[(parts,)](
        chosen, groups.rows, groups.tokens, before, totals, groups.starts, groups.counts, groups.ends, groups.sizes,
        tokens, experts, K=k, BLOCK=groups.block, TB=at_once, EB=width, num_warps=8,
    )
