"""Advantages of single tokens: discounted rewards to go, generalized advantage estimation, and whitening.

Letters: P policy tokens of one trajectory, in order over all its turns. Tokens of the environment are not steps: they
are left out, so the state after a turn's last token is that of the next turn's first.
"""

from __future__ import annotations

from collections.abc import Sequence

from jetrl.rounding import all_equal, mean, std


def rewards_to_go(rewards: Sequence[float], gamma: float) -> list[float]:
    """`G_t = sum over s >= t of gamma^(s - t) r_s`, [P] -> [P]. Source: REINFORCE++, arXiv 2501.03262 section 3."""
    result, following = [0.0] * len(rewards), 0.0
    for t in reversed(range(len(rewards))):
        following = rewards[t] + gamma * following
        result[t] = following
    return result


def gae(
    rewards: Sequence[float], values: Sequence[float], gamma: float, gae_lambda: float
) -> tuple[list[float], list[float]]:
    """Generalized advantage estimation; [P], [P] -> advantages [P] and returns [P].

        delta_t = r_t + gamma V_(t+1) - V_t          V beyond the last policy token is 0
        A_t = delta_t + gamma gae_lambda A_(t+1)
        R_t = A_t + V_t                              what the critic should have said

    Source: arXiv 1506.02438 eq. 16.
    """
    assert len(rewards) == len(values), (len(rewards), len(values))
    result, advantage, next_value = [0.0] * len(rewards), 0.0, 0.0
    for t in reversed(range(len(rewards))):
        advantage = rewards[t] + gamma * next_value - values[t] + gamma * gae_lambda * advantage
        next_value = values[t]
        result[t] = advantage
    return result, [a + v for a, v in zip(result, values, strict=True)]


def whiten(rows: Sequence[Sequence[float]], eps: float, size: float = 0.0) -> list[list[float]]:
    """`(x - mean) / (std + eps)` over all numbers of all rows together; `std` is the sample deviation.

    The deviation and `eps` are those of the group-relative advantages. verl divides by `sqrt(var + 1e-8)` instead,
    which is the same except for `eps`. Equal numbers (or a single one) give exact zeros; `size` is that of `all_equal`.
    """
    flat = [value for row in rows for value in row]
    if not flat or all_equal(flat, size):
        return [[0.0] * len(row) for row in rows]
    center, scale = mean(flat), 1.0 / (std(flat) + eps)
    return [[(value - center) * scale for value in row] for row in rows]
