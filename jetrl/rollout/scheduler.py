"""Continuous batching: which tokens of which sequences each forward pass computes, in which cache pages. No torch.

One `schedule` / `commit` pair is one engine step. Decoding sequences get their token first, then prompts are computed
in chunks with what is left of `max_tokens_per_step`. Requests with equal prompts share one prefill: when its last token
is computed, every sample draws its own first token from that row and shares the prompt's pages (copy on write). When
pages run out the youngest running sequence is preempted: it keeps its tokens, gives its pages back, and is computed
anew later, with the same bits (contract 3), so log-probs recorded before stay right. The oldest sequence is never held
up by a younger one, which is why all of them finish.

State of running sequences lies in numpy columns ("slots"), so that a step costs few Python operations a sequence.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from operator import attrgetter

import numpy as np

from jetrl.errors import UserError
from jetrl.rollout.kv_cache import PageAllocator
from jetrl.rollout.plan import Plan, Prefix, Step, Tracked
from jetrl.types import Request

ForcePreempt = Callable[[int, tuple[int, ...]], Iterable[int]]  # (step, running requests) -> requests to preempt


class Scheduler:
    """Requests in, one `Plan` a step out; `max_num_seqs` sequences run at once, `max_tokens_per_step` tokens a step."""

    def __init__(
        self,
        allocator: PageAllocator,
        *,
        max_num_seqs: int,
        max_tokens_per_step: int,
        max_position: int,
        force_preempt: ForcePreempt | None = None,
    ) -> None:
        for name, value in (("max_num_seqs", max_num_seqs), ("max_tokens_per_step", max_tokens_per_step)):
            if value < 1:
                raise UserError(f"rollout.{name} = {value}; it must be at least 1.")
        self.allocator = allocator
        self.max_tokens_per_step, self.max_position = max_tokens_per_step, max_position
        self.num_preemptions = self.num_steps = self.num_computed_tokens = 0
        self._force_preempt = force_preempt
        self._num_added = 0
        self.waiting: list[Tracked] = []  # both lists are kept in order of arrival
        self.running: list[Tracked] = []
        self._prefixes: dict[tuple[int, ...], Prefix] = {}
        self._leading: list[Prefix] = []  # prefixes with a leader
        self._held: list[Prefix] = []  # prefixes with pages
        self._plan: Plan | None = None
        self._owner: list[Tracked | None] = [None] * max_num_seqs
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._tokens = np.zeros((max_num_seqs, 0), dtype=np.int64)
        self._table = np.zeros((max_num_seqs, 0), dtype=np.int32)
        self._request, self._length, self._computed, self._num_pages, self._max_length = (
            np.zeros(max_num_seqs, dtype=np.int64) for _ in range(5)
        )

    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests. One that could never run is refused (UserError) before any of them is taken."""
        for request in requests:
            self._check(request)
        for request in requests:
            prefix = self._prefixes.setdefault(request.tokens, Prefix(len(request.tokens)))
            prefix.waiting += 1
            max_length = len(request.tokens) + request.sampling.max_tokens
            tokens = np.array(request.tokens, dtype=np.int64)
            self.waiting.append(Tracked(self._num_added, tokens, max_length, prefix))
            self._num_added += 1
        width = max((s.max_length for s in self.waiting), default=0)
        if width > self._tokens.shape[1]:
            self._tokens = np.pad(self._tokens, ((0, 0), (0, width - self._tokens.shape[1])))
            blocks = self.allocator.pages_for(width)
            self._table = np.pad(self._table, ((0, 0), (0, blocks - self._table.shape[1])))

    def _check(self, request: Request) -> None:
        prompt, new = len(request.tokens), request.sampling.max_tokens
        sizes = f"request {request.id}: {prompt} prompt tokens + max_tokens {new} = {prompt + new}"
        if prompt < 1 or new < 1:
            raise UserError(f"{sizes}; a request needs at least one prompt token and one new token.")
        if prompt + new > self.max_position:
            raise UserError(f"{sizes}, beyond the model's {self.max_position} positions; shorten one of them.")
        pages, size = self.allocator.num_pages, self.allocator.page_size
        if self.allocator.pages_for(prompt + new) > pages:
            raise UserError(
                f"{sizes}, beyond the KV cache of {pages} pages * {size} tokens = {pages * size}; "
                "shorten one of them or raise rollout.kv_cache_tokens."
            )

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def schedule(self) -> Plan:
        """Choose the work of the next step and take the pages for it."""
        assert self._plan is None, "schedule() was called twice without commit()"
        if self._force_preempt is not None:
            self._preempt_forced(self._force_preempt)
        step = Step(self.max_tokens_per_step)
        slots, counts = self._continue_running(step)
        step.slots, step.counts = slots.tolist(), counts.tolist()
        step.budget -= sum(step.counts)
        step.row = sum(step.counts)
        self._advance(slots, counts, step)
        if self.waiting and self._free_slots:
            self._admit(step)
        for prefix, (slot, _) in step.ready.items():
            if prefix.waiting:
                prefix.pages = self._table[slot, : self.allocator.pages_for(prefix.length)].tolist()
                self.allocator.share(prefix.pages)
                self._held.append(prefix)
        self._plan = self._build(step)
        self.num_steps += 1
        self.num_computed_tokens += len(self._plan.tokens)
        return self._plan

    def extend(self, limit: int) -> tuple[Plan, int]:
        """Let the decode plan just made run for several steps, at most `limit`, before its `commit`.

        Takes the pages that all steps will write. Fewer steps where a sequence would outgrow its length or pages are
        short (nobody is preempted for this), one where preemption is forced from outside. Returns the plan, its block
        table widened, and the number of steps.
        """
        plan = self._plan
        assert plan is not None and len(plan.sample_slots) == len(plan.tokens), "not a decode plan"
        slots, size = plan.sample_slots, self.allocator.page_size
        limit = min(limit, int((self._max_length[slots] - self._length[slots]).min()))
        steps = 1 if self._force_preempt is not None else limit
        while steps > 1:
            more = np.maximum(-(-(self._computed[slots] + steps - 1) // size) - self._num_pages[slots], 0)
            if int(more.sum()) <= self.allocator.num_free:
                break
            steps -= 1
        if steps <= 1:
            return plan, 1
        for slot, count in zip(slots[more > 0].tolist(), more[more > 0].tolist(), strict=True):
            held = int(self._num_pages[slot])
            self._table[slot, held : held + count] = self.allocator.allocate(count)
            self._num_pages[slot] = held + count
        self._computed[slots] += steps - 1
        self.num_steps += steps - 1
        self.num_computed_tokens += (steps - 1) * len(slots)
        widest = self.allocator.pages_for(int(self._computed[slots].max()))
        self._plan = replace(plan, block_table=self._table[slots, :widest])
        return self._plan, steps

    def commit(self, tokens: np.ndarray, stop: np.ndarray) -> np.ndarray:
        """Append the drawn `tokens` [S]; end the sequences where `stop` [S] or that are full. Returns who ended [S].

        After `extend`, both are [steps, S], and what a sequence drew after its first `stop` is dropped.
        """
        plan, self._plan = self._plan, None
        tokens, stop = np.atleast_2d(tokens), np.atleast_2d(stop)
        assert plan is not None and tokens.shape[1] == len(plan.sample_slots), "commit() must follow schedule()"
        ended = np.zeros(tokens.shape[1], dtype=bool)
        for drawn, stops in zip(tokens, stop, strict=True):
            slots = plan.sample_slots[~ended]
            self._tokens[slots, self._length[slots]] = drawn[~ended]
            self._length[slots] += 1
            ended[~ended] = stops[~ended] | (self._length[slots] >= self._max_length[slots])
        for slot in plan.sample_slots[ended].tolist():
            self._release(self._owner[slot])
        return ended

    def _continue_running(self, step: Step) -> tuple[np.ndarray, np.ndarray]:
        """Share the budget among running sequences, decoding ones first; slots and counts, in order of arrival."""
        slots = np.array([s.slot for s in self.running], dtype=np.int64)
        pending = self._length[slots] - self._computed[slots]
        order = np.argsort(pending > 1, kind="stable")
        before = np.cumsum(pending[order]) - pending[order]
        counts = np.empty_like(pending)
        counts[order] = np.clip(self.max_tokens_per_step - before, 0, pending[order])
        slots, counts = slots[counts > 0], counts[counts > 0]
        if self._secure_pages(slots, step):
            alive = np.array([self._owner[slot] is not None for slot in slots.tolist()], dtype=bool)
            slots, counts = slots[alive], counts[alive]
        return slots, counts

    def _secure_pages(self, slots: np.ndarray, step: Step) -> bool:
        """Give each slot a page of its own to write into; True if that took preempting the youngest sequences.

        Pages of known tokens are taken at admission, so only decoding sequences at a page's end need a new one, and
        those whose next token falls into a shared page a copy. Slots come in order of arrival: a victim is always one
        that this step has not given a page yet.
        """
        before = self.num_preemptions
        blocks = self._computed[slots] // self.allocator.page_size
        beyond = blocks >= self._num_pages[slots]
        shared = self.allocator.ref_counts[self._table[slots, blocks]] > 1
        for i in np.flatnonzero(beyond | shared).tolist():
            slot, block = int(slots[i]), int(blocks[i])
            while self._owner[slot] is not None:  # until it has its page, or is itself the victim
                old = int(self._table[slot, block])
                if not beyond[i] and self.allocator.ref_counts[old] == 1:
                    break  # the other holders took copies or went
                if self.allocator.num_free:
                    (page,) = self.allocator.allocate()
                    self._table[slot, block] = page
                    if beyond[i]:
                        self._num_pages[slot] = block + 1
                    else:
                        step.copies.append((old, page))
                        self.allocator.free([old])
                    break
                if self._held:
                    self._drop(self._held[-1])
                else:
                    self._preempt(self.running[-1])
        return self.num_preemptions > before

    def _advance(self, slots: np.ndarray, counts: np.ndarray, step: Step) -> None:
        """Count the granted tokens as computed, and note the prompts that this completes."""
        self._computed[slots] += counts
        for prefix in list(self._leading):
            assert prefix.leader is not None
            slot = prefix.leader.slot
            if self._computed[slot] >= prefix.length:
                last = step.slots.index(slot)
                end = sum(step.counts[: last + 1])
                self._complete(prefix, slot, end - (int(self._computed[slot]) - prefix.length) - 1, step)

    def _complete(self, prefix: Prefix, slot: int, row: int, step: Step) -> None:
        """The prompt is computed in this step: its last token is packed row `row`, its pages are those of `slot`."""
        step.ready[prefix] = (slot, row)
        prefix.leader = None
        self._leading.remove(prefix)

    def _admit(self, step: Step) -> None:
        """Start waiting sequences in order of arrival, until slots, tokens or pages run out.

        Those whose prompt is just being computed are passed over; a slot stays reserved for each.
        """
        places = len(self._free_slots)
        kept: list[Tracked] = []
        for i, seq in enumerate(self.waiting):
            prefix = seq.prefix
            is_new = len(seq.tokens) == prefix.length
            if places and (prefix.leader is not None or (prefix in step.ready and not is_new)):
                kept.append(seq)
            elif not places or not (self._fork(seq, step) if prefix in step.ready else self._start(seq, step)):
                kept.extend(self.waiting[i:])
                break
            places -= 1
        self.waiting = kept

    def _fork(self, seq: Tracked, step: Step) -> bool:
        """Let a sample begin from the prompt that its leader completes in this step: no token to compute."""
        if self.allocator.num_free <= step.promised:
            return False
        step.promised += 1  # its first own page, in the next step
        leader, row = step.ready[seq.prefix]
        pages = self._table[leader, : self.allocator.pages_for(seq.prefix.length)]
        self.allocator.share(pages)
        slot = self._occupy(seq, pages, computed=seq.prefix.length)
        step.forks.append((slot, row))
        return True

    def _start(self, seq: Tracked, step: Step) -> bool:
        """Begin (or begin again) a sequence: all pages of its known tokens are taken now, shared where held."""
        if step.budget == 0:
            return False
        prefix, size = seq.prefix, self.allocator.page_size
        while True:
            # the last known token is always computed: the next one is drawn from its row
            computed = min(prefix.length, len(seq.tokens) - 1) if prefix.pages else 0
            num_shared = computed // size
            need = self.allocator.pages_for(len(seq.tokens)) - num_shared
            # leave the pages that running sequences will soon ask for, lest they preempt this one at once
            reserve = step.promised + len(self.running) // size + 1 if self.running else 0
            if self.allocator.num_free >= need + reserve:
                break
            if self.running or not self._held:
                return False
            self._drop(self._held[-1])
        shared = prefix.pages[:num_shared] if prefix.pages else []
        self.allocator.share(shared)
        own = self.allocator.allocate(need)
        if computed % size:
            assert prefix.pages is not None
            step.copies.append((prefix.pages[num_shared], own[0]))
        count = min(step.budget, len(seq.tokens) - computed)
        slot = self._occupy(seq, np.array(shared + own, dtype=np.int32), computed=computed + count)
        if computed == 0 and prefix.pages is None:
            prefix.leader = seq
            self._leading.append(prefix)
            if count >= prefix.length:
                self._complete(prefix, slot, step.row + prefix.length - 1, step)
        step.slots.append(slot)
        step.counts.append(count)
        step.budget -= count
        step.row += count
        return True

    def _occupy(self, seq: Tracked, pages: np.ndarray, computed: int) -> int:
        """Put a waiting sequence into a free slot with `pages`."""
        slot = self._free_slots.pop()
        seq.slot = slot
        self._owner[slot] = seq
        insort(self.running, seq, key=attrgetter("request"))
        self._tokens[slot, : len(seq.tokens)] = seq.tokens
        self._table[slot, : len(pages)] = pages
        self._request[slot], self._length[slot], self._max_length[slot] = seq.request, len(seq.tokens), seq.max_length
        self._computed[slot], self._num_pages[slot] = computed, len(pages)
        seq.prefix.waiting -= 1
        if seq.prefix.waiting == 0 and seq.prefix.pages is not None:
            self._drop(seq.prefix)
        return slot

    def _drop(self, prefix: Prefix) -> None:
        """Give up the pages held for waiting samples; should some still wait, one of them computes the prompt anew."""
        assert prefix.pages is not None
        self.allocator.free(prefix.pages)
        prefix.pages = None
        self._held.remove(prefix)

    def _release(self, seq: Tracked | None) -> None:
        assert seq is not None, "the slot is empty"
        self.allocator.free(self._table[seq.slot, : self._num_pages[seq.slot]].tolist())
        self._owner[seq.slot] = None
        self._free_slots.append(seq.slot)
        self.running.remove(seq)
        seq.slot = -1

    def _preempt(self, seq: Tracked) -> None:
        """Back to the queue, with the tokens so far and without pages."""
        seq.tokens = self._tokens[seq.slot, : self._length[seq.slot]].copy()
        self._release(seq)
        insort(self.waiting, seq, key=attrgetter("request"))
        seq.prefix.waiting += 1
        if seq.prefix.leader is seq:
            seq.prefix.leader = None
            self._leading.remove(seq.prefix)
        self.num_preemptions += 1

    def _preempt_forced(self, choose: ForcePreempt) -> None:
        by_request = {s.request: s for s in self.running}
        for request in sorted(set(choose(self.num_steps, tuple(by_request)))):
            if request not in by_request:
                raise ValueError(f"force_preempt named request {request}; running are {sorted(by_request)}")
            self._preempt(by_request[request])

    def _build(self, step: Step) -> Plan:
        assert step.slots, "nothing can run: pages or slots are lost"
        slots, counts = np.array(step.slots, dtype=np.int64), np.array(step.counts, dtype=np.int64)
        ends = self._computed[slots]
        starts = ends - counts
        row_ends = np.cumsum(counts)
        owner = np.repeat(np.arange(len(slots)), counts)
        positions = np.arange(row_ends[-1]) + (ends - row_ends)[owner]
        draws = ends == self._length[slots]
        fork_slots, fork_rows = np.array(step.forks, dtype=np.int64).reshape(-1, 2).T
        sample_slots = np.concatenate((slots[draws], fork_slots))
        return Plan(
            starts=starts,
            counts=counts,
            tokens=self._tokens[slots[owner], positions],
            positions=positions,
            block_table=self._table[slots, : self.allocator.pages_for(int(ends.max()))],
            copies=np.array(step.copies, dtype=np.int64).reshape(-1, 2),
            sample_rows=np.concatenate((row_ends[draws] - 1, fork_rows)),
            sample_requests=self._request[sample_slots],
            sample_positions=self._length[sample_slots],
            sample_slots=sample_slots,
        )

    def check_integrity(self) -> None:
        """Assert that every page reference belongs to a running sequence or a held prompt, and slots are consistent."""
        held = [p.pages for p in self._held if p.pages is not None]
        own = [self._table[s.slot, : self._num_pages[s.slot]].tolist() for s in self.running]
        self.allocator.check_integrity([*held, *own])
        assert len(self._free_slots) + len(self.running) == len(self._owner), "a slot is lost"
        for group in (self.running, self.waiting):
            arrivals = [s.request for s in group]
            assert arrivals == sorted(set(arrivals)), f"out of order of arrival: {arrivals}"
