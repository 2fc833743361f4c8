"""Adam's moments in host memory, streamed through the GPU while it updates (`train.offload_optimizer`).

AdamW changes each element by itself, so a parameter may be cut anywhere without changing a bit. Pieces of at most
`PIECE` elements pass through three slots on the device: one is filled, one is updated, one is emptied at a time. The
slots take 12 bytes (BF16) or 24 bytes (FP32) for each of `PIECE` elements, however large the model is.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from jetrl.errors import UserError
from jetrl.kernels.update.adamw import AdamWStep, adamw_step_

PIECE = 1 << 25  # 128 MiB of FP32: some milliseconds on the bus, so the cost of starting a copy is negligible
SLOTS = 3
_PORTABLE = 1  # cudaHostRegisterPortable


class Update(NamedTuple):
    """The arguments of `adamw_step_`; here the moments are on the host."""

    param: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    numbers: AdamWStep


@dataclass(frozen=True, slots=True)
class Lane:
    """Actions in order: a CUDA stream, or (None) the CPU, where an action has ended before the next begins."""

    stream: torch.cuda.Stream | None

    def run(self, action: Callable[[], Any], after: Any = None) -> Any:
        """Run `action`, or queue it after the event `after` of another lane; returns the event of its own end."""
        if self.stream is None:
            action()
            return None
        with torch.cuda.stream(self.stream):
            if after is not None:
                self.stream.wait_event(after)
            action()
            return self.stream.record_event()

    def finish(self) -> None:
        """Wait until all has run."""
        if self.stream is not None:
            self.stream.synchronize()


def lanes(device: torch.device) -> tuple[Lane, Lane, Lane]:
    """Where pieces are fetched, updated (the current stream) and stored. PCIe carries both directions at once."""
    if device.type != "cuda":
        return Lane(None), Lane(None), Lane(None)
    return Lane(torch.cuda.Stream(device)), Lane(torch.cuda.current_stream(device)), Lane(torch.cuda.Stream(device))


def stream_updates(updates: Iterable[Update], device: torch.device, dtype: torch.dtype, largest: int) -> None:
    """Make all updates; `dtype` is the moments', `largest` the elements of the largest parameter.

    Returns when the moments are back on the host, so that a checkpoint may read them.
    """
    fetch, work, store = lanes(device)
    size = min(PIECE, largest)
    slots = [[torch.empty(size, dtype=dtype, device=device) for _ in range(2)] for _ in range(SLOTS)]
    # earlier work on the current stream may still use the memory that the slots got
    free = [work.run(lambda: None)] * SLOTS
    try:
        for i, piece in enumerate(_pieces(updates)):
            host = (piece.exp_avg, piece.exp_avg_sq)
            m, v = moments = [buffer[: piece.param.numel()] for buffer in slots[i % SLOTS]]
            filled = fetch.run(partial(_copy, host, moments), after=free[i % SLOTS])
            updated = work.run(partial(adamw_step_, piece.param, piece.grad, m, v, piece.numbers), after=filled)
            free[i % SLOTS] = store.run(partial(_copy, moments, host), after=updated)
    finally:  # also after an error: the slots are freed then, and copies may be under way
        for lane in (fetch, work, store):
            lane.finish()


def _pieces(updates: Iterable[Update]) -> Iterator[Update]:
    for *tensors, numbers in updates:
        cut = [tensor.detach().view(-1).split(PIECE) for tensor in tensors]
        for param, grad, exp_avg, exp_avg_sq in zip(*cut, strict=True):
            yield Update(param, grad, exp_avg, exp_avg_sq, numbers)


def _copy(sources: Iterable[Tensor], targets: Iterable[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source, non_blocking=True)


class HostMemory:
    """Zeroed tensors on the host, page-locked where a GPU copies from them; unlocked when this object is deleted.

    Locked by cudaHostRegister, because torch's pinned allocator rounds every size up to a power of two. Each tensor has
    its own pages: a page must not be registered twice, nor split between two processes by a fork.
    """

    def __init__(self) -> None:
        self._locked: list[Tensor] = []
        weakref.finalize(self, _unlock, self._locked).atexit = False

    def zeros(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Zeros on the host in the shape of `like`, locked if `like` is on a GPU."""
        nbytes = like.numel() * dtype.itemsize
        if nbytes == 0:
            return torch.zeros(like.shape, dtype=dtype)
        try:
            pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise self._too_little(nbytes, str(error)) from error
        tensor = torch.frombuffer(pages, dtype=dtype).view(like.shape)
        if like.is_cuda:
            pages.madvise(mmap.MADV_DONTFORK)
            status = int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), nbytes, _PORTABLE))
            if status:
                raise self._too_little(nbytes, f"cudaHostRegister: error {status}")
            self._locked.append(tensor)
        return tensor

    def _too_little(self, nbytes: int, reason: str) -> UserError:
        held = sum(tensor.nbytes for tensor in self._locked)
        return UserError(
            f"train.offload_optimizer: no {nbytes / 2**20:.0f} MiB of locked host memory beyond {held / 2**30:.1f} GiB "
            f'({reason}). Free host memory, set train.optimizer_dtype = "bfloat16" (half of it), or switch it off.'
        )


def _unlock(tensors: list[Tensor]) -> None:
    while tensors:  # unregistered first, unmapped with the last reference
        status = int(torch.cuda.cudart().cudaHostUnregister(tensors[-1].data_ptr()))
        assert status == 0, f"cudaHostUnregister: error {status}"
        tensors.pop()
