"""Decoding with drafts by the ops of Gated DeltaNet: steps of several rows, of which some are taken back."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from jetrl.kernels.delta.parts import HeadSizes, Parts, empty_state
from jetrl.types import StateRows

KEPT = 18  # rows before a convolution of width 4, with those to go back by


def within_a_block(position: int) -> int:
    """The last position of a draft in a step that begins here (`verify.propose`)."""
    return position + 15 - (position + 1) % 16


@torch.no_grad()
def rewound(
    kernels: Any, prompts: Sequence[int], tokens: int, deepest: int, last: Callable[[int], int], sizes: HeadSizes,
    device: str = "cpu",
) -> list[tuple[Tensor, Tensor]]:
    """What convolution and rule give for sequences with these prompts and `tokens` more, decoded with drafts; next to
    each, what packed sequences give.

    A step has 1 + `deepest` rows, none behind `last(position of its first)`. A random number of them stays, and the
    others are those of tokens that did not come. Decays are slow, so that the state matters up to a chunk's end.
    """
    rng, gen = random.Random(deepest), torch.Generator().manual_seed(deepest)
    count, channels, heads = len(prompts), sum(sizes.columns), sizes.value_heads
    weight = torch.rand(channels, 4, generator=gen).sub(0.5).bfloat16().to(device)

    def drawn(rows: int) -> tuple[Tensor, Tensor, Tensor]:
        x, g, beta = (f(rows, n, generator=gen) for f, n in ((torch.randn, channels), *[(torch.rand, heads)] * 2))
        return x.bfloat16().to(device), (-0.02 * g).to(device), beta.to(device)

    kept, conv = empty_state(2 + count, sizes, torch.bfloat16, device), torch.zeros(2 + count, KEPT, channels)
    conv = conv.bfloat16().to(device)

    def run(rows: Sequence[Sequence[Tensor]], before: Sequence[int] = (), states: StateRows | None = None) -> Any:
        lengths = tuple(len(one[0]) for one in rows)
        ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(device)
        there = torch.tensor(before, dtype=torch.int32, device=device) if before else None
        parts, (x, g, beta) = Parts(ends, lengths, there, states), (torch.cat(t) for t in zip(*rows, strict=True))
        qkv = kernels.conv_heads(x, weight, sizes, parts, None if states is None else conv)
        out = kernels.delta_rule(*qkv, g, beta, parts, None if states is None else kept)
        return out.flatten(1).split(lengths)

    sequences, done = [drawn(n + tokens) for n in prompts], [0] * count
    whole, outs = run(sequences), [list[Tensor]() for _ in prompts]
    while live := [s for s in range(count) if done[s] < len(sequences[s][0])]:
        rows, stay = list[list[Tensor]](), list[int]()
        for s in live:
            at, most = done[s], len(sequences[s][0]) - done[s]
            length = min(1 + deepest, last(at) + 1 - at) if at else prompts[s]
            stay.append(min(rng.randint(1, length), most) if at else length)
            right = [t[at : at + stay[-1]] for t in sequences[s]]
            rows.append([torch.cat(pair) for pair in zip(right, drawn(length - stay[-1]), strict=True)])
        read = torch.tensor([2 + s if done[s] else 0 for s in live], device=device)
        states = StateRows(read, torch.tensor([2 + s for s in live], device=device))
        for s, n, out in zip(live, stay, run(rows, [done[s] for s in live], states), strict=True):
            outs[s].append(out[:n])
            done[s] += n
    return [(torch.cat(out), want) for out, want in zip(outs, whole, strict=True)]
