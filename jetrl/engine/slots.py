"""`Slots`: the state of running sequences as numpy columns, so a step costs few Python operations per sequence."""

from __future__ import annotations

import numpy as np

from jetrl.engine.plan import Plan, Step, Tracked


class Slots:
    """`count` places for running sequences. Columns are indexed by slot; a free slot's row has no meaning."""

    def __init__(self, count: int) -> None:
        self.owner: list[Tracked | None] = [None] * count
        self.free = list(range(count - 1, -1, -1))
        self.entered: list[int] = []  # slots that got a sequence since somebody last cleared this
        self.tokens = np.zeros((count, 0), dtype=np.int32)
        self.logprobs = np.zeros((count, 0), dtype=np.float32)  # of the token at the same place; of a prompt 0
        self.table = np.zeros((count, 0), dtype=np.int32)  # pages
        self.request, self.length, self.computed, self.num_pages, self.max_length, self.num_known = (
            np.zeros(count, dtype=np.int64) for _ in range(6)
        )  # the last: full pages of which `pages.Beginnings` has been told

    def widen(self, tokens: int, pages: int) -> None:
        """Make room for sequences of `tokens` tokens in `pages` pages."""
        if tokens > self.tokens.shape[1]:
            self.tokens, self.logprobs = _wider(self.tokens, tokens), _wider(self.logprobs, tokens)
            self.table = _wider(self.table, pages)

    def occupy(self, seq: Tracked, pages: np.ndarray, computed: int) -> int:
        """Put a sequence into a free slot. Keys of its first `computed` tokens are, or soon will be, in `pages`."""
        slot = self.free.pop()
        seq.slot = slot
        self.owner[slot] = seq
        self.entered.append(slot)
        self.tokens[slot, : len(seq.tokens)] = seq.tokens
        self.logprobs[slot, : len(seq.tokens)] = seq.logprobs
        self.table[slot, : len(pages)] = pages
        self.request[slot], self.length[slot], self.max_length[slot] = seq.request, len(seq.tokens), seq.max_length
        self.computed[slot], self.num_pages[slot], self.num_known[slot] = computed, len(pages), 0
        return slot

    def vacate(self, seq: Tracked) -> list[int]:
        """Free the sequence's slot. Its tokens and log-probs go with it, read-only; returns its pages."""
        slot, length = seq.slot, self.length[seq.slot]
        assert self.owner[slot] is seq, "the slot is another sequence's"
        seq.tokens, seq.logprobs = self.tokens[slot, :length].copy(), self.logprobs[slot, :length].copy()
        seq.tokens.flags.writeable = seq.logprobs.flags.writeable = False
        self.owner[slot] = None
        self.free.append(slot)
        seq.slot = -1
        return self.pages(slot)

    def pages(self, slot: int) -> list[int]:
        """The pages of the sequence in `slot`."""
        return self.table[slot, : self.num_pages[slot]].tolist()

    def append(self, slots: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray, counts: np.ndarray) -> None:
        """Append the first `counts[s]` of `tokens[:, s]`, with their `logprobs`, to the sequence in `slots[s]`.

        Both are [steps, S].
        """
        taken = np.arange(len(tokens))[:, None] < counts
        step, column = np.nonzero(taken)
        rows, places = slots[column], self.length[slots][column] + step
        self.tokens[rows, places], self.logprobs[rows, places] = tokens[taken], logprobs[taken]
        self.length[slots] += counts

    def plan(self, step: Step, page_size: int) -> Plan:
        """The pass that computes the last `step.counts` of the tokens counted as computed in `step.slots`."""
        slots, counts = np.array(step.slots, dtype=np.int64), np.array(step.counts, dtype=np.int64)
        ends = self.computed[slots]
        starts = ends - counts
        row_ends = np.cumsum(counts)
        owner = np.repeat(np.arange(len(slots)), counts)
        positions = np.arange(row_ends[-1]) + (ends - row_ends)[owner]
        draws = ends == self.length[slots]
        fork_slots, fork_rows = np.array(step.forks, dtype=np.int64).reshape(-1, 2).T
        sample_slots = np.concatenate((slots[draws], fork_slots))
        return Plan(
            slots=slots,
            starts=starts,
            counts=counts,
            tokens=self.tokens[slots[owner], positions].astype(np.int64),
            positions=positions,
            block_table=self.table[slots, : -(-int(ends.max()) // page_size)],
            copies=np.array(step.copies, dtype=np.int64).reshape(-1, 2),
            sample_rows=np.concatenate((row_ends[draws] - 1, fork_rows)),
            sample_requests=self.request[sample_slots],
            sample_positions=self.length[sample_slots],
            sample_slots=sample_slots,
        )


def _wider(columns: np.ndarray, width: int) -> np.ndarray:
    wide = np.zeros((len(columns), width), dtype=columns.dtype)
    wide[:, : columns.shape[1]] = columns
    return wide
