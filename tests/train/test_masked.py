"""Trajectories outside the loss (`rl.mask_truncated`), from the passes to the loss: every algorithm, with and without
the mask, a KL in the loss and in the reward, masked sequences that count and that do not, against numbers by hand.

One step of three groups. A token has log-prob -1, and -1 - k in the reference (k1 = k); the critic says 0.5 everywhere.

    group 0: a1 2 tokens, reward 1, k 0.25    a2 1 token, reward 0, k 0.25    a3 3 tokens, reward 0, k 0.5, cut off
    group 1: b1 1 token, reward 1, k 0.5      b2 2 tokens, reward 0, k 0.5, cut off: all but one are masked
    group 2: c1 1 token, reward 1, k 0.5, cut off    c2 1 token, reward 0, k 0.5, cut off: all are masked
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from jetrl.config import parse_config
from jetrl.parallel.world import ALONE
from jetrl.presets import PRESETS
from jetrl.report.recorder import group_rows
from jetrl.rl.objective import Inputs, objective
from jetrl.run.no_signal import without_signal
from jetrl.train import passes
from jetrl.train.batches import PackedBatch
from jetrl.train.packing import denominators, fill, pack
from jetrl.train.passes import estimate
from jetrl.train.step import Learner
from jetrl.types import Group, Problem, Prompt, Segment, Trajectory
from tests.tiny import tiny_data

# name, group, tokens, reward, KL of each token, cut off
ROWS = [
    ("a1", 0, 2, 1.0, 0.25, False), ("a2", 0, 1, 0.0, 0.25, False), ("a3", 0, 3, 0.0, 0.5, True),
    ("b1", 1, 1, 1.0, 0.5, False), ("b2", 1, 2, 0.0, 0.5, True),
    ("c1", 2, 1, 1.0, 0.5, True), ("c2", 2, 1, 0.0, 0.5, True),
]
ALGOS = list(PRESETS)
ESTIMATOR = {algo: PRESETS[algo].values.get("adv_estimator", "grpo") for algo in ALGOS}
KIND = {algo: "dr_grpo" if algo == "dr_grpo" else ESTIMATOR[algo] for algo in ALGOS}

# By hand, masked; None: outside the loss. Without a KL in the reward the baseline knows the rewards of all.
#   grpo, group 0: rewards 1, 0, 0: mean 1/3, deviations 2/3, -1/3, -1/3, variance (6/9)/2 = 1/3, std 0.5773503
#         group 1: rewards 1, 0: 0.5 / 0.7071068
#   rloo, a1: 1 - 0; a2: 0 - (1 + 0)/2; b1: 1 - 0
#   reinforce_pp, gae: rewards to go of the tokens in the loss a1 1, 1, a2 0, b1 1 (gae: minus 0.5):
#         mean 0.75, variance (3 * 0.0625 + 0.5625)/3 = 0.25, std 0.5
KL_IN_LOSS = {
    "grpo": {"a1": 1.1547005, "a2": -0.5773503, "b1": 0.7071068},
    "dr_grpo": {"a1": 2 / 3, "a2": -1 / 3, "b1": 0.5},
    "rloo": {"a1": 1.0, "a2": -0.5, "b1": 1.0},
    "reinforce_pp": {"a1": (0.5, 0.5), "a2": (-1.5,), "b1": (0.5,)},
    "gae": {"a1": (0.5, 0.5), "a2": (-1.5,), "b1": (0.5,)},
    "teacher": {"a1": (0.0, 0.0), "a2": (0.0,), "b1": (0.0,)},  # nothing of rewards
}
# With the KL in the reward (kl_coef 1) the scores in the loss are a1 1 - 0.5 = 0.5, a2 -0.25, b1 0.5; no others exist.
#   grpo, group 0: mean 0.125, deviations 0.375, variance 0.28125, std 0.5303301; group 1: one score, 0
#   reinforce_pp: to go a1 0.5, 0.75, a2 -0.25, b1 0.5: mean 0.375, deviations 0.125, 0.375, -0.625, 0.125,
#         variance 0.5625/3 = 0.1875, std 0.4330127; gae: the same numbers minus 0.5
KL_IN_REWARD = {
    "grpo": {"a1": 0.7071068, "a2": -0.7071068, "b1": 0.0},
    "dr_grpo": {"a1": 0.375, "a2": -0.375, "b1": 0.0},
    "rloo": {"a1": 0.75, "a2": -0.75, "b1": 0.0},
    "reinforce_pp": {"a1": (0.2886751, 0.8660254), "a2": (-1.4433757,), "b1": (0.2886751,)},
    "gae": {"a1": (0.2886751, 0.8660254), "a2": (-1.4433757,), "b1": (0.2886751,)},
    "teacher": {"a1": (-0.25, -0.25), "a2": (-0.25,), "b1": (-0.5,)},  # each token pays its own
}
# Without the mask everything is in everything. Scores with KL: a3 -1.5, b2 -1, c1 0.5, c2 -0.5.
#   grpo with KL, group 0: mean -0.4166667, deviations 0.9166667, 0.1666667, -1.0833333, std 1.0103630
#   reinforce_pp: 11 tokens, four of them 1: mean 4/11, std sqrt(28/110) = 0.5045250
#   with KL: to go 0.5 0.75 | -0.25 | -1.5 -1 -0.5 | 0.5 | -1 -0.5 | 0.5 | -0.5: mean -3/11, variance
#         (sum of squares 6.375 - 9/11)/10 = 0.5556818, std 0.7454407
ONE, ZERO = (7 / 11) / 0.5045250, (-4 / 11) / 0.5045250
OFF_LOSS = {
    "grpo": {"a1": 1.1547005, "a2": -0.5773503, "a3": -0.5773503, "b1": 0.7071068, "b2": -0.7071068,
             "c1": 0.7071068, "c2": -0.7071068},
    "dr_grpo": {"a1": 2 / 3, "a2": -1 / 3, "a3": -1 / 3, "b1": 0.5, "b2": -0.5, "c1": 0.5, "c2": -0.5},
    "rloo": {"a1": 1.0, "a2": -0.5, "a3": -0.5, "b1": 1.0, "b2": -1.0, "c1": 1.0, "c2": -1.0},
    "reinforce_pp": {"a1": (ONE,) * 2, "a2": (ZERO,), "a3": (ZERO,) * 3, "b1": (ONE,), "b2": (ZERO,) * 2,
                     "c1": (ONE,), "c2": (ZERO,)},
}
OFF_LOSS["gae"] = OFF_LOSS["reinforce_pp"]
OFF_LOSS["teacher"] = {name: (0.0,) * tokens for name, _, tokens, *_ in ROWS}


def white(*to_go: float) -> tuple[float, ...]:
    return tuple((x + 3 / 11) / 0.7454407 for x in to_go)


OFF_REWARD = {
    "grpo": {"a1": 0.9072649, "a2": 0.1649573, "a3": -1.0722219, "b1": 0.7071068, "b2": -0.7071068,
             "c1": 0.7071068, "c2": -0.7071068},
    "dr_grpo": {"a1": 0.9166667, "a2": 0.1666667, "a3": -1.0833333, "b1": 0.75, "b2": -0.75, "c1": 0.5, "c2": -0.5},
    "rloo": {"a1": 1.375, "a2": 0.25, "a3": -1.625, "b1": 1.5, "b2": -1.5, "c1": 1.0, "c2": -1.0},
    "reinforce_pp": {"a1": white(0.5, 0.75), "a2": white(-0.25), "a3": white(-1.5, -1, -0.5), "b1": white(0.5),
                     "b2": white(-1, -0.5), "c1": white(0.5), "c2": white(-0.5)},
}
OFF_REWARD["gae"] = OFF_REWARD["reinforce_pp"]
OFF_REWARD["teacher"] = {name: (-kl,) * tokens for name, _, tokens, _, kl, _ in ROWS}
EXPECTED = {(True, "loss"): KL_IN_LOSS, (True, "reward"): KL_IN_REWARD, (False, "loss"): OFF_LOSS,
            (False, "reward"): OFF_REWARD}
KL = {name: k for name, _, _, _, k, _ in ROWS}


def trajectory(number: int, tokens: int, cut: bool) -> Trajectory:
    """Its tokens have its number as id, by which the passes know it."""
    drawn = Segment("policy", (number,) * tokens, "x", (-1.0,) * tokens, spans=((0, 0),))
    segments = (Segment("environment", (99,), "?"), drawn)
    return Trajectory(segments, "length" if cut else "stop", "flow")


def groups_of(rows: Sequence[tuple[Any, ...]]) -> list[Group]:
    found = []
    for index in sorted({row[1] for row in rows}):
        own = [(i, row) for i, row in enumerate(rows) if row[1] == index]
        trajectories = tuple(trajectory(i, row[2], row[5]) for i, row in own)
        prompt = Prompt(index, Problem(str(index), "?", "!"), (99,))
        found.append(Group(prompt, trajectories, tuple(row[3] for _, row in own)))
    return found


def settings(tmp_path: Any, algo: str, **changes: Any) -> Any:
    data, rl = tiny_data(tmp_path), {"algo": algo} | changes
    if algo not in ("dr_grpo", "rloo", "distill"):  # these divide by no deviation
        rl["adv_epsilon"] = 0.0
    of_teacher = {"teacher": {"path": "t"}} if algo == "distill" else {}  # its passes are not made here
    return parse_config(data | {"rl": rl} | of_teacher)


def estimated(
    monkeypatch: pytest.MonkeyPatch, config: Any, groups: list[Group], kl: Sequence[float], value: float = 0.5,
    updates: int = 1,
) -> tuple[list[Group], list[PackedBatch], dict[str, float]]:
    """`estimate` with passes that compute from a row's token, and are asked for rows in the loss only."""
    def rows(batch: PackedBatch, number_of: Any) -> list[torch.Tensor]:
        found = []
        for micro in batch.micro_batches:
            targets = micro.targets[micro.loss_mask > 0].tolist()
            found.append(torch.tensor([number_of(t) for t in targets], dtype=torch.float32))
        return found

    monkeypatch.setattr(passes, "logprob_pass", lambda model, batch, *_: rows(batch, lambda t: -1.0 - kl[t]))
    monkeypatch.setattr(passes, "value_pass", lambda critic, model, batch: rows(batch, lambda t: value))
    reference: Any = object() if config.rl.kl_coef else None
    critic: Any = object() if config.rl.adv_estimator == "gae" else None
    learner = Learner(object(), None, critic, None, ALONE)  # type: ignore[arg-type]
    batches = pack(
        groups, max_tokens_per_gpu=64, flow_digest="flow", weight_version=0, mask_truncated=config.rl.mask_truncated,
        updates_per_step=updates,
    )
    return estimate(groups, batches, learner, reference, config, True)


