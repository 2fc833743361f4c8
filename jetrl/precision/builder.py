"""Builds flow graphs: the frame of a decoder (embedding, residual stream, norms, lm_head) around its blocks' nodes.

Blocks write through `BlockForward` and `BlockBackward`, which name nodes within the layer and know what norms and
linears look like in the recipe's formats.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import get_args

from jetrl.precision.blocks.block import Block
from jetrl.precision.blocks.layouts import blocks_of
from jetrl.precision.formats import BF16, FP32, Format
from jetrl.precision.graph import ROUNDING, Attribute, FlowEdge, FlowGraph, FlowNode, View
from jetrl.precision.recipe import LinearRecipe, Recipe, Role
from jetrl.spec import ModelSpec
from jetrl.types import Side


def build_flow(spec: ModelSpec, recipe: Recipe, view: View) -> FlowGraph:
    """The graph of one view. It names every layer; the printer folds equal ones."""
    assert spec.num_layers == recipe.num_layers, f"model of {spec.num_layers} layers, recipe for {recipe.num_layers}"
    assert view in get_args(View), f"view {view!r}, not one of {get_args(View)}"
    builder = _Backward(spec, recipe, view) if view == "train_backward" else _Forward(spec, recipe, view)
    builder.build()
    return FlowGraph(view, tuple(builder.nodes.values()), tuple(builder.edges))


class _Builder(ABC):
    def __init__(self, spec: ModelSpec, recipe: Recipe, view: View) -> None:
        self.spec, self.recipe = spec, recipe
        self.side: Side = "rollout" if view == "rollout" else "train"
        self.nodes: dict[str, FlowNode] = {}
        self.edges: list[FlowEdge] = []

    @abstractmethod
    def build(self) -> None:
        """Make all nodes and edges of the view."""

    def op(
        self, name: str, op: str, inputs: Mapping[str, str], out: Format = BF16,
        attributes: Mapping[str, Attribute] | None = None, rounding: Mapping[str, str] = ROUNDING,
    ) -> str:
        assert op in rounding and name not in self.nodes, (op, name)
        self.nodes[name] = FlowNode(name, op, rounding[op], out, tuple(sorted((attributes or {}).items())))
        for slot, source in inputs.items():
            self.edges.append(FlowEdge(f"{name}.{slot}", source, name, self.nodes[source].out))
        return name

    def leaf(self, name: str, op: str = "parameter", out: Format = BF16) -> str:
        """A node without inputs, created at its first use."""
        return name if name in self.nodes else self.op(name, op, {}, out)

    @property
    def head(self) -> str:
        return "embed.weight" if self.spec.tie_embeddings else "lm_head.weight"


class _Forward(_Builder):
    def build(self) -> None:
        s = self.spec
        sizes: dict[str, Attribute] = {"vocab": s.vocab_size, "size": s.hidden_size}
        x = self.op("embed", "embed", {"weight": self.leaf("embed.weight")}, attributes=sizes)
        for layer in range(s.num_layers):
            for block in blocks_of(s, layer):
                flow = BlockForward(self, layer, block)
                y = block.forward(flow, flow.norm(f"{block.name}_norm", x))
                x = flow.op(f"{block.name}_add", "add", {"residual": x, "y": y})
        inputs = {"x": self.norm("norm", x), "weight": self.leaf(self.head)}
        sizes = {"out_sections": (s.vocab_size,), "in_size": s.hidden_size}
        logits = self.op("lm_head", "gemm", inputs, FP32, sizes)
        self.op("logprob", "logprob", {"logits": logits}, FP32)

    def norm(self, name: str, x: str, eps: float | None = None) -> str:
        inputs = {"x": x, "weight": self.leaf(f"{name}.weight")}
        constants: dict[str, Attribute] = {"eps": self.spec.rms_norm_eps if eps is None else eps}
        constants |= {"offset": 1} if self.spec.norm_offset else {}
        return self.op(name, "rms_norm", inputs, attributes=constants)


class _Backward(_Builder):
    def build(self) -> None:
        s = self.spec
        self.gradients: dict[str, str] = {}
        inputs = {"hidden": self.saved("norm"), "head": self.leaf(self.head)}
        dy = self.op("logprob.backward", "logprob_backward", inputs)
        dy = self.bf16_linear("lm_head", self.head, dy, self.saved("norm"))
        branches = [(layer, block) for layer in range(s.num_layers) for block in blocks_of(s, layer)]
        streams = ["embed", *(f"layers.{layer}.{block.name}_add" for layer, block in branches)]  # before each branch
        dy = self.norm("norm", dy, self.saved(streams[-1]))
        for (layer, block), stream in zip(reversed(branches), reversed(streams[:-1]), strict=True):
            dx = block.backward(BlockBackward(self, layer, block), dy)
            dx = self.norm(f"layers.{layer}.{block.name}_norm", dx, self.saved(stream))
            within = stream.startswith(f"layers.{layer}.")
            name = f"{stream}.grad" if within else f"layers.{layer}.input.grad"
            dy = self.op(name, "add", {"residual": dy, "y": dx})
        if self.trains_base:
            self.weight_gradient("embed.weight", self.op("embed.wgrad", "weight_sum", {"dy": dy}, FP32))
        self.op("optimizer", "optimizer", self.gradients, FP32)

    @property
    def trains_base(self) -> bool:
        """Whether all parameters but adapters' have gradients: there are no adapters."""
        return self.recipe.lora is None

    def saved(self, name: str, out: Format = BF16) -> str:
        return self.leaf(f"{name}.saved", "saved", out)

    def weight_gradient(self, parameter: str, gradient: str) -> None:
        if parameter in self.gradients:  # a tied head: its gradient and the embedding's are added
            total = f"{parameter}.grad_sum"
            gradient = self.op(total, "add", {"x": self.gradients[parameter], "y": gradient}, FP32)
        self.gradients[parameter] = gradient

    def norm(self, name: str, dy: str, x: str) -> str:
        inputs = {"dy": dy, "x": x}
        if self.trains_base:
            self.weight_gradient(f"{name}.weight", self.op(f"{name}.wgrad", "weight_sum", inputs, FP32))
        return self.op(f"{name}.dgrad", "rms_norm_backward", inputs | {"weight": self.leaf(f"{name}.weight")})

    def fp8_linear(
        self, name: str, linear: LinearRecipe, dy: str, x: str, sections: tuple[int, ...], op: str = "gemm"
    ) -> str:
        assert linear.saved_activation == linear.wgrad.right, "backward keeps x in the format that wgrad reads"
        dy_q = self.op(f"{name}.quantize_dy", "quantize", {"x": dy}, linear.dgrad.left, {"sections": sections})
        weight = self.saved(f"{name}.quantize_weight", linear.dgrad.right)
        if not self.trains_base:
            return self.op(f"{name}.dgrad", op, {"dy": dy_q, "weight": weight}, linear.grad)
        dy_t = self.op(f"{name}.quantize_dy_t", "quantize", {"x": dy}, linear.wgrad.left)
        x_t = self.op(f"{name}.quantize_x_t", "quantize", {"x": x}, linear.saved_activation)
        self.weight_gradient(f"{name}.weight", self.op(f"{name}.wgrad", op, {"dy": dy_t, "x": x_t}, linear.weight_grad))
        return self.op(f"{name}.dgrad", op, {"dy": dy_q, "weight": weight}, linear.grad)

    def bf16_linear(
        self, name: str, weight: str, dy: str, x: str, op: str = "gemm", codes: Format | None = None
    ) -> str:
        """`codes`: what dgrad reads instead of the weight itself."""
        if self.trains_base:
            self.weight_gradient(weight, self.op(f"{name}.wgrad", op, {"dy": dy, "x": x}, FP32))
        read = self.leaf(weight) if codes is None else self.saved(f"{name}.quantize_weight", codes)
        return self.op(f"{name}.dgrad", op, {"dy": dy, "weight": read})


