"""The state of a decode step on the device, and its advance from one token to the next without the host; what
sequences share.

Legend: `B` rows, `M` pages per sequence, `S` steps that the record has room for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from jetrl.kernels.dispatch import backend_of


@dataclass(frozen=True, slots=True)
class DecodeState:
    """One row per sequence; a row whose slot is -1 is padding and stays so."""

    integers: Tensor  # [5, B] int64: tokens, positions, slots, stream keys, positions of the new tokens
    table: Tensor  # [B, M] int32, pages
    kv_lengths: Tensor  # [B] int32
    drawn: Tensor  # [3, S, B] int64: tokens; log-probs and maxima as the bits of float64
    count: Tensor  # [1] int32, steps made
    page_size: int

    @classmethod
    def empty(cls, size: int, width: int, steps: int, page_size: int, device: torch.device) -> DecodeState:
        """Padding rows only."""
        integers = torch.zeros(5, size, dtype=torch.int64, device=device)
        integers[2] = -1
        return cls(
            integers, torch.zeros(size, width, dtype=torch.int32, device=device),
            torch.ones(size, dtype=torch.int32, device=device),
            torch.zeros(3, steps, size, dtype=torch.int64, device=device),
            torch.zeros(1, dtype=torch.int32, device=device), page_size,
        )


@dataclass(frozen=True, slots=True)
class SharedPages:
    """Decoding sequences whose first pages are the same, so that one reading serves them all (`engine.sharing`).

    Only a hint: attention without it has the same bits. A chunk's `members` have its first `tiles` tiles of 128 keys in
    common; chunks without tiles are padding. All of these keys are there already: each member's own tiles hold at least
    the new one.
    """

    first: Tensor  # [B] int32, the first tiles of each sequence that its chunk reads; 0: none
    members: Tensor  # [C, S'] int32, -1 behind the last
    tiles: Tensor  # [C] int32


def advance(state: DecodeState, tokens: Tensor, logprobs: Tensor, maxima: Tensor) -> None:
    """Record the draw [B] of a step and make its tokens the inputs of the next, in place.

    `tokens` become the inputs, positions and key lengths grow by one, slots come from the page table. `count` grows by
    one, modulo the size of the record.
    """
    backend_of(tokens).advance(state, tokens, logprobs, maxima)
