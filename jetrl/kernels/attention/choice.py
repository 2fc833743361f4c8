"""Which kernels compute attention of a decode step: `decode.py`, `decode_split.py`, or for sequences with
shared pages `decode.py` and then `decode_shared.py`. All have the same bits, so the choice changes none.

It depends on numbers that the host knows when a CUDA graph is captured: the sequences, the width of the page table and
the chunks of shared pages that the plan has room for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jetrl.kernels.attention import decode as walk
from jetrl.kernels.attention import decode_shared, decode_split
from jetrl.kernels.attention.decode import serves as serves
from jetrl.kernels.attention.state import SharedPages
from jetrl.kernels.qtensor import QTensor
from jetrl.kernels.quantize.triton import new_heads
from jetrl.types import LayerCache, PagedPlan

# The least bound of keys from which `decode_split.py` is faster, by programs of the other kernel (sequences times
# key/value heads, at most so many): benchmarks/bench_tail.py on an H200, both formats.
SPLIT_FROM = ((16, 2048), (32, 8192))


def splits(batch: int, heads: int, groups: int, bound: int) -> bool:
    """Whether decode steps of `batch` sequences with up to `bound` keys go through `decode_split.py`."""
    if decode_split.scratch_bytes(batch, heads, groups, bound) > decode_split.SCRATCH_BYTES:
        return False
    return next((bound >= least for programs, least in SPLIT_FROM if batch * groups <= programs), False)


def decode(
    q: Tensor, cache: LayerCache, plan: PagedPlan, scale: float, out: Tensor | None = None, count: int | None = None
) -> Tensor:
    """`q` [B, N, H], one query for each of the first `count` (or all) sequences of `plan` -> [B, N, H], in `out` if
    that is given."""
    out = torch.empty_like(q) if out is None else out
    _launch(q, cache, plan, scale, out, None, False, count)
    return out


def decode_quantize(q: Tensor, cache: LayerCache, plan: PagedPlan, scale: float, pow2: bool) -> QTensor:
    """`quantize_act(decode(...).flatten(1))` in the same kernels, for heads of 128."""
    quantized = new_heads(q)
    _launch(q, cache, plan, scale, q, quantized, pow2, None)
    return quantized


def _launch(
    q: Tensor, cache: LayerCache, plan: PagedPlan, scale: float, out: Tensor, quantized: QTensor | None, pow2: bool,
    count: int | None,
) -> None:
    (batch, heads, _), (page, groups) = q.shape, cache.keys.shape[1:3]
    table, lengths = plan.block_table, plan.kv_lengths
    if count is not None:
        table, lengths = table[:count], lengths[:count]
    if plan.shared is not None:
        assert count is None, "pages are shared only in steps in which all sequences decode"
        merged(q, cache, table, lengths, plan.shared, scale, out, quantized, pow2)
    elif splits(batch, heads, groups, table.shape[1] * page):
        decode_split.launch(q, cache, table, lengths, scale, out, quantized, pow2)
    else:
        walk.launch(q, cache, table, lengths, scale, out, quantized, pow2)


def merged(
    q: Tensor, cache: LayerCache, table: Tensor, lengths: Tensor, shared: SharedPages, scale: float, out: Tensor,
    quantized: QTensor | None, pow2: bool,
) -> None:
    """Each sequence's own tiles, then the shared ones, read once for each chunk."""
    batch, heads, head_dim = q.shape
    tops = torch.empty(batch, heads, dtype=torch.float32, device=q.device)
    parts = torch.empty(batch, heads, 4, dtype=torch.float32, device=q.device)
    accs = torch.empty(batch, heads, head_dim, dtype=torch.float32, device=q.device)
    assert shared.first.shape == (batch,) and shared.first.is_contiguous()
    state = shared.first, tops, parts, accs
    walk.launch(q, cache, table, lengths, scale, out, quantized, pow2, state)
    decode_shared.go_on(q, cache, table, shared, scale, out, quantized, pow2, state[1:])
