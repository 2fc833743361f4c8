"""`PagedEngine`: requests in, completions with log-probs out. One step is schedule -> run -> commit; on a GPU, a few
decode steps run in a row without the host in between (a burst), and what a sequence drew after its end is dropped.

Requests come and go through `add`, `step`, `collect`, `cancel` and `forget`, at any time; `generate` is a loop over
these. `suspend` gives back what is under way as values, and `resume` takes them, perhaps after other weights were
loaded. What the engine holds does not grow with the requests that it has served: it has rows for `max_num_seqs`
sequences, and pages. While it is idle (all has finished, has been collected and, of conversations, forgotten), the
cache's memory may be given back, and its size may change with the next `add`.

The engine runs the same model object that is trained. So `load` moves no weights: it notes their version and the flow
digest, which every completion carries, and refuses weights of another flow.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jetrl.engine.limits import check_vocabulary, most_tokens
from jetrl.engine.pages import PageAllocator
from jetrl.engine.plan import Drawn, Finished, NewTokens, Plan, Tracked
from jetrl.engine.rows import Rows, rows_for
from jetrl.engine.runner import Model, ModelRunner, Observe
from jetrl.engine.sampler import SamplingTable, check_params
from jetrl.engine.scheduler import ForcePreempt, Scheduler
from jetrl.engine.settings import EngineSettings
from jetrl.engine.speculation.speculator import Speculator
from jetrl.engine.state_pool import grid_of, pages_in_memory
from jetrl.engine.stopper import Stopper, Tokenizer
from jetrl.errors import OutOfMemory
from jetrl.precision.blocks.layouts import require_rewind
from jetrl.types import Completion, Engine, FinishReason, Request, Spans, StepReport, Unfinished, WeightSet

_DEFAULTS = EngineSettings()


@dataclass(frozen=True, slots=True)
class RolloutStats:
    """Figures from one idle moment to the next. `model_seconds` covers forward and lm_head; `sample_seconds` covers
    drawing tokens."""

    generated_tokens: int
    computed_tokens: int  # rows of all forward passes; shared prompts count once, preempted tokens again
    steps: int
    seconds: float
    model_seconds: float
    sample_seconds: float
    preemptions: int
    peak_pages: int
    num_pages: int


class PagedEngine(Engine):
    """The rollout engine. `eos_token_ids` of the settings override the tokenizer's.

    `on_tokens`, if set, hears after every step what was drawn for each request, tokens and log-probs, before the
    completions of that step can be collected. An error of it is an error of the step. `observe`: see `ModelRunner`.
    """

    keeps_bits = suspends = True

    def __init__(
        self, model: Model, tokenizer: Tokenizer, flow_digest: str, settings: EngineSettings = _DEFAULTS,
        speculator: Speculator | None = None, observe: Observe | None = None,
    ) -> None:
        assert observe is None or speculator is None, "steps with drafts are not observed"
        if speculator is not None:
            require_rewind(model.spec)
            settings = replace(settings, drafts=True)
        self.model, self.tokenizer, self.flow_digest, self.settings = model, tokenizer, flow_digest, settings
        self.runner, self.speculator = ModelRunner(model, settings, observe), speculator
        eos = settings.eos_token_ids
        if eos is None:
            eos = frozenset(() if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,))
        self.eos_token_ids = eos
        self.on_tokens: Callable[[list[NewTokens]], None] | None = None
        self.weights: WeightSet | None = None
        self.stats: RolloutStats | None = None  # of the last time that the engine worked
        self._told = ""
        self._expected: list[int] = []
        self._reset()

    def _reset(self) -> None:
        """No request, and no page that holds anything."""
        s, grid = self.settings, grid_of(self.model.spec, self.settings.drafts)
        self._scheduler = Scheduler(
            PageAllocator(1, s.page_size), max_num_seqs=s.max_num_seqs, max_tokens_per_step=s.max_tokens_per_step,
            max_position=self.model.spec.max_position,
            rows=Rows(s.max_num_seqs, rows_for(s.max_num_seqs), grid) if grid else None,
            share_beginnings=s.share_beginnings,
        )
        self._table = SamplingTable.for_slots(s.max_num_seqs)
        self._stopper = Stopper(self.eos_token_ids, self.tokenizer, s.max_num_seqs)
        self._finished: list[tuple[int, Completion]] = []  # not collected yet, by place in `add`
        self._num_finished = 0
        self._began: float | None = None  # None: the engine is idle

    @property
    def has_work(self) -> bool:
        """Whether requests are running or waiting."""
        return self._scheduler.has_work

    @property
    def about(self) -> str:
        """A line for the user at the start of a run."""
        return self._told

    def keep(self, most: int, told: str) -> None:
        """From now on a KV cache of up to `most` bytes stays while the engine is idle; `about` says what that means."""
        self.runner.keep_bytes, self._told = most, told

    def load(self, weights: WeightSet) -> None:
        """Note newly published weights; ValueError if they were published for another precision flow.

        Keys of the old weights are useless: what is kept of conversations is freed, and their next turns are computed
        from the first token.
        """
        if weights.flow_digest != self.flow_digest:
            raise ValueError(
                f"weights of version {weights.version} have flow {weights.flow_digest}, this engine runs flow "
                f"{self.flow_digest}; build engine and trainer from one recipe."
            )
        self._drop_kept("load")
        self.weights = weights
        self.runner.weights_changed()

    def release(self) -> None:
        """Free the KV cache's memory until the next `add`. What is kept of conversations is freed with it."""
        self._drop_kept("release")
        self.runner.release()

    def expect(self, tokens: Sequence[int]) -> None:
        """Requests that may reach so many tokens each are to come: when the idle engine begins to work, the cache is
        sized for them, and not for its first requests alone. Until the next call."""
        self._expected = list(tokens)

    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests, all or none.

        Tokens and log-probs of a request depend only on its tokens, sampling parameters and id. UserError if one can
        never run; ValueError if an open conversation cannot continue with it.
        """
        self.resume([Unfinished(request) for request in requests])

    def resume(self, unfinished: Sequence[Unfinished]) -> None:
        """`add` for requests of which something may have been drawn before: they go on as if these weights had been
        given exactly these tokens. All of them are computed again, so keys and values are those of the weights that
        draw the next token, and its log-prob is the learner's with these weights, bit for bit."""
        requests = [one.request for one in unfinished]
        if self.weights is None:
            raise ValueError("no weights are loaded; call engine.load(weights) before engine.add() or generate()")
        for request in requests:
            check_params(request.sampling)
            check_vocabulary(request, self.model.spec.vocab_size)
        for one in unfinished:
            if len(one.tokens):
                check_vocabulary(replace(one.request, tokens=tuple(one.tokens.tolist())), self.model.spec.vocab_size)
        if not requests:
            return
        scheduler, begins = self._scheduler, self._began is None
        allocator = scheduler.allocator
        if begins and (pages := self._num_pages(requests)) != allocator.num_pages:
            scheduler.resize(pages)
        scheduler.check(requests)
        if self.runner.reserve(allocator.num_pages):
            allocator.beginnings.clear()
        scheduler.resume(unfinished)
        if begins:
            scheduler.reset_counts()
            allocator.peak_used = allocator.num_used
            self.runner.reset_times()
            self._num_finished, self._began = 0, time.perf_counter()

    def step(self) -> StepReport:
        """One forward pass, or a burst of decode steps. If it fails, all requests are lost."""
        scheduler = self._scheduler
        assert scheduler.has_work, "step() of an engine without work"
        try:
            plan, drawn = self._draw()
            stop = self._stopper.check(plan.sample_slots, drawn.tokens, drawn.counts)
            owners = [] if self.on_tokens is None else self._owners(plan)
            done = scheduler.commit(drawn.tokens, drawn.logprobs, stop, drawn.counts)
            if self.on_tokens is not None:
                self.on_tokens(_news(owners, drawn, done.counts))
            for end in done.finished:
                self._finished.append((end.request, self._completion(end)))
                self._num_finished += 1
                if self.speculator is not None:
                    self.speculator.end(end)
        except BaseException:
            self._abandon()
            raise
        running, waiting = len(scheduler.running), len(scheduler.waiting)
        return StepReport(scheduler.num_steps, running, waiting, self._num_finished, scheduler.num_drawn_tokens)

    def _draw(self) -> tuple[Plan, Drawn]:
        """The model's part of a step."""
        scheduler, table = self._scheduler, self._table
        plan, steps = scheduler.schedule(), 1
        self._enter()
        if self.speculator is not None and plan.is_decode:
            return self.speculator.decode(scheduler, self.runner, plan, table)
        if burst := self.runner.burst(plan, table):
            plan, steps = scheduler.extend(burst)
        return plan, Drawn.full(*self.runner.run(plan, table, steps))

    def _enter(self) -> None:
        """Give the sequences that have just got a slot their rows of sampling parameters and stop conditions."""
        slots = self._scheduler.slots
        entered = [(slot, seq) for slot in dict.fromkeys(slots.entered) if (seq := slots.owner[slot]) is not None]
        slots.entered.clear()
        if entered:
            self._table.put(
                [slot for slot, _ in entered], [seq.sampling for _, seq in entered], [seq.id for _, seq in entered]
            )
        for slot, seq in entered:  # one that was interrupted has drawn tokens before
            self._stopper.put(slot, seq.sampling, seq.tokens[seq.prefix.length :].tolist())

    def _owners(self, plan: Plan) -> list[tuple[int, int]]:
        """Id and tokens drawn so far of each request that draws in this step."""
        slots, found = self._scheduler.slots, list[tuple[int, int]]()
        for slot in plan.sample_slots.tolist():
            seq = slots.owner[slot]
            assert seq is not None, "the slot is empty"
            found.append((seq.id, int(slots.length[slot]) - seq.prefix.length))
        return found

    def take_metrics(self) -> dict[str, float]:
        """Since the last call: on a GPU what was captured, with speculation what became of drafts."""
        drafts = self.speculator.take_metrics() if self.speculator is not None else {}
        return self.runner.take_metrics() | drafts

    def collect(self) -> list[Completion]:
        """What has finished since the last call, in the order in which it finished."""
        finished, self._finished = self._finished, []
        self._rest_if_idle()
        return [completion for _, completion in finished]

    def cancel(self, ids: Collection[int]) -> None:
        """Drop requests with these ids that wait or run, without a completion; unknown ids are ignored.

        A conversation stays open as it was before the turn that is dropped: it goes on with a request that begins with
        its last finished turn's tokens. A completion that is not collected yet stays.
        """
        self._scheduler.cancel(ids)
        if self.speculator is not None:
            self.speculator.forget([id for id in ids if id not in self._scheduler.turns])
        self._rest_if_idle()

    def suspend(self, ids: Collection[int] | None = None) -> list[Unfinished]:
        """Take back the requests with these ids that wait or run; unknown ids are ignored. They come in the order in
        which they were added, with what was drawn for them; their pages and slots are free.

        None: all of them, and the conversations between two turns are closed (their next turns are computed from the
        first token, as after `load`). Once its completions are collected, the engine is then idle: training gets its
        memory. A completion that is not collected yet stays.
        """
        assert self.weights is not None or not self.has_work
        scheduler, version = self._scheduler, -1 if self.weights is None else self.weights.version
        gone = [s.id for s in (*scheduler.running, *scheduler.waiting)] if ids is None else list(ids)
        taken = scheduler.suspend(gone)
        if ids is None:
            gone += scheduler.turns.forget_all()
        if self.speculator is not None:
            self.speculator.forget([id for id in gone if id not in scheduler.turns])
        self._rest_if_idle()
        return [_unfinished(seq, version) for seq in taken]

    def drawn(self) -> dict[int, int]:
        """How many tokens each request that waits or runs has, those before it was resumed included."""
        return self._scheduler.drawn()

    def forget(self, ids: Collection[int]) -> None:
        """These conversations have ended. A request of theirs that still waits or runs is dropped, without a
        completion; a completion that is not collected yet stays. Unknown ids are ignored."""
        self._scheduler.forget(ids)
        if self.speculator is not None:
            self.speculator.forget(ids)
        self._rest_if_idle()

    def generate(
        self,
        requests: Sequence[Request],
        *,
        on_step: Callable[[StepReport], None] | None = None,
        force_preempt: ForcePreempt | None = None,
    ) -> list[Completion]:
        """Generate all requests; completions come in their order. If `on_step` raises, no request stays in the engine.

        `force_preempt(step, running) -> indices to preempt` interrupts requests (places in `requests`) on purpose. It
        changes no result, but must leave them some steps to make progress.
        """
        if self.has_work or self._finished:
            raise ValueError("generate() needs an engine without other requests; collect them first")
        self.add(requests)
        scheduler = self._scheduler
        first = scheduler.num_added - len(requests)
        if force_preempt is not None:
            scheduler.force_preempt = lambda step, running: [
                first + place for place in force_preempt(step, tuple(number - first for number in running))
            ]
        try:
            while self.has_work:
                report = self.step()
                if on_step is not None:
                    on_step(report)
        except BaseException:
            self._abandon()
            raise
        scheduler.force_preempt = None
        completions = dict(self._finished)
        self.collect()
        return [completions[first + place] for place in range(len(requests))]

    def _num_pages(self, requests: Sequence[Request]) -> int:
        """The configured size, or what the largest requests that can run at once may need, if memory allows."""
        size, most = self.settings.page_size, self.settings.max_num_seqs
        if self.settings.kv_cache_tokens is not None:
            return -(-self.settings.kv_cache_tokens // size)
        reach = self._expected or [most_tokens(r) for r in requests]
        sizes = sorted((-(-tokens // size) for tokens in reach), reverse=True)
        together = sizes[:most]
        if any(r.max_conversation is not None for r in requests):  # more will come than have begun so far
            together += sizes[:1] * (most - len(together))
        need = sum(together) + len(together) // size + 1  # and the pages that the scheduler keeps back
        cache = self.runner.cache
        have, held = (cache.num_pages, cache.num_bytes) if cache is not None else (0, 0)
        if have >= need:
            return have
        format = self.model.recipe.kv_cache
        fits = pages_in_memory(
            self.model.spec, size, self.model.dtype, self.runner.device, format, held, self.runner.num_rows,
            self.settings.drafts,
        )
        if sizes[0] <= have and fits <= have * 9 // 8:  # memory was short before: another would hardly be larger
            return have
        self.runner.release()
        if fits < sizes[0] and self.runner.device.type == "cuda":
            room, wanted = (f"{pages * size:,}" for pages in (fits, sizes[0]))
            raise OutOfMemory(
                f"The GPU's free memory has room for a KV cache of {room} tokens, and the longest request may need "
                f"{wanted}. Other processes may hold the rest; else shorten prompts or answers."
            )
        return max(1, min(need, fits))

    def _completion(self, end: Finished) -> Completion:
        assert self.weights is not None
        hidden_end = end.stopped and self._stopper.stops_by_id(end.sampling, int(end.tokens[-1]))
        text = self.tokenizer.decode((end.tokens[:-1] if hidden_end else end.tokens).tolist())
        finish: FinishReason = "stop" if end.stopped else "length"
        spans = spans_with(end.before, end.num_before, len(end.tokens), self.weights.version)
        return Completion(
            end.id, end.tokens, end.logprobs, text, finish, self.weights.version, self.weights.flow_digest,
            spans if len(spans) > 1 else (),
        )

    def _drop_kept(self, verb: str) -> None:
        if self.has_work:
            raise ValueError(f"engine.{verb}() while requests are running or waiting")
        self._scheduler.turns.drop_all()
        self._scheduler.allocator.beginnings.clear()

    def _rest_if_idle(self) -> None:
        """If nothing is left: check that no page is lost, free memory, note the figures."""
        scheduler, allocator = self._scheduler, self._scheduler.allocator
        if self._began is None or scheduler.has_work or self._finished or len(scheduler.turns):
            return
        scheduler.check_integrity()
        assert allocator.num_used == 0, f"{allocator.num_used} pages are still held after the last request"
        assert scheduler.rows is None or scheduler.rows.num_used == 0, "states of sequences are still held"
        self.runner.give_back()
        if self.speculator is not None:
            self.speculator.rest()
        self.stats = RolloutStats(
            scheduler.num_drawn_tokens, scheduler.num_computed_tokens, scheduler.num_steps,
            time.perf_counter() - self._began, self.runner.model_seconds, self.runner.sample_seconds,
            scheduler.num_preemptions, allocator.peak_used, allocator.num_pages,
        )
        self._began = None

    def _abandon(self) -> None:
        """After an error: drop all requests, and the cache, which may hold NaN."""
        self._reset()
        if self.speculator is not None:
            self.speculator.rest()
        self.runner.release()


def spans_with(before: Spans, num_before: int, count: int, version: int) -> Spans:
    """The spans of `count` tokens, of which the first `num_before` have these, and `version` drew the others."""
    if count == num_before or (before and before[-1][1] == version):
        return before
    return (*before, (num_before, version))


def _unfinished(seq: Tracked, version: int) -> Unfinished:
    """What was drawn for a sequence that no longer waits or runs, the last of it by `version`."""
    prompt = seq.prefix.length
    tokens, logprobs = seq.tokens[prompt:], seq.logprobs[prompt:]
    return Unfinished(seq.asked(), tokens, logprobs, spans_with(seq.before, seq.num_before, len(tokens), version))


def _news(owners: list[tuple[int, int]], drawn: Drawn, counts: np.ndarray) -> list[NewTokens]:
    """The first `counts[s]` tokens of each sample, for the requests that draw."""
    tokens, logprobs = drawn.tokens.astype(np.int32), drawn.logprobs.astype(np.float32)
    return [
        NewTokens(id, start, tokens[:n, s], logprobs[:n, s])
        for s, ((id, start), n) in enumerate(zip(owners, counts.tolist(), strict=True))
    ]
