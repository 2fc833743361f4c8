"""The noise of a policy: of a nudge that leaves no trace, counted as the clip counts, and told where it is large."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import numbers, tiny_config, tiny_run, weights_hash
from train.test_step import sampled

from jetrl.model.published import Published
from jetrl.parity.rows import published_bits
from jetrl.train.noise import CLIPPED, MEAN, Noise, noise_metrics, noise_told, nudged
from jetrl.train.step import forward_rows, truncation_of

UPDATES: dict[str, Any] = {"rl.updates_per_step": 2, "train.lr": 1e-2}


@pytest.mark.parametrize("master", ["float32", "bfloat16"])
def test_a_nudge_moves_some_values_by_one_unit_and_leaves_no_trace(tmp_path: Path, master: str) -> None:
    session, batches = sampled(tmp_path, UPDATES | {"train.master_dtype": master})
    model, before = session.model, published_bits(session.model)
    norm = next(m for m in model.layers[0].modules() if isinstance(m, Published) and m.published.ndim == 1)
    held = norm.published.clone()
    with nudged(model) as there_is:
        moved = (norm.published != held).nonzero()[:, 0]
        assert there_is and len(moved) == 20 and float((norm.published - held).abs().max()) == 2.0**-7
        inside = published_bits(model)
    assert sum(not torch.equal(inside[name], rows) for name, rows in before.items()) == 1
    assert all(torch.equal(rows, published_bits(model)[name]) for name, rows in before.items())
    model.require_published()  # a BF16 master is its own published copy
    with pytest.raises(KeyError), nudged(model):
        raise KeyError
    assert all(torch.equal(rows, published_bits(model)[name]) for name, rows in before.items())


@pytest.mark.parametrize(
    "changes", [{}, {"precision": "bf16"}, {"precision": "fp8_rollout"}, {"rollout.top_p": 0.8}], ids=str
)
def test_noise_by_hand(tmp_path: Path, changes: dict[str, Any]) -> None:
    session, batches = sampled(tmp_path, UPDATES | {"rl.clip_ratio_low": 2e-4, "rl.clip_ratio_high": 4e-4} | changes)
    micro = batches[-1].micro_batches[0]
    with torch.no_grad():
        still = forward_rows(session.model, micro, 1.0, truncation=truncation_of(session.config))
        with nudged(session.model):
            rows = forward_rows(session.model, micro, 1.0, truncation=truncation_of(session.config))
    d = (rows.logprobs - still.logprobs).double()
    advantages, ratio = micro.advantages[rows.index], (rows.logprobs - still.logprobs).exp()
    cut = ((advantages > 0) & (ratio > 1 + 4e-4)) | ((advantages < 0) & (ratio < 1 - 2e-4))
    found = noise_metrics(session.learner, batches, session.config, 1)
    assert found == {MEAN: pytest.approx(float(d.abs().mean()), rel=1e-9), CLIPPED: float(cut.double().mean())}
    assert 0 < found[CLIPPED] < 1 and found[MEAN] > 1e-4


def test_it_is_measured_where_something_can_be_clipped(tmp_path: Path) -> None:
    session, batches = sampled(tmp_path, UPDATES | {"rl.noise_interval": 3})
    steps = [step for step in range(1, 8) if noise_metrics(session.learner, batches, session.config, step)]
    assert steps == [3, 6]
    assert noise_metrics(session.learner, batches[:1], session.config, 3) == {}
    off = session.config.model_copy(update={"rl": session.config.rl.model_copy(update={"noise_interval": 0})})
    assert noise_metrics(session.learner, batches, off, 3) == {}
    empty = [
        replace(b, micro_batches=tuple(replace(m, loss_mask=m.loss_mask * 0) for m in b.micro_batches)) for b in batches
    ]
    assert noise_metrics(session.learner, empty, session.config, 3) == {}


def test_nobody_says_what_a_users_surrogate_clips() -> None:
    assert Noise(4, 2.0, 1).metrics() == {MEAN: 0.5, CLIPPED: 0.25}
    assert Noise(4, 2.0, None).metrics() == {MEAN: 0.5}


def test_a_run_measures_noise_and_flips_and_keeps_its_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """FP8's noise is above BF16's; the hint comes where the clip is narrow."""
    changes = UPDATES | {"eval.eval_interval": 0, "train.steps": 2}
    run_dir = tiny_run(tmp_path / "a", changes)
    rows = numbers(run_dir)[1:]
    assert all(0 < row[MEAN] < 0.2 and 0 <= row[CLIPPED] < 1 and 0 < row["policy/code_flips"] < 1 for row in rows)
    assert "noise clips tokens" not in capsys.readouterr().out
    off = tiny_run(tmp_path / "b", changes | {"rl.noise_interval": 0})
    assert weights_hash(off, 2) == weights_hash(run_dir, 2)
    kept = [{k: v for k, v in row.items() if not k.startswith("policy/noise")} for row in rows]
    assert kept == numbers(off)[1:] and kept != rows
    narrow = numbers(tiny_run(tmp_path / "c", changes | {"rl.algo": "gspo"}))[1:]
    told = capsys.readouterr().out
    assert all(row[CLIPPED] > 0.03 for row in narrow)
    assert "noise clips tokens: " in told and "if nothing had been learned" in told and "whole answers" in told
    bf16 = numbers(tiny_run(tmp_path / "e", changes | {"precision": "bf16"}))[1:]
    assert bf16[0][MEAN] < rows[0][MEAN] / 2 and "policy/code_flips" not in bf16[0]
    single = numbers(tiny_run(tmp_path / "d", {"eval.eval_interval": 0, "train.steps": 1}))[1]
    assert MEAN not in single and single["policy/code_flips"] > 0


@pytest.mark.parametrize(
    ("metrics", "changes", "expected"),
    [
        ({CLIPPED: 0.03, MEAN: 0.1}, {}, None), ({MEAN: 0.1}, {}, None), ({}, {}, None),
        ({CLIPPED: 0.24, MEAN: 0.147}, {}, '24.0% of the tokens .* moves log-probs by 0.15 .*"w8a16" or "bf16"'),
        ({CLIPPED: 0.24, MEAN: 0.147}, {"rl.algo": "cispo"}, None),
        ({CLIPPED: 0.5, MEAN: 0.01}, {"precision": "bf16", "rl.algo": "gspo"}, r"0.0003 .* whole answers"),
    ],
)
def test_the_hint_names_what_can_be_done(
    tmp_path: Path, metrics: dict[str, float], changes: dict[str, Any], expected: str | None
) -> None:
    told = noise_told(metrics, tiny_config(tmp_path, UPDATES | changes))
    if expected is None:
        assert told is None
        return
    assert told is not None
    assert re.search(expected, told)
    assert ("w8a16" in told) == ('rl.clip = "calibrated"' in told) == (changes.get("precision") != "bf16")
