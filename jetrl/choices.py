"""The choices of `precision`, `[quant]` and `[rl]` by name: the one place where they are written down.

`precision/recipe.py` says what a precision is. What the names of `[rl]` mean is explained where they are used:
`rl/advantage.py`, `rl/surrogate.py`, `rl/losses.py`, `rl/mismatch.py`, `rl/selection.py` and `rl/refill.py`.
`jetrl/presets.py` says which choices make an algorithm. This module imports nothing of ours.
"""

from __future__ import annotations

from typing import Literal

Precision = Literal["bf16", "fp8", "fp8_rollout", "w8a16"]
TeacherPrecision = Literal["bf16", "fp8", "w8a16"]  # a teacher does not sample
ScaleKind = Literal["fp32", "pow2"]
CacheKind = Literal["bf16", "fp8"]
WgradKind = Literal["row", "tile"]
LoraTarget = Literal[
    "all", "attention", "mlp", "linear_attention", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj",
    "down_proj", "in_proj_qkv", "in_proj_z", "out_proj",
]

Algo = Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_pp", "ppo", "distill"]
AdvEstimator = Literal["grpo", "rloo", "reinforce_pp", "gae", "teacher"]
Ratio = Literal["token", "sequence_mean", "sequence"]
Surrogate = Literal["clip", "cispo"]
LossAgg = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]
KLEstimator = Literal["k1", "k2", "k3"]
KLIn = Literal["loss", "reward"]
RolloutIS = Literal["none", "token", "sequence"]
RolloutRS = Literal["none", "token", "sequence", "geometric"]
MaskedSequences = Literal["drop", "count"]
Reduction = Literal["fast", "fixed"]
LogprobsOf = Literal["sampled", "full"]
Schedule = Literal["constant", "linear", "cosine"]
DynamicSampling = Literal["off", "drop", "refill"]
Clip = Literal["fixed", "calibrated"]