def loss_of(config: Any, batch: PackedBatch) -> float:
    """On-policy: every ratio is 1. The policy term alone."""
    shares = denominators(batch, config.rollout.max_response_length, config.rl.masked_sequences)
    total = 0.0
    for micro in batch.micro_batches:
        index = micro.loss_mask.nonzero()[:, 0]
        new = micro.rollout_logprobs[index]
        inputs = Inputs(new, torch.ones_like(new), micro.advantages[index], new, micro.sequence_ids[index])
        total += float(objective(inputs, config.rl.model_copy(update={"kl_coef": 0.0}), shares)[0])
    return total


def by_hand(config: Any, advantages: dict[str, Any]) -> float:
    """-sum of w A over the tokens in the loss; under cispo A times the log-prob -1, so the sign turns."""
    lengths = {name: tokens for name, _, tokens, *_ in ROWS}
    masked = [tokens for name, _, tokens, *_ in ROWS if name not in advantages]
    counts = config.rl.masked_sequences == "count" and config.rl.mask_truncated
    tokens = sum(lengths[name] for name in advantages) + (sum(masked) if counts else 0)
    sequences = len(advantages) + (len(masked) if counts else 0)
    total = 0.0
    for name, advantage in advantages.items():
        n = lengths[name]
        each = advantage if isinstance(advantage, tuple) else (advantage,) * n
        weight = {
            "token_mean": 1 / tokens, "seq_mean_token_mean": 1 / (sequences * n),
            "seq_mean_token_sum_norm": 1 / (sequences * config.rollout.max_response_length),
        }[config.rl.loss_agg]
        total -= weight * sum(each)
    return -total if config.rl.surrogate == "cispo" else total


