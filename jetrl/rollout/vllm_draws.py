"""The random numbers of vLLM's draws: a seed for each request, or one stream for all of them (D95)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from jetrl.types import SamplingParams


def draw_seed(params: SamplingParams, request_id: int, position: int) -> int:
    """The 63-bit seed of a request whose first new token is at `position`: turns of a conversation differ."""
    named = f"{params.seed} {request_id} {position}".encode()
    return int.from_bytes(hashlib.blake2b(named, digest_size=8).digest()) >> 1


class Stream:
    """One stream of random numbers on `device` ("cpu" or "cuda") for code that draws from the process's generator.

    What the process draws elsewhere does not move it, and it does not move what the process draws.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.seed(0)

    def seed(self, seed: int) -> None:
        """Begin again, with a seed of up to 63 bits."""
        self._state = torch.Generator(self.device).manual_seed(seed).get_state()

    @contextmanager
    def used(self) -> Iterator[None]:
        """Draws inside come from this stream."""
        process = self._of_process()
        kept = process.get_state()
        process.set_state(self._state)
        try:
            yield
        finally:
            self._state = process.get_state()
            process.set_state(kept)

    def _of_process(self) -> torch.Generator:
        if self.device == "cpu":
            return torch.default_generator
        return torch.cuda.default_generators[torch.cuda.current_device()]