class _Scope:
    """A block's view of a builder: names within the layer, and the block's own operators. Methods return full names."""

    def __init__(self, builder: _Builder, layer: int, block: Block) -> None:
        self.layer, self.block, self.spec = layer, block, builder.spec
        self.recipe, self.side = builder.recipe, builder.side
        self._builder = builder
        self._rounding = {**ROUNDING, **block.roundings}

    def at(self, name: str) -> str:
        """The full name of a node of this layer."""
        return f"layers.{self.layer}.{name}"

    def parameter(self, name: str, out: Format = BF16) -> str:
        """A weight of the block's own, beside those of norms and linears."""
        return self._builder.leaf(self.at(f"{name}.weight"), out=out)
    def matrix(self, name: str) -> str:
        """The parameter of a matrix that operators of the block read themselves, in BF16 under every recipe."""
        return self._builder.leaf(self.at(f"{name}.weight"))

    def op(self, name: str, op: str, inputs: Mapping[str, str], out: Format = BF16, **attributes: Attribute) -> str:
        """The operator `name` of this layer. `inputs`: slot -> full name of the node that it reads."""
        return self._builder.op(self.at(name), op, inputs, out, attributes, self._rounding)


class BlockForward(_Scope):
    """What a block writes its forward nodes with."""

    _builder: _Forward

    def norm(self, name: str, x: str, eps: float | None = None) -> str:
        """RMSNorm with its own weight; `eps` None: the model's."""
        return self._builder.norm(self.at(name), x, eps)

    def full(self, name: str) -> str:
        """The full name of a node that this layer has already."""
        assert self.at(name) in self._builder.nodes, name
        return self.at(name)

    def router(self, name: str, x: str, size: int) -> str:
        """A GEMM of `size` rows in BF16 under every recipe, whose FP32 sums are not rounded again."""
        inputs = {"x": x, "weight": self._builder.leaf(self.at(f"{name}.weight"))}
        return self.op(name, "gemm", inputs, FP32, out_sections=(size,), in_size=self.spec.hidden_size)

    def linear(self, role: Role, x: str) -> str:
        """The GEMM of a role, after the quantizers that the recipe puts there, and its bias."""
        shape, builder = self.block.linears(self.spec)[role], self._builder
        linear, given = self.recipe.linear(self.layer, role, self.side), x
        weight = builder.leaf(self.at(f"{role}.weight"))
        codes = self.recipe.weight_only(self.layer) if linear is None else linear.fprop.right
        if linear is not None:
            x = self.op(f"{role}.quantize_x", "quantize", {"x": x}, linear.fprop.left)
        if codes is not None:
            inputs = {"x": weight}
            weight = self.op(f"{role}.quantize_weight", "quantize", inputs, codes, sections=shape.sections)
        out = BF16 if linear is None else linear.out
        inputs = {"x": x, "weight": weight}
        sizes: dict[str, Attribute] = {"out_sections": shape.out_sections, "in_size": shape.in_size}
        op = "grouped_gemm" if shape.experts else "gemm"
        sizes |= {"experts": shape.experts} if shape.experts else {}
        y = self._adapted(role, given, self.op(role, op, inputs, out, **sizes))
        if shape.bias:
            y = self.op(f"{role}_bias", "add", {"x": y, "bias": builder.leaf(self.at(f"{role}.bias"))})
        return y

    def _adapted(self, role: Role, x: str, y: str) -> str:
        """The output `y` of a linear with what its adapters make of its input `x`, as it is before a quantizer."""
        shape, builder = self.block.linears(self.spec)[role], self._builder
        lora = None if self.recipe.lora is None else self.recipe.lora.of(shape.experts)
        chosen = () if lora is None else lora.adapted(shape.projections)
        if lora is None or not chosen:
            return y
        a, b = (builder.leaf(self.at(f"{role}.lora.{name}.weight")) for name in "ab")
        ranks = (lora.rank,) * len(chosen)
        op = "grouped_gemm" if shape.experts else "gemm"
        sizes: dict[str, Attribute] = {"experts": shape.experts} if shape.experts else {}
        inputs = {"x": x, "weight": a}
        sizes |= {"out_sections": ranks, "in_size": shape.in_size}
        u = self.op(f"{role}_shrink", op, inputs, BF16, **sizes)
        inputs = {"y": y, "u": u, "weight": b}
        return self.op(f"{role}_expand", "add_adapters", inputs, scale=lora.scale, projections=chosen)


