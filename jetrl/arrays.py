"""Token ids and log-probs as read-only arrays, whatever form they are given in; which weights drew them. No torch."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


Spans = tuple[tuple[int, int], ...]
"""Which weights drew a row of tokens: (first token, weight version) of each piece, in order."""


def check_spans(spans: Spans, count: int) -> None:
    """ValueError unless they begin at token 0 of `count`, and none is empty."""
    edges = [*(start for start, _ in spans), max(count, 1)]
    if spans and (edges[0] != 0 or any(a >= b for a, b in pairwise(edges))):
        raise ValueError(f"spans {spans} of {count} tokens: they begin at 0, and each is not empty")


def token_ids(values: ArrayLike) -> np.ndarray:
    """Token ids as a read-only int32 array [n]: such an array itself, of anything else a copy. ValueError for what is
    no row of 32-bit integers."""
    if isinstance(values, np.ndarray) and _is_row(values, np.int32):
        return values
    given = _row("token ids", "iu", "integers", values)
    if given.size and not -(1 << 31) <= int(given.min()) <= int(given.max()) < 1 << 31:
        raise ValueError(f"token ids from {given.min()} to {given.max()}: they must fit into 32 bits")
    return _frozen(given, np.int32)


def log_probs(values: ArrayLike) -> np.ndarray:
    """Log-probs as a read-only float32 array [n], as `token_ids`; others are rounded to float32."""
    if isinstance(values, np.ndarray) and _is_row(values, np.float32):
        return values
    return _frozen(_row("log-probs", "f", "floats", values), np.float32)


def _is_row(array: np.ndarray, dtype: type[np.generic]) -> bool:
    return array.dtype == dtype and array.ndim == 1 and not array.flags.writeable


def _row(what: str, kinds: str, meant: str, values: ArrayLike) -> np.ndarray:
    try:
        given = np.asarray(values)
    except (ValueError, TypeError, RuntimeError) as error:
        raise ValueError(f"{what} must be a row of {meant}: {error}") from error
    if given.ndim != 1 or (given.size and given.dtype.kind not in kinds):
        raise ValueError(f"{what} must be a row of {meant}, got an array of shape {given.shape} and type {given.dtype}")
    return given


def _frozen(given: np.ndarray, dtype: type[np.generic]) -> np.ndarray:
    with np.errstate(over="ignore"):  # an infinite log-prob is for others to refuse
        array = np.array(given, dtype)
    array.flags.writeable = False
    return array


NOTHING = _frozen(np.zeros(0), np.float32)
NO_TOKENS = _frozen(np.zeros(0), np.int32)
