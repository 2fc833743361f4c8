"""The GPU: driver, torch's build, the device itself, and what the kernels for it need. torch must be importable."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

from jetrl.doctor import libraries
from jetrl.doctor.finding import Finding, attempted, size
from jetrl.kernels import tiles
from jetrl.kernels.support import CAPABILITY, PORTABLE, PORTABLE_EXTRA, capability, cuda_toolkit, extra_for
from jetrl.requirements import install

SECTION = "GPU"
DRIVER = Path("/proc/driver/nvidia/version")
_LITTLE = 4 * 2**30  # bytes of free GPU memory below which something else is likely to hold it


def examine() -> list[Finding]:
    """What is there and what is missing. Without an NVIDIA GPU one line: nothing is missing then."""
    driver = driver_version()
    if torch.version.cuda is None:
        return [_cpu_build(driver)]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    if not available:
        return [_unusable(driver, " ".join(str(warning.message) for warning in said))]
    found = [Finding(SECTION, "driver", f"{driver or 'unknown'}, CUDA {torch.version.cuda} in torch"), *_devices()]
    found += libraries.of_gpu(SECTION, extra_for(capability()))
    return [*found, _toolkit()] if capability() == CAPABILITY else found


def driver_version() -> str | None:
    """The version of the NVIDIA driver; None where there is none."""
    if DRIVER.is_file():
        found = re.search(r"\b\d{3,}\.\d[\d.]*\b", DRIVER.read_text())  # such as 580.65.06
        if found:
            return found[0]
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = attempted(lambda: subprocess.run(command, capture_output=True, text=True, timeout=20, check=True))
    lines = [] if isinstance(done, str) else done.stdout.split()
    return lines[0] if lines else None


def _cpu_build(driver: str | None) -> Finding:
    text = f"torch {torch.__version__} is built for CPUs"
    if driver is None:
        return Finding(SECTION, "GPU", f"none; {text}", "note")
    cure = f"pip uninstall -y torch && {install(PORTABLE_EXTRA)}  (from an index that serves CUDA builds)"
    return Finding(SECTION, "GPU", f"not used: there is a driver ({driver}), but {text}", "bad", cure)


def _unusable(driver: str | None, said: str) -> Finding:
    """torch is built for CUDA but sees no GPU; `said` is its own reason, if it gave one."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and driver is not None:
        return Finding(SECTION, "GPU", f'hidden by CUDA_VISIBLE_DEVICES="{hidden}"', "note", "unset it to use the GPU")
    if driver is None:
        return Finding(SECTION, "GPU", "none: there is no NVIDIA driver", "note")
    text = f"driver {driver}, but torch (CUDA {torch.version.cuda}) sees no GPU" + (f": {said}" if said else "")
    return Finding(SECTION, "GPU", text, "bad", f"install a driver for CUDA {torch.version.cuda} or newer")


def _devices() -> Iterator[Finding]:
    """One line for each GPU. jetrl runs on the first, so only its memory is asked for."""
    for number in range(torch.cuda.device_count()):
        name, (major, minor) = torch.cuda.get_device_name(number), torch.cuda.get_device_capability(number)
        text, what = f"{name}, compute capability {major}.{minor}", f"cuda:{number}"
        if number > 0:
            yield Finding(SECTION, what, f"{text}, not used: jetrl takes the first (CUDA_VISIBLE_DEVICES)", "note")
            continue
        memory = attempted(lambda: torch.cuda.mem_get_info(0))
        if isinstance(memory, str):
            yield Finding(SECTION, what, f"{text}, {memory}", "bad", "end what holds the GPU (nvidia-smi lists it)")
            continue
        text += f", {size(memory[0])} free of {size(memory[1])}"
        text += f"; {runs((major, minor))}"
        if (major, minor) < tiles.LEAST:
            yield Finding(SECTION, what, text, "bad", 'set device = "cpu": "auto" takes the GPU and stops')
        elif memory[0] < _LITTLE:
            yield Finding(SECTION, what, text, "note", "nvidia-smi lists the programs that hold its memory")
        else:
            yield Finding(SECTION, what, text)


def runs(found: tuple[int, int]) -> str:
    """What a GPU of this compute capability can run, in words."""
    if found < tiles.LEAST:
        return f"jetrl's GPU kernels need {tiles.LEAST[0]}.{tiles.LEAST[1]} or more (A100, RTX 30, and later)"
    kernels = "hopper" if found == CAPABILITY else PORTABLE
    fp8 = "fp8, " if found >= tiles.FP8_FROM else ""
    without = "" if fp8 else "; its tensor cores have no FP8"
    return f'runs {fp8}w8a16 and bf16 with kernels = "{kernels}"{without}'


def _toolkit() -> Finding:
    home = cuda_toolkit()
    if home is None:
        return Finding(
            SECTION, "nvcc", "not found; DeepGEMM compiles its kernels with it", "bad",
            "install the CUDA toolkit, or set CUDA_HOME to its folder",
        )
    return Finding(SECTION, "nvcc", f"CUDA toolkit in {home}")
