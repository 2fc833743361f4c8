"""What the doctor says of GPUs that this machine does not have: torch and the driver are played."""

from __future__ import annotations

import os
import subprocess
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from jetrl.doctor import gpu, libraries
from jetrl.doctor.finding import Finding
from jetrl.kernels import support

Machine = Callable[..., dict[str, Finding]]


@pytest.fixture
def look(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    """Findings by name on a machine with this driver, build of torch and GPUs."""

    def examine(
        driver: str | None = "580.65.06", build: str | None = "13.0", gpus: int = 1,
        capability: tuple[int, int] = (9, 0), free: float | None = 130.0, said: str = "",
    ) -> dict[str, Finding]:
        def available() -> bool:
            if said:
                warnings.warn(said, stacklevel=2)
            return gpus > 0

        def memory(number: int) -> tuple[int, int]:
            if free is None:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return int(free * 2**30), 140 * 2**30

        proc = tmp_path / "version"
        if driver is not None:
            proc.write_text(f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {driver}  Release Build\n")
        monkeypatch.setattr(gpu, "DRIVER", proc)
        monkeypatch.setattr(gpu.shutil, "which", lambda name: None)
        monkeypatch.setattr(torch.version, "cuda", build)
        monkeypatch.setattr(torch.cuda, "is_available", available)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda number=0: f"NVIDIA G{number}")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda number=0: capability)
        monkeypatch.setattr(torch.cuda, "mem_get_info", memory)
        return {finding.what: finding for finding in gpu.examine()}

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(libraries, "of_gpu", lambda section, extra: [Finding(section, "packages", extra)])
    monkeypatch.setenv("CUDA_HOME", "/cuda")
    return examine


def test_a_machine_without_a_gpu_lacks_nothing(look: Machine) -> None:
    for found in (look(driver=None, build=None), look(driver=None, gpus=0)):
        assert list(found) == ["GPU"] and found["GPU"].level == "note" and found["GPU"].cure is None
        assert found["GPU"].found.startswith("none")


def test_a_cpu_build_of_torch_next_to_a_driver(look: Machine) -> None:
    finding = look(build=None)["GPU"]
    assert finding.level == "bad" and "580.65.06" in finding.found and "built for CPUs" in finding.found
    assert 'pip install "jetrl[gpu]"' in (finding.cure or "")


def test_a_driver_that_is_too_old(look: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    finding = look(gpus=0, said="The NVIDIA driver on your system is too old")["GPU"]
    assert finding.level == "bad" and "too old" in finding.found and "CUDA 13.0" in (finding.cure or "")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    hidden = look(gpus=0)["GPU"]
    assert hidden.level == "note" and 'CUDA_VISIBLE_DEVICES=""' in hidden.found


def test_a_hopper_gpu(look: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    found = look()
    assert list(found) == ["driver", "cuda:0", "packages", "nvcc"] and {f.level for f in found.values()} == {"ok"}
    assert found["driver"].found == "580.65.06, CUDA 13.0 in torch" and found["packages"].found == "hopper"
    text = "NVIDIA G0, compute capability 9.0, 130.0 GiB free of 140.0 GiB"
    assert found["cuda:0"].found == f'{text}; runs fp8, w8a16 and bf16 with kernels = "hopper"'
    assert found["nvcc"].found == "CUDA toolkit in /cuda"
    monkeypatch.setattr(gpu, "cuda_toolkit", lambda: None)
    assert look()["nvcc"].level == "bad"
    assert look(gpus=2)["cuda:1"].level == "note" and "not used" in look(gpus=2)["cuda:1"].found


def test_a_gpu_that_is_not_hopper(look: Machine) -> None:
    """The doctor and a run agree: what is bad here is a reason of `refusals`."""
    finding = look(capability=(7, 5))["cuda:0"]
    assert finding.level == "bad" and "need 8.0 or more" in finding.found
    assert finding.cure == 'set device = "cpu": "auto" takes the GPU and stops'
    for backend in ("hopper", "triton"):
        assert any("NVIDIA G0 has 7.5" in reason for reason in support.refusals(backend))
    look(capability=(9, 0))
    assert not any("compute capability" in reason for reason in support.refusals())


@pytest.mark.parametrize(("capability", "words"), [
    ((8, 0), 'runs w8a16 and bf16 with kernels = "triton"; its tensor cores have no FP8'),
    ((8, 9), 'runs fp8, w8a16 and bf16 with kernels = "triton"'),
    ((10, 0), 'runs fp8, w8a16 and bf16 with kernels = "triton"'),
])
def test_other_gpus_need_neither_nvcc_nor_hoppers_libraries(
    look: Machine, capability: tuple[int, int], words: str
) -> None:
    found = look(capability=capability)
    assert list(found) == ["driver", "cuda:0", "packages"] and {f.level for f in found.values()} == {"ok"}
    assert found["cuda:0"].found.endswith(words) and found["packages"].found == "gpu"


def test_a_gpu_that_others_hold(look: Machine) -> None:
    assert look(free=1.0)["cuda:0"].level == "note" and "nvidia-smi" in (look(free=1.0)["cuda:0"].cure or "")
    finding = look(free=None)["cuda:0"]
    assert finding.level == "bad" and "CUDA out of memory" in finding.found


def test_the_driver_by_nvidia_smi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Containers may have no /proc/driver; a broken nvidia-smi is no driver."""
    monkeypatch.setattr(gpu, "DRIVER", tmp_path / "none")
    program = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for text, expected in (("echo 580.159.04; echo 580.159.04", "580.159.04"), ("exit 9", None), ("true", None)):
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
        assert gpu.driver_version() == expected, text

    def hangs(*_: Any, **__: Any) -> None:
        raise subprocess.TimeoutExpired("nvidia-smi", 20)

    monkeypatch.setattr(subprocess, "run", hangs)
    assert gpu.driver_version() is None
