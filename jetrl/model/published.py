"""Parameters that the forward pass reads as rounded copies, refreshed by `publish`: vectors, tables, the embedding.

A model that trains nothing holds no masters (`master_dtype` None): its parameters are shapes on the meta device until
`publish_value` gives each its published copy, and nothing else of the value is kept. `freeze` does so to some.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.optim.optimizer import register_optimizer_step_post_hook

from jetrl.kernels.qtensor import QTensor
from jetrl.kernels.update.gradient import Gradient
from jetrl.model.master import HoldsMasters
from jetrl.model.shards import gathered


def rounded_into(held: Tensor | None, master: Tensor, dtype: torch.dtype) -> Tensor:
    """`master` rounded to `dtype`, in the memory of `held` if given. A master of that dtype is its own copy."""
    if master.dtype == dtype or held is None or held.shape != master.shape or held.device != master.device:
        return master.detach().to(dtype)
    return held.copy_(master.detach())


def rounded_value(value: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """`value` rounded to `dtype`, in memory of its own (a value read from a file may lie in the file's)."""
    assert value.shape == shape, f"a value {tuple(value.shape)} for a parameter {tuple(shape)}"
    return value.detach().to(dtype, copy=True)


class Note:
    """Which values of which masters were published last, to notice that they have moved since: no pass over values.

    It sees what torch counts as a change in place (optimizers, foreach and fused ones too, `copy_` and the like under
    `no_grad`, `load_state_dict`), another tensor in a parameter's place, and another storage (`p.data = ...`). It does
    not see writes through `p.data` or by kernels that are not torch's, CUDA graphs included.
    """

    def __init__(self) -> None:
        _count_steps()
        self._held: list[tuple[str, Tensor, tuple[int, int]]] = []

    def take(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """These masters are published now, as they are."""
        self._held = [(name, p, _state(p)) for name, p in named]

    def drop(self, names: Iterable[str]) -> None:
        """These are no masters any more."""
        gone = set(names)
        self._held = [one for one in self._held if one[0] not in gone]

    def moved(self, current: Sequence[Tensor | None] = ()) -> str | None:
        """The name of the first master that is not what was published; None: all are, or nothing was published.

        `current`: the tensors that are in the places of those that were noted, as far as given.
        """
        for name, p, state in self._held:
            if _state(p) != state or (current and not any(p is one for one in current)):
                return name
        return None

    def __getstate__(self) -> list[tuple[str, Tensor, bool]]:
        """A copy has tensors of its own, whose counters begin again."""
        return [(name, p, _state(p) == state) for name, p, state in self._held]

    def __setstate__(self, held: list[tuple[str, Tensor, bool]]) -> None:
        _count_steps()
        self._held = [(name, p, _state(p) if same else (-2, 0)) for name, p, same in held]


@functools.cache
def _count_steps() -> None:
    """From now on every step of a `torch.optim` optimizer counts as a change of its parameters: fused ones, which torch
    runs without counting, too."""

    def counted(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            if group.get("fused"):
                torch.autograd.graph.increment_version([p for p in group["params"] if p.grad is not None])

    register_optimizer_step_post_hook(counted)


def _state(p: Tensor) -> tuple[int, int]:
    return -1 if p.is_inference() else p._version, p.data_ptr()


class Published(HoldsMasters):
    """A vector or table whose forward value is the BF16-rounded copy of its master, refreshed by `publish`."""

    def __init__(self, shape: tuple[int, ...], master_dtype: torch.dtype | None, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.weight = self.parameter("weight", shape, master_dtype)
        self.published: Tensor = torch.empty(0)

    @torch.no_grad()
    def publish(self) -> None:
        """Refresh the copy; a frozen one stays what it is.

        Collective if the weight is sharded: the copy is whole on every rank.
        """
        master = self.masters["weight"]
        if master.frozen:
            return
        if master.split is not None:
            self.published = gathered(master.split, self.published, self.weight.detach(), self.dtype)
        else:
            self.published = rounded_into(self.published, self.weight, self.dtype)

    @torch.no_grad()
    def publish_value(self, kind: str, value: Tensor | QTensor) -> None:
        assert kind == "weight" and not self.holds(kind) and isinstance(value, Tensor)
        self.published = rounded_value(value, self.weight.shape, self.dtype)
        self._is_published()

    def freeze(self, kind: str) -> None:
        super().freeze(kind)
        if self.published.numel():
            self._is_published()

    def _is_published(self) -> None:
        """The parameter of a frozen weight is the published copy itself."""
        self.weight = nn.Parameter(self.published, requires_grad=False)

    def frozen_value(self, kind: str) -> Tensor:
        assert not self.holds(kind)
        return self.published

    def share_published(self, other: HoldsMasters) -> None:
        assert isinstance(other, Published)
        self.published = other.published
        self._is_published()

    def left_of_frozen(self) -> list[Tensor]:
        return [] if self.holds("weight") else [self.published]


class Together:
    """Modules with masters that are published in one call, given by name; those that are frozen are left out.

    What the call reads and writes is looked up once: of hundreds of small tables the search takes longer than the call.
    """

    def __init__(self, modules: Iterable[tuple[str, Published]]) -> None:
        found = [(f"{name}.weight", m) for name, m in modules if m.holds("weight")]
        self._modules, self.named = [m for _, m in found], [(name, m.weight) for name, m in found]
        self._masters = [m.masters["weight"] for m in self._modules]
        self._params, self._shards = [m.weight for m in self._modules], [master.shard for master in self._masters]
        self._places = [p.data_ptr() for p in self._params]
        self._alone, together, self._first = list[Published](), list[Published](), False
        for module, master in zip(self._modules, self._masters, strict=True):
            p, held = module.weight, module.published
            fits = (p.shape, p.device, module.dtype) == (held.shape, held.device, held.dtype)
            apart = master.split is not None or p.dtype == module.dtype  # rows of all ranks; a copy that is the master
            self._first |= not fits and not apart
            (together if fits and not apart else self._alone).append(module)
        self._together = together
        self._from: list[Tensor] = [m.weight for m in together]
        self._to = [m.published for m in together]

    def hold(self) -> bool:
        """Whether all have been published before, and have the masters, in the same memory, and copies of then."""
        return (
            not self._first
            and all(map(is_, (m._parameters["weight"] for m in self._modules), self._params))
            and all(map(is_, (m.published for m in self._together), self._to))
            and all(map(is_, (master.shard for master in self._masters), self._shards))
            and [p.data_ptr() for p in self._params] == self._places
        )

    def publish(self) -> None:
        """`Published.publish` of each."""
        for module in self._alone:
            module.publish()
        if self._to:
            torch._foreach_copy_(self._to, self._from)


class Norm(Published):
    """The weight [D] of a norm, which multiplies by `factor`: the weight, or with `offset` 1 + weight in FP32.

    `factor` stays in one place from publish to publish, as what is published does.
    """

    def __init__(
        self, shape: tuple[int, ...], master_dtype: torch.dtype | None, dtype: torch.dtype, offset: bool = False
    ) -> None:
        super().__init__(shape, master_dtype, dtype)
        self.offset = offset
        self._factor: Tensor | None = None

    @property
    def factor(self) -> Tensor:
        """What forward passes read."""
        if not self.offset:
            return self.published
        if self._factor is None or self._factor.device != self.published.device:
            self.refresh()
        assert self._factor is not None
        return self._factor

    @torch.no_grad()
    def refresh(self) -> None:
        """Make `factor` of what is published now."""
        if not self.offset:
            return
        value, held = self.published.to(torch.float32) + 1.0, self._factor
        same = held is not None and (held.shape, held.device) == (value.shape, value.device)
        self._factor = held.copy_(value) if same and held is not None else value

    def publish(self) -> None:
        super().publish()
        if self._factor is not None:
            self.refresh()

    def publish_value(self, kind: str, value: Tensor | QTensor) -> None:
        super().publish_value(kind, value)
        self._factor = None

    def share_published(self, other: HoldsMasters) -> None:
        super().share_published(other)
        self._factor = None


class _Embed(torch.autograd.Function):
    """Rows of the published table; the gradient is summed in FP32, in token order, into the master."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, master: Tensor, gradient: Gradient, table: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.gradient = gradient
        return table[tokens]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor | None, None, None]:
        (tokens,), gradient = ctx.saved_tensors, ctx.gradient
        if (found := gradient.rows(tokens)) is None:
            dw = torch.zeros(gradient.param.shape, dtype=torch.float32, device=dy.device)
            dw.index_put_((tokens,), dy.to(torch.float32), accumulate=True)
            return None, dw.to(gradient.dtype), None, None
        # only rows in use are touched; equal tokens share one `place` (unique() would wait for the device)
        place = torch.searchsorted(tokens.sort().values, tokens)
        rows = torch.zeros(dy.shape, dtype=torch.float32, device=dy.device)
        rows.index_put_((place,), dy.to(torch.float32), accumulate=True)
        grad, at = found
        grad[at] = (grad[at].to(torch.float32) + rows[place]).to(grad.dtype)  # equal tokens write one value
        gradient.done()
        return None, None, None, None


class Embedding(Published):
    """A published table [V, D]; `forward` looks up tokens [T] -> [T, D]. `is_head`: it is the lm_head, too."""

    def __init__(
        self, shape: tuple[int, ...], master_dtype: torch.dtype | None, dtype: torch.dtype, is_head: bool
    ) -> None:
        super().__init__(shape, master_dtype, dtype)
        gradient = self.masters["weight"].gradient
        gradient.sources, gradient.only_looked_up = 2 if is_head else 1, not is_head

    def forward(self, tokens: Tensor) -> Tensor:
        return _Embed.apply(tokens, self.weight, self.masters["weight"].gradient, self.published)
