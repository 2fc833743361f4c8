"""LoRA: a low-rank adapter beside each of some linears, whose weights are frozen. Plain data, no torch.

    u = rounded(A x)                          x: the linear's BF16 input, never its codes; A [r, K], B [N, r] in BF16
    y = rounded(y0 + s * (B u))               y0: the frozen linear's own output, rounded to BF16 as without an adapter;
                                              B u, the product with s, and the sum in FP32; a bias is added afterwards

`r` is the rank, `s` the scale: alpha / r, or alpha / sqrt(r). The projections of a fused linear have adapters of their
own: their A's are stacked, and B goes by sections. So do those of each expert, expert after expert. Both sides compute
this, whatever the precision of the linear is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
LINEAR_ATTENTION = ("in_proj_qkv", "in_proj_z", "out_proj")  # of Gated DeltaNet
GROUPS = {
    "all": ATTENTION + MLP + LINEAR_ATTENTION, "attention": ATTENTION, "mlp": MLP, "linear_attention": LINEAR_ATTENTION,
}


@dataclass(frozen=True, slots=True)
class Lora:
    """The adapters of a model. `targets` are names of projections, as in Hugging Face's files. `expert_rank`: the rank
    of those in experts, which have adapters each; None: experts have none."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    rslora: bool = False
    expert_rank: int | None = None

    @property
    def scale(self) -> float:
        """What B u is multiplied by."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)

    def of(self, experts: int) -> Lora | None:
        """Those of a linear of so many experts (0: a plain one); None where it has none."""
        if not experts:
            return self
        return None if self.expert_rank is None else replace(self, rank=self.expert_rank, expert_rank=None)

    def adapted(self, projections: tuple[str, ...]) -> tuple[int, ...]:
        """Which of the projections of a linear have an adapter, by number."""
        return tuple(i for i, name in enumerate(projections) if name in self.targets)


def expanded(targets: Iterable[str]) -> tuple[str, ...]:
    """The projections that names and groups of names stand for, in the model's order."""
    named = {name for target in targets for name in GROUPS.get(target, (target,))}
    return tuple(name for name in GROUPS["all"] if name in named)


def edges(sections: tuple[int, ...]) -> list[tuple[int, int]]:
    """First row and the one after the last of each section."""
    ends = list(accumulate(sections))
    return list(zip([0, *ends], ends, strict=False))


def adapted_rows(
    lora: Lora, sections: tuple[int, ...], projections: tuple[str, ...], experts: int
) -> Iterator[tuple[tuple[int, int], int, int]]:
    """For each adapter of a linear, expert after expert: the rows of its projection in the weight, and its first row in
    A and in B. `lora` is the linear's own (`Lora.of`)."""
    of_weight, each, a, b = edges(sections), len(sections) // max(1, experts), 0, 0
    for expert in range(max(1, experts)):
        for i in lora.adapted(projections):
            start, stop = of_weight[expert * each + i]
            yield (start, stop), a, b
            a, b = a + lora.rank, b + stop - start
