"""A calibrated clip: bounds from a BF16 copy of the policy, used, saved, resumed; refused where it says nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_ranks
from tiny import numbers, tiny_config, tiny_run, weights_hash
from train.test_step import sampled

from jetrl.errors import OutOfMemory, UserError
from jetrl.model.transformer import Transformer
from jetrl.parallel.world import World
from jetrl.parity.rows import published_bits
from jetrl.precision.recipe import build_recipe
from jetrl.rl.calibration import Bounds, calibrated, smoothed
from jetrl.run.loop import run
from jetrl.run.stopping import StopRequest
from jetrl.train import calibration
from jetrl.train.batches import PackedBatch
from jetrl.train.calibration import BY_NOISE, HIGH, LOW, SHADOW, Calibration, recipe_bounds, shadow_of, with_bounds
from jetrl.train.passes import logprob_pass
from jetrl.train.step import truncation_of, update

CALIBRATED: dict[str, Any] = {
    "rl.updates_per_step": 2, "rl.clip": "calibrated", "rl.clip_ratio_low": 0.05, "rl.clip_ratio_high": 0.08,
    "train.lr": 1e-2,
}


def test_the_shadow_is_the_bf16_policy_of_the_same_masters(tmp_path: Path) -> None:
    session, _ = sampled(tmp_path, {"quant.kv_cache": "fp8"})
    model, before = session.model, published_bits(session.model)
    shadow = shadow_of(model)
    own = Transformer(model.spec, build_recipe("bf16", model.spec.num_layers))
    own.load_state_dict(model.state_dict())
    want = published_bits(own.publish())
    got = published_bits(shadow)
    assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)
    assert all(torch.equal(rows, published_bits(model)[name]) for name, rows in before.items())


def rows_of(batch: PackedBatch, column: str) -> np.ndarray:
    return torch.cat([getattr(m, column)[m.loss_mask > 0] for m in batch.micro_batches]).double().numpy()


@pytest.mark.parametrize("changes", [{}, {"rollout.top_p": 0.8}, {"precision": "w8a16"}], ids=str)
def test_bounds_by_hand(tmp_path: Path, changes: dict[str, Any]) -> None:
    """The last update's batch, before the step and before that update, in both precisions."""
    session, batches = sampled(tmp_path / "a", CALIBRATED | changes, max_tokens=60)
    found = Calibration(session.learner, session.config, None)
    assert found.begin(batches, 1) == pytest.approx({LOW: 0.95, HIGH: 1.08})
    update(session.learner, batches, session.config, 1, before=found.measure)

    again, (first, last) = sampled(tmp_path / "b", CALIBRATED | changes, max_tokens=60)
    config, truncation = again.config, truncation_of(again.config)

    def in_bf16() -> np.ndarray:
        return torch.cat(logprob_pass(shadow_of(again.model), last, 1.0, truncation)).double().numpy()

    before = in_bf16()
    update(again.learner, [first], config, 1)
    again.model.publish()
    ours = torch.cat(logprob_pass(again.model, last, 1.0, truncation)).double().numpy()
    ratios, shadow = np.exp(ours - rows_of(last, "rollout_logprobs")), np.exp(in_bf16() - before)
    aim, advantages = Bounds(1 - 0.05, 1 + 0.08), rows_of(last, "advantages")
    want = calibrated(advantages, ratios, shadow, aim)
    assert want is not None and found.bounds == smoothed(aim, want) and found.bounds != aim
    cut = [((advantages < 0) & (r < aim.low)) | ((advantages > 0) & (r > aim.high)) for r in (ratios, shadow)]
    assert found.metrics() == {SHADOW: float(cut[1].mean()), BY_NOISE: float((cut[0] & ~cut[1]).mean())}


def test_it_measures_when_it_is_due_and_where_there_are_two_updates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, batches = sampled(tmp_path, CALIBRATED | {"rl.calibration_interval": 3})
    made: list[int] = []
    monkeypatch.setattr(calibration, "shadow_of", lambda model: made.append(1) or shadow_of(model))
    due = []
    for step in range(1, 8):
        found = Calibration(session.learner, session.config, Bounds(0.5, 2.0))
        assert found.begin(batches, step) == {LOW: 0.5, HIGH: 2.0}
        found.measure(batches[0])
        assert found.bounds == Bounds(0.5, 2.0), "only the last batch is measured"
        due += [step] * len(made)
        made.clear()
    assert due == [1, 4, 7]
    found.begin(batches[:1], 1)
    found.measure(batches[0])
    assert not made and found.metrics() == {}
    fixed = session.config.model_copy(update={"rl": session.config.rl.model_copy(update={"clip": "fixed"})})
    still = Calibration(session.learner, fixed, None)
    assert still.begin(batches, 1) == {}
    still.measure(batches[-1])
    assert not made and still.bounds is None and still.metrics() == {}


