"""Parts of the objective in files of the user's: the examples run, and a mistake stops a run before it begins."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from jetrl.config.paths import absolute_paths
from jetrl.errors import UserError
from jetrl.rl import own_terms
from jetrl.rl.losses import Denominators
from jetrl.rl.surrogate import Clip
from jetrl.run.checkpoint.resume import settings
from jetrl.run.own_parts import built_in, load_own_parts
from jetrl.run.prepare import prepare
from tests.tiny import numbers, tiny_config, tiny_run

FILE = Path(__file__).parents[2] / "examples" / "objective.py"
EXAMPLES = {"surrogate": "soft_gate", "adv_estimator": "above_median", "loss_agg": "by_root_of_length"}


@pytest.mark.parametrize("key", EXAMPLES)
def test_the_examples_train_a_run(tmp_path: Path, key: str) -> None:
    name = f"{FILE}:{EXAMPLES[key]}"
    changes = {f"rl.{key}": name, "rl.updates_per_step": 2, "train.steps": 2, "train.max_tokens_per_gpu": 64}
    run_dir = tiny_run(tmp_path / "own", changes)
    rows = numbers(run_dir)
    assert all(row["policy/grad_norm"] > 0 and row["parity/logprob_abs_diff_max"] == 0.0 for row in rows[1:])
    assert ("policy/clip_frac_low" in rows[1]) == (key != "surrogate")
    usual = numbers(tiny_run(tmp_path / "usual", {k: v for k, v in changes.items() if k != f"rl.{key}"}))
    assert usual[2]["policy/loss"] != rows[2]["policy/loss"]
    assert tomllib.loads((run_dir / "config.toml").read_text())["rl"][key] == name


def test_soft_gate_by_hand(tmp_path: Path) -> None:
    load_own_parts(config := tiny_config(tmp_path, {"rl.surrogate": f"{FILE}:soft_gate", "rl.updates_per_step": 2}))
    log_ratio = torch.tensor([0.0, 2.0, 200.0], requires_grad=True)
    adv, clip = torch.tensor([1.0, -1.0, 1.0]), Clip(0.2, 0.2, None)
    found = own_terms.token_losses(config.rl.surrogate, log_ratio, log_ratio, adv, clip)
    (slope,) = torch.autograd.grad(found.sum(), log_ratio)
    # sigmoid(0) * 4 = 2, slope -1; r = e^2: s = sigmoid(1.05 * 6.389056) = 0.9987810, * 4 / 1.05 = 3.8048801
    # its slope: 4 s (1 - s) r = 4 * 0.9987810 * 0.0012190 * 7.389056 = 0.035985; beyond, the gate is shut
    assert found.tolist() == pytest.approx([-2.0, 3.8048801, -4.0], rel=1e-5)
    assert slope.tolist() == pytest.approx([-1.0, 0.035985, 0.0], rel=1e-3)


def test_weights_of_the_example_by_hand(tmp_path: Path) -> None:
    load_own_parts(config := tiny_config(tmp_path, {"rl.loss_agg": f"{FILE}:by_root_of_length"}))
    found = own_terms.token_weights(config.rl.loss_agg, torch.tensor([0, 0, 0, 0, 1]), Denominators(5, 2, (4, 1), 16))
    assert found.tolist() == [1 / (2 * 8)] * 4 + [1 / (2 * 4)]


BROKEN: dict[str, tuple[str, str, str]] = {  # key, source, what is told
    "not there": ("surrogate", "def g(): ...", "has no 'f'; its functions: g"),
    "signature": ("surrogate", "def f(ratio):\n    return ratio", "raised TypeError"),
    "raises": ("surrogate", "def f(r, lp, a, c):\n    x = 1\n    return r / x.nothing", r"own.py, line 3\)"),
    "no slope": ("surrogate", "def f(r, lp, a, c):\n    return r * 0", "has the gradient .*other than 0 at ratio 1"),
    "detached": ("surrogate", "def f(r, lp, a, c):\n    return r.detach()", 
                 r"own.py, line 1\) returned a tensor without"),
    "by rows": ("loss_agg", "import torch\ndef f(ids, d):\n    return torch.ones(len(ids)) / len(ids)",
                "in one micro-batch and .* in micro-batches of their own. Use the counts of the Denominators"),
    "zeros": ("loss_agg", "import torch\ndef f(ids, d):\n    return torch.zeros(len(ids))", "every token the weight 0"),
    "empty": ("adv_estimator", "def f(groups, config):\n    return []", "returned a list of 0 for 3 groups"),
    "not callable": ("adv_estimator", "f = 3", "is of type int, not a function"),
    "syntax": ("loss_agg", "def f(:", "cannot be loaded: SyntaxError"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_mistake_is_found_before_anything_is_trained(tmp_path: Path, case: str) -> None:
    key, source, told = BROKEN[case]
    (tmp_path / "own.py").write_text(source + "\n")
    config = tiny_config(tmp_path, {f"rl.{key}": f"{tmp_path}/own.py:f", "rl.updates_per_step": 2})
    with pytest.raises(UserError, match=rf"rl.{key}: .*{told}"):
        prepare(config)
    prepare(config, trains=False)  # what only evaluates runs none of it


def test_a_function_may_leave_out_short_answers(tmp_path: Path) -> None:
    """All weights of a small trial are 0, and not those of an answer of the full length."""
    (tmp_path / "own.py").write_text(
        "import torch\ndef f(ids, d):\n    long = torch.tensor([n > 3 for n in d.sequence_tokens])\n"
        "    return long[ids].double() / d.num_loss_tokens\n"
    )
    prepare(tiny_config(tmp_path, {"rl.loss_agg": f"{tmp_path}/own.py:f"}))


def test_a_function_that_fails_later_names_its_line_and_loses_no_step(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "calls = 0\ndef f(groups, config):\n    global calls\n    calls += 1\n    if calls > 4:\n"
        "        raise RuntimeError('late')\n    return [[one.score for one in group] for group in groups]\n"
    )
    with pytest.raises(UserError, match=r"rl.adv_estimator: .*raised RuntimeError: late \(.*own.py, line 6\)"):
        tiny_run(tmp_path, {"rl.adv_estimator": f"{tmp_path}/own.py:f", "checkpoint.save_interval": 100})
    saved = sorted(path.name for path in (tmp_path / "runs" / "tiny" / "checkpoints").glob("step_*"))
    assert saved[-1] == "step_000003", "one call is the trial, so the fifth is in step 4"


def test_a_surrogate_that_fails_in_the_first_update_loses_no_step(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import torch\ncalls = 0\ndef f(r, lp, a, c):\n    global calls\n    calls += 1\n    if calls > 4:\n"
        "        raise RuntimeError('late')\n    return -a * r.exp()\n"
    )
    with pytest.raises(UserError, match=r"rl.surrogate: .*raised RuntimeError: late \(.*own.py, line 7\)"):
        tiny_run(tmp_path, {"rl.surrogate": f"{tmp_path}/own.py:f", "checkpoint.save_interval": 100})
    saved = sorted(path.name for path in (tmp_path / "runs" / "tiny" / "checkpoints").glob("step_*"))
    assert saved[-1] == "step_000002", "two calls are trials, and one update a step"


def test_paths_are_those_of_any_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text("")
    changes: dict[str, Any] = {f"rl.{key}": "own.py:f" for key in EXAMPLES}
    config = tiny_config(tmp_path, changes)
    whole = absolute_paths(config)
    for key in EXAMPLES:
        assert getattr(whole.rl, key) == f"{tmp_path}/own.py:f" and settings(config)[f"rl.{key}"] == "own.py:f"
    assert {getattr(built_in(whole).rl, key) for key in EXAMPLES} == {"clip", "grpo", "token_mean"}
    usual = tiny_config(tmp_path)
    assert absolute_paths(usual).rl == usual.rl and built_in(usual) is usual
