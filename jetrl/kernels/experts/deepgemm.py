"""GEMMs of experts by DeepGEMM: each row by its expert's matrix with the bits of the dense kernels.

The kernels read on the device where groups end (`PaddedGroups.ends`), so rows beyond cost nothing and the host waits
for no count. For weight gradients DeepGEMM also takes the groups' sizes as a list of the host. It reads only their sum
and their largest, to check shapes and choose a tile, so it gets an even split (`_even`) next to the true sizes on the
device.

Legend: `R` rows, `E` experts, `N`, `K` output and reduction size of an expert's matrix; a prime marks a padded size.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from jetrl.kernels.experts.operands import WIDTH, PreparedExperts
from jetrl.kernels.experts.route import PaddedGroups
from jetrl.kernels.gemm.deepgemm import deep_gemm
from jetrl.kernels.gemm.operands import PreparedFP8, gather, left_operand
from jetrl.kernels.qtensor import QTensor
from jetrl.kernels.quantize.triton import padded
from jetrl.kernels.update.triton import add_rounded
from jetrl.precision.formats import BLOCK

_lock = threading.Lock()  # the height of tiles is a setting of the whole process


@contextmanager
def _tiles_of(block: int) -> Iterator[None]:
    """Within, tiles of grouped GEMMs have `block` rows: an expert's rows start at its multiples."""
    with _lock:
        if deep_gemm.get_mk_alignment_for_contiguous_layout() != block:
            deep_gemm.set_mk_alignment_for_contiguous_layout(block)
        yield


def _widened(x: Tensor, width: int) -> Tensor:
    """`x` [..., C] with zero columns up to `width`."""
    return x if x.shape[-1] == width else torch.nn.functional.pad(x, (0, width - x.shape[-1]))


# ---- forward and dgrad ----------------------------------------------------------------------------------------------


def grouped_fp8_gemm(a: QTensor, b: PreparedFP8, groups: PaddedGroups, out_dtype: torch.dtype) -> Tensor:
    """`kernels.experts.ops.grouped_fp8_gemm`: the bits of `deepgemm.fp8_gemm` for each row with its expert's matrix."""
    if out_dtype != torch.bfloat16:
        raise ValueError(f"DeepGEMM's 1x128 by 128x128 GEMM writes BF16, not {out_dtype}")
    codes = left_operand(a, b)
    out = torch.empty(codes.shape[0], b.codes.shape[1], dtype=out_dtype, device=codes.device)
    if out.shape[0]:
        with _tiles_of(groups.block):
            deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
                (codes, a.scale), (b.codes, b.scale), out, groups.ends, disable_ue8m0_cast=True, use_psum_layout=True,
                expected_m_for_psum_layout=groups.block,
            )
    return gather(out, b.rows)


def grouped_bf16_gemm(x: Tensor, w: PreparedExperts, groups: PaddedGroups, out_dtype: torch.dtype) -> Tensor:
    """`experts.ops.grouped_bf16_gemm`: the bits of `deepgemm.bf16_gemm` for each row with its expert's matrix."""
    if out_dtype != torch.bfloat16:
        raise ValueError(f"DeepGEMM's grouped BF16 GEMM writes BF16, not {out_dtype}")
    out = torch.empty(x.shape[0], w.weight.shape[1], dtype=out_dtype, device=x.device)
    if out.shape[0]:
        x = _widened(x.contiguous(), w.weight.shape[2])
        with _tiles_of(groups.block):
            deep_gemm.m_grouped_bf16_gemm_nt_contiguous(
                x, w.weight, out, groups.ends, use_psum_layout=True, expected_m_for_psum_layout=groups.block
            )
    return out if out.shape[1] == w.rows else out[:, : w.rows].contiguous()


def grouped_bf16_dgrad(dy: Tensor, w: Tensor, groups: PaddedGroups) -> Tensor:
    """`kernels.experts.ops.grouped_bf16_dgrad`: FP32 sums in one order, rounded."""
    matrices = w.unflatten(0, (len(groups.counts), -1))
    size, cols = padded(dy.shape[1], WIDTH), matrices.shape[2]
    if size != dy.shape[1]:
        matrices = torch.nn.functional.pad(matrices, (0, 0, 0, size - dy.shape[1]))
    dx = torch.empty(dy.shape[0], cols, dtype=dy.dtype, device=dy.device)
    if dx.shape[0]:
        with _tiles_of(groups.block):
            deep_gemm.m_grouped_bf16_gemm_nn_contiguous(
                _widened(dy, size).contiguous(), matrices.contiguous(), dx, groups.ends, use_psum_layout=True
            )
    return dx


# ---- weight gradients -----------------------------------------------------------------------------------------------


def _even(rows: int, experts: int) -> list[int]:
    """`rows` in whole blocks, nearly the same for each expert."""
    each, more = divmod(rows // BLOCK, experts)
    return [(each + (e < more)) * BLOCK for e in range(experts)]


def grouped_wgrad_into(
    dy_t: tuple[Tensor, Tensor], x_t: tuple[Tensor, Tensor], groups: PaddedGroups, grad: Tensor
) -> None:
    """`experts.ops.grouped_wgrad_into`: in FP32 the kernel itself adds; BF16 takes one more pass over an FP32 sum.

    The kernel can only add, so every micro-batch reads and writes all of `grad`: for 128 matrices of 1536 x 2048 that
    alone is 0.75 ms on an H200, whatever the number of tokens. Larger micro-batches make it less of an update.
    """
    experts, (n, rows), k = len(groups.counts), dy_t[0].shape, len(x_t[0])
    if not rows:
        return
    total = grad if grad.dtype == torch.float32 else torch.zeros(grad.shape, dtype=torch.float32, device=grad.device)
    out = total.view(experts, n, k)
    with _tiles_of(BLOCK):
        deep_gemm.k_grouped_fp8_gemm_nt_contiguous(
            (dy_t[0].view(-1), dy_t[1]), (x_t[0].view(-1), x_t[1]), out, _even(rows, experts), groups.sizes, c=out
        )
    if total is not grad:
        add_rounded(grad, total)


def grouped_bf16_wgrad_into(dy: Tensor, x: Tensor, groups: PaddedGroups, grad: Tensor) -> None:
    """`experts.ops.grouped_bf16_wgrad_into`; the rows between groups must be zeros, as `dispatch` and all that follows
    from it have them."""
    assert groups.block == BLOCK, "groups for gradients have blocks of 128"
    experts, (rows, n), k = len(groups.counts), dy.shape, x.shape[1]
    if not rows:
        return
    total = grad if grad.dtype == torch.float32 else torch.zeros(grad.shape, dtype=torch.float32, device=grad.device)
    out = total.view(experts, n, k)
    with _tiles_of(BLOCK):
        deep_gemm.k_grouped_bf16_gemm_tn_contiguous(
            dy.contiguous(), x.contiguous(), out, _even(rows, experts), groups.sizes, c=out
        )
    if total is not grad:
        add_rounded(grad, total)
