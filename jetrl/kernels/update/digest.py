"""Digests of tensors: 64-bit numbers by which two computations are compared bit for bit, without their tensors.

A tensor [N, K] is read as 16- or 32-bit words (bytes, where a row has an odd number). With c of them in row r folded
onto C columns,

    digest = sum over r, c of  (sum of the words of row r in column c) * odd(r * C + c)   modulo 2**64

Sums of integers do not depend on their order, so a GPU adds as it likes, and the digests of the rows that ranks hold
add up to the whole's. A word that changes by d changes the digest by d * odd, which is never 0 modulo 2**64: one
flipped bit is always seen. Words that change places are seen unless they fall into one column of one row.

Cost: every byte is read once, and on a GPU all tensors of a call in one launch for each kind of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from jetrl.kernels.dispatch import untapped_backend_of

FOLD, COLUMNS = 64, 16  # words that are added to one sum at most; sums of a row that are left at least
MULTIPLIER, OFFSET = -7046029254386353131, 1442695040888963407  # odd(place) = (place * MULTIPLIER + OFFSET) | 1


class Words(NamedTuple):
    """A tensor's bits as integers [rows, words], contiguous, and the place of its first row in the whole."""

    bits: Tensor
    start: int

    @property
    def fold(self) -> int:
        """How many words of a row are added up before they get a factor."""
        fold, width = 1, self.bits.shape[1]
        while fold < FOLD and width % (2 * fold) == 0 and width >= 2 * fold * COLUMNS:
            fold *= 2
        return fold


def digests(values: Sequence[Tensor], starts: Sequence[int]) -> Tensor:
    """The digests of tensors of any types on one device, int64 [len(values)] there. Nothing waits for the device.

    `starts`: of each, the place of its first row in the whole, of which these are a rank's rows.
    """
    assert values and len({value.device for value in values}) == 1, "tensors of one device"
    backend, made = untapped_backend_of(values[0]), []
    for some in _in_calls(values):
        made.append(backend.digests([Words(words_of(values[i]), starts[i]) for i in some]))
    return torch.cat(made)


def _in_calls(values: Sequence[Tensor]) -> Iterator[list[int]]:
    """The places of tensors that are read together: one that is copied first is alone, so that copies take the memory
    of one."""
    together: list[int] = []
    for place, value in enumerate(values):
        if not value.is_contiguous():
            yield from ([together] if together else [])
            yield [place]
            together = []
        else:
            together.append(place)
    yield from ([together] if together else [])


def digest_of(value: Tensor, start: int = 0) -> Tensor:
    """The digest of one tensor, 0-dimensional."""
    return digests([value], [start])[0]


def words_of(value: Tensor) -> Tensor:
    """The bits of a tensor as integers [rows, words]; a vector has a row for each number."""
    value = value.detach()
    rows = value.reshape(max(1, len(value) if value.ndim else 1), -1) if value.numel() else value.reshape(0, 1)
    rows = rows.contiguous()
    size = rows.shape[1] * rows.element_size()
    kind = torch.int32 if size % 4 == 0 else torch.int16 if size % 2 == 0 else torch.uint8
    if rows.storage_offset() * rows.element_size() % 4:  # a view begins between two words
        rows = rows.clone()
    return rows.view(kind)
