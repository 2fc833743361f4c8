"""`PagedEngine`: requests in, completions with log-probs out. One step is schedule -> run -> commit; on a GPU, a few
decode steps run in a row without the host in between (a burst), and what a sequence drew after its end is dropped.

Requests come and go through `add`, `step` and `collect`; `generate` is a loop over these. A session lasts from the
first `add` on an idle engine until everything has finished, has been collected and (conversations) forgotten. It has
one KV cache, sized at that first `add`.

The engine runs the same model object that is trained. So `load` moves no weights: it notes their version and the flow
digest, which every completion carries, and refuses weights of another flow.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from jetrl.engine.kv_cache import pages_in_memory
from jetrl.engine.limits import check_vocabulary, most_tokens
from jetrl.engine.pages import PageAllocator
from jetrl.engine.plan import Drawn, Finished, Plan
from jetrl.engine.runner import Model, ModelRunner
from jetrl.engine.sampler import SamplingTable, check_params
from jetrl.engine.scheduler import ForcePreempt, Scheduler
from jetrl.engine.sharing import Merge
from jetrl.engine.speculation.speculator import Speculator
from jetrl.engine.stopper import Stopper, Tokenizer
from jetrl.errors import OutOfMemory, UserError
from jetrl.types import Completion, FinishReason, Request, StepReport, WeightSet


@dataclass(frozen=True, slots=True)
class RolloutStats:
    """Figures of one session. `model_seconds` covers forward and lm_head; `sample_seconds` covers drawing tokens."""

    generated_tokens: int
    computed_tokens: int  # rows of all forward passes; shared prompts count once, preempted tokens again
    steps: int
    seconds: float
    model_seconds: float
    sample_seconds: float
    preemptions: int
    peak_pages: int
    num_pages: int


@dataclass(slots=True)
class _Session:
    """What exists from the first `add` on an idle engine until nothing is left."""

    scheduler: Scheduler
    stopper: Stopper
    table: SamplingTable
    start: float
    num_finished: int = 0
    finished: list[tuple[int, Completion]] = field(default_factory=list)  # not collected yet, by place in `add`

    @property
    def is_over(self) -> bool:
        return not (self.scheduler.has_work or self.finished or len(self.scheduler.turns))

    def report(self) -> StepReport:
        scheduler = self.scheduler
        running, waiting = len(scheduler.running), len(scheduler.waiting)
        return StepReport(scheduler.num_steps, running, waiting, self.num_finished, scheduler.num_drawn_tokens)


class PagedEngine:
    """The rollout engine. Sizes are those of the config's `rollout` section; `eos_token_ids` overrides the tokenizer's.

    `kv_cache_tokens=None` sizes the cache for each session: what its first requests can need, within most of the free
    memory. On a GPU a cache of up to `keep_bytes` stays between two sessions, with the CUDA graphs that read it (None:
    of up to a tenth of its memory).
    """

    keeps_bits = True

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        flow_digest: str,
        *,
        page_size: int = 16,
        max_num_seqs: int = 256,
        max_tokens_per_step: int = 2048,
        kv_cache_tokens: int | None = None,
        eos_token_ids: Collection[int] | None = None,
        speculator: Speculator | None = None, merge_prefix: Merge = "off", keep_bytes: int | None = None,
    ) -> None:
        if page_size < 1 or (kv_cache_tokens is not None and kv_cache_tokens < 1):
            raise UserError(
                f"rollout.page_size = {page_size}, rollout.kv_cache_tokens = {kv_cache_tokens}: "
                "a page and the cache need at least one token each."
            )
        self.model, self.tokenizer, self.flow_digest = model, tokenizer, flow_digest
        self.runner = ModelRunner(model, page_size)
        self.runner.merge_prefix, self.runner.keep_bytes = merge_prefix, keep_bytes
        self._told = ""
        self.page_size, self.kv_cache_tokens = page_size, kv_cache_tokens
        self.max_num_seqs, self.max_tokens_per_step = max_num_seqs, max_tokens_per_step
        if eos_token_ids is None:
            eos_token_ids = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        self.eos_token_ids = frozenset(eos_token_ids)
        self.speculator = speculator
        self.weights: WeightSet | None = None
        self.stats: RolloutStats | None = None  # of the last session
        self._session: _Session | None = None
        self._expected: list[int] = []

    @property
    def has_work(self) -> bool:
        """Whether requests are running or waiting."""
        return self._session is not None and self._session.scheduler.has_work

    @property
    def about(self) -> str:
        """A line for the user at the start of a run."""
        return self._told

    def keep(self, most: int, told: str) -> None:
        """From now on a KV cache of up to `most` bytes stays between two sessions; `about` says what that means."""
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
        """Requests that may reach so many tokens each are to come: a cache opened from now on is sized for them, and
        not for its first requests alone. Optional; until the next call."""
        self._expected = list(tokens)

    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests, all or none.

        Tokens and log-probs of a request depend only on its tokens, sampling parameters and id. UserError if one can
        never run; ValueError if an open conversation cannot continue with it.
        """
        if self.weights is None:
            raise ValueError("no weights are loaded; call engine.load(weights) before engine.add() or generate()")
        for request in requests:
            check_params(request.sampling)
            check_vocabulary(request, self.model.spec.vocab_size)
        session = self._session
        if session is None or session.is_over:
            session = self._open(requests)
        session.scheduler.check(requests)
        self.runner.reserve(session.scheduler.allocator.num_pages)
        session.scheduler.add(requests)
        session.stopper.extend(requests)
        new_rows = SamplingTable.build([r.sampling for r in requests], [r.id for r in requests])
        session.table = session.table.extended(new_rows)
        self._session = session

    def step(self) -> StepReport:
        """One forward pass, or a burst of decode steps. If it fails, the session ends and its requests are lost."""
        session = self._session
        assert session is not None and session.scheduler.has_work, "step() of an engine without work"
        try:
            plan, drawn = self._draw(session.scheduler, session.table)
            stop = session.stopper.check(plan.sample_requests, drawn.tokens, drawn.counts)
            for end in session.scheduler.commit(drawn.tokens, drawn.logprobs, stop, drawn.counts):
                session.finished.append((end.request, self._completion(session, end)))
                session.num_finished += 1
                if self.speculator is not None:
                    self.speculator.end(end)
        except BaseException:
            self._abandon()
            raise
        return session.report()

    def _draw(self, scheduler: Scheduler, table: SamplingTable) -> tuple[Plan, Drawn]:
        """The model's part of a step."""
        plan, steps = scheduler.schedule(), 1
        if self.speculator is not None and plan.is_decode:
            return self.speculator.decode(scheduler, self.runner, plan, table)
        if burst := self.runner.burst(plan, table):
            plan, steps = scheduler.extend(burst)
        return plan, Drawn.full(*self.runner.run(plan, table, steps))

    def take_metrics(self) -> dict[str, float]:
        """Since the last call: on a GPU what was captured, with speculation what became of drafts."""
        drafts = self.speculator.take_metrics() if self.speculator is not None else {}
        return self.runner.take_metrics() | drafts

    def collect(self) -> list[Completion]:
        """What has finished since the last call, in the order in which it finished."""
        if self._session is None:
            return []
        finished, self._session.finished = self._session.finished, []
        self._end_if_over()
        return [completion for _, completion in finished]

    def forget(self, ids: Collection[int]) -> None:
        """These conversations have ended. A request of theirs that still waits or runs is dropped, without a
        completion; a completion that is not collected yet stays. Unknown ids are ignored."""
        if self._session is not None:
            self._session.scheduler.forget(ids)
            self._end_if_over()

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
        if self.has_work or (self._session is not None and self._session.finished):
            raise ValueError("generate() needs an engine without other requests; collect them first")
        self.add(requests)
        session = self._session
        assert session is not None
        scheduler = session.scheduler
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
        completions = dict(session.finished)
        self.collect()
        return [completions[first + place] for place in range(len(requests))]

    def _open(self, requests: Sequence[Request]) -> _Session:
        """A session whose cache is sized for `requests`."""
        start = time.perf_counter()
        scheduler = Scheduler(
            PageAllocator(self._num_pages(requests), self.page_size), max_num_seqs=self.max_num_seqs,
            max_tokens_per_step=self.max_tokens_per_step, max_position=self.model.spec.max_position,
        )
        self.runner.reset_times()
        return _Session(scheduler, Stopper(self.eos_token_ids, self.tokenizer), SamplingTable.build([], []), start)

    def _num_pages(self, requests: Sequence[Request]) -> int:
        """The configured size, or what the largest requests that can run at once may need, if memory allows."""
        if self.kv_cache_tokens is not None:
            return -(-self.kv_cache_tokens // self.page_size)
        reach = self._expected or [most_tokens(r) for r in requests]
        sizes = sorted((-(-tokens // self.page_size) for tokens in reach), reverse=True)
        together = sizes[: self.max_num_seqs]
        if any(r.max_conversation is not None for r in requests):  # more will come than have begun so far
            together += sizes[:1] * (self.max_num_seqs - len(together))
        need = sum(together) + len(together) // self.page_size + 1  # and the pages that the scheduler keeps back
        cache = self.runner.cache
        have, held = (cache.num_pages, cache.num_bytes) if cache is not None else (0, 0)
        if have >= need:
            return have
        format = self.model.recipe.kv_cache
        fits = pages_in_memory(self.model.spec, self.page_size, self.model.dtype, self.runner.device, format, held)
        if sizes[0] <= have and fits <= have * 9 // 8:  # memory was short before: another would hardly be larger
            return have
        self.runner.release()
        if fits < sizes[0] and self.runner.device.type == "cuda":
            room, wanted = (f"{pages * self.page_size:,}" for pages in (fits, sizes[0]))
            raise OutOfMemory(
                f"The GPU's free memory has room for a KV cache of {room} tokens, and the longest request may need "
                f"{wanted}. Other processes may hold the rest; else shorten prompts or answers."
            )
        return max(1, min(need, fits))

    def _completion(self, session: _Session, end: Finished) -> Completion:
        assert self.weights is not None
        hidden_end = end.stopped and session.stopper.is_stop_token(end.request, int(end.tokens[-1]))
        text = self.tokenizer.decode((end.tokens[:-1] if hidden_end else end.tokens).tolist())
        finish: FinishReason = "stop" if end.stopped else "length"
        return Completion(
            end.id, end.tokens, end.logprobs, text, finish, self.weights.version, self.weights.flow_digest
        )

    def _drop_kept(self, verb: str) -> None:
        if self.has_work:
            raise ValueError(f"engine.{verb}() while requests are running or waiting")
        if self._session is not None:
            self._session.scheduler.turns.drop_all()

    def _end_if_over(self) -> None:
        """End the session if nothing is left of it: check that no page is lost, free memory, note the figures."""
        session = self._session
        if session is None or not session.is_over:
            return
        scheduler, allocator = session.scheduler, session.scheduler.allocator
        scheduler.check_integrity()
        assert allocator.num_used == 0, f"{allocator.num_used} pages are still held after the last request"
        self.runner.give_back()
        if self.speculator is not None:
            self.speculator.end_session()
        self.stats = RolloutStats(
            scheduler.num_drawn_tokens, scheduler.num_computed_tokens, scheduler.num_steps,
            time.perf_counter() - session.start, self.runner.model_seconds, self.runner.sample_seconds,
            scheduler.num_preemptions, allocator.peak_used, allocator.num_pages,
        )
        self._session = None

    def _abandon(self) -> None:
        """After an error: drop all requests, and the cache, which may hold NaN."""
        self._session = None
        if self.speculator is not None:
            self.speculator.end_session()
        self.runner.release()
