"""Two blocks from outside, each with a state that the package does not know, in a layer next to one of attention.

`moving_average`: out(average(in(x))), a gated moving average over positions. One FP32 vector is all that a sequence
keeps. `latent`: attention whose heads all read one row for each token, which is key and value, of another width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from jetrl.huggingface.config import FAMILIES, Family
from jetrl.kernels.attention.ops import attend
from jetrl.model.block import Block, Build, Context, Piece, Tap
from jetrl.model.blocks import MODULES
from jetrl.precision.blocks.block import Block as FlowBlock
from jetrl.precision.blocks.block import Linear
from jetrl.precision.blocks.layouts import ATTENTION, DENSE_MLP, LAYOUTS
from jetrl.precision.blocks.states import PerSequence, PerToken, State
from jetrl.precision.builder import BlockBackward, BlockForward
from jetrl.precision.formats import Format
from jetrl.precision.recipe import Role
from jetrl.spec import ModelSpec, RopeSpec
from jetrl.types import Cache, LayerCache, PagedPlan, VarlenPlan

WIDTH = 24  # of a latent row; heads have 16
KINDS = ("moving_average", "latent")


def spec_of(kind: str, layers: int = 2) -> ModelSpec:
    return ModelSpec(
        family=kind, vocab_size=40, hidden_size=72, intermediate_size=136, num_layers=layers, num_heads=4,
        num_kv_heads=2, head_dim=16, rms_norm_eps=1e-6, rope=RopeSpec(1e4), max_position=128, tie_embeddings=False,
        qkv_bias=False, qk_norm=False,
    )


class MixFlow(FlowBlock):
    """in, one operator, out."""

    name = "mix"
    operator: str

    def linears(self, spec: ModelSpec) -> Mapping[Role, Linear]:
        d = spec.hidden_size
        out = Linear((d,), self.width(spec), writes_residual=True)
        return {"mix_in": Linear(self.sections(spec), d), "mix_out": out}

    def sections(self, spec: ModelSpec) -> tuple[int, ...]:
        raise NotImplementedError

    def width(self, spec: ModelSpec) -> int:
        raise NotImplementedError

    def forward(self, flow: BlockForward, x: str) -> str:
        return flow.linear("mix_out", flow.op(self.operator, self.operator, {"x": flow.linear("mix_in", x)}))

    def backward(self, flow: BlockBackward, dy: str) -> str:
        dx = flow.linear("mix_out", dy, self.operator)
        dx = flow.op(f"{self.operator}.dgrad", f"{self.operator}_backward", {"dy": dx, "x": flow.saved("mix_in")})
        return flow.linear("mix_in", dx, "mix_norm")


class MovingAverageFlow(MixFlow):
    kind = operator = "moving_average"
    roundings = {
        "moving_average": "fp32 products and sum at each position, rounded once to bf16",
        "moving_average_backward": "fp32, rounded once to bf16",
    }

    def sections(self, spec: ModelSpec) -> tuple[int, ...]:
        return (spec.hidden_size, spec.hidden_size)

    def width(self, spec: ModelSpec) -> int:
        return spec.hidden_size

    def states(self, spec: ModelSpec, kv_cache: Format) -> Mapping[str, State]:
        return {"average": PerSequence((spec.hidden_size,))}


class LatentFlow(MixFlow):
    kind = operator = "latent"
    roundings = {"latent": "that of attention", "latent_backward": "that of attention"}

    def sections(self, spec: ModelSpec) -> tuple[int, ...]:
        return (spec.num_heads * WIDTH, WIDTH)

    def width(self, spec: ModelSpec) -> int:
        return spec.num_heads * WIDTH

    def states(self, spec: ModelSpec, kv_cache: Format) -> Mapping[str, State]:
        return {"latent": PerToken((WIDTH,))}


class Mix(Block):
    operator: str

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        self.layer = build.layer
        self.mix_in = build.linear("mix_in")
        self.mix_out = build.linear("mix_out")

    def mixed(self, x: Tensor, context: Context) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor, residual: Tensor | None, context: Context, tap: Tap) -> tuple[Tensor, Tensor]:
        side = context.batch.side
        y, residual = self.add_norm(x, residual, tap)
        for name, op in (
            ("mix_in", lambda t: self.mix_in(t, side)), (self.operator, lambda t: self.mixed(t, context)),
            ("mix_out", lambda t: self.mix_out(t, side)),
        ):
            y = op(y)
            tap(f"{self.at}.{name}", y)
        return y, residual

    def infer(self, x: Tensor, residual: Tensor | None, context: Context) -> tuple[Tensor, Tensor]:
        side = context.batch.side
        normed, residual = self.add_norm_for(self.mix_in, x, residual, side)
        return self.mix_out.infer(self.mixed(self.mix_in.infer(normed, side), context), side), residual

    @classmethod
    def checkpoint_names(cls, spec: ModelSpec, layer: int) -> dict[str, tuple[Piece, ...]]:
        D, at = spec.hidden_size, f"model.layers.{layer}."
        flow = FLOWS[spec.family]
        sections = zip("ab", flow.sections(spec), strict=True)
        return {
            "norm.weight": (Piece(f"{at}input_layernorm.weight", (D,)),),
            "mix_in.weight": tuple(Piece(f"{at}mix.{name}_proj.weight", (rows, D)) for name, rows in sections),
            "mix_out.weight": (Piece(f"{at}mix.out_proj.weight", (D, flow.width(spec))),),
        }


class MovingAverage(Mix):
    operator = "moving_average"

    def mixed(self, x: Tensor, context: Context) -> Tensor:
        plan = context.batch.plan
        if isinstance(plan, PagedPlan):
            assert plan.rows is not None
            states = plan.cache.state(self.layer, "average")
            rows, last = padded_rows(plan.query_lengths, x.device)
            found = average(x[rows], states[plan.rows.read])
            states[plan.rows.write] = found[torch.arange(len(last), device=x.device), last]
            return found.to(x.dtype).flatten(0, 1)[places(plan.query_lengths, x.device)]
        return trained(x, plan)


def trained(x: Tensor, plan: VarlenPlan) -> Tensor:
    """Whole sequences. A part that goes on from a prompt runs over the prompt's rows as well (`SharedKeys`)."""
    lengths = plan.lengths if plan.keys is None else plan.keys.lengths
    seen = x if plan.keys is None else x[plan.keys.rows]
    rows, _ = padded_rows(lengths, x.device)
    found = average(seen[rows], seen.new_zeros((), dtype=torch.float32)).to(x.dtype)
    found = found.flatten(0, 1)[places(lengths, x.device)]
    return found if plan.keys is None else found[plan.keys.own]


