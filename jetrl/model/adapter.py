"""The adapters of a linear, and what a model with adapters is without them. `precision/lora.py` has the formulas.

The forward pass is `kernels/adapters/`. Gradients, with dy in BF16, by GEMMs that exist:

    du = rounded(s * (dy B))       dx = rounded(du A), which autograd adds to the base's      dA = du.T x
    dB = s * (dy.T u)              sums of both are in FP32, and are added to the masters' gradients in place

Legend: `T` tokens, `K` input size, `N` rows of the base's weight, `P` projections with an adapter, `r` rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from jetrl.kernels.adapters import ops
from jetrl.kernels.beside import beside
from jetrl.kernels.dispatch import backend_of
from jetrl.kernels.gemm import ops as gemm
from jetrl.kernels.qtensor import Coded, QTensor, Reads
from jetrl.kernels.quantize.ops import weight_values
from jetrl.model.master import HoldsMasters, masters_of
from jetrl.model.published import Published
from jetrl.precision.lora import Lora, edges

if TYPE_CHECKING:
    from jetrl.model.transformer import Transformer

# Whether a captured step computes A x on a second stream, beside the base's GEMM. No bit depends on it. It takes
# 0.25 ms off a step of 64 rows of Qwen3-8B on an H200; off until certificates were made with it.
FORK = False


class _Adapted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, a: Tensor, b: Tensor, adapter: Adapter) -> Tensor:
        u = adapter.shrink(x)
        ctx.adapter = adapter
        ctx.save_for_backward(x, u)
        return adapter.expand(y, u)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x, u), adapter, dy = ctx.saved_tensors, ctx.adapter, dy.contiguous()
        du = adapter.backward_of_expand(dy)
        dx = backend_of(dy).bf16_dgrad(du, adapter.a.published) if ctx.needs_input_grad[0] else None
        da = adapter.a.masters["weight"].gradient.add(
            lambda kept: gemm.bf16_wgrad_into(du, x, kept), lambda: gemm.bf16_wgrad(du, x)
        )
        db = adapter.b.masters["weight"].gradient.add(
            lambda kept: adapter.add_expand_gradient(dy, u, kept), lambda: adapter.expand_gradient(dy, u)
        )
        return dx, dy, da, db, None


class Adapter(nn.Module):
    """The adapters of those projections of a linear that have one, by number in `chosen`: `a` [P r, K], one A below the
    other, and `b` [sum of their rows, r].

    Without `master_dtype` both are frozen, as weights are. Published as vectors and tables are: rounded to `dtype`.
    """

    def __init__(
        self, lora: Lora, in_features: int, sections: tuple[int, ...], chosen: tuple[int, ...],
        master_dtype: torch.dtype | None, dtype: torch.dtype, copies: int = 1,
    ) -> None:
        super().__init__()
        self.rank, self.scale = lora.rank, lora.scale
        of_base = edges(sections)
        rows = tuple(sections[i] for i in chosen)
        self.places = tuple((of_base[i], own) for i, own in zip(chosen, edges(rows), strict=True))  # in y, in b
        self.a = Published((copies * len(chosen) * lora.rank, in_features), master_dtype, dtype)
        self.b = Published((copies * sum(rows), lora.rank), master_dtype, dtype)

    def extra_repr(self) -> str:
        return f"rank {self.rank}, scale {self.scale:g}"

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The base's output `y` [T, N] of `x` [T, K] with the adapters', with gradients where they are on; where they
        are off it takes the place of `y`."""
        if torch.is_grad_enabled():
            return _Adapted.apply(x, y, self.a.weight, self.b.weight, self)
        return self.finish(y, self.begin(x))

    def begin(self, x: Tensor, pow2: bool | None = None) -> ops.Begun:
        """What `finish` needs of x, without gradients, and the codes that the base reads (`pow2`: of its scales)."""
        return ops.begin(x, self.a.published, pow2)

    def begin_beside(self, x: Tensor) -> AbstractContextManager[ops.Begun]:
        """`begin`, beside what is launched within the context, which needs nothing of it (`FORK`)."""
        return beside(x.device, lambda: self.begin(x)) if FORK else nullcontext(self.begin(x))

    def finish(self, y: Tensor, begun: ops.Begun) -> Tensor:
        """The base's output `y` with the adapters', in its place."""
        return ops.finish(y, begun, self.b.published, self.scale, self.places)

    def finish_heads(self, qkv: Tensor, begun: ops.Begun, of: ops.Heads) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, or q and the cache's, of `finish(qkv, begun)`; this linear's projections are q, k and v."""
        return ops.finish_heads(qkv, begun, self.b.published, self.scale, self.places, of)

    def finish_swiglu(self, y: Tensor, begun: ops.Begun, reads: Reads) -> Tensor | QTensor | Coded:
        """`swiglu(finish(y, begun))`, as the next linear `reads` it; this linear's projections are gate and up."""
        return ops.finish_swiglu(y, begun, self.b.published, self.scale, self.places, reads)

    def shrink(self, x: Tensor) -> Tensor:
        """A x [T, P r], rounded."""
        return ops.shrink(x, self.a.published)

    def expand(self, y: Tensor, u: Tensor) -> Tensor:
        """`y` with s * B u added to the sections of the projections, rounded once; a new tensor."""
        whole = sum(stop - start for (start, stop), _ in self.places) == y.shape[1]
        out = torch.empty_like(y) if whole else y.clone()
        return ops.expand(y, u, self.b.published, self.scale, self.places, out)

    def backward_of_expand(self, dy: Tensor) -> Tensor:
        """du [T, P r] of `dy` [T, N]: the FP32 sums over rows of B, times s, rounded once."""
        return ops.expand_backward(dy, self.b.published, self.scale, self.places)

    def expand_gradient(self, dy: Tensor, u: Tensor) -> Tensor:
        """dB in FP32."""
        parts = [
            gemm.bf16_wgrad(dy[:, start:stop], u[:, i * self.rank : (i + 1) * self.rank])
            for i, ((start, stop), _) in enumerate(self.places)
        ]
        return torch.cat(parts) * self.scale

    def add_expand_gradient(self, dy: Tensor, u: Tensor, kept: Tensor) -> None:
        """dB, added to `kept` in FP32 and rounded to its type."""
        kept.copy_(kept.to(torch.float32) + self.expand_gradient(dy, u))


