"""What ranks exchange arrives, whatever the sizes; one process alone needs no process group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_ranks

from jetrl.parallel.progress import LostContact
from jetrl.parallel.world import ALONE, World, contact


def everything(world: World) -> dict[str, Any]:
    rows = [3, 0, 5, 1][: world.size]
    start = sum(rows[: world.rank])
    codes = torch.zeros(sum(rows), 4).to(torch.float8_e4m3fn)
    codes[start : start + rows[world.rank]] = torch.full((rows[world.rank], 4), world.rank + 1.0).to(codes.dtype)
    world.gather_rows(codes, rows)
    even = torch.zeros(2 * world.size)
    even[2 * world.rank : 2 * world.rank + 2] = float(world.rank)
    world.gather_rows(even, [2] * world.size)
    # ranks below `senders` send; rank r sends r * 10 + s to rank s, in rows[s] rows
    sent = {}
    for senders in {1, world.size}:
        whole = torch.cat([torch.full((n, 2), world.rank * 10.0 + s) for s, n in enumerate(rows)]).to(torch.bfloat16)
        got, wait = world.send_rows(whole if world.rank < senders else whole[:0], rows, senders)
        wait()
        sent[senders] = got.tolist()
    world.barrier()
    return {
        "gather": world.gather({"rank": world.rank}), "collect": world.collect(world.rank * 10),
        "part": list(world.part("abcdefg")), "share": world.share(world.rank, 0),
        "codes": codes.float().tolist(), "even": even.tolist(), "sent": sent,
    }


@pytest.mark.parametrize("size", [1, 2, 4])
def test_everything_arrives(size: int) -> None:
    found = [everything(ALONE)] if size == 1 else run_ranks(everything, size)
    rows = [3, 0, 5, 1][:size]
    assert "".join(letter for one in found for letter in one["part"]) == "abcdefg"
    assert {len(one["part"]) for one in found} <= {7 // size, 7 // size + 1}
    for rank, one in enumerate(found):
        assert one["gather"] == [{"rank": r} for r in range(size)] and one["share"] == 0
        assert one["collect"] == ([r * 10 for r in range(size)] if rank == 0 else [])
        assert one["codes"] == [[r + 1.0] * 4 for r, n in enumerate(rows) for _ in range(n)]
        assert one["even"] == [float(r) for r in range(size) for _ in range(2)]
        for senders, got in one["sent"].items():
            assert got == [[[r * 10.0 + rank] * 2] * rows[rank] for r in range(senders)]


@pytest.mark.parametrize("error, kind", [
    (torch.OutOfMemoryError("CUDA out of memory."), torch.OutOfMemoryError),
    (RuntimeError("CUDA error: out of memory"), RuntimeError),
    (RuntimeError("Connection closed by peer"), LostContact),
])
def test_a_full_gpu_is_not_lost_contact(error: RuntimeError, kind: type[RuntimeError]) -> None:
    with pytest.raises(RuntimeError) as told, contact("gather"):
        raise error
    assert type(told.value) is kind
