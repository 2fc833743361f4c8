"""Drafts: guesses of a sequence's next tokens, found where its last tokens stood before. On the device, in torch.

`DraftIndex` holds texts (running sequences, their siblings' answers, earlier answers to the same prompt) and a hash
table from the last n tokens of any place in them (n in `NGRAMS`) to that place. A draft is what followed at the place
that shares the longest end with the sequence, and of several such the one noted last. A wrong draft, or one from a
place that has been overwritten, costs time and changes no token: `decode_draft` draws at every position.

Nothing here waits for the device, has a shape that depends on values, or loops over sequences; so a CUDA graph can
capture it. The same lines run on a CPU.

Legend: `R` texts, of which the last is scratch for padding rows; `L` tokens in one; `B` sequences, `K` drafts each;
`P` n-grams of a place (`NGRAMS`), `C` tokens compared (`NGRAMS[0]`).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

NGRAMS = (8, 5, 3, 2)  # lengths of the ends that are looked up; the first is also how far matches are compared
DEEPEST = 7  # most drafts of one sequence in a step
_POOL_TOKENS = 1 << 23  # most tokens of all texts: 32 MiB, and 64 MiB for the hash table at most
_MAX_PLACES = 1 << 23
_COLUMN_BITS, _ROW_BITS = 24, 16  # a place: stamp, row and column of what follows, in one number
_MAX_STAMP = 1 << 22  # below what the number has room for
_CHUNK = 1 << 15  # places that are noted at once: bounds the temporaries
_ODD = (-7046029254386353131, -4417276706812531889, 1609587929392839161)  # odd multipliers, two's complement


def num_texts(slots: int, longest: int) -> int:
    """How many texts to keep for `slots` sequences of up to `longest` tokens: four a slot, within the pool."""
    return min(max(min(4 * slots, _POOL_TOKENS // max(longest, 1)), slots + 1), (1 << _ROW_BITS) - 2)


class DraftIndex:
    """`rows` texts of up to `longest` tokens each, on `device`."""

    def __init__(self, rows: int, longest: int, device: torch.device) -> None:
        assert rows < (1 << _ROW_BITS) - 1 and longest < 1 << _COLUMN_BITS
        self.rows, self.longest, self.device = rows, longest, device
        width = longest + DEEPEST + 2  # a step writes all that it drew; the last column is never read
        places = min(1 << (2 * len(NGRAMS) * rows * longest - 1).bit_length(), _MAX_PLACES)
        self.texts = torch.zeros(rows + 1, width, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        self.groups = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        self.places = torch.full((places + 1,), -1, dtype=torch.int64, device=device)  # the last takes what is masked
        self.stamp = torch.zeros(1, dtype=torch.int64, device=device)
        self.num_stamps = 0  # the same on the host, or more
        ends = torch.tensor(NGRAMS, device=device)
        self._ends, self._last = ends, ends - 1
        self._first = torch.arange(len(NGRAMS) - 1, -1, -1, device=device)
        steps = torch.arange(NGRAMS[0], device=device)
        self._back = steps + 1  # columns before the one that follows
        self._powers = torch.full((NGRAMS[0],), _ODD[0], dtype=torch.int64, device=device).cumprod(0)
        self._salt = ends * _ODD[1]

    @property
    def num_bytes(self) -> int:
        tensors = (self.texts, self.lengths, self.groups, self.places)
        return sum(t.numel() * t.element_size() for t in tensors)

    # ---- from the host ----------------------------------------------------------------------------------------------

    def put(self, lengths: np.ndarray, groups: np.ndarray) -> None:
        """How long each text is, and whose drafts it may give: those of texts with the same number."""
        self.lengths[:-1].copy_(torch.from_numpy(lengths), non_blocking=True)
        self.groups[:-1].copy_(torch.from_numpy(groups), non_blocking=True)

    def extend(self, rows: np.ndarray, starts: np.ndarray, tokens: np.ndarray, counts: np.ndarray) -> None:
        """Append `tokens[i, :counts[i]]` at column `starts[i]` of text `rows[i]`, and note the places. `put` first."""
        row, start, count = (torch.from_numpy(np.ascontiguousarray(x)).to(self.device) for x in (rows, starts, counts))
        every = torch.from_numpy(np.ascontiguousarray(tokens.astype(np.int32))).to(self.device)
        width = max(_CHUNK // max(len(rows), 1), 1)
        for first in range(0, tokens.shape[1], width):
            part = every[:, first : first + width]
            offset = first + torch.arange(part.shape[1], device=self.device)
            column = torch.where(offset < count[:, None], start[:, None] + offset, self.texts.shape[1] - 1)
            self.texts[row[:, None], column] = part
        for first in range(0, tokens.shape[1], width):
            self.note(row, start + first, start + count, min(width, tokens.shape[1] - first))
        self.tick(1)

    def tick(self, steps: int) -> None:
        """Account for `steps` stamps; before they run out, forget all places."""
        self.num_stamps += steps
        if self.num_stamps >= _MAX_STAMP:
            self.places.fill_(-1)
            self.stamp.zero_()
            self.num_stamps = 0

    # ---- on the device ----------------------------------------------------------------------------------------------

    def write(self, rows: Tensor, starts: Tensor, tokens: Tensor, counts: Tensor) -> None:
        """Append the first `counts` [B] of `tokens` [B, J] at columns `starts` [B] of `rows` [B]; note the places.

        What follows the first `counts` is written too and is beyond the text's end; drafts may read it, so it must be
        tokens of the vocabulary.
        """
        column = starts[:, None] + torch.arange(tokens.shape[1], device=self.device)
        self.texts[rows[:, None], column.clamp_max(self.texts.shape[1] - 1)] = tokens.to(torch.int32)
        ends = starts + counts
        self.lengths[rows] = torch.where(rows == self.rows, 0, ends)
        self.note(rows, starts, ends, tokens.shape[1])

    def note(self, rows: Tensor, starts: Tensor, ends: Tensor, width: int) -> None:
        """Note what stands before columns `starts` to `ends` (exclusive, at most `width`) of texts `rows` [B]."""
        column = starts[:, None] + torch.arange(width, device=self.device)  # [B, J]
        tail = self._before(rows[:, None].expand_as(column), column)
        keys = self._keys(tail, self.groups[rows][:, None].expand_as(column))  # [B, J, P]
        real = (column < ends[:, None])[..., None] & (column[..., None] >= self._ends)
        keys = torch.where(real, keys, self.places.shape[0] - 1)
        place = (self.stamp << _ROW_BITS | rows[:, None]) << _COLUMN_BITS | column
        self.places.scatter_reduce_(
            0, keys.flatten(), place[..., None].expand_as(keys).flatten(), "amax", include_self=True
        )  # the newest of several, in whatever order they come
        self.stamp += 1

    def draft(self, rows: Tensor, depth: int) -> tuple[Tensor, Tensor, Tensor]:
        """Guesses of what follows texts `rows` [B]: tokens [B, depth], how many of them, and the text they are from.

        Where a text repeats itself, its draft goes on around the repetition. What follows the drafts that count is
        any token, but a token: a graph computes all of them.
        """
        length = self.lengths[rows]
        tail = self._before(rows, length)  # [B, C]
        groups = self.groups[rows]
        place = self.places[self._keys(tail, groups)]  # [B, P]
        source = torch.where(place >= 0, place >> _COLUMN_BITS & ((1 << _ROW_BITS) - 1), self.rows)
        column = place & ((1 << _COLUMN_BITS) - 1)
        left = self.lengths[source] - column
        alike = (self._before(source, column.clamp_max(self.longest)) == tail[:, None]) & (tail >= 0)[:, None]
        matched = alike.to(torch.int64).cumprod(-1).sum(-1)  # [B, P]
        usable = (place >= 0) & (left > 0) & (self.groups[source] == groups[:, None]) & (matched >= NGRAMS[-1])
        score = torch.where(usable, matched * len(NGRAMS) + self._first, -1)  # no two are equal, but where unusable
        best = score.argmax(-1, keepdim=True)
        source, column, left = (x.gather(1, best)[:, 0] for x in (source, column, left))
        found, own = score.gather(1, best)[:, 0] >= 0, source == rows
        left = left.clamp_min(1)
        ahead = torch.arange(depth, device=self.device)
        offset = torch.where(own[:, None], ahead % left[:, None], ahead)
        at = (column[:, None] + offset).clamp_max(self.texts.shape[1] - 1)
        drafts = self.texts[source[:, None], at].to(torch.int64)
        counts = torch.where(own, depth, left.clamp_max(depth))
        return drafts, torch.where(found, counts, 0), torch.where(found, source, self.rows)

    def _before(self, rows: Tensor, columns: Tensor) -> Tensor:
        """The C tokens before `columns` of texts `rows` (same shape), the nearest first; -1 before the text begins."""
        at = columns[..., None] - self._back
        inside = at.clamp(0, self.texts.shape[1] - 1)  # `note` masks columns beyond a text's end only afterwards
        return torch.where(at >= 0, self.texts[rows[..., None], inside].to(torch.int64), -1)

    def _keys(self, tail: Tensor, groups: Tensor) -> Tensor:
        """Where in `places` the ends of `tail` [..., C] are noted: [..., P]. Sums and products wrap around."""
        sums = ((tail + 1) * self._powers).cumsum(-1)[..., self._last]
        mixed = ((sums ^ groups[..., None]) + self._salt) * _ODD[2]
        mixed = (mixed ^ (mixed >> 31)) * _ODD[0]
        return (mixed >> 17) & (self.places.shape[0] - 2)
