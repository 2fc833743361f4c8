"""The definition of adapters, on a CPU: exact sums over K and over the rank, as all GEMMs have there.

An FP32 product with the scale, an FP32 sum with y, one rounding. A product that is rounded to BF16 before it is added
would lose updates that are small beside y.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jetrl.kernels import reference as ref
from jetrl.kernels.adapters.ops import Begun, Heads, Places
from jetrl.kernels.attention.reference import qkv_norm_rope
from jetrl.kernels.experts.groups import Groups
from jetrl.kernels.experts.reference import rows_of
from jetrl.kernels.qtensor import Coded, QTensor
from jetrl.kernels.reference import PreparedBF16


def adapter_shrink(x: Tensor, a: Tensor) -> Tensor:
    return ref.bf16_gemm(x, PreparedBF16(a)).to(x.dtype)


def adapter_expand(y: Tensor, u: Tensor, b: Tensor, scale: float, places: Places, out: Tensor) -> Tensor:
    rank = b.shape[1]
    for i, ((start, stop), (first, last)) in enumerate(places):
        t = ref.bf16_gemm(u[:, i * rank : (i + 1) * rank].contiguous(), PreparedBF16(b[first:last])).to(torch.float32)
        out[:, start:stop] = (t * scale).add_(y[:, start:stop])
    return out


def adapter_begin(x: Tensor, a: Tensor, pow2: bool | None) -> Begun:
    return Begun(adapter_shrink(x, a), None if pow2 is None else ref.quantize_1x128(x, pow2))


def adapter_finish(y: Tensor, begun: Begun, b: Tensor, scale: float, places: Places) -> Tensor:
    return adapter_expand(y, begun.left, b, scale, places, y)


def adapter_finish_heads(
    qkv: Tensor, begun: Begun, b: Tensor, scale: float, places: Places, of: Heads
) -> tuple[Tensor, Tensor, Tensor]:
    return qkv_norm_rope(adapter_finish(qkv, begun, b, scale, places), *of)


def adapter_finish_swiglu(
    y: Tensor, begun: Begun, b: Tensor, scale: float, places: Places, pow2: bool | None, keep: bool
) -> Tensor | QTensor | Coded:
    values = ref.swiglu(adapter_finish(y, begun, b, scale, places))
    if pow2 is None:
        return values
    codes = ref.quantize_1x128(values, pow2)
    return Coded(values, codes) if keep else codes


def adapter_expand_backward(dy: Tensor, b: Tensor, scale: float, places: Places) -> Tensor:
    parts = []
    for (start, stop), (first, last) in places:
        turned = PreparedBF16(b[first:last].T.contiguous())
        parts.append(ref.bf16_gemm(dy[:, start:stop].contiguous(), turned).to(torch.float32) * scale)
    return torch.cat(parts, 1).to(dy.dtype)


def adapter_shrink_rows(x: Tensor, a: Tensor, groups: Groups) -> Tensor:
    matrices = a.chunk(len(groups.counts))
    out = x.new_empty(len(x), len(matrices[0]))
    for expert, at in rows_of(groups):
        out[at] = adapter_shrink(x[at], matrices[expert])
    return out


def adapter_expand_rows(
    y: Tensor, u: Tensor, b: Tensor, scale: float, places: Places, groups: Groups, out: Tensor
) -> Tensor:
    matrices = b.chunk(len(groups.counts))
    for expert, at in rows_of(groups):
        adapter_expand(y[at], u[at], matrices[expert], scale, places, out[at])
    return out


def adapter_expand_rows_backward(dy: Tensor, b: Tensor, scale: float, places: Places, groups: Groups) -> Tensor:
    matrices = b.chunk(len(groups.counts))
    du = dy.new_empty(len(dy), len(places) * b.shape[1])
    for expert, at in rows_of(groups):
        du[at] = adapter_expand_backward(dy[at], matrices[expert], scale, places)
    return du
