"""The bookkeeping between two decode steps as one Triton kernel: a single program, so the count has one writer."""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels take pointers and compile-time numbers, for which there are no types)
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from jetrl.kernels.attention.state import DecodeState

_ROWS = 256  # at least so many rows in the program: one kernel for all these batches

@triton.jit(do_not_specialize=["B", "M", "S", "page_size"])
def _advance_kernel(
    tokens, logprobs, maxima, integers, table, kv_lengths, drawn, count, B, M, S, page_size, PB: tl.constexpr,
):
    row = tl.arange(0, PB)
    mask = row < B
    step = tl.load(count)
    token = tl.load(tokens + row, mask=mask, other=0)
    logprob = tl.load(logprobs + row, mask=mask, other=0.0).to(tl.float64).to(tl.int64, bitcast=True)
    maximum = tl.load(maxima + row, mask=mask, other=0.0).to(tl.float64).to(tl.int64, bitcast=True)
    at = drawn + step * B + row
    tl.store(at, token, mask=mask)
    tl.store(at + S * B, logprob, mask=mask)
    tl.store(at + 2 * S * B, maximum, mask=mask)
    position = tl.load(integers + B + row, mask=mask, other=0) + 1
    slot = tl.load(integers + 2 * B + row, mask=mask, other=-1)
    alive = mask & (slot >= 0)
    block = tl.minimum(position // page_size, M - 1)
    page = tl.load(table + row.to(tl.int64) * M + block, mask=alive, other=0).to(tl.int64)
    tl.store(integers + row, token, mask=mask)
    tl.store(integers + B + row, position, mask=alive)
    tl.store(integers + 2 * B + row, page * page_size + position % page_size, mask=alive)
    tl.store(integers + 4 * B + row, tl.load(integers + 4 * B + row, mask=alive, other=0) + 1, mask=alive)
    tl.store(kv_lengths + row, tl.load(kv_lengths + row, mask=alive, other=0) + 1, mask=alive)
    tl.debug_barrier()  # every thread has read the count
    tl.store(count, (step + 1) % S)


def advance(state: DecodeState, tokens: Tensor, logprobs: Tensor, maxima: Tensor) -> None:
    """`kernels.attention.state.advance`."""
    size, width = state.table.shape
    _advance_kernel[(1,)](
        tokens, logprobs, maxima, state.integers, state.table, state.kv_lengths, state.drawn, state.count, size, width,
        state.drawn.shape[1], state.page_size, PB=max(_ROWS, triton.next_power_of_2(size)), num_warps=4,
    )
