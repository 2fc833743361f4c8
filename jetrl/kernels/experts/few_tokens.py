"""Few tokens to their experts in one kernel: `group` and `dispatch_quantize` at once, bit-equal to one after the other.

A decode step runs about ten short kernels in each layer with experts, and each costs 2 us whatever it does. Here every
program counts the choices of all tokens, which for few tokens is cheaper than a kernel of its own, and then writes the
rows of one token. The tokens of rows are not written: FP8 layers without gradients do not read them.

Legend as in `rows.py`; `N` choices (T * k).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels take pointers and compile-time numbers, for which there are no types)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.kernels.experts.route import PaddedGroups, _bounds, bound_of_rows, group, new_bounds, tile_rows
from jetrl.kernels.experts.rows import column_tile, dispatch_quantize
from jetrl.kernels.launch import LAUNCH, begin
from jetrl.kernels.qtensor import QTensor
from jetrl.kernels.quantize.triton import _FLOOR_BITS, abs_bits, encode, new_codes, new_scale, scale_from
from jetrl.precision.formats import BLOCK

_AT_ONCE = 2048  # choices up to which one kernel does it all
_PAIRS = 16384  # of its own choices with all others, that a program compares


@triton.jit(do_not_specialize=["N", "scale_stride"])
def _group_quantize_kernel(
    chosen, x, rows, starts, counts, ends, sizes, codes, scale, N, E, D, x_stride, codes_stride, scale_stride, written,
    K: tl.constexpr, KB: tl.constexpr, BLOCK: tl.constexpr, NB: tl.constexpr, EB: tl.constexpr, B: tl.constexpr,
    FLOOR: tl.constexpr, POW2: tl.constexpr, PDL: tl.constexpr,
):
    """A token's places among all choices, then some groups of 128 of its columns, quantized once, written k times."""
    begin(PDL)
    token, part = tl.program_id(0), tl.program_id(1)
    cols = part * B + tl.arange(0, B)
    v = tl.load(x + token.to(tl.int64) * x_stride + cols, mask=cols < D, other=0.0).to(tl.float32)
    at, expert, rank = tl.arange(0, NB), tl.arange(0, EB), tl.arange(0, KB)
    e = tl.load(chosen + at, mask=at < N, other=0).to(tl.int32)
    mine = tl.load(chosen + token * K + rank, mask=rank < K, other=-1).to(tl.int32)
    count = tl.histogram(e, EB, mask=at < N)
    start, _ = _bounds(count, starts, counts, ends, sizes, E, BLOCK, EB, token + part == 0)
    earlier = (e[None, :] == mine[:, None]) & (at < token * K)[None, :]
    row = tl.sum(tl.where(expert[None, :] == mine[:, None], start[None, :], 0), axis=1)
    row = (row + tl.sum(earlier.to(tl.int32), axis=1)).to(tl.int64)
    tl.store(rows + token * K + rank, row, mask=(rank < K) & (part == 0))
    groups = tl.reshape(v, (B // 128, 128))
    s = scale_from(tl.max(abs_bits(groups), axis=1), FLOOR, POW2)
    q = tl.reshape(encode(groups, s[:, None]).to(tl.uint8, bitcast=True), (B,))
    block = part * (B // 128) + tl.arange(0, B // 128)
    for j in tl.static_range(K):
        to = tl.sum(tl.where(rank == j, row, 0), axis=0)
        tl.store(codes + to * codes_stride + cols, q, mask=cols < written)
        tl.store(scale + block.to(tl.int64) * scale_stride + to, s, mask=block * 128 < D)


def group_quantize(
    chosen: Tensor, x: Tensor, num_experts: int, pow2: bool, tile: int | None = None
) -> tuple[PaddedGroups, QTensor]:
    """`reference.py`'s `group` and `dispatch_quantize`, bit-equal in the rows of tokens; the others are not written.

    For few choices the groups have no `tokens`.
    """
    (tokens, k), (_, d), device = chosen.shape, x.shape, x.device
    assert chosen.is_contiguous() and chosen.dtype == torch.int64 and x.dtype == torch.bfloat16 and x.stride(1) == 1
    choices, rank = tokens * k, triton.next_power_of_2(k)
    some = max(256, triton.next_power_of_2(max(1, choices)))
    if not 0 < choices <= _AT_ONCE or some * rank > _PAIRS:
        groups = group(chosen, num_experts, tile)
        return groups, dispatch_quantize(x, groups, pow2)
    tile = tile or tile_rows(tokens, k, num_experts)
    size, columns = bound_of_rows(tokens, k, num_experts, tile), column_tile(d)
    bounds, rows = new_bounds(num_experts, device), torch.empty_like(chosen)
    codes, scale = new_codes(size, d, device), new_scale(size, triton.cdiv(d, BLOCK), device)
    _group_quantize_kernel[(tokens, triton.cdiv(d, columns))](
        chosen, x, rows, *bounds, codes.view(torch.uint8), scale, choices, num_experts, d, x.stride(0),
        codes.stride(0), scale.stride(1), codes.stride(0), K=k, KB=rank, BLOCK=tile, NB=some,
        EB=max(32, triton.next_power_of_2(num_experts)), B=columns, FLOOR=_FLOOR_BITS, POW2=pow2,
        num_warps=4 if some < 1024 else 8, enable_fp_fusion=False, **LAUNCH,
    )
    none = torch.empty(0, dtype=torch.int32, device=device)
    return PaddedGroups(rows, none, *bounds, tile), QTensor(codes, scale, "1x128", (size,), (d,))
