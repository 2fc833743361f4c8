"""Tables of the rotary embedding."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from jetrl.spec import RopeSpec


def rope_tables(
    rope: RopeSpec, head_dim: int, max_position: int, rotary_dim: int | None = None
) -> tuple[Tensor, Tensor]:
    """FP32 cos and sin [max_position, H/2] of the FP32 angles `position * inv_freq`, with Llama 3 scaling.

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
    inv_freq = np.concatenate([inv_freq, np.zeros((head_dim - rotated) // 2)])
    angles = np.arange(max_position, dtype=np.float32)[:, None] * inv_freq.astype(np.float32)
    angles = angles.astype(np.float64)
    return torch.from_numpy(np.cos(angles).astype(np.float32)), torch.from_numpy(np.sin(angles).astype(np.float32))


def rotary_order(head_dim: int, rotary_dim: int) -> list[int]:
    """The places of a head in an order in which RoPE of the whole head, with `rope_tables`, rotates its first
    `rotary_dim` places alone: the first halves of all pairs, then the second ones.

    Of 8 places with 4 rotated: 0 1 4 5, 2 3 6 7. Products of heads in one order are those of heads in another.
    """
    half, rest = rotary_dim // 2, (head_dim - rotary_dim) // 2
    first = [*range(half), *range(rotary_dim, rotary_dim + rest)]
    return first + [*range(half, rotary_dim), *range(rotary_dim + rest, head_dim)]
