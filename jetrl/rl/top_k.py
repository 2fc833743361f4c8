"""The KL of policy and teacher at each token of a sequence, over the teacher's most probable tokens and the rest.

With S the K most probable tokens of the teacher q at a place, pi the policy, and the rest of each as one outcome,

    kl = sum_{j in S} pi_j (log pi_j - log q_j) + pi_rest (log pi_rest - log q_rest)       x_rest = 1 - sum_{j in S} x_j

It is the reverse KL of two coarser distributions: never above that of the whole vocabulary (what is lumped together
tells less apart), equal to it with K = V, and 0 where both agree on S. Its gradient goes through all log pi_j, so it
has no noise of which token was drawn, and it means the same on answers that the policy did not write.

Sources: GKD, arXiv 2306.13649 (a divergence at each place of own and given answers). The rest as one outcome: "Sparse
Logit Sampling", arXiv 2503.16870, sec. 3 (a ghost token; K renormalised tokens alone would teach the policy that there
are no others), and TRL's `loss_add_tail`.
"""

from __future__ import annotations

from torch import Tensor

LEAST_REST = 1e-6  # of the rest's probability: log-probs in FP32 do not tell smaller ones


def top_k_kl(policy: Tensor, teacher: Tensor) -> Tensor:
    """The KL [R] in FP32, differentiable in `policy`, from log-probs [R, K] of the same tokens. Computed in float64; a
    rest below 1e-6 counts as 1e-6, and has no gradient."""
    p, q = policy.double(), teacher.double()
    weights = p.exp()
    rest, rest_of_teacher = (1 - weights.sum(1)).clamp(min=LEAST_REST), (1 - q.exp().sum(1)).clamp(min=LEAST_REST)
    kl = (weights * (p - q)).sum(1) + rest * (rest.log() - rest_of_teacher.log())
    return kl.to(policy.dtype)
