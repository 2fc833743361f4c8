"""A loss that is not finite names its token, and a token that makes most of an update is reported."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from jetrl.parallel.world import ALONE
from jetrl.train import passes
from jetrl.train.batches import MicroBatch, PackedBatch
from jetrl.train.passes import value_pass
from jetrl.train.step import update
from jetrl.train.token_terms import TokenTerms
from jetrl.train.trainer import NonFiniteError
from tests.ranks import run_ranks
from tests.train.test_step import sampled


def changed(batch: PackedBatch, column: str, change) -> PackedBatch:  # type: ignore[no-untyped-def]
    """`change(values, micro)` gives the column of each micro-batch."""
    micros = tuple(replace(m, **{column: change(getattr(m, column), m)}) for m in batch.micro_batches)
    return replace(batch, micro_batches=micros)


def longest(batch: PackedBatch) -> tuple[int, int, int]:
    """The sequence with most tokens in the loss: its number, its prompt, and its place among the completions."""
    number = max(range(batch.num_sequences), key=lambda i: batch.sequence_tokens[i])
    prompt = batch.prompts[number]
    return number, prompt, batch.prompts[:number].count(prompt)


def of(micro: MicroBatch, number: int) -> Tensor:
    return ((micro.sequence_ids == number) & (micro.loss_mask > 0)).nonzero()[:, 0]


def old_lower(batch: PackedBatch, number: int, place: int | None, by: float) -> PackedBatch:
    """With old log-probs lower by so much, at one token of a sequence or at all of them; its advantage is -1."""
    def rows(micro: MicroBatch) -> Tensor:
        found = of(micro, number)
        return found if place is None else found[place : place + 1]

    def lower(_: Tensor | None, micro: MicroBatch) -> Tensor:
        old = micro.rollout_logprobs.clone()
        old[rows(micro)] -= by
        return old

    def against(advantages: Tensor, micro: MicroBatch) -> Tensor:
        advantages = advantages.clone()
        advantages[of(micro, number)] = -1.0
        return advantages

    return changed(changed(batch, "old_logprobs", lower), "advantages", against)


@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_an_overflow_names_token_term_and_number(tmp_path: Path, ratio: str) -> None:
    """A token 200 nats more probable than before, or, with rl.ratio = sequence, many tokens that rose by a little."""
    changes = {"rl.updates_per_step": 2, "rl.ratio": ratio, "rollout.prompts_per_step": 8}
    session, batches = sampled(tmp_path, changes)
    number, prompt, completion = longest(batches[0])
    count = batches[0].sequence_tokens[number]
    assert count > 4
    bad = old_lower(batches[0], number, 3, 200.0) if ratio == "token" else old_lower(
        batches[0], number, None, 90.0 / count
    )
    before = {name: value.clone() for name, value in session.model.state_dict().items()}
    with pytest.raises(NonFiniteError) as caught:
        update(session.learner, [bad, batches[1]], session.config, 1)
    told = str(caught.value)
    place = 3 if ratio == "token" else 0  # with one ratio for all, the first
    assert told.startswith("loss inf, gradient norm ") and "the policy term of token" in told
    assert f"of token {place} (id " in told and f"of completion {completion} of prompt {prompt} is inf (" in told
    assert "before the step's first update -" in told and "advantage -1" in told
    assert (f"ratio of its {count} tokens exp(90" in told) == (ratio == "sequence")
    assert all(torch.equal(value, before[name]) for name, value in session.model.state_dict().items())


def in_the_rollout(batch: PackedBatch, number: int, value: float) -> PackedBatch:
    """With this log-prob of the sampler at the third token of a sequence."""
    def put(sampled: Tensor, micro: MicroBatch) -> Tensor:
        sampled = sampled.clone()
        sampled[of(micro, number)[2:3]] = value
        return sampled

    return changed(batch, "rollout_logprobs", put)


CORRECTED = {
    "precision": "fp8_rollout", "rl.rollout_rs": "token", "rl.rollout_veto": 1e-4, "rollout.prompts_per_step": 8,
}


def test_a_rejected_token_far_beyond_exp_costs_two_metrics(tmp_path: Path) -> None:
    session, batches = sampled(tmp_path, CORRECTED)
    far = in_the_rollout(batches[0], longest(batches[0])[0], -5000.0)
    found = update(session.learner, [far], session.config, 1)
    assert found["parity/logprob_abs_diff_max"] > 4900 and found["correction/frac_rejected"] > 0
    assert "parity/k3_kl" not in found and "parity/token_mult_prob_error" not in found
    assert all(math.isfinite(value) for value in found.values())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
def test_a_log_prob_that_is_not_finite_names_its_token_though_rejected(tmp_path: Path, value: float) -> None:
    session, batches = sampled(tmp_path, CORRECTED)
    number, prompt, completion = longest(batches[0])
    before = {name: weight.clone() for name, weight in session.model.state_dict().items()}
    where = rf"term of token 2 \(id \d+\) of completion {completion} of prompt {prompt} .*in the rollout {value}"
    with pytest.raises(NonFiniteError, match=where):
        update(session.learner, [in_the_rollout(batches[0], number, value)], session.config, 1)
    assert all(torch.equal(weight, before[name]) for name, weight in session.model.state_dict().items())


def test_log_probs_are_finite_in_the_critics_warm_up(tmp_path: Path) -> None:
    session, batches = sampled(tmp_path, {"rl.algo": "ppo", "rl.critic_warmup_steps": 1})
    number, prompt, completion = longest(batches[0])
    with pytest.raises(NonFiniteError, match=rf"log-probs; .* of completion {completion} of prompt {prompt} is nan"):
        update(session.learner, [in_the_rollout(batches[0], number, math.nan)], session.config, 1)


def test_a_critic_that_diverged_is_named_before_the_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "value_pass", lambda *given: [values * math.nan for values in value_pass(*given)])
    with pytest.raises(NonFiniteError, match=r"^the value at token 0 of completion 0 of prompt \d+ is nan$"):
        sampled(tmp_path, {"rl.algo": "ppo"})


def test_a_token_that_owns_the_update_is_reported(tmp_path: Path) -> None:
    session, batches = sampled(tmp_path, {"rl.kl_coef": 0.1, "rollout.prompts_per_step": 8})
    number, prompt, completion = longest(batches[0])

    def reference(_: Tensor | None, micro: MicroBatch) -> Tensor:
        ref = micro.rollout_logprobs.clone()
        ref[of(micro, number)[2:3]] += 87.0  # exp(87) fits float32: it was finite, and the whole step
        return ref

    said: list[tuple[str, str]] = []
    far = changed(batches[0], "ref_logprobs", reference)
    found = update(session.learner, [far], session.config, 1, lambda *x: said.append(x))
    assert found["policy/max_token_share"] > 0.999 and len(said) == 1
    what, detail = said[0]
    assert what == "one token owns the update" and "100%" in detail
    assert "the KL term of token 2 (id " in detail and f"of completion {completion} of prompt {prompt} is " in detail
    assert "in the reference " in detail


def test_an_ordinary_update_reports_a_share_and_nothing_else(tmp_path: Path) -> None:
    session, batches = sampled(tmp_path, {"rollout.prompts_per_step": 8})
    said: list[tuple[str, str]] = []
    found = update(session.learner, batches, session.config, 1, lambda *x: said.append(x))
    sizes = torch.cat([m.advantages[m.loss_mask > 0] for m in batches[0].micro_batches]).double().abs()
    assert found["policy/max_token_share"] == pytest.approx(float(sizes.max() / sizes.sum()), rel=1e-6)
    assert said == []


def micro(ids: list[int]) -> MicroBatch:
    count = len(ids)
    whole = torch.arange(count)
    ones = torch.ones(count)
    return MicroBatch(whole, whole, whole + 50, ones, ones, ones, torch.tensor(ids), torch.tensor([0, count]), (count,))


def terms_of_two() -> TokenTerms:
    terms = TokenTerms()
    rows = torch.arange(4)
    first = {"policy": torch.tensor([1.0, -2.0, 0.5, 0.5]).double()}
    terms.add(first, micro([0, 0, 1, 1]), rows, {"log-prob": rows * -1.0})
    terms.add({"policy": torch.tensor([1.0, -4.0, 0.5, 0.5]).double(), "KL": torch.tensor([0.0, 0, 0, 2]).double()},
              micro([2, 3, 3, 3]), rows, {"log-prob": rows * -1.0})
    return terms


def test_the_largest_by_hand() -> None:
    largest = terms_of_two().largest(ALONE)
    assert largest is not None
    assert (largest.term, largest.value, largest.sequence, largest.place, largest.token) == ("policy", -4.0, 3, 0, 51)
    assert largest.share == pytest.approx(4 / 12) and largest.facts == {"log-prob": -1.0}
    assert TokenTerms().largest(ALONE) is None
    empty = TokenTerms()
    empty.add({"policy": torch.zeros(0).double()}, micro([]), torch.arange(0), {})
    empty.add({"policy": torch.zeros(2).double()}, micro([0, 1]), torch.arange(2), {})
    assert empty.largest(ALONE) is None, "no term but 0: there is no share"


def test_nan_and_infinities_are_the_largest_and_the_first_is_named() -> None:
    terms = TokenTerms()
    values = torch.tensor([1e30, float("nan"), float("-inf"), 1.0]).double()
    terms.add({"policy": values}, micro([0, 1, 1, 2]), torch.arange(4), {})
    largest = terms.largest(ALONE)
    assert largest is not None and (largest.sequence, largest.place) == (1, 0) and largest.value != largest.value


def test_ranks_name_the_same_token() -> None:
    run_ranks(_each_rank, 2)


def _each_rank(world) -> None:  # type: ignore[no-untyped-def]
    terms = terms_of_two() if world.rank == 1 else TokenTerms()
    largest = terms.largest(world)
    assert largest is not None and (largest.sequence, largest.value) == (3, -4.0)
