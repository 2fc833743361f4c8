"""A computation under taps: the digest of all that every op returns, in order, and of the one tensor that is wanted.

`Trace` is a `Digests` that keeps the order. While `tapped` lasts, the ops of the kernels' backend are called through
it, forward and backward, those of the optimizer and of the sampler too; nothing that they compute changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

from torch import Tensor

from jetrl.kernels.dispatch import backend_of, served_by
from jetrl.kernels.update.digest import digest_of
from jetrl.model.transformer import Transformer
from jetrl.train.digests import Digests, Named


class Trace(Digests):
    """Names and digests in the order in which they were computed. Repeated names get a number: `rms_norm`,
    `rms_norm #2`. `kept` is a copy of the tensor that was called `wanted`."""

    def __init__(self, wanted: str | None = None) -> None:
        super().__init__()
        self.wanted = wanted
        self.kept: Tensor | None = None
        self.where = ""  # the layer whose forward pass is on
        self._rows: list[tuple[str, Tensor]] = []
        self._times: Counter[str] = Counter()

    def add_all(self, named: Sequence[Named]) -> None:
        for one in named:
            whole = "/".join((*self._within, one.name))
            self._times[whole] += 1
            whole += f" #{self._times[whole]}" if self._times[whole] > 1 else ""
            self._rows.append((whole, digest_of(one.value, one.start)))
            if whole == self.wanted:
                self.kept = one.value.detach().cpu().clone()

    def rows(self) -> list[tuple[str, int]]:
        """All of them as numbers."""
        return [(name, int(value)) for name, value in self._rows]

    def called(self, op: str, result: Any, given: tuple[Any, ...]) -> None:
        """What an op returned; of one that writes in place and returns nothing, what it was given."""
        found = [*_tensors(result)] or [*_tensors(given)]
        place = f"{self.where}op {op}"
        for number, value in enumerate(found):
            self.add(place if len(found) == 1 else f"{place}, output {number}", value)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if not value.is_meta:
            yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name))


class _Tapped:
    """A backend whose ops are seen."""

    def __init__(self, backend: Any, trace: Trace) -> None:
        self._backend, self._trace = backend, trace

    def __getattr__(self, op: str) -> Any:
        found = getattr(self._backend, op)
        return partial(self._call, op, found) if callable(found) else found

    def _call(self, op: str, function: Callable[..., Any], *given: Any, **named: Any) -> Any:
        result = function(*given, **named)
        self._trace.called(op, result, (*given, *named.values()))
        return result


@contextmanager
def tapped(model: Transformer, trace: Trace) -> Iterator[None]:
    """While the context lasts, every op on the model's device is in the trace."""
    like = model.head_weight
    with ExitStack() as stack:
        stack.enter_context(served_by(like.device, _Tapped(backend_of(like), trace)))
        for number, layer in enumerate(model.layers):
            for way in ("forward", "infer"):
                stack.enter_context(_told(layer, way, f"layer {number}, ", trace))
        yield


@contextmanager
def _told(layer: Any, way: str, where: str, trace: Trace) -> Iterator[None]:
    """While the context lasts, the trace knows when this method of a layer runs."""
    method = getattr(layer, way)

    def told(*given: Any, **named: Any) -> Any:
        before, trace.where = trace.where, where
        try:
            return method(*given, **named)
        finally:
            trace.where = before

    object.__setattr__(layer, way, told)
    try:
        yield
    finally:
        object.__delattr__(layer, way)
