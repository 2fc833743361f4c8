"""Continuous batching: which tokens of which sequences each forward pass computes, in which cache pages. No torch.

One `schedule` / `commit` pair is one engine step; requests may be added and forgotten between two of them. Decoding
sequences get their token first, then prompts are computed in chunks with what is left of `max_tokens_per_step`.
Requests with equal prompts share one prefill: when its last token is computed, every sample draws its own first token
from that row and shares the prompt's pages (copy on write). A turn of a conversation continues in the pages that were
kept from the one before.

When pages run out, those held for waiting samples go first, then those of conversations between two turns. Then the
youngest running sequence is preempted: it keeps its tokens and log-probs, gives its pages back, and is computed again
later, with the same bits (a row's bits do not depend on the other rows), so recorded log-probs stay right. The
oldest sequence never waits for a younger one, so all of them finish.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from operator import attrgetter

import numpy as np

from jetrl.engine.limits import check_sizes, most_tokens
from jetrl.engine.pages import PageAllocator, page_digests
from jetrl.engine.plan import Committed, Finished, Plan, Prefix, Step, Tracked
from jetrl.engine.prefixes import PrefixSharing
from jetrl.engine.rows import Rows
from jetrl.engine.slots import Slots
from jetrl.engine.turns import Turns
from jetrl.errors import UserError
from jetrl.types import Request, Unfinished

ForcePreempt = Callable[[int, tuple[int, ...]], Iterable[int]]  # (step, running requests) -> requests to preempt


class Scheduler:
    """Requests in, one `Plan` per step out; at most `max_num_seqs` sequences at once, `max_tokens_per_step` tokens."""

    def __init__(
        self,
        allocator: PageAllocator,
        *,
        max_num_seqs: int,
        max_tokens_per_step: int,
        max_position: int,
        force_preempt: ForcePreempt | None = None,
        rows: Rows | None = None,
        share_beginnings: bool = False,
    ) -> None:
        for name, value in (("max_num_seqs", max_num_seqs), ("max_tokens_per_step", max_tokens_per_step)):
            if value < 1:
                raise UserError(f"rollout.{name} = {value}; it must be at least 1.")
        self.allocator, self.rows = allocator, rows
        self.share_beginnings = share_beginnings and rows is None  # a state is known at one token only
        self.prompts, self.turns = PrefixSharing(allocator, rows), Turns(allocator, rows)
        self.max_tokens_per_step, self.max_position = max_tokens_per_step, max_position
        self.reset_counts()
        self.num_added = 0
        self.force_preempt = force_preempt
        self.waiting: list[Tracked] = []  # both lists are kept in order of arrival
        self.running: list[Tracked] = []
        self._plan: Plan | None = None
        self.slots = Slots(max_num_seqs)

    def reset_counts(self) -> None:
        """Steps, tokens and preemptions are counted from 0 again."""
        self.num_preemptions = self.num_steps = self.num_computed_tokens = self.num_drawn_tokens = 0

    def resize(self, num_pages: int) -> None:
        """Another number of pages in the cache, while none is in use."""
        self.allocator.resize(num_pages)
        self.slots.table[:] = 0  # what is left there of earlier sequences may be no page of this cache

    def check(self, requests: Sequence[Request]) -> None:
        """Refuse a request that could never run (UserError) or cannot continue its conversation (ValueError)."""
        ids = set()
        for request in requests:
            check_sizes(request, self.max_position, self.allocator)
            if request.id in ids:
                raise ValueError(f"request {request.id}: two turns of one conversation at a time")
            if self._is_turn(request):
                ids.add(request.id)
                self.turns.check(request)

    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests. If one is refused (see `check`), none is queued."""
        self.resume([Unfinished(request) for request in requests])

    def resume(self, unfinished: Sequence[Unfinished]) -> None:
        """`add` for requests of which something may have been drawn before."""
        requests = [one.request for one in unfinished]
        self.check(requests)
        for one, request in zip(unfinished, requests, strict=True):
            prefix, prompt = self.prompts.join(request.tokens), len(request.tokens)
            tokens = np.concatenate((np.array(request.tokens, dtype=np.int32), one.tokens))
            logprobs = np.concatenate((np.zeros(prompt, dtype=np.float32), one.logprobs))
            is_turn, keeps = self._is_turn(request), request.max_conversation is not None
            self.waiting.append(Tracked(
                self.num_added, request.id, request.sampling, tokens, logprobs, prompt + request.sampling.max_tokens,
                prefix, is_turn, keeps, max_conversation=request.max_conversation, before=one.spans,
                num_before=len(one.tokens),
            ))
            self.num_added += 1
            if is_turn:
                self.turns.begin(request.id)
        width = max(map(most_tokens, requests), default=0)
        self.slots.widen(width, self.allocator.pages_for(width))

    def _is_turn(self, request: Request) -> bool:
        return request.max_conversation is not None or request.id in self.turns

    def forget(self, ids: Collection[int]) -> None:
        """Free what is kept of these conversations. A request of theirs that still waits or runs is dropped."""
        self._drop(ids)
        for id in set(ids):
            self.turns.forget(id)

    def cancel(self, ids: Collection[int]) -> None:
        """Drop requests with these ids that wait or run. Their conversations stay open, as they were before."""
        self.suspend(ids)

    def suspend(self, ids: Collection[int]) -> list[Tracked]:
        """`cancel`; what is dropped, in order of arrival, with the tokens that were drawn for it."""
        dropped = self._drop(ids)
        for seq in dropped:
            if seq.is_turn:
                self.turns.cancel(seq.id)
        return sorted(dropped, key=attrgetter("request"))

    def drawn(self) -> dict[int, int]:
        """How many tokens of each request that waits or runs were drawn."""
        running = {s.id: int(self.slots.length[s.slot]) - s.prefix.length for s in self.running}
        return running | {s.id: len(s.tokens) - s.prefix.length for s in self.waiting}

    def _drop(self, ids: Collection[int]) -> list[Tracked]:
        assert self._plan is None, "nothing is dropped between schedule() and commit()"
        gone = set(ids)
        running, waiting = ([s for s in group if s.id in gone] for group in (self.running, self.waiting))
        for seq in running:
            self._free(*self._leave(seq))
        for seq in waiting:
            self.waiting.remove(seq)
            self.prompts.wait_less(seq.prefix)
        for seq in (*running, *waiting):
            self.prompts.leave(seq.prefix)
        return [*running, *waiting]

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def schedule(self) -> Plan:
        """Choose the work of the next step and take the pages for it."""
        assert self._plan is None, "schedule() was called twice without commit()"
        if self.force_preempt is not None:
            self._preempt_forced(self.force_preempt)
        step = Step(self.max_tokens_per_step)
        slots, counts = self._continue_running(step)
        step.slots, step.counts = slots.tolist(), counts.tolist()
        step.budget -= sum(step.counts)
        step.row = sum(step.counts)
        self._advance(slots, counts, step)
        if self.waiting and self.slots.free:
            self._admit(step)
        for prefix, (slot, _) in step.ready.items():
            if prefix.waiting and (self.rows is None or prefix.row or prefix.length == 1):
                pages = self.slots.table[slot, : self.allocator.pages_for(prefix.length)].tolist()
                self.prompts.hold(prefix, pages)
            else:
                self.prompts.drop_row(prefix)
        assert step.slots, "nothing can run: pages or slots are lost"
        self._plan = self.slots.plan(step, self.allocator.page_size)
        if self.rows is not None:
            self._plan = self._with_rows(self._plan, step, self.rows)
        self.num_steps += 1
        self.num_computed_tokens += len(self._plan.tokens)
        return self._plan

    def _with_rows(self, plan: Plan, step: Step, rows: Rows) -> Plan:
        """The plan with the rows of states that it reads and writes; forks share their leader's."""
        reads, writes = rows.step(step.slots, lambda: self.prompts.drop_last() or self.turns.drop_oldest())
        for slot, leader in step.forked:
            rows.of[slot] = rows.share(int(rows.of[leader]))
        for prefix in self.prompts.leading:  # the next token is its last
            assert prefix.leader is not None
            slot = prefix.leader.slot
            if prefix.waiting and not prefix.row and self.slots.computed[slot] == prefix.length - 1:
                prefix.row = rows.share(int(rows.of[slot]))
        return replace(plan, row_reads=reads, row_writes=writes)

    def _to_the_end(self, prefix: Prefix, computed: int, count: int) -> int:
        """How many of `count` tokens the leader of a prompt computes in one step. Where layers keep one state for a
        sequence, a step ends with the prompt, as forks read the state there; and before its last token if samples will
        have to wait, as these compute that token for themselves."""
        if self.rows is None:
            return count
        before_last = [prefix.length - 1] if prefix.waiting > len(self.slots.free) else []
        stops = [end - computed for end in (*before_last, prefix.length) if end > computed]
        return min([count, *stops])

    def extend(self, limit: int, depth: int = 0) -> tuple[Plan, int]:
        """Let the decode plan just made run for several steps, at most `limit`, before its `commit`, and each of them
        compute up to `depth` drafted tokens of a sequence besides its own.

        Takes the pages that all steps may write. There are fewer steps if a sequence would exceed its length or pages
        run short (conversations between two turns give up theirs, but nothing is preempted), then no drafts; and one
        step if preemption is forced from outside. Returns the plan, its block table widened, and the number of steps.
        """
        plan = self._plan
        assert plan is not None and len(plan.sample_slots) == len(plan.tokens), "not a decode plan"
        assert not depth or self.rows is None or self.rows.grid > 1, "a state of a sequence cannot take drafts back"
        assert not depth or len(plan.tokens) * (depth + 1) <= self.max_tokens_per_step, "too many drafts"
        slots, size, at = plan.sample_slots, self.allocator.page_size, self.slots
        limit = min(limit, int((at.max_length[slots] - at.length[slots]).min()))
        steps = 1 if self.force_preempt is not None else limit
        while steps > 1 or depth:
            # the last token of a sequence is drawn, but not computed
            reach = np.minimum(at.computed[slots] - 1 + steps * (depth + 1), at.max_length[slots] - 1)
            more = np.maximum(-(-reach // size) - at.num_pages[slots], 0)
            if int(more.sum()) <= self.allocator.num_free:
                break
            if not self.turns.drop_oldest():
                steps, depth = (steps - 1, depth) if steps > 1 else (1, 0)
        if steps <= 1 and not depth:
            return plan, 1
        for slot, count in zip(slots[more > 0].tolist(), more[more > 0].tolist(), strict=True):
            held = int(at.num_pages[slot])
            at.table[slot, held : held + count] = self.allocator.allocate(count)
            at.num_pages[slot] = held + count
        self.num_steps += steps - 1
        self.num_computed_tokens += (steps * (depth + 1) - 1) * len(slots)
        at.computed[slots] = reach
        table = at.table[slots, : self.allocator.pages_for(int(reach.max()))]
        self._plan = replace(plan, block_table=table, depth=depth, reach=reach if depth else None)
        return self._plan, steps

    def commit(
        self, tokens: np.ndarray, logprobs: np.ndarray, stop: np.ndarray, drawn: np.ndarray | None = None
    ) -> Committed:
        """Append the drawn `tokens` [S] with their `logprobs` [S]; end sequences that are full or where `stop` [S].

        After `extend`, all are [N, S], of which the first `drawn[s]` (none given: all) have a meaning, and what a
        sequence drew after its first `stop` is dropped. Returns how many each kept, and the sequences that ended.
        """
        plan, self._plan = self._plan, None
        tokens, logprobs, stop = np.atleast_2d(tokens), np.atleast_2d(logprobs), np.atleast_2d(stop)
        assert plan is not None and tokens.shape[1] == len(plan.sample_slots), "commit() must follow schedule()"
        at, slots = self.slots, plan.sample_slots
        if drawn is None:
            drawn = np.full(len(slots), len(tokens))
        stop = stop & (np.arange(len(tokens))[:, None] < drawn)
        stopped = np.asarray(stop.any(0))
        counts = np.where(stopped, stop.argmax(0) + 1, drawn)
        at.append(slots, tokens, logprobs, counts)
        if self.share_beginnings:
            self._tell_pages()
        if plan.depth:
            at.computed[slots] = at.length[slots] - 1 + drawn - counts  # what came behind a stop was computed as well
            self._give_back(slots)
        self.num_drawn_tokens += int(counts.sum())
        ended = stopped | (at.length[slots] >= at.max_length[slots])
        finished = [self._finish(at.owner[slots[s]], bool(stopped[s])) for s in np.flatnonzero(ended).tolist()]
        return Committed(counts, finished)

    def _tell_pages(self) -> None:
        """Tell of the pages that running sequences have filled with keys of tokens that stay."""
        at, size = self.slots, self.allocator.page_size
        slots = np.array([seq.slot for seq in self.running], dtype=np.int64)
        full = np.minimum(at.computed[slots], at.length[slots] - 1) // size
        for slot, count in zip(slots[new := full > at.num_known[slots]].tolist(), full[new].tolist(), strict=True):
            seq = at.owner[slot]
            assert seq is not None, "the slot is empty"
            seq.digests = page_digests(at.tokens[slot, : count * size], size, seq.digests or self._digests(seq.prefix))
            for place in range(int(at.num_known[slot]), count):
                self.allocator.beginnings.add(seq.digests[place], int(at.table[slot, place]))
            at.num_known[slot] = count

    def _tell_end(self, seq: Tracked) -> None:
        """Tell of the page that a sequence has begun, now that it ends; its last token is drawn, but not computed."""
        at, size = self.slots, self.allocator.page_size
        known = min(int(at.computed[seq.slot]), int(at.length[seq.slot]) - 1)
        full = known // size
        if known % size:
            tokens = at.tokens[seq.slot, :known]
            digests = page_digests(tokens, size, seq.digests or self._digests(seq.prefix))
            before = digests[full - 1] if full else b""
            self.allocator.beginnings.add_end(before, tokens[full * size :], int(at.table[seq.slot, full]))

    def _digests(self, prefix: Prefix) -> list[bytes]:
        """Those of a prompt's full pages, made once for all of its samples."""
        if prefix.digests is None:
            prefix.digests = page_digests(np.array(prefix.tokens, dtype=np.int32), self.allocator.page_size)
        return prefix.digests

    def _give_back(self, slots: np.ndarray) -> None:
        """Free the pages that were taken for drafts and hold no token. Keys of drafts that did not hold stay in the
        others, beyond the sequence's end, until its own tokens take their places."""
        at = self.slots
        needed = -(-at.computed[slots] // self.allocator.page_size)
        spare = at.num_pages[slots] > needed
        for slot, count in zip(slots[spare].tolist(), needed[spare].tolist(), strict=True):
            self.allocator.free(at.table[slot, count : at.num_pages[slot]])
            at.num_pages[slot] = count

    def _finish(self, seq: Tracked | None, stopped: bool) -> Finished:
        """The sequence has finished; its pages stay if it is a turn whose conversation may continue."""
        assert seq is not None, "the slot is empty"
        if self.share_beginnings and not seq.is_turn:
            self._tell_end(seq)
        computed, (pages, row), prompt = int(self.slots.computed[seq.slot]), self._leave(seq), seq.prefix.length
        if row is not None and seq.is_turn and not self._reaches(computed, len(seq.tokens) - 1):
            seq.keeps = False  # a burst went on beyond the end, and the state with it
        if seq.is_turn:
            self.turns.finish(seq, pages, row)
        else:
            self._free(pages, row)
        self.prompts.leave(seq.prefix)
        drawn = seq.tokens[prompt:], seq.logprobs[prompt:]
        return Finished(seq.request, seq.id, seq.sampling, *drawn, stopped, prompt, seq.before, seq.num_before)

    def _continue_running(self, step: Step) -> tuple[np.ndarray, np.ndarray]:
        """Share the budget among running sequences, decoding ones first; slots and counts, in order of arrival."""
        slots, counts = self._shares()
        while len(slots) and self._secure_pages(slots, step):
            alive = np.array([self.slots.owner[slot] is not None for slot in slots.tolist()], dtype=bool)
            slots, counts = slots[alive], counts[alive]
            if len(slots):
                break
            slots, counts = self._shares()  # all were preempted that had a share: it goes to those without
        return slots, counts

    def _shares(self) -> tuple[np.ndarray, np.ndarray]:
        """The running sequences that get tokens of the budget, and how many."""
        slots = np.array([s.slot for s in self.running], dtype=np.int64)
        pending = self.slots.length[slots] - self.slots.computed[slots]
        order = np.argsort(pending > 1, kind="stable")
        before = np.cumsum(pending[order]) - pending[order]
        counts = np.empty_like(pending)
        counts[order] = np.clip(self.max_tokens_per_step - before, 0, pending[order])
        for prefix in self.prompts.leading if self.rows is not None else ():
            assert prefix.leader is not None
            at = np.flatnonzero(slots == prefix.leader.slot)
            counts[at] = self._to_the_end(prefix, int(self.slots.computed[prefix.leader.slot]), int(counts[at[0]]))
        return slots[counts > 0], counts[counts > 0]

    def _secure_pages(self, slots: np.ndarray, step: Step) -> bool:
        """Give each slot a page of its own to write into; True if that meant preempting the youngest sequences.

        Pages of known tokens are taken at admission, so only decoding sequences at a page's end need a new one, and
        those whose next token falls into a shared page need a copy. Slots come in order of arrival: a victim is always
        one that this step has not given a page yet.
        """
        before = self.num_preemptions
        blocks = self.slots.computed[slots] // self.allocator.page_size
        beyond = blocks >= self.slots.num_pages[slots]
        shared = self.allocator.ref_counts[self.slots.table[slots, blocks]] > 1
        for i in np.flatnonzero(beyond | shared).tolist():
            slot, block = int(slots[i]), int(blocks[i])
            while self.slots.owner[slot] is not None:  # until it has its page, or is the victim itself
                old = int(self.slots.table[slot, block])
                if not beyond[i] and self.allocator.ref_counts[old] == 1:
                    break  # the other holders took copies or left
                if self.allocator.num_free:
                    (page,) = self.allocator.allocate()
                    self.slots.table[slot, block] = page
                    if beyond[i]:
                        self.slots.num_pages[slot] = block + 1
                    else:
                        step.copies.append((old, page))
                        self.allocator.free([old])
                    break
                if not (self.prompts.drop_last() or self.turns.drop_oldest()):
                    self._preempt(self.running[-1])
        return self.num_preemptions > before

    def _advance(self, slots: np.ndarray, counts: np.ndarray, step: Step) -> None:
        """Count the granted tokens as computed, and note the prompts that this completes."""
        self.slots.computed[slots] += counts
        for prefix in list(self.prompts.leading):
            assert prefix.leader is not None
            slot = prefix.leader.slot
            if self.slots.computed[slot] >= prefix.length:
                last = step.slots.index(slot)
                end = sum(step.counts[: last + 1])
                self._complete(prefix, slot, end - (int(self.slots.computed[slot]) - prefix.length) - 1, step)

    def _complete(self, prefix: Prefix, slot: int, row: int, step: Step) -> None:
        """The prompt is computed in this step: its last token is packed row `row`, its pages are those of `slot`."""
        step.ready[prefix] = (slot, row)
        self.prompts.lead_no_more(prefix)

    def _admit(self, step: Step) -> None:
        """Start waiting sequences in order of arrival, until slots, tokens or pages run out.

        Sequences whose prompt is being computed right now are skipped; a slot stays reserved for each.
        """
        places = len(self.slots.free)
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
        """Let a sample start from the prompt that its leader completes in this step: no token to compute."""
        while self.allocator.num_free <= step.promised:
            if not self.turns.drop_oldest():
                return False
        step.promised += 1  # its first own page, in the next step
        leader, row = step.ready[seq.prefix]
        pages = self.slots.table[leader, : self.allocator.pages_for(seq.prefix.length)]
        self.allocator.share(pages)
        self.turns.drop(seq.id)  # the leader's pages hold more
        slot = self._occupy(seq, pages, computed=seq.prefix.length)
        step.forks.append((slot, row))
        step.forked.append((slot, leader))
        return True

    def _start(self, seq: Tracked, step: Step) -> bool:
        """Begin (or begin again) a sequence: all pages of its known tokens are taken now, kept or shared ones first."""
        if step.budget == 0:
            return False
        prefix, size = seq.prefix, self.allocator.page_size
        while True:
            source, computed, usable = self._known_pages(seq)
            need = self.allocator.pages_for(len(seq.tokens)) - usable
            unheld = sum(self.allocator.ref_counts[page] == 0 for page in source[:usable])  # known, but free
            # leave the pages that running sequences will soon need, or they would preempt this one at once
            reserve = step.promised + len(self.running) // size + 1 if self.running else 0
            short = need + unheld + reserve - self.allocator.num_free
            if short <= 0:
                break
            in_vain = self.running and self.turns.num_pages(spare=seq.id) < short
            if not in_vain and self.turns.drop_oldest(spare=seq.id):
                continue
            if self.running or not self.prompts.drop_last():
                return False
        taken = bool(self.turns.kept(seq.id)[0])
        if not taken:
            self.allocator.read(source[:usable])
        own = self.allocator.allocate(need)
        if computed % size and usable == computed // size:
            step.copies.append((source[usable], own[0]))
        if taken:
            state = self.turns.take(seq.id)  # with the reference of each page, and of the row
            self.allocator.free(source[usable:])
        else:
            state = self.rows.share(prefix.row) if self.rows is not None and computed else 0
        leads = prefix.pages is None
        count = min(step.budget, len(seq.tokens) - computed)
        count = self._to_the_end(prefix, computed, count) if leads else count
        slot = self._occupy(seq, np.array(source[:usable] + own, dtype=np.int32), computed=computed + count)
        if self.rows is not None:
            self.rows.of[slot] = state
        if leads:
            self.prompts.lead(seq)
            if computed + count >= prefix.length:
                self._complete(prefix, slot, step.row + prefix.length - computed - 1, step)
        step.slots.append(slot)
        step.counts.append(count)
        step.budget -= count
        step.row += count
        return True

    def _known_pages(self, seq: Tracked) -> tuple[list[int], int, int]:
        """Where keys of a waiting sequence already are: pages, how many tokens, and how many of the pages it can use as
        they are. A page that it is going to write must be its own; the last page may need a copy."""
        size, (pages, computed) = self.allocator.page_size, self.turns.kept(seq.id)
        if pages:  # of its conversation's last turn, which this one takes over
            alone = computed % size and self.allocator.ref_counts[pages[-1]] == 1
            return pages, computed, len(pages) if alone else computed // size
        if seq.prefix.pages is None:
            return self._beginning(seq)
        computed = min(seq.prefix.length, len(seq.tokens) - 1)  # the next token is drawn from the last known one's row
        if self.rows is not None:
            computed = seq.prefix.length - 1  # where the state is
        return seq.prefix.pages, computed, computed // size

    def _beginning(self, seq: Tracked) -> tuple[list[int], int, int]:
        """The pages with the longest known beginning of a request that is new, short of its last token: as
        `_known_pages`."""
        if not self.share_beginnings or len(seq.tokens) > seq.prefix.length:
            return [], 0, 0
        size, known = self.allocator.page_size, self.allocator.beginnings
        digests = self._digests(seq.prefix)
        pages = known.find(digests[: (len(seq.tokens) - 1) // size])
        full = len(pages)
        rest = seq.tokens[full * size : min((full + 1) * size, len(seq.tokens)) - 1]
        end, count = known.find_end(digests[full - 1] if full else b"", rest)
        return [*pages, *([end] if count else [])], full * size + count, full

    def _occupy(self, seq: Tracked, pages: np.ndarray, computed: int) -> int:
        """Let a waiting sequence run, with `pages`."""
        slot = self.slots.occupy(seq, pages, computed)
        insort(self.running, seq, key=attrgetter("request"))
        self.prompts.wait_less(seq.prefix)
        return slot

    def _leave(self, seq: Tracked) -> tuple[list[int], int | None]:
        """Take a sequence out of its slot; its pages, and its row if there are rows, are the caller's."""
        self.running.remove(seq)
        if seq.prefix.leader is seq:
            self.prompts.lead_no_more(seq.prefix)
            self.prompts.drop_row(seq.prefix)
        row = None if self.rows is None else self.rows.leave(seq.slot)
        return self.slots.vacate(seq), row

    def _free(self, pages: list[int], row: int | None) -> None:
        self.allocator.free(pages)
        if row is not None and self.rows is not None:
            self.rows.free(row)

    def _reaches(self, computed: int, tokens: int) -> bool:
        """Whether a row that has seen `computed` tokens serves the first `tokens` of its sequence."""
        return self.rows is None or self.rows.reaches(computed, tokens)

    def _preempt(self, seq: Tracked) -> None:
        """Back to the queue, with the tokens so far and without pages."""
        self._free(*self._leave(seq))
        insort(self.waiting, seq, key=attrgetter("request"))
        seq.prefix.waiting += 1
        self.num_preemptions += 1

    def _preempt_forced(self, choose: ForcePreempt) -> None:
        by_request = {s.request: s for s in self.running}
        for request in sorted(set(choose(self.num_steps, tuple(by_request)))):
            if request not in by_request:
                raise ValueError(f"force_preempt named request {request}; running are {sorted(by_request)}")
            self._preempt(by_request[request])

    def check_integrity(self) -> None:
        """Assert that every page reference has a holder, and that slots, prompts and conversations are consistent."""
        own = [self.slots.pages(s.slot) for s in self.running]
        held = self.prompts.check_integrity(self.running, self.waiting)
        self.allocator.check_integrity([*own, *held, *self.turns.check_integrity()])
        if self.rows is not None:
            self.rows.check_integrity([*self.prompts.held_rows(), *self.turns.held_rows()])
        assert len(self.slots.free) + len(self.running) == len(self.slots.owner), "a slot is lost"
        for group in (self.running, self.waiting):
            arrivals = [s.request for s in group]
            assert arrivals == sorted(set(arrivals)), f"out of order of arrival: {arrivals}"
