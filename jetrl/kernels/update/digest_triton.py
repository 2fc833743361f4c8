"""Digests on a GPU: many tensors in one launch, whose programs read 16 bytes a thread at once."""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels take pointers and compile-time numbers, for which there are no types)
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.kernels.update.digest import MULTIPLIER, OFFSET, Words

_PLACES = 1024  # sums that a program makes, of up to 64 words each
_READ = tl.constexpr(16)  # bytes of a thread's load, where a tensor's columns and address allow it
_AT_ONCE = 8  # loads before their words are added
_ROW = tl.constexpr(8)  # numbers of a tensor in the table
_MULTIPLIER, _OFFSET = tl.constexpr(MULTIPLIER), tl.constexpr(OFFSET)
_NO_PROGRAM = tl.constexpr(1 << 62)


@triton.jit(do_not_specialize=["count", "steps"], do_not_specialize_on_alignment=["table"])
def _digest_kernel(
    table, out, count, steps, WORD: tl.constexpr, ALIGNED: tl.constexpr, UNROLL: tl.constexpr, GROUPS: tl.constexpr,
    VECTOR: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    which = count * 0  # the last tensor whose first program is not beyond this one
    for step in range(steps):
        later = which + (1 << (steps - 1 - step))
        first = tl.load(table + later * _ROW + 1, mask=later < count, other=_NO_PROGRAM)
        which = tl.where(first <= program, later, which)
    row = table + which * _ROW
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


class _Kind(NamedTuple):
    """What a launch is compiled for: bytes of a word, columns of a group, loads at once."""

    word: int
    vector: int
    unroll: int


def digests(words: Sequence[Words]) -> Tensor:
    """`kernels.update.digest.digests`: one launch for each kind of tensor, and one copy of their table."""
    device = words[0].bits.device
    out = torch.zeros(len(words), dtype=torch.int64, device=device)
    kinds: dict[_Kind, list[list[int]]] = {}
    programs: dict[_Kind, int] = {}
    for number, one in enumerate(words):
        if one.bits.numel():
            kind, columns, groups = _shape(one)
            first = programs.get(kind, 0)
            skip = columns * (one.fold - 1)
            place = one.start * (one.bits.shape[1] // one.fold)
            row = [one.bits.data_ptr(), first, columns, skip, one.fold, place, groups, number]
            kinds.setdefault(kind, []).append(row)
            programs[kind] = first + triton.cdiv(groups, _PLACES // kind.vector)
    table, at = _sent([row for rows in kinds.values() for row in rows], device), 0
    for kind, rows in kinds.items():
        _launch(kind, table[at : at + len(rows)], out, programs[kind])
        at += len(rows)
    return out


def _shape(words: Words) -> tuple[_Kind, int, int]:
    """The kind of a tensor, its columns in groups, and all groups of its places."""
    bits, fold = words.bits, words.fold
    rows, columns, size = len(bits), bits.shape[1] // fold, bits.element_size()
    if fold == 1:  # places follow each other over all rows
        rows, columns = 1, rows * columns
    vector = _READ.value // size
    if columns % vector or bits.data_ptr() % _READ.value:
        vector = 1
    return _Kind(size, vector, _AT_ONCE if fold >= _AT_ONCE else 1), columns // vector, rows * columns // vector


def _sent(rows: list[list[int]], device: torch.device) -> Tensor:
    table = torch.tensor(rows, dtype=torch.int64).view(-1, _ROW.value)
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


def _launch(kind: _Kind, table: Tensor, out: Tensor, programs: int) -> None:
    _digest_kernel[(programs,)](
        table, out, len(table), len(table).bit_length(), WORD=kind.word, ALIGNED=kind.vector > 1,
        UNROLL=kind.unroll, GROUPS=_PLACES // kind.vector, VECTOR=kind.vector, num_warps=4,
    )
