"""Parts of the objective in your own file: a surrogate, an estimator of advantages, an aggregation.

    jetrl train quickstart rl.updates_per_step=2 rl.surrogate=examples/objective.py:soft_gate
    jetrl train quickstart rl.adv_estimator=examples/objective.py:above_median
    jetrl train quickstart rl.loss_agg=examples/objective.py:by_root_of_length

docs/ALGORITHMS.md, "Parts of your own", says what each gets and returns.
"""

from statistics import median

import torch


def soft_gate(log_ratio, logprobs, advantages, clip):
    """SAPO (arXiv 2511.20347): the ratio r is not clipped, but goes through a gate that closes away from 1:

        loss_t = -A_t * 4 / tau * sigmoid(tau * (r_t - 1))     tau = 1 where A > 0, 1.05 elsewhere

    At r = 1 the gradient is that of -A_t r_t, as the sigmoid has the slope 1/4 there. The log-ratio is bounded before
    exp: at e^20 the gate has long been shut, and a ratio that overflows would give 0 * inf in the backward pass.
    """
    tau = torch.where(advantages > 0, 1.0, 1.05).to(log_ratio.dtype)
    ratio = log_ratio.clamp(max=20.0).exp()
    return -advantages * torch.sigmoid(tau * (ratio - 1)) * 4 / tau


def above_median(groups, config):
    """The score minus the group's median, which one lucky answer does not move."""
    return [[one.score - median(other.score for other in group) for one in group] for group in groups]


def by_root_of_length(sequence_ids, denominators):
    """Between a mean over each sequence (1 / n) and Dr. GRPO's constant (1 / L): 1 / sqrt(n L), then over sequences."""
    counts = torch.tensor(denominators.sequence_tokens, dtype=torch.float64, device=sequence_ids.device)
    longest, sequences = denominators.max_response_length, denominators.num_sequences
    return 1 / (sequences * (counts[sequence_ids] * longest).sqrt())
