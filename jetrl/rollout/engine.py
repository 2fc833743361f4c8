"""`Engine`: requests in, completions with log-probs out. One step is schedule -> run -> commit; on a GPU, a few decode
steps in a row run without the host in between (a burst), and what a sequence drew after its end is dropped.

The engine runs the very model object that is trained. `load` therefore moves no weights: it takes note of their version
and of the flow digest, which every completion carries, and refuses weights of another flow.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jetrl.errors import UserError
from jetrl.rollout.kv_cache import PageAllocator
from jetrl.rollout.runner import Model, ModelRunner, pages_in_memory
from jetrl.rollout.sampler import SamplingTable, check_params
from jetrl.rollout.scheduler import ForcePreempt, Scheduler
from jetrl.types import Completion, FinishReason, Request, WeightSet


class Tokenizer(Protocol):
    """What the engine asks of a tokenizer."""

    @property
    def eos_token_id(self) -> int | None: ...

    def decode(self, token_ids: list[int]) -> str: ...


@dataclass(frozen=True, slots=True)
class StepReport:
    """What `on_step` is told after each engine step."""

    step: int
    running: int
    waiting: int
    finished: int
    generated_tokens: int


@dataclass(frozen=True, slots=True)
class RolloutStats:
    """Figures of one `generate` call. `model_seconds` is forward and lm_head; drawing tokens is `sample_seconds`."""

    generated_tokens: int
    computed_tokens: int  # rows of all forward passes; shared prompts count once, preempted tokens again
    steps: int
    seconds: float
    model_seconds: float
    sample_seconds: float
    preemptions: int
    peak_pages: int
    num_pages: int

    @property
    def overhead_share(self) -> float:
        """Share of the time spent neither in the model nor in drawing tokens."""
        return 1.0 - (self.model_seconds + self.sample_seconds) / self.seconds

    @property
    def tokens_per_second(self) -> float:
        return self.generated_tokens / self.seconds


class Engine:
    """The rollout engine. Sizes are those of the config's `rollout` section; `eos_token_ids` overrides the tokenizer's.

    `kv_cache_tokens=None` sizes the cache for each call from what the requests can need and most of the free memory.
    """

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
    ) -> None:
        if page_size < 1 or (kv_cache_tokens is not None and kv_cache_tokens < 1):
            raise UserError(
                f"rollout.page_size = {page_size}, rollout.kv_cache_tokens = {kv_cache_tokens}: "
                "a page and the cache need at least one token each."
            )
        self.model, self.tokenizer, self.flow_digest = model, tokenizer, flow_digest
        self.runner = ModelRunner(model, page_size)
        self.page_size, self.kv_cache_tokens = page_size, kv_cache_tokens
        self.max_num_seqs, self.max_tokens_per_step = max_num_seqs, max_tokens_per_step
        if eos_token_ids is None:
            eos_token_ids = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        self.eos_token_ids = frozenset(eos_token_ids)
        self.weights: WeightSet | None = None
        self.stats: RolloutStats | None = None  # of the last call

    def load(self, weights: WeightSet) -> None:
        """Take note of newly published weights; ValueError if they were published for another precision flow."""
        if weights.flow_digest != self.flow_digest:
            raise ValueError(
                f"weights of version {weights.version} have flow {weights.flow_digest}, this engine runs flow "
                f"{self.flow_digest}; build engine and trainer from one recipe."
            )
        self.weights = weights
        self.runner.weights_changed()

    def release(self) -> None:
        """Give the KV cache's memory back until the next `generate`."""
        self.runner.release()

    def generate(
        self,
        requests: Sequence[Request],
        *,
        on_step: Callable[[StepReport], None] | None = None,
        force_preempt: ForcePreempt | None = None,
    ) -> list[Completion]:
        """Generate all requests; completions come in their order.

        Tokens and log-probs of a request depend on its tokens, sampling parameters and id alone. `force_preempt(step,
        running) -> indices to preempt` interrupts requests (places in `requests`) on purpose; it changes no result, but
        must leave them steps in which to get on.
        """
        if self.weights is None:
            raise ValueError("no weights are loaded; call engine.load(weights) before engine.generate()")
        start = time.perf_counter()
        for request in requests:
            self._check(request)
        allocator = PageAllocator(self._num_pages(requests), self.page_size)
        scheduler = Scheduler(
            allocator,
            max_num_seqs=min(self.max_num_seqs, max(1, len(requests))),
            max_tokens_per_step=self.max_tokens_per_step,
            max_position=self.model.spec.max_position,
            force_preempt=force_preempt,
        )
        scheduler.add(requests)
        self.runner.reserve(allocator.num_pages)
        self.runner.reset_times()
        table = SamplingTable.build([r.sampling for r in requests], [r.id for r in requests])
        stopper = _Stopper(requests, self.eos_token_ids, self.tokenizer)
        drawn = _Drawn()
        while scheduler.has_work:
            plan, steps = scheduler.schedule(), 1
            if burst := self.runner.burst(plan, table):
                plan, steps = scheduler.extend(burst)
            tokens, logprobs = self.runner.run(plan, table, steps)
            stop = drawn.take(plan.sample_requests, tokens, logprobs, stopper)
            scheduler.commit(tokens, stop)
            if on_step is not None:
                running, waiting = len(scheduler.running), len(scheduler.waiting)
                finished = len(requests) - running - waiting
                on_step(StepReport(scheduler.num_steps, running, waiting, finished, drawn.count))
        scheduler.check_integrity()
        assert allocator.num_used == 0, f"{allocator.num_used} pages are still held after the last request"
        completions = self._completions(requests, drawn, stopper)
        self.runner.give_back()
        self.stats = RolloutStats(
            drawn.count, scheduler.num_computed_tokens, scheduler.num_steps, time.perf_counter() - start,
            self.runner.model_seconds, self.runner.sample_seconds,
            scheduler.num_preemptions, allocator.peak_used, allocator.num_pages,
        )  # fmt: skip
        return completions

    def _check(self, request: Request) -> None:
        check_params(request.sampling)
        vocab_size = self.model.spec.vocab_size
        if request.tokens and not (0 <= min(request.tokens) and max(request.tokens) < vocab_size):
            raise UserError(
                f"request {request.id} has tokens from {min(request.tokens)} to {max(request.tokens)}, but the model "
                f"knows 0 to {vocab_size - 1}; check that the tokenizer is the model's."
            )

    def _num_pages(self, requests: Sequence[Request]) -> int:
        """The configured size, or what the largest requests that can run at once may need, as far as memory allows."""
        if self.kv_cache_tokens is not None:
            return -(-self.kv_cache_tokens // self.page_size)
        sizes = sorted((-(-(len(r.tokens) + r.sampling.max_tokens) // self.page_size) for r in requests), reverse=True)
        together = sizes[: self.max_num_seqs]
        need = sum(together) + len(together) // self.page_size + 1  # and the pages that the scheduler keeps back
        have = self.runner.cache.num_pages if self.runner.cache is not None else 0
        if have >= need:
            return have
        self.runner.release()
        format = self.model.recipe.kv_cache
        fits = pages_in_memory(self.model.spec, self.page_size, self.model.dtype, self.runner.device, format)
        return max(1, min(need, fits))

    def _completions(self, requests: Sequence[Request], drawn: _Drawn, stopper: _Stopper) -> list[Completion]:
        assert self.weights is not None
        result = []
        for i, (tokens, logprobs, stopped) in enumerate(drawn.per_request(len(requests))):
            hidden_end = stopped and tokens[-1] in stopper.ids[i]  # a stop token is no part of the text
            text = self.tokenizer.decode(list(tokens[:-1] if hidden_end else tokens))
            finish: FinishReason = "stop" if stopped else "length"
            version, flow = self.weights.version, self.weights.flow_digest
            result.append(Completion(requests[i].id, tokens, logprobs, text, finish, version, flow))
        return result


class _Drawn:
    """What the steps drew, as one row of columns a step; sorted by request at the end."""

    def __init__(self) -> None:
        self.count = 0
        self._steps: list[tuple[np.ndarray, ...]] = []

    def take(self, requests: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray, stopper: _Stopper) -> np.ndarray:
        """Keep what `requests` [S] drew, `tokens` and `logprobs` [steps, S], up to each one's stop: True [steps, S]."""
        stop = np.zeros(tokens.shape, dtype=bool)
        going = np.arange(len(requests))
        for step, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
            stops = stopper.check(requests[going], token[going])
            stop[step, going] = stops
            self.count += len(going)
            self._steps.append((requests[going], token[going], logprob[going], stops))
            going = going[~stops]
        return stop

    def per_request(self, num_requests: int) -> list[tuple[tuple[int, ...], tuple[float, ...], bool]]:
        """(tokens, log-probs, whether the last token stopped it) of each request."""
        if not self._steps:
            return []
        requests, tokens, logprobs, stop = (np.concatenate(column) for column in zip(*self._steps, strict=True))
        order = np.argsort(requests, kind="stable")  # a request's tokens were drawn in order
        ends = np.cumsum(np.bincount(requests, minlength=num_requests))
        rows = np.split(order, ends[:-1])
        return [(tuple(tokens[r].tolist()), tuple(logprobs[r].tolist()), bool(stop[r[-1]])) for r in rows]


class _Stopper:
    """Decides which drawn tokens end their sequence: stop tokens by id, stop strings by decoding a short tail."""

    def __init__(self, requests: Sequence[Request], eos: frozenset[int], tokenizer: Tokenizer) -> None:
        self.ids = [
            frozenset(r.sampling.stop_token_ids) | (frozenset() if r.sampling.ignore_eos else eos) for r in requests
        ]
        kinds = {ids: kind for kind, ids in enumerate(dict.fromkeys(self.ids))}
        self._kind = np.array([kinds[ids] for ids in self.ids], dtype=np.int64)
        self._kinds = [np.array(sorted(ids), dtype=np.int64) for ids in kinds]
        self._strings = [r.sampling.stop for r in requests]
        self._has_strings = np.array([bool(s) for s in self._strings], dtype=bool)
        # each token decodes to a byte or more, but for special tokens that decode to nothing: some spare
        self._window = [max((len(s.encode()) for s in stop), default=0) + 8 for stop in self._strings]
        self._tails: list[list[int]] = [[] for _ in requests]
        self._tokenizer = tokenizer
        self._pieces: dict[int, str] = {}

    def check(self, requests: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """True [S] where `tokens` [S], just drawn for `requests` [S], ends the sequence."""
        if len(self._kinds) == 1:
            stop = np.isin(tokens, self._kinds[0])
        else:
            stop = np.zeros(len(tokens), dtype=bool)
            for kind, ids in enumerate(self._kinds):
                stop |= (self._kind[requests] == kind) & np.isin(tokens, ids)
        for s in np.flatnonzero(self._has_strings[requests]).tolist():
            stop[s] |= self._completes_string(int(requests[s]), int(tokens[s]))
        return stop

    def _completes_string(self, request: int, token: int) -> bool:
        tail = self._tails[request]
        tail.append(token)
        if len(tail) > self._window[request]:
            del tail[0]
        strings = self._strings[request]
        if token not in self._pieces:
            self._pieces[token] = self._tokenizer.decode([token])
        piece = self._pieces[token]
        # Most tokens cannot end a stop string, which their own text shows. Not so for parts of a character (decoded to
        # U+FFFD) and for white space, which decoders may strip.
        if "\ufffd" not in piece and not any(s[-1] in piece or s[-1].isspace() for s in strings):
            return False
        text = self._tokenizer.decode(tail)
        return any(s in text for s in strings)
