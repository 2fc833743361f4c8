"""GEMMs by DeepGEMM: FP8 with blocks of 128 (fprop, dgrad, wgrad) and BF16. A row's bits never depend on the other rows.

Sizes that are no multiple of a block are padded with zeros inside (codes and scales), never computed in another precision.
Where a projection inside a fused weight ends in a part of a block, its rows (fprop) or columns (dgrad) are padded to whole
blocks and the result is put together again.

Legend: `M` rows (tokens), `N`, `K` output and reduction size; a prime marks the padded size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jetrl.errors import UserError
from jetrl.kernels.backends.triton_quant import has_gaps, padded, transpose_codes
from jetrl.kernels.qtensor import QTensor

try:
    import deep_gemm
except ImportError as error:
    raise UserError(
        f"the hopper kernels need DeepGEMM ({error}); install it with: pip install 'jetrl[hopper]' "
        "(sgl-deep-gemm 0.1.5 is the version built for torch 2.11)"
    ) from error


@dataclass(frozen=True, slots=True)
class PreparedFP8:
    """A weight as the GEMM reads it: `codes` [N', K'] E4M3, `scale` [N'/128, K'/128] FP32."""

    codes: Tensor
    scale: Tensor
    rows: tuple[int, ...]  # sizes of the sections along N
    cols: tuple[int, ...]  # sizes of the sections along K


@dataclass(frozen=True, slots=True)
class PreparedBF16:
    """A BF16 weight [N', K] with `size` = N."""

    weight: Tensor
    size: int


def _whole(codes: Tensor) -> Tensor:
    """The same codes with the zero columns that end the last block: [R, C] as [R, row stride]."""
    assert codes.stride(1) == 1 and codes.stride(0) % 128 == 0, "codes must come from this backend's quantizers"
    return codes.as_strided((codes.shape[0], codes.stride(0)), (codes.stride(0), 1))


def _spread(x: Tensor, sections: tuple[int, ...], dim: int) -> Tensor:
    """Sections of `x` along `dim`, each padded with zeros to whole blocks."""
    shape = list(x.shape)
    shape[dim] = sum(padded(size) for size in sections)
    out = torch.zeros(shape, dtype=torch.uint8, device=x.device)
    start = first = 0
    for size in sections:
        out.narrow(dim, first, size).copy_(x.view(torch.uint8).narrow(dim, start, size))
        start, first = start + size, first + padded(size)
    return out.view(x.dtype)


def _gather(y: Tensor, sections: tuple[int, ...]) -> Tensor:
    """The columns of `y` [M, N'] that are real, [M, N] contiguous."""
    size = sum(sections)
    if y.shape[1] == size:
        return y
    if not has_gaps(sections):
        return y[:, :size].contiguous()
    parts, first = [], 0
    for size in sections:
        parts.append(y[:, first : first + size])
        first += padded(size)
    return torch.cat(parts, 1)


def _rows_to_16(codes: Tensor) -> Tensor:
    """`codes` with zero rows up to a multiple of 16 (the GEMM's output rows must be 16-byte multiples)."""
    rest = -codes.shape[0] % 16
    if not rest:
        return codes
    extra = torch.zeros(rest, codes.shape[1], dtype=torch.uint8, device=codes.device)
    return torch.cat([codes.view(torch.uint8), extra]).view(codes.dtype)


def prepare_fp8(q: QTensor) -> PreparedFP8:
    """The fprop operand of a weight [N, K]: its own codes, unless a section before the last ends within a block."""
    codes = _whole(q.codes)
    codes = _spread(codes, q.row_sections, 0) if has_gaps(q.row_sections) else _rows_to_16(codes)
    return PreparedFP8(codes, q.scale, q.row_sections, q.col_sections)


def prepare_fp8_t(q: QTensor) -> PreparedFP8:
    """The dgrad operand: codes and scales transposed, the sections now along K."""
    codes = _rows_to_16(transpose_codes(q.codes, q.row_sections))
    return PreparedFP8(codes, q.scale.T.contiguous(), q.col_sections, q.row_sections)


def fp8_gemm(a: QTensor, b: PreparedFP8, out_dtype: torch.dtype) -> Tensor:
    """`a @ b.T`: FP32 accumulation, each group of 128 scaled by `a_scale * b_scale`, rounded once to BF16."""
    if out_dtype != torch.bfloat16:
        raise ValueError(f"DeepGEMM's 1x128 by 128x128 GEMM writes BF16, {out_dtype} was asked for")
    assert a.col_sections == b.cols or sum(a.col_sections) == sum(b.cols) and not has_gaps(b.cols), "groups differ"
    codes = _spread(a.codes, a.col_sections, 1) if has_gaps(a.col_sections) else _whole(a.codes)
    out = torch.empty(codes.shape[0], b.codes.shape[0], dtype=out_dtype, device=codes.device)
    if out.shape[0]:
        deep_gemm.fp8_gemm_nt((codes, a.scale), (b.codes, b.scale), out, disable_ue8m0_cast=True)
    return _gather(out, b.rows)


def wgrad_gemm(dy_t: QTensor, x_t: QTensor) -> Tensor:
    """`dy_t` [N, T] by `x_t` [K, T], groups of 128 tokens on both sides -> FP32 [N, K]."""
    a, b = _whole(dy_t.codes), _whole(x_t.codes)
    if b.shape[0] % 4:
        raise ValueError(f"wgrad on Hopper needs an input size that is a multiple of 4, got {b.shape[0]}")
    out = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float32, device=a.device)  # the kernel adds to it
    deep_gemm.fp8_gemm_nt(
        (a, dy_t.scale), (b, x_t.scale), out, c=out, recipe=(1, 1, 128), disable_ue8m0_cast=True
    )
    return out


def prepare_bf16(w: Tensor) -> PreparedBF16:
    """The BF16 operand: the weight itself; rows are padded to a multiple of 8, as the output's rows must be aligned."""
    rest = -w.shape[0] % 8
    if w.shape[1] % 8:
        raise ValueError(f"BF16 GEMMs on Hopper need an input size that is a multiple of 8, got {w.shape[1]}")
    weight = w.contiguous() if not rest else torch.cat([w, w.new_zeros(rest, w.shape[1])])
    return PreparedBF16(weight, w.shape[0])


def bf16_gemm(x: Tensor, w: PreparedBF16, out_dtype: torch.dtype) -> Tensor:
    """`x @ w.T`, FP32 accumulation in one order of K for any M, rounded once to `out_dtype` (BF16 or FP32)."""
    out = torch.empty(x.shape[0], w.weight.shape[0], dtype=out_dtype, device=x.device)
    if out.shape[0]:
        deep_gemm.bf16_gemm_nt(x.contiguous(), w.weight, out)
    return out if out.shape[1] == w.size else out[:, : w.size].contiguous()


def add_outer(out: Tensor, a: Tensor, b: Tensor) -> None:
    """`out += a.T @ b` for BF16 a [M, N], b [M, K] and FP32 out [N, K], in place."""
    deep_gemm.bf16_gemm_tn(a, b, out, c=out)


def set_num_sms(count: int) -> None:
    """How many multiprocessors a GEMM may use (fewer leave room for communication)."""
    deep_gemm.set_num_sms(count)


def version() -> dict[str, Any]:
    return {"deep_gemm": deep_gemm.__version__}