@pytest.mark.parametrize("masked_sequences", ["drop", "count"])
@pytest.mark.parametrize("kl_in", ["loss", "reward"])
@pytest.mark.parametrize("mask", [True, False], ids=["masked", "not masked"])
@pytest.mark.parametrize("algo", ALGOS)
def test_every_algorithm_by_hand(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, algo: str, mask: bool, kl_in: str, masked_sequences: str
) -> None:
    if not mask and masked_sequences == "count":
        return  # without effect
    estimator = "k2" if kl_in == "loss" else "k1"
    config = settings(
        tmp_path, algo, kl_coef=1.0, kl_in=kl_in, kl_estimator=estimator, mask_truncated=mask,
        **({"masked_sequences": masked_sequences} if mask else {}),
    )
    filled, (batch,), stats = estimated(monkeypatch, config, groups_of(ROWS), [row[4] for row in ROWS])
    found = dict(zip((row[0] for row in ROWS), (a for g in filled for a in g.advantages), strict=True))
    expected = EXPECTED[mask, kl_in][KIND[algo]]
    for name, advantage in found.items():
        if name in expected:
            assert advantage == pytest.approx(expected[name], abs=2e-7), name
        else:
            assert advantage is None, f"{name} is outside the loss"
    assert loss_of(config, batch) == pytest.approx(by_hand(config, expected), abs=1e-6)
    for micro in batch.micro_batches:
        for column in (micro.advantages, micro.returns, micro.values, micro.ref_logprobs):
            assert column is None or torch.equal(column.isnan(), micro.loss_mask == 0), "there where it was computed"
    if kl_in == "reward":  # a1 0.5, a2 0.25, b1 0.5, and unmasked a3 1.5, b2 1, c1 0.5, c2 0.5
        assert stats == {"reward/kl_penalty_mean": pytest.approx(-1.25 / 3 if mask else -4.75 / 7)}
    else:
        assert stats == {}
    if ESTIMATOR[algo] == "gae":
        (micro,) = batch.micro_batches
        to_go = {"a1": 1.0, "a2": 0.0, "b1": 1.0} if kl_in == "loss" else {"a2": -0.25, "b1": 0.5}
        for name, value in to_go.items():
            rows = (micro.targets == [row[0] for row in ROWS].index(name)) & (micro.loss_mask > 0)
            assert micro.returns is not None and micro.returns[rows].tolist() == [value] * int(rows.sum())


