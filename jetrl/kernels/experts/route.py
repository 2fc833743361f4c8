"""Routing as Triton kernels: the experts of a token, and the rows of each expert, bit-equal to `reference.py`.

Groups are padded: an expert's rows begin at a multiple of `block`, the rows that one tile of a grouped GEMM covers. The
number of rows R of grouped matrices is a bound from the sizes alone, so the host never waits for a count, and a CUDA
graph may capture all of it. Kernels find on the device where groups begin and end.

Legend: `T` tokens, `E` experts, `k` experts of a token, `N` choices (T * k), `R` rows. The experts of a token are
distinct, so the order of choices is the order of tokens within each expert.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels take pointers and compile-time numbers, for which there are no types)
from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.kernels.experts.groups import Groups
from jetrl.kernels.experts.reference import Choice
from jetrl.kernels.launch import LAUNCH, begin
from jetrl.kernels.logprob.triton import numerators
from jetrl.kernels.pointwise.triton import exp32
from jetrl.kernels.quantize.triton import padded
from jetrl.precision.formats import BLOCK

_AT_ONCE = 4096  # choices up to which every program counts all of them
_PART = 2048  # of more choices, those of one program; below 2**16
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


@triton.jit(do_not_specialize=["T"])
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
def _ordered(value, index, inside):
    """Integers in the order of FP32 values: NaN first, the two zeros equal; of equal ones the lower index is larger."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    bits = tl.where(value != value, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    return tl.where(inside, (bits.to(tl.int64) << 32) + (0x7FFFFFFF - index), _LEAST)


