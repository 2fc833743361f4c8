"""An optimizer's state as whole tensors by name, from the ranks' rows, and back: for checkpoints.

Of a sharded parameter (`model.shards`) each rank holds moments of its own rows, and nothing where it owns none. Whole
moments are those of one process, so a checkpoint does not know how many ranks wrote it. The first rank always owns rows
(`Shard` cuts so) and says what there is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from jetrl.model.shards import Shard, shard_of
from jetrl.parallel.world import World


def full_optimizer_state(optimizer: torch.optim.Optimizer, world: World) -> dict[str, Tensor]:
    """`NUMBER.KEY` of every entry of the state, whole, in host memory: on rank 0; the others get {}. Collective."""
    state, cuts = optimizer.state_dict()["state"], _cuts(optimizer)
    if world.alone:
        return {f"{i}.{k}": _host(v) for i, slots in state.items() for k, v in slots.items()}
    found: dict[str, Tensor] = {}
    for number, key, like in world.share([
        (number, key, (value.shape, value.dtype) if _is_cut(key, value, cuts[number]) else None)
        for number, slots in state.items() for key, value in slots.items()
    ]):
        held = state.get(number, {}).get(key)
        cut = cuts[number]
        whole = held
        if cut is not None and like is not None:
            whole = _gathered(cut, held, like[0], like[1], _device(optimizer))
        if world.first:
            found[f"{number}.{key}"] = _host(whole)
    return found


def load_optimizer_state(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """The inverse, from the whole tensors on every rank: each takes its rows. Not collective."""
    full, cuts = optimizer.state_dict(), _cuts(optimizer)
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        index, key = name.split(".", 1)
        cut = cuts[int(index)]
        if cut is not None and not cut.rows[cut.world.rank]:
            continue
        if cut is not None and _is_cut(key, value, cut):
            value = _own(cut, value)
        state.setdefault(int(index), {})[key] = value
    optimizer.load_state_dict({"state": state, "param_groups": full["param_groups"]})


def _cuts(optimizer: torch.optim.Optimizer) -> list[Shard | None]:
    """How each parameter is cut, by its number in `state_dict`; None: whole on this rank."""
    found = [shard_of(p) for group in optimizer.param_groups for p in group["params"]]
    return [cut if cut is not None and cut.split else None for cut in found]


def _is_cut(key: str, value: Any, cut: Shard | None) -> bool:
    """Whether an entry has a part for each row; not so the count of steps, and the table of 8-bit codes."""
    return cut is not None and isinstance(value, Tensor) and value.ndim > 0 and not key.endswith(".qmap")


def _device(optimizer: torch.optim.Optimizer) -> torch.device:
    return optimizer.param_groups[0]["params"][0].device  # type: ignore[no-any-return]


def _gathered(cut: Shard, held: Tensor | None, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The whole of an entry with `shape` on rank 0: as many elements a row everywhere, in rows [N, K] or flat."""
    lengths = [rows * shape.numel() // cut.rows[0] for rows in cut.rows]
    flat = torch.empty(sum(lengths), dtype=dtype, device=device)
    if held is not None:
        flat.split(lengths)[cut.world.rank].copy_(held.reshape(-1))
    cut.world.gather_rows(flat, lengths)
    return flat.view(cut.num_rows, *shape[1:]) if len(shape) > 1 else flat


def _own(cut: Shard, whole: Tensor) -> Tensor:
    """A copy of this rank's part: a view would keep the whole."""
    if whole.ndim > 1:
        return cut.own(whole).clone()
    ends = [sum(cut.rows[:r]) * whole.numel() // cut.num_rows for r in (cut.world.rank, cut.world.rank + 1)]
    return whole[ends[0] : ends[1]].clone()


def _host(value: Any) -> Tensor:
    return torch.as_tensor(value).detach().cpu().contiguous()