@pytest.mark.parametrize("kl_in", ["loss", "reward"])
@pytest.mark.parametrize("algo", ALGOS)
def test_a_step_in_which_all_are_masked(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, algo: str, kl_in: str
) -> None:
    config = settings(
        tmp_path, algo, kl_coef=1.0, kl_in=kl_in, kl_estimator="k2" if kl_in == "loss" else "k1", mask_truncated=True,
    )
    groups = groups_of([(*row[:5], True) for row in ROWS])
    filled, (batch,), stats = estimated(monkeypatch, config, groups, [0.5] * len(ROWS))
    assert [a for g in filled for a in g.advantages] == [None] * len(ROWS)
    assert stats == {} and batch.num_loss_tokens == 0, "a mean of nothing is absent"
    reason = without_signal(groups, filled, config)
    assert "all 7 answers ran into a limit" in reason and "rollout.max_response_length" in reason
    rows = group_rows(filled, str)
    assert [row["advantage"] for row in rows] == [None] * 7 and not any("advantages" in row for row in rows)


@pytest.mark.parametrize("algo", ALGOS)
@pytest.mark.parametrize("kl_in", ["loss", "reward"])
def test_what_is_never_computed_has_no_influence(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, algo: str, kl_in: str
) -> None:
    """Masked answers with other KL, values and lengths leave every advantage in the loss as it is, to the bit."""
    config = settings(
        tmp_path, algo, kl_coef=1.0, kl_in=kl_in, kl_estimator="k2" if kl_in == "loss" else "k1", mask_truncated=True,
    )
    longer = [(name, g, n + 4 if cut else n, r, k, cut) for name, g, n, r, k, cut in ROWS]
    one, _, _ = estimated(monkeypatch, config, groups_of(ROWS), [row[4] for row in ROWS])
    other, _, _ = estimated(monkeypatch, config, groups_of(longer), [99.0 if row[5] else row[4] for row in ROWS])
    assert [g.advantages for g in one] == [g.advantages for g in other]


