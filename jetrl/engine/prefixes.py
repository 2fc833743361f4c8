"""`PrefixSharing`: requests with equal prompts, which share one prefill. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from jetrl.engine.pages import PageAllocator
from jetrl.engine.plan import Prefix, Tracked
from jetrl.engine.rows import Rows


class PrefixSharing:
    """The prompts of all requests that wait or run."""

    def __init__(self, allocator: PageAllocator, rows: Rows | None = None) -> None:
        self.allocator, self.rows = allocator, rows
        self.leading: list[Prefix] = []  # those that a leader is computing
        self._all: dict[tuple[int, ...], Prefix] = {}
        self._held: list[Prefix] = []  # those with pages

    def join(self, tokens: tuple[int, ...]) -> Prefix:
        """The prompt of one more waiting request."""
        prefix = self._all.setdefault(tokens, Prefix(tokens))
        prefix.members += 1
        prefix.waiting += 1
        return prefix

    def leave(self, prefix: Prefix) -> None:
        """One request of the prompt has ended. A prompt without requests is forgotten."""
        prefix.members -= 1
        if prefix.members == 0:
            assert prefix.leader is None and prefix.pages is None and prefix.waiting == 0
            del self._all[prefix.tokens]

    def wait_less(self, prefix: Prefix) -> None:
        """One request of the prompt no longer waits."""
        prefix.waiting -= 1
        if prefix.waiting == 0 and prefix.pages is not None:
            self.drop(prefix)

    def lead(self, seq: Tracked) -> None:
        """`seq` begins to compute its prompt for all others."""
        seq.prefix.leader = seq
        self.leading.append(seq.prefix)

    def lead_no_more(self, prefix: Prefix) -> None:
        """The prompt is computed, or its leader is interrupted."""
        prefix.leader = None
        self.leading.remove(prefix)

    def drop_row(self, prefix: Prefix) -> None:
        """Give up the state that is kept for waiting samples."""
        if prefix.row:
            assert self.rows is not None
            self.rows.free(prefix.row)
            prefix.row = 0

    def hold(self, prefix: Prefix, pages: list[int]) -> None:
        """Keep the pages of a computed prompt, and the state at its end, for the requests that still wait."""
        self.allocator.share(pages)
        prefix.pages = pages
        self._held.append(prefix)

    def drop(self, prefix: Prefix) -> None:
        """Give up the pages held for waiting samples; if some still wait, one of them computes the prompt again."""
        assert prefix.pages is not None
        self.allocator.free(prefix.pages)
        prefix.pages = None
        self.drop_row(prefix)
        self._held.remove(prefix)

    def drop_last(self) -> bool:
        """Give up the pages that were held last; False if there are none."""
        if self._held:
            self.drop(self._held[-1])
            return True
        return False

    def check_integrity(self, running: Iterable[Tracked], waiting: Iterable[Tracked]) -> list[list[int]]:
        """Assert that every prompt has its requests, counted right; the pages of each held prompt."""
        waits = Counter(s.prefix.tokens for s in waiting)
        members = waits + Counter(s.prefix.tokens for s in running)
        assert members == {t: p.members for t, p in self._all.items()}, "a prompt without requests, or the reverse"
        assert all(waits[t] == p.waiting for t, p in self._all.items()), "waiting requests of a prompt are miscounted"
        assert all(p.leader is not None and p.leader.slot >= 0 for p in self.leading), "a leader that does not run"
        with_rows = [p for p in self._all.values() if p.row]
        assert all(p.pages is not None or p.leader is not None for p in with_rows), "a state of a prompt is lost"
        return [p.pages for p in self._held if p.pages is not None]

    def held_rows(self) -> list[int]:
        """The rows that prompts hold."""
        return [p.row for p in self._all.values() if p.row]
