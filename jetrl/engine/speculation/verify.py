"""A decode step with drafts: propose tokens, compute all their positions at once, draw at each, keep what agrees.

A drawn token is a function of logits, seed, request id and position. So each position draws with its own randomness;
where draw and draft agree, the next position has computed what it would have computed alone, and its draw is the
token that comes next. The first draw that differs from its draft is itself the next token. Tokens and log-probs are
those of steps without drafts, bit for bit, whatever the drafts are. (Leviathan et al., arXiv 2211.17192, keep the
distribution; this keeps the tokens.)

`propose` and `settle` never wait for the device, and their shapes do not depend on values: a CUDA graph holds both
with the forward pass in between (`graphs/drafts.py`); on a CPU they run one after another (`burst`).

Legend: `B` rows, one for each sequence; `J` = depth + 1 positions each; `M` pages; `S` steps in the record.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from jetrl.engine.plan import Drawn, Plan
from jetrl.engine.sampler import SamplingTable
from jetrl.engine.speculation.drafts import DraftIndex


@dataclass(frozen=True, slots=True)
class DraftState:
    """Sequences between two steps. A row with `reach` 0 is padding: it writes no key and draws nothing."""

    columns: Tensor  # [5, B] int64: last token, its position, reach, stream key, row of the index
    table: Tensor  # [B, M] int32, pages; reads may go `depth` positions beyond what a sequence holds
    record: Tensor  # [S, 3 * J + 3, B] int64: tokens, log-probs, maxima (bits of float64), drawn, drafted, source
    count: Tensor  # [1] int64, steps made
    page_size: int
    grid: int = 0  # where states of sequences can go back to (`PerSequence.grid`); 0: there are none

    @classmethod
    def empty(
        cls, size: int, width: int, depth: int, steps: int, page_size: int, index: DraftIndex, grid: int = 0
    ) -> DraftState:
        """Padding rows only."""
        device = index.device
        columns = torch.zeros(5, size, dtype=torch.int64, device=device)
        columns[4] = index.rows
        return cls(
            columns, torch.zeros(size, width, dtype=torch.int32, device=device),
            torch.zeros(steps, 3 * (depth + 1) + 3, size, dtype=torch.int64, device=device),
            torch.zeros(1, dtype=torch.int64, device=device), page_size, grid,
        )


def host_columns(plan: Plan, keys: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """`DraftState.columns` of a plan with drafts; `rows` of the index."""
    assert plan.reach is not None
    return np.stack((plan.tokens, plan.positions, plan.reach, keys.view(np.int64), rows))


@dataclass(frozen=True, slots=True)
class Proposal:
    """The rows of one step."""

    tokens: Tensor  # [B, J] int64, the last token and its drafts
    positions: Tensor  # [B, J] int64
    slots: Tensor  # [B, J] int64, of the cache; -1 where nothing is to be written
    drafted: Tensor  # [B] int64: of the J - 1 drafts, so many are compared; -1: the sequence has no place left
    source: Tensor  # [B] int64, text that the drafts are from

    @property
    def kv_lengths(self) -> Tensor:
        """Keys of each sequence, those of all drafts included [B] int32."""
        return (self.positions[:, -1] + 1).to(torch.int32)


def propose(state: DraftState, index: DraftIndex, depth: int) -> Proposal:
    """Drafts for every sequence, and where their keys go."""
    last, position, reach, _, rows = state.columns
    drafts, counts, source = index.draft(rows, depth)
    drafted = torch.minimum(counts, reach - position - 1)
    if state.grid:  # a state that has seen all of them must serve the sequence's token alone: no draft ends a block
        drafted = torch.minimum(drafted, state.grid - 1 - (position + 1) % state.grid)
    ahead = torch.arange(depth + 1, device=last.device)
    positions = position[:, None] + ahead
    page = (positions // state.page_size).clamp_max(state.table.shape[1] - 1)
    slots = state.table.gather(1, page).to(torch.int64) * state.page_size + positions % state.page_size
    slots = torch.where(ahead <= drafted[:, None], slots, -1)
    return Proposal(torch.cat((last[:, None], drafts), 1), positions, slots, drafted, source)


def settle(
    state: DraftState, index: DraftIndex, step: Proposal, tokens: Tensor, logprobs: Tensor, maxima: Tensor
) -> None:
    """Record what was drawn at every position, [B, J] each, and go on from the first draw that differs, in place."""
    ahead = torch.arange(tokens.shape[1], device=tokens.device)
    agree = (tokens[:, :-1] == step.tokens[:, 1:]) & (ahead[:-1] < step.drafted[:, None])
    accepted = agree.to(torch.int64).cumprod(1).sum(1)
    drawn = torch.where(step.drafted >= 0, accepted + 1, 0)
    maxima = torch.where(ahead < drawn[:, None], maxima, 0.0)  # others are of nothing
    bits = (x.to(torch.float64).view(torch.int64).T for x in (logprobs, maxima))
    row = torch.cat((tokens.T, *bits, torch.stack((drawn, step.drafted, step.source))))
    state.record.index_copy_(0, state.count, row[None])
    state.count.add_(1).remainder_(state.record.shape[0])
    last, position, _, _, rows = state.columns
    index.write(rows, position + 1, tokens, drawn)
    newest = tokens.gather(1, accepted[:, None])[:, 0]
    last.copy_(torch.where(drawn > 0, newest, last))
    position.add_(drawn)


@dataclass(frozen=True, slots=True)
class Burst:
    """Steps with drafts as the host sees them."""

    drawn: Drawn
    maxima: np.ndarray  # largest logit of each position that drew, else 0
    drafted: np.ndarray  # [steps, B], what was compared; -1 where a sequence was full
    accepted: np.ndarray  # [steps, B]
    source: np.ndarray  # [steps, B], text

    @classmethod
    def read(cls, record: np.ndarray) -> Burst:
        """The burst of a record [steps, 3 * J + 3, B]: what was drawn, left-packed for each sequence."""
        steps, height, batch = record.shape
        j = height // 3 - 1
        taken, drafted, source = record[:, 3 * j], record[:, 3 * j + 1], record[:, 3 * j + 2]
        real = (np.arange(j)[:, None] < taken[:, None]).reshape(steps * j, batch)
        values = record[:, : 3 * j].reshape(steps, 3, j, batch).swapaxes(0, 1).reshape(3, steps * j, batch)
        counts = real.sum(0)
        tokens = np.zeros((int(counts.max(initial=0)), batch), dtype=np.int64)
        logprobs = np.zeros(tokens.shape, dtype=np.float32)
        place, column = (real.cumsum(0) - 1)[real], np.nonzero(real)[1]
        tokens[place, column] = values[0][real]
        logprobs[place, column] = values[1].view(np.float64)[real]
        maxima = values[2].view(np.float64)
        return cls(Drawn(tokens, logprobs, counts), maxima, drafted, np.maximum(taken - 1, 0), source)


Compute = Callable[[Proposal, Tensor], tuple[Tensor, Tensor]]  # rows that count -> their tokens and log-probs


def burst(
    plan: Plan, table: SamplingTable, index: DraftIndex, rows: np.ndarray, steps: int, page_size: int, compute: Compute,
    grid: int = 0,
) -> Burst:
    """`steps` steps without a graph. `compute` gives what is drawn at the positions [B, J] that count, in their order.

    `table` has the sampling parameters of the plan's sequences; `grid` as in `DraftState`.
    """
    depth, batch = plan.depth, len(plan.tokens)
    width = -(-(int(plan.positions.max()) + steps * (depth + 1)) // page_size) + 1
    state = DraftState.empty(batch, width, depth, steps, page_size, index, grid)
    state.columns.copy_(torch.from_numpy(host_columns(plan, table.key, rows)))
    state.table[:, : plan.block_table.shape[1]] = torch.from_numpy(plan.block_table)
    ahead = torch.arange(depth + 1, device=index.device)
    made = 0
    while made < steps:
        step = propose(state, index, depth)
        real = ahead <= step.drafted[:, None]
        if not bool(real.any()):  # all are full
            break
        drawn = torch.zeros_like(step.tokens)
        logprobs = torch.zeros(drawn.shape, dtype=torch.float32, device=index.device)
        drawn[real], logprobs[real] = compute(step, real)
        settle(state, index, step, drawn, logprobs, torch.zeros_like(logprobs))
        made += 1
    return Burst.read(state.record[:made].cpu().numpy())
