"""Checkpoints that are written beside the run: whether they may be, from which memory, and when the run waits for them.

A copy of masters and moments in host memory is made while the next rollout goes on, and written from there. The run
waits where that copy is not made yet when the weights are to change, where the next checkpoint is due before this one
is on the disk, and at its end.
"""

from __future__ import annotations

import socket
import warnings
from collections.abc import Callable, Mapping

import torch

from jetrl.config import Config
from jetrl.errors import Notice, UserError
from jetrl.model.shards import Part
from jetrl.parallel import host
from jetrl.parallel.agreement import common
from jetrl.parallel.world import World
from jetrl.run.checkpoint.checkpoint import Copy, Writing
from jetrl.run.fit.memory import GIB, checkpoint_bytes, host_moments
from jetrl.spec import ModelSpec
from jetrl.train.offload import HostMemory

_SHARE = 0.6  # of the free host memory; the rest is for environments, the files' pages, and others


class Beside:
    """The checkpoint of a run that is being written, if any. `copies`: whether one may be written beside the run."""

    def __init__(self, copies: bool = False) -> None:
        self.copies = copies
        self._memory = HostCopy()
        self._writing: Writing | None = None
        self._seconds: float | None = None  # that the last one took, until it is logged
        self.size = 0  # bytes of the one that is being written

    def copy_of(self, parts: Mapping[str, Part]) -> Copy | None:
        """What copies these parts, as they are at this point of the GPU's work; None: the run waits instead."""
        return self._memory.after(parts) if self.copies else None

    def start(self, writing: Writing, size: int) -> None:
        """Take charge of a checkpoint of `size` bytes that has begun, after `finish`."""
        assert self._writing is None
        self._writing, self.size = writing, size

    @property
    def writes(self) -> bool:
        """Whether a checkpoint has begun and is not known to be on the disk. The same on all ranks."""
        return self._writing is not None

    def release(self) -> None:
        """Before masters or moments change: returns once the checkpoint needs them no more. Not collective."""
        if self._writing is not None:
            self._writing.release()

    def look(self) -> None:
        """Raise what kept the checkpoint from the disk, if it has ended. Collective."""
        if self._writing is not None and self._writing.done():
            self.finish()

    def finish(self, show: Callable[[int], None] = lambda _: None) -> None:
        """Returns once the checkpoint is on the disk, if there is one; raises what kept it from that. Collective.

        While it waits, `show` is called with the bytes that are written.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            self.size = 0
            try:
                writing.finish(show)
            except BaseException:
                writing.abandon()
                raise
            self._seconds = writing.seconds

    def abandon(self) -> None:
        """At an end that waits for nothing: what is written is a whole checkpoint, or none. Not collective."""
        if self._writing is not None:
            self._writing.abandon()

    def take_metrics(self) -> dict[str, float]:
        """`perf/checkpoint_beside_s` once for each checkpoint: the seconds that writing it took beside the run."""
        seconds, self._seconds = self._seconds, None
        return {} if seconds is None else {"perf/checkpoint_beside_s": seconds}


class HostCopy:
    """Host memory for copies of parts. It is kept from one copy to the next: locking pages takes longer than filling
    them."""

    def __init__(self) -> None:
        self._locked, self._kept = HostMemory(), dict[str, torch.Tensor]()

    def after(self, parts: Mapping[str, Part]) -> Copy:
        """What copies the parts, in a thread: as they are now, when the GPU's work so far is done."""
        device = next((part.value.device for part in parts.values() if part.value.is_cuda), None)
        if device is None:
            return self._copied
        here = torch.cuda.current_stream(device).record_event()

        def copied(parts: Mapping[str, Part]) -> dict[str, Part]:
            stream = torch.cuda.Stream(device)  # copies go beside the rollout's work
            with torch.cuda.stream(stream):
                stream.wait_event(here)
                found = self._copied(parts)
            stream.synchronize()
            return found

        return copied

    def _copied(self, parts: Mapping[str, Part]) -> dict[str, Part]:
        copies = {name: part._replace(value=self._place(name, part.value)) for name, part in parts.items()}
        for name, part in parts.items():
            copies[name].value.copy_(part.value, non_blocking=True)
        return copies

    def _place(self, name: str, value: torch.Tensor) -> torch.Tensor:
        kept = self._kept.get(name)
        if kept is None or (kept.shape, kept.dtype) != (value.shape, value.dtype):
            try:
                kept = self._locked.zeros(value, value.dtype)
            except UserError:  # no more pages can be locked: the same copy, only slower
                kept = torch.empty(value.shape, dtype=value.dtype)
            self._kept[name] = kept
        return kept


def beside(config: Config, spec: ModelSpec, world: World) -> Beside:
    """How this run writes its checkpoints, by `checkpoint.background` and the host memory that is free. Collective."""
    asked = config.checkpoint.background
    if not config.checkpoint.save_interval or asked == "off":
        return Beside()
    own = checkpoint_bytes(config, spec, world.size), host_moments(config, spec, world.size)
    short = _short(world.gather((socket.gethostname(), *own, host.memory()[0])))
    if short is None:
        return Beside(copies=True)
    if asked == "on":
        raise common(UserError(
            f'checkpoint.background = "on": {short}. Set it to "off" (the run waits for each checkpoint), lower the '
            "host memory that other programs use, or choose a smaller train.optimizer_dtype or train.master_dtype."
        ))
    if world.first:
        warnings.warn(f'{short}: the run waits for each checkpoint. Set checkpoint.background = "off" to hide this '
                      "warning.", Notice, stacklevel=2)
    return Beside()


def _short(ranks: list[tuple[str, int, int, int]]) -> str | None:
    """Of (host, bytes of a copy, bytes of moments there, free bytes) by rank: the host that has too little, in words;
    None if every one has enough."""
    hosts = dict[str, tuple[int, int, int]]()
    for name, copy, moments, free in ranks:
        copies, others, least = hosts.get(name, (0, 0, free))
        hosts[name] = copies + copy, others + moments, min(least, free)
    for name, (copies, moments, free) in hosts.items():
        if copies + moments > _SHARE * free:
            after = f", {moments / GIB:.1f} of it for offloaded moments" if moments else ""
            return (
                f"a copy of what a checkpoint holds takes {copies / GIB:.1f} GiB of host memory, and {name} has "
                f"{free / GIB:.1f} GiB free{after} ({_SHARE:.0%} of it may be used)"
            )
    return None
