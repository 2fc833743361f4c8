"""What the certificate's links share: traffic, the learner's forward, rows compared by their bits, operators under a
tap."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jetrl.errors import UserError
from jetrl.kernels.logprob.ops import log_softmax
from jetrl.model.transformer import Tap, Transformer
from jetrl.model.weights import published
from jetrl.types import Completion, ForwardBatch, VarlenPlan

_ROWS = 64  # rows of log-probs held at once
_HASHED = 1 << 24  # elements hashed at once
MIN_NEW_TOKENS = 4  # with which sequences are interrupted and drafts hold, whatever the other sizes
_BATCH = 49152  # tokens of a packed batch: its widest activation stays below 2**31 elements, as kernels index them


@dataclass(frozen=True, slots=True)
class LinkResult:
    """Outcome of one link. `first_difference` names sequence, position, layer and operator; None if all rows agree.

    Without `rows` nothing was tested, and `first_difference` says what has not happened. `max_abs_diff` None: rows were
    compared by hashes alone, and some differ.
    """

    link: str
    description: str
    rows: int
    rows_different: int
    max_abs_diff: float | None
    seconds: float
    first_difference: str | None = None

    @property
    def ok(self) -> bool:
        return self.tested and self.rows_different == 0

    @property
    def tested(self) -> bool:
        return self.rows > 0


def varlen(sequences: Sequence[Tensor]) -> ForwardBatch:
    """A training batch of whole sequences, packed in order."""
    lengths = tuple(len(s) for s in sequences)
    device = sequences[0].device
    positions = torch.cat([torch.arange(n) for n in lengths]).to(device)
    cu = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=device)
    return ForwardBatch(torch.cat(list(sequences)), positions, VarlenPlan(cu, lengths), "train")


def learners_forward(model: Transformer, batch: ForwardBatch) -> Tensor:
    """Hidden states [T, D] by the very functions that a backward pass would follow; nothing is kept for one."""
    before, model.activation_checkpointing = model.activation_checkpointing, True  # memory of one layer, not of all
    try:
        with torch.enable_grad():
            return model(batch).detach()
    finally:
        model.activation_checkpointing = before


class Packed:
    """The training forward of all sequences, in order, in batches of `_BATCH` tokens (a longer sequence is one alone).

    `hidden[i]` are the rows [len, D] of sequence i.
    """

    def __init__(self, model: Transformer, sequences: Sequence[Tensor]) -> None:
        self._model = model
        self._places: list[tuple[ForwardBatch, int]] = []  # of each sequence: its batch and its first row there
        self.hidden: list[Tensor] = []
        groups: list[list[Tensor]] = []
        total = 0
        for tokens in sequences:
            if not groups or total + len(tokens) > _BATCH:
                groups.append([])
                total = 0
            groups[-1].append(tokens)
            total += len(tokens)
        for group in groups:
            batch, lengths = varlen(group), [len(tokens) for tokens in group]
            self.hidden += learners_forward(model, batch).split(lengths)
            self._places += [(batch, int(start)) for start in np.cumsum([0, *lengths[:-1]])]

    def tapped(self, sequence: int, row: int) -> dict[str, Tensor]:
        """The sequence's batch once more under a tap: its row `row` in every operator's output."""
        batch, start = self._places[sequence]
        return tapped(partial(self._model, batch), start + row)


def row_hash(logprobs: Tensor) -> Tensor:
    """A 64-bit hash [R] of the bits of each row [R, V]: equal rows, equal hashes; -0.0 and 0.0 differ."""
    bits = logprobs.contiguous().view(torch.int32).to(torch.int64)
    return (bits * _odd(bits.shape[-1], bits.device)).sum(-1)


def _odd(count: int, device: torch.device) -> Tensor:
    index = torch.arange(count, dtype=torch.int64, device=device)
    return (index * -7046029254386353131 + 1442695040888963407) | 1


def row_bits(values: Tensor) -> Tensor:
    """A 64-bit hash [N] of the bits of each row of a tensor [N, ...] of any type, as `row_hash` makes it."""
    rows = values.detach().reshape(len(values), prod(values.shape[1:]))
    found = torch.empty(len(rows), dtype=torch.int64, device=rows.device)
    step = max(1, _HASHED // max(1, rows.shape[1]))
    odd: Tensor | None = None
    for start in range(0, len(rows), step):
        bits = rows[start : start + step].contiguous().view(torch.uint8)
        bits = (bits.view(torch.int32) if bits.shape[1] % 4 == 0 else bits).to(torch.int64)
        odd = _odd(bits.shape[1], bits.device) if odd is None else odd
        found[start : start + step] = (bits * odd).sum(-1)
    return found


def published_bits(model: Transformer) -> dict[str, Tensor]:
    """`row_bits` of every published tensor of a model, by its Hugging Face name, on the host."""
    found = {}
    for name, tensor in published(model).items():
        found[name] = row_bits(tensor.values).cpu()
        if tensor.scales is not None:
            found[f"{name} (scales)"] = row_bits(tensor.scales).cpu()
    return found


def fingerprint(model: Transformer) -> str:
    """16 hexadecimal digits of the published weights: equal weights have equal digits."""
    digest = hashlib.sha256()
    for name, rows in published_bits(model).items():
        digest.update(f"{name} {len(rows)}\n".encode())
        digest.update(rows.numpy().data)
    return digest.hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Workload:
    """Sizes of the certificate's test traffic."""

    num_sequences: int = 6
    max_prompt: int = 48
    new_tokens: int = 24
    chunk: int = 7
    page_size: int = 16
    seed: int = 0
    step_tokens: int = 0  # of a step in link c; 0: a chunk and a token for each sequence
    drafts: int = 3  # of a sequence in a step of link v


