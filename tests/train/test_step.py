"""One update on real samples: it moves the policy as the advantages point; the cut into micro-batches is free."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from tiny import tiny_config
from tolerances import assert_at_most_twice
from torch import Tensor

from jetrl.errors import UserError
from jetrl.kernels.logprob.truncation import members
from jetrl.model.transformer import Transformer
from jetrl.parallel.world import ALONE
from jetrl.precision.recipe import build_recipe
from jetrl.report.console import Display
from jetrl.rl import mismatch
from jetrl.rl.objective import objective
from jetrl.run.gather import gather
from jetrl.run.loop import Clock
from jetrl.run.prepare import prepare
from jetrl.run.setup import Session, build, keeps_bits
from jetrl.tasks import task
from jetrl.train import reduction, trainer
from jetrl.train.batches import PackedBatch
from jetrl.train.packing import by_trajectory, denominators, held, pack, with_rows
from jetrl.train.passes import estimate, logprob_pass
from jetrl.train.publish import publish
from jetrl.train.step import Compared, forward_rows, inputs_of, truncation_of, update
from jetrl.types import Group, Segment


def sampled(
    folder: Path, changes: dict[str, Any], max_tokens: int = 4096, **options: Any
) -> tuple[Session, list[PackedBatch]]:
    """A session and the packed samples of its first step."""
    threads = torch.get_num_threads()
    config = tiny_config(folder, changes)
    session = build(config)
    torch.set_num_threads(threads)
    session.engine.load(publish(session.model, 0, session.flow_digest))
    kept = gather(session, Clock(Display(1, "test", console=Console(quiet=True))), 1).learnt
    batches = pack(
        kept, max_tokens_per_gpu=max_tokens, flow_digest=session.flow_digest, weight_version=0,
        updates_per_step=config.rl.updates_per_step, **options,
    )
    _, batches, _ = estimate(kept, batches, session.learner, None, config, session.unified)
    return session, batches


def test_a_session_is_deterministic_and_fills_no_new_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(False)  # earlier tests have turned it on
    build(tiny_config(tmp_path, {}))
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.utils.deterministic.fill_uninitialized_memory


def rows_of(session: Session, batch: PackedBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Learner's log-probs, advantages and sequence numbers of all loss rows."""
    logprobs = torch.cat(logprob_pass(session.model, batch, session.config.rollout.temperature))
    masks = [m.loss_mask.bool() for m in batch.micro_batches]
    advs = torch.cat([m.advantages[k] for m, k in zip(batch.micro_batches, masks, strict=True)])
    ids = torch.cat([m.sequence_ids[k] for m, k in zip(batch.micro_batches, masks, strict=True)])
    return logprobs, advs, ids


@pytest.mark.parametrize("precision", ["bf16", "fp8", "fp8_rollout", "w8a16"])
def test_an_update_moves_the_log_probs_along_the_advantages(tmp_path: Path, precision: str) -> None:
    changes = {"precision": precision, "rollout.prompts_per_step": 8, "train.lr": 3e-4}
    session, (batch,) = sampled(tmp_path, changes)
    before, advs, ids = rows_of(session, batch)
    update(session.learner, [batch], session.config, 1)
    session.model.publish()
    after, _, _ = rows_of(session, batch)
    change = (after - before).double()
    moved = torch.zeros(batch.num_sequences).double().index_add_(0, ids, change)
    sign = torch.zeros(batch.num_sequences).double().index_add_(0, ids, advs.double()).sign()
    right = float((moved.sign() == sign)[sign != 0].double().mean())
    assert float((change * advs).mean()) > 1e-4
    assert right > 0.8, f"only {right:.0%} of the sequences moved the way their advantage points"


def gradient(session: Session, batch: PackedBatch) -> dict[str, Tensor]:
    session.model.zero_grad(set_to_none=True)
    shares = denominators(batch, session.config.rollout.max_response_length)
    total = 0.0
    for micro in batch.micro_batches:
        rows = forward_rows(session.model, micro, session.config.rollout.temperature)
        loss, _ = objective(inputs_of(micro, rows, None, single=True), session.config.rl, shares)
        loss.backward()
        total += float(loss)
    return {name: p.grad.clone() for name, p in session.model.named_parameters()} | {"loss": torch.tensor(total)}


