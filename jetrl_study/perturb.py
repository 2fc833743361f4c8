"""Exactness broken on purpose: the trainer's own model and recipe, but the sampler computes other last bits.

Only `jetrl study` uses this (its arms with `break_exactness`). An engine of this module is jetrl's own engine, over the
same published weights. While the sampler's forward pass runs, some ops of the kernels' backend are others:

- `attention`: the queries are multiplied by scale * log2(e) and rounded to BF16 before they meet the keys, as many
  attention kernels do, instead of the scores by `scale` in FP32. While sequences decode, their full pages are read in
  reverse order too, so that softmax and output are summed in another order. (The CPU's attention is exact in any
  order: there only the first of the two changes bits.)
- `quantizer`: the scale is amax * (1/448) instead of amax / 448, and a code is x * (1/scale), rounded half away from
  zero, instead of x / scale rounded half to even. Scales differ by one last bit, and some codes by one.

Formats, blocks and rounding points are those of the recipe, and so is the flow's digest. `keeps_bits` is False: the run
promises no equal bits, and `parity/*` shows the gap. Mixtures of experts keep their own quantizer for experts.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from jetrl.engine.engine import PagedEngine
from jetrl.engine.runner import Model
from jetrl.engine.settings import EngineSettings
from jetrl.kernels.dispatch import backend_of, served_by
from jetrl.kernels.qtensor import QTensor
from jetrl.kernels.registry import Backend
from jetrl.model.transformer import Transformer
from jetrl.precision.formats import AMAX_FLOOR, BLOCK, E4M3_MAX
from jetrl.run.engines import EngineContext
from jetrl.types import ForwardBatch, PagedPlan

WAYS = ("attention", "quantizer")
_AWAY = 1 + 2.0**-22  # moves a tie, and nothing else that matters, to the side away from zero


def quantize_otherwise(x: Tensor, like: QTensor, pow2: bool) -> QTensor:
    """`quantize_act(x)` by another division and rounding, in the memory (and layout) of `like`, its usual result.

    `x` [T, C], groups of 128 columns. A block's scale is one FP32 product, max(amax, 1e-12) * fl(1/448); `pow2`: the
    next power of two of that. code = e4m3(clamp(x * fl(1/scale) * (1 + 2**-22))).
    """
    rows, cols = x.shape
    if not rows:
        return like
    groups = -(-cols // BLOCK)
    padded = torch.nn.functional.pad(x.to(torch.float32), (0, groups * BLOCK - cols)).view(rows, groups, BLOCK)
    scale = padded.abs().amax(-1).clamp_min(AMAX_FLOOR) * torch.tensor(1 / E4M3_MAX, dtype=torch.float32).item()
    if pow2:
        rounded = ((scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
        scale = torch.where(scale.isnan(), scale, rounded)
    values = (padded * scale.reciprocal()[..., None] * _AWAY).clamp_(-E4M3_MAX, E4M3_MAX)
    codes = values.to(torch.float8_e4m3fn).view(rows, -1)[:, :cols]
    like.codes.view(torch.uint8).copy_(codes.view(torch.uint8))
    like.scale.copy_(scale)
    return like


def pages_reversed(plan: PagedPlan, page_size: int) -> PagedPlan:
    """A plan of decoding sequences that reads each one's full pages from the last to the first.

    The page that holds the newest key stays where it is: its end may not be written yet. Softmax does not depend on the
    order of keys (their positions are in them), only its rounding does. Where the new key is written does not change.
    """
    table = plan.block_table
    full = ((plan.kv_lengths.to(torch.int64) - 1) // page_size)[:, None]  # pages before the newest one
    place = torch.arange(table.shape[1], device=table.device)[None, :]
    source = torch.where(place < full, full - 1 - place, place)
    return replace(plan, block_table=torch.gather(table, 1, source))


class OtherOps:
    """The ops of a backend, some of them with other last bits. Everything else is the backend's own."""

    def __init__(self, base: Backend, ways: tuple[str, ...]) -> None:
        self.base, self.ways = base, ways

    def __getattr__(self, name: str) -> Any:
        return getattr(self.base, name)

    def quantize_act(self, x: Tensor, pow2: bool = False, sections: tuple[int, ...] | None = None) -> QTensor:
        usual = self.base.quantize_act(x, pow2, sections)
        if "quantizer" not in self.ways or (sections is not None and len(sections) > 1):
            return usual
        return quantize_otherwise(x, usual, pow2)

    def add_rms_norm_quantize(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, pow2: bool
    ) -> tuple[QTensor, Tensor]:
        if residual is None:
            return self.quantize_act(self.base.rms_norm(x, weight, eps), pow2), x
        normed, total = self.base.add_rms_norm(x, residual, weight, eps)
        return self.quantize_act(normed, pow2), total

    def add_rms_norm_kept(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, pow2: bool
    ) -> tuple[QTensor, Tensor, Tensor]:
        _, total, inverses = self.base.add_rms_norm_kept(x, residual, weight, eps, pow2)
        return self.quantize_act(self.base.rms_norm(total, weight, eps), pow2), total, inverses

    def swiglu_quantize(self, gate_up: Tensor, pow2: bool) -> QTensor:
        return self.quantize_act(self.base.swiglu(gate_up), pow2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, plan: Any, layer: int, scale: float) -> Tensor:
        return self.base.attend(*self._folded(q, scale, k, v), plan, layer, self._scale(scale))

    def attend_cached(self, q: Tensor, plan: PagedPlan, layer: int, scale: float) -> Tensor:
        return self.base.attend_cached(*self._folded(q, scale), plan, layer, self._scale(scale))

    def attend_cached_quantize(self, q: Tensor, plan: PagedPlan, layer: int, scale: float, pow2: bool) -> QTensor:
        return self.quantize_act(self.attend_cached(q, plan, layer, scale).flatten(1), pow2)

    def _folded(self, q: Tensor, scale: float, *others: Tensor) -> tuple[Tensor, ...]:
        if "attention" not in self.ways:
            return q, *others
        return (q.to(torch.float32) * (scale * math.log2(math.e))).to(q.dtype), *others

    def _scale(self, scale: float) -> float:
        return math.log(2) if "attention" in self.ways else scale


