"""Tables of the rotary embedding."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from jetrl.spec import RopeSpec, YarnSpec


def rope_tables(
    rope: RopeSpec, head_dim: int, max_position: int, rotary_dim: int | None = None
) -> tuple[Tensor, Tensor]:
    """FP32 cos and sin [max_position, H/2] of the FP32 angles `position * inv_freq`, with Llama 3's or YaRN's scaling.

    With `rotary_dim`, a part of a head is rotated: the other pairs have an angle of 0 (`rotary_order`).
    """
    rotated = rotary_dim or head_dim
    inv_freq = 1.0 / rope.theta ** (np.arange(0, rotated, 2, dtype=np.float64) / rotated)
    if rope.factor is not None:
        wavelength = 2 * np.pi / inv_freq
        low = rope.original_max_position / rope.low_freq_factor
        high = rope.original_max_position / rope.high_freq_factor
        smooth = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
            rope.high_freq_factor - rope.low_freq_factor
        )
        between = (1 - smooth) * inv_freq / rope.factor + smooth * inv_freq
        inv_freq = np.where(wavelength > low, inv_freq / rope.factor, np.where(wavelength < high, inv_freq, between))
    factor = 1.0
    if rope.yarn is not None:
        inv_freq, factor = _yarn(inv_freq, rope.theta, head_dim, rope.yarn), rope.yarn.of_tables
    inv_freq = np.concatenate([inv_freq, np.zeros((head_dim - rotated) // 2)])
    angles = np.arange(max_position, dtype=np.float32)[:, None] * inv_freq.astype(np.float32)
    angles = angles.astype(np.float64)
    cos, sin = (torch.from_numpy((f(angles) * factor).astype(np.float32)) for f in (np.cos, np.sin))
    return cos, sin


def _yarn(inv_freq: np.ndarray, theta: float, head_dim: int, yarn: YarnSpec) -> np.ndarray:
    """Slow frequencies divided by the factor, fast ones as they are (Peng et al., 2023, with whole bounds of the ramp,
    as DeepSeek has them)."""

    def place(turns: float) -> float:
        """Of the pair that turns so often in the original length."""
        return head_dim * math.log(yarn.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(place(yarn.beta_fast)), 0)
    high = min(math.ceil(place(yarn.beta_slow)), head_dim - 1)
    width = high - low if high != low else 0.001
    ramp = np.clip((np.arange(head_dim // 2) - low) / width, 0.0, 1.0)
    return inv_freq / yarn.factor * ramp + inv_freq * (1 - ramp)


def rotary_order(head_dim: int, rotary_dim: int) -> list[int]:
    """The places of a head in an order in which RoPE of the whole head, with `rope_tables`, rotates its first
    `rotary_dim` places alone: the first halves of all pairs, then the second ones.

    Of 8 places with 4 rotated: 0 1 4 5, 2 3 6 7. Products of heads in one order are those of heads in another.
    """
    half, rest = rotary_dim // 2, (head_dim - rotary_dim) // 2
    first = [*range(half), *range(rotary_dim, rotary_dim + rest)]
    return first + [*range(half, rotary_dim), *range(rotary_dim + rest, head_dim)]
