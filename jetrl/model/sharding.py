"""A model whose master weights are spread over ranks: cutting it, giving it values, and the way back to whole weights.

Matrices (linears, embedding, lm_head, value head) become parameters of this rank's rows (`shards.py`); vectors (norms,
biases) stay whole on every rank. What `publish` makes is whole on every rank, so forward and backward passes need no
communication. Gradients of whole matrices go to a sink (`kernels.update.gradient`), never to `.grad` directly.

A model is made on the meta device, cut there, and filled: no rank ever holds the masters of others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from jetrl.kernels.qtensor import blocks_of
from jetrl.model.linear import FlowLinear
from jetrl.model.published import Published
from jetrl.model.shards import Part, Shard, gathered, part_of, shard, shard_of
from jetrl.parallel.world import World


def shard_model(model: nn.Module, world: World) -> None:
    """Keep this rank's rows of every matrix of `model`: of its weights, or (meta device) of shapes that `fill` makes
    weights of. Publish afterwards.

    In a world of one the parameters stay as they are and only learn their sections (for the gradient norm).
    Optimizers come after this: they hold the parameters that it makes.
    """
    for module, sections in _matrices(model):
        old = module.weight
        known = shard_of(old)
        assert known is None or known == shard(sections, world), "the model is sharded already"
        if known is None:
            _cut(module, shard(sections, world))
    device = next(model.parameters()).device
    if not world.alone and device.type != "meta":
        model.to(device)  # forgets the operands that were made from published weights


def shard_like(model: nn.Module, other: nn.Module) -> None:
    """Shard `model` as `other` is, if it is: for a critic or a reference policy next to the policy."""
    found = next((cut for cut in map(shard_of, other.parameters()) if cut is not None), None)
    if found is not None:
        shard_model(model, found.world)


def _matrices(model: nn.Module) -> Iterator[tuple[FlowLinear | Published, tuple[int, ...]]]:
    for module in model.modules():
        if isinstance(module, FlowLinear):
            yield module, module.sections
        elif isinstance(module, Published) and module.weight.ndim == 2:
            cut = shard_of(module.weight)
            yield module, (len(module.weight),) if cut is None else cut.sections


def _cut(module: FlowLinear | Published, cut: Shard) -> None:
    old = module.weight
    if cut.split:
        module.weight = _in_place_of(old, cut.own(old.detach()).clone())
        module.published = torch.empty(0)
    module.weight.shard = cut  # type: ignore[attr-defined]


def _in_place_of(old: nn.Parameter, value: Tensor) -> nn.Parameter:
    """A parameter of that value, with all that `old` knows: how gradients are held, how it is cut."""
    new = nn.Parameter(value, requires_grad=old.requires_grad)
    new.__dict__.update(old.__dict__)
    if getattr(old, "grad_dtype", None) is not None:
        new.grad_dtype = old.grad_dtype  # type: ignore[attr-defined]
    return new


@torch.no_grad()
def fill(model: nn.Module, values: Iterable[tuple[str, Tensor]], device: torch.device | None = None) -> None:
    """Give every parameter its value, this rank's rows of it; those of the meta device are made on `device`.

    Values come one at a time and are not kept, so host memory is that of one. Optimizers come after this, and `to` the
    device for buffers, then `publish`. Not collective. Raises ValueError for other names or shapes than the model's.
    """
    missing = dict(model.named_parameters())
    for name, value in values:
        param = missing.pop(name, None)
        if param is None or value.shape != param.shape:
            held = "nothing" if param is None else str(tuple(param.shape))
            raise ValueError(f"{name} is {tuple(value.shape)}, the model has {held} there")
        if param.is_meta:
            owner, _, kind = name.rpartition(".")
            value = value.detach().to(device or "cpu", param.dtype, copy=True)
            setattr(model.get_submodule(owner), kind, _in_place_of(param, value))
        else:
            param.copy_(value)
        del value  # before the next one is made
    if missing:
        raise ValueError(f"no values for {sorted(missing)[:8]}")


def own_rows(model: nn.Module) -> dict[str, tuple[int, int]]:
    """By parameter: the rows of the whole that this rank holds, from the first to the one after the last."""
    parts = {name: part_of(p) for name, p in model.named_parameters()}
    return {name: (part.start, part.start + len(part.value)) for name, part in parts.items()}


def parts_of(model: nn.Module) -> dict[str, Part]:
    """By parameter: what this rank holds of it."""
    return {name: part_of(p) for name, p in model.named_parameters()}


def whole_value(param: Tensor, dtype: torch.dtype) -> Tensor:
    """A parameter's value in `dtype` with the rows of all ranks, on its device. A collective if it is cut."""
    cut, value = shard_of(param), param.detach()
    if cut is None or not cut.split:
        return value.to(dtype)
    return gathered(cut, None, value.to(dtype), dtype)


def digest(model: nn.Module, world: World) -> str:
    """SHA-256 of names and values of the masters, the same for any number of ranks. Collective.

    Each rank hashes its blocks of 128 rows; the hash of a matrix is that of its blocks' hashes, in their order.
    """
    own = {name: _block_digests(p) for name, p in sorted(model.named_parameters())}
    every = world.gather(own)
    total = hashlib.sha256()
    for name, p in sorted(model.named_parameters()):
        cut = shard_of(p)
        held = every if cut is not None and cut.split else every[:1]
        total.update(f"{name} {p.dtype} {part_of(p).size} {[d for rank in held for d in rank[name]]}\n".encode())
    return total.hexdigest()


def _block_digests(param: Tensor) -> list[str]:
    cut, value = shard_of(param), param.detach()
    blocks = [(0, len(value))] if cut is None else blocks_of(cut.parts(cut.world.rank))
    return [_sha256(value[start:stop]) for start, stop in blocks]


def _sha256(value: Tensor) -> str:
    return hashlib.sha256(value.contiguous().view(torch.uint8).cpu().numpy().data).hexdigest()