def check_sizes(work: Workload, positions: int | None = None) -> None:
    """UserError for traffic that is too small to test every link, or too long for a model with so many `positions`."""
    if positions is not None and work.new_tokens >= positions:
        raise UserError(
            f"{work.new_tokens} new tokens (--new-tokens) after a prompt of one are beyond the model's {positions} "
            f"positions. Give at most {positions - 1}."
        )
    if work.num_sequences < 2:
        raise UserError(
            f"{work.num_sequences} sequences (--sequences) cannot be certified: links a and s pack several together. "
            "Give at least 2."
        )
    if work.new_tokens < MIN_NEW_TOKENS:
        raise UserError(
            f"{work.new_tokens} new tokens (--new-tokens) cannot be certified: link c interrupts sequences while they "
            f"decode, and link v drafts tokens in the middle of an answer. Give at least {MIN_NEW_TOKENS}."
        )


def page_size_of(model: Transformer) -> int:
    """Tokens in a page as in runs on the model's device: decoding takes its kernel by the page size."""
    return page_size_on(model.head_weight.device)


def page_size_on(device: str | torch.device) -> int:
    """The same of a device."""
    return 128 if torch.device(device).type == "cuda" else 16


def random_sequences(model: Transformer, work: Workload) -> list[Tensor]:
    """Token sequences of ragged lengths, from 1 to `max_prompt + new_tokens`."""
    generator = torch.Generator().manual_seed(work.seed)
    longest = min(work.max_prompt + work.new_tokens, model.spec.max_position)
    lengths = np.geomspace(1, longest, work.num_sequences).round().astype(int).tolist()
    device = model.head_weight.device
    return [torch.randint(model.spec.vocab_size, (n,), generator=generator).to(device) for n in lengths]


def prompts_of(sequences: list[Tensor], work: Workload) -> list[list[int]]:
    """The beginnings that links c and d decode from: what is left of each sequence without the new tokens."""
    return [s[: max(1, min(work.max_prompt, len(s) - work.new_tokens))].tolist() for s in sequences]


class NoText:
    """A tokenizer for random tokens: no text, no end."""

    eos_token_id = None

    def decode(self, token_ids: list[int]) -> str:
        return ""


def whole_sequences(model: Transformer, prompts: list[list[int]], completions: list[Completion]) -> list[Tensor]:
    """Each prompt with its completion, on the model's device."""
    device = model.head_weight.device
    return [torch.tensor([*p, *c.tokens.tolist()], device=device) for p, c in zip(prompts, completions, strict=True)]


class Comparison:
    """Counts rows of a link and keeps the first difference."""

    def __init__(self, link: str, description: str) -> None:
        self.link, self.description = link, description.split(": ", 1)[1]
        self.total = self.different = 0
        self.worst, self.start = 0.0, time.perf_counter()
        self.first: str | None = None

    def rows(
        self, model: Transformer, sequence: int, positions: Sequence[int], a: Tensor, b: Tensor,
        hashes: list[int] | None = None,
    ) -> int | None:
        """Compare the log-probs of hidden rows a and b (or of a with `hashes`); the first differing row if it is the
        link's first difference, else None."""
        first_row = None
        for start in range(0, len(a), _ROWS):
            left = log_softmax(model.logits(a[start : start + _ROWS]))
            right = log_softmax(model.logits(b[start : start + _ROWS]))
            if hashes is None:
                unequal = row_hash(left) != row_hash(right)
            else:
                unequal = row_hash(left) != torch.tensor(hashes[start : start + _ROWS], device=left.device)
            self.total += len(left)
            if bool(unequal.any()):
                self.different += int(unequal.sum())
                self.worst = max(self.worst, float((left - right).abs().max()))
                if first_row is None:
                    first_row = start + int(unequal.nonzero()[0])
        if first_row is None or self.first is not None:
            return None
        self.first = f"sequence {sequence}, position {positions[first_row]}"
        return first_row

    def locate(self, sequence: int, position: int, left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
        """Name the first operator whose output differs between two tapped runs."""
        for name, value in left.items():
            other = right.get(name)
            if other is None or not torch.equal(value, other):
                gap = float("nan") if other is None else float((value.float() - other.float()).abs().max())
                self.first = f"sequence {sequence}, position {position}: first operator that differs is {name} " + (
                    f"(largest gap {gap:.3g})"
                )
                return
        self.first = f"sequence {sequence}, position {position}: all operators agree; the lm_head or log-prob differs"

    def result(self) -> LinkResult:
        seconds = time.perf_counter() - self.start
        return LinkResult(
            self.link, self.description, self.total, self.different, self.worst, seconds, self.first
        )


def tapped(run: Callable[[Tap], Any], row: int) -> dict[str, Tensor]:
    """Run with a tap that keeps row `row` of every operator's output, in order."""
    seen: dict[str, Tensor] = {}

    def tap(name: str, value: Tensor) -> None:
        seen[name] = value[row].detach().clone()

    run(tap)
    return seen
