"""Whole runs in miniature: parity in every step, the objective's options, and the ways in which a run ends."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import ARCH, HYBRID, numbers, saved, tiny_run, weights_hash

from jetrl.errors import UserError
from jetrl.kernels.attention import ops as attention
from jetrl.parallel import host
from jetrl.report.recorder import read_samples
from jetrl.run import loop
from jetrl.run.checkpoint import store
from jetrl.train import reduction

PARITY = "parity/logprob_abs_diff_max"


def test_busy_cores_are_named_when_a_run_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for busy, line in ((None, ""), ((9.3, 2), "Other programs keep the cores busy (load 9 on 2 cores)")):
        monkeypatch.setattr(host, "load", lambda busy=busy: busy)
        tiny_run(tmp_path / str(busy), {"train.steps": 1, "eval.eval_interval": 0})
        captured = capfd.readouterr()
        said = " ".join((captured.out + captured.err).split())
        assert line in said and ("keep the cores busy" in said) is (busy is not None)


@pytest.mark.parametrize(
    "changes",
    [{"precision": "bf16"}, {"precision": "fp8"}, {"quant.kv_cache": "fp8"}, {"precision": "w8a16"},
     {"precision": "w8a16", "quant.kv_cache": "fp8", "train.master_dtype": "bfloat16"},
     {"quant.kv_cache": "fp8", "train.activation_checkpointing": True, "rollout.page_size": 3,
      "rollout.kv_cache_tokens": 96},
     HYBRID | {"quant.kv_cache": "fp8", "rollout.page_size": 3, "rollout.kv_cache_tokens": 96}],
    ids=str,
)
def test_parity_is_zero_in_every_step(tmp_path: Path, changes: dict[str, Any]) -> None:
    rows = numbers(tiny_run(tmp_path, changes))
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert [row[PARITY] for row in rows[1:]] == [0.0] * 4
    assert all(row["policy/grad_norm"] > 0 for row in rows[1:])
    assert [row["parity/frac_tokens_different"] for row in rows[1:]] == [0.0] * 4
    assert [("eval/addition/avg@1" in row) for row in rows] == [True, False, True, False, True]


def test_parity_is_not_zero_if_training_does_not_round_keys_and_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = attention._made
    monkeypatch.setattr(attention, "_made", lambda qkv, of: right(qkv, of._replace(fp8_kv=False)))
    rows = numbers(tiny_run(tmp_path, {"quant.kv_cache": "fp8"}))
    assert all(1e-4 < row[PARITY] < 1.0 for row in rows[1:]), [row[PARITY] for row in rows[1:]]
    assert all(row["parity/frac_tokens_different"] > 0.5 for row in rows[1:])


def test_parity_of_fp8_rollout_is_visibly_not_zero(tmp_path: Path) -> None:
    rows = numbers(tiny_run(tmp_path, {"precision": "fp8_rollout"}))
    assert all(1e-4 < row[PARITY] < 1.0 for row in rows[1:]), [row[PARITY] for row in rows[1:]]
    assert all(row["parity/frac_tokens_different"] > 0.5 for row in rows[1:])


@pytest.mark.parametrize(
    "changes",
    [
        {"rollout.page_size": 3, "rollout.kv_cache_tokens": 96, "rollout.max_num_seqs": 5},
        {"rollout.max_tokens_per_step": 5},
        {"train.activation_checkpointing": True},
        {"train.max_tokens_per_gpu": 40},
        {"num_threads": 2},
    ],
    ids=lambda c: next(iter(c)),
)
def test_what_must_not_matter_does_not_matter_to_what_is_sampled(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Cache size, page size, chunking, checkpointing, micro-batches and threads leave step 1's samples as they are."""
    plain = list(read_samples(tiny_run(tmp_path / "a", {"train.steps": 1})))
    other = tiny_run(tmp_path / "b", {"train.steps": 1} | changes)
    assert list(read_samples(other)) == plain and len(plain) == 16
    assert numbers(other)[1][PARITY] == 0.0


