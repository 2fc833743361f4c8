"""The mixture-of-experts block: a router chooses k of E small MLPs for each token; their outputs, weighted and added.

Legend: `T` tokens, `D` model, `F` an expert's feed-forward, `R` rows of tokens grouped by expert (`groups.Groups`).
`kernels/experts/reference.py` says what is rounded where. No token is ever dropped: groups have the size that they
need.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from jetrl.kernels.beside import beside
from jetrl.kernels.experts import ops as moe
from jetrl.kernels.experts.groups import Groups
from jetrl.kernels.gemm import ops as gemm
from jetrl.kernels.qtensor import QTensor
from jetrl.kernels.quantize.ops import quantize_act
from jetrl.model.block import Block, Build, Context, Piece, Tap, no_tap
from jetrl.model.expert_adapter import ExpertAdapter
from jetrl.model.fused_experts import fused_experts, fused_experts_recipe
from jetrl.model.linear import FlowLinear
from jetrl.model.published import Published
from jetrl.precision.formats import Format
from jetrl.precision.recipe import LinearRecipe, Role
from jetrl.spec import ModelSpec
from jetrl.types import Side


class _FP8Experts(torch.autograd.Function):
    """The three grouped FP8 GEMMs, as `linear._FP8Linear` has them for one matrix; wgrad along each expert's rows."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, master: Tensor, layer: ExpertLinear, recipe: LinearRecipe, groups: Groups, keep: bool
    ) -> Tensor:
        ctx.layer, ctx.recipe, ctx.groups, ctx.keep = layer, recipe, groups, keep
        if keep:
            ctx.save_for_backward(*moe.quantize_rows_t(x, groups, recipe.saved_activation.pow2))
        x_q = quantize_act(x, recipe.fprop.left.pow2)
        return moe.grouped_fp8_gemm(x_q, layer.fp8_operand(), groups, x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        layer, recipe, groups, dy = ctx.layer, ctx.recipe, ctx.groups, dy.contiguous()
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dy_q = quantize_act(dy, recipe.dgrad.left.pow2, layer.out_sections)
            dx = moe.grouped_fp8_gemm(dy_q, layer.fp8_operand_t(), groups, dy.dtype)
        if ctx.keep:
            codes, scale = ctx.saved_tensors
            dw = layer.add_rows_gradient(
                moe.quantize_rows_t(dy, groups, recipe.wgrad.left.pow2), (codes, scale), groups
            )
        return dx, dw, None, None, None, None


class _BF16Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, master: Tensor, layer: ExpertLinear, groups: Groups) -> Tensor:
        ctx.layer, ctx.groups = layer, groups
        if ctx.needs_input_grad[1]:
            ctx.save_for_backward(x)
        return moe.grouped_bf16_gemm(x, layer.bf16_operand(), groups, x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        layer, groups, dy, dw = ctx.layer, ctx.groups, dy.contiguous(), None
        dx = moe.grouped_bf16_dgrad(dy, layer.published, groups) if ctx.needs_input_grad[0] else None
        if ctx.needs_input_grad[1]:
            (x,) = ctx.saved_tensors
            dw = layer.add_in_fp32(lambda grad: moe.grouped_bf16_wgrad_into(dy, x, groups, grad))
        return dx, dw, None, None


class ExpertLinear(FlowLinear):
    """`y = x @ W_e.T` for rows x [R, K] grouped by expert e -> [R, N], in the precision of each side.

    The weight [E * N, K] has the experts' matrices one below the other, each with sections of its own: it is published,
    quantized, cut into ranks' rows and optimized as any matrix.
    """

    def __init__(
        self, in_features: int, sections: tuple[int, ...], experts: int, recipes: dict[Side, LinearRecipe | None],
        master_dtype: torch.dtype | None, dtype: torch.dtype, weight_only: Format | None = None,
    ) -> None:
        super().__init__(in_features, sections, False, recipes, master_dtype, dtype, weight_only)
        self.experts, self.out_sections = experts, sections[: len(sections) // experts]

    def _prepare(self, name: str, held: Any) -> Any:
        if name == "bf16":
            return moe.prepare_bf16(self.published, self.experts, held)
        assert self.quantized is not None, "publish() has not run"
        return (moe.prepare_fp8 if name == "fp8" else moe.prepare_fp8_t)(self.quantized, self.experts, held)

    def infer_rows(self, x: Tensor | QTensor, groups: Groups, side: Side) -> Tensor:
        """`rows` without a gradient; an FP8 layer also takes rows that are quantized already."""
        recipe = self.recipes[side]
        if recipe is None:
            assert isinstance(x, Tensor), "this layer is BF16: it takes no quantized input"
            y = moe.grouped_bf16_gemm(x, self.bf16_operand(), groups, self.dtype)
        else:
            x_q = x if isinstance(x, QTensor) else quantize_act(x, recipe.fprop.left.pow2)
            y = moe.grouped_fp8_gemm(x_q, self.fp8_operand(), groups, self.dtype)
        if not isinstance(self.lora, ExpertAdapter):
            return y
        assert isinstance(x, Tensor), "adapters read the BF16 input, never its codes"
        return self.lora.rows(x, y, groups)

    def rows(self, x: Tensor, groups: Groups, side: Side) -> Tensor:
        """`x` [R, K] -> [R, N]."""
        if not torch.is_grad_enabled():
            return self.infer_rows(x, groups, side)
        recipe = self.recipes[side]
        if recipe is not None:
            y = _FP8Experts.apply(x, self.weight, self, recipe, groups, self.master.trained)
        else:
            y = _BF16Experts.apply(x, self.weight, self, groups)
        return self.lora.rows(x, y, groups) if isinstance(self.lora, ExpertAdapter) else y

    def add_rows_gradient(
        self, dy_t: tuple[Tensor, Tensor], x_t: tuple[Tensor, Tensor], groups: Groups
    ) -> Tensor | None:
        """wgrad of FP8 experts, added in place to the master's gradient; None then, else what autograd is to add."""
        return self.add_in_fp32(lambda grad: moe.grouped_wgrad_into(dy_t, x_t, groups, grad))

    def add_in_fp32(self, into: Callable[[Tensor], None]) -> Tensor | None:
        """Add to the weight's gradient by `into`; where autograd adds up, to zeros in FP32, which it gets."""

        def alone() -> Tensor:
            fresh = torch.zeros(self.weight.shape, dtype=torch.float32, device=self.weight.device)
            into(fresh)
            return fresh

        return self.master.gradient.add(into, alone)


class Router(Published):
    """The table [E, D] whose product with a token is the logits of its experts, FP32; BF16 under every recipe."""

    def __init__(self, shape: tuple[int, ...], master_dtype: torch.dtype | None, dtype: torch.dtype) -> None:
        super().__init__(shape, master_dtype, dtype)
        self._operand: Any = None

    def publish(self) -> None:
        super().publish()
        if self._operand is not None:  # a captured decode step reads it directly
            self._operand = gemm.prepare_bf16(self.published, self._operand)

    def publish_value(self, kind: str, value: Tensor | QTensor) -> None:
        super().publish_value(kind, value)
        self._operand = None

    def _apply(self, fn: Any, recurse: bool = True) -> Router:
        self._operand = None
        super()._apply(fn, recurse)
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Logits [T, E] of `x` [T, D]."""
        if self._operand is None:
            self._operand = gemm.prepare_bf16(self.published)
        return moe.router_logits(x, self.masters["weight"].gradient, self.published, self._operand)


class MoE(Block):
    def __init__(self, build: Build) -> None:
        super().__init__(build)
        experts = build.spec.experts
        assert experts is not None
        self.experts, self.layer = experts, build.layer
        self.router = Router((experts.count, build.spec.hidden_size), build.master_dtype, build.dtype)
        self.gate_up, self.down = (self._linear(build, role) for role in ("gate_up", "down"))

    @staticmethod
    def _linear(build: Build, role: Role) -> ExpertLinear:
        shape = build.block.linears(build.spec)[role]
        linear = ExpertLinear(
            shape.in_size, shape.sections, shape.experts, build.recipes(role), build.master_dtype, build.dtype,
            build.recipe.weight_only(build.layer),
        )
        lora = None if build.recipe.lora is None else build.recipe.lora.of(shape.experts)
        if lora is not None and (chosen := lora.adapted(shape.projections)):
            linear.lora = ExpertAdapter(
                lora, shape.in_size, shape.out_sections, chosen, shape.experts, build.adapter_dtype, build.dtype
            )
        return linear

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The experts [T, k] of logits [T, E], and their weights."""
        return moe.route(logits, self.experts.per_token, self.experts.normalized)

    def shared(self, y: Tensor, side: Side, tap: Tap) -> Tensor | None:
        """What is added to the experts' outputs [T, D]: nothing here."""
        return None

    def _shared_beside(self, y: Tensor, side: Side) -> AbstractContextManager[Tensor | None]:
        """`shared`, beside what is launched within the context: the routed experts."""
        if not self.experts.shared_size:
            return nullcontext()
        return beside(y.device, lambda: self.shared(y, side, no_tap))

    def _routed(self, y: Tensor, context: Context, tap: Tap) -> tuple[Tensor, Tensor]:
        """The experts [T, k] of each token, by rank, and their weights."""
        logits = self.router(y)
        tap(f"{self.at}.router", logits)
        chosen, weights = self.choose(logits)
        tap(f"{self.at}.route", weights)
        if context.routes is not None:
            context.routes.add(self.layer, logits, chosen)
        return chosen, weights

    def forward(self, x: Tensor, residual: Tensor | None, context: Context, tap: Tap) -> tuple[Tensor, Tensor]:
        side = context.batch.side
        y, residual = self.add_norm(x, residual, tap)
        chosen, weights = self._routed(y, context, tap)
        groups = moe.group(chosen, self.experts.count)
        if tap is no_tap and torch.is_grad_enabled():
            recipe = fused_experts_recipe(self.gate_up, self.down, side)
            if recipe is not None:
                shared = self.shared(y, side, tap)
                return fused_experts(y, weights, self.gate_up, self.down, recipe, groups, shared), residual

        def see(name: str, rows: Tensor) -> None:
            if tap is not no_tap:  # a tap sees the rows of a token side by side, by rank
                tap(f"{self.at}.{name}", rows[groups.rows].flatten(1))

        rows = moe.dispatch(y, groups)
        see("dispatch", rows)
        rows = self.gate_up.rows(rows, groups, side)
        see("gate_up", rows)
        rows = moe.swiglu(rows, groups)
        see("swiglu", rows)
        rows = self.down.rows(rows, groups, side)
        see("down", rows)
        y = moe.combine(rows, weights, groups, self.shared(y, side, tap))
        tap(f"{self.at}.combine", y)
        return y, residual

    def infer(self, x: Tensor, residual: Tensor | None, context: Context) -> tuple[Tensor, Tensor]:
        y, residual = self._normed(x, residual)  # the router reads it in BF16
        with self._shared_beside(y, context.batch.side) as shared:
            rows, weights, groups = self._infer_routed(y, context)
        return moe.combine(rows, weights, groups, shared), residual

    def _infer_routed(self, y: Tensor, context: Context) -> tuple[Tensor, Tensor, Groups]:
        """The routed experts' rows of `y` [T, D], the weights of each token's, and the groups that the rows are in."""
        side = context.batch.side
        into, out, count = self.gate_up.recipes[side], self.down.recipes[side], self.experts.count
        chosen, weights = self._routed(y, context, no_tap)
        rows: Tensor | QTensor
        if into is not None and out is not None and self.gate_up.reads_codes(side) and self.down.reads_codes(side):
            groups, rows = moe.group_quantize(chosen, y, count, into.fprop.left.pow2)
        else:
            groups = moe.group(chosen, count)
            if into is None or not self.gate_up.reads_codes(side):
                rows = moe.dispatch(y, groups)
            else:
                rows = moe.dispatch_quantize(y, groups, into.fprop.left.pow2)
        hidden = self.gate_up.infer_rows(rows, groups, side)
        act: Tensor | QTensor
        if out is None or not self.down.reads_codes(side):
            act = moe.swiglu(hidden, groups)
        else:
            act = moe.swiglu_quantize(hidden, groups, out.fprop.left.pow2)
        rows = self.down.infer_rows(act, groups, side)
        return rows, weights, groups

    @staticmethod
    def checkpoint_names(spec: ModelSpec, layer: int) -> dict[str, tuple[Piece, ...]]:
        assert spec.experts is not None
        D, F, E, at = spec.hidden_size, spec.experts.intermediate_size, spec.experts.count, f"model.layers.{layer}."
        experts = [f"{at}mlp.experts.{e}." for e in range(E)]
        return {
            "norm.weight": (Piece(f"{at}post_attention_layernorm.weight", (D,)),),
            "router.weight": (Piece(f"{at}mlp.gate.weight", (E, D)),),
            "gate_up.weight": tuple(Piece(f"{e}{x}_proj.weight", (F, D)) for e in experts for x in ("gate", "up")),
            "down.weight": tuple(Piece(f"{e}down_proj.weight", (D, F)) for e in experts),
        }


def routers_of(model: nn.Module) -> list[str]:
    """The parameters that are tables of routers: their biases are frozen anyway, and a shared expert's gate chooses
    nothing."""
    return [f"{name}.router.weight" for name, module in model.named_modules() if isinstance(module, MoE)]