def is_adapter(name: str) -> bool:
    """Whether a parameter of a model is an adapter's, by its name."""
    return ".lora." in name


@torch.no_grad()
def first_values(model: nn.Module, seed: int, drawn: bool = False) -> Iterator[tuple[str, Tensor]]:
    """What adapters begin with, FP32 on the CPU, one at a time: A uniform within 1 / sqrt(K), and B zero, so that a
    model begins as its base. `drawn`: B is drawn too, from Normal(0, 0.02), so that its part in every sum is seen.

    Of a sharded one the whole is drawn, and this rank's rows given.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, master in list(masters_of(model).items()):
        if not is_adapter(name):
            continue
        shape, whole = master.whole_shape(), torch.zeros(master.whole_shape())
        if name.endswith(".a.weight"):
            whole = torch.rand(shape, generator=generator).mul_(2).sub_(1).mul_(shape[1] ** -0.5)
        elif drawn:
            whole = torch.randn(shape, generator=generator).mul_(0.02)
        yield name, whole if master.split is None else master.split.own(whole)
        del whole


@torch.no_grad()
def draw_adapters(model: Transformer, seed: int) -> None:
    """Give adapters values of which none is zero, as `first_values` draws them. With masters, publish afterwards."""
    masters = masters_of(model)
    for name, value in first_values(model, seed, drawn=True):
        if masters[name].frozen:
            model.publish_frozen([(name, value)])
        else:
            masters[name].param.copy_(value)


class BaseHash:
    """The digest of a base: of its names and values in BF16, as they are before codes are made of them, so that it is
    the same in every precision. The values are hashed as they pass by."""

    def __init__(self) -> None:
        self._found: dict[str, str] = {}

    def through(self, values: Iterable[tuple[str, Tensor | QTensor]]) -> Iterator[tuple[str, Tensor | QTensor]]:
        """The same values, in any order. Codes have the digest of what they stand for."""
        for name, value in values:
            whole = value.detach() if isinstance(value, Tensor) else weight_values(value, dtype=torch.float32)
            held = whole.to(torch.bfloat16).cpu().contiguous()
            self._found[name] = hashlib.sha256(held.view(torch.int16).numpy().data).hexdigest()
            yield name, value

    def digest(self) -> str:
        """16 hex digits of the SHA-256."""
        return hashlib.sha256(repr(sorted(self._found.items())).encode()).hexdigest()[:16]


def publish_base(model: Transformer, values: Iterable[tuple[str, Tensor]]) -> None:
    """Publish another base, of all values by name, below the adapters of `model`."""
    hashes = BaseHash()
    model.publish_frozen(hashes.through(values))
    model.base_digest = hashes.digest()


def without_adapters(model: Transformer) -> Transformer:
    """The frozen base of a model with adapters, over its memory: what is published of the base never changes."""
    recipe = replace(model.recipe, lora=None)
    with torch.device("meta"):
        base = type(model)(
            model.spec, recipe, master_dtype=None, dtype=model.dtype,
            activation_checkpointing=model.activation_checkpointing, lean_backward=model.lean_backward,
        )
    base.cos, base.sin = model.cos, model.sin
    ours = dict(model.named_modules())
    for name, module in base.named_modules():
        if isinstance(module, HoldsMasters):
            module.share_published(ours[name])
    return base