def test_two_runs_are_equal_to_the_bit_and_another_seed_is_not(tmp_path: Path) -> None:
    first, second = numbers(tiny_run(tmp_path / "a")), numbers(tiny_run(tmp_path / "b"))
    assert first == second
    assert numbers(tiny_run(tmp_path / "c", {"seed": 1})) != first


def test_learning_raises_the_reward(tmp_path: Path) -> None:
    rows = numbers(tiny_run(tmp_path, {"train.steps": 14, "train.lr": 1e-2, "eval.eval_interval": 0}))
    early, late = (sum(r["reward/mean"] for r in part) / 3 for part in (rows[1:4], rows[-3:]))
    assert late > early + 0.15, (early, late)


def test_w8a16_learns(tmp_path: Path) -> None:
    """The mean of three seeds rises, as BF16's does by 0.15; single runs at this size differ by more than that."""
    changes = {"train.steps": 14, "train.lr": 5e-3, "eval.eval_interval": 0, "precision": "w8a16"}
    runs = [numbers(tiny_run(tmp_path / str(seed), changes | {"seed": seed})) for seed in range(3)]
    early, late = (
        sum(r["reward/mean"] for rows in runs for r in rows[part]) / 9 for part in (slice(1, 4), slice(-3, None))
    )
    assert late > early + 0.1, (early, late)


@pytest.mark.parametrize("precision", ["bf16", "fp8", "w8a16"])
def test_kl_penalty_starts_at_zero_and_holds_the_policy_back(tmp_path: Path, precision: str) -> None:
    changes = {"precision": precision, "train.lr": 1e-2, "eval.eval_interval": 0}
    free = numbers(tiny_run(tmp_path / "a", changes | {"rl.kl_coef": 1e-9}))
    held = numbers(tiny_run(tmp_path / "b", changes | {"rl.kl_coef": 5.0}))
    key = "policy/ref_kl"
    assert free[1][key] == held[1][key] == 0.0  # the reference is the policy: the same flow gives the same bits
    assert free[4][key] > 1e-3 and held[4][key] < free[4][key]


def test_all_groups_dropped_is_a_step_without_update(tmp_path: Path) -> None:
    (tmp_path / "same.py").write_text("def reward(completions, **_):\n    return [1.0] * len(completions)\n")
    changes = {"rl.dynamic_sampling": "drop", "task.reward": f"{tmp_path}/same.py:reward"}
    run_dir = tiny_run(tmp_path, changes)
    rows = numbers(run_dir)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert all(row["reward/num_groups_dropped"] == 4 and "policy/loss" not in row for row in rows[1:])
    assert all(row["response_length/mean"] > 0 for row in rows[1:])
    assert rows[0]["eval/addition/avg@1"] == rows[4]["eval/addition/avg@1"]
    samples = list(read_samples(run_dir))
    assert len(samples) == 4 * 16 and all(row["advantage"] is None for row in samples), "none was made"


def test_several_updates_a_step(tmp_path: Path) -> None:
    changes = {"rl.updates_per_step": 2, "train.lr": 1e-2}
    rows = numbers(tiny_run(tmp_path / "a", changes))
    assert [row[PARITY] for row in rows[1:]] == [0.0] * 4
    assert all(row["policy/kl"] != 0.0 for row in rows[1:]), "the second update starts from a policy that has moved"
    assert all(row["policy/logprob_abs_change_mean"] >= abs(row["policy/kl"]) for row in rows[1:])
    other = changes | {"precision": "fp8_rollout", "eval.eval_interval": 0, "train.steps": 2}
    weighted, bare = (
        numbers(tiny_run(tmp_path / kind, other | {"rl.rollout_is": kind}))[1:] for kind in ("token", "none")
    )
    assert all(row[PARITY] > 0 for row in weighted) and weighted[0][PARITY] == bare[0][PARITY]
    assert weighted[0]["policy/grad_norm"] != bare[0]["policy/grad_norm"]


