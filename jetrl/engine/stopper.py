"""`Stopper`: which drawn tokens end their sequence. Stop tokens by id, stop strings by decoding a short tail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Protocol

import numpy as np

from jetrl.types import SamplingParams


class Tokenizer(Protocol):
    """What the engine needs from a tokenizer."""

    @property
    def eos_token_id(self) -> int | None: ...

    def decode(self, token_ids: list[int]) -> str: ...


class StopStrings:
    """The stop strings of one sequence, and the newest of its tokens, as many as one of them may need."""

    def __init__(self, strings: tuple[str, ...], tokenizer: Tokenizer, pieces: dict[int, str]) -> None:
        self._strings, self._tokenizer, self._pieces = strings, tokenizer, pieces
        # each token decodes to a byte or more, except special tokens, which decode to nothing: hence some spare
        self._window = max(len(s.encode()) for s in strings) + 8
        self._tail: list[int] = []

    def extend(self, tokens: Iterable[int]) -> None:
        """Tokens that were drawn before, and completed no string."""
        self._tail = [*self._tail, *tokens][-self._window :]

    def completed_by(self, token: int) -> bool:
        """Whether the next token completes a string."""
        self.extend((token,))
        if token not in self._pieces:
            self._pieces[token] = self._tokenizer.decode([token])
        piece = self._pieces[token]
        # For most tokens, their own text shows that they cannot end a stop string. The exceptions are parts of a
        # character (decoded to U+FFFD) and white space, which decoders may strip.
        if "\ufffd" not in piece and not any(s[-1] in piece or s[-1].isspace() for s in self._strings):
            return False
        text = self._tokenizer.decode(self._tail)
        return any(s in text for s in self._strings)


class Stopper:
    """The stop conditions of the sequences in `count` slots."""

    def __init__(self, eos: frozenset[int], tokenizer: Tokenizer, count: int) -> None:
        self._eos, self._tokenizer = eos, tokenizer
        self._pieces: dict[int, str] = {}  # texts of single tokens
        self._strings: list[StopStrings | None] = [None] * count
        self._has_strings = np.zeros(count, dtype=bool)
        # Slots with equal stop tokens are of one kind, so that a step compares its tokens once for each kind.
        self._ids = {0: eos}
        self._kind = np.zeros(count, dtype=np.int64)
        self._slots_of = Counter({0: count})

    def put(self, slot: int, sampling: SamplingParams, drawn: Iterable[int] = ()) -> None:
        """`slot` holds a sequence with these conditions now, of which these tokens were drawn before."""
        self._slots_of[before := int(self._kind[slot])] -= 1
        if not self._slots_of[before]:
            del self._ids[before], self._slots_of[before]
        ids = self._stop_ids(sampling)
        kind = next((k for k, own in self._ids.items() if own == ids), None)
        if kind is None:
            kind = next(k for k in range(len(self._ids) + 1) if k not in self._ids)
            self._ids[kind] = ids
        self._kind[slot] = kind
        self._slots_of[kind] += 1
        self._strings[slot] = strings = self.strings(sampling)
        self._has_strings[slot] = strings is not None
        if strings is not None:
            strings.extend(drawn)

    def check(self, slots: np.ndarray, tokens: np.ndarray, counts: np.ndarray | None = None) -> np.ndarray:
        """True where `tokens` [N, S], just drawn for the sequences in `slots` [S] in that order, ends the sequence.

        Of column s only the first `counts[s]` were drawn (none given: all). What comes after them, or after the first
        True of a column, has no meaning.
        """
        stop = np.zeros(tokens.shape, dtype=bool)
        kinds = self._kind[slots]
        for kind, ids in self._ids.items():
            if ids:
                stop |= (kinds == kind) & np.isin(tokens, list(ids))
        for s in np.flatnonzero(self._has_strings[slots]).tolist():
            strings = self._strings[slots[s]]
            assert strings is not None
            for step, token in enumerate(tokens[: None if counts is None else counts[s], s].tolist()):
                stop[step, s] |= strings.completed_by(token)
                if stop[step, s]:
                    break
        return stop

    def strings(self, sampling: SamplingParams) -> StopStrings | None:
        """The stop strings of one sequence from its first drawn token on; None: it has none."""
        return StopStrings(sampling.stop, self._tokenizer, self._pieces) if sampling.stop else None

    def stops_by_id(self, sampling: SamplingParams, token: int) -> bool:
        """Whether the token ends such a sequence by its id; it is then not part of the text."""
        return token in self._stop_ids(sampling)

    def _stop_ids(self, sampling: SamplingParams) -> frozenset[int]:
        return frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self._eos)