@pytest.mark.parametrize("loss_agg", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm"])
def test_micro_batches_add_up_to_one_large_batch(tmp_path: Path, loss_agg: str) -> None:
    changes = {"precision": "bf16", "rl.loss_agg": loss_agg}
    session, (large,) = sampled(tmp_path, changes)
    _, (small,) = sampled(tmp_path, changes, max_tokens=40)
    assert len(large.micro_batches) == 1 and len(small.micro_batches) > 4
    one, many = gradient(session, large), gradient(session, small)
    assert float(many["loss"]) == pytest.approx(float(one["loss"]), rel=1e-5, abs=1e-7)
    for name in one.keys() - {"loss"}:
        assert float((one[name] - many[name]).norm() / one[name].norm()) < 2e-3, name


@pytest.mark.parametrize("max_tokens", [4096, 50], ids=["whole groups", "groups in pieces"])
def test_shared_prompts_are_packed_whole_sequences(tmp_path: Path, max_tokens: int) -> None:
    """Log-probs bit for bit. Gradients as far as FP32 goes; in BF16, as near to those of FP32 as without sharing."""
    changes = {"precision": "fp8", "quant.kv_cache": "fp8", "rollout.prompts_per_step": 6}
    session, (packed,) = sampled(tmp_path, changes, max_tokens)
    _, (shared,) = sampled(tmp_path, changes, max_tokens, share_prompts=True)
    rows = [sum(len(m.tokens) for m in b.micro_batches) for b in (packed, shared)]
    assert rows[1] < 0.85 * rows[0] and any(m.stems for m in shared.micro_batches)
    assert (len(shared.micro_batches) == 1) == (max_tokens == 4096)
    lengths = list(denominators(packed, 10).sequence_tokens)
    every = [
        by_trajectory([held([with_rows(b, "values", logprob_pass(session.model, b, 1.0))], "values")], lengths)
        for b in (packed, shared)
    ]
    assert sum(lengths) > 40
    assert all((one == two).all() for one, two in zip(*every, strict=True)), "log-probs differ"
    masters, results = session.model.state_dict(), {}
    for dtype in (torch.float32, torch.bfloat16):
        model = Transformer(session.model.spec, build_recipe("bf16", 2), dtype=dtype)
        model.load_state_dict(masters)
        session = replace(session, learner=replace(session.learner, model=model.publish()))
        results[dtype] = [gradient(session, batch) for batch in (packed, shared)]
    for name, exact in results[torch.float32][0].items():
        assert float((results[torch.float32][1][name] - exact).norm()) <= 1e-5 * float(exact.norm()), name
        assert_at_most_twice(results[torch.bfloat16][1][name], results[torch.bfloat16][0][name], exact, name, 1e-7)


def test_the_gradient_is_that_of_the_policy_gradient_formula(tmp_path: Path) -> None:
    """Against plain autograd over -mean(advantage * log-prob), on the same model."""
    session, (batch,) = sampled(tmp_path, {"precision": "bf16"})
    got = gradient(session, batch)
    session.model.zero_grad(set_to_none=True)
    (micro,) = batch.micro_batches
    rows = forward_rows(session.model, micro, 1.0)
    (-(rows.logprobs * micro.advantages[rows.index]).sum() / batch.num_loss_tokens).backward()
    for name, p in session.model.named_parameters():
        assert float((p.grad - got[name]).norm()) <= 1e-5 * float(p.grad.norm()), name


def test_fp8_gradients_point_where_bf16_gradients_point(tmp_path: Path) -> None:
    """On one batch of samples; quantization noise is about 4 % of each GEMM operand."""
    session, (batch,) = sampled(tmp_path / "a", {"precision": "fp8"})
    other, _ = sampled(tmp_path / "b", {"precision": "bf16"})
    other.model.load_state_dict(session.model.state_dict())
    other.model.publish()
    fp8, bf16 = gradient(session, batch), gradient(other, batch)
    for name in fp8.keys() - {"loss"}:
        cosine = float(torch.nn.functional.cosine_similarity(fp8[name].flatten(), bf16[name].flatten(), dim=0))
        assert cosine > 0.9, f"{name}: cosine {cosine:.3f}"


def test_several_updates_use_the_log_probs_of_sampling_as_the_old_policy(tmp_path: Path) -> None:
    session, batches = sampled(tmp_path, {"rl.updates_per_step": 2, "train.lr": 3e-2})
    stats = update(session.learner, batches, session.config, 1)
    assert len(batches) == 2 and stats["policy/ratio_mean"] != 1.0 and stats["policy/kl"] != 0.0
    assert stats["parity/logprob_abs_diff_max"] == 0.0


def test_an_update_without_loss_tokens_changes_nothing(tmp_path: Path) -> None:
    session, _ = sampled(tmp_path, {})
    before = {name: value.clone() for name, value in session.model.state_dict().items()}
    assert update(session.learner, [], session.config, 1) == {}
    assert all(torch.equal(value, before[name]) for name, value in session.model.state_dict().items())


def test_a_failed_update_leaves_nothing_for_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever catches the error and goes on gets the gradient of the next batch alone."""
    norms = []
    for fail in (False, True):
        session, batches = sampled(tmp_path / str(fail), {})
        args = (session.learner, batches, session.config, 1)
        if fail:
            with monkeypatch.context() as patch:
                patch.setattr(reduction, "global_grad_norm", lambda parameters: float("inf"))
                with pytest.raises(trainer.NonFiniteError):
                    update(*args)
        norms.append(update(*args)["policy/grad_norm"])
    assert norms[0] == norms[1] > 0


@pytest.mark.parametrize(
    ("precision", "kernels", "engine_keeps", "kept"),
    [("fp8", "hopper", True, True), ("bf16", "hopper_scaled_mm", True, True), ("fp8", "hopper_scaled_mm", True, False),
     ("fp8_rollout", "reference", True, False), ("fp8", "hopper", False, False), ("w8a16", "hopper", True, True),
     ("w8a16", "hopper_scaled_mm", True, True)],
)
def test_where_the_bits_are_promised(
    tmp_path: Path, precision: str, kernels: str, engine_keeps: bool, kept: bool
) -> None:
    config = tiny_config(tmp_path, {"precision": precision}).model_copy(update={"kernels": kernels})
    session = build(tiny_config(tmp_path, {}))
    session.engine.keeps_bits = engine_keeps
    assert keeps_bits(config, session.engine) is kept


def test_where_the_bits_are_not_promised_the_learner_makes_its_own_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With several updates the old log-probs are the learner's: in fp8_rollout other numbers than the sampler's."""
    from jetrl.train import passes

    calls: list[PackedBatch] = []

    def counted(model, batch, *rest):  # type: ignore[no-untyped-def]
        calls.append(batch)
        return logprob_pass(model, batch, *rest)

    monkeypatch.setattr(passes, "logprob_pass", counted)
    for precision, expected in (("fp8", 0), ("fp8_rollout", 2)):
        calls.clear()
        _, batches = sampled(tmp_path / precision, {"rl.updates_per_step": 2, "precision": precision})
        assert len(calls) == expected == sum(m.old_logprobs is not None for b in batches for m in b.micro_batches)
    for micro in (m for b in batches for m in b.micro_batches):
        assert micro.old_logprobs is not None
        gap = (micro.old_logprobs - micro.rollout_logprobs)[micro.loss_mask > 0].abs()
        assert 1e-5 < float(gap.max()) < 1.0
    calls.clear()
    sampled(tmp_path / "one", {"precision": "fp8_rollout"})
    assert calls == [], "with one update a step the log-probs at hand are the old ones"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"task.max_prompt_length": 4}, r"Problem \d+\+\d+: the prompt has 6 tokens, task.max_prompt_length is 4"),
        ({"task.max_prompt_length": 4, "eval.eval_interval": 0}, "task.max_prompt_length is 4"),
        ({"task.system_prompt": "Add."}, "task.system_prompt has no effect on plain-text prompts"),
        ({"task.num_eval": 5000}, "5000 held-out sums are needed"),
    ],
    ids=str,
)
def test_prompts_are_encoded_before_anything_is_trained(
    tmp_path: Path, changes: dict[str, Any], expected: str
) -> None:
    with pytest.raises(UserError, match=expected):
        prepare(tiny_config(tmp_path, {"sft.steps": 5, "task.params.digits": [2]} | changes))