TRUNCATED: dict[str, Any] = {"rollout.top_p": 0.7, "rollout.top_k": 9, "rollout.temperature": 0.9}


@pytest.mark.parametrize(
    "changes",
    [
        {}, {"precision": "bf16", "rl.kl_coef": 0.1, "rl.entropy_coef": 0.01}, {"quant.kv_cache": "fp8"},
        {"rl.updates_per_step": 2, "train.lr": 1e-2, "train.max_tokens_per_gpu": 40},
        {"rl.updates_per_step": 3, "rl.kl_coef": 0.1, "rl.kl_in": "reward", "train.share_prompts": True},
        {"rl.algo": "ppo", "rl.critic_warmup_steps": 2, "rl.updates_per_step": 2},
    ],
    ids=str,
)
def test_parity_of_truncated_distributions_is_zero_in_every_step(tmp_path: Path, changes: dict[str, Any]) -> None:
    changes = {"eval.eval_interval": 0} | TRUNCATED | changes
    run_dir = tiny_run(tmp_path / "a", changes)
    rows = numbers(run_dir)
    assert [row[PARITY] for row in rows[1:]] == [0.0] * 4
    if "rl.entropy_coef" in changes:
        assert rows[1]["policy/ref_kl"] == 0.0 < rows[4]["policy/ref_kl"]
    whole: dict[str, Any] = {"rollout.logprobs": "full", "train.steps": 1, "rl.critic_warmup_steps": 0}
    full = tiny_run(tmp_path / "b", changes | whole)
    (ours, theirs) = ([s for s in read_samples(d) if s["step"] == 1] for d in (run_dir, full))
    assert [s["tokens"] for s in ours] == [s["tokens"] for s in theirs]
    sampled, untruncated = ([p for s in samples for p in s["logprobs"] if p is not None] for samples in (ours, theirs))
    assert all(a >= b for a, b in zip(sampled, untruncated, strict=True)) and sampled != untruncated
    assert numbers(full)[1][PARITY] == 0.0, "of the whole distribution, from which nothing was drawn"


def told(run_dir: Path) -> dict[str, Any]:
    """What an option may change in step 1, in the order in which it comes about, and the weights after step 2."""
    samples, row = list(read_samples(run_dir)), numbers(run_dir)[1]
    first = {key: [s[key] for s in samples if s["step"] == 1] for key in ("logprobs", "reward", "advantage")}
    return first | {"gradient": row["policy/grad_norm"], "weights": weights_hash(run_dir, 2)}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return told(tiny_run(tmp_path_factory.mktemp("plain"), {"train.steps": 2}))


@pytest.mark.parametrize(
    ("key", "value", "first"),
    [
        ("rollout.top_p", 0.9, "logprobs"), ("rollout.temperature", 0.7, "logprobs"), ("rollout.top_k", 5, "logprobs"),
        ("quant.weight_scale", "pow2", "logprobs"), ("quant.activation_scale", "pow2", "logprobs"),
        ("quant.num_first_layers_in_bf16", 1, "logprobs"), ("rl.overlong_buffer_len", 4, "reward"),
        ("rl.norm_adv_by_std", False, "advantage"), ("rl.loss_agg", "seq_mean_token_mean", "gradient"),
        ("rl.entropy_coef", 0.01, "gradient"), ("rl.mask_truncated", True, "advantage"),
        ("train.share_prompts", True, "gradient"), ("quant.wgrad", "row", "gradient"),
        ("train.master_dtype", "bfloat16", "weights"), ("train.lr", 1e-3, "weights"),
    ],
    ids=str,
)
def test_an_option_keeps_parity_and_changes_what_it_must(
    tmp_path: Path, plain: dict[str, Any], key: str, value: Any, first: str
) -> None:
    """`first` is the first thing that is not as in a plain run; all before it has the plain run's bits."""
    run_dir = tiny_run(tmp_path, {key: value, "train.steps": 2})
    rows = numbers(run_dir)
    assert [row[PARITY] for row in rows[1:]] == [0.0, 0.0]
    assert all(row["policy/loss"] == row["policy/loss"] for row in rows[1:])
    assert [name for name, got in told(run_dir).items() if got != plain[name]][:1] == [first]


