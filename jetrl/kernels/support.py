"""What the Hopper backends need of a machine. Looked at before one is imported, and by `jetrl doctor`.

Nothing here is imported from the packages that are checked, so a wrong version of one ends in a message, not in
whatever its import happens to fail with.
"""

from __future__ import annotations

import getpass
import os
import shutil
import tempfile
from pathlib import Path

import torch

from jetrl.errors import UserError
from jetrl.requirements import install, packages, reinstall

BACKENDS = ("hopper", "hopper_scaled_mm")  # of `dispatch.BACKENDS`, those that need all this
CAPABILITY = (9, 0)  # Hopper
EXTRA = "hopper"  # of pyproject.toml: their packages, in exact versions


def refusals() -> tuple[str, ...]:
    """Why the Hopper backends cannot run on this machine, each with what to do; empty where they can."""
    return tuple(reason for reason in (_gpu(), _packages(), _toolkit()) if reason)


def require(backend: str) -> None:
    """Raise one UserError with all of `refusals` if there are any and the backend needs what is missing."""
    reasons = refusals() if backend in BACKENDS else ()
    if reasons:
        raise UserError("the hopper kernels cannot run here: " + " ".join(reasons))


def _gpu() -> str | None:
    if not torch.cuda.is_available():
        return 'torch sees no GPU: set device = "cpu", or fix the driver.'
    found = torch.cuda.get_device_capability()
    if found == CAPABILITY:
        return None
    name, (major, minor) = torch.cuda.get_device_name(), CAPABILITY
    needed = f"they need compute capability {major}.{minor} (H100, H200)"
    return f'{needed}, and {name} has {found[0]}.{found[1]}: set device = "cpu".'


def _packages() -> str | None:
    wrong = [package for package in packages(EXTRA) if not package.fits]
    return f"{', '.join(map(str, wrong))}. Run: {install(EXTRA)}" if wrong else None


def _toolkit() -> str | None:
    if cuda_toolkit() is None:
        return "DeepGEMM compiles its kernels with nvcc, which is missing: install the CUDA toolkit, or set CUDA_HOME."
    return None


def cuda_toolkit() -> Path | None:
    """Where DeepGEMM looks for nvcc, in its order: CUDA_HOME, CUDA_PATH, the PATH, /usr/local/cuda."""
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if named:
        return Path(named)
    on_path, usual = shutil.which("nvcc"), Path("/usr/local/cuda")
    return Path(on_path).parent.parent if on_path else usual if usual.exists() else None


def broken(name: str, error: Exception) -> UserError:
    """The error for a package in the right version whose import fails all the same."""
    (package,) = (package for package in packages(EXTRA) if package.name == name)
    return UserError(
        f"the hopper kernels need {package}, and its import fails: {error}. Install it again: {reinstall(package)}"
    )


def flash_cache() -> Path:
    """Where FlashAttention-4 keeps compiled kernels, which is off in the package unless it is given a folder."""
    named = os.environ.get("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR")
    return Path(named) if named else Path.home() / ".cache" / "jetrl" / "flash_attention_4"


def caches() -> dict[str, Path]:
    """Where the compilers keep kernels from one process to the next, by compiler; variables of theirs count first."""
    home, set_to = Path.home(), os.environ.get
    triton = Path(set_to("TRITON_HOME") or home) / ".triton" / "cache"
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as in some containers; torch takes the number too
        user = f"uid_{os.getuid()}"
    inductor = Path(tempfile.gettempdir()) / f"torchinductor_{user}"
    return {
        "Triton": Path(set_to("TRITON_CACHE_DIR") or triton),
        "DeepGEMM": Path(set_to("DG_JIT_CACHE_DIR") or home / ".deep_gemm"),
        "FlashAttention-4": flash_cache(),
        "torch.compile": Path(set_to("TORCHINDUCTOR_CACHE_DIR") or inductor),
    }
