"""Distillation on the policy's own answers: a teacher's log-prob of each token that the policy drew.

With y drawn from the policy pi, and log-probs at the sampling temperature (of what truncated sampling keeps, where it
does), the reverse KL of token t and the advantage that it gives are

    k_t = log pi(y_t | y_<t) - log teacher(y_t | y_<t)        A_t = (of rewards) - weight * k_t

The mean of k_t over draws is KL(pi || teacher) at that place, so it is never negative in the mean. It is the reward of
its own token alone: later tokens do not pay for it (discount 0), and no mean of a group or a step is taken off, as the
teacher is a baseline already. k_t is a number, without a gradient, as every advantage is.

Sources: MiniLLM, arXiv 2306.08543 (reverse KL by policy gradients); GKD, arXiv 2306.13649 (the student's own answers);
"On-Policy Distillation", Thinking Machines Lab, 2025, doi 10.64434/tml.20251026 (the advantage by token, discount 0).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from jetrl.rl.advantage import check_float32
from jetrl.types import Advantage, Group

Column = NDArray[np.float64]  # [P]: of the policy tokens of a trajectory


def reverse_kl(policy: Mapping[int, np.ndarray], teacher: Mapping[int, np.ndarray]) -> dict[int, Column]:
    """k_t [P] in float64 of each trajectory, by its place, from float32 log-probs [P] of both."""
    return {
        place: logprobs.astype(np.float64) - teacher[place].astype(np.float64) for place, logprobs in policy.items()
    }


def with_teacher(
    groups: Sequence[Group], kl: Sequence[Column | None], weight: float, names: Sequence[str] = ()
) -> tuple[list[Group], dict[str, float]]:
    """Groups whose advantages have -weight * k_t added, token by token, and the statistic `policy/teacher_kl`: the
    mean of k_t over the tokens in the loss, in nats; absent where no token is. Where `names` has several teachers, of
    each trajectory its own, there is `policy/teacher_kl/NAME` for each but the one without a name, too.

    `kl` has one array [P] for each trajectory, in the order of the groups; None, as its advantage, outside the loss.
    UserError for an advantage beyond float32.
    """
    columns = iter(kl)
    filled = [
        replace(g, advantages=tuple(_added(a, next(columns), weight) for a in g.advantages)) for g in groups
    ]
    stats, places = {}, range(len(kl))
    for name in dict.fromkeys(["", *names]):
        of_name = [kl[place] for place in places if not name or names[place] == name]
        if values := [value for column in of_name if column is not None for value in column.tolist()]:
            stats[f"policy/teacher_kl/{name}" if name else "policy/teacher_kl"] = math.fsum(values) / len(values)
    return filled, stats


def _added(advantage: Advantage | None, kl: Column | None, weight: float) -> Advantage | None:
    assert (advantage is None) == (kl is None), "in the loss, or not"
    if advantage is None or kl is None:
        return None
    of_rewards = advantage if isinstance(advantage, tuple) else (advantage,) * len(kl)
    found = tuple(a - weight * k for a, k in zip(of_rewards, kl.tolist(), strict=True))
    check_float32("an advantage with the teacher's part", [found], f"Lower teacher.weight = {weight:g}.")
    return found
