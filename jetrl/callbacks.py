"""Callbacks of a `Trainer`: what a program does between the steps of a run, checked and called."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from jetrl.errors import UserError, as_user_error, defined_at, shown, told


class Callback:
    """What happens between the steps of a run. Override what you need; a class of yours need not inherit from this.

    Each method gets the `jetrl.Trainer`, which may evaluate, generate and save; `trainer.stop()` ends the run after
    this step. Return nothing. With several ranks, each rank calls its callbacks.
    """

    def on_start(self, trainer: Any) -> None:
        """Before the first step: the model is there, and so is the warm start."""

    def on_step(self, trainer: Any, step: int, metrics: Mapping[str, float]) -> None:
        """After a step, which is in metrics.jsonl then. `metrics` is its row."""

    def on_evaluation(self, trainer: Any, step: int, metrics: Mapping[str, float]) -> None:
        """After an evaluation of the run, that of step 0 included. `metrics` holds its `eval/*` only."""

    def on_end(self, trainer: Any) -> None:
        """After the last step, or the one after which `stop` was called. Not after an error."""


_METHODS = {"on_start": 0, "on_step": 2, "on_evaluation": 2, "on_end": 0}  # and the arguments after `trainer`
_FORM = (
    "Write a class with any of on_start(self, trainer), on_step(self, trainer, step, metrics), on_evaluation(self, "
    "trainer, step, metrics), on_end(self, trainer), and give an instance."
)


def checked(callbacks: Any) -> tuple[Any, ...]:
    """The callbacks as a tuple; UserError where one has not the form of `Callback`."""
    if not isinstance(callbacks, Sequence) or isinstance(callbacks, str):
        raise UserError(f"callbacks = {shown(callbacks)}: give a list of callbacks. {_FORM}")
    for i, one in enumerate(callbacks):
        where = f"callbacks[{i}]"
        if inspect.isclass(one):
            raise UserError(f"{where} is the class {one.__name__}: give an instance, {one.__name__}().")
        try:
            own = [name for name in dir(one) if name.startswith("on_") and callable(getattr(one, name))]
        except Exception as error:  # of a property of the user's
            raise as_user_error(error)(f"{where} ({type(one).__name__}) raised {told(error, type(one))}.") from error
        if not set(own) & set(_METHODS):
            raise UserError(f"{where} ({type(one).__name__}) has no method that is called. {_FORM}")
        for name in own:
            if name not in _METHODS:
                near = difflib.get_close_matches(name, _METHODS, n=1)
                hint = f"did you mean {near[0]}?" if near else f"called are {', '.join(_METHODS)}."
                raise UserError(f"{where}: {type(one).__name__}.{name} is never called; {hint}")
            try:
                inspect.signature(getattr(one, name)).bind(*range(1 + _METHODS[name]))
            except (TypeError, ValueError) as error:  # ValueError: of a builtin, whose parameters Python does not know
                named = f"{type(one).__name__}.{name}{defined_at(getattr(one, name))}"
                raise UserError(f"{where}: {named} cannot be called: {error}. {_FORM}") from error
    return tuple(callbacks)


def tell(callbacks: Sequence[Any], method: str, *arguments: Any) -> None:
    """Call `method` of all callbacks that have it. UserError, naming the user's line, where one raises or returns
    something."""
    for callback in callbacks:
        if (call := getattr(callback, method, None)) is None:
            continue
        name = f"Callback {type(callback).__name__}.{method}"
        try:
            answer = call(*arguments)
        except UserError:
            raise
        except (Exception, SystemExit, GeneratorExit) as error:  # a user's method may raise anything
            raise as_user_error(error)(f"{name} raised {told(error, call)}.") from error
        if answer is not None:
            raise UserError(
                f"{name}{defined_at(call)} returned {shown(answer)}, but a callback returns nothing. To end the "
                "run, call trainer.stop()."
            )