def test_gradients_that_are_not_finite_stop_the_run_before_the_weights_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    norm, calls = reduction.global_grad_norm, []

    def broken(parameters: Any) -> float:
        calls.append(1)
        return norm(parameters) * (float("inf") if len(calls) == 3 else 1.0)

    monkeypatch.setattr(reduction, "global_grad_norm", broken)
    with pytest.raises(UserError, match=r"Step 3 stops the run: .*gradient norm inf") as raised:
        tiny_run(tmp_path)
    run_dir = tmp_path / "runs" / "tiny"
    folder = run_dir / "failed" / "step_000003"
    assert str(folder) in str(raised.value) and "with a lower train.lr" in str(raised.value)
    data = torch.load(folder / "batches.pt", weights_only=False)
    assert data["batches"][0].num_sequences == 16 and data["step"] == 3
    before = saved(run_dir, 2)
    weights = store.whole(folder / "weights" / "tensors")
    assert weights.keys() == {name.removeprefix("model.") for name in before if name.startswith("model.")}
    for name, value in weights.items():
        assert torch.equal(value, before[f"model.{name}"]), name
    monkeypatch.undo()
    resumed = numbers(tiny_run(tmp_path, {"checkpoint.resume": "auto"}))
    assert resumed == numbers(tiny_run(tmp_path / "b"))


def test_before_any_update_no_learning_rate_is_blamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="Step 1 stops the run: loss") as raised:
        tiny_run(tmp_path / "term", {"rl.entropy_coef": 1e300})
    assert "those of model.arch (random). Or a term of the loss weighs too much: rl.entropy_coef = 1e+300." in str(
        raised.value)
    monkeypatch.setattr(reduction, "global_grad_norm", lambda parameters: float("inf"))
    routers = {
        "model.arch": ARCH | {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2,
                              "moe_intermediate_size": 72},
        "train.router_z_loss_coef": 0.5, "eval.eval_interval": 0,
    }
    warm = {"sft.steps": 2, "sft.batch_size": 2, "sft.cache_dir": str(tmp_path / "sft")}
    for name, changes, weights in (("a", {}, r"model.arch \(random"), ("b", warm, r"the warm start \(sft.steps = 2")):
        with pytest.raises(UserError, match=rf"gradient norm inf.*no learning rate .* those of {weights}") as raised:
            tiny_run(tmp_path / name, routers | changes)
        said = str(raised.value)
        assert "weighs too much: train.router_z_loss_coef = 0.5." in said and ".lr" not in said, said


def test_a_rollout_whose_logits_are_not_finite_stops_the_run_with_the_weights_saved(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="stops the run") as raised:
        tiny_run(tmp_path, {"train.lr": 1e30, "train.steps": 6})
    run_dir = tmp_path / "runs" / "tiny"
    (folder,) = (run_dir / "failed").iterdir()
    assert str(folder) in str(raised.value)
    data = torch.load(folder / "batches.pt", weights_only=False)
    assert folder.name == f"step_{data['step']:06d}"
    assert "embed.weight" in store.stored(folder / "weights" / "tensors")
    assert (run_dir / "checkpoints" / "latest").is_file(), "the checkpoints must be intact"


def test_what_a_run_leaves(tmp_path: Path) -> None:
    run_dir = tiny_run(tmp_path)
    names = {p.name for p in run_dir.iterdir()}
    assert {"config.toml", "env.json", "metrics.jsonl", "samples.jsonl", "checkpoints", "report.html"} <= names
    page = (run_dir / "report.html").read_text()
    assert "data:image/svg+xml;base64," in page, "the picture of the flow is missing"
    assert not re.findall(r"https?://(?!www\.w3\.org/)\S+", page), "the page must be self-contained"
    saved = {p.name for p in (run_dir / "checkpoints").iterdir()}
    assert saved == {"latest", "step_000000", "step_000002", "step_000004"}
    samples = list(read_samples(run_dir))
    assert len(samples) == 4 * 16 and all(len(s["tokens"]) == len(s["logprobs"]) for s in samples)
    assert json.loads((run_dir / "env.json").read_text())


