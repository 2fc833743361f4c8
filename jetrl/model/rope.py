"""Tables of the rotary embedding."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from jetrl.spec import RopeSpec


def rope_tables(rope: RopeSpec, head_dim: int, max_position: int) -> tuple[Tensor, Tensor]:
    """FP32 cos and sin [max_position, H/2] of the FP32 angles `position * inv_freq`, with Llama 3 scaling."""
    inv_freq = 1.0 / rope.theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.factor is not None:
        wavelength = 2 * np.pi / inv_freq
        low = rope.original_max_position / rope.low_freq_factor
        high = rope.original_max_position / rope.high_freq_factor
        smooth = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
            rope.high_freq_factor - rope.low_freq_factor
        )
        between = (1 - smooth) * inv_freq / rope.factor + smooth * inv_freq
        inv_freq = np.where(wavelength > low, inv_freq / rope.factor, np.where(wavelength < high, inv_freq, between))
    angles = np.arange(max_position, dtype=np.float32)[:, None] * inv_freq.astype(np.float32)
    angles = angles.astype(np.float64)
    return torch.from_numpy(np.cos(angles).astype(np.float32)), torch.from_numpy(np.sin(angles).astype(np.float32))