class BlockBackward(_Scope):
    """What a block writes its backward nodes with."""

    _builder: _Backward

    def saved(self, name: str, out: Format = BF16) -> str:
        """The output of the forward's operator `name`, kept for the backward pass."""
        return self._builder.saved(self.at(name), out)

    def weight_sum(self, name: str, inputs: Mapping[str, str], by: str) -> None:
        """The gradient of the block's own weight `name`, a sum over tokens of what the operator `by` of the backward
        pass reads."""
        builder = self._builder
        if builder.trains_base:
            builder.weight_gradient(self.at(f"{name}.weight"), self.op(f"{by}.wgrad", "weight_sum", inputs, FP32))

    def norm(self, name: str, dy: str, x: str) -> str:
        """Both gradients of an RMSNorm; `x` is the full name of what it read. Returns the name of x's gradient."""
        return self._builder.norm(self.at(name), dy, x)

    def linear(self, role: Role, dy: str, x: str) -> str:
        """All gradients of a linear that read the output of `x` (a name in the layer). Returns that of x's gradient."""
        shape, name, builder = self.block.linears(self.spec)[role], self.at(role), self._builder
        if shape.bias and builder.trains_base:
            wgrad = self.op(f"{role}_bias.wgrad", "weight_sum", {"dy": dy}, FP32)
            builder.weight_gradient(f"{name}.bias", wgrad)
        linear = self.recipe.linear(self.layer, role, self.side)
        op = "grouped_gemm" if shape.experts else "gemm"
        if linear is None:
            codes = self.recipe.weight_only(self.layer)
            dx = builder.bf16_linear(name, f"{name}.weight", dy, self.saved(x), op, codes)
        else:
            linear = linear.with_row_wgrad() if shape.experts else linear
            dx = builder.fp8_linear(name, linear, dy, self.saved(x), shape.out_sections, op)
        return self._adapted(role, dy, x, dx)

    def _adapted(self, role: Role, dy: str, x: str, dx: str) -> str:
        """The gradients of a linear's adapters, and that of its input with theirs added to the base's `dx`."""
        shape = self.block.linears(self.spec)[role]
        lora = None if self.recipe.lora is None else self.recipe.lora.of(shape.experts)
        name, builder = self.at(role), self._builder
        if lora is None or not lora.adapted(shape.projections):
            return dx
        a, b = (builder.leaf(f"{name}.lora.{which}.weight") for which in "ab")
        inputs, scale = {"dy": dy, "u": self.saved(f"{role}_shrink")}, lora.scale
        builder.weight_gradient(b, self.op(f"{role}_expand.wgrad", "scaled_gemm", inputs, FP32, scale=scale))
        du = self.op(f"{role}_expand.dgrad", "add_adapters_backward", {"dy": dy, "weight": b}, scale=scale)
        builder.weight_gradient(a, self.op(f"{role}_shrink.wgrad", "gemm", {"dy": du, "x": self.saved(x)}, FP32))
        own = self.op(f"{role}_shrink.dgrad", "gemm", {"dy": du, "weight": a})
        return self.op(f"{role}.dgrad_sum", "add", {"x": dx, "y": own})

    def router(self, name: str, dy: str, x: str) -> str:
        """The gradients of the router `name`, from that of its FP32 logits; FP32 sums. Returns that of x's gradient."""
        return self.matrix_gradients(name, dy, x)

    def matrix_gradients(self, name: str, dy: str, x: str) -> str:
        """Both gradients of `x @ weight.T` of a matrix that is BF16 under every recipe, `x` a name in the layer.
        Returns that of x's gradient."""
        builder, full = self._builder, self.at(name)
        if builder.trains_base:
            wgrad = self.op(f"{name}.wgrad", "gemm", {"dy": dy, "x": self.saved(x)}, FP32)
            builder.weight_gradient(f"{full}.weight", wgrad)
        return self.op(f"{name}.dgrad", "gemm", {"dy": dy, "weight": builder.leaf(f"{full}.weight")})
