"""Folders whose weights are FP8 already, as DeepSeek publishes them: codes, and a scale for each block of 128x128.

A weight [N, K] is `weight` float8_e4m3fn with `weight_scale_inv` [N/128, K/128], both rounded up: `value = code *
scale`. Where the model computes it in FP8 and holds no master, codes and scales are published as they are. A master is
their product in FP32, of which the first publish makes codes again. They are the stored ones

    scales of amax / 448   where a block's largest code is 448, as every quantizer by that rule leaves it. The master is
                           rounded to BF16 before (by at most 2^-8 of itself), which moves a scale by as much and no
                           code: a quotient that is off by 2^-7 rounds back, as half the way to the next code is 2^-5
                           of a code or more
    powers of two          where the stored scales are such: values and products stay; a block whose largest code is
                           below 225 gets codes of twice the size, or more, and a scale as much smaller

All other blocks are rounded a second time, and a notice counts them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jetrl.errors import Notice, UserError
from jetrl.huggingface.files import AGAIN
from jetrl.kernels.qtensor import QTensor, blocks_of, is_pow2, room_for_codes
from jetrl.kernels.quantize.ops import weight_values
from jetrl.precision.formats import BLOCK, E4M3_MAX

SUFFIX = "_scale_inv"  # of the name of a weight's scales
_SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
_FITTING = {  # by key of a quantization_config: what it may say; None: nothing
    "quant_method": ("fp8",), "weight_block_size": ([BLOCK, BLOCK],), "activation_scheme": (None, "dynamic"),
    "fmt": (None, "e4m3"), "scale_fmt": (None, "float", "ue8m0"),
}


def check(given: Any) -> None:
    """UserError for a `quantization_config` of another layout than the one above."""
    told = given if isinstance(given, Mapping) else {}
    wrong = [key for key, fitting in _FITTING.items() if told.get(key) not in fitting]
    if wrong:
        said = [f"quant_method = {told.get('quant_method', 'unknown')!r}"]
        said += [f"{key} = {told.get(key)!r}" for key in wrong if key != "quant_method"]
        raise UserError(
            f"quantization_config ({', '.join(said)}): the weights are already quantized, and in another way than "
            f"jetrl reads, which is E4M3 with a scale for each block of {BLOCK}x{BLOCK} (quant_method = 'fp8', "
            f"weight_block_size = [{BLOCK}, {BLOCK}], activation_scheme = 'dynamic'). Start from the BF16 model; jetrl "
            "quantizes it as the recipe says."
        )


def without_scales(names: Iterable[str]) -> list[str]:
    """The names of a folder's tensors without those of scales that belong to one of them."""
    found = set(names)
    return [name for name in found if not (name.endswith(SUFFIX) and name.removesuffix(SUFFIX) in found)]


