"""`Texts`: which row of the draft index holds which sequence, and what of it is already there. No torch.

A sequence keeps its row while it runs or waits; afterwards its text stays, for drafts of later answers to the same
prompt, until the row is needed again: the one that was left first goes first. Rows change no token, so they are
neither saved in checkpoints nor need to be the same after a resume.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from jetrl.engine.plan import Finished, Tracked
from jetrl.engine.slots import Slots

SOURCES = ("own", "siblings", "history")  # where a draft may come from; none: no draft


class Append(NamedTuple):
    """Tokens for the ends of texts: `tokens[i, :counts[i]]` at column `starts[i]` of row `rows[i]`."""

    rows: np.ndarray  # [A] int64
    starts: np.ndarray  # [A] int64
    tokens: np.ndarray  # [A, W] int64
    counts: np.ndarray  # [A] int64


class Texts:
    """The rows of an index of `num_rows` texts, for sequences in `num_slots` slots."""

    def __init__(self, num_rows: int, num_slots: int) -> None:
        assert num_rows > num_slots
        self.lengths = np.zeros(num_rows, dtype=np.int64)  # what the index holds of each text
        self.groups = np.zeros(num_rows, dtype=np.int64)  # a number for each prompt
        self._ages = np.full(num_rows, -1, dtype=np.int64)  # of each text
        self._age = 0  # how often the engine has rested
        self._owner = np.full(num_rows, -1, dtype=np.int64)  # request
        self._row = np.zeros(num_slots, dtype=np.int64)
        self._rows: dict[int, int] = {}  # of the requests that wait or run, in the order in which they got them
        self._free = deque(range(num_rows))  # the one that was left first comes first
        self._conversations: dict[int, int] = {}  # id -> group of its first turn
        self._ended: list[Append] = []

    def rows(self, at: Slots, slots: np.ndarray) -> np.ndarray:
        """The row of the sequence in each of `slots`; new ones get theirs."""
        known = self._owner[self._row[slots]] == at.request[slots]
        for slot in slots[~known].tolist():
            seq = at.owner[slot]
            assert seq is not None, "the slot is empty"
            if seq.request not in self._rows:
                if not self._free:  # sequences that wait again, and dropped ones, have left theirs behind
                    running = {s.request for s in at.owner if s is not None}
                    self._leave(next(r for r in self._rows if r not in running))
                self._take(seq)
            self._row[slot] = self._rows[seq.request]
        return self._row[slots]

    def _take(self, seq: Tracked) -> None:
        """A row for a new sequence: the one that was left first."""
        row = self._free.popleft()
        group = hash(seq.prefix.tokens)
        if seq.is_turn:  # later turns have longer prompts
            group = self._conversations.setdefault(seq.id, group)
        self.lengths[row], self.groups[row], self._ages[row] = 0, group, self._age
        self._owner[row] = seq.request
        self._rows[seq.request] = row

    def _leave(self, request: int) -> None:
        row = self._rows.pop(request)
        self._owner[row] = -1
        self._free.append(row)

    def news(self, at: Slots, slots: np.ndarray, rows: np.ndarray) -> list[Append]:
        """What the texts of these sequences, and of those that have ended, lack; from now on the index has it."""
        ends = at.length[slots]
        short = np.flatnonzero(self.lengths[rows] < ends)
        found, self._ended = self._ended, []
        if len(short):
            starts, counts = self.lengths[rows[short]], (ends - self.lengths[rows])[short]
            columns = starts[:, None] + np.arange(counts.max())
            tokens = at.tokens[slots[short][:, None], np.minimum(columns, at.tokens.shape[1] - 1)]
            found.append(Append(rows[short], starts, tokens, counts))
        self.lengths[rows] = ends
        return found

    def drawn(self, rows: np.ndarray, counts: np.ndarray) -> None:
        """The index itself has appended what these sequences drew."""
        self.lengths[rows] += counts

    def end(self, ended: Finished) -> None:
        """A request has ended; its text, the prompt and what it drew, stays for others."""
        row = self._rows.get(ended.request)
        if row is None:  # it never came to a step that looked for drafts
            return
        prompt, known = ended.prompt, int(self.lengths[row])
        length = prompt + len(ended.tokens)
        if prompt <= known < length:
            tokens = ended.tokens[None, known - prompt :]
            self._ended.append(Append(np.array([row]), np.array([known]), tokens, np.array([tokens.shape[1]])))
        self.lengths[row] = length if known >= prompt else 0
        self._leave(ended.request)

    def sources(self, rows: np.ndarray, of: np.ndarray) -> np.ndarray:
        """Index in `SOURCES` of drafts for texts `rows` from texts `of`; -1 where there is none (a row beyond all)."""
        ages = np.append(self._ages, -1)[of]
        kind = np.where(of == rows, 0, np.where(ages == self._age, 1, 2))
        return np.where(of == len(self.lengths), -1, kind)

    def forget(self, ids: Collection[int]) -> None:
        """These conversations have ended."""
        for id in ids:
            self._conversations.pop(id, None)

    def rest(self) -> None:
        """No request is left. From now on the texts are those of earlier answers."""
        for request in list(self._rows):
            self._leave(request)
        self._conversations.clear()
        self._age += 1
