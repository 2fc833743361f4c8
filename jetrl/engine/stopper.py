"""`Stopper`: which drawn tokens end their sequence. Stop tokens by id, stop strings by decoding a short tail."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from jetrl.types import Request


class Tokenizer(Protocol):
    """What the engine needs from a tokenizer."""

    @property
    def eos_token_id(self) -> int | None: ...

    def decode(self, token_ids: list[int]) -> str: ...


class Stopper:
    """The stop conditions of requests, which are named by their place in the order of `extend`."""

    def __init__(self, eos: frozenset[int], tokenizer: Tokenizer) -> None:
        self._eos, self._tokenizer = eos, tokenizer
        self._kinds: dict[frozenset[int], int] = {}  # distinct sets of stop tokens
        self._ids: list[np.ndarray] = []  # of each kind
        self._kind = np.zeros(0, dtype=np.int64)
        self._has_strings = np.zeros(0, dtype=bool)
        self._strings: list[tuple[str, ...]] = []
        self._window: list[int] = []
        self._tails: dict[int, list[int]] = {}
        self._pieces: dict[int, str] = {}

    def extend(self, requests: Sequence[Request]) -> None:
        """Add further requests."""
        kinds = []
        for request in requests:
            p = request.sampling
            ids = frozenset(p.stop_token_ids) | (frozenset() if p.ignore_eos else self._eos)
            if ids not in self._kinds:
                self._kinds[ids] = len(self._ids)
                self._ids.append(np.array(sorted(ids), dtype=np.int64))
            kinds.append(self._kinds[ids])
            self._strings.append(p.stop)
            # each token decodes to a byte or more, except special tokens, which decode to nothing: hence some spare
            self._window.append(max((len(s.encode()) for s in p.stop), default=0) + 8)
        self._kind = np.concatenate((self._kind, np.array(kinds, dtype=np.int64)))
        has_strings = np.array([bool(r.sampling.stop) for r in requests], dtype=bool)
        self._has_strings = np.concatenate((self._has_strings, has_strings))

    def check(self, requests: np.ndarray, tokens: np.ndarray, counts: np.ndarray | None = None) -> np.ndarray:
        """True where `tokens` [N, S], just drawn for `requests` [S] in that order, ends the sequence.

        Of column s only the first `counts[s]` were drawn (none given: all). What comes after them, or after the first
        True of a column, has no meaning.
        """
        if len(self._ids) == 1:
            stop = np.isin(tokens, self._ids[0])
        else:
            stop = np.zeros(tokens.shape, dtype=bool)
            for kind, ids in enumerate(self._ids):
                stop |= (self._kind[requests] == kind) & np.isin(tokens, ids)
        for s in np.flatnonzero(self._has_strings[requests]).tolist():
            for step, token in enumerate(tokens[: None if counts is None else counts[s], s].tolist()):
                stop[step, s] |= self._completes_string(int(requests[s]), token)
                if stop[step, s]:
                    self._tails.pop(int(requests[s]))
                    break
        return stop

    def is_stop_token(self, request: int, token: int) -> bool:
        """Whether the token ends the request by its id; it is then not part of the text."""
        return token in self._ids[self._kind[request]]

    def _completes_string(self, request: int, token: int) -> bool:
        tail = self._tails.setdefault(request, [])
        tail.append(token)
        if len(tail) > self._window[request]:
            del tail[0]
        strings = self._strings[request]
        if token not in self._pieces:
            self._pieces[token] = self._tokenizer.decode([token])
        piece = self._pieces[token]
        # For most tokens, their own text shows that they cannot end a stop string. The exceptions are parts of a
        # character (decoded to U+FFFD) and white space, which decoders may strip.
        if "\ufffd" not in piece and not any(s[-1] in piece or s[-1].isspace() for s in strings):
            return False
        text = self._tokenizer.decode(tail)
        return any(s in text for s in strings)
