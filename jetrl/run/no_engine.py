"""The engine of a run that samples nothing (`method = "sft"`)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from jetrl.types import Completion, Engine, Request, StepReport, WeightSet


class NoEngine(Engine):
    """Takes weights and requests nothing: it holds no memory, and nobody may add a request."""

    keeps_bits = True

    @property
    def has_work(self) -> bool:
        return False

    def load(self, weights: WeightSet) -> None:
        """Nobody samples with them."""

    def add(self, requests: Sequence[Request]) -> None:
        """A mistake in jetrl."""
        raise AssertionError('method = "sft" samples nothing')

    def step(self) -> StepReport:
        """A mistake in jetrl."""
        raise AssertionError('method = "sft" samples nothing')

    def collect(self) -> list[Completion]:
        """Nothing has finished."""
        return []

    def forget(self, ids: Collection[int]) -> None:
        """Nothing is kept."""

    def release(self) -> None:
        """There is no memory to give back."""
