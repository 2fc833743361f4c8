"""What the scheduler returns and what it remembers: the plan of a pass, sequences, shared prompts. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from jetrl.types import Request, SamplingParams, Spans


@dataclass(frozen=True, slots=True)
class Plan:
    """One forward pass. Sequence b computes `counts[b]` tokens from position `starts[b]`; rows are packed in order.

    Each entry s of the `sample_*` columns draws one token for the request in slot `sample_slots[s]` at
    `sample_positions[s]` from the logits of packed row `sample_rows[s]`; several may share a row (samples of one
    prompt). The page copies (first column to second) come before the pass; all sources are read before any target is
    written.
    """

    slots: np.ndarray  # [B] int64, where each sequence is held
    starts: np.ndarray  # [B] int64
    counts: np.ndarray  # [B] int64, at least 1
    tokens: np.ndarray  # [T] int64
    positions: np.ndarray  # [T] int64
    block_table: np.ndarray  # [B, M] int32
    copies: np.ndarray  # [C, 2] int64
    sample_rows: np.ndarray  # [S] int64
    sample_requests: np.ndarray  # [S] int64, place of the request in the order of `add`
    sample_positions: np.ndarray  # [S] int64
    sample_slots: np.ndarray  # [S] int64, the row of the request's sampling parameters and stop conditions
    # A decode plan with drafts: each step computes up to `depth` more tokens of a sequence, while their positions are
    # below `reach[b]`, for which it has pages.
    depth: int = 0
    reach: np.ndarray | None = None  # [B] int64
    # Where a layer keeps one state for a sequence: the row that each reads and the one that it writes (`engine.rows`).
    # Later steps of a burst read what the one before wrote.
    row_reads: np.ndarray | None = None  # [B] int64
    row_writes: np.ndarray | None = None

    @property
    def is_decode(self) -> bool:
        """Whether every sequence computes one token and draws from it. A row from which another draws is that of a
        prompt: its sequence was interrupted, and computes its prompt again for all who wait."""
        return bool((self.counts == 1).all()) and np.array_equal(self.sample_slots, self.slots)


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a burst drew: `counts[s]` tokens for sample s, the first of its column; what follows has no meaning."""

    tokens: np.ndarray  # [N, S] int64
    logprobs: np.ndarray  # [N, S] float32
    counts: np.ndarray  # [S] int64

    @classmethod
    def full(cls, tokens: np.ndarray, logprobs: np.ndarray) -> Drawn:
        """One token of every step for every sample."""
        return cls(tokens, logprobs, np.full(tokens.shape[1], len(tokens), dtype=np.int64))

    def meant(self) -> np.ndarray:
        """True [N, S] where a token has a meaning."""
        return np.asarray(np.arange(len(self.tokens))[:, None] < self.counts)


@dataclass(frozen=True, slots=True)
class Finished:
    """A finished request: what was drawn for it, and whether its last token stopped it."""

    request: int  # place in the order of `add`
    id: int
    sampling: SamplingParams
    tokens: np.ndarray  # [n] int32, read-only
    logprobs: np.ndarray  # [n] float32, read-only
    stopped: bool
    prompt: int  # tokens before the first that was drawn
    before: Spans = ()  # of what it had drawn when it was resumed
    num_before: int = 0


@dataclass(frozen=True, slots=True)
class Committed:
    """What a step added: of sample s the first `counts[s]` of its drawn tokens, and the requests that ended with it."""

    counts: np.ndarray  # [S] int64
    finished: list[Finished]


@dataclass(frozen=True, slots=True)
class NewTokens:
    """What a step added to one answer, which had `start` tokens before."""

    request_id: int
    start: int
    tokens: np.ndarray  # [n] int32
    logprobs: np.ndarray  # [n] float32


@dataclass(slots=True, eq=False)
class Prefix:
    """The requests with one prompt. While a leader computes it the others wait; later they find it in `pages`."""

    tokens: tuple[int, ...]
    members: int = 0  # requests that have not finished
    waiting: int = 0
    leader: Tracked | None = None
    pages: list[int] | None = None  # one reference each, kept while members wait and dropped first when pages run out
    digests: list[bytes] | None = None  # of its full pages (`pages.Beginnings`), once somebody has asked
    row: int = 0  # with one reference: the state of all tokens but the last, where layers keep one for a sequence

    @property
    def length(self) -> int:
        return len(self.tokens)


@dataclass(slots=True, eq=False)
class Tracked:
    """A request that waits or runs. `tokens` int32 (the prompt, and what was drawn before a preemption) and their
    log-probs (of the prompt: zeros) are current while it waits."""

    request: int
    id: int
    sampling: SamplingParams
    tokens: np.ndarray
    logprobs: np.ndarray
    max_length: int
    prefix: Prefix
    is_turn: bool = False  # of a conversation
    keeps: bool = False  # its pages stay when it ends
    digests: list[bytes] | None = None  # of its full pages, those of the prompt and further ones
    slot: int = -1
    max_conversation: int | None = None
    before: Spans = ()  # which weights drew what it had when it was resumed
    num_before: int = 0  # how many tokens that were

    def asked(self) -> Request:
        """The request."""
        return Request(self.id, self.prefix.tokens, self.sampling, self.max_conversation)


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
    forked: list[tuple[int, int]] = field(default_factory=list)  # (slot, the leader's)
    promised: int = 0  # pages that this step's forks will ask for
