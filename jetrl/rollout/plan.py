"""What the scheduler returns and what it remembers: the plan of a pass, sequences, shared prompts. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, slots=True)
class Plan:
    """One forward pass. Sequence b computes `counts[b]` tokens from position `starts[b]`; rows are packed in order.

    Each entry s of the `sample_*` columns draws one token for request `sample_requests[s]` at `sample_positions[s]`
    from the logits of packed row `sample_rows[s]`; several may share a row (samples of one prompt). The page copies
    (first column to second) come before the pass; all sources are read before any target is written.
    """

    starts: np.ndarray  # [B] int64
    counts: np.ndarray  # [B] int64, at least 1
    tokens: np.ndarray  # [T] int64
    positions: np.ndarray  # [T] int64
    block_table: np.ndarray  # [B, M] int32
    copies: np.ndarray  # [C, 2] int64
    sample_rows: np.ndarray  # [S] int64
    sample_requests: np.ndarray  # [S] int64, place of the request in the order of `add`
    sample_positions: np.ndarray  # [S] int64
    sample_slots: np.ndarray  # [S] int64, the scheduler's own


@dataclass(frozen=True, slots=True)
class Finished:
    """A finished request: what was drawn for it, and whether its last token stopped it."""

    request: int  # place in the order of `add`
    id: int
    tokens: np.ndarray  # [n] int64
    logprobs: np.ndarray  # [n] float32
    stopped: bool


@dataclass(slots=True, eq=False)
class Prefix:
    """The requests with one prompt. While a leader computes it the others wait; later they find it in `pages`."""

    tokens: tuple[int, ...]
    members: int = 0  # requests that have not finished
    waiting: int = 0
    leader: Tracked | None = None
    pages: list[int] | None = None  # one reference each, kept while members wait and dropped first when pages run out

    @property
    def length(self) -> int:
        return len(self.tokens)


@dataclass(slots=True, eq=False)
class Tracked:
    """A request that waits or runs. `tokens` (the prompt, and what was drawn before a preemption) and their log-probs
    (of the prompt: zeros) are current while it waits."""

    request: int
    id: int
    tokens: np.ndarray
    logprobs: np.ndarray
    max_length: int
    prefix: Prefix
    is_turn: bool = False  # of a conversation
    keeps: bool = False  # its pages stay when it ends
    slot: int = -1


@dataclass(slots=True)
class Step:
    """What one `schedule` call has decided so far."""

    budget: int  # tokens left
    slots: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    row: int = 0  # packed rows so far
    copies: list[tuple[int, int]] = field(default_factory=list)
    ready: dict[Prefix, tuple[int, int]] = field(default_factory=dict)  # -> (leader's slot, row of the last token)
    forks: list[tuple[int, int]] = field(default_factory=list)  # (slot, row to draw from)
    promised: int = 0  # pages that this step's forks will ask for
