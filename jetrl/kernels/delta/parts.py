"""What the ops of Gated DeltaNet share: sizes, the sequences of a pass, and what these keep between two passes."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from jetrl.types import StateRows

CHUNK, BLOCK = 64, 16  # the state moves once in a chunk, at absolute positions; blocks of rows within it


KERNEL_SIZES, KERNEL_WIDTH = (16, 32, 64, 128), 5  # heads and the widest convolution that a GPU's kernels have


class HeadSizes(NamedTuple):
    """`key_heads` of `key_dim` (queries and keys) and `value_heads` of `value_dim`; a key head serves consecutive value
    heads."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    @property
    def columns(self) -> tuple[int, int, int]:
        """Of queries, keys and values side by side."""
        keys = self.key_heads * self.key_dim
        return keys, keys, self.value_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class Parts:
    """The sequences of a pass: rows `cu_seqlens[i]:cu_seqlens[i+1]` are the next tokens of sequence i, which has
    `before[i]` tokens already (None: none has any). `rows` says where their states lie (None: nothing is kept)."""

    cu_seqlens: Tensor  # [B+1] int32
    lengths: tuple[int, ...]
    before: Tensor | None = None  # [B] int32
    rows: StateRows | None = None
    made: dict[str, Any] = field(default_factory=dict, compare=False)  # of the lengths by kernels, for all layers

    @property
    def single(self) -> bool:
        """Whether each sequence has one token in this pass, and leaves a state."""
        return self.before is not None and self.rows is not None and self.lengths == (1,) * len(self.lengths)

    def owners(self) -> Tensor:
        """The sequence of each row [T] int64."""
        if "owners" not in self.made:
            places = torch.arange(sum(self.lengths), dtype=torch.int32, device=self.cu_seqlens.device)
            self.made["owners"] = torch.searchsorted(self.cu_seqlens[1:].contiguous(), places, right=True)
        return self.made["owners"]  # type: ignore[no-any-return]

    def chunks(self) -> tuple[Tensor, Tensor, Tensor, int]:
        """The first chunk of each sequence [B + 1]; of each chunk the first token and the number of tokens [C]; C."""
        if "chunks" not in self.made:
            cu, total = self.cu_seqlens, sum(-(-n // CHUNK) for n in self.lengths)
            counts = (cu.diff() + (CHUNK - 1)) // CHUNK
            base = F.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
            chunk = torch.arange(total, dtype=torch.int32, device=cu.device)
            sequence = torch.searchsorted(base[1:].contiguous(), chunk, right=True)
            start = cu[sequence] + (chunk - base[sequence]) * CHUNK
            self.made["chunks"] = base, start, (cu[sequence + 1] - start).clamp_max(CHUNK), total
        return self.made["chunks"]  # type: ignore[no-any-return]

    def starts(self) -> list[int]:
        """The first row of each."""
        return [0, *accumulate(self.lengths)][:-1]


class DeltaState(NamedTuple):
    """What sequences keep of the delta rule in one layer, by row of the pool; of `BLOCK` rows only the running block.

    `state` is S at the start of the running chunk; on a GPU it is two planes of 16 bits (`triton.py`). `keys`,
    `updates` (d) and `sums` (G) are the chunk's rows so far, `errors` (X) and `inverse` (T) those of the running block:
    with them no earlier row is computed again.
    """

    state: Tensor  # [rows, Hv, dk, dv] FP32
    keys: Tensor  # [rows, Hk, 64, dk]
    updates: Tensor  # [rows, Hv, 64, dv]
    sums: Tensor  # [rows, Hv, 64] FP32
    errors: Tensor  # [rows, Hv, 16, dv]
    inverse: Tensor  # [rows, Hv, 16, 16] FP32


def empty_state(rows: int, sizes: HeadSizes, dtype: torch.dtype, device: torch.device | str = "cpu") -> DeltaState:
    """Zeros: what sequences that begin have."""
    shapes = state_shapes(sizes)
    return DeltaState(*(
        torch.zeros((rows, *shape), dtype=torch.float32 if wide else dtype, device=device) for shape, wide in shapes
    ))


def state_shapes(sizes: HeadSizes) -> tuple[tuple[tuple[int, ...], bool], ...]:
    """Of each tensor of a `DeltaState`: its shape for one sequence, and whether it is FP32 in every model."""
    hk, hv, dk, dv = sizes
    return (
        ((hv, dk, dv), True), ((hk, CHUNK, dk), False), ((hv, CHUNK, dv), False), ((hv, CHUNK), True),
        ((hv, BLOCK, dv), False), ((hv, BLOCK, BLOCK), True),
    )