def test_an_update_clips_at_the_bounds(tmp_path: Path) -> None:
    session, batches = sampled(tmp_path / "a", CALIBRATED)
    assert with_bounds(session.config, None) is session.config
    assert recipe_bounds(session.config) == pytest.approx((0.95, 1.08))
    config = with_bounds(session.config, Bounds(0.7, 1.9))
    assert recipe_bounds(config) == pytest.approx((0.7, 1.9))
    narrow = update(session.learner, batches, session.config, 1)
    other, batches = sampled(tmp_path / "b", CALIBRATED)
    wide = update(other.learner, batches, config, 1)
    assert wide["policy/clip_frac_low"] < narrow["policy/clip_frac_low"] > 0
    assert wide["policy/clip_frac_high"] < narrow["policy/clip_frac_high"]


def test_a_run_uses_saves_and_resumes_its_bounds(tmp_path: Path) -> None:
    changes = CALIBRATED | {"eval.eval_interval": 0, "rl.calibration_interval": 2, "checkpoint.save_interval": 1}
    changes["checkpoint.keep"] = 9
    rows = numbers(run_dir := tiny_run(tmp_path / "a", changes))[1:]
    assert [SHADOW in row for row in rows] == [True, False, True, False]
    assert rows[0][LOW] == 0.95 != rows[1][LOW] == rows[2][LOW] != rows[3][LOW]
    assert all(row["parity/logprob_abs_diff_max"] == 0.0 for row in rows)
    fixed = tiny_run(tmp_path / "b", {k: v for k, v in changes.items() if "clip" != k[3:] and "calib" not in k})
    assert weights_hash(fixed, 1) == weights_hash(run_dir, 1)
    assert weights_hash(fixed, 4) != weights_hash(run_dir, 4)
    tiny_run(tmp_path / "c", changes | {"train.steps": 2})
    again = tiny_run(tmp_path / "c", changes | {"checkpoint.resume": "auto"})
    assert numbers(again)[1:] == rows and weights_hash(again, 4) == weights_hash(run_dir, 4)


def test_without_memory_for_the_shadow_there_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the step's first update, so that no weight has changed; other errors stay what they are."""
    changes = CALIBRATED | {"eval.eval_interval": 0, "train.steps": 1}

    def full(model: Transformer) -> Transformer:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 15 GiB")

    monkeypatch.setattr(calibration, "shadow_of", full)
    with pytest.raises(OutOfMemory, match='rl.clip = "calibrated": the GPU has no memory .* Set rl.clip = "fixed"'):
        tiny_run(tmp_path / "a", changes)

    def broken(model: Transformer) -> Transformer:
        raise RuntimeError("ours")

    monkeypatch.setattr(calibration, "shadow_of", broken)
    with pytest.raises(RuntimeError, match="^ours$"):
        tiny_run(tmp_path / "b", changes)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rl.updates_per_step": 1}, "rl.clip: has no effect while rl.updates_per_step = 1"),
        ({"precision": "bf16"}, 'rl.clip: has no effect while precision = "bf16"'),
        ({"rl.algo": "gspo"}, 'rl.clip: "calibrated" needs rl.ratio = "token"'),
        ({"rl.surrogate": "cispo"}, 'rl.clip: "calibrated" needs rl.surrogate = "clip"'),
        ({"rl.clip": "fixed", "rl.calibration_interval": 3}, "calibration_interval: has no effect while rl.clip = "),
    ],
    ids=lambda c: str(c)[:24],
)
def test_where_nothing_can_be_calibrated_it_is_refused(
    tmp_path: Path, changes: dict[str, Any], expected: str
) -> None:
    with pytest.raises(UserError, match=expected):
        tiny_config(tmp_path, {"rl.updates_per_step": 2, "rl.clip": "calibrated"} | changes)


def rank_run(world: World, folder: Path, changes: dict[str, Any]) -> bool:
    with StopRequest(world) as stop:
        return run(tiny_config(folder / str(world.rank), changes), folder / "runs" / "tiny", ["test"], stop)


@pytest.mark.slow
def test_ranks_find_the_bounds_of_one_process(tmp_path: Path) -> None:
    changes = CALIBRATED | {
        "train.reduction": "fixed", "train.max_tokens_per_gpu": 64, "train.steps": 2, "eval.eval_interval": 0,
        "rl.calibration_interval": 1,
    }
    rows = numbers(tiny_run(tmp_path / "one", changes))
    changes["task.reward"] = f"{tmp_path}/one/reward.py:reward"
    assert run_ranks(rank_run, 2, tmp_path, changes) == [True, True]
    assert numbers(tmp_path / "runs" / "tiny") == rows and rows[2][LOW] != rows[1][LOW] == 0.95
