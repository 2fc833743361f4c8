"""Master weights: what is trained, what belongs to each of them, and what is left of one that is frozen.

A module that the forward pass reads as published copies (`linear.FlowLinear`, `published.Published`) holds a `Master`
for each of its parameters. A frozen one is published and nothing else: it has no value of its own, so no gradient and
no moments. A model without masters is one whose every parameter is frozen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from jetrl.errors import UserError
from jetrl.kernels.qtensor import QTensor
from jetrl.kernels.update.gradient import Gradient
from jetrl.model.shards import Part, Shard


class Master:
    """A parameter of a model, the rows of it that this rank owns, and how its gradient is added up.

    `shard` is how `sharding.shard_model` has cut it; None for vectors, for what is frozen, and where it has not run.
    """

    __slots__ = ("frozen", "gradient", "shard")

    def __init__(self, param: nn.Parameter, shard: Shard | None = None, frozen: bool = False) -> None:
        self.gradient, self.shard, self.frozen = Gradient(param), shard, frozen

    @property
    def param(self) -> nn.Parameter:
        """The weight that an optimizer steps; of a frozen one its shape, or what is published of it."""
        param = self.gradient.param
        assert isinstance(param, nn.Parameter)
        return param

    @property
    def trained(self) -> bool:
        """Whether an update changes it."""
        return not self.frozen and self.param.requires_grad

    @property
    def split(self) -> Shard | None:
        """How it is cut, if other ranks own rows too (or could)."""
        return self.shard if self.shard is not None and self.shard.split else None

    def part(self) -> Part:
        """The value as this rank's part: all of it, if it is not cut."""
        assert not self.frozen, "what is frozen has no value of its own"
        value, cut = self.param.detach(), self.split
        if cut is None:
            return Part(value, tuple(value.shape), 0)
        return Part(value, (cut.num_rows, *value.shape[1:]), cut.start)

    def whole_shape(self) -> tuple[int, ...]:
        """The shape of the weight with the rows of all ranks."""
        shape = tuple(self.param.shape)
        return shape if self.split is None else (self.split.num_rows, *shape[1:])


class HoldsMasters(nn.Module):
    """A module with a `Master` for each of its parameters, by the parameter's name."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype  # of what is published
        self.masters: dict[str, Master] = {}

    def parameter(self, kind: str, shape: tuple[int, ...], master_dtype: torch.dtype | None) -> nn.Parameter:
        """A new parameter, to be set as the attribute `kind`; without a master dtype it is frozen."""
        frozen = master_dtype is None
        param = self._shape_alone(shape) if frozen else nn.Parameter(torch.empty(shape, dtype=master_dtype))
        self.masters[kind] = Master(param, frozen=frozen)
        return param

    def _shape_alone(self, shape: tuple[int, ...]) -> nn.Parameter:
        return nn.Parameter(torch.empty(shape, dtype=self.dtype, device="meta"), requires_grad=False)

    def holds(self, kind: str) -> bool:
        """Whether there is a master of this name: a value of its own, which `publish` reads."""
        return kind in self.masters and not self.masters[kind].frozen

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """torch's: what takes a parameter's place, by whichever way, is the weight of its master from then on."""
        super().register_parameter(name, param)
        if param is not None and name in self.masters:
            self.masters[name].gradient.param = param

    def freeze(self, kind: str) -> None:
        """Publish a parameter for the last time, and drop its master; one that is only a shape, on the meta device,
        takes its value later (`publish_value`). Collective if it is cut: what is published is whole on every rank."""
        if not self.holds(kind):
            return
        master = self.masters[kind]
        if not master.param.is_meta:
            self.publish()
        self.masters[kind] = Master(master.param, frozen=True)
        setattr(self, kind, self._shape_alone(master.whole_shape()))

    def publish(self) -> None:
        """Refresh the copies that the forward pass reads from the masters; what is frozen stays as it is."""
        raise NotImplementedError

    def publish_value(self, kind: str, value: Tensor | QTensor) -> None:
        """Publish `value`, whole, of a frozen parameter, with the bits that `publish` makes of a master; it is not
        kept. Of codes it is what they stand for, or they themselves (`FlowLinear`)."""
        raise NotImplementedError

    def frozen_value(self, kind: str) -> Tensor:
        """What is published of a frozen parameter as one tensor, whole; published again it is the same weight."""
        raise NotImplementedError

    def share_published(self, other: HoldsMasters) -> None:
        """Of a frozen module: take what another one, frozen and of the same shapes, has published, without a copy."""
        raise NotImplementedError

    def left_of_frozen(self) -> list[Tensor]:
        """All that is left of frozen parameters."""
        raise NotImplementedError

    def require_in_place(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Refuse to move what was published from values that are gone: it is laid out for its device."""
        if any(fn(tensor) is not tensor for tensor in self.left_of_frozen() if tensor.numel()):
            raise UserError(
                "this model holds no master weights, or is frozen in part, so it cannot move to another device or "
                "type: its published weights could not be made again. Load it on the device it should run on: "
                "load_model(..., device=...)."
            )

    def _apply(self, fn: Any, recurse: bool = True) -> HoldsMasters:
        """torch's, for what is not frozen."""
        self.require_in_place(fn)
        kept = {kind: self._parameters[kind] for kind, master in self.masters.items() if master.frozen}
        for kind in kept:
            self._parameters[kind] = None  # keeps the order
        try:
            super()._apply(fn, recurse)
        finally:
            self._parameters.update(kept)
        return self


