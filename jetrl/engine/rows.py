"""`Rows`: which row holds the state of which sequence, where a layer keeps one state for a sequence. No torch.

A row is to such a state what a page is to keys: it has a reference for each holder, and is free when the last one goes.
A pass reads the row of a sequence and writes its state after the pass: into the same row if nobody else holds it, else
into a fresh one (copy on write, though nothing is copied). What others hold: forks of a prompt read the row of the
sequence that computed it, prompts are held for samples that wait, and conversations between two turns keep theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from jetrl.engine.pages import PageAllocator

ZEROS, PADDING = 0, 1  # rows that no sequence has: what those that begin read, and what padding writes


def rows_for(max_num_seqs: int) -> int:
    """Rows for so many sequences at once: where all hold a row that others read as well, each also takes a fresh one.
    The spare ones serve prompts and conversations."""
    return 2 + 2 * max_num_seqs


class Rows:
    """`num_rows` rows for the sequences in `num_slots` slots; `grid` as in `precision.blocks.states.PerSequence`."""

    def __init__(self, num_slots: int, num_rows: int, grid: int = 1) -> None:
        assert num_rows >= rows_for(num_slots) and grid >= 1
        self.allocator, self.grid = PageAllocator(num_rows, 1), grid
        assert sorted(self.allocator.allocate(2)) == [ZEROS, PADDING]
        self.of = np.full(num_slots, ZEROS, dtype=np.int64)  # the row of the sequence in each slot

    @property
    def num_used(self) -> int:
        """Rows that hold a state."""
        return self.allocator.num_used - 2

    def share(self, row: int) -> int:
        """One more reference to `row`, for the caller."""
        if row != ZEROS:
            self.allocator.share([row])
        return row

    def free(self, row: int) -> None:
        """Drop a reference to `row`."""
        if row != ZEROS:
            self.allocator.free([row])

    def leave(self, slot: int) -> int:
        """The row of the sequence that leaves `slot`; its reference is the caller's."""
        row, self.of[slot] = int(self.of[slot]), ZEROS
        return row

    def step(self, slots: Sequence[int], make_room: Callable[[], bool]) -> tuple[np.ndarray, np.ndarray]:
        """The rows that the sequences in `slots` read and write in this step. `make_room` gives up a row that is only
        kept; False if there is none. What is read may be free afterwards: nothing else is written before the step has
        run."""
        reads = self.of[list(slots)]
        while int(self._fresh(reads).sum()) > self.allocator.num_free:
            assert make_room(), "rows are lost"
        fresh = self._fresh(reads)
        writes = reads.copy()
        writes[fresh] = self.allocator.allocate(int(fresh.sum()))
        for row in reads[fresh].tolist():
            self.free(row)
        self.of[list(slots)] = writes
        return reads, writes

    def _fresh(self, reads: np.ndarray) -> np.ndarray:
        """Which sequences cannot write the row that they read."""
        return np.asarray((reads == ZEROS) | (self.allocator.ref_counts[reads] > 1))

    def reaches(self, computed: int, tokens: int) -> bool:
        """Whether the row of a sequence that has computed `computed` tokens serves one of its first `tokens`."""
        return tokens <= computed and computed // self.grid == tokens // self.grid

    def check_integrity(self, held: Iterable[int]) -> None:
        """Assert that every reference has a holder: a slot, or one of `held`."""
        rows = [row for row in (*self.of.tolist(), *held) if row != ZEROS]
        self.allocator.check_integrity([[ZEROS], [PADDING], *([row] for row in rows)])
