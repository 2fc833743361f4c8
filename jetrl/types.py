"""The values that cross the borders between rooms. Frozen, and without torch at run time.

Shape letters: T packed tokens, B sequences, P prompt tokens, C completion tokens, M blocks of a sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

Side = Literal["train", "rollout"]
FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Problem:
    """One item of a task: what is asked, the gold answer, and (for `jetrl sft`) a worked solution."""

    id: str
    prompt: str | tuple[Mapping[str, str], ...]  # plain text, or chat messages with role and content
    answer: str
    solution: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)  # further columns; given to reward functions


@dataclass(frozen=True, slots=True)
class Prompt:
    """A problem as token ids. `index` is its place in the task's endless training stream (or in the held-out set)."""

    index: int
    problem: Problem
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is decoded. `temperature=0` is greedy. Filters off: `top_p=1, top_k=0, min_p=0`."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate. `id` with `sampling.seed` names its random stream: equal ids give equal tokens."""

    id: int
    tokens: tuple[int, ...]
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class Completion:
    """What the engine returns for one request.

    `logprobs[i]` is the full-distribution log-probability of `tokens[i]` at the sampling temperature (FP32), also when
    top-p, top-k or min-p truncated the draw. A stop token that ended the sequence is the last entry of `tokens`.
    """

    request_id: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    finish_reason: FinishReason
    weight_version: int
    flow_digest: str


@dataclass(frozen=True, slots=True)
class Group:
    """The completions of one prompt, with a reward and an advantage each once these stages have run."""

    prompt: Prompt
    completions: tuple[Completion, ...]
    rewards: tuple[float, ...] = ()
    advantages: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's pages of the KV cache.

    `keys`, `values` [pages, page, G, H]: BF16, or E4M3 codes with `scales` [pages, G, page, 2] in BF16, the powers of
    two of a token's key head and value head. In that order a decode kernel reads both scales of a key as one 32-bit
    word, and those of a page's keys side by side.
    """

    keys: Tensor
    values: Tensor
    scales: Tensor | None = None


@dataclass(frozen=True, slots=True)
class VarlenPlan:
    """Attention over packed whole sequences: token rows `cu_seqlens[i]:cu_seqlens[i+1]` are sequence i, causal."""

    cu_seqlens: Tensor  # [B+1] int32
    lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PagedPlan:
    """Attention of new tokens over a paged cache; decode is the case of one query a sequence.

    Sequence i owns query rows `cu_seqlens[i]:cu_seqlens[i+1]`, which are its last positions; after the write it has
    `kv_lengths[i]` keys, found at `block_table[i]`. Row t writes its key and value to cache slot
    `slots[t] = page * page_size + offset`; a slot of -1 is a padding row and writes nothing.

    `kv_pages[i]` is at least the number of pages that hold keys of sequence i: `ceil(kv_lengths[i] / page_size)`, or
    where only the device knows the lengths, the width of the table. It bounds what a backend takes to dequantize the
    pages of an FP8 cache, without waiting for the device.
    """

    cache: Any  # rollout.runner.KVCache
    cu_seqlens: Tensor  # [B+1] int32
    query_lengths: tuple[int, ...]
    kv_lengths: Tensor  # [B] int32
    max_kv_length: int
    kv_pages: tuple[int, ...]
    block_table: Tensor  # [B, M] int32
    slots: Tensor  # [T] int64


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The only input of `Transformer.forward`; trainer and engine differ in the plan alone."""

    tokens: Tensor  # [T] int64
    positions: Tensor  # [T] int64, 0-based within the sequence
    plan: VarlenPlan | PagedPlan
    side: Side  # whose precision flow applies


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Packed sequences (prompt + completion) of one forward/backward. Row t predicts `targets[t]`, the next token.

    `loss_mask[t]` is 1 where `targets[t]` is a completion token; the other rows carry zeros.
    """

    tokens: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    targets: Tensor  # [T] int64
    loss_mask: Tensor  # [T] float32, 0 or 1
    advantages: Tensor  # [T] float32
    rollout_logprobs: Tensor  # [T] float32
    sequence_ids: Tensor  # [T] int64, number of the sequence within the whole PackedBatch
    cu_seqlens: Tensor  # [B+1] int32
    lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """All the data of one optimizer update, as micro-batches of at most `max_tokens_per_gpu` tokens."""

    micro_batches: tuple[MicroBatch, ...]
    num_sequences: int
    num_loss_tokens: int
    flow_digest: str
    weight_version: int


@dataclass(frozen=True, slots=True)
class WeightSet:
    """What publishing gives the engine: the version and flow; in one process the tensors are the model's own."""

    version: int
    flow_digest: str
    checksum: str
