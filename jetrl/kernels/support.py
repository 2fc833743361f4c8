"""What the backends of a GPU need of a machine. Looked at before one is imported, and by `jetrl doctor`.

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
from jetrl.kernels import tiles
from jetrl.requirements import install, packages, reinstall

BACKENDS = ("hopper", "hopper_scaled_mm")  # of `dispatch.BACKENDS`, those that need all this
CAPABILITY = (9, 0)  # Hopper
EXTRA = "hopper"  # of pyproject.toml: their packages, in exact versions
PORTABLE, PORTABLE_EXTRA = "triton", "gpu"  # the backend for other GPUs, and its packages


def capability() -> tuple[int, int] | None:
    """The compute capability of the GPU that this process uses; None without one."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


def extra_for(found: tuple[int, int] | None) -> str:
    """The extra with the kernels that `kernels = "auto"` takes on such a GPU."""
    return EXTRA if found in (None, CAPABILITY) else PORTABLE_EXTRA


def refusals(backend: str = "hopper") -> tuple[str, ...]:
    """Why a backend of GPUs cannot run on this machine, each with what to do; empty where it can."""
    portable = backend == PORTABLE
    reasons = (_any_gpu(), _packages(PORTABLE_EXTRA)) if portable else (_gpu(), _packages(EXTRA), _toolkit())
    return tuple(reason for reason in reasons if reason)


def require(backend: str) -> None:
    """Raise one UserError with all of `refusals` if there are any and the backend needs what is missing."""
    reasons = refusals(backend) if backend in (*BACKENDS, PORTABLE) else ()
    if reasons:
        kernels = PORTABLE if backend == PORTABLE else "hopper"
        raise UserError(f"the {kernels} kernels cannot run here: " + " ".join(reasons))


def require_precision(backend: str, precision: str) -> None:
    """UserError where the GPU's tensor cores do not multiply the codes of a precision."""
    found = capability()
    if backend != PORTABLE or precision not in ("fp8", "fp8_rollout") or found is None or found >= tiles.FP8_FROM:
        return
    raise UserError(
        f'precision = "{precision}" multiplies E4M3 in tensor cores, which begin with compute capability '
        f"{_dotted(tiles.FP8_FROM)} (RTX 40, L4, L40S), and {torch.cuda.get_device_name()} has {_dotted(found)}. Set "
        'precision = "w8a16": the same FP8 weights, with BF16 activations on both sides. Or "bf16".'
    )


def _dotted(found: tuple[int, int]) -> str:
    return ".".join(map(str, found))


def _no_gpu() -> str | None:
    return None if torch.cuda.is_available() else 'torch sees no GPU: set device = "cpu", or fix the driver.'


def _gpu() -> str | None:
    if reason := _no_gpu():
        return reason
    found = torch.cuda.get_device_capability()
    if found == CAPABILITY:
        return None
    needed = f"they need compute capability {_dotted(CAPABILITY)} (H100, H200)"
    other = f'kernels = "{PORTABLE}", or "auto"' if found >= tiles.LEAST else 'device = "cpu"'
    return f"{needed}, and {torch.cuda.get_device_name()} has {_dotted(found)}: set {other}."


def _any_gpu() -> str | None:
    if reason := _no_gpu():
        return reason
    found = torch.cuda.get_device_capability()
    if found >= tiles.LEAST:
        return None
    needed = f"they need compute capability {_dotted(tiles.LEAST)} or more (A100, RTX 30, and later)"
    return f'{needed}, and {torch.cuda.get_device_name()} has {_dotted(found)}: set device = "cpu".'


def _packages(extra: str) -> str | None:
    wrong = [package for package in packages(extra) if not package.fits]
    return f"{', '.join(map(str, wrong))}. Run: {install(extra)}" if wrong else None


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