def rows_of(codes: Tensor, scale: Tensor, start: int, where: str) -> QTensor:
    """Rows of a weight from `start`, where a block begins, whose `codes` are given, with its `scale`, which is whole.

    UserError for scales of another shape or type, and for values that are not finite. `where`: file and name.
    """
    count, width = codes.shape
    first, last = start // BLOCK, -(-(start + count) // BLOCK)
    assert start % BLOCK == 0, "parts of a weight begin where blocks do"
    if scale.dtype not in _SCALE_DTYPES or scale.ndim != 2 or len(scale) < last or scale.shape[1] != -(-width // BLOCK):
        raise UserError(
            f"{where}{SUFFIX} is {scale.dtype} {list(scale.shape)}: jetrl reads one scale for each block of "
            f"{BLOCK}x{BLOCK}. Start from the BF16 model."
        )
    own = scale[first:last].to(torch.float32)
    if bool((codes.view(torch.uint8) & 0x7F == 0x7F).any()) or not bool((own.isfinite() & (own >= 0)).all()):
        raise UserError(f"{where} holds values that are not finite, or a negative scale. {AGAIN}")
    return QTensor(codes, own, "128x128", (count,), (width,))


def joined(parts: list[QTensor]) -> QTensor:
    """Weights one below the other, as a model holds them: laid out for its kernels, in memory of its own."""
    sections = tuple(rows for part in parts for rows in part.row_sections)
    whole = room_for_codes(sections, parts[0].shape[1], parts[0].codes.device)
    row = block = 0
    for part in parts:
        rows, blocks = len(part.codes), len(part.scale)
        whole.codes.view(torch.uint8)[row : row + rows] = part.codes.view(torch.uint8)
        whole.scale[block : block + blocks] = part.scale
        row, block = row + rows, block + blocks
    return whole


def value_of(q: QTensor) -> Tensor:
    """`code * scale` in FP32, rounded once."""
    return weight_values(q, dtype=torch.float32)


def widened(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by their stored names, with FP8 ones as BF16 values and without their scales."""
    found = {}
    for name in without_scales(tensors):
        tensor = tensors[name]
        if tensor.dtype == torch.float8_e4m3fn:
            if name + SUFFIX not in tensors:
                raise UserError(f"{name} is FP8 without {name}{SUFFIX}. {AGAIN}")
            tensor = value_of(rows_of(tensor, tensors[name + SUFFIX], 0, name)).to(torch.bfloat16)
        found[name] = tensor
    return found


@dataclass(slots=True)
class Again:
    """How many blocks of the weights that pass by a publish rounds again. `pow2`: scales are powers of two; `masters`:
    codes are made from masters, else stored ones are taken where their scales fit."""

    pow2: bool
    masters: bool
    blocks: int = 0
    again: int = 0
    all_pow2: bool = True

    def through(
        self, values: Iterable[tuple[str, Tensor | QTensor]], folder: Path | None
    ) -> Iterator[tuple[str, Tensor | QTensor]]:
        """The same values; a notice behind the last one, if there is something to say."""
        for name, value in values:
            if isinstance(value, QTensor):
                self._count(value)
            yield name, value
        if self.again:
            warnings.warn(f"{folder}: {self._told()}", Notice, stacklevel=2)

    def _count(self, q: QTensor) -> None:
        if not q.scale.numel():
            return  # no rows on this rank
        powers = is_pow2(q.scale)
        self.blocks += powers.numel()
        self.all_pow2 &= bool(powers.all())
        if self.pow2:
            self.again += int((~powers).sum())
        elif self.masters:
            most = _largest_codes(q)
            self.again += int(((most != E4M3_MAX) & (most > 0)).sum())

    def _told(self) -> str:
        many = f"{self.again} of {self.blocks} blocks of its FP8 weights are rounded a second time when published"
        if self.pow2:
            return f"{many}, with scales that are powers of two, which the stored ones are not."
        if self.all_pow2:
            return f'{many}: the stored scales are powers of two. Set quant.weight_scale = "pow2" to keep the codes.'
        return f"{many}: the stored scales are not the largest value / 448."


def _largest_codes(q: QTensor) -> Tensor:
    """The largest value of a code in each block, FP32 [row blocks, column blocks]."""
    size = q.codes.view(torch.uint8) & 0x7F  # of equal sign, codes and their values have one order
    padded = torch.zeros(len(size), BLOCK * q.scale.shape[1], dtype=torch.uint8)
    padded[:, : size.shape[1]] = size
    by_row = padded.unflatten(1, (-1, BLOCK)).amax(-1)
    most = torch.stack([by_row[start:stop].amax(0) for start, stop in blocks_of(q.row_sections)])
    return most.view(torch.float8_e4m3fn).to(torch.float32)


def refuse_second_export(folder: Path, config: Mapping[str, Any]) -> None:
    """UserError for a folder that is FP8 already and is to be exported as such."""
    if config.get("quantization_config"):
        raise UserError(
            f"{folder} is FP8 already (quantization_config in its config.json). Copy it, or export it in BF16."
        )
