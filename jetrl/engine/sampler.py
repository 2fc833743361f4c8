"""Drawing tokens. A row's token is a pure function of its logits, its sampling parameters, and (seed, id, position).

The draw inverts the cumulative distribution in integers: softmax numerators are integers
(`kernels.reference.exp_weights`), their sums are exact in float64 in any order, and the uniform number has 53 bits; so
the token does not depend on what else is in the batch, on the thread count, or on how a library scans.

    u = hash(seed, id, position) in [0, 2**53);   token = first v with  w_0 + ... + w_v > floor(u * total / 2**53)

Top-k, top-p and min-p (in this order) set the weights of the tokens that they cut to zero
(`kernels.logprob.truncation`). The recorded log-prob is by the function that the learner uses, of the distribution that
`SamplingParams.logprobs` names.

Shape letters: B rows that draw a token, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from jetrl.errors import UserError
from jetrl.kernels.logprob.ops import draw, exp_weights, scaled
from jetrl.kernels.logprob.truncation import MAX_ELEMENTS, Filters, kept
from jetrl.kernels.reference import logprob
from jetrl.types import SamplingParams

UNIFORM_BITS = 53
_LOW = (1 << 27) - 1


def check_params(params: SamplingParams) -> None:
    """Refuse sampling parameters that make no sense."""
    rules = (
        (params.max_tokens >= 1, "max_tokens", params.max_tokens, "at least 1"),
        (0.0 <= params.temperature < float("inf"), "temperature", params.temperature, "0 (greedy) or more"),
        (0.0 < params.top_p <= 1.0, "top_p", params.top_p, "in (0, 1]; 1 is off"),
        (params.top_k >= 0, "top_k", params.top_k, "0 (off) or more"),
        (0.0 <= params.min_p <= 1.0, "min_p", params.min_p, "in [0, 1]; 0 is off"),
        (all(params.stop), "stop", params.stop, "without empty strings"),
    )
    for holds, name, value, allowed in rules:
        if not holds:
            raise UserError(f"sampling: {name} = {value!r}; it must be {allowed}.")


@dataclass(frozen=True, slots=True)
class SamplingTable:
    """The parameters of B requests as columns, so that a step picks its rows with one index. The engine's table has a
    row for each slot of running sequences."""

    temperature: np.ndarray  # [B] float32
    top_p: np.ndarray  # [B] float64
    top_k: np.ndarray  # [B] int64
    min_p: np.ndarray  # [B] float64
    sampled: np.ndarray  # [B] bool: log-probs are of the truncated distribution
    key: np.ndarray  # [B] uint64, hash of seed and request id

    @classmethod
    def build(cls, params: Sequence[SamplingParams], ids: Sequence[int]) -> SamplingTable:
        seeds = np.array([p.seed & 0xFFFFFFFFFFFFFFFF for p in params], dtype=np.uint64)
        names = np.array([i & 0xFFFFFFFFFFFFFFFF for i in ids], dtype=np.uint64)
        return cls(
            temperature=np.array([p.temperature for p in params], dtype=np.float32),
            top_p=np.array([p.top_p for p in params], dtype=np.float64),
            top_k=np.array([p.top_k for p in params], dtype=np.int64),
            min_p=np.array([p.min_p for p in params], dtype=np.float64),
            sampled=np.array([p.logprobs == "sampled" for p in params], dtype=bool),
            key=_mix(_mix(seeds) + names),
        )

    @classmethod
    def for_slots(cls, count: int) -> SamplingTable:
        """`count` rows that mean nothing until `put` fills them."""
        return cls.build([SamplingParams(1)] * count, [0] * count)

    def put(self, rows: Sequence[int], params: Sequence[SamplingParams], ids: Sequence[int]) -> None:
        """Write the parameters of requests into `rows`, in place."""
        new = SamplingTable.build(params, ids)
        for name in self.__slots__:
            getattr(self, name)[list(rows)] = getattr(new, name)

    def take(self, rows: np.ndarray) -> SamplingTable:
        return SamplingTable(*(getattr(self, name)[rows] for name in self.__slots__))


def _mix(x: np.ndarray) -> np.ndarray:
    """One step of SplitMix64 (Steele, Lea, Flood 2014) on uint64, a bijection that scatters neighbouring inputs."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniforms(key: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """53-bit integers [B] int64 for the draws at `positions` [B] of the streams `key` [B]."""
    bits = _mix(_mix(key + positions.astype(np.uint64)))
    return (bits >> np.uint64(64 - UNIFORM_BITS)).astype(np.int64)


def sample(
    logits: Tensor, params: Sequence[SamplingParams], ids: Sequence[int], positions: Sequence[int] | np.ndarray
) -> tuple[Tensor, Tensor]:
    """`sample_rows` from parameters, request id and position of the new token, for each row of `logits` [B, V]."""
    for p in params:
        check_params(p)
    return sample_rows(logits, SamplingTable.build(params, ids), np.asarray(positions))


def sample_rows(logits: Tensor, table: SamplingTable, positions: np.ndarray) -> tuple[Tensor, Tensor]:
    """Draw one token per row. `logits` [B, V] FP32 -> tokens [B] int64, log-probs [B] FP32 (on `logits`' device).

    The log-prob is that of the full distribution at the temperature or, where the table says `sampled`, of what the
    filters leave of it; for greedy rows (temperature 0) that of the full one at temperature 1.
    Raises FloatingPointError if a row's largest logit is not a finite number.
    """
    b, v = logits.shape
    chunk = max(1, MAX_ELEMENTS // v)
    if b <= chunk:
        return _sample_chunk(logits, table, positions)
    parts = [
        _sample_chunk(logits[i : i + chunk], table.take(np.arange(i, min(i + chunk, b))), positions[i : i + chunk])
        for i in range(0, b, chunk)
    ]
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


def _sample_chunk(logits: Tensor, table: SamplingTable, positions: np.ndarray) -> tuple[Tensor, Tensor]:
    device = logits.device
    if device.type == "cuda" and not is_cut(table, logits.shape[1]).any():
        columns = (table.temperature, table.key.view(np.int64), positions.astype(np.int64))
        tokens, logprobs, top = draw(logits, *(torch.from_numpy(c).to(device) for c in columns))
        check_finite(top)
        return tokens, logprobs
    greedy = table.temperature == 0.0
    temperature = torch.from_numpy(np.where(greedy, np.float32(1.0), table.temperature)).to(device)
    z = scaled(logits, temperature)
    weights, top, total = exp_weights(z)
    left = total  # by the filters
    check_finite(top)
    cut = is_cut(table, z.shape[1])
    if cut.any():
        rows = np.flatnonzero(cut)
        index = torch.from_numpy(rows).to(device)
        of_rows = weights[index]
        weights[index] = of_rows.masked_fill_(~kept(of_rows, _filters(table.take(rows), device)), 0.0)
        left = weights.sum(-1)
        total = torch.where(torch.from_numpy(table.sampled).to(device), left, total)
    u = torch.from_numpy(uniforms(table.key, positions)).to(device)
    threshold = _times_fraction(left.to(torch.int64), u).to(torch.float64)
    tokens = torch.searchsorted(weights.cumsum(-1), threshold[:, None], right=True)[:, 0]
    if greedy.any():
        index = torch.from_numpy(np.flatnonzero(greedy)).to(device)
        tokens[index] = _first_maximum(z[index])
    # what `kernels.logprob.ops.logprobs` computes, without making the weights a second time
    return tokens, logprob(z, tokens, top, total)


def is_cut(table: SamplingTable, vocab: int) -> np.ndarray:
    """Rows [B] whose distribution is truncated."""
    filters = (table.top_p < 1.0) | ((table.top_k > 0) & (table.top_k < vocab)) | (table.min_p > 0.0)
    return (table.temperature > 0.0) & filters


def check_finite(top: Tensor) -> None:
    """Raise if a row's largest logit [B] is not a finite number."""
    if not bool(torch.isfinite(top).all()):
        bad = torch.nonzero(~torch.isfinite(top)).flatten().tolist()
        raise FloatingPointError(f"the model gave logits that are not finite, in rows {bad} of {len(top)} sampled")


def _first_maximum(z: Tensor) -> Tensor:
    """Lowest index of the largest value of each row (argmax does not say which of equal values it picks)."""
    columns = torch.arange(z.shape[1], device=z.device)
    return torch.where(z == z.amax(-1, keepdim=True), columns, z.shape[1]).amin(-1)


def _times_fraction(total: Tensor, u: Tensor) -> Tensor:
    """`floor(total * u / 2**53)` for int64 [B] below 2**53, without overflow: products of 27-bit halves."""
    th, tl, uh, ul = total >> 27, total & _LOW, u >> 27, u & _LOW
    return 2 * (th * uh) + ((th * ul + tl * uh + ((tl * ul) >> 27)) >> 26)


def _filters(table: SamplingTable, device: torch.device) -> Filters:
    return Filters(*(torch.from_numpy(column).to(device) for column in (table.top_p, table.top_k, table.min_p)))
