"""Mathematical equality of answers by math-verify, in worker processes with a time limit of ours. Needs extra `math`.

math-verify's own limits are signal alarms, which work only in the main thread and cannot stop C code: they
are off here. A worker that is late is killed and replaced, and its item counts as an error (None), as does one that
math-verify fails on. A completion in which it finds no answer scores 0.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from jetrl.errors import UserError
from jetrl.requirements import install
from jetrl.rewards.function import completion_text
from jetrl.rewards.gsm8k import gold_answer

TIME_LIMIT = 5.0  # seconds for one item, parsing and comparison together
START_LIMIT = 120.0  # seconds for a worker to import math-verify
MEMORY_LIMIT = 4 << 30  # bytes of address space of a worker: some answers, such as 10^10^10, fill any memory
MAX_WORKERS = 8
_READY = "ready"

Scorer = Callable[[str, str], float]  # gold answer, completion -> score


def math_reward(completions: Sequence[Any], answer: Sequence[str], **_: Any) -> list[float | None]:
    """1 where the completion's answer (the last `\\boxed{}`, if there is one) equals the gold one, else 0.

    Of a gold answer with `####`, as in GSM8K, what follows the sign counts.
    """
    texts = [completion_text(c) for c in completions]
    return _shared_pool().map(list(zip(map(gold_answer, answer), texts, strict=True)))


math_reward.gold_template = r"\boxed{{answer}}"  # type: ignore[attr-defined]  # both are read by rewards.gold_text
math_reward.gold_answer = gold_answer  # type: ignore[attr-defined]


@functools.cache
def _shared_pool() -> Pool:
    if importlib.util.find_spec("math_verify") is None:
        raise UserError(f"math_reward needs math-verify; run: {install('math')}")
    return Pool(score_math, min(MAX_WORKERS, os.cpu_count() or 1))


def score_math(gold: str, text: str) -> float:
    """1 or 0 for one completion; raises where the gold answer cannot be parsed or a comparison fails."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns once that its alarms are off
    marked = any(mark in gold for mark in ("$", "\\(", "\\[", "\\boxed"))
    golds = parse(gold if marked else f"\\boxed{{{gold}}}", parsing_timeout=None, raise_on_error=True)
    if not golds:
        raise ValueError(f"math-verify cannot parse the gold answer {gold!r}")
    targets = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
    found = parse(text, targets, parsing_timeout=None, raise_on_error=True)
    failure: Exception | None = None
    for one in golds:  # pair by pair, so that a comparison that fails does not hide one that succeeds
        for other in found:
            try:
                if verify(one, other, timeout_seconds=None, raise_on_error=True):
                    return 1.0
            except Exception as error:  # sympy raises many kinds
                failure = error
    if failure is not None:
        raise failure
    return 0.0


class Pool:
    """Worker processes that score one item each at a time. A bad item kills its worker, not the whole batch."""

    def __init__(self, scorer: Scorer, num_workers: int, time_limit: float = TIME_LIMIT) -> None:
        self.scorer, self.num_workers, self.time_limit = scorer, num_workers, time_limit
        self.workers: list[_Worker] = []

    def map(self, items: Sequence[tuple[str, str]]) -> list[float | None]:
        """Scores in the order of the items; None for one that raised, ran out of time, or killed its worker."""
        todo = deque(dict.fromkeys(items))
        scores: dict[tuple[str, str], float | None] = {}
        while len(self.workers) < min(self.num_workers, len(todo)):
            self.workers.append(_Worker(self.scorer))
        while todo or any(w.item is not None for w in self.workers):
            for worker in self.workers:
                if worker.ready and worker.item is None and todo:
                    worker.give(todo.popleft(), self.time_limit)
            self._collect(scores)
        return [scores[item] for item in items]

    def _collect(self, scores: dict[tuple[str, str], float | None]) -> None:
        """Wait for the next message or deadline, then take all messages and replace workers that are late or dead."""
        busy = [w for w in self.workers if w.item is not None or not w.ready]
        patience = max(0.0, min(w.deadline for w in busy) - time.monotonic())
        arrived = wait([w.connection for w in busy], timeout=patience)
        for worker in busy:
            item = worker.item
            if worker.connection in arrived:
                alive, value = worker.take()
            elif time.monotonic() >= worker.deadline:
                alive, value = False, None
            else:
                continue
            if item is not None:
                scores[item] = value
            if not alive:
                self.workers.remove(worker)
                worker.kill()
                if not worker.ready:
                    self.close()
                    raise UserError(
                        "A worker process of math_reward could not start (its error is above). A script that uses "
                        'it must start its work under `if __name__ == "__main__":`.'
                    )
                self.workers.append(_Worker(self.scorer))

    def close(self) -> None:
        """End all workers; the next `map` starts new ones."""
        for worker in self.workers:
            worker.kill()
        self.workers.clear()


class _Worker:
    """One process and what it is doing; `item` is None while it waits."""

    def __init__(self, scorer: Scorer) -> None:
        context = multiprocessing.get_context("spawn")  # a fork of a process with CUDA and threads is not safe
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, scorer), daemon=True)
        self.process.start()
        theirs.close()
        self.item: tuple[str, str] | None = None
        self.ready = False
        self.deadline = time.monotonic() + START_LIMIT

    def give(self, item: tuple[str, str], time_limit: float) -> None:
        self.item, self.deadline = item, time.monotonic() + time_limit
        try:
            self.connection.send(item)
        except OSError:  # it died while it waited; take() finds the closed pipe
            pass

    def take(self) -> tuple[bool, float | None]:
        """(whether the worker is alive, score or None)."""
        try:
            value = self.connection.recv()
        except (EOFError, OSError):
            return False, None
        self.item = None
        if value == _READY:
            self.ready = True
            return True, None
        return True, value

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


def _serve(connection: Connection, scorer: Scorer) -> None:
    """A worker's main loop: say that it is ready, then score item after item until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its workers
    _limit_memory()
    scorer("1", "1")  # imports what the scorer needs before the first item's clock starts
    connection.send(_READY)
    while True:
        try:
            gold, text = connection.recv()
        except EOFError:
            return
        try:
            value: float | None = scorer(gold, text)
        except Exception:  # a failed item is an error of that item; the parent counts it
            value = None
        connection.send(value)


def _limit_memory() -> None:
    try:
        import resource
    except ImportError:  # Windows has no such limit; the time limit remains
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = MEMORY_LIMIT if hard == resource.RLIM_INFINITY else min(MEMORY_LIMIT, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
