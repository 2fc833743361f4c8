"""`Turns`: what is kept of a conversation between two turns, so that the next computes only its new tokens. No torch.

When a turn of L tokens ends, the keys of its first L - 1 are in its pages; the last token was drawn but not computed.
The pages are kept until the next turn takes them over, until `forget`, or until pages run short: then those of the
turns that finished first go first. A turn whose pages are gone is computed from its first token, with the same bits.
"""

from __future__ import annotations

import numpy as np

from jetrl.engine.pages import PageAllocator
from jetrl.engine.plan import Tracked
from jetrl.engine.rows import Rows
from jetrl.types import Request


class Turns:
    """Open conversations: those with a turn that waits or runs, and those between two turns."""

    def __init__(self, allocator: PageAllocator, rows: Rows | None = None) -> None:
        self.allocator, self.rows = allocator, rows
        self._tokens: dict[int, np.ndarray] = {}  # of each open conversation, at the end of its last turn
        self._active: set[int] = set()  # those with a turn that waits or runs
        self._pages: dict[int, list[int]] = {}  # in the order in which their turns finished
        self._rows: dict[int, int] = {}  # of the same conversations, where layers keep one state for a sequence

    def __contains__(self, id: int) -> bool:
        return id in self._tokens

    def __len__(self) -> int:
        return len(self._tokens)

    def check(self, request: Request) -> None:
        """ValueError if an open conversation cannot continue with `request`."""
        if request.id in self._active:
            raise ValueError(f"request {request.id}: a turn of this conversation still waits or runs")
        before = self._tokens.get(request.id, _NO_TOKENS)
        if not np.array_equal(before, request.tokens[: len(before)]):
            raise ValueError(
                f"request {request.id}: its {len(request.tokens)} tokens do not begin with the {len(before)} of the "
                "conversation's last turn. Forget the conversation first, or give the request another id."
            )

    def begin(self, id: int) -> None:
        """A turn has been queued. Kept pages stay where they are until it starts."""
        self._tokens.setdefault(id, _NO_TOKENS)
        self._active.add(id)

    def finish(self, seq: Tracked, pages: list[int], row: int | None = None) -> None:
        """A turn has ended: keep its pages, and the `row` of its state, or free them if the request did not ask for
        that."""
        self._active.remove(seq.id)
        self._tokens[seq.id] = seq.tokens
        enough = self.allocator.pages_for(len(seq.tokens) - 1) if seq.keeps else 0
        self.allocator.free(pages[enough:])  # a burst takes more pages than a turn that stops within it uses
        if seq.keeps:
            self._pages[seq.id] = pages[:enough]
        if row is not None and seq.keeps:
            self._rows[seq.id] = row
        elif row is not None:
            self._free_row(row)

    def kept(self, id: int) -> tuple[list[int], int]:
        """The pages kept for a conversation, one reference each, and how many tokens' keys they hold; else [] and 0."""
        return (self._pages[id], len(self._tokens[id]) - 1) if id in self._pages else ([], 0)

    def take(self, id: int) -> int:
        """The pages are the caller's now, and so is the row, which is returned (0: none)."""
        del self._pages[id]
        return self._rows.pop(id, 0)

    def drop(self, id: int) -> None:
        """Free what is kept of a conversation, which stays open."""
        self.allocator.free(self._pages.pop(id, []))
        self._free_row(self._rows.pop(id, 0))

    def _free_row(self, row: int) -> None:
        if row:
            assert self.rows is not None
            self.rows.free(row)

    def drop_oldest(self, spare: int | None = None) -> bool:
        """Free what is kept of the conversation, other than `spare`, whose turn finished first; False if there is
        none."""
        victim = next((id for id in self._pages if id != spare), None)
        if victim is not None:
            self.drop(victim)
        return victim is not None

    def drop_all(self) -> None:
        """Free what is kept of all conversations."""
        while self.drop_oldest():
            pass

    def num_pages(self, spare: int) -> int:
        """What is kept of conversations other than `spare`; pages that several keep count for each."""
        return sum(len(pages) for id, pages in self._pages.items() if id != spare)

    def forget(self, id: int) -> None:
        """The conversation has ended; unknown ids are ignored."""
        self.drop(id)
        self._tokens.pop(id, None)
        self._active.discard(id)

    def forget_all(self) -> list[int]:
        """All conversations have ended; their ids."""
        ids = list(self._tokens)
        for id in ids:
            self.forget(id)
        return ids

    def cancel(self, id: int) -> None:
        """The turn that waited or ran is gone: the conversation is as open as before it. Pages that the turn had taken
        over are not kept; those that it had not are."""
        self._active.discard(id)
        if not len(self._tokens.get(id, _NO_TOKENS)):
            self._tokens.pop(id, None)

    def check_integrity(self) -> list[list[int]]:
        """Assert that what is kept is consistent; the pages of each conversation."""
        assert self._active <= set(self._tokens) >= set(self._pages), "a conversation is not open and yet has a state"
        for id, pages in self._pages.items():
            enough = self.allocator.pages_for(len(self._tokens[id]) - 1)
            assert len(pages) == enough, f"conversation {id} keeps {len(pages)} pages, its keys fill {enough}"
        assert self.rows is None or self._rows.keys() == self._pages.keys(), "pages without a state, or the reverse"
        return list(self._pages.values())

    def held_rows(self) -> list[int]:
        """The rows that conversations keep."""
        return list(self._rows.values())


_NO_TOKENS = np.zeros(0, dtype=np.int32)
