"""The algorithms of `rl.algo` as data: the values that each gives to the keys of `[rl]`, and why.

A preset names only the keys whose value differs from the field's default; whatever the user sets wins over it. An
algorithm has no code of its own: each of its parts is a key, so a mixture of two papers is a recipe, not a patch.

Which keys have no effect with which choice, and which choices do not go together, stands at the keys (`config/rl.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any


class _Own:
    """Equal to every name of a function of the user's (`module:function`, `path/to/file.py:function`)."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and ":" in other

    def __hash__(self) -> int:
        return 0

    def __repr__(self) -> str:
        return "OWN"


OWN = _Own()


@dataclass(frozen=True, slots=True)
class Preset:
    """One algorithm. `values` are keys of `[rl]`; `why` has one sentence for each of them."""

    name: str
    description: str
    paper: str  # arXiv number
    values: Mapping[str, Any] = field(default_factory=dict)
    why: Mapping[str, str] = field(default_factory=dict)


_KL_IN_REWARD = {
    "kl_in": "The paper subtracts the KL penalty from the reward, so it passes through the advantage.",
    "kl_estimator": "In the reward the plain log-ratio is right: its mean is the KL that the objective subtracts.",
}

_PRESETS = (
    Preset(
        "grpo", "Advantages relative to the group's mean and standard deviation; clipped token ratios.", "2402.03300",
    ),
    Preset(
        "dr_grpo", "GRPO without its two biases: no division by the deviation, none by the answer's length.",
        "2503.20783",
        {"norm_adv_by_std": False, "loss_agg": "seq_mean_token_sum_norm"},
        {
            "norm_adv_by_std": "Dividing by the deviation gives very easy and very hard prompts more weight.",
            "loss_agg": "Dividing by an answer's own length favours long wrong answers; a constant does not.",
        },
    ),
    Preset(
        "dapo", "GRPO with a higher upper clip and new prompts for those whose answers are all equal.", "2503.14476",
        {"clip_ratio_high": 0.28, "dynamic_sampling": "refill"},
        {
            "clip_ratio_high": "The paper's value: more room for improbable tokens to grow, against entropy collapse.",
            "dynamic_sampling": "Groups without signal are replaced, so that every step learns from as many prompts.",
        },
    ),
    Preset(
        "gspo", "One ratio for the whole answer, the geometric mean over its tokens, clipped as a whole.", "2507.18071",
        {
            "ratio": "sequence_mean", "loss_agg": "seq_mean_token_mean", "clip_ratio_low": 3e-4,
            "clip_ratio_high": 4e-4,
        },
        {
            "ratio": "The reward is for the answer, so the correction is too; the mean keeps it independent of length.",
            "loss_agg": "The paper's objective is a mean over answers.",
            "clip_ratio_low": "The paper's value: a mean over many tokens moves far less than one token's ratio.",
            "clip_ratio_high": "The paper's value, as above.",
        },
    ),
    Preset(
        "cispo", "REINFORCE with a bounded importance weight: no token loses its gradient.", "2506.13585",
        {"surrogate": "cispo", "clip_ratio_low": 1.0, "clip_ratio_high": 4.0},
        {
            "surrogate": "The weight is clipped, not the token: rare tokens that turn an argument still learn.",
            "clip_ratio_low": "The paper has no lower bound: 1 - 1 = 0.",
            "clip_ratio_high": "The paper tunes this bound and gives no number; TRL advises weights up to 5.",
        },
    ),
    Preset(
        "rloo", "REINFORCE on whole answers, with the mean reward of the group's other answers as baseline.",
        "2402.14740",
        {
            "adv_estimator": "rloo", "ratio": "sequence", "loss_agg": "seq_mean_token_mean", "kl_in": "reward",
            "kl_estimator": "k1",
        },
        {
            "adv_estimator": "A baseline without the answer's own reward leaves the gradient unbiased.",
            "ratio": "The whole answer is one action, so its ratio is the product over the tokens.",
            "loss_agg": "A mean over answers; with this ratio each answer counts once, whatever its length.",
            **_KL_IN_REWARD,
        },
    ),
    Preset(
        "reinforce_pp", "REINFORCE++: returns of each token, normalized over the whole step. Needs no groups.",
        "2501.03262",
        {"adv_estimator": "reinforce_pp", "kl_in": "reward", "kl_estimator": "k1"},
        {
            "adv_estimator": "The step's mean and deviation are less noisy than those of a small group.",
            **_KL_IN_REWARD,
        },
    ),
    Preset(
        "ppo", "Advantages from a learned critic (GAE), clipped token ratios.", "1707.06347",
        {"adv_estimator": "gae", "kl_in": "reward", "kl_estimator": "k1"},
        {
            "adv_estimator": "A critic gives every token its own baseline (arXiv 1506.02438).",
            "kl_in": "As in RLHF since arXiv 1909.08593: the penalty is a reward of each token, so the critic sees it.",
            "kl_estimator": _KL_IN_REWARD["kl_estimator"],
        },
    ),
    Preset(
        "distill", "The policy's own answers, each token weighed by a teacher's log-prob of it. Rewards are only "
        "reported.", "2306.08543",
        {"adv_estimator": "teacher"},
        {"adv_estimator": "The teacher judges every token, so neither groups nor rewards are needed."},
    ),
)

PRESETS: Mapping[str, Preset] = MappingProxyType({preset.name: preset for preset in _PRESETS})
"""By name, in the order of `choices.Algo`. dapo's `overlong_buffer_len` depends on another key: the config sets it."""
