"""Formats: how the numbers of one tensor are stored, as plain data; `kernels/reference.py` has the code.

The quantizer, for each block of a tensor x (the last block of a row or column may be smaller):

    amax  = max(max(|x|), 1e-12)                        FP32
    scale = amax / 448                                  one IEEE FP32 division      (scale "fp32")
    scale = 2 ** ceil(log2(amax / 448))                 exact power of two          (scale "pow2")
    code  = round_to_nearest_even_e4m3(clamp(x / scale, -448, 448))      x / scale: one IEEE FP32 division
    value = code * scale

A NaN stays a NaN code; the training step checks that inputs are finite, not this module. Changing any of this needs a
new `QUANTIZER_RULE`, which changes the digest of every flow that has an FP8 tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jetrl.choices import ScaleKind

DType = Literal["float32", "bfloat16", "float8_e4m3fn"]

QUANTIZER_RULE = "amax_div448_rne_e4m3_v1"
AMAX_FLOOR = 1e-12
E4M3_MAX = 448.0
BLOCK = 128
_KV_HEAD = "kv_head"
_SHORT_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float8_e4m3fn": "e4m3"}


@dataclass(frozen=True, slots=True)
class Format:
    """dtype of the codes and, for a quantized tensor, what shares a scale.

    `block` is (rows, columns) of the [tokens, features] or [out, in] matrix that share one scale; `rule` names the
    quantizer. A plain format (BF16, FP32) has no block and no scale, floor 0 and the rule "round_nearest_even".
    """

    name: str
    dtype: DType
    block: tuple[int, int] | None
    scale: ScaleKind | None
    amax_floor: float
    rule: str

    def __post_init__(self) -> None:
        quantized = self.dtype == "float8_e4m3fn"
        assert (self.block is not None) == (self.scale is not None) == quantized, f"inconsistent format: {self!r}"

    @property
    def is_quantized(self) -> bool:
        """True where the tensor is codes with scales."""
        return self.block is not None

    @property
    def pow2(self) -> bool:
        """True where the scales are powers of two."""
        return self.scale == "pow2"

    def __str__(self) -> str:
        """Short form, such as `bf16` or `e4m3[1x128,fp32]`."""
        short = _SHORT_NAMES[self.dtype]
        return short if self.block is None else f"{short}[{self.block[0]}x{self.block[1]},{self.scale}]"


BF16 = Format("bf16", "bfloat16", None, None, 0.0, "round_nearest_even")
FP32 = Format("fp32", "float32", None, None, 0.0, "round_nearest_even")


def _e4m3(name: str, block: tuple[int, int], scale: ScaleKind) -> Format:
    return Format(name, "float8_e4m3fn", block, scale, AMAX_FLOOR, QUANTIZER_RULE)


def act_1x128(scale: ScaleKind) -> Format:
    """Activations and output gradients [T, D]: one scale for 128 features of one token."""
    return _e4m3("act_1x128", (1, BLOCK), scale)


def kv_head(head_dim: int) -> Format:
    """Keys and values of an FP8 cache [T, G, H]: one power of two for one head vector of one token, stored as BF16."""
    return _e4m3(_KV_HEAD, (1, head_dim), "pow2")


def weight_128x128(scale: ScaleKind) -> Format:
    """Weights [out, in]: one scale for a 128x128 tile; tiles restart at every projection of a fused weight."""
    return _e4m3("weight_128x128", (BLOCK, BLOCK), scale)


def act_128x128(scale: ScaleKind) -> Format:
    """Activations that wgrad reads, in tiles: one scale for 128 tokens of 128 features."""
    return _e4m3("act_128x128", (BLOCK, BLOCK), scale)


def wgrad_128x1(scale: ScaleKind) -> Format:
    """Both operands of wgrad, whose reduction runs over tokens: one scale for 128 tokens of one feature."""
    return _e4m3("wgrad_128x1", (BLOCK, 1), scale)
