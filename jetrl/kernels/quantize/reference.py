"""The quantizers on a CPU: those of `kernels.reference` in the orientations that ops ask for."""

from __future__ import annotations

import torch
from torch import Tensor

from jetrl.kernels import reference as ref
from jetrl.kernels.qtensor import QTensor

quantize_act = ref.quantize_1x128


def quantize_act_t(x: Tensor, pow2: bool = False, tile: bool = False) -> QTensor:
    return ref.quantize_128x128(x.T.contiguous(), pow2) if tile else ref.quantize_128x1(x, pow2)


def quantize_weight(
    w: Tensor, pow2: bool = False, sections: tuple[int, ...] | None = None, out: QTensor | None = None,
    dtype: torch.dtype | None = None,
) -> QTensor:
    q = ref.quantize_128x128(w.to(dtype or w.dtype), pow2, sections)
    return q if out is None else out.overwrite(q)