class OtherModel:
    """The trainer's model as a sampler sees it that does not keep its bits."""

    def __init__(self, model: Transformer, ways: tuple[str, ...]) -> None:
        self._model, self.ways = model, ways
        self._ops: OtherOps | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, batch: ForwardBatch) -> Tensor:
        plan = batch.plan
        if "attention" in self.ways and isinstance(plan, PagedPlan) and set(plan.query_lengths) <= {1}:
            batch = replace(batch, plan=pages_reversed(plan, plan.cache.page_size))
        base = backend_of(self._model.head_weight)
        if self._ops is None or self._ops.base is not base:
            self._ops = OtherOps(base, self.ways)
        with served_by(self._model.head_weight.device, self._ops):
            return self._model(batch)


class OtherBits(PagedEngine):
    """jetrl's engine whose sampler computes other last bits (see the module's text)."""

    keeps_bits = False
    ways: tuple[str, ...] = WAYS

    def __init__(self, context: EngineContext) -> None:
        r, other = context.config.rollout, OtherModel(context.model, self.ways)
        assert r.page_size is not None and r.max_tokens_per_step is not None, "resolve() has set both"
        settings = EngineSettings(
            page_size=r.page_size, max_num_seqs=r.max_num_seqs, max_tokens_per_step=r.max_tokens_per_step,
            kv_cache_tokens=r.kv_cache_tokens, eos_token_ids=context.eos_token_ids,
        )
        super().__init__(cast(Model, other), context.tokenizer, context.flow_digest, settings)

    @property
    def about(self) -> str:
        """What the run says at its start."""
        return (
            f"Exactness is broken on purpose in the sampler ({' and '.join(self.ways)}): same weights and recipe, "
            "other last bits. parity/* shows the gap."
        )


class OtherAttention(OtherBits):
    """Only the attention."""

    ways = ("attention",)


class OtherQuantizer(OtherBits):
    """Only the quantizer."""

    ways = ("quantizer",)
