"""Packages that jetrl needs, those of the GPU kernels, and the extras: versions against pyproject.toml, and imports."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator

from jetrl.doctor.finding import Finding, attempted
from jetrl.requirements import Package, extras, install, packages, reinstall

NEEDED, OPTIONAL = "Packages", "Extras (not needed by the quickstart)"
# Packages whose module has another name.
_MODULES = {
    "sgl-deep-gemm": "deep_gemm", "flash-attn-4": "flash_attn.cute.interface", "nvidia-cutlass-dsl": "cutlass",
}
_FOR = {
    "math": "the reward that checks mathematics", "gym": "reasoning-gym's tasks",
    "data": "data sets by name, parquet files",
    "optim8": "the 8-bit optimizer", "smollm2": "jetrl fetch smollm2", "track": "TensorBoard",
    "vllm": 'rollout.engine = "vllm"',
}
_NOT_SHOWN = ("gpu", "hopper", "dev")  # shown with the GPU; for work on jetrl itself


def needed() -> list[Finding]:
    """The packages that every run needs, each imported."""
    return [_finding(NEEDED, package, install(package)) for package in packages()]


def of_gpu(section: str, extra: str) -> list[Finding]:
    """The packages of the GPU kernels, each imported; all come with one extra, because they must fit together."""
    return [_finding(section, package, install(extra)) for package in packages(extra)]


def optional() -> Iterator[Finding]:
    """The extras, one line each; looked up and not imported, which would take long."""
    for extra in extras():
        if extra not in _NOT_SHOWN:
            brought = packages(extra)
            wrong = [package for package in brought if not package.fits]
            use = f" ({_FOR[extra]})" if extra in _FOR else ""
            if wrong:
                yield Finding(OPTIONAL, extra, ", ".join(map(str, wrong)) + use, "note", install(extra))
            else:
                yield Finding(OPTIONAL, extra, ", ".join(f"{p.name} {p.found}" for p in brought) + use)


def _finding(section: str, package: Package, cure: str) -> Finding:
    if not package.fits:
        return Finding(section, package.name, _version_of(package), "bad", cure)
    failed = import_error(_MODULES.get(package.name, package.name))
    if failed is None:
        return Finding(section, package.name, _version_of(package))
    text = f"{package.found}, but its import fails: {failed}"
    return Finding(section, package.name, text, "bad", reinstall(package))


def _version_of(package: Package) -> str:
    return str(package).removeprefix(package.name).strip()


def import_error(module: str) -> str | None:
    """The error with which importing a module fails; None if it works."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = attempted(lambda: importlib.import_module(module))
    return result if isinstance(result, str) else None
