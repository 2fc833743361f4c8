"""`FlowLinear`: the only linear layer. Its recipe says FP8 or BF16 for each side; both read one published weight.

FP8 (x quantized 1x128, W 128x128, output gradient dy 1x128; the wgrad operands along tokens, 128x1):

    fprop   y  = rounded(q(x) @ q(W).T)          dgrad   dx = rounded(q(dy) @ q(W))
    wgrad   dW = q(dy.T) @ q(x.T).T              kept for backward: q(x.T) only, E4M3 in wgrad's orientation, or x
                                                 itself, where something else keeps it (`model.normed`: the stream);
                                                 dW is added to `weight.grad` in place (`kernels.update.gradient`);
                                                 of a frozen weight nothing is kept, and there is no dW

With `quant.wgrad = "tile"`, q(x.T) has tiles of 128x128, and dW is rounded to BF16.

Beside either there may be adapters (`adapter.py`), which read x in BF16; the base's weight is frozen then.

BF16: three GEMMs of `published`, which is the rounded master. Under `w8a16` it is code * 2^k, without a rounding, and
without gradients few rows may read the codes themselves (`kernels.gemm.coded_rows`), with the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from jetrl.kernels.adapters.ops import Begun
from jetrl.kernels.dispatch import backend_of
from jetrl.kernels.gemm import ops as gemm
from jetrl.kernels.pointwise.ops import add
from jetrl.kernels.qtensor import Coded, Granularity, QTensor, Reads, is_pow2
from jetrl.kernels.quantize.ops import quantize_act, quantize_act_t, quantize_weight, weight_values
from jetrl.kernels.update.gradient import grad_dtype
from jetrl.model.adapter import Adapter
from jetrl.model.master import HoldsMasters, Master
from jetrl.model.published import rounded_into, rounded_value
from jetrl.model.shards import Shard, gathered, gathered_codes
from jetrl.precision.formats import Format
from jetrl.precision.recipe import LinearRecipe
from jetrl.types import Side


class _FP8Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, master: Tensor, layer: FlowLinear, recipe: LinearRecipe, keep: bool, keeps_input: bool
    ) -> Tensor:
        pow2 = recipe.fprop.left.pow2
        ctx.layer, ctx.recipe, ctx.needs_weight, ctx.keeps_input = layer, recipe, keep, keeps_input
        if keep and keeps_input:
            ctx.save_for_backward(x)
        elif keep:
            x_t = input_for_wgrad(recipe, x)
            ctx.save_for_backward(x_t.codes, x_t.scale)
        return gemm.fp8_gemm(quantize_act(x, pow2), layer.fp8_operand(), x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        layer, recipe, dy = ctx.layer, ctx.recipe, dy.contiguous()
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dy_q = quantize_act(dy, recipe.dgrad.left.pow2, layer.sections)
            dx = gemm.fp8_gemm(dy_q, layer.fp8_operand_t(), dy.dtype)
        if ctx.needs_weight:
            saved = ctx.saved_tensors
            x_t = input_for_wgrad(recipe, saved[0]) if ctx.keeps_input else saved_activation(recipe, *saved)
            dw = layer.add_gradient(quantize_act_t(dy, recipe.wgrad.left.pow2), x_t)
        return dx, dw, None, None, None, None


def input_for_wgrad(recipe: LinearRecipe, x: Tensor) -> QTensor:
    """What wgrad reads of the input [T, K]: its transpose, quantized."""
    return quantize_act_t(x, recipe.saved_activation.pow2, recipe.wgrad_tiles)


def saved_activation(recipe: LinearRecipe, codes: Tensor, scale: Tensor) -> QTensor:
    """What wgrad reads of the input, [K, T], from the two tensors that are kept of it."""
    granularity: Granularity = "128x128" if recipe.wgrad_tiles else "1x128"
    return QTensor(codes, scale, granularity, (codes.shape[0],), (codes.shape[1],))


class _BF16Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, master: Tensor, layer: FlowLinear) -> Tensor:
        ctx.layer = layer
        if ctx.needs_input_grad[1]:
            ctx.save_for_backward(x)
        return gemm.bf16_gemm(x, layer.bf16_operand(), x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        layer, dy, dw = ctx.layer, dy.contiguous(), None
        dx = backend_of(dy).bf16_dgrad(dy, layer.published) if ctx.needs_input_grad[0] else None
        if ctx.needs_input_grad[1]:
            (x,) = ctx.saved_tensors
            dw = layer.master.gradient.add(
                lambda kept: gemm.bf16_wgrad_into(dy, x, kept), lambda: gemm.bf16_wgrad(dy, x)
            )
        return dx, dw, None


class _Bias(torch.autograd.Function):
    """`rounded(y + bias)` with the published bias; its gradient, summed in FP32, goes to the master."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, master: Tensor, bias: Tensor) -> Tensor:
        ctx.dtype = grad_dtype(master)
        return add(y, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None]:
        return dy, dy.to(torch.float32).sum(0).to(ctx.dtype) if ctx.needs_input_grad[1] else None, None


