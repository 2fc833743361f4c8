"""A tiny certificate on this machine: the path of a run, from the choice of the device to its kernels."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from jetrl.api import load_for_parity
from jetrl.doctor.finding import attempted
from jetrl.kernels.support import capability
from jetrl.kernels.tiles import FP8_FROM
from jetrl.parity.certificate import Certificate, Workload, certify
from jetrl.parity.rows import page_size_of

PRECISION, WITHOUT_FP8 = "fp8", "w8a16"  # the second where tensor cores have no FP8


@dataclass(frozen=True, slots=True)
class Trial:
    """The certificate of the quickstart's shape on a device, or why there is none."""

    asked: str  # "auto", as in a recipe that says nothing, or "cpu"
    device: str  # what that means here: "cuda" or "cpu"
    certificate: Certificate | None
    failure: str | None
    seconds: float

    @property
    def ok(self) -> bool:
        return self.certificate is not None and self.certificate.ok


def trials() -> list[Trial]:
    """What `device = "auto"` does here; if that takes the GPU and fails, the CPU as well."""
    first = trial("auto")
    return [first] if first.ok or first.device == "cpu" else [first, trial("cpu")]


def trial(asked: str) -> Trial:
    """Build the quickstart's model and certify it, as a run with `device = asked` would."""
    device = "cuda" if asked == "auto" and torch.cuda.is_available() else "cpu"
    start = time.perf_counter()
    result = attempted(lambda: _certificate(asked))
    seconds = time.perf_counter() - start
    if isinstance(result, str):
        return Trial(asked, device, None, result.removeprefix("UserError: "), seconds)
    return Trial(asked, torch.device(result.device).type, result, None, seconds)


def _certificate(asked: str) -> Certificate:
    found = capability() if asked == "auto" else None
    precision = PRECISION if found is None or found >= FP8_FROM else WITHOUT_FP8
    model, name, _ = load_for_parity("", precision, asked)
    work = Workload(num_sequences=3, max_prompt=16, new_tokens=8, page_size=page_size_of(model))
    return certify(model, work, name, lambda text: None)
