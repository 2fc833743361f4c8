"""A model whose master weights are spread over ranks: cutting it, and the way back to whole weights.

Matrices (linears, embedding, lm_head, value head) become parameters of this rank's rows (`shards.py`); vectors (norms,
biases) stay whole on every rank. What `publish` makes is whole on every rank, so forward and backward passes need no
communication. Gradients of whole matrices go to a sink (`kernels.gradient`), never to `.grad` directly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from jetrl.model.linear import FlowLinear
from jetrl.model.published import Published
from jetrl.model.shards import Shard, gathered, shard, shard_of
from jetrl.parallel.world import World


def shard_model(model: nn.Module, world: World) -> None:
    """Keep this rank's rows of every matrix of `model`, which has its whole weights here. Publish afterwards.

    In a world of one the parameters stay as they are and only learn their sections (for the gradient norm).
    Optimizers come after this: they hold the parameters that it makes.
    """
    for module, sections in _matrices(model):
        old = module.weight
        known = shard_of(old)
        assert known is None or known == shard(sections, world), "the model is sharded already"
        if known is None:
            _cut(module, shard(sections, world))
    if not world.alone:
        model.to(next(model.parameters()).device)  # forgets the operands that were made from published weights


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
        rows = nn.Parameter(cut.own(old.detach()).clone(), requires_grad=old.requires_grad)
        rows.__dict__.update(old.__dict__)  # how gradients are held
        if getattr(old, "grad_dtype", None) is not None:
            rows.grad_dtype = old.grad_dtype  # type: ignore[attr-defined]
        module.weight = rows
        module.published = torch.empty(0)
    module.weight.shard = cut  # type: ignore[attr-defined]


def full_state(model: nn.Module, everywhere: bool = False) -> dict[str, Tensor]:
    """`state_dict` with whole matrices, in host memory: on rank 0, or on every rank. Collective, one by one.

    Each tensor is a copy. The other ranks get {}.
    """
    keeps = everywhere or all(cut is None or cut.world.first for cut in map(shard_of, model.parameters()))
    state: dict[str, Tensor] = {}
    for name, param in model.named_parameters():
        cut, value = shard_of(param), param.detach()
        if cut is not None and cut.split:
            value = gathered(cut, None, value, value.dtype)
        if keeps:
            state[name] = value.to("cpu", copy=True)
    return state


@torch.no_grad()
def load_rows(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """`load_state_dict` of whole weights: each rank takes its rows. Publish afterwards. Not collective.

    A value is read once and not kept, so `state` may make them as they are asked for. Raises ValueError for other names
    or shapes than the model's.
    """
    params = dict(model.named_parameters())
    if state.keys() != params.keys():
        raise ValueError(f"missing or unknown weights: {sorted(state.keys() ^ params.keys())[:8]}")
    for name, param in params.items():
        cut, value = shard_of(param), state[name]
        whole = param.shape if cut is None else (cut.num_rows, *param.shape[1:])
        if value.shape != whole:
            raise ValueError(f"{name} is {tuple(value.shape)}, the model has {tuple(whole)}")
        param.copy_(value if cut is None else cut.own(value))