def test_ppo_with_most_answers_cut_off_pushes_some_tokens_up(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """6 prompts of 4 answers, 20 of 24 cut off, a critic at 0.51: over the tokens in the loss the mean is 0 and the
    deviation 1. With masked tokens of value 0 in the whitening it was -1.55, and no advantage above 0."""
    rows = [(f"{g}{i}", g, 1 + (g + i) % 3 * 6, ((g + i) % 5) / 4, 0.0, not (i == 0 and g < 4))
            for g in range(6) for i in range(4)]
    config = settings(tmp_path, "ppo", mask_truncated=True)
    filled, _, _ = estimated(monkeypatch, config, groups_of(rows), [0.0] * 24, value=0.51)
    kept = np.array([x for g in filled for a in g.advantages if a is not None for x in a])
    assert len(kept) == sum(row[2] for row in rows if not row[5])
    assert abs(kept.mean()) < 1e-12 and kept.std(ddof=1) == pytest.approx(1) and (kept > 0).any()


def test_rloo_with_a_kl_keeps_the_sign_of_who_paid(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """kl_coef = 1: masked answers pay no KL and would raise the baseline of those that do."""
    rows = [("x", 0, 4, 1.0, 0.5, False), ("y", 0, 4, 0.0, 0.75, False), *[(f"m{i}", 0, 9, 0.0, 0.9, True)
            for i in range(2)]]
    config = settings(tmp_path, "rloo", kl_coef=1.0, mask_truncated=True)
    (group,), _, _ = estimated(monkeypatch, config, groups_of(rows), [row[4] for row in rows])
    # scores 1 - 2 = -1 and 0 - 3 = -3; the others' scores were never made
    assert group.advantages == (2.0, -2.0, None, None)


def test_a_group_that_is_masked_does_not_stop_a_pass_of_several_updates(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(tmp_path, "ppo", kl_coef=1.0, mask_truncated=True, updates_per_step=3)
    _, batches, _ = estimated(monkeypatch, config, groups_of(ROWS), [row[4] for row in ROWS], updates=3)
    assert [batch.num_loss_tokens for batch in batches] == [3, 1, 0]
    with pytest.raises(AssertionError, match="was not computed"):
        fill(batches, "returns", [None] * len(ROWS))


def test_the_record_says_null_and_not_zero() -> None:
    (group, *_) = groups_of(ROWS)
    rows = group_rows([replace(group, advantages=(0.5, (-1.0,), None))], str)
    assert [row["advantage"] for row in rows] == [0.5, -1.0, None] and not math.isnan(rows[0]["advantage"])