def average(x: Tensor, before: Tensor) -> Tensor:
    """h_t = g_t h_(t-1) + (1 - g_t) v_t with g = clamp(1/2 + a/8, 0, 1), for `x` [B, L, 2 D] -> FP32 [B, L, D].

    Sums and products of single numbers, so that no row depends on another sequence.
    """
    value, gate = x.to(torch.float32).chunk(2, -1)
    gate = (gate * 0.125 + 0.5).clamp(0.0, 1.0)
    new = (1.0 - gate) * value
    states = []
    for t in range(x.shape[1]):
        before = gate[:, t] * before + new[:, t]
        states.append(before)
    return torch.stack(states, 1)


def padded_rows(lengths: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """The packed rows of each sequence [B, L], its last one repeated behind the end; and the place of the last [B]."""
    if max(lengths) == 1:  # a decode step: nothing comes from the host, so a CUDA graph may hold it
        rows = torch.arange(len(lengths), device=device)
        return rows[:, None], torch.zeros_like(rows)
    count = torch.tensor(lengths, device=device)
    first, last = count.cumsum(0) - count, count - 1
    return first[:, None] + torch.minimum(torch.arange(max(lengths), device=device), last[:, None]), last


def places(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Where the packed rows are among the padded ones."""
    if (longest := max(lengths)) == 1:
        return torch.arange(len(lengths), device=device)
    return torch.cat([torch.arange(n, device=device) + b * longest for b, n in enumerate(lengths)])


@dataclass(frozen=True)
class AsKeys:
    """A cache whose latent rows are seen as keys and values of one head."""

    inner: Cache

    @property
    def page_size(self) -> int:
        return self.inner.page_size

    def layer(self, index: int) -> LayerCache:
        rows = self.inner.state(index, "latent")[:, :, None]
        return LayerCache(rows, rows)

    def state(self, layer: int, name: str) -> Tensor:
        return self.inner.state(layer, name)


class Latent(Mix):
    operator = "latent"

    def mixed(self, x: Tensor, context: Context) -> Tensor:
        heads, plan = self.spec.num_heads, context.batch.plan
        q, latent = x.split((heads * WIDTH, WIDTH), -1)
        q, latent = q.unflatten(-1, (heads, WIDTH)).contiguous(), latent[:, None].contiguous()
        if isinstance(plan, PagedPlan):
            plan = replace(plan, cache=AsKeys(plan.cache))
        return attend(q, latent, latent, plan, self.layer, WIDTH**-0.5).flatten(1)


FLOWS: dict[str, MixFlow] = {"moving_average": MovingAverageFlow(), "latent": LatentFlow()}


def register(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that another file needs to know: each family has its block in even layers, and attention in odd ones."""
    for kind, flow in FLOWS.items():
        layers = ((flow, DENSE_MLP), (ATTENTION, DENSE_MLP))
        monkeypatch.setitem(LAYOUTS, kind, lambda spec, layer, layers=layers: layers[layer % 2])
        family = Family(f"{kind}ForCausalLM", 128, {"attention_bias": False, "mlp_bias": False})
        monkeypatch.setitem(FAMILIES, kind, family)
    monkeypatch.setitem(MODULES, "moving_average", MovingAverage)
    monkeypatch.setitem(MODULES, "latent", Latent)
