"""Digests on a GPU: those of a CPU, and nothing waits for the device before they are taken."""

from __future__ import annotations

import pytest
import torch

from jetrl.kernels.update.digest import digest_of, digests
from jetrl.model.shards import Part
from jetrl.train.digests import Digests

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64], ids=str)
@pytest.mark.parametrize("shape", [(7,), (4096, 12288), (130, 4099), (3, 40)], ids=str)
def test_digests_are_those_of_the_cpu(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    size = torch.Size(shape).numel() * dtype.itemsize
    value = torch.randint(256, (size,), dtype=torch.uint8).view(dtype).view(shape)
    assert int(digest_of(value.to(CUDA))) == int(digest_of(value))


def test_many_tensors_of_all_kinds_in_one_call_are_those_of_the_cpu() -> None:
    values = []
    for shape in ((300, 4096), (70, 2 * 17 * 64), (130, 41), (4099,), (), (0, 8), (64, 5120)):
        for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64):
            size = torch.Size(shape).numel() * dtype.itemsize
            values.append(torch.randint(256, (size,), dtype=torch.uint8).view(dtype).view(shape))
    on_gpu = [value.to(CUDA) for value in values]
    on_gpu += [value[1:] for value in on_gpu if value.ndim == 2]  # addresses that are no multiple of 16 among them
    values += [value[1:] for value in values if value.ndim == 2]
    starts = list(range(len(values)))
    assert digests(on_gpu, starts).tolist() == digests(values, starts).tolist()


def test_nothing_waits_until_they_are_taken() -> None:
    value = torch.randn(8192, 4096, device=CUDA, dtype=torch.bfloat16)
    seen = Digests()
    seen.add("first", value)  # lets torch set up what it needs
    torch.cuda.set_sync_debug_mode("error")
    try:
        for number in range(3):
            seen.add(f"more {number}", value)
        seen.add_parts("parts", {"w": Part(value, tuple(value.shape), 0)})
    finally:
        torch.cuda.set_sync_debug_mode("default")
    found = seen.take()
    assert len(set(found.values())) == 1 and len(found) == 5


def test_a_digest_takes_the_time_of_one_read() -> None:
    """At least a tenth of the memory's bandwidth: 140 GB of an 8B model then take 0.3 s a step at most. The best of ten
    tries counts, as other tests may use the GPU at the same time."""
    value = torch.zeros(1 << 30, dtype=torch.float32, device=CUDA).view(-1, 4096)

    def seconds() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        digest_of(value)
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3

    assert value.nbytes / min(seconds() for _ in range(10)) > 0.45e12
