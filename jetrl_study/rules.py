"""When an arm has failed: rules that are fixed before a study runs, applied to each run by itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

Series = tuple[Sequence[int], Sequence[float]]  # steps, values

ACCURACY_SHARE, ACCURACY_FLOOR = 0.5, 0.1
ENTROPY_SHARE, ENTROPY_WINDOW = 0.05, 5
GRADIENT_FACTOR, GRADIENT_HISTORY, GRADIENT_RUN = 10.0, 10, 3

RULES = {
    "non-finite": "Logits, loss or gradients are NaN or infinite; the run ends there.",
    "accuracy": f"Held-out accuracy is below {ACCURACY_SHARE:g} of the run's best so far, if that was at least "
    f"{ACCURACY_FLOOR:g}. A later evaluation above that share is reported as a recovery.",
    "entropy": f"The mean entropy of {ENTROPY_WINDOW} steps is below {ENTROPY_SHARE:g} of that of the first "
    f"{ENTROPY_WINDOW} steps, while held-out accuracy is not above that before training.",
    "gradient": f"The gradient norm is above {GRADIENT_FACTOR:g} times the median of all earlier steps (at least "
    f"{GRADIENT_HISTORY}) in {GRADIENT_RUN} steps in a row.",
}


@dataclass(frozen=True, slots=True)
class Failure:
    """What failed by which of `RULES`, at which step, and whether it came back."""

    rule: str
    step: int
    text: str
    recovered: bool = False


def failures(accuracy: Series, entropy: Series, grad_norm: Series, non_finite_step: int | None = None) -> list[Failure]:
    """Every rule that a run breaks, at the first step at which it does."""
    found = [] if non_finite_step is None else [
        Failure("non-finite", non_finite_step, "NaN or infinity ended the run")
    ]
    for one in (accuracy_failure(accuracy), entropy_failure(entropy, accuracy), gradient_failure(grad_norm)):
        if one is not None:
            found.append(one)
    return sorted(found, key=lambda failure: failure.step)


def accuracy_failure(accuracy: Series) -> Failure | None:
    """Held-out accuracy that has fallen."""
    best, at = -math.inf, 0
    for place, (step, value) in enumerate(zip(*accuracy, strict=True)):
        if best >= ACCURACY_FLOOR and value < ACCURACY_SHARE * best:
            later = accuracy[1][place + 1 :]
            recovered = bool(later) and later[-1] >= ACCURACY_SHARE * best
            return Failure("accuracy", step, f"{value:.1%} after {best:.1%} at step {at}", recovered)
        if value > best:
            best, at = value, step
    return None


def entropy_failure(entropy: Series, accuracy: Series) -> Failure | None:
    """A policy that has become certain without having become better."""
    steps, values = entropy
    if len(values) <= ENTROPY_WINDOW or not accuracy[1]:
        return None
    first = fmean(values[:ENTROPY_WINDOW])
    for end in range(ENTROPY_WINDOW + 1, len(values) + 1):
        now, step = fmean(values[end - ENTROPY_WINDOW : end]), steps[end - 1]
        known = [value for at, value in zip(*accuracy, strict=True) if at <= step]
        if now < ENTROPY_SHARE * first and known and known[-1] <= accuracy[1][0]:
            return Failure("entropy", step, f"{now:.3g} after {first:.3g}")
    return None


def gradient_failure(grad_norm: Series) -> Failure | None:
    """Gradients that are suddenly much larger."""
    steps, values = grad_norm
    in_a_row = 0
    for place in range(GRADIENT_HISTORY, len(values)):
        usual = median(values[: place - in_a_row])
        in_a_row = in_a_row + 1 if values[place] > GRADIENT_FACTOR * usual > 0 else 0
        if in_a_row == GRADIENT_RUN:
            return Failure("gradient", steps[place], f"{values[place]:.3g} where {usual:.3g} was usual")
    return None