def test_only_prompts_that_the_run_needs_are_encoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Held-out prompts where there are evaluations, none where an environment makes them or nothing is trained."""
    made: list[str] = []
    encode = task.encode_problem
    monkeypatch.setattr(task, "encode_problem", lambda p, *rest: made.append(p.id) or encode(p, *rest))
    for changes, trains, count in (
        ({}, True, 8), ({"eval.eval_interval": 0}, True, 4), ({}, False, 0),
        ({"environment.name": "calculator", "task.params": {"digits": [2], "use_tool": 0.5}}, True, 0),
    ):
        made.clear()
        prepare(tiny_config(tmp_path, changes), trains=trains)
        assert len(made) == count, changes


def with_older(groups: Sequence[Group], share: float) -> list[Group]:
    """The groups as if weights of version 0 had drawn the first tokens of each answer (in the first, all but one), with
    log-probs of their own, and the weights at hand, which are now of version 1, the rest."""
    def mixed(place: int, segment: Segment) -> Segment:
        if segment.author != "policy":
            return segment
        count = len(segment.tokens)
        first = count - 1 if place == 0 else int(share * count)
        logprobs = segment.logprobs - np.float32(0.5) * (np.arange(count) < first).astype(np.float32)
        return replace(segment, logprobs=logprobs, spans=((0, 0), (first, 1)) if first else ((0, 1),))

    return [
        replace(group, trajectories=tuple(
            replace(t, segments=tuple(mixed(place, s) for s in t.segments))
            for place, t in enumerate(group.trajectories)
        ))
        for group in groups
    ]


def older_session(
    folder: Path, changes: dict[str, Any], share: float = 0.5
) -> tuple[Session, list[Group], list[PackedBatch]]:
    """A session whose trajectories two versions have drawn, and its packed batches before any pass."""
    session = build(tiny_config(folder, changes))
    session.engine.load(publish(session.model, 0, session.flow_digest))
    kept = gather(session, Clock(Display(1, "test", console=Console(quiet=True))), 1).learnt
    mixed = with_older(kept, share)
    batches = pack(
        mixed, max_tokens_per_gpu=200, flow_digest=session.flow_digest, weight_version=1,
        updates_per_step=session.config.rl.updates_per_step, share_prompts=True,
    )
    return session, mixed, batches


def older_rows(batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """Of all loss rows: whether older weights drew the target, and its log-prob in the rollout."""
    micros = [m for m in batch.micro_batches if bool(m.loss_mask.any())]
    older = [torch.zeros(len(m.tokens), dtype=torch.bool) if m.versions is None else m.versions == 0 for m in micros]
    return (
        torch.cat([o[m.loss_mask > 0] for o, m in zip(older, micros, strict=True)]),
        torch.cat([m.rollout_logprobs[m.loss_mask > 0] for m in micros]),
    )


def test_parity_compares_the_tokens_that_the_learners_weights_drew(tmp_path: Path) -> None:
    """With the older ones among them there would be a gap of 0.5. All of them are in the loss."""
    session, groups, (batch,) = older_session(tmp_path, {})
    older, _ = older_rows(batch)
    assert 0 < int(older.sum()) == batch.num_older_tokens < batch.num_loss_tokens == len(older)
    learnt, (batch,), _ = estimate(groups, [batch], session.learner, None, session.config, session.unified)
    assert batch.micro_batches[0].old_logprobs is None, "with one update the log-probs at hand are the old ones"
    found = Compared(session.model, session.config)
    found.add_batch(batch, denominators(batch, session.config.rollout.max_response_length), ALONE)
    assert found.gap.count == batch.num_loss_tokens - batch.num_older_tokens and found.gap.max_abs_diff == 0.0
    stats = update(session.learner, [batch], session.config, 1)
    assert stats["parity/logprob_abs_diff_max"] == 0.0 == stats["parity/frac_tokens_different"]
    blind = replace(batch, micro_batches=tuple(replace(m, versions=None) for m in batch.micro_batches))
    session.model.publish()
    seen = Compared(session.model, session.config)
    seen.add_batch(blind, denominators(blind, session.config.rollout.max_response_length), ALONE)
    assert seen.gap.count == batch.num_loss_tokens and seen.gap.max_abs_diff > 0.4, "the test sees the gap"


def test_an_update_of_older_tokens_alone_compares_nothing(tmp_path: Path) -> None:
    session, groups, (batch,) = older_session(tmp_path, {})
    micros = tuple(
        replace(m, versions=torch.where(m.loss_mask > 0, 0, -1)) for m in batch.micro_batches
    )
    _, (batch,), _ = estimate(
        groups, [replace(batch, micro_batches=micros)], session.learner, None, session.config, session.unified
    )
    stats = update(session.learner, [batch], session.config, 1)
    assert "policy/loss" in stats and not any(key.startswith("parity/logprob") for key in stats)


def test_the_old_log_probs_of_older_tokens_are_the_learners_and_not_the_rollouts(tmp_path: Path) -> None:
    """As of an engine that does not keep the bits: of the other tokens the learner's pass has the rollout's bits."""
    session, groups, batches = older_session(tmp_path, {"rl.updates_per_step": 2})
    assert session.unified and len(batches) == 2
    with pytest.raises(AssertionError, match="not the old policy's"):
        micro = next(m for m in batches[0].micro_batches if m.versions is not None)
        inputs_of(micro, forward_rows(session.model, micro, 1.0), None, single=False)
    _, filled, _ = estimate(groups, batches, session.learner, None, session.config, session.unified)
    for batch in filled:
        older, sampled = older_rows(batch)
        old = torch.cat([m.old_logprobs[m.loss_mask > 0] for m in batch.micro_batches])  # type: ignore[index]
        assert torch.equal(old[~older], sampled[~older]) and bool((~older).any()) and bool(older.any())
        assert torch.allclose(old[older], sampled[older] + 0.5, atol=1e-5), "what the learner's weights say of them"
    stats = update(session.learner, filled, session.config, 1)
    assert stats["parity/logprob_abs_diff_max"] == 0.0


def test_corrections_weigh_older_tokens_and_leave_the_others(tmp_path: Path) -> None:
    """Older weights gave these tokens exp(-0.5) of the probability: weights of exp(0.5) there, and exactly 1 else."""
    session, groups, (batch,) = older_session(tmp_path, {"rl.rollout_is": "token"})
    _, (batch,), _ = estimate(groups, [batch], session.learner, None, session.config, session.unified)
    older, sampled = older_rows(batch)
    learned = torch.cat(logprob_pass(session.model, batch, session.config.rollout.temperature))
    ids, mask = torch.arange(len(learned)), torch.ones_like(learned)
    weights = mismatch.importance_weights(learned, sampled, mask, ids, "token", session.config.rl.rollout_is_threshold)
    assert bool((weights[~older] == 1).all())
    assert torch.allclose(weights[older].float(), torch.full((int(older.sum()),), math.exp(0.5)), atol=1e-4)
    stats = update(session.learner, [batch], session.config, 1)
    mean = float(weights.double().mean())
    assert stats["correction/weight_mean"] == pytest.approx(mean, rel=1e-6) and mean > 1.0


TRUNCATED: dict[str, Any] = {"rollout.top_p": 0.8, "rollout.min_p": 0.02, "rollout.temperature": 0.8}


def test_with_one_update_no_set_is_stored_and_parity_is_that_of_the_truncated_distribution(tmp_path: Path) -> None:
    session, (batch,) = sampled(tmp_path, TRUNCATED)
    assert all(m.kept_sets is None for m in batch.micro_batches)
    full = torch.cat(logprob_pass(session.model, batch, 0.8))
    rollout = torch.cat([m.rollout_logprobs[m.loss_mask > 0] for m in batch.micro_batches])
    assert bool((rollout >= full).all()) and bool((rollout > full).any())
    assert torch.equal(torch.cat(logprob_pass(session.model, batch, 0.8, truncation_of(session.config))), rollout)
    stats = update(session.learner, [batch], session.config, 1)
    assert stats["parity/logprob_abs_diff_max"] == 0.0
    session, (batch,) = sampled(tmp_path, TRUNCATED | {"rollout.logprobs": "full"})
    assert truncation_of(session.config) is None
    rollout = torch.cat([m.rollout_logprobs[m.loss_mask > 0] for m in batch.micro_batches])
    assert torch.equal(torch.cat(logprob_pass(session.model, batch, 0.8)), rollout)
    assert update(session.learner, [batch], session.config, 1)["parity/logprob_abs_diff_max"] == 0.0


def test_later_updates_and_the_reference_take_the_sets_of_the_weights_that_sampled(tmp_path: Path) -> None:
    """After an update other tokens would be kept; the ratio is that of the drawn token among those it was drawn from.
    """
    session, batches = sampled(tmp_path, TRUNCATED | {"rl.updates_per_step": 2, "train.lr": 3e-2})
    first, second = ([m.kept_sets for m in b.micro_batches] for b in batches)
    assert all(s is None for s in first) and all(s is not None for s in second)
    before = logprob_pass(session.model, batches[1], 0.8, truncation_of(session.config))
    rollout = [m.rollout_logprobs[m.loss_mask > 0] for m in batches[1].micro_batches]
    assert all(torch.equal(a, b) for a, b in zip(before, rollout, strict=True)), "given sets have the bits of found"
    stats = update(session.learner, batches[:1], session.config, 1)
    assert stats["parity/logprob_abs_diff_max"] == 0.0
    session.model.publish()
    truncation = truncation_of(session.config)
    assert truncation is not None
    micro = batches[1].micro_batches[0]
    given = forward_rows(session.model, micro, 0.8, truncation=truncation)
    found = forward_rows(session.model, replace(micro, kept_sets=None), 0.8, truncation=truncation)
    assert given.support is not None and found.support is not None and micro.kept_sets is not None
    assert torch.equal(given.support.sets.words, micro.kept_sets.words)
    assert not torch.equal(found.support.sets.words, micro.kept_sets.words), "the update moved the sets"
    chosen = members(micro.kept_sets, slice(0, len(given.index)))
    logits = session.model.logits(given.hidden).double() / 0.8
    exact = torch.log_softmax(logits.masked_fill(~chosen, -math.inf), -1)
    targets = micro.targets[given.index]
    assert bool(chosen.gather(1, targets[:, None]).all())
    assert torch.allclose(given.logprobs.double(), exact.gather(1, targets[:, None])[:, 0], atol=1e-5)


def test_the_kl_to_a_reference_is_over_what_the_policy_keeps(tmp_path: Path) -> None:
    """0 while the reference is the policy. Another reference has the log-probs of its own logits on the same sets."""
    session, (plain,) = sampled(tmp_path, TRUNCATED)
    changes = TRUNCATED | {"rl.kl_coef": 0.1}
    groups = gather(session, Clock(Display(1, "test", console=Console(quiet=True))), 1).learnt
    config = tiny_config(tmp_path, changes)
    _, (batch,), _ = estimate(groups, [plain], session.learner, session.model, config, session.unified)
    micro = batch.micro_batches[0]
    assert micro.kept_sets is not None and micro.ref_logprobs is not None
    mask = micro.loss_mask > 0
    assert torch.equal(micro.ref_logprobs[mask], micro.rollout_logprobs[mask])
    moved, batches = sampled(tmp_path, TRUNCATED | {"train.lr": 3e-2})
    update(moved.learner, batches, moved.config, 1)
    (other := moved.model).publish()
    _, (batch,), _ = estimate(groups, [plain], session.learner, other, config, session.unified)
    (given,), again = batch.micro_batches, batch.micro_batches[0].kept_sets
    assert again is not None and torch.equal(again.words, micro.kept_sets.words), "sets are the policy's"
    rows = forward_rows(other, given, 0.8, truncation=truncation_of(config))
    assert given.ref_logprobs is not None and torch.equal(given.ref_logprobs[mask], rows.logprobs)
    assert not torch.equal(given.ref_logprobs[mask], given.rollout_logprobs[mask])


def test_older_tokens_of_truncated_distributions_have_the_learners_sets(tmp_path: Path) -> None:
    session, groups, batches = older_session(tmp_path, TRUNCATED | {"rl.updates_per_step": 2})
    _, filled, _ = estimate(groups, batches, session.learner, None, session.config, session.unified)
    for batch in filled:
        older, rollout = older_rows(batch)
        old = torch.cat([m.old_logprobs[m.loss_mask > 0] for m in batch.micro_batches])  # type: ignore[index]
        assert all(m.kept_sets is not None for m in batch.micro_batches)
        assert torch.equal(old[~older], rollout[~older]) and torch.allclose(old[older], rollout[older] + 0.5, atol=1e-5)
    assert update(session.learner, filled, session.config, 1)["parity/logprob_abs_diff_max"] == 0.0
