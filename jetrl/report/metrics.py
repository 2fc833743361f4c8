"""Every metric that a run logs: its name, unit and meaning, and what a healthy value looks like.

`METRICS` is the one table: `docs/METRICS.md` is made from it (`python -m jetrl.report.metrics > docs/METRICS.md`), and
the report and the study take titles, units and meanings from it. A test runs training with all kinds of settings and
finds every metric of every row here, and every name here in the code that logs it.

Words in capitals stand for what a run fills in: `reward/FUNCTION/mean` is `reward/length/mean` for a function `length`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

_WORD = re.compile(r"(?<![A-Za-z])[A-Z]+(?![A-Za-z])")  # what a run fills in
IN_EVAL = "in_eval/"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. `unit` is "" for a plain number; `healthy` is "" where no value is better than another."""

    name: str
    title: str
    unit: str
    meaning: str
    healthy: str = ""

    @property
    def open(self) -> bool:
        """Whether the name holds a word that a run fills in."""
        return _WORD.search(self.name) is not None


@dataclass(frozen=True, slots=True)
class Group:
    """Metrics that are read together."""

    heading: str
    about: str
    metrics: tuple[Metric, ...]


GROUPS = (
    Group("Rewards", "Of the completions that a step sampled, before any are dropped.", (
        Metric("reward/mean", "Reward", "reward",
               "Mean reward of the completions of a step, with weights and penalties applied.",
               "Rises over tens of steps. Flat from the start: see `reward/frac_zero_std`."),
        Metric("reward/std", "Spread of the reward", "reward",
               "Standard deviation of the reward over the completions of a step (n - 1).",
               "Above 0. At 0 there is nothing to learn from."),
        Metric("reward/min", "Smallest reward", "reward", "Smallest reward of a completion in the step."),
        Metric("reward/max", "Largest reward", "reward", "Largest reward of a completion in the step.",
               "Above `reward/min`."),
        Metric("reward/frac_zero_std", "Groups without a signal", "share",
               "Share of groups whose rewards are all equal. Such a group has no advantages: with GRPO it teaches "
               "nothing.",
               "Below about 0.5. Near 1, problems are too hard or too easy: change the data, raise "
               "`rollout.group_size`, or use `rl.dynamic_sampling`."),
        Metric("reward/num_groups_dropped", "Groups dropped", "groups",
               "Groups that `rl.dynamic_sampling` left out of the update.",
               "A minority. If it grows, the data has become too easy."),
        Metric("reward/num_errors", "Completions without a score", "completions",
               "Completions that no reward function scored. They are not learned from.", "0."),
        Metric("reward/frac_unscored", "Share without a score", "share",
               "`reward/num_errors` as a share of all completions.", "0."),
        Metric("reward/FUNCTION/mean", "Reward of one function", "reward",
               "With several reward functions: mean of one, without its weight, over the completions that it scored.",
               "Rises. One that never moves teaches nothing, and the console says so."),
        Metric("reward/FUNCTION/std", "Spread of one function", "reward",
               "With several reward functions: standard deviation of one (n - 1).", "Above 0."),
        Metric("reward/FUNCTION/KEY", "A number of a reward function", "",
               "Mean of a number that the reward function returned beside its score, in a dict."),
        Metric("reward/NAME", "A metric of a reward function", "",
               "What the reward function logged with `log_metric`."),
        Metric("reward/overlong_penalty_mean", "Penalty for length", "reward",
               "Mean of the penalty that `rl.overlong_buffer_len` adds to long completions; 0 or negative.",
               "Close to 0."),
        Metric("reward/before_penalty_min", "Smallest reward before the penalty", "reward",
               "Smallest reward before the penalty for length."),
        Metric("reward/before_penalty_max", "Largest reward before the penalty", "reward",
               "Largest reward before the penalty for length.", "Above `reward/before_penalty_min`."),
        Metric("reward/kl_penalty_mean", "KL penalty in the reward", "reward",
               'With `rl.kl_in = "reward"`: mean over completions of `-kl_coef` times the summed KL estimate.',
               "Small against `reward/std`."),
    )),
    Group("Evaluation", "On held-out problems, every `eval.eval_interval` steps. TASK is `task.name`.", (
        Metric("eval/TASK/avg@K", "Held-out score", "score",
               "Mean held-out score over K completions per problem: the accuracy, if the reward is 0 or 1.",
               "Follows `reward/mean` upward. If only the reward rises, the policy is overfitting or gaming it."),
        Metric("eval/TASK/pass@K", "Held-out pass@k", "share",
               "Share of problems of which at least one of K completions reaches `eval.pass_reward`.",
               "At least avg@K, if rewards are 0 or 1."),
        Metric("eval/TASK/FUNCTION/avg@K", "Held-out score of one function", "reward",
               "With several reward functions: the mean of one on held-out problems, without its weight."),
        Metric("eval/TASK/loss", "Held-out loss", "nats",
               'With `method = "sft"`: mean negative log-prob of the learned tokens of held-out answers.',
               "Falls with `sft/loss`. If it rises while that one falls, the model learns the data by heart: stop "
               "there."),
        Metric("eval/TASK/num_unscored", "Held-out completions without a score", "completions",
               "Completions that no reward function scored. They are left out of the score. Logged if there are any.",
               "Absent."),
        Metric("eval/TASK/num_failed", "Held-out conversations that failed", "conversations",
               "Conversations whose environment failed. They are left out of the score. Logged if there are any.",
               "Absent."),
        Metric("eval/TASK/num_completions", "Held-out completions", "completions",
               "All completions of the evaluation; logged beside the two counts above."),
    )),
    Group("Responses and conversations", "Lengths count the policy's own tokens.", (
        Metric("response_length/mean", "Response length", "tokens", "Mean length of a response.",
               "Stable, or growing where longer reasoning pays. Growth without reward is a loophole in the reward."),
        Metric("response_length/max", "Longest response", "tokens", "Length of the longest response."),
        Metric("response_length/frac_truncated", "Cut off", "share",
               "Share of responses that hit `rollout.max_response_length`.",
               "Below about 0.1. Above it, raise the limit: cut answers mostly score 0."),
        Metric("environment/turns_mean", "Turns", "turns", "Mean number of policy turns per conversation."),
        Metric("environment/turns_max", "Most turns", "turns", "Most policy turns of any conversation."),
        Metric("environment/tokens_mean", "Environment tokens", "tokens",
               "Mean number of tokens per conversation that the environment wrote. They are not learned from."),
        Metric("environment/frac_max_turns", "Out of turns", "share",
               "Share of conversations that hit `environment.max_turns`.", "Low, unless the task fills every turn."),
        Metric("environment/num_errors", "Environment errors", "conversations",
               "Conversations of a step in which the environment raised an error. They are left out of training.",
               "0."),
        Metric("environment/num_timeouts", "Environment time-outs", "conversations",
               "Conversations of a step that exceeded `environment.timeout`. They are left out of training.", "0."),
        Metric("tools/calls_mean", "Tool calls", "calls",
               "Mean number of tool calls per conversation whose results the policy read.",
               "Above 0. A policy that stops calling its tools has found a reward without them."),
        Metric("tools/frac_failed_calls", "Failed tool calls", "share",
               "Share of tool calls that failed: unknown tool, bad arguments, or an error of the tool.", "Falls."),
    )),
    Group("Supervised fine-tuning", 'Of runs with `method = "sft"`.', (
        Metric("sft/loss", "Loss", "nats per token",
               "Mean negative log-prob of the learned tokens of the step, before its update.",
               "Falls, fast at first. See `eval/TASK/loss` for answers that are not learned."),
        Metric("sft/num_tokens", "Tokens", "tokens", "Tokens of the step's conversations."),
        Metric("sft/num_learned_tokens", "Learned tokens", "tokens",
               "Those of them that are in the loss (`task.train_on`).",
               "Above 0. `jetrl sft RECIPE --dry-run` shows which they are."),
    )),
    Group("Policy", "Means over the tokens in the loss, of all updates of the step.", (
        Metric("policy/loss", "Policy loss", "",
               "The policy's loss, as `rl.loss_agg` averages it. With on-policy GRPO it is close to 0 by construction, "
               "and its value says little.",
               "Finite. Judge learning by the reward."),
        Metric("policy/grad_norm", "Gradient norm, before clipping", "",
               "Norm of the policy's gradient, before `train.max_grad_norm` clips it.",
               "Steady. Lasting jumps to 10 times the usual mean too high a learning rate or broken rewards. Exactly "
               "0: nothing was learned."),
        Metric("policy/lr", "Learning rate", "", "Learning rate of the update."),
        Metric("policy/entropy", "Entropy", "nats per token",
               "Entropy of the policy's next-token distribution, at the sampling temperature.",
               "Falls slowly. A fall to about 0 means that all samples of a group are the same; a steady rise means "
               "that the policy is falling apart."),
        Metric("policy/kl", "KL to the old policy", "nats per token",
               "Mean of `log pi_old - log pi`: how far the updates of a step move the policy. 0 with one update per "
               "step.",
               "Below about 0.02."),
        Metric("policy/logprob_abs_change_mean", "Change of log-probs by updates", "nats per token",
               "Mean size of the change of a token's log-prob since the step's first update.",
               "Below about 0.1. 0 with one update per step."),
        Metric("policy/ratio_mean", "Mean ratio to the old policy", "",
               "Mean of `pi / pi_old`, of the tokens or sequences that `rl.ratio` compares.", "Within 1 % of 1."),
        Metric("policy/clip_frac_low", "Clipped below", "share",
               "Share of tokens without gradient because their ratio fell below `1 - rl.clip_ratio_low`.",
               "Up to about 0.1. More: lower the learning rate or `rl.updates_per_step`."),
        Metric("policy/clip_frac_high", "Clipped above", "share",
               "Share of tokens without gradient because their ratio rose above `1 + rl.clip_ratio_high`.",
               "Up to about 0.1."),
        Metric("policy/clip_frac_dual", "Clipped by the dual clip", "share",
               "Share of tokens that `rl.clip_ratio_c` bounds: negative advantage and a very large ratio.",
               "Close to 0."),
        Metric("policy/ref_kl", "KL to the reference policy", "nats per token",
               "Mean of the KL estimate (`rl.kl_estimator`) against the reference policy. Logged if `rl.kl_coef` is "
               "above 0.",
               "Grows, then levels off. If it keeps growing, raise `rl.kl_coef`."),
        Metric("policy/teacher_kl", "Reverse KL to the teacher", "nats per token",
               "Mean over the policy's own tokens of its log-prob minus the teacher's. Logged with `teacher.path`.",
               "Falls, and stays above 0. What is left is what the policy cannot learn of the teacher."),
        Metric("policy/teacher_kl_top_k", "KL over the teacher's most probable tokens", "nats per token",
               "Mean of the KL that is in the loss: over `teacher.top_k` tokens and the rest as one. Logged with "
               "`teacher.top_k`.", "Falls. Below `policy/teacher_kl` where the rest matters."),
        Metric("policy/teacher_kl/TEACHER", "Reverse KL to one teacher", "nats per token",
               "With several teachers: the same over the rows of one, by its value in `teacher.values`.", "Falls."),
        Metric("policy/noise_abs_mean", "Noise of rounding", "nats per token",
               "Mean size of the change of a token's log-prob when the first norm is nudged by one unit: how far "
               "rounding alone moves log-probs. With several updates per step, every `rl.noise_interval` steps.",
               "Below `policy/logprob_abs_change_mean`. Above it, ratios are mostly noise."),
        Metric("policy/noise_clip_frac", "Clipped by noise alone", "share",
               "Share of tokens that the clip would cut off if nothing but rounding had changed. Logged with the one "
               "above.",
               "Below 0.03; above, the console says so: widen the clip, use `cispo`, or `w8a16`."),
        Metric("policy/clip_bound_low", "Lower bound of the clip", "",
               'With `rl.clip = "calibrated"`: the bound that the step used, of the ratio itself.',
               "Between 0 and 1. Below `1 - rl.clip_ratio_low` where low precision widens ratios."),
        Metric("policy/clip_bound_high", "Upper bound of the clip", "",
               'With `rl.clip = "calibrated"`: the bound that the step used, of the ratio itself.',
               "Above 1, and above `1 + rl.clip_ratio_high` where low precision widens ratios."),
        Metric("policy/clip_frac_shadow", "Clipped in BF16", "share",
               "In steps that calibrate the clip: share of tokens that BF16 cuts off at the recipe's bounds.",
               "Close to the run's own share, `policy/clip_frac_low` plus `policy/clip_frac_high`."),
        Metric("policy/clip_frac_not_in_shadow", "Clipped, but not in BF16", "share",
               "In steps that calibrate the clip: share of tokens that the run cuts off at the bounds it used, and "
               "BF16 does not.",
               "Falls with the first calibrations, then stays small."),
        Metric("policy/code_flips", "Weight codes that changed", "share",
               "Share of FP8 weight codes that the step's last publishing changed.",
               "Small and steady. Its size says little about the noise."),
        Metric("policy/max_token_share", "Share of the largest token", "share",
               "Share of the loss's terms, by absolute size, that belongs to a single token.",
               "Far below 0.5; above, one token owns the update and the console names it."),
    )),
    Group("Parity", "The learner's log-probs against those recorded at sampling, token by token.", (
        Metric("parity/logprob_abs_diff_max", "Largest log-prob gap", "log-prob gap",
               "Largest |log-prob of the learner - log-prob of the sampler| of a token.",
               "Exactly 0 with `bf16`, `fp8` and `w8a16`. With `fp8_rollout` or another engine some 0.01 to 1."),
        Metric("parity/logprob_abs_diff_mean", "Mean log-prob gap", "log-prob gap",
               "Mean of the same gap over all tokens.", "0, as above; otherwise below about 0.02."),
        Metric("parity/frac_tokens_different", "Tokens with a gap", "share",
               "Share of tokens whose log-prob differs at all.", "0, as above."),
        Metric("parity/k3_kl", "KL to the learner (k3)", "nats per token",
               "Mean of `exp(d) - 1 - d`, with d = learner - sampler: an estimate of KL(sampler || learner).",
               "0, as above; otherwise below about 0.001."),
        Metric("parity/token_mult_prob_error", "Multiplicative gap", "",
               "Mean of `exp(|d|)`, as NeMo RL defines it.", "Exactly 1, as above; otherwise below about 1.05."),
        Metric("parity/rollout_probs_diff_max", "Largest gap of a probability", "",
               "Largest difference of the two probabilities of a token, as verl defines it.", "0, as above."),
        Metric("parity/abs_diff_from_token_N", "Log-prob gap by position", "log-prob gap",
               "Mean gap of the tokens number N to 2N - 1 of the answers; N = 1, 2, 4, ...",
               "0, as above; otherwise much the same at every position. Growth with N is a gap that builds up."),
        Metric("parity/frac_checked_live", "Tokens compared", "share",
               "With `rollout.overcommit`: share of the tokens of the first update that the current weights drew. "
               "These are what the other metrics compare; the others are of older weights.",
               "Above about 0.5."),
        Metric("parity/frac_routing_different", "Other experts in the rollout", "share",
               "With `train.compare_routing`: share of (token, layer) pairs that choose other experts in the rollout "
               "than in training.",
               "0, except with `fp8_rollout`."),
    )),
    Group("Corrections", "Of `rl.rollout_is`, `rl.rollout_rs` and `rl.rollout_veto`.", (
        Metric("correction/weight_mean", "Importance weight", "",
               "Mean weight of a token, after truncation and rejection.", "Close to 1."),
        Metric("correction/frac_truncated", "Truncated importance weights", "share",
               "Share of tokens whose weight was cut to `rl.rollout_is_threshold`.", "Below about 0.01."),
        Metric("correction/frac_rejected", "Masked by rejection", "share",
               "Share of tokens that rejection or the veto left out of the loss.", "Below about 0.05."),
        Metric("correction/frac_vetoed", "Masked by the veto", "share",
               "Share of tokens whose sequence `rl.rollout_veto` left out.", "Close to 0."),
        Metric("correction/effective_sample_size", "Effective sample size", "share",
               "Share of the tokens that would say as much with equal weights (Kish).", "Above about 0.9."),
        Metric("rl/ess", "Effective sample size before truncation", "share",
               "With `rollout.overcommit`: the same of weights that are not truncated, between the current weights and "
               "those that drew each token. 1 where all are the same.",
               "Above 0.5; below, the console says so. A fall comes before a collapse."),
    )),
    Group("Critic", "With `rl.critic` (PPO).", (
        Metric("critic/loss", "Critic loss", "", "Clipped squared error of the predicted returns.", "Falls."),
        Metric("critic/grad_norm", "Gradient norm of the critic", "",
               "Norm of the critic's gradient, before clipping. Logged by a critic of its own.", "Steady."),
        Metric("critic/explained_variance", "Explained variance", "share",
               "Share of the returns' variance that the critic explains: 1 is perfect, 0 is no better than the mean.",
               "Rises above 0 within tens of steps. Below 0, the critic misleads: raise `rl.critic_warmup_steps`."),
        Metric("critic/value_mean", "Mean value", "reward", "Mean of the predicted returns.",
               "Close to `critic/return_mean`."),
        Metric("critic/return_mean", "Mean return", "reward", "Mean of the returns that the critic learns."),
        Metric("critic/clip_frac", "Clipped values", "share", "Share of tokens that `rl.value_clip` cuts off.",
               "Up to about 0.1."),
    )),
    Group("Mixtures of experts", "Of models with experts.", (
        Metric("moe/load_max_over_mean", "Load of the busiest expert", "",
               "Tokens of the busiest expert over those of the mean expert, in the most uneven layer.",
               "Stays where the pretrained model has it. A steady rise means that routing collapses."),
        Metric("moe/router_entropy", "Entropy of the routers", "nats", "Mean entropy of a router's choice.",
               "Steady."),
        Metric("moe/aux_loss", "Balance loss", "",
               "The routers' balance loss (`train.router_aux_loss_coef`): 1 is even, experts / active experts is a "
               "collapse.",
               "Close to 1."),
        Metric("moe/z_loss", "Router z-loss", "",
               "Mean of the squared logsumexp of the routers' logits (`train.router_z_loss_coef`).",
               "Falls, or stays level."),
    )),
    Group("Sampling", "How a step came by its completions.", (
        Metric("data/epoch", "Epoch", "epochs",
               "Prompts taken so far over the rows of the data set. Absent where the task makes up problems."),
        Metric("data/num_given", "Given answers", "answers",
               "Answers of the data in the step, in place of the policy's own. Logged with `teacher.given_fraction`."),
        Metric("data/num_given_tokens", "Tokens of given answers", "tokens",
               "Those of them in the loss. Logged with `teacher.given_fraction`."),
        Metric("rollout/num_prompts_sampled", "Prompts sampled", "prompts",
               'With `rl.dynamic_sampling = "refill"`: prompts that the step sampled, all rounds included.',
               "Close to `rollout.prompts_per_step`."),
        Metric("rollout/refill_rounds", "Rounds of refill", "rounds",
               "Rounds that it took to fill the step with groups that carry a signal.", "1 or 2."),
        Metric("rollout/carried", "Groups carried over", "groups",
               "With `rollout.overcommit`: groups that are under way when the step ends, and go on in the next one.",
               "`rollout.overcommit` times `rollout.prompts_per_step`."),
        Metric("rollout/dropped_stale", "Groups too old", "groups",
               "With `rl.on_stale = \"drop\"`: groups under way that were dropped: their oldest tokens would be more "
               "than `rl.max_off_policy_steps` behind.",
               "Close to 0. They cost time, and long answers are lost more often than short ones."),
        Metric("rollout/horizon", "New tokens of an answer", "tokens",
               "With `rollout.overcommit`: the most tokens that an answer drew in this step. The step is cut there.",
               "Well below `rollout.max_response_length`; else nothing is gained."),
        Metric("rollout/off_policy_steps_mean", "Age of tokens", "updates",
               "With `rollout.overcommit`: updates between the weights that drew a token and those that learn from it, "
               "mean over the policy's tokens that the step learns from.",
               "Below 1."),
        Metric("rollout/off_policy_steps_max", "Largest age of a token", "updates",
               "The largest such number.", "At most `rl.max_off_policy_steps`."),
        Metric("rollout/frac_stale_tokens", "Tokens of older weights", "share",
               "With `rollout.overcommit`: share of these tokens that older weights drew.", "Below about 0.5."),
        Metric("rollout/version_spans", "Versions of an answer", "",
               "With `rollout.overcommit`: versions of the weights that drew an answer, mean over the answers.",
               "1 to 2."),
        Metric("rollout/tokens_per_decode_step", "Tokens per decode step", "tokens",
               "With `rollout.speculate`: tokens that a sequence gains per decode step.", "Above 1."),
        Metric("rollout/draft_share", "Drafted tokens", "",
               "Tokens that were computed as drafts, over tokens that were drawn."),
        Metric("rollout/draft_acceptance", "Accepted drafts", "share", "Share of drafted tokens that held.",
               "Above about 0.5; below, speculation costs more than it saves."),
        Metric("rollout/draft_acceptance_SOURCE", "Accepted drafts of one source", "share",
               "The same for one source: `own` (this answer), `siblings` (of its group), `history` (earlier answers)."),
    )),
    Group("Time", "By the clock, of the row's step; a phase that did not run is absent.", (
        Metric("time/step", "Time of a step", "seconds", "Sum of all phases below."),
        Metric("time/rollout", "Time of sampling", "seconds", "Sampling, environments included.",
               "The largest part, with long answers."),
        Metric("time/reward", "Time of rewards", "seconds", "Scoring after the rollout.",
               'Small. Otherwise `task.reward_calls = "group"` scores during the rollout.'),
        Metric("time/encode", "Time of encoding", "seconds", "Given answers made tokens, with `method = \"sft\"`."),
        Metric("time/pack", "Time of packing", "seconds", "Packing trajectories into micro-batches."),
        Metric("time/update", "Time of the update", "seconds",
               "Forward, backward and optimizer, and the passes of reference, old policy and critic."),
        Metric("time/publish", "Time of publishing", "seconds", "Rounding and quantizing the new weights."),
        Metric("time/eval", "Time of evaluation", "seconds", "Sampling and scoring of held-out problems."),
        Metric("time/checkpoint", "Time of checkpoints", "seconds", "The run's wait for checkpoints."),
        Metric("time/report", "Time of the report", "seconds", "Writing `report.html` during the run."),
        Metric("time/warm start", "Time of the warm start", "seconds", "Supervised steps before step 1 (row 0)."),
    )),
    Group("Performance", "Speed and memory. Row 0 has what belongs to the start.", (
        Metric("perf/tokens_per_s_per_gpu", "Tokens/s per GPU", "tokens per second",
               "Tokens sampled per second of the rollout, per GPU (per process on a CPU). With `method = \"sft\"`: "
               "tokens of the given answers per second of the update."),
        Metric("perf/frac_rows_saved", "Rows saved by sharing prompts", "share",
               "With `train.share_prompts`: share of the update's rows that sharing saves."),
        Metric("perf/reward_beside_s", "Scoring beside the rollout", "seconds",
               'With `task.reward_calls = "group"`: seconds of scoring while sampling went on.'),
        Metric("perf/checkpoint_beside_s", "Writing beside the run", "seconds",
               "Seconds in which a thread wrote a checkpoint while training went on."),
        Metric("perf/compile_s", "Compiling kernels", "seconds",
               "Seconds spent on compiling kernels before step 1.", "About a second once the cache is filled."),
        Metric("perf/graph_captures", "CUDA graphs captured", "graphs", "CUDA graphs captured since the last row.",
               "0 after the first steps."),
        Metric("perf/graph_capture_s", "Capturing CUDA graphs", "seconds", "Seconds that this took.",
               "0 after the first steps."),
        Metric("perf/kv_cache_kept_gib", "KV cache kept", "GiB", "KV cache that stays allocated between rollouts."),
        Metric("perf/communication_s", "Communication", "seconds",
               "Several ranks: mean wait of a rank in exchanges of update and publish.",
               "A few percent of `time/step`."),
        Metric("perf/memory_peak_gib_max", "GPU memory", "GiB", "Several ranks: peak so far on the fullest GPU.",
               "Below the GPU's memory, and level after the first steps."),
        Metric("perf/memory_peak_gib_mean", "GPU memory, mean", "GiB", "Several ranks: mean of the peaks so far."),
        Metric("perf/rank_idle_max_s", "Idle ranks", "seconds",
               "Several ranks: seconds that the first rank to end a rollout waits for the last.",
               "Small against `time/rollout`; one very long answer makes it large."),
        Metric("perf/rank_idle_mean_s", "Idle ranks, mean", "seconds",
               "Several ranks: mean wait for the slowest rank of a rollout."),
        Metric("perf/slowest_rank_share", "Share of the slowest rank", "",
               "Tokens of the slowest rank over an equal part of all tokens.", "Close to 1."),
        Metric("perf/vllm_sync_s", "Weights into vLLM", "seconds", "vLLM: seconds spent on loading new weights."),
        Metric("perf/vllm_check_s", "Check of vLLM's weights", "seconds",
               "vLLM: seconds spent on checking that it holds the published weights."),
        Metric("perf/vllm_wake_s", "Waking vLLM up", "seconds", "vLLM: seconds spent on taking its memory back."),
        Metric("perf/vllm_sleep_s", "Putting vLLM to sleep", "seconds", "vLLM: seconds spent on giving its memory up."),
        Metric("perf/vllm_calibrate_s", "Scales for vLLM", "seconds",
               "vLLM: seconds spent on measuring the scales of its FP8 KV cache."),
        Metric("vllm/PART_scale_max", "Largest scale of vLLM", "",
               "vLLM with an FP8 KV cache: largest scale over the layers, for PART = q, k and v."),
        Metric("vllm/kv_scale_tokens", "Tokens of the scales", "tokens",
               "Tokens on which the scales were measured."),
        Metric(IN_EVAL + "METRIC", "During the evaluation", "",
               "An engine's own metric during the evaluation, which is kept apart from the rollout's."),
    )),
)
METRICS = tuple(metric for group in GROUPS for metric in group.metrics)
_NAMED = {metric.name: metric for metric in METRICS if not metric.open}


