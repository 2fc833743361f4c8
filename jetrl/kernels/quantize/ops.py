"""Quantizers: checks, then the backend of the tensor's device. Definitions: `reference.quantize_*`."""

from __future__ import annotations

import torch
from torch import Tensor

from jetrl.kernels.dispatch import backend_of
from jetrl.kernels.qtensor import QTensor
from jetrl.precision.formats import BLOCK

_INPUTS = (torch.bfloat16, torch.float32)


def _check(x: Tensor, sections: tuple[int, ...] | None, size: int) -> None:
    if x.ndim != 2 or x.dtype not in _INPUTS:
        raise ValueError(f"quantizers take a BF16 or FP32 matrix, got {x.dtype} {tuple(x.shape)}")
    if sections is not None and sum(sections) != size:
        raise ValueError(f"sections {sections} sum to {sum(sections)}, the matrix has {size}")


def quantize_act(x: Tensor, pow2: bool = False, sections: tuple[int, ...] | None = None) -> QTensor:
    """`x` [T, C] -> E4M3, one scale per row and group of 128 columns. `sections`: where groups restart along C."""
    _check(x, sections, x.shape[-1])
    return backend_of(x).quantize_act(x, pow2, sections)


def quantize_act_t(x: Tensor, pow2: bool = False, tile: bool = False) -> QTensor:
    """`x` [T, C] -> QTensor of `x.T` [C, T] (wgrad operand), one scale per column of `x` and group of 128 tokens.

    `tile`: one scale for 128 features and 128 tokens.
    """
    _check(x, None, 0)
    return backend_of(x).quantize_act_t(x, pow2, tile)


def quantize_weight(
    w: Tensor, sections: tuple[int, ...] | None = None, pow2: bool = False, out: QTensor | None = None,
    dtype: torch.dtype | None = None,
) -> QTensor:
    """`w` [N, K] -> E4M3 with one scale for each 128x128 block; row blocks restart at every section.

    `out`, an earlier result for the same shape and sections, is overwritten and returned. `dtype`: the values are
    rounded to it first, as if such a copy had been made.
    """
    if dtype is not None and w.dtype != torch.float32:
        w = w.to(dtype)  # FP32 is rounded where it is read
    _check(w, sections, w.shape[0])
    return backend_of(w).quantize_weight(w, pow2, sections, out, dtype)


def weight_values(q: QTensor, out: Tensor | None = None, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """`code * scale` [N, K] of a weight whose scales are powers of two: exact in BF16, so nothing is rounded.

    A code has four bits and scales are at least 2^-48. `out`, an earlier result of the same shape, is overwritten and
    returned. With other scales, in FP32: one rounding each.
    """
    assert q.granularity == "128x128"
    if out is None or (out.shape, out.dtype, out.device) != (q.codes.shape, dtype, q.codes.device):
        out = torch.empty(q.codes.shape, dtype=dtype, device=q.codes.device)
    out.copy_(q.codes)
    scale = q.scale.to(dtype)
    if any(size % BLOCK for size in (*q.row_sections, *q.col_sections)):
        rows, cols = (_sizes(blocks, scale.device) for blocks in (q.row_blocks(), q.col_blocks()))
        return out.mul_(scale.repeat_interleave(rows, 0).repeat_interleave(cols, 1))
    out.view(scale.shape[0], BLOCK, scale.shape[1], BLOCK).mul_(scale[:, None, :, None])
    return out


def _sizes(blocks: list[tuple[int, int]], device: torch.device) -> Tensor:
    return torch.tensor([stop - start for start, stop in blocks], device=device)
