"""Several updates of a step as one row: what counts tokens weighs by tokens, what counts sequences by sequences."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from jetrl.report.run import headline, load_runs
from jetrl.rl import losses, mismatch, objective, routing
from jetrl.rl.losses import Denominators
from jetrl.train import merging, step
from jetrl.train.merging import Part, merged
from jetrl.train.step import update
from tests.tiny import tiny_run
from tests.train.test_step import sampled

SMALL, LARGE = Denominators(12, 3, (6, 4, 2), 64), Denominators(277, 9, (31,) * 8 + (29,), 64)
# every metric of an update with what it counts: tokens, sequences, updates, the aggregation, the largest
COUNTS = {
    "policy/loss": "agg", "policy/ratio_mean": "tokens", "policy/kl": "tokens",
    "policy/logprob_abs_change_mean": "tokens", "policy/clip_frac_low": "tokens", "policy/clip_frac_high": "tokens",
    "policy/clip_frac_dual": "tokens", "policy/ref_kl": "tokens", "policy/entropy": "tokens",
    "policy/frac_in_terms": "tokens", "policy/frac_ratio_beyond": "tokens",
    "policy/grad_norm": "updates", "policy/lr": "updates", "policy/max_token_share": "largest",
    "critic/loss": "agg", "critic/value_mean": "tokens", "critic/clip_frac": "tokens", "critic/return_mean": "tokens",
    "critic/return_square_mean": "tokens", "critic/error_square_mean": "tokens", "critic/grad_norm": "updates",
    "correction/weight_mean": "tokens", "correction/weight_square_mean": "tokens",
    "correction/frac_rejected": "tokens", "correction/frac_vetoed": "tokens", "correction/frac_truncated": "tokens",
    "policy/teacher_kl_top_k": "tokens",
    "moe/router_entropy": "tokens", "moe/z_loss": "tokens", "moe/aux_loss": "sequences",
}
MADE_LATER = {  # of all updates together
    "critic/explained_variance", "correction/effective_sample_size", "moe/load_max_over_mean",
}


def test_every_metric_of_an_update_is_in_the_table() -> None:
    """Keys that the modules of an update write. A new one must say what it counts."""
    source = "".join(inspect.getsource(m) for m in (losses, mismatch, objective, routing, step, merging))
    found = set(re.findall(r'"((?:policy|critic|correction|moe)/\w+)"', source))
    found |= {f"correction/{key}" for key in re.findall(r'"(\w+)": |values\["(\w+)"\]', inspect.getsource(
        mismatch.correction_stats)) for key in key if key}
    assert found - MADE_LATER <= set(COUNTS), found - MADE_LATER - set(COUNTS)


@pytest.mark.parametrize("loss_agg", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm"])
@pytest.mark.parametrize("key", sorted(COUNTS.keys() - {"correction/weight_square_mean", "critic/return_square_mean",
                                                        "critic/error_square_mean", "policy/frac_in_terms",
                                                        "policy/frac_ratio_beyond"}))
def test_each_weighs_by_what_it_counts(key: str, loss_agg: str) -> None:
    kind = COUNTS[key]
    if kind == "agg":
        kind = "tokens" if loss_agg == "token_mean" else "sequences"
    expected = {
        "tokens": (12 * 1.0 + 277 * 3.0) / 289, "sequences": (3 * 1.0 + 9 * 3.0) / 12, "updates": 2.0, "largest": 3.0,
    }[kind]
    parts = [Part({key: 1.0}, SMALL), Part({key: 3.0}, LARGE)]
    assert merged(parts, loss_agg)[key] == pytest.approx(expected, rel=1e-12)
    assert merged(parts[:1], loss_agg)[key] == 1.0, "one update keeps its bits"
    assert merged([Part({}, SMALL), parts[1]], loss_agg)[key] == 3.0, "a mean over the updates that have it"


def test_masked_tokens_count_in_a_loss_that_counts_them() -> None:
    shares = replace(SMALL, masked_tokens=88, num_sequences=7)
    parts = [Part({"policy/loss": 1.0, "policy/kl": 1.0}, shares), Part({"policy/loss": 3.0, "policy/kl": 3.0}, LARGE)]
    found = merged(parts, "token_mean")
    assert found["policy/loss"] == pytest.approx((100 * 1.0 + 277 * 3.0) / 377)
    assert found["policy/kl"] == pytest.approx((12 * 1.0 + 277 * 3.0) / 289)


def test_ratios_of_means_are_made_of_the_steps_means() -> None:
    """The effective sample size and the explained variance of all tokens, not means of those of updates."""
    one = {"correction/weight_mean": 1.0, "correction/weight_square_mean": 1.0, "policy/kl": 0.5,
           "policy/frac_in_terms": 0.5}
    other = {"correction/weight_mean": 0.5, "correction/weight_square_mean": 1.0, "policy/kl": 1.0,
             "policy/frac_in_terms": 1.0}
    shares = replace(SMALL, num_loss_tokens=12)
    found = merged([Part(one, shares), Part(other, shares)], "token_mean")
    assert found["correction/effective_sample_size"] == pytest.approx(0.75**2 / 1.0)
    assert found["policy/kl"] == pytest.approx(0.75 / 0.75), "0.5 over half of the tokens, and 1 over all"
    assert "correction/weight_square_mean" not in found and "policy/frac_in_terms" not in found
    critic = {"critic/value_mean": 0.0, "critic/return_square_mean": 1.0, "critic/error_square_mean": 0.5}
    parts = [Part(critic | {"critic/return_mean": mean}, shares) for mean in (1.0, -1.0)]
    # returns 1 and -1, errors around their means 1 and -1: bias of the whole 0, so 1 - 0.5 / 1
    assert merged(parts, "token_mean")["critic/explained_variance"] == pytest.approx(0.5)


def test_ratios_that_overflow_are_left_out_of_the_steps_mean() -> None:
    """Half of the ratios of the first update overflow; the mean is over the others of both."""
    one = {"policy/ratio_mean": 0.5, "policy/frac_ratio_beyond": 0.5}
    other = {"policy/ratio_mean": 2.0, "policy/frac_ratio_beyond": 0.0}
    shares = replace(SMALL, num_loss_tokens=12)
    found = merged([Part(one, shares), Part(other, shares)], "token_mean")
    assert found == {"policy/ratio_mean": pytest.approx((6 * 1.0 + 12 * 2.0) / 18)}


def test_metrics_of_a_step_are_those_of_its_tokens(tmp_path: Path) -> None:
    """Entropy of two updates of unequal size with a learning rate of next to nothing: that of one update of all."""
    changes = {"precision": "bf16", "train.lr": 1e-12, "rollout.prompts_per_step": 3}
    session, (whole,) = sampled(tmp_path / "a", changes)
    other, parts = sampled(tmp_path / "b", changes | {"rl.updates_per_step": 2})
    sizes = [batch.num_loss_tokens for batch in parts]
    assert len(sizes) == 2 and sizes[0] != sizes[1] and sum(sizes) == whole.num_loss_tokens
    one, two = update(session.learner, [whole], session.config, 1), update(other.learner, parts, other.config, 1)
    for key in ("policy/entropy", "policy/kl", "policy/clip_frac_low"):
        assert two[key] == pytest.approx(one[key], rel=1e-6, abs=1e-6), key


def masked_first(tmp_path: Path, changes: dict[str, object]):
    """A session and two batches, of which every trajectory of the first is outside the loss."""
    session, batches = sampled(tmp_path, {"rl.updates_per_step": 2} | changes)
    first = batches[0]
    micros = tuple(replace(m, loss_mask=torch.zeros_like(m.loss_mask)) for m in first.micro_batches)
    empty = replace(first, micro_batches=micros, num_loss_tokens=0, sequence_tokens=(0,) * first.num_sequences)
    return session, [empty, batches[1]]


def test_parity_is_there_whenever_the_weights_are_those_that_sampled(tmp_path: Path) -> None:
    session, batches = masked_first(tmp_path / "masked", {})
    found = update(session.learner, batches, session.config, 1)
    assert found["parity/logprob_abs_diff_max"] == 0.0, "the first update was skipped: nothing has changed"
    session, batches = masked_first(tmp_path / "none", {})
    assert update(session.learner, batches[:1], session.config, 1) == {}, "absent, not 0"


def test_parity_in_the_critics_warm_up_is_over_all_updates(tmp_path: Path) -> None:
    changes = {"rl.algo": "ppo", "rl.updates_per_step": 2, "rl.critic_warmup_steps": 1, "rl.critic_lr": 1e-3}
    session, batches = sampled(tmp_path, changes)
    before = {name: value.clone() for name, value in session.model.state_dict().items()}
    seen: list[int] = []
    add = mismatch.MismatchAccumulator.add

    def counted(self, trainer, *rest, **options):  # type: ignore[no-untyped-def]
        seen.append(len(trainer))
        return add(self, trainer, *rest, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mismatch.MismatchAccumulator, "add", counted)
        found = update(session.learner, batches, session.config, 1)
        assert sum(seen) == sum(batch.num_loss_tokens for batch in batches)
        assert found["parity/logprob_abs_diff_max"] == 0.0 and "policy/loss" not in found
        assert all(torch.equal(value, before[name]) for name, value in session.model.state_dict().items())
        seen.clear()
        after = update(session.learner, batches, session.config, 2)
        assert sum(seen) == batches[0].num_loss_tokens and after["parity/logprob_abs_diff_max"] == 0.0


def test_a_run_with_a_warm_up_of_the_critic_has_parity_in_every_step(tmp_path: Path) -> None:
    run_dir = tiny_run(tmp_path, {
        "rl.algo": "ppo", "rl.critic_warmup_steps": 2, "rl.critic_lr": 1e-3, "rl.updates_per_step": 2,
    })
    numbers = headline(load_runs([run_dir])[0])
    assert (numbers.parity_steps, numbers.parity_nonzero_steps, numbers.parity_missing) == (4, 0, 0)