def masters_of(model: nn.Module) -> dict[str, Master]:
    """The masters of all parameters of `model`, trained and frozen, by name and in the order of its parameters.

    A parameter of a module that is not made for it (a block of a user's own) gets one whose gradient is autograd's.
    """
    known = {
        master.param: master
        for module in model.modules() if isinstance(module, HoldsMasters) for master in module.masters.values()
    }
    return {name: known.get(param) or Master(param) for name, param in model.named_parameters()}


def accumulate_in(model: nn.Module, dtype: torch.dtype) -> None:
    """`Gradient.accumulate_in` for all parameters that are trained."""
    for master in masters_of(model).values():
        if not master.frozen:
            master.gradient.accumulate_in(dtype)


def own_rows(model: nn.Module) -> dict[str, tuple[int, int]]:
    """By parameter: the rows of the whole that this rank holds, from the first to the one after the last; of what is
    frozen, all."""
    found = {}
    for name, master in masters_of(model).items():
        start = 0 if master.split is None else master.split.start
        found[name] = (start, start + len(master.param))
    return found


def parts_of(model: nn.Module) -> dict[str, Part]:
    """By parameter that is not frozen: what this rank holds of it."""
    return {name: master.part() for name, master in masters_of(model).items() if not master.frozen}


def frozen_values(model: nn.Module) -> dict[str, Callable[[], Tensor]]:
    """By parameter that is frozen: a function that makes its value, whole."""
    found: dict[str, Callable[[], Tensor]] = {}
    for name, module in model.named_modules():
        if isinstance(module, HoldsMasters):
            at = f"{name}." if name else ""
            frozen = [kind for kind, master in module.masters.items() if master.frozen]
            found |= {at + kind: partial(module.frozen_value, kind) for kind in frozen}
    return found


def frozen_parts(model: nn.Module) -> dict[str, Part]:
    """By parameter that is frozen: its value, whole, as a part."""
    values = {name: value() for name, value in frozen_values(model).items()}
    return {name: Part(value, tuple(value.shape), 0) for name, value in values.items()}


def values_for(other: nn.Module, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The value of each parameter of `other` in `model`, as `sharding.fill` wants them: both are cut alike."""
    masters, frozen, rows = masters_of(model), frozen_values(model), own_rows(other)
    for name, (start, stop) in rows.items():
        yield name, frozen[name]()[start:stop] if name in frozen else masters[name].param.detach()
