"""The data of one optimizer update: trajectories packed into rows, in micro-batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from jetrl.kernels.logprob.truncation import KeptSets


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Packed trajectories of one forward/backward. Row t predicts `targets[t]`, the next token.

    `loss_mask[t]` is 1 where `targets[t]` is the policy's and its trajectory is in the loss. Floats that are not there
    are NaN: those of the other rows, advantages before they are made, and log-probs of what nobody sampled. The columns
    from `old_logprobs` on are filled by passes over the batch, where the algorithm asks for them.

    `versions` None: the weights of the batch's version drew all of them.

    Part i, rows `cu_seqlens[i]:cu_seqlens[i+1]`, is a whole trajectory where `stems` is empty or -1. Else it goes on
    from part `stems[i]`, which has all tokens of the prompt but the last, and no loss.
    """

    tokens: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    targets: Tensor  # [T] int64
    loss_mask: Tensor  # [T] float32, 0 or 1
    advantages: Tensor  # [T] float32
    rollout_logprobs: Tensor  # [T] float32
    sequence_ids: Tensor  # [T] int64, number of the trajectory within the whole PackedBatch; -1 in a stem
    cu_seqlens: Tensor  # [B+1] int32
    lengths: tuple[int, ...]
    stems: tuple[int, ...] = ()
    old_logprobs: Tensor | None = None  # [T] float32, of the policy before the step's first update
    ref_logprobs: Tensor | None = None  # [T] float32, of the reference policy
    values: Tensor | None = None  # [T] float32, the critic's before the step's first update
    returns: Tensor | None = None  # [T] float32, what the critic should have said
    versions: Tensor | None = None  # [T] int64, of the weights that drew each target in the loss; -1 in other rows
    teacher_tokens: Tensor | None = None  # [T, K] int64, the teacher's most probable ones; 0 in rows outside the loss
    teacher_logprobs: Tensor | None = None  # [T, K] float32, the teacher's, of those
    given: bool = False  # no policy sampled them: of the loss they have the KL to the teacher alone
    kept_sets: KeptSets | None = None  # of the rows in the loss, in order, if they were found before the update


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """The data of one optimizer update, as micro-batches of at most `max_tokens_per_gpu` tokens.

    A rank may hold only those that it computes: `numbers` says which of the update's `num_micro_batches` they are. All
    else is about the whole update. `num_sequences` counts all trajectories; `sequence_tokens` are the loss tokens of
    each, `num_masked_tokens` the policy's tokens of those outside the loss. `num_older_tokens` are those of the loss
    that weights from before `weight_version` drew. `prompts`: the place of each one's prompt in the task's stream;
    empty for the warm start.
    """

    micro_batches: tuple[MicroBatch, ...]
    numbers: tuple[int, ...]
    num_micro_batches: int
    num_sequences: int
    num_loss_tokens: int
    sequence_tokens: tuple[int, ...]
    flow_digest: str
    weight_version: int
    num_masked_tokens: int = 0
    num_older_tokens: int = 0
    prompts: tuple[int, ...] = ()