def test_a_reward_function_that_never_pays_the_gold_answer_stops_the_run_before_step_1(tmp_path: Path) -> None:
    (tmp_path / "zero.py").write_text("def reward(completions, **_):\n    return [0.0] * len(completions)\n")
    with pytest.raises(UserError, match=r"(?s)(gold.*\d\+\d)|(\d\+\d.*gold)"):
        tiny_run(tmp_path, {"task.reward": f"{tmp_path}/zero.py:reward"})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"task.reward": "REWARD:reward"}, "step 1: nothing to learn from: all 16 rewards are 1."),
        ({"rollout.temperature": 1e-6}, "which is 1e-06"),
    ],
    ids=["equal rewards", "temperature"],
)
def test_a_step_without_a_signal_is_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], said: str
) -> None:
    (tmp_path / "same.py").write_text("def reward(completions, **_):\n    return [1.0] * len(completions)\n")
    changes = {k: v.replace("REWARD", f"{tmp_path}/same.py") if isinstance(v, str) else v for k, v in changes.items()}
    tiny_run(tmp_path, changes)
    out = capsys.readouterr().out
    assert said in out and out.count("nothing to learn from") == 1, out


def test_a_gap_where_none_should_be_is_loud_and_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = attention._made
    tiny_run(tmp_path / "right", {"quant.kv_cache": "fp8", "train.steps": 2})
    assert "PARITY" not in capsys.readouterr().out
    monkeypatch.setattr(attention, "_made", lambda qkv, of: right(qkv, of._replace(fp8_kv=False)))
    tiny_run(tmp_path, {"quant.kv_cache": "fp8"})
    out = capsys.readouterr().out
    assert out.count("step 1: PARITY IS NOT ZERO: ") == 1 == out.count("PARITY") and "please report" in out


def test_masked_sequences_that_count_make_a_smaller_update(tmp_path: Path) -> None:
    """The run's loss with truncated answers in the denominator is the one without, times their share of tokens."""
    changes = {"rl.mask_truncated": True, "train.steps": 1, "rl.loss_agg": "seq_mean_token_sum"}
    rows = {
        kind: numbers(tiny_run(tmp_path / kind, changes | {"rl.masked_sequences": kind}))[-1]
        for kind in ("drop", "count")
    }
    share = 1 - rows["drop"]["response_length/frac_truncated"]
    assert 0 < share < 1 and rows["drop"]["reward/mean"] == rows["count"]["reward/mean"]
    assert rows["count"]["policy/loss"] == pytest.approx(share * rows["drop"]["policy/loss"], rel=1e-5)
    assert rows["count"]["policy/grad_norm"] == pytest.approx(share * rows["drop"]["policy/grad_norm"], rel=1e-4)


def test_hints_name_the_step_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What an update tells, and what is told once its step is done."""
    usual = loop.update

    def telling(learner: Any, batches: Any, config: Any, step: int, tell: Any, *others: Any) -> dict[str, float]:
        tell("a telling update", "of this step")
        return usual(learner, batches, config, step, tell, *others)

    monkeypatch.setattr(loop, "update", telling)
    rejecting = {"rl.rollout_rs": "token", "rl.rollout_rs_threshold": 1.0000001, "precision": "fp8_rollout"}
    tiny_run(tmp_path, rejecting | {"train.steps": 1, "eval.eval_interval": 0})
    out = " ".join(capsys.readouterr().out.split())
    assert "step 1: a telling update: of this step" in out
    assert "step 1: nothing was learned: the corrections for the gap" in out and "every token out of the loss" in out
