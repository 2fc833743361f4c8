"""Truncated distributions: which tokens top-k, top-p and min-p keep, found alike by sampler and learner.

Tokens are ranked by (weight descending, index ascending); weights are the integers of `reference.exp_weights`. Top-k
keeps the first k, top-p of these the shortest prefix whose mass reaches p of theirs, min-p those that weigh at least
this share of the first. So what is kept is a prefix of the ranking: every token above some weight, and the first ones
that have it. Sums of integers are exact, so the set depends on the logits of its row alone, to the bit.

The truncated distribution is that of logits that are `LEFT_OUT` wherever a token is not kept. Its log-probs, its
entropy and their gradients are what the functions for whole distributions make of such logits. The set itself is a
constant: no gradient goes through the choice.

Shape letters: B or R rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from jetrl.kernels.dispatch import backend_of

LEFT_OUT = -1e20  # its numerator is 0 at any temperature, and 0 * LEFT_OUT is still 0
_WINDOW = 1024  # heaviest tokens of a row in which its set mostly ends; else the whole row is sorted
MAX_ELEMENTS = 1 << 24  # logits looked at together: bounds the float64 temporaries; rows are independent


@dataclass(frozen=True, slots=True, eq=False)
class KeptSets:
    """The tokens that truncated distributions of R rows keep. Row r has
    `words[starts[r]:starts[r + 1]]`: the ids, ascending, or if they are ceil(vocab / 32) or more a bit of each token.
    """

    words: Tensor  # [N] int32
    starts: Tensor  # [R + 1] int64, on the host
    vocab: int

    def to(self, device: torch.device | str) -> KeptSets:
        """The same with its words on `device`."""
        return KeptSets(self.words.to(device), self.starts, self.vocab)


@dataclass(frozen=True, slots=True)
class Truncation:
    """How distributions are truncated; `top_p=1, top_k=0, min_p=0` is off."""

    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    def filters(self, count: int, device: torch.device) -> Filters:
        """The same for each of `count` rows."""
        return Filters(
            torch.full((count,), self.top_p, dtype=torch.float64, device=device),
            torch.full((count,), self.top_k, dtype=torch.int64, device=device),
            torch.full((count,), self.min_p, dtype=torch.float64, device=device),
        )


class Filters(NamedTuple):
    """A truncation for each row."""

    top_p: Tensor  # [B] float64
    top_k: Tensor  # [B] int64
    min_p: Tensor  # [B] float64

    def take(self, rows: Tensor) -> Filters:
        return Filters(*(column[rows] for column in self))


def kept(weights: Tensor, filters: Filters) -> Tensor:
    """The tokens that are kept, bool [B, V]; `weights` [B, V] float64 as `reference.exp_weights` makes them."""
    vocab, total = weights.shape[1], weights.sum(-1)
    values = weights.topk(min(vocab, _WINDOW)).values
    last, ties, found = _cut(values, total, vocab, filters)
    if not bool(found.all()):
        rows = (~found).nonzero()[:, 0]
        whole = weights[rows].sort(descending=True).values
        last[rows], ties[rows], _ = _cut(whole, total[rows], vocab, filters.take(rows))
    tied = weights == last[:, None]
    chosen = (weights > last[:, None]) | tied
    more = tied.sum(-1) > ties
    if bool(more.any()):  # of equal tokens the first ones
        rows = more.nonzero()[:, 0]
        tied = tied[rows]
        chosen[rows] &= ~tied | (tied.cumsum(-1) <= ties[rows, None])
    return chosen


def _cut(values: Tensor, total: Tensor, vocab: int, filters: Filters) -> tuple[Tensor, Tensor, Tensor]:
    """The smallest weight that is kept, how many tokens of just that weight are, and whether this is known, [B] each,
    from the heaviest weights [B, W] of each row in descending order and the sum of all."""
    width = values.shape[1]
    most = torch.where(filters.top_k > 0, filters.top_k.clamp(max=vocab), vocab)
    upto = values.cumsum(-1)
    mass = torch.where(most < vocab, upto.gather(-1, (most.clamp(max=width) - 1)[:, None])[:, 0], total)
    whole = filters.top_p[:, None] == 1
    stays = torch.arange(width, device=values.device) < most[:, None]
    stays &= (upto - values < filters.top_p[:, None] * mass[:, None]) | whole
    stays &= (values >= filters.min_p[:, None] * values[:, :1]) & (values > 0)
    count = stays.sum(-1)
    last = values.gather(-1, (count - 1).clamp(min=0)[:, None])[:, 0]  # no row without one, but where logits are NaN
    known = (count < width) & ((most <= width) | (most == vocab) | whole[:, 0])
    return last, count - (values > last[:, None]).sum(-1), known | (width == vocab)


class Support:
    """The tokens of the distributions of R rows in a pass of the learner: `given`, or found from their logits.

    The token that was drawn is always among those found. Where the weights that sampled it find the set, it is there
    anyway; other weights might have cut it.
    """

    def __init__(self, truncation: Truncation, targets: Tensor, given: KeptSets | None = None) -> None:
        self.truncation, self.targets, self.given = truncation, targets, given
        self._found: list[KeptSets] = []

    @property
    def sets(self) -> KeptSets:
        """Of all rows, once a pass has been through them in order."""
        if self.given is not None:
            return self.given
        return joined(self._found or [compact(self.targets.new_zeros(0, 1, dtype=torch.bool))])

    def restrict_(self, logits: Tensor, rows: slice, temperature: Tensor) -> None:
        """Logits [r, V] of `rows`, not yet divided by `temperature` [r], become LEFT_OUT outside of the sets."""
        step = max(1, MAX_ELEMENTS // logits.shape[1])
        for start in range(0, len(logits), step):
            part = logits[start : start + step]
            first = rows.start + start
            here = slice(first, first + len(part))
            if self.given is not None:
                chosen = members(self.given, here)
            else:
                chosen = self._find(part, here, temperature[start : start + step])
            part.masked_fill_(~chosen & (part < math.inf), LEFT_OUT)  # NaN and infinity stay to be seen

    def _find(self, logits: Tensor, rows: slice, temperature: Tensor) -> Tensor:
        weights, top, _ = backend_of(logits).exp_weights(logits / temperature[:, None])
        chosen = kept(weights, self.truncation.filters(len(logits), logits.device))
        chosen |= ~top.isfinite()[:, None]
        chosen.scatter_(1, self.targets[rows, None], True)
        self._found.append(compact(chosen))
        return chosen


def compact(chosen: Tensor) -> KeptSets:
    """The sets of `chosen` [R, V] bool."""
    count, vocab = chosen.shape
    width = -(-vocab // 32)
    sizes = chosen.sum(-1)
    wide = sizes >= width
    lengths = torch.where(wide, width, sizes)
    words = torch.empty(int(lengths.sum()), dtype=torch.int32, device=chosen.device)
    in_bits = wide.repeat_interleave(lengths)
    words[~in_bits] = (chosen & ~wide[:, None]).nonzero()[:, 1].to(torch.int32)
    bits = torch.nn.functional.pad(chosen[wide], (0, 32 * width - vocab)).view(-1, width, 32).to(torch.int64)
    made = (bits << torch.arange(32, device=chosen.device)).sum(-1)
    words[in_bits] = torch.where(made >= 1 << 31, made - (1 << 32), made).flatten().to(torch.int32)
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0).cpu()))
    return KeptSets(words, starts, vocab)


def members(sets: KeptSets, rows: slice) -> Tensor:
    """The sets of some rows as bool [r, V], on the device of the words."""
    device, width = sets.words.device, -(-sets.vocab // 32)
    edges = sets.starts[rows.start : rows.stop + 1]
    words, lengths = sets.words[edges[0] : edges[-1]], edges.diff().to(device)
    wide = lengths == width
    owner = torch.arange(len(lengths), device=device).repeat_interleave(lengths)
    in_bits = wide[owner]
    chosen = torch.zeros(len(lengths), sets.vocab, dtype=torch.bool, device=device)
    chosen[owner[~in_bits], words[~in_bits].to(torch.int64)] = True
    bits = (words[in_bits].view(-1, width, 1) >> torch.arange(32, device=device)) & 1
    chosen[wide] = bits.flatten(1)[:, : sets.vocab].to(torch.bool)
    return chosen


def joined(parts: Sequence[KeptSets]) -> KeptSets:
    """The rows of all parts, in their order; at least one part."""
    lengths = torch.cat([part.starts.diff() for part in parts])
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
    return KeptSets(torch.cat([part.words for part in parts]), starts, parts[0].vocab)