@triton.jit(do_not_specialize=["T"])
def _route_sigmoid_kernel(
    logits, bias, chosen, weights, T, E, stride, scale0, scale1, scale2, least0, least1, least2, K: tl.constexpr,
    KB: tl.constexpr, EB: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, GB: tl.constexpr,
    NORMALIZED: tl.constexpr, PDL: tl.constexpr,
):
    """One token. `scale` and `least` are float64 numbers as sums of three in FP32."""
    begin(PDL)
    row, expert = tl.program_id(0).to(tl.int64), tl.arange(0, EB)
    inside = expert < E
    z = tl.load(logits + row * stride + expert, mask=inside, other=0.0)
    s = tl.div_rn(tl.full([EB], 1.0, tl.float32), exp32(z * -1.0) + 1.0)
    keys = s + tl.load(bias + expert, mask=inside, other=0.0)
    if GROUPS > 1:
        group, size = tl.arange(0, GB), E // GROUPS
        scores = tl.full([GB], float("-inf"), tl.float32)
        for g in tl.static_range(GROUPS):
            mine = inside & (expert // size == g)
            order = _ordered(keys, expert, mine)
            first = order == tl.max(order, axis=0)
            a = tl.sum(tl.where(first, keys, 0.0), axis=0)
            order = tl.where(first, _LEAST, order)
            b = tl.sum(tl.where(order == tl.max(order, axis=0), keys, 0.0), axis=0)
            scores = tl.where(group == g, a + b, scores)
        order, kept = _ordered(scores, group, group < GROUPS), tl.zeros([EB], tl.int32)
        for _ in tl.static_range(KEPT):
            best = 0x7FFFFFFF - (tl.max(order, axis=0) & 0xFFFFFFFF)
            kept = tl.where(expert // size == best, 1, kept)
            order = tl.where(group == best, _LEAST, order)
        keys = tl.where(kept > 0, keys, float("-inf"))
    order, rank = _ordered(keys, expert, inside), tl.arange(0, KB)
    picked, own = tl.zeros([KB], tl.int64), tl.zeros([KB], tl.float64)
    total = tl.sum(tl.zeros([KB], tl.float64), axis=0)
    for j in tl.static_range(K):
        best = 0x7FFFFFFF - (tl.max(order, axis=0) & 0xFFFFFFFF)
        here = expert == best
        value = tl.sum(tl.where(here, s, 0.0), axis=0).to(tl.float64)
        total = total + value
        own, picked = tl.where(rank == j, value, own), tl.where(rank == j, best, picked)
        order = tl.where(here, _LEAST, order)
    wide = tl.zeros([KB], tl.float64)
    if NORMALIZED:
        own = own / (total + (((wide + least0) + least1) + least2))
    own = own * (((wide + scale0) + scale1) + scale2)
    tl.store(weights + row * K + rank, own.to(tl.float32), mask=rank < K)
    tl.store(chosen + row * K + rank, picked, mask=rank < K)


@triton.jit
def _bounds(count, starts, counts, ends, sizes, E, BLOCK: tl.constexpr, EB: tl.constexpr, STORE):
    """Where each expert's rows begin, and their padded sizes, from `count` [EB]; STORE writes what follows from it."""
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
    return start, size


@triton.jit(do_not_specialize=["N", "R"])
def _group_kernel(
    chosen, rows, tokens, starts, counts, ends, sizes, N, E, R, K: tl.constexpr, BLOCK: tl.constexpr,
    NB: tl.constexpr, EB: tl.constexpr, B: tl.constexpr, PDL: tl.constexpr,
):
    """Everything at once, for few choices: a program counts all of them, and places those of one expert."""
    begin(PDL)
    mine = tl.program_id(0)
    at, expert = tl.arange(0, NB), tl.arange(0, EB)
    inside = at < N
    e = tl.load(chosen + at, mask=inside, other=0).to(tl.int32)
    count = tl.histogram(e, EB, mask=inside)
    start, size = _bounds(count, starts, counts, ends, sizes, E, BLOCK, EB, mine == 0)
    first = tl.sum(tl.where(expert == mine, start, 0), axis=0)
    stop = first + tl.sum(tl.where(expert == mine, size, 0), axis=0)
    here = inside & (e == mine)
    row = first + tl.cumsum(here.to(tl.int32), axis=0) - 1
    tl.store(rows + at, row.to(tl.int64), mask=here)
    tl.store(tokens + row, at // K, mask=here)
    gap = first + tl.sum(here.to(tl.int32), axis=0) + tl.arange(0, BLOCK)
    tl.store(tokens + gap, -1, mask=gap < stop)
    for low in range(tl.sum(size, axis=0) + mine * B, R, tl.num_programs(0) * B):
        beyond = low + tl.arange(0, B)
        tl.store(tokens + beyond, -1, mask=beyond < R)


@triton.jit(do_not_specialize=["N", "R"])
def _count_kernel(
    chosen, tokens, counted, N, E, R, NB: tl.constexpr, EB: tl.constexpr, B: tl.constexpr, PDL: tl.constexpr,
):
    """Of `NB` choices, how many each expert has: `counted` [parts, E]."""
    begin(PDL)
    part, expert = tl.program_id(0), tl.arange(0, EB)
    at = part * NB + tl.arange(0, NB)
    e = tl.load(chosen + at, mask=at < N, other=0).to(tl.int32)
    tl.store(counted + part * E + expert, tl.histogram(e, EB, mask=at < N), mask=expert < E)
    for low in range(part * B, R, tl.num_programs(0) * B):
        row = low + tl.arange(0, B)
        tl.store(tokens + row, -1, mask=row < R)


@triton.jit(do_not_specialize=["N", "parts"])
def _place_kernel(
    chosen, rows, tokens, counted, starts, counts, ends, sizes, N, E, parts, K: tl.constexpr, BLOCK: tl.constexpr,
    NB: tl.constexpr, EB: tl.constexpr, PB: tl.constexpr, X: tl.constexpr, PDL: tl.constexpr,
):
    """The rows of `NB` choices, those of X experts. X sums run in one scan, each in 16 bits."""
    begin(PDL)
    part, first = tl.program_id(0), tl.program_id(1) * X
    expert = tl.arange(0, EB)
    count, before = tl.zeros((EB,), dtype=tl.int32), tl.zeros((EB,), dtype=tl.int32)
    for low in range(0, parts, PB):
        p = (low + tl.arange(0, PB))[:, None]
        c = tl.load(counted + p * E + expert[None, :], mask=(p < parts) & (expert < E)[None, :], other=0)
        count += tl.sum(c, axis=0)
        before += tl.sum(tl.where(p < part, c, 0), axis=0)
    start, _ = _bounds(count, starts, counts, ends, sizes, E, BLOCK, EB, part + first == 0)
    at = part * NB + tl.arange(0, NB)
    mine = tl.load(chosen + at, mask=at < N, other=-1).to(tl.int32) - first
    here = (at < N) & (mine >= 0) & (mine < X)
    shift = tl.where(here, mine, 0).to(tl.int64) * 16
    order = (tl.cumsum(here.to(tl.int64) << shift, axis=0) >> shift) & 0xFFFF
    row = order.to(tl.int32) - 1
    for x in tl.static_range(X):
        base = tl.sum(tl.where(expert == first + x, start + before, 0), axis=0)
        row += tl.where(mine == x, base, 0)
    tl.store(rows + at, row.to(tl.int64), mask=here)
    tl.store(tokens + row, at // K, mask=here)


def route(logits: Tensor, per_token: int, normalized: bool) -> tuple[Tensor, Tensor]:
    """`reference.route`, bit-equal."""
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


def route_sigmoid(logits: Tensor, bias: Tensor, choice: Choice) -> tuple[Tensor, Tensor]:
    """`reference.route_sigmoid`, bit-equal."""
    assert logits.dtype == bias.dtype == torch.float32 and logits.stride(1) == 1 and bias.is_contiguous()
    tokens, experts = logits.shape
    chosen = torch.empty(tokens, choice.per_token, dtype=torch.int64, device=logits.device)
    weights = torch.empty(tokens, choice.per_token, dtype=torch.float32, device=logits.device)
    if tokens:
        _route_sigmoid_kernel[(tokens,)](
            logits, bias, chosen, weights, tokens, experts, logits.stride(0), *_in_fp32(choice.scaling),
            *_in_fp32(1e-20), K=choice.per_token, KB=triton.next_power_of_2(choice.per_token),
            EB=triton.next_power_of_2(experts), GROUPS=choice.groups, KEPT=choice.kept_groups,
            GB=triton.next_power_of_2(choice.groups), NORMALIZED=choice.normalized, num_warps=1,
            enable_fp_fusion=False, **LAUNCH,
        )
    return chosen, weights


def _in_fp32(number: float) -> tuple[float, float, float]:
    """Three FP32 numbers whose sum, from the left in float64, is `number`: kernels take no others."""
    high = float(np.float32(number))
    middle = float(np.float32(number - high))
    return high, middle, float(np.float32(number - high - middle))


def tile_rows(tokens: int, per_token: int, experts: int) -> int:
    """Rows of a tile of grouped GEMMs. A row's bits do not depend on it, so it follows the load of the mean expert.

    A tile that is mostly padding costs time, one that splits a group reads the expert's matrix once more. With
    gradients it is 128: wgrad takes whole groups of 128 rows.
    """
    if torch.is_grad_enabled():
        return BLOCK
    return next((b for b in _BLOCKS if b * experts >= 2 * tokens * per_token), BLOCK)


def bound_of_rows(tokens: int, per_token: int, experts: int, block: int) -> int:
    """R = T * k + min(E, T * k) * (block - 1), rounded down to a multiple of `block`: more rows no choice can need."""
    choices = tokens * per_token
    return (choices + min(experts, choices) * (block - 1)) // block * block


def new_bounds(experts: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Memory for `starts`, `counts`, `ends` and `sizes` of groups."""
    held = torch.empty(4, padded(experts, 4) + 4, dtype=torch.int32, device=device)
    return held[0, : experts + 1], held[1, :experts], held[2, :experts], held[3, :experts]


def group(chosen: Tensor, num_experts: int, block: int | None = None) -> PaddedGroups:
    """`reference.group`, padded, of `bound_of_rows` rows; the experts of a token must be distinct."""
    tokens, k = chosen.shape
    block = block or tile_rows(tokens, k, num_experts)
    assert chosen.is_contiguous() and chosen.dtype == torch.int64 and block in _BLOCKS
    size, device = bound_of_rows(tokens, k, num_experts, block), chosen.device
    rows = torch.empty(tokens, k, dtype=torch.int64, device=device)
    of_row = torch.empty(size, dtype=torch.int32, device=device)
    arrays = new_bounds(num_experts, device)
    groups = PaddedGroups(rows, of_row, *arrays, block)
    width, choices = max(32, triton.next_power_of_2(num_experts)), tokens * k
    if not tokens:
        for array in arrays:
            array.zero_()
    elif choices <= _AT_ONCE:
        some = max(256, triton.next_power_of_2(choices))
        _group_kernel[(num_experts,)](
            chosen, rows, of_row, *arrays, choices, num_experts, size, K=k, BLOCK=block, NB=some, EB=width, B=1024,
            num_warps=4 if some <= 2048 else 8, **LAUNCH,
        )
    else:
        parts = triton.cdiv(choices, _PART)
        counted = torch.empty(parts, num_experts, dtype=torch.int32, device=device)
        _count_kernel[(parts,)](
            chosen, of_row, counted, choices, num_experts, size, NB=_PART, EB=width, B=1024, num_warps=4, **LAUNCH
        )
        _place_kernel[(parts, triton.cdiv(num_experts, 4))](
            chosen, rows, of_row, counted, *arrays, choices, num_experts, parts, K=k, BLOCK=block, NB=_PART, EB=width,
            PB=max(1, 4096 // width), X=4, num_warps=4, **LAUNCH,
        )
    return groups


def split_fp32_into_bf16(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Three BF16 tensors whose sum is `x` (FP32) exactly: 8 of its 24 bits each, unless the last is below 2**-133."""
    high = x.to(torch.bfloat16)
    rest = x - high.to(torch.float32)
    middle = rest.to(torch.bfloat16)
    return high, middle, (rest - middle.to(torch.float32)).to(torch.bfloat16)


def router_backward(d_logits: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """`experts.reference.router_backward`: `d_logits` in three parts, so BF16 GEMMs multiply exactly; sums are FP32."""
    parts = torch.cat(split_fp32_into_bf16(d_logits), 1)
    dw = torch.mm(parts.T, x, out_dtype=torch.float32).view(3, *w.shape)
    return parts @ w.repeat(3, 1), dw.sum(0)
