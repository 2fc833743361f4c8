"""GEMMs by DeepGEMM: FP8 with blocks of 128 (fprop, dgrad, wgrad) and BF16.

A row's bits never depend on the other rows. DeepGEMM compiles a kernel at the first call of each shape class (seconds),
so shapes that a CUDA graph will capture must run before it. Scales arrive in the layout that the kernels read.

Legend: `M` rows (tokens), `N`, `K` output and reduction size; a prime marks a padded size (see `operands`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from jetrl.kernels.gemm import choice
from jetrl.kernels.gemm.operands import PreparedBF16, PreparedFP8, gather, left_operand, rows_to, whole_rows
from jetrl.kernels.qtensor import QTensor
from jetrl.kernels.support import broken
from jetrl.kernels.update.triton import add_rounded

try:
    import deep_gemm
except (ImportError, OSError) as error:
    raise broken("sgl-deep-gemm", error) from error

deep_gemm.set_pdl(True)  # see `launch.py`


def fp8_gemm(a: QTensor, b: PreparedFP8, out_dtype: torch.dtype) -> Tensor:
    """`a @ b.T`: FP32 accumulation, each group of 128 scaled by `a_scale * b_scale`, rounded once to BF16.

    Few rows may go through `few_rows.py`, which has the same bits.
    """
    if out_dtype != torch.bfloat16:
        raise ValueError(f"DeepGEMM's 1x128 by 128x128 GEMM writes BF16, not {out_dtype}")
    codes = left_operand(a, b)
    out = choice.multiply(codes, a.scale, b.codes, b.scale)
    if out is None:
        out = torch.empty(codes.shape[0], b.codes.shape[0], dtype=out_dtype, device=codes.device)
        if out.shape[0]:
            deep_gemm.fp8_gemm_nt((codes, a.scale), (b.codes, b.scale), out, disable_ue8m0_cast=True)
    return gather(out, b.rows)


def wgrad_gemm(dy_t: QTensor, x_t: QTensor) -> Tensor:
    """`gemm.ops.wgrad_gemm`: `dy_t` [N, T] by `x_t` [K, T], groups of 128 tokens on both sides -> FP32 [N, K]."""
    if x_t.granularity == "128x128":
        return wgrad_rounded(dy_t, x_t).to(torch.float32)
    out = torch.zeros(dy_t.codes.shape[0], x_t.codes.shape[0], dtype=torch.float32, device=dy_t.codes.device)
    _add_wgrad(dy_t, x_t, out)
    return out


def wgrad_into(dy_t: QTensor, x_t: QTensor, grad: Tensor) -> None:
    """`kernels.gemm.ops.wgrad_into`: in FP32 the kernel itself adds; BF16 takes one more pass over an FP32 result.

    By tiles the GEMM is the forward pass's, 1.4 times as fast, and writes BF16; the addition is always a pass then.
    """
    if x_t.granularity == "128x128":
        add_rounded(grad, wgrad_rounded(dy_t, x_t))
    elif grad.dtype == torch.float32:
        _add_wgrad(dy_t, x_t, grad)
    else:
        add_rounded(grad, wgrad_gemm(dy_t, x_t))


def wgrad_rounded(dy_t: QTensor, x_t: QTensor) -> Tensor:
    """`kernels.gemm.ops.wgrad_rounded`: [N, K] in BF16, one scale for 128x128 of `x_t`."""
    a, b = whole_rows(dy_t.codes), rows_to(whole_rows(x_t.codes), 16)  # 16: rows of the result, in bytes
    out = torch.empty(a.shape[0], b.shape[0], dtype=torch.bfloat16, device=a.device)
    deep_gemm.fp8_gemm_nt((a, dy_t.scale), (b, x_t.scale), out, disable_ue8m0_cast=True)
    return gather(out, x_t.row_sections)


def _add_wgrad(dy_t: QTensor, x_t: QTensor, out: Tensor) -> None:
    """The GEMM's epilogue adds to `out` (FP32) in memory, once for each element."""
    a, b = whole_rows(dy_t.codes), whole_rows(x_t.codes)
    if b.shape[0] % 4:
        raise ValueError(f"wgrad on Hopper needs an input size that is a multiple of 4, got {b.shape[0]}")
    deep_gemm.fp8_gemm_nt(
        (a, dy_t.scale), (b, x_t.scale), out, c=out, recipe=(1, 1, 128), disable_ue8m0_cast=True
    )


def bf16_gemm(x: Tensor, w: PreparedBF16, out_dtype: torch.dtype) -> Tensor:
    """`x @ w.T`, FP32 accumulation in one order of K for any M, rounded once to `out_dtype` (BF16 or FP32)."""
    out = torch.empty(x.shape[0], w.weight.shape[0], dtype=out_dtype, device=x.device)
    if out.shape[0]:
        deep_gemm.bf16_gemm_nt(x.contiguous(), w.weight, out)
    return out if out.shape[1] == w.size else out[:, : w.size].contiguous()


def coded_gemm(x: Tensor, codes: QTensor, w: PreparedBF16, out_dtype: torch.dtype) -> Tensor:
    """`bf16_gemm` by `w`, the values of `codes`: few rows may read the codes themselves (`coded_rows.py`), which has
    the same bits."""
    out = choice.multiply_coded(x, codes) if out_dtype == torch.bfloat16 else None
    return bf16_gemm(x, w, out_dtype) if out is None else out


def add_outer(out: Tensor, a: Tensor, b: Tensor) -> None:
    """`out += a.T @ b` for BF16 a [M, N], b [M, K] and FP32 out [N, K], in place."""
    deep_gemm.bf16_gemm_tn(a, b, out, c=out)


def bf16_dgrad(dy: Tensor, w: Tensor) -> Tensor:
    """`dy @ w`, FP32 accumulation, rounded. Reproducible; gradients are not part of parity."""
    return dy @ w


def bf16_wgrad(dy: Tensor, x: Tensor) -> Tensor:
    """`dy.T @ x` in FP32."""
    return torch.mm(dy.T, x, out_dtype=torch.float32)


def bf16_wgrad_into(dy: Tensor, x: Tensor, grad: Tensor) -> None:
    """`kernels.gemm.ops.bf16_wgrad_into`: in FP32 the GEMM adds; BF16 takes one more pass, and so one rounding."""
    if grad.dtype == torch.bfloat16 or grad.shape[0] % 8:  # TMA: rows of `dy` must be multiples of 16 bytes
        add_rounded(grad, bf16_wgrad(dy, x))
    else:
        add_outer(grad, dy, x.contiguous())
