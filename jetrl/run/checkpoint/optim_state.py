"""An optimizer's state as this rank's parts of whole tensors, by name, and back: for checkpoints.

Of a sharded parameter (`model.shards`) each rank holds moments of its own rows, and nothing where it owns none. Put
together they are those of one process, so a checkpoint does not depend on how many ranks wrote it. The first rank
always owns rows (`Shard` cuts so), so it has what is not cut: the counts of steps and the tables of 8-bit codes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from jetrl.model.master import Master
from jetrl.model.shards import Part, Shard
from jetrl.train.optim import MixedAdamW

_UNCUT = ("step", "qmap")  # the last word of keys whose entries have no part for each row


def optimizer_parts(optimizer: torch.optim.Optimizer, masters: Iterable[Master]) -> dict[str, Part]:
    """`NUMBER.KEY` of every entry of the state that this rank has. Numbers become tensors, of shape [1].

    `masters`: all that this optimizer steps, and perhaps others.
    """
    found: dict[str, Part] = {}
    steps = _steps(optimizer, masters)
    for number, slots in optimizer.state_dict()["state"].items():
        for key, value in slots.items():
            tensor = torch.as_tensor(value).detach()
            tensor = tensor if tensor.ndim else tensor.reshape(1)
            cut = _cut(steps[number], key)
            found[f"{number}.{key}"] = _part(tensor, cut) if cut else Part(tensor, tuple(tensor.shape), 0)
    return found


def load_optimizer_state(
    optimizer: torch.optim.Optimizer, masters: Iterable[Master],
    stored: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
) -> tuple[dict[str, Part], Callable[[], None]]:
    """Places for the entries that are `stored` (shape and type of the whole, by name), as parts for this rank's rows.

    Fill them, then call the function: the optimizer has this state then. Not collective.
    """
    steps, parts = _steps(optimizer, masters), dict[str, Part]()
    state: dict[int, dict[str, Tensor]] = {}
    for name, (size, dtype) in stored.items():
        number, _, key = name.partition(".")
        master = steps[int(number)]
        cut, whole = _cut(master, key), master.shard
        if whole is not None and not whole.rows[whole.world.rank]:
            continue
        shape = size if cut is None else _own_shape(size, cut)
        value = _place(optimizer, master.param, key, shape, dtype)
        state.setdefault(int(number), {})[key] = value
        parts[name] = Part(value, size, 0) if cut is None else _part(value, cut)

    def take() -> None:
        if isinstance(optimizer, MixedAdamW):
            optimizer.take({number: {**slots, "step": int(slots["step"])} for number, slots in state.items()})
            return
        for slots in state.values():
            slots["step"] = slots["step"].reshape(())
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})

    return parts, take


def _steps(optimizer: torch.optim.Optimizer, masters: Iterable[Master]) -> list[Master]:
    """What the optimizer steps, by its number in `state_dict`."""
    known = {master.param: master for master in masters}
    return [known[p] for group in optimizer.param_groups for p in group["params"]]


def _cut(master: Master, key: str) -> Shard | None:
    """How an entry of the state of this master is cut; None: whole on this rank."""
    return master.split if key.split(".")[-1] not in _UNCUT else None


def _part(value: Tensor, cut: Shard) -> Part:
    """An entry in rows [N, K], or flat with as many elements a row everywhere."""
    own = cut.rows[cut.world.rank]
    if value.ndim > 1:
        return Part(value, (cut.num_rows, *value.shape[1:]), cut.start)
    return Part(value, (value.numel() * cut.num_rows // own,), value.numel() * cut.start // own)


def _own_shape(size: tuple[int, ...], cut: Shard) -> tuple[int, ...]:
    own = cut.rows[cut.world.rank]
    return (own, *size[1:]) if len(size) > 1 else (size[0] * own // cut.num_rows,)


def _place(
    optimizer: torch.optim.Optimizer, param: nn.Parameter, key: str, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    if key == "step":
        return torch.empty(shape, dtype=dtype)
    if isinstance(optimizer, MixedAdamW):  # where they stay, perhaps in locked host memory
        return optimizer.moment(param)
    return torch.empty(shape, dtype=dtype, device=param.device)


def prefixed(prefix: str, parts: Mapping[str, Any]) -> dict[str, Any]:
    """Parts under `prefix.NAME`."""
    return {f"{prefix}.{name}": part for name, part in parts.items()}


def with_prefix(found: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Those named `prefix.NAME`, without the prefix."""
    return {name[len(prefix) + 1 :]: one for name, one in found.items() if name.startswith(f"{prefix}.")}