def _both(x: Tensor | QTensor | Coded) -> tuple[Tensor | None, QTensor | None]:
    """The values and the codes of an input, as far as it has them."""
    if isinstance(x, Coded):
        return x.values, x.codes
    return (None, x) if isinstance(x, QTensor) else (x, None)


class FlowLinear(HoldsMasters):
    """`y = x @ W.T (+ bias)`, x [T, K] -> [T, N]. `sections` are the row counts of the projections fused into W.

    `recipes` gives the precision of each side (None: BF16). The forward pass reads what `publish` made from the master
    weight, never the master itself, so that trainer and engine see the same bits. Of a frozen weight (`master_dtype`
    None, or `freeze`) there is nothing else. `published` is kept only where a side computes in BF16.

    `weight_only`: the format of codes that are made of the weight, and whose values BF16 GEMMs read.
    """

    def __init__(
        self, in_features: int, sections: tuple[int, ...], bias: bool, recipes: dict[Side, LinearRecipe | None],
        master_dtype: torch.dtype | None, dtype: torch.dtype, weight_only: Format | None = None,
    ) -> None:
        super().__init__(dtype)
        assert weight_only is None or weight_only.pow2, "code * scale is a BF16 number for powers of two only"
        self.sections, self.recipes = sections, recipes
        formats = [weight_only, *(recipe.fprop.right for recipe in recipes.values() if recipe is not None)]
        self.codes = next((format for format in formats if format is not None), None)  # of `quantized`
        self.weight_only = weight_only is not None
        self.weight = self.parameter("weight", (sum(sections), in_features), master_dtype)
        self.bias = self.parameter("bias", (sum(sections),), master_dtype) if bias else None
        self.lora: Adapter | None = None
        self.published_bias: Tensor | None = None
        self.published: Tensor = torch.empty(0)  # what BF16 GEMMs read: the rounded weight, or the values of its codes
        self.quantized: QTensor | None = None
        self.keeps_transposed = True  # whether the codes that dgrad reads stay, or are made in each backward pass
        self._operands: dict[str, Any] = {}  # what GEMMs read, made at the first use
        self._stale: set[str] = set()  # operands made from weights before the last publish

    @property
    def master(self) -> Master:
        """Of the weight."""
        return self.masters["weight"]

    def reads_codes(self, side: Side) -> bool:
        """Whether FP8 codes of the input are all that it reads without gradients."""
        return self.recipes[side] is not None and self.lora is None

    def reads(self, side: Side) -> Reads:
        """What `infer` reads: adapters the BF16 input, and the base either."""
        recipe = self.recipes[side]
        return Reads(recipe is None or self.lora is not None, None if recipe is None else recipe.fprop.left.pow2)

    def extra_repr(self) -> str:
        sides = {side: str(recipe.fprop.left) if recipe else "bf16" for side, recipe in self.recipes.items()}
        stored = f", weight: {self.codes}" if self.weight_only else ""
        formats = ", ".join(f"{s}: {f}" for s, f in sides.items())
        return f"{self.weight.shape[1]} -> {self.sections}, {formats}{stored}"

    @torch.no_grad()
    def publish(self) -> None:
        """Round the master weight to BF16 and quantize it, once, for both sides; into the same memory every time.

        What is frozen stays what it is. Of a sharded weight each rank rounds and quantizes its rows, and all get all of
        them (collective). `published` is kept only if a side reads it, that is computes in BF16.
        """
        if self.bias is not None and self.holds("bias"):
            self.published_bias = rounded_into(self.published_bias, self.bias, self.dtype)
        if not self.holds("weight"):
            return
        if self.master.split is not None:
            self._publish_rows(self.master.split)
        elif None in self.recipes.values() and not self.weight_only:
            self.published = rounded_into(self.published, self.weight, self.dtype)
            self._quantize(self.published)
        else:
            self._quantize(self.weight.detach())
            self._publish_codes()
        self._stale = set(self._operands)
        for name in self._operands.keys() - {"fp8_t"}:  # a captured decode step reads these directly
            self._operand(name)

    def _quantize(self, values: Tensor) -> None:
        """Make the codes, in one pass over a master's values."""
        if self.codes is not None:
            self.quantized = quantize_weight(values, self.sections, self.codes.pow2, self.quantized, self.dtype)

    def _publish_codes(self) -> None:
        """No side reads the rounded weight: `published` is nothing, or the values of the codes, in the same memory."""
        if not self.weight_only:
            self.published = torch.empty(0)
            return
        assert self.quantized is not None
        self.published = weight_values(self.quantized, self.published, self.dtype)

    def _publish_rows(self, shard: Shard) -> None:
        rows = self.weight.detach()
        if None in self.recipes.values() and not self.weight_only:
            rows = rows.to(self.dtype)
            self.published = gathered(shard, self.published, rows, self.dtype)
        if self.codes is not None:
            self.quantized = gathered_codes(shard, self.quantized, rows, self.codes.pow2, self.dtype)
        if self.weight_only:
            self._publish_codes()

    @torch.no_grad()
    def publish_value(self, kind: str, value: Tensor | QTensor) -> None:
        """Also of codes and scales: they are published as they are, if the recipe has scales of that kind."""
        assert not self.holds(kind)
        if kind == "bias":
            assert self.bias is not None and isinstance(value, Tensor)
            self.published_bias = rounded_value(value, self.bias.shape, self.dtype)
            return
        codes = value if isinstance(value, QTensor) and self._fits(value) else None
        from_codes = bool(all(self.recipes.values()) or self.weight_only)
        if codes is None or not from_codes:
            whole = value if isinstance(value, Tensor) else weight_values(value, dtype=torch.float32)
            self.published = rounded_value(whole, self.weight.shape, self.dtype)
        if codes is None:
            self._quantize(self.published)
        else:
            self.quantized = codes
        if from_codes:
            self._publish_codes()
        self._operands.clear()

    def _fits(self, codes: QTensor) -> bool:
        """Whether these could be what `publish` makes: blocks of the same sections, and scales of the same kind."""
        if self.codes is None or codes.row_sections != self.sections:
            return False
        return not self.codes.pow2 or bool(is_pow2(codes.scale).all())

    def frozen_value(self, kind: str) -> Tensor:
        """Codes and scales of a weight without a rounded copy are those of this value, too; scales of powers of two may
        come out smaller, with the same products, and those that came as codes may move by 2^-8."""
        assert not self.holds(kind)
        if kind == "bias":
            assert self.published_bias is not None
            return self.published_bias
        if self.published.numel():
            return self.published
        assert self.quantized is not None, "publish() has not run"
        return weight_values(self.quantized, dtype=torch.float32).to(self.dtype)

    def share_published(self, other: HoldsMasters) -> None:
        assert isinstance(other, FlowLinear)
        self.published, self.quantized, self.published_bias = other.published, other.quantized, other.published_bias
        self._operands, self._stale = other._operands, other._stale

    def left_of_frozen(self) -> list[Tensor]:
        found: list[Tensor] = []
        if not self.holds("weight"):
            found += [self.published]
            found += [self.quantized.codes, self.quantized.scale] if self.quantized is not None else []
        if self.published_bias is not None and not self.holds("bias"):
            found.append(self.published_bias)
        return found

    def _apply(self, fn: Any, recurse: bool = True) -> FlowLinear:
        """The weights move or change their type: what was published from them is gone until the next `publish`."""
        super()._apply(fn, recurse)
        if self.holds("weight"):
            self.published, self.quantized = torch.empty(0), None
            self._operands.clear()
        if self.holds("bias"):
            self.published_bias = None
        return self

    def _operand(self, name: str) -> Any:
        held = self._operands.get(name)
        if held is not None and name not in self._stale:
            return held
        fresh = self._operands[name] = self._prepare(name, held)
        self._stale.discard(name)
        return fresh

    def _prepare(self, name: str, held: Any) -> Any:
        if name == "bf16":
            return gemm.prepare_bf16(self.published, held)
        assert self.quantized is not None, "publish() has not run"
        return (gemm.prepare_fp8 if name == "fp8" else gemm.prepare_fp8_t)(self.quantized, held)

    def fp8_operand(self) -> Any:
        return self._operand("fp8")

    def fp8_operand_t(self) -> Any:
        if not self.keeps_transposed:
            return self._prepare("fp8_t", None)
        return self._operand("fp8_t")

    def bf16_operand(self) -> Any:
        assert self.published.numel(), "publish() has not run"
        return self._operand("bf16")

    def add_gradient(self, dy_t: QTensor, x_t: QTensor) -> Tensor | None:
        """wgrad, added in place to the master's gradient; None then, else what autograd is to accumulate."""
        gradient = self.master.gradient
        if x_t.granularity == "128x128" and gradient.begins():  # saves zeros and an addition
            gradient.begin(gemm.wgrad_rounded(dy_t, x_t))
            return None
        return gradient.add(lambda kept: gemm.wgrad_into(dy_t, x_t, kept), lambda: gemm.wgrad_gemm(dy_t, x_t))

    def infer(self, x: Tensor | QTensor | Coded, side: Side) -> Tensor:
        """`forward` without a gradient; the kernel before may have quantized `x` where codes are read (`reads`)."""
        if self.lora is None:
            y = self._base(*_both(x), self.reads(side).pow2)
        else:
            y = self.lora.finish(*self.base(x, side))
        if self.published_bias is not None:
            y = add(y, self.published_bias)
        return y

    def base(self, x: Tensor | QTensor | Coded, side: Side) -> tuple[Tensor, Begun]:
        """W x, rounded, without a bias, and what adapters will add to it (`Adapter.finish`)."""
        (values, codes), pow2 = _both(x), self.reads(side).pow2
        assert self.lora is not None and values is not None, "adapters read the BF16 input, never its codes"
        if pow2 is not None and codes is None:
            begun = self.lora.begin(values, pow2)
            return self._base(values, begun.codes, pow2), begun
        with self.lora.begin_beside(values) as begun:
            y = self._base(values, codes, pow2)
        return y, begun

    def _base(self, x: Tensor | None, codes: QTensor | None, pow2: bool | None) -> Tensor:
        """By the codes, with scales of kind `pow2`, or in BF16 (None)."""
        if pow2 is not None:
            if codes is None:
                assert x is not None
                codes = quantize_act(x, pow2)
            return gemm.fp8_gemm(codes, self.fp8_operand(), self.dtype)
        assert x is not None, "this layer is BF16: it takes no quantized input"
        if self.weight_only and self.quantized is not None:
            return gemm.coded_gemm(x, self.quantized, self.bf16_operand(), self.dtype)
        return gemm.bf16_gemm(x, self.bf16_operand(), self.dtype)

    def biased(self, y: Tensor) -> Tensor:
        """`y` with the bias, if there is one, and its gradient."""
        return y if self.bias is None else _Bias.apply(y, self.bias, self.published_bias)

    def forward(self, x: Tensor, side: Side, keeps_input: bool = False) -> Tensor:
        """`x` [T, K] -> [T, N] in the precision of `side`.

        `keeps_input`: something else keeps `x` for the backward pass, so wgrad's codes of it are made there.
        """
        if not torch.is_grad_enabled():
            return self.infer(x, side)  # nothing is kept for a backward pass
        recipe = self.recipes[side]
        if recipe is not None:
            y = _FP8Linear.apply(x, self.weight, self, recipe, self.master.trained, keeps_input)
        else:
            y = _BF16Linear.apply(x, self.weight, self)
        return self.biased(y if self.lora is None else self.lora(x, y))
