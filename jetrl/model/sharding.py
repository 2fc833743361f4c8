"""A model whose master weights are spread over ranks: cutting it, giving it values, and the way back to whole weights.

Matrices (linears, embedding, lm_head, value head) become parameters of this rank's rows (`shards.py`); vectors (norms,
biases) stay whole on every rank, and so does what is frozen. What `publish` makes is whole on every rank, so forward
and backward passes need no communication. Gradients of whole matrices go to a sink (`kernels.update.gradient`), never
to `.grad` directly.

A model is made on the meta device, cut there, and filled: no rank ever holds the masters of others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from jetrl.kernels.qtensor import QTensor, blocks_of
from jetrl.kernels.quantize.ops import weight_values
from jetrl.model.linear import FlowLinear
from jetrl.model.master import HoldsMasters, Master, frozen_values, masters_of
from jetrl.model.published import Published
from jetrl.model.shards import Shard, gathered, shard
from jetrl.parallel.world import World


def shard_model(model: nn.Module, world: World) -> None:
    """Spread every matrix of `model` over the world's replicas, and keep this rank's rows: of its weights, or (meta
    device) of shapes that `fill` makes weights of. Publish afterwards.

    In a world of one the parameters stay as they are and only learn their sections (for the gradient norm).
    Optimizers come after this: they hold the parameters that it makes.
    """
    for module, sections in _matrices(model):
        known, cut = module.masters["weight"].shard, shard(sections, world.replicas)
        assert known is None or known == cut, "the model is sharded already"
        if known is None:
            _cut(module, cut)
    device = next((m.param.device for m in masters_of(model).values() if not m.frozen), torch.device("meta"))
    if not world.alone and device.type != "meta":
        model.to(device)  # forgets the operands that were made from published weights


def shard_like(model: nn.Module, other: nn.Module) -> None:
    """Shard `model` as `other` is, if it is: for a critic or a reference policy next to the policy."""
    found = next((m.shard for m in masters_of(other).values() if m.shard is not None), None)
    if found is not None:
        shard_model(model, found.world)


def _matrices(model: nn.Module) -> Iterator[tuple[FlowLinear | Published, tuple[int, ...]]]:
    for module in model.modules():
        if not isinstance(module, FlowLinear | Published) or not module.holds("weight"):
            continue
        if isinstance(module, FlowLinear):
            yield module, module.sections
        elif module.weight.ndim == 2:
            yield module, module.masters["weight"].whole_shape()[:1]


def _cut(module: FlowLinear | Published, cut: Shard) -> None:
    old = module.weight
    if cut.split:
        module.weight = _in_place_of(old, cut.own(old.detach()).clone())
        module.published = torch.empty(0)
    module.masters["weight"].shard = cut


def _in_place_of(old: nn.Parameter, value: Tensor) -> nn.Parameter:
    """A parameter of that value, whose gradient has the type of the old one's."""
    new = nn.Parameter(value, requires_grad=old.requires_grad)
    if getattr(old, "grad_dtype", None) is not None:
        new.grad_dtype = old.grad_dtype  # type: ignore[attr-defined]
    return new


@torch.no_grad()
def fill(
    model: nn.Module, values: Iterable[tuple[str, Tensor | QTensor]], device: torch.device | None = None
) -> None:
    """Give every parameter its value, this rank's rows of it; those of the meta device are made on `device`.

    A frozen one is published from its value, which is whole. Values come one at a time and are not kept, so host
    memory is that of one. Of codes a master is their product with the scales, in FP32 before it is rounded to its type.
    Optimizers come after this, and `to` the device for buffers, then `publish`. Not collective. Raises ValueError for
    other names or shapes than the model's.
    """
    missing = dict(model.named_parameters())
    for name, value in values:
        param = missing.pop(name, None)
        if param is None or value.shape != param.shape:
            held = "nothing" if param is None else str(tuple(param.shape))
            raise ValueError(f"{name} is {tuple(value.shape)}, the model has {held} there")
        owner, _, kind = name.rpartition(".")
        module = model.get_submodule(owner)
        if isinstance(module, HoldsMasters) and not module.holds(kind):
            module.publish_value(kind, _on(value, device))
            continue
        if isinstance(value, QTensor):
            value = weight_values(value if device is None else value.to(device), dtype=torch.float32)
        if param.is_meta:
            value = value.detach().to(device or "cpu", param.dtype, copy=True)
            setattr(module, kind, _in_place_of(param, value))
        else:
            param.copy_(value)
        del value  # before the next one is made
    if missing:
        raise ValueError(f"no values for {sorted(missing)[:8]}")


def _on(value: Tensor | QTensor, device: torch.device | None) -> Tensor | QTensor:
    if isinstance(value, Tensor):
        value = value.detach()
    return value if device is None else value.to(device)


def whole_value(master: Master, dtype: torch.dtype) -> Tensor:
    """A master's value in `dtype` with the rows of all ranks, on its device. A collective if it is cut."""
    value = master.part().value.to(dtype)
    return value if master.split is None else gathered(master.split, None, value, dtype)


def digest(model: nn.Module, world: World) -> str:
    """SHA-256 of names and values, the same for any number of ranks: of masters, and of what is published of frozen
    parameters. Collective.

    Each rank hashes its blocks of 128 rows; the hash of a matrix is that of its blocks' hashes, in their order.
    """
    masters, frozen = dict(sorted(masters_of(model).items())), frozen_values(model)
    own = {name: [_sha256(frozen[name]())] if m.frozen else _block_digests(m) for name, m in masters.items()}
    every = world.replicas.gather(own)
    total = hashlib.sha256()
    for name, m in masters.items():
        held = every[:1] if m.split is None else every
        digests = [d for rank in held for d in rank[name]]
        total.update(f"{name} {m.param.dtype} {m.whole_shape()} {digests}\n".encode())
    return total.hexdigest()


def _block_digests(master: Master) -> list[str]:
    cut, value = master.shard, master.param.detach()
    blocks = [(0, len(value))] if cut is None else blocks_of(cut.parts(cut.world.rank))
    return [_sha256(value[start:stop]) for start, stop in blocks]


def _sha256(value: Tensor) -> str:
    return hashlib.sha256(value.contiguous().view(torch.uint8).cpu().numpy().data).hexdigest()
