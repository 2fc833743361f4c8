"""A rollout engine that is not our own, with each call and each completion checked.

What goes wrong in it ends the run with one message that names the call; the loop saves the steps before.
`FloatingPointError` passes through: the loop keeps that step's data for replay.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np

from jetrl.errors import UserError, as_user_error, disk_full, told
from jetrl.types import Completion, Engine, Request, StepReport, Unfinished, WeightSet
from jetrl.user_code.guard import user_code

_USERS = "Fix the engine"


@contextmanager
def blamed(name: str, call: str, cure: str = _USERS, called: Any = None) -> Iterator[None]:
    """Turns an exception in the engine (`rollout.engine = name`) into a UserError with its place and the cure.
    `called`: what of the engine runs."""
    try:
        with user_code(f"rollout.engine = {name}: {call}"):
            yield
    except (UserError, FloatingPointError):
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, OSError) and disk_full(error):
            raise
        raise as_user_error(error)(
            f"rollout.engine = {name}: {call} raised {told(error, called)}. {cure}."
        ) from error


def cannot_suspend(name: str) -> str:
    """Why an engine that is not our own carries nothing over from one step to the next."""
    return (
        f"rollout.engine = {name}: it cannot suspend answers that are under way and let them go on with other weights. "
        'Set rollout.engine = "jetrl".'
    )


class CheckedEngine(Engine):
    """`types.Engine` around one that is named `name`. UserError where it raises or breaks the contract; `cure` says
    what to do about that.

    Optional parts that it lacks do what `Engine`'s do.
    """

    def __init__(self, engine: Engine, name: str, vocab_size: int, cure: str = _USERS) -> None:
        self.inner, self.name, self.vocab_size, self.cure = engine, name, vocab_size, cure
        self.keeps_bits = engine.keeps_bits
        self._open: dict[int, Request] = {}
        self._version, self._flow_digest = 0, ""

    @property
    def has_work(self) -> bool:
        with self._blamed("has_work"):
            has_work = bool(self.inner.has_work)
        if self._open and not has_work:
            raise self._broken("has_work", f"no work left, but {len(self._open)} requests have no completion")
        return has_work

    def load(self, weights: WeightSet) -> None:
        with self._blamed("load"):
            self.inner.load(weights)
        self._version, self._flow_digest = weights.version, weights.flow_digest

    def add(self, requests: Sequence[Request]) -> None:
        with self._blamed("add"):
            self.inner.add(requests)
        self._open |= {request.id: request for request in requests}

    def step(self) -> StepReport:
        with self._blamed("step"):
            report = self.inner.step()
        if not isinstance(report, StepReport):
            raise self._broken("step", f"must return a StepReport, got {type(report).__name__}")
        return report

    def collect(self) -> list[Completion]:
        with self._blamed("collect"):
            completions: Any = self.inner.collect()
        if not isinstance(completions, list):
            raise self._broken("collect", f"must return a list, got {type(completions).__name__}")
        if not self._open:  # what is left is completions of conversations that were given up
            return []
        for completion in completions:
            if wrong := self._wrong_with(completion):
                raise self._broken("collect", wrong)
            del self._open[completion.request_id]
        return completions

    def forget(self, ids: Collection[int]) -> None:
        for i in ids:
            self._open.pop(i, None)
        with self._blamed("forget"):
            self.inner.forget(ids)

    def release(self) -> None:
        with self._blamed("release"):
            self.inner.release()

    def cancel(self, ids: Collection[int]) -> None:
        if not hasattr(self.inner, "cancel"):
            return self.forget(ids)
        for i in ids:
            self._open.pop(i, None)
        with self._blamed("cancel"):
            self.inner.cancel(ids)

    def suspend(self, ids: Collection[int] | None = None) -> list[Unfinished]:
        raise UserError(cannot_suspend(self.name))

    def resume(self, unfinished: Sequence[Unfinished]) -> None:
        raise UserError(cannot_suspend(self.name))

    def expect(self, tokens: Sequence[int]) -> None:
        if hasattr(self.inner, "expect"):
            with self._blamed("expect"):
                self.inner.expect(tokens)

    @property
    def about(self) -> str:
        """What the user should know about the engine at the start of a run; empty if there is nothing."""
        with self._blamed("about"):
            return str(getattr(self.inner, "about", ""))

    def take_metrics(self) -> dict[str, float]:
        """The engine's own metrics since the last call."""
        with self._blamed("take_metrics"):
            return dict(getattr(self.inner, "take_metrics", dict)())

    def close(self) -> None:
        if callable(close := getattr(self.inner, "close", None)):
            with self._blamed("close"):
                close()

    def _blamed(self, call: str) -> AbstractContextManager[None]:
        return blamed(self.name, call, self.cure, getattr(type(self.inner), call, None))

    def _wrong_with(self, completion: Any) -> str:
        """What part of the contract a completion breaks; empty if it keeps it."""
        if not isinstance(completion, Completion):
            return f"must return Completions, got {type(completion).__name__}"
        if completion.request_id not in self._open:
            return f"a completion of request {completion.request_id}, which is not open (or was completed before)"
        where, most = f"request {completion.request_id}", self._open[completion.request_id].sampling.max_tokens
        tokens, logprobs = completion.tokens, completion.logprobs
        if not 0 < len(tokens) <= most or len(tokens) != len(logprobs):
            return f"{where}: {len(tokens)} tokens and {len(logprobs)} log-probs; need equal numbers, from 1 to {most}"
        if len(odd := tokens[(tokens < 0) | (tokens >= self.vocab_size)]):
            return f"{where}: token {odd[0]} is not an integer from 0 to {self.vocab_size - 1}"
        if len(wrong := logprobs[~np.isfinite(logprobs)]):
            return f"{where}: log-prob {wrong[0]} is not a finite float"
        if not isinstance(completion.text, str):
            return f"{where}: text is of type {type(completion.text).__name__}"
        if completion.finish_reason not in ("stop", "length"):
            return f'{where}: finish_reason must be "stop" or "length", got {completion.finish_reason!r}'
        if (completion.weight_version, completion.flow_digest) != (self._version, self._flow_digest):
            return (
                f"{where}: weight_version {completion.weight_version} and flow_digest {completion.flow_digest!r}, but "
                f"version {self._version} and {self._flow_digest!r} were loaded last"
            )
        return ""

    def _broken(self, call: str, what: str) -> UserError:
        return UserError(f"rollout.engine = {self.name}: {call}: {what}. {self.cure} (jetrl.types.Engine).")
