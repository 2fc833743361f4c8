"""Kernels for gradients and the optimizer: addition, sums of squares for the norm, AdamW in one pass per parameter;
digests of many tensors in one launch, whose threads read 16 bytes at once."""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels take pointers and compile-time numbers, for which there are no types)
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.kernels.update.adamw import AdamWStep
from jetrl.kernels.update.digest import MULTIPLIER, OFFSET, Words
from jetrl.kernels.update.squares import ROW

_PLACES = 1024  # of digests: sums that a program makes, of up to 64 words each
_READ = tl.constexpr(16)  # bytes of a thread's load, where a tensor's columns and address allow it
_AT_ONCE = 8  # loads before their words are added
_TABLE = tl.constexpr(8)  # numbers of a tensor in the table
_MULTIPLIER, _OFFSET = tl.constexpr(MULTIPLIER), tl.constexpr(OFFSET)
_NO_PROGRAM = tl.constexpr(1 << 62)


@triton.jit
def _adamw_kernel(
    param, grad, exp_avg, exp_avg_sq, size, factor, c1, beta2, c2, correction2, eps, decay, rate, B: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    inside = at < size
    g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32) * factor
    g = g.to(grad.dtype.element_ty).to(tl.float32)  # as a product that is stored, and read again
    m = tl.load(exp_avg + at, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(exp_avg_sq + at, mask=inside, other=0.0).to(tl.float32)
    p = tl.load(param + at, mask=inside, other=0.0).to(tl.float32)
    m = m + (g - m) * c1
    v = v * beta2 + (g * g) * c2
    root = tl.sqrt_rn(tl.div_rn(v, correction2 + tl.zeros_like(v))) + eps
    p = p * decay + tl.div_rn(m * rate, root)
    tl.store(exp_avg + at, m.to(exp_avg.dtype.element_ty), mask=inside)
    tl.store(exp_avg_sq + at, v.to(exp_avg_sq.dtype.element_ty), mask=inside)
    tl.store(param + at, p.to(param.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["out"])  # a part of one array for all parameters
def _squares_kernel(x, out, size, ROW: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = row * ROW + tl.arange(0, ROW)
    v = tl.load(x + at, mask=at < size, other=0.0).to(tl.float64)
    tl.store(out + row, tl.sum(v * v, axis=0))


@triton.jit
def _add_kernel(grad, x, size, B: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    inside = at < size
    more = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    total = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32) + more
    tl.store(grad + at, total.to(grad.dtype.element_ty), mask=inside)


@triton.jit
def _two_kernel(x, y, out, size, B: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    inside = at < size
    more = tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, tl.load(x + at, mask=inside, other=0.0).to(tl.float32) + more, mask=inside)


@triton.jit(do_not_specialize=["count"])
def _sum_kernel(total, parts, size, count, FIRST: tl.constexpr, B: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    inside = at < size
    place = at  # in `parts`, in 64 bits
    if FIRST:
        held = tl.load(parts + place, mask=inside, other=0.0)
        place += size
    else:
        held = tl.load(total + at, mask=inside, other=0.0)
    for _ in range(1 if FIRST else 0, count):
        part = tl.load(parts + place, mask=inside, other=0.0)
        held = (held.to(tl.float32) + part.to(tl.float32)).to(held.dtype)
        place += size
    tl.store(total + at, held, mask=inside)


@triton.jit(do_not_specialize=["count", "steps"], do_not_specialize_on_alignment=["table"])
def _digest_kernel(
    table, out, count, steps, WORD: tl.constexpr, ALIGNED: tl.constexpr, UNROLL: tl.constexpr, GROUPS: tl.constexpr,
    VECTOR: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    which = count * 0  # the last tensor whose first program is not beyond this one
    for step in range(steps):
        later = which + (1 << (steps - 1 - step))
        first = tl.load(table + later * _TABLE + 1, mask=later < count, other=_NO_PROGRAM)
        which = tl.where(first <= program, later, which)
    row = table + which * _TABLE
    address = tl.load(row)
    if WORD == 4:
        bits = address.to(tl.pointer_type(tl.int32))
    elif WORD == 2:
        bits = address.to(tl.pointer_type(tl.int16))
    else:
        bits = address.to(tl.pointer_type(tl.uint8))
    columns, skip, fold = tl.load(row + 2), tl.load(row + 3), tl.load(row + 4)
    # A group is VECTOR columns that follow each other; `columns` and `skip` are in groups.
    group = (program - tl.load(row + 1)) * GROUPS + tl.arange(0, GROUPS)
    inside = (group < tl.load(row + 6))[:, None]
    lane = tl.arange(0, VECTOR)[None, :]
    at = (group + group // columns * skip)[:, None] * VECTOR + lane
    sums = tl.zeros([GROUPS, VECTOR], tl.int64)
    for piece in range(0, fold, UNROLL):
        for more in tl.static_range(UNROLL):
            source = bits + (at + (piece + more) * columns * VECTOR)
            if ALIGNED:
                source = tl.multiple_of(source, (1, _READ))  # of a pointer, in bytes
            sums += tl.load(source, mask=inside, other=0).to(tl.int64)
    place = tl.load(row + 5) + group[:, None] * VECTOR + lane
    total = tl.sum(tl.sum(sums * ((place * _MULTIPLIER + _OFFSET) | 1), axis=1), axis=0)
    tl.atomic_add(out + tl.load(row + 7), total, sem="relaxed")


def add_in_order(total: Tensor, parts: Tensor, first: bool) -> None:
    """`kernels.update.sums.add_in_order`, in one pass over memory."""
    assert total.is_contiguous() and parts.is_contiguous()
    size = total.numel()
    _sum_kernel[(triton.cdiv(size, 2048),)](
        total, parts, size, len(parts), FIRST=first, B=2048, num_warps=8, enable_fp_fusion=False
    )


def add_rounded(grad: Tensor, x: Tensor) -> None:
    """`grad = rounded(grad + x)` in one pass, `grad` and `x` FP32 or BF16, contiguous and of one shape."""
    assert grad.shape == x.shape and grad.is_contiguous() and x.is_contiguous()
    _add_kernel[(triton.cdiv(x.numel(), 2048),)](grad, x, x.numel(), B=2048, num_warps=8, enable_fp_fusion=False)


def sum_of_two(x: Tensor, y: Tensor) -> Tensor:
    """`x + y` of two BF16 matrices in FP32, where it is exact but for one rounding."""
    assert x.shape == y.shape and x.dtype == y.dtype and x.is_contiguous() and y.is_contiguous()
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    _two_kernel[(triton.cdiv(x.numel(), 2048),)](x, y, out, x.numel(), B=2048, num_warps=8, enable_fp_fusion=False)
    return out


def row_squares(x: Tensor, out: Tensor) -> None:
    """`kernels.update.squares.row_squares`."""
    _squares_kernel[(out.shape[0],)](x, out, x.numel(), ROW=ROW, num_warps=8, enable_fp_fusion=False)


def adamw_step_(param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, numbers: AdamWStep) -> None:
    """`reference.adamw_step_`, bit-equal."""
    (beta1, beta2), size = numbers.betas, param.numel()
    _adamw_kernel[(triton.cdiv(size, 2048),)](
        param, grad, exp_avg, exp_avg_sq, size, numbers.factor, 1 - beta1, beta2, 1 - beta2, 1 - beta2**numbers.step,
        numbers.eps, 1 - numbers.lr * numbers.weight_decay, -numbers.lr / (1 - beta1**numbers.step), B=2048,
        num_warps=8, enable_fp_fusion=False,
    )


class _Digested(NamedTuple):
    """What a launch is compiled for: bytes of a word, columns of a group, loads at once."""

    word: int
    vector: int
    unroll: int


def digests(words: Sequence[Words]) -> Tensor:
    """`kernels.update.digest.digests`: one launch for each kind of tensor, and one copy of their table."""
    device = words[0].bits.device
    out = torch.zeros(len(words), dtype=torch.int64, device=device)
    kinds: dict[_Digested, list[list[int]]] = {}
    programs: dict[_Digested, int] = {}
    for number, one in enumerate(words):
        if one.bits.numel():
            kind, columns, groups = _digested(one)
            first = programs.get(kind, 0)
            skip = columns * (one.fold - 1)
            place = one.start * (one.bits.shape[1] // one.fold)
            row = [one.bits.data_ptr(), first, columns, skip, one.fold, place, groups, number]
            kinds.setdefault(kind, []).append(row)
            programs[kind] = first + triton.cdiv(groups, _PLACES // kind.vector)
    table, at = _sent([row for rows in kinds.values() for row in rows], device), 0
    for kind, rows in kinds.items():
        _launch_digests(kind, table[at : at + len(rows)], out, programs[kind])
        at += len(rows)
    return out


def _digested(words: Words) -> tuple[_Digested, int, int]:
    """The kind of a tensor, its columns in groups, and all groups of its places."""
    bits, fold = words.bits, words.fold
    rows, columns, size = len(bits), bits.shape[1] // fold, bits.element_size()
    if fold == 1:  # places follow each other over all rows
        rows, columns = 1, rows * columns
    vector = _READ.value // size
    if columns % vector or bits.data_ptr() % _READ.value:
        vector = 1
    return _Digested(size, vector, _AT_ONCE if fold >= _AT_ONCE else 1), columns // vector, rows * columns // vector


def _sent(rows: list[list[int]], device: torch.device) -> Tensor:
    table = torch.tensor(rows, dtype=torch.int64).view(-1, _TABLE.value)
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


def _launch_digests(kind: _Digested, table: Tensor, out: Tensor, programs: int) -> None:
    _digest_kernel[(programs,)](
        table, out, len(table), len(table).bit_length(), WORD=kind.word, ALIGNED=kind.vector > 1,
        UNROLL=kind.unroll, GROUPS=_PLACES // kind.vector, VECTOR=kind.vector, num_warps=4,
    )
