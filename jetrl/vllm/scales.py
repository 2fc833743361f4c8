"""Scales of vLLM's FP8 KV cache: one number each for the queries, keys and values of a layer.

vLLM stores `e4m3(x / scale)` and computes with `code * scale`; its scales are 1 unless someone sets them. Here they are
measured at every step, with the new weights, on the step's own prompts and answers, by the trainer's own model in the
rollout's precision flow (as NeMo RL and FP8-RL, arXiv 2601.18150, recalibrate):

    scale = MARGIN * max|x| / 448        over all tokens and heads of the layer; x after the rotary embedding
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from jetrl.model.transformer import Transformer
from jetrl.precision.formats import AMAX_FLOOR, E4M3_MAX
from jetrl.types import ForwardBatch, VarlenPlan

MARGIN = 1.05  # room for what the measured tokens have not shown; what is beyond saturates at 448 * scale
PARTS = ("q", "k", "v")
_LAYER = re.compile(r"\blayers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Scales:
    """`of[part][layer]`, for the parts q, k and v; measured on `tokens` tokens."""

    of: dict[str, tuple[float, ...]]
    tokens: int

    def metrics(self) -> dict[str, float]:
        """The largest scale of each part, and what they were measured on."""
        found = {f"vllm/{part}_scale_max": max(scales) for part, scales in self.of.items()}
        return found | {"vllm/kv_scale_tokens": float(self.tokens)}


def chosen(sequences: Sequence[tuple[int, ...]], max_tokens: int) -> list[tuple[int, ...]]:
    """Sequences from all over the list, with at most `max_tokens` tokens together, but at least one sequence."""
    mean = sum(map(len, sequences)) / len(sequences)
    stride = max(1, round(len(sequences) * mean / max_tokens))
    picked: list[tuple[int, ...]] = []
    total = 0
    for start in range(stride):
        for sequence in sequences[start::stride]:
            if not picked or total + len(sequence) <= max_tokens:
                picked.append(sequence)
                total += len(sequence)
    return picked


def batches(sequences: Sequence[tuple[int, ...]], max_tokens: int) -> list[list[tuple[int, ...]]]:
    """`sequences` in order, in batches of at most `max_tokens` tokens (one sequence at least)."""
    found: list[list[tuple[int, ...]]] = []
    room = 0
    for sequence in sequences:
        if len(sequence) > room or not found:
            found.append([])
            room = max_tokens
        found[-1].append(sequence)
        room -= len(sequence)
    return found


class _Largest:
    """A tap that keeps the largest absolute value of each part and layer; nothing waits for the device."""

    def __init__(self, model: Transformer) -> None:
        spec = model.spec
        self.v_from = (spec.num_heads + spec.num_kv_heads) * spec.head_dim
        self.found: dict[tuple[str, int], Tensor] = {}

    def __call__(self, name: str, tensor: Tensor) -> None:
        at, _, operator = name.rpartition(".")
        if operator in ("rope_q", "rope_k", "qkv"):
            layer, part = int(at.removeprefix("layers.")), "v" if operator == "qkv" else operator[-1]
            largest = (tensor[:, self.v_from :] if part == "v" else tensor).abs().amax().float()
            before = self.found.get((part, layer))
            self.found[part, layer] = largest if before is None else torch.maximum(before, largest)


@torch.no_grad()
def measure(
    model: Transformer, sequences: Sequence[tuple[int, ...]], max_tokens: int, batch_tokens: int
) -> Scales:
    """The scales of the model's published weights, measured on at most `max_tokens` tokens of `sequences`.

    `FloatingPointError` if one of the values is NaN or infinite.
    """
    picked, largest, device = chosen(sequences, max_tokens), _Largest(model), model.cos.device
    for batch in batches(picked, batch_tokens):
        lengths = tuple(map(len, batch))
        ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        model(
            ForwardBatch(
                torch.tensor([t for sequence in batch for t in sequence], device=device),
                torch.cat([torch.arange(n) for n in lengths]).to(device), VarlenPlan(ends.to(device), lengths),
                "rollout",
            ),
            largest,
        )
    layers = range(model.spec.num_layers)
    keys = [(part, layer) for part in PARTS for layer in layers]
    values = torch.stack([largest.found[key] for key in keys])
    scales = (values.clamp_min(AMAX_FLOOR) * (MARGIN / E4M3_MAX)).tolist()
    if not bool(torch.isfinite(values).all()):
        raise FloatingPointError("queries, keys or values of the KV cache's calibration are NaN or infinite")
    of = {part: tuple(scales[i * len(layers) : (i + 1) * len(layers)]) for i, part in enumerate(PARTS)}
    return Scales(of, sum(map(len, picked)))


def set_scales(model: Any, scales: Scales) -> int:
    """Write the scales into the attention layers of vLLM's `model`; how many layers there were.

    Captured graphs read the buffers `_k_scale`, some kernels the floats next to them: both are set.
    """
    count = 0
    for name, module in model.named_modules():
        if hasattr(module, "_k_scale") and (found := _LAYER.search(f"{name}.")):
            count += 1
            for part in PARTS:
                number = scales.of[part][int(found[1])]
                getattr(module, f"_{part}_scale").fill_(number)
                setattr(module, f"_{part}_scale_float", number)
    return count
