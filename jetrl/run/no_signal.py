"""What users should know of a step: why there is nothing to learn from it, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from jetrl.config import Config
from jetrl.report.hints import NO_SIGNAL
from jetrl.rl.own import is_own
from jetrl.rl.refill import Refill
from jetrl.rl.selection import differs, has_signal, in_loss
from jetrl.rounding import ROUNDING, all_equal
from jetrl.run.carried import DROPPED, OLD_WEIGHTS, dropped_told, ess_told
from jetrl.train.noise import noise_told
from jetrl.types import Group

_LOOK = "Look at what the model writes: samples.jsonl, or `jetrl report`."
_LONGER = "Raise rollout.max_response_length, or environment.max_turns."


def hints(
    metrics: dict[str, float], config: Config, groups: Sequence[Group], learnt: Sequence[Group]
) -> Iterator[tuple[str, str]]:
    """What a step's metrics say that users should look at, and in detail. Groups as in `without_signal`."""
    if config.supervised:
        return
    if reason := without_signal(groups, learnt, config):
        yield NO_SIGNAL, reason
    elif reason := without_gradient(metrics, config):
        yield "nothing was learned", reason
    if noisy := noise_told(metrics, config):
        yield "noise clips tokens", noisy
    if stale := ess_told(metrics):
        yield OLD_WEIGHTS, stale
    if dropped := dropped_told(metrics):
        yield DROPPED, dropped


def no_signal_in(refill: Refill, config: Config) -> str:
    """The message of a run that ends because refilling found no group with a signal."""
    where = f'rl.dynamic_sampling = "refill": none of {refill.num_sampled} prompts in {refill.rounds} rounds gave a '
    if cut := sum(map(differs, refill.seen)):
        return (
            f"{where}group to learn from. In {cut} groups {_deciding(config)} differ, but {_masked(config)}. {_LONGER}"
        )
    return (
        f"{where}group whose {_deciding(config)} differ, so there is nothing to learn from. Make the task easier or "
        "harder, raise rollout.group_size or rollout.temperature, or rl.max_refill_rounds."
    )


def without_signal(groups: Sequence[Group], learnt: Sequence[Group], config: Config) -> str:
    """Why a step has no advantage but 0 and what to do about it; empty if there is something to learn from.

    `groups` have rewards; `learnt`, the groups learned from, have advantages (None: outside the loss).
    """
    values = [a for group in learnt for a in group.advantages if a is not None]
    if any(any(a) if isinstance(a, tuple) else a for a in values):
        return ""
    if not any(in_loss(group, config.rl) for group in groups):
        count = sum(len(group.trajectories) for group in groups)
        return (
            f"all {count} answers ran into a limit, and rl.mask_truncated leaves such answers out of the loss. "
            f"{_LONGER}"
        )
    if config.teacher.top_k:  # the KL is a term of the loss
        return ""
    if config.rl.adv_estimator == "teacher":
        return (
            "the teacher gives every token the policy's own log-prob, so there is nothing to learn from it. "
            f"Is teacher.path = {config.teacher.path} the policy itself?"
        )
    if all(all_equal(group.rewards, max(group.reward_sizes)) for group in groups):
        found, cure = _all_same(groups, config.rollout.temperature)
    else:
        found, cure = _not_learned(groups, config)
    return f"{found}. {_LOOK} {cure}."


def _all_same(groups: Sequence[Group], temperature: float) -> tuple[str, str]:
    """What is found where no group has rewards that differ, and the cure."""
    rewards = [reward for group in groups for reward in group.rewards]
    if all_equal(rewards, max(size for group in groups for size in group.reward_sizes)):
        found = f"all {len(rewards)} rewards are {rewards[0]:g}"
        cure = "If that is not what the reward should say, fix it; else make the task easier" + (
            " or begin with a warm start (sft.steps)" if rewards[0] <= 0 else " or harder"
        )
    else:
        found = f"in each of {len(groups)} groups all rewards are the same"
        cure = "Raise rollout.group_size, or make the task easier or harder"
    same = all(len({t.turns[0].tokens.tobytes() for t in g.trajectories if t.turns}) < 2 for g in groups)
    if same and all(len(g.trajectories) > 1 for g in groups):
        found += ", because the completions of a prompt are all the same"
        cure = f"Raise rollout.temperature, which is {temperature:g}"
    return found, cure


def _not_learned(groups: Sequence[Group], config: Config) -> tuple[str, str]:
    """The same where rewards differ within a group, and no advantage comes of it."""
    dropped = config.rl.dynamic_sampling != "off" and not any(has_signal(group, config.rl) for group in groups)
    if dropped and not any(map(differs, groups)):
        only = ", and only the penalty for long answers tells rewards apart" if config.rl.overlong_buffer_len else ""
        return (
            f"in each of {len(groups)} groups {_deciding(config)} are the same{only}, so "
            f'rl.dynamic_sampling = "{config.rl.dynamic_sampling}" leaves all of them out',
            "Raise rollout.group_size, or make the task easier or harder",
        )
    if any(len(in_loss(group, config.rl)) < len(group.trajectories) for group in groups):
        return f"rewards differ, but {_masked(config)}", _LONGER.removesuffix(".")
    if is_own(config.rl.adv_estimator):
        return (
            f'rewards differ, but rl.adv_estimator = "{config.rl.adv_estimator}" gave every answer the advantage 0',
            "Fix the function",
        )
    return (
        f'rewards differ, but all advantages by rl.adv_estimator = "{config.rl.adv_estimator}" are 0',
        "Raise rollout.group_size, or look at the terms of the reward",
    )


def _deciding(config: Config) -> str:
    """The numbers that `rl.signal` names."""
    signal = config.rl.signal
    if signal != "reward":
        return f"scores by rl.signal = {signal!r}"
    return "rewards before the penalty for long answers" if config.rl.overlong_buffer_len else "rewards"


def _masked(config: Config) -> str:
    """How answers that ran into a limit take away a signal."""
    compared = (
        ", and with the KL in the reward (rl.kl_in) an answer is compared with those in the loss only"
        if config.rl.kl_in == "reward" and config.rl.kl_coef > 0 else ""
    )
    return f"not among answers that the loss has: rl.mask_truncated leaves out those that ran into a limit{compared}"


def without_gradient(metrics: Mapping[str, float], config: Config) -> str:
    """Why the update of a step that has advantages learned nothing from them; empty if it did."""
    if "correction/frac_rejected" in metrics and "policy/kl" not in metrics:  # no token was left to take a mean over
        return (
            "the corrections for the gap between sampler and learner left every token out of the loss. Raise "
            "rl.rollout_rs_threshold or lower rl.rollout_veto; the parity/* metrics say how large the gap is."
        )
    if metrics.get("policy/grad_norm") != 0.0:
        return ""
    clipped = sum(metrics.get(f"policy/clip_frac_{name}", 0.0) for name in ("low", "high", "dual"))
    if clipped >= 1.0 - ROUNDING:
        return "every token was clipped, so none had a gradient. Lower train.lr, or make fewer updates per step."
    own = [f'rl.{key} = "{name}"' for key in ("surrogate", "loss_agg") if is_own(name := getattr(config.rl, key))]
    if own:
        return f"the gradient of the loss is exactly 0 although there are advantages. Look at {' and '.join(own)}."
    return (
        "the gradient of the loss is exactly 0 although there are advantages. If policy/entropy is 0 as well, the "
        "policy gives one token all probability: raise rollout.temperature."
    )