def pattern(name: str) -> str:
    """The regular expression of the names that a name with words in capitals stands for."""
    fillings = [r"\d+" if word in ("K", "N") else ".+" for word in _WORD.findall(name)]
    fixed = [re.escape(part) for part in _WORD.split(name)]
    return "".join(part for pair in zip(fixed, [*fillings, ""], strict=True) for part in pair)


@cache
def metric_of(key: str) -> Metric | None:
    """What is known of a metric by its name in metrics.jsonl. None for one that an engine of the user's logs."""
    if (found := _NAMED.get(key)) is not None:
        return found
    fitting = [metric for metric in METRICS if metric.open and re.fullmatch(pattern(metric.name), key)]
    return max(fitting, key=lambda metric: len(_WORD.sub("", metric.name)), default=None)


def title_of(key: str) -> str:
    """The title of a chart; of an unknown metric its name."""
    metric = metric_of(key)
    return key if metric is None else metric.title


INTRO = """# Metrics

<!-- Written by `python -m jetrl.report.metrics > docs/METRICS.md`; a test compares. -->

Every step writes one row to `metrics.jsonl` in the run folder. The report draws all of them, and
trackers (`track.backends`) receive them under the same names. Row 0 comes before training: the
first evaluation, the warm start and the time to compile.

- A metric that was not measured is absent. It is never written as 0.
- "About" marks a rule of thumb. It is not a limit that jetrl checks.
- Words in capitals are filled in by the run: TASK is `task.name`, FUNCTION a reward function, K the
  completions per problem (`eval.num_samples`).
- With several updates per step, means are taken over the tokens of all of them.
"""


def describe_metrics() -> str:
    """`docs/METRICS.md` as Markdown: every metric with its unit, meaning and healthy values."""
    parts = [INTRO]
    for group in GROUPS:
        rows = [f"## {group.heading}", "", group.about, ""]
        rows += ["| metric | unit | what it is | healthy |", "|---|---|---|---|"]
        for one in group.metrics:
            cells = (f"`{one.name}`", one.unit, one.meaning, one.healthy)
            shown = [cell.replace("|", "\\|") for cell in cells]
            rows.append(f"| {' | '.join(shown)} |")
        parts.append("\n".join(rows) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    print(describe_metrics(), end="")
