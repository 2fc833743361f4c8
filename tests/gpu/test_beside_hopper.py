"""Checkpoints beside a run on a GPU: the copy is of the moment at which it was asked for, in locked memory."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import ARCH, files_of, tiny_run

from jetrl.model.shards import Part
from jetrl.run.checkpoint.beside import HostCopy

pytestmark = pytest.mark.gpu
GPU: dict[str, Any] = {"device": "cuda", "model.arch": ARCH | {"hidden_size": 64, "head_dim": 32}}


def test_a_copy_waits_for_the_work_before_it_and_runs_beside_the_work_after_it() -> None:
    memory, value = HostCopy(), torch.zeros(1 << 26, device="cuda")
    parts = {"on": Part(value, tuple(value.shape), 0), "host": Part(torch.arange(5.0), (5,), 0)}
    other = torch.randn(4096, 4096, device="cuda")
    for number in (1, 2):
        torch.cuda._sleep(200_000_000)  # before the value is there
        value.fill_(number)
        copy, found = memory.after(parts), {}
        thread = threading.Thread(target=lambda copy=copy, found=found: found.update(copy(parts)))
        thread.start()
        for _ in range(50):
            other = (other @ other).clamp_(-1, 1)
        thread.join()
        assert bool((found["on"].value == number).all()) and torch.equal(found["host"].value, torch.arange(5.0))
        assert found["on"].value.device.type == "cpu"
        if number == 1:
            first = found["on"].value.data_ptr()
        assert found["on"].value.data_ptr() == first
    assert memory._locked._locked, "pages are locked: the copy is not staged by the driver"


@pytest.mark.parametrize("changes", [
    pytest.param({}, id="plain"),
    pytest.param({"train.optimizer_dtype": "8bit"}, id="8-bit moments"),
    pytest.param({"train.optimizer_dtype": "bfloat16", "train.offload_optimizer": True}, id="offloaded moments"),
])
def test_the_files_are_those_of_a_run_that_waits(changes: dict[str, Any], tmp_path: Path) -> None:
    if changes.get("train.optimizer_dtype") == "8bit":
        pytest.importorskip("torchao")
    each = GPU | changes | {"checkpoint.save_interval": 1}
    waits = tiny_run(tmp_path, each | {"checkpoint.background": "off"}, "waits")
    runs = tiny_run(tmp_path, each | {"checkpoint.background": "on"}, "runs")
    assert files_of(runs / "checkpoints") == files_of(waits / "checkpoints")
