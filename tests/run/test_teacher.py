"""Distillation: a student learns from its teacher, exactly and resumably; what cannot be judged is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from jetrl.config import load_config, resolve
from jetrl.config.shipped import shipped
from jetrl.errors import UserError
from jetrl.report.recorder import read_metrics
from jetrl.run.fit.memory import predict
from jetrl.run.loop import StopRequest, run
from jetrl.run.pin import pinned
from jetrl.run.prepare import prepare
from jetrl.run.replay.checks import replay
from jetrl.run.setup import build_published
from jetrl.run.teacher import build_teachers, teacher_of
from jetrl.train.teachers import REST
from tests.tiny import ARCH, numbers, saved, tiny_config, tiny_run, whole_and_resumed

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two layers that has learned to write worked solutions."""
    folder = tmp_path_factory.mktemp("teacher")
    return tiny_run(folder, {
        "sft.steps": 60, "sft.lr": 1e-2, "sft.cache_dir": str(folder / "sft"), "train.steps": 1, "precision": "bf16",
        "checkpoint.save_interval": 1, "eval.eval_interval": 0,
    })


def distilling(teacher: Path, **more: Any) -> dict[str, Any]:
    """Changes for a student of half the layers."""
    return {
        "rl.algo": "distill", "teacher.path": str(teacher), "model.arch": ARCH | {"num_hidden_layers": 1},
        "eval.eval_interval": 0,
    } | more


def test_a_student_of_half_the_layers_learns_from_its_teacher(teacher: Path, tmp_path: Path):
    """Both sides compute the student bit for bit the same, whatever flow the teacher has."""
    run_dir = tiny_run(tmp_path, distilling(teacher, **{
        "sft.steps": 20, "sft.lr": 1e-2, "sft.cache_dir": str(tmp_path / "sft"), "train.steps": 24,
        "rollout.prompts_per_step": 12, "checkpoint.save_interval": 24,
    }))
    rows = read_metrics(run_dir)[1:]
    kl = [row["policy/teacher_kl"] for row in rows]
    assert sum(kl[-4:]) < 0.35 * sum(kl[:4]), kl  # from 1.7 nats per token to 0.3
    assert {row["parity/logprob_abs_diff_max"] for row in rows} == {0.0}


def test_the_policy_itself_is_a_teacher_without_anything_to_teach(teacher: Path, tmp_path: Path):
    """One flow and the same weights: every token has one log-prob, to the bit, so nothing moves."""
    model = teacher / "checkpoints" / "step_000001" / "model"
    run_dir = tiny_run(tmp_path, {
        "rl.algo": "distill", "teacher.path": str(model), "teacher.precision": "fp8", "model.path": str(model),
        "model.arch": None, "model.tokenizer": None, "train.steps": 1, "eval.eval_interval": 0,
        "checkpoint.save_interval": 1,
    })
    (row,) = read_metrics(run_dir)[1:]
    assert row["policy/teacher_kl"] == 0.0 and row["policy/grad_norm"] == 0.0
    before, after = saved(run_dir, 0), saved(run_dir, 1)
    assert all(torch.equal(value, after[name]) for name, value in before.items() if name.startswith("model."))


def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(teacher: Path, tmp_path: Path):
    """Together with rewards, over several updates, and with an own pass of the policy where precisions differ."""
    changes = distilling(teacher, **{
        "rl.algo": "grpo", "teacher.weight": 0.5, "teacher.precision": "w8a16", "rl.updates_per_step": 2,
        "precision": "fp8_rollout", "train.steps": 4,
    })
    whole = whole_and_resumed(tmp_path, changes)
    assert all(row["policy/teacher_kl"] > 0 for row in numbers(whole)[1:])


def test_another_teacher_at_a_resume_is_refused(teacher: Path, tmp_path: Path):
    """Under the same path: what decides is the digest of its values."""
    own = tmp_path / "model"
    shutil.copytree(teacher / "checkpoints" / "step_000001" / "model", own)
    changes = distilling(own)
    tiny_run(tmp_path, changes | {"train.steps": 2})
    shutil.rmtree(own)
    shutil.copytree(teacher / "checkpoints" / "step_000000" / "model", own)
    with pytest.raises(UserError, match=r"teacher.path \(.*\): the content has changed .* with other advantages"):
        tiny_run(tmp_path, changes | {"checkpoint.resume": "auto"})


def test_log_probs_are_those_of_the_teacher_s_own_flow(teacher: Path, tmp_path: Path):
    """The teacher of a run computes what the same model computes as a policy of that precision."""
    for precision in ("bf16", "fp8", "w8a16"):
        config = tiny_config(tmp_path, distilling(teacher, **{"teacher.precision": precision}))
        teachers = build_teachers(config)
        assert teachers is not None
        found = teachers.models[REST]
        assert not found.holds_masters
        model = teacher / "checkpoints" / "step_000001" / "model"
        policy = tiny_config(tmp_path, {
            "model.path": str(model), "model.arch": None, "model.tokenizer": None, "precision": precision,
        })
        expected = build_published(policy, found.spec, found.recipe)
        mine, theirs = found.published_modules(), expected.published_modules()
        assert all(torch.equal(a.published, b.published) for a, b in zip(mine, theirs, strict=True))


def by_column(folder: Path, kinds: tuple[str, ...] = ("a", "b")) -> dict[str, Any]:
    """Changes for sums from a file, whose column `kind` has each of the values in turn."""
    rows = [{"prompt": f"{i}+{i}=", "answer": str(2 * i), "kind": kinds[i % len(kinds)]} for i in range(10, 26)]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"task.name": "file", "task.params": None, "task.train_file": str(folder / "sums.jsonl")}


def test_each_row_is_judged_by_the_teacher_of_its_column(teacher: Path, tmp_path: Path):
    """Rows whose teacher is the policy itself have nothing to learn, to the bit; the others have."""
    checkpoints = teacher / "checkpoints"
    itself, other = str(checkpoints / "step_000001" / "model"), tmp_path / "other"
    shutil.copytree(itself, other)
    spread = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(spread | {"rms_norm_eps": 0.5}))
    changes = by_column(tmp_path) | {
        "rl.algo": "distill", "teacher.path": str(other), "teacher.precision": "fp8", "teacher.column": "kind",
        "teacher.values": ["b"], "teacher.paths": [itself], "model.path": itself, "model.arch": None,
        "model.tokenizer": None, "train.steps": 1, "eval.eval_interval": 0, "train.max_tokens_per_gpu": 64,
    }
    (row,) = read_metrics(tiny_run(tmp_path, changes))[1:]
    assert row["policy/teacher_kl/b"] == 0.0 and row["policy/teacher_kl"] > 0.0


def test_two_teachers_of_one_model_are_one_teacher(teacher: Path, tmp_path: Path):
    """Which rows a pass is made over, and what else a micro-batch holds, changes no bit."""
    plain = by_column(tmp_path) | distilling(teacher, **{"train.steps": 2, "train.max_tokens_per_gpu": 64})
    one = tiny_run(tmp_path / "one", plain)
    two = tiny_run(tmp_path / "two", plain | {
        "teacher.column": "kind", "teacher.values": ["a", "b"], "teacher.paths": [str(teacher), str(teacher)],
    })
    rows = numbers(two)
    assert all({"policy/teacher_kl/a", "policy/teacher_kl/b"} <= row.keys() for row in rows[1:])
    assert [{k: v for k, v in row.items() if "teacher_kl/" not in k} for row in rows] == numbers(one)
    assert all(torch.equal(value, saved(two, 2)[name]) for name, value in saved(one, 2).items())


@pytest.mark.parametrize(("changes", "expected"), [
    ({"teacher.values": ["a"]}, "teacher.paths: needs one teacher for each of the 1 teacher.values, got 0"),
    ({}, "teacher.column: needs teacher.values and teacher.paths"),
    ({"teacher.values": ["a", "a"], "teacher.paths": ["x", "x"]}, "teacher.values: names a value twice"),
    ({"teacher.values": ["", "a"], "teacher.paths": ["x", "y"]}, 'teacher.values: "" names no rows'),
    ({"teacher.column": None, "teacher.values": ["a"]}, "teacher.values: has no effect while teacher.column"),
    ({"teacher.values": ["a"], "teacher.paths": ["x"], "task.name": "addition", "task.train_file": None},
     "teacher.column: is a column of data"),
    ({"teacher.values": ["a"], "teacher.paths": ["none/here"]}, "teacher.paths .for 'a'. = none/here: there is no "),
    ({"teacher.values": ["z"], "teacher.paths": ["."]}, "no row of the training data has z in its column 'kind', which "
     "has a, b"),
    ({"teacher.values": ["a"], "teacher.paths": ["."], "teacher.column": "sort"}, "no row of the training data has t"),
], ids=str)
def test_columns_that_do_not_fit_are_refused(changes: dict[str, Any], expected: str, teacher: Path, tmp_path: Path):
    with pytest.raises(UserError, match=expected):
        base = by_column(tmp_path) | distilling(teacher, **{"teacher.column": "kind"})
        base |= {key: [str(teacher)] if value == ["."] else value for key, value in changes.items()}
        prepare(tiny_config(tmp_path, {k: v for k, v in base.items() if v is not None or k == "task.params"}))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rl.algo": "distill"}, 'teacher.path: is needed with rl.algo = "distill"'),
        ({"teacher.weight": 0.5}, "teacher.weight: has no effect while teacher.path"),
        ({"teacher.path": "x", "teacher.precision": "fp8_rollout"}, 'teacher.precision: must be "bf16", "fp8" or "w'),
        ({"teacher.path": "x", "teacher.weight": 0}, "teacher.weight: "),
        ({"teacher.path": "x", "rl.algo": "gspo"}, "rl.ratio = \"sequence_mean\" needs one for the whole answer"),
        ({"teacher.path": "x", "rl.algo": "dapo"}, "rl.dynamic_sampling = \"refill\" leaves out groups"),
        ({"teacher.path": "x", "rl.algo": "distill", "rl.gamma": 0.9}, "rl.gamma: has no effect while"),
        ({"teacher.path": "x", "rl.algo": "distill", "rl.dynamic_sampling": "drop"}, "rl.dynamic_sampling: has no eff"),
    ],
    ids=str,
)
def test_settings_that_do_not_go_together(changes: dict[str, Any], expected: str, tmp_path: Path):
    with pytest.raises(UserError, match=expected):
        tiny_config(tmp_path, changes)


def test_teachers_that_cannot_judge_are_refused_before_anything_is_built(teacher: Path, tmp_path: Path):
    def refused(**changes: Any) -> str:
        with pytest.raises(UserError) as caught:
            prepare(tiny_config(tmp_path, distilling(teacher) | {k.replace("__", "."): v for k, v in changes.items()}))
        return str(caught.value)

    assert "no such folder" in refused(teacher__path="no such folder")
    assert "positions for 64 tokens" in refused(
        rollout__max_response_length=60, **{"model.arch": ARCH | {"max_position_embeddings": 128}})
    model = teacher / "checkpoints" / "step_000001" / "model"
    for name, vocabulary in (("other", 5), ("fewer", None)):
        shutil.copytree(model, tmp_path / name)
        file = tmp_path / name / ("tokenizer.json" if vocabulary else "config.json")
        data = json.loads(file.read_text())
        if vocabulary:
            words = data["model"]["vocab"]
            a, b = [word for word, number in words.items() if number in (5, 6)]
            words[a], words[b] = words[b], words[a]
        else:
            data["vocab_size"] -= 1
        file.write_text(json.dumps(data))
    assert "has another vocabulary than the policy: id 5 is " in refused(teacher__path=str(tmp_path / "other"))
    assert "some of its tokens have none there" in refused(teacher__path=str(tmp_path / "fewer"))


def test_memory_knows_the_teacher(teacher: Path, tmp_path: Path):
    """Its published weights, whole on every rank and without masters."""
    def others(precision: str, ranks: int) -> int:
        config = tiny_config(tmp_path, distilling(teacher, **{"teacher.precision": precision}))
        found = teacher_of(config)
        assert found is not None
        return predict(config, replace(found.spec, num_layers=1), ranks, 80 << 30).others

    teachers = build_teachers(tiny_config(tmp_path, distilling(teacher)))
    assert teachers is not None
    model = teachers.models[REST]
    held = sum(m.published.numel() * 2 for m in model.published_modules())
    tables = 4 * (model.cos.numel() + model.sin.numel())
    assert others("bf16", 1) == others("bf16", 4) == held + tables
    assert others("fp8", 1) != others("bf16", 1)
    one, several = (
        predict(tiny_config(tmp_path, distilling(teacher, **{"teacher.top_k": k})), found.spec, 1, 80 << 30)
        for found in [teacher_of(tiny_config(tmp_path, distilling(teacher)))] if found is not None for k in (0, 7)
    )
    assert several.passing - one.passing == 10 * 8 * one.tokens * ARCH["hidden_size"]


def test_a_record_of_a_step_is_replayed_with_the_teacher(teacher: Path, tmp_path: Path):
    run_dir = tiny_run(tmp_path, distilling(teacher, **{"train.steps": 2, "rl.algo": "grpo"}))
    found = replay(run_dir, 2, "update")
    assert found.same, found


def test_the_shipped_recipe_learns_from_a_run_of_the_quickstart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A step of each. Without the teacher's run it says so, and asks no hub."""
    monkeypatch.chdir(tmp_path)
    short = [
        "num_threads=1", "device=cpu", "train.steps=1", "train.warmup_steps=0", "sft.steps=1", "sft.warmup_steps=0",
        f"sft.cache_dir={tmp_path / 'sft'}", "rollout.prompts_per_step=2", "eval.eval_interval=0", "task.num_eval=4",
    ]
    config = resolve(load_config(shipped()["distill_quickstart"], short, lambda note: None), cuda_available=False)
    with pytest.raises(UserError, match="teacher.path = runs/quickstart: there is no such run yet. Train the teacher"):
        pinned(config)
    first = resolve(load_config(shipped()["quickstart"], short, lambda note: None), cuda_available=False)
    for one in (first, config):
        before = torch.get_num_threads()
        try:
            assert run(pinned(one)[0], tmp_path / "runs" / one.name, ["test"], StopRequest())
        finally:
            torch.set_num_threads(before)
    (row,) = read_metrics(tmp_path / "runs" / "distill_quickstart")[1:]
    assert row["policy/teacher_kl"] != 0 and row["parity/logprob_abs_diff_max"] == 0


TOP_K = {"teacher.top_k": 4, "train.share_prompts": True, "rl.updates_per_step": 2, "train.steps": 3}


def test_the_kl_over_several_tokens_teaches(teacher: Path, tmp_path: Path):
    """Faster than that of the drawn token, as it has no noise; and the student stays exact."""
    run_dir = tiny_run(tmp_path, distilling(teacher, **{
        "sft.steps": 20, "sft.lr": 1e-2, "sft.cache_dir": str(tmp_path / "sft"), "train.steps": 16, "teacher.top_k": 4,
        "rollout.prompts_per_step": 6,
    }))
    rows = read_metrics(run_dir)[1:]
    for key in ("policy/teacher_kl", "policy/teacher_kl_top_k"):
        kl = [row[key] for row in rows]
        assert sum(kl[-4:]) < 0.35 * sum(kl[:4]), (key, kl)
    assert {row["parity/logprob_abs_diff_max"] for row in rows} == {0.0}


def test_the_policy_itself_has_a_kl_of_exactly_0(teacher: Path, tmp_path: Path):
    model = teacher / "checkpoints" / "step_000001" / "model"
    run_dir = tiny_run(tmp_path, {
        "rl.algo": "distill", "teacher.path": str(model), "teacher.precision": "fp8", "model.path": str(model),
        "model.arch": None, "model.tokenizer": None, "train.steps": 1, "eval.eval_interval": 0, "teacher.top_k": 3,
    })
    (row,) = read_metrics(run_dir)[1:]
    assert row["policy/teacher_kl_top_k"] == 0.0 and row["policy/grad_norm"] < 1e-4


def test_a_run_with_several_tokens_resumes_and_is_replayed_to_the_bit(teacher: Path, tmp_path: Path):
    """Beside rewards, in two updates a step, with shared prompts and truncated answers outside of the loss."""
    changes = distilling(teacher, **TOP_K) | {"rl.algo": "grpo", "rl.mask_truncated": True, "train.steps": 4,
                                              "train.max_tokens_per_gpu": 64}
    whole = whole_and_resumed(tmp_path, changes)
    found = replay(whole, 4, "update")
    assert found.same, found


@pytest.mark.parametrize(("changes", "expected"), [
    ({"teacher.path": "x", "teacher.top_k": 2, "rollout.top_p": 0.9}, "teacher.top_k: is a KL of whole distributions"),
    ({"teacher.top_k": 2}, "teacher.top_k: has no effect while teacher.path"),
], ids=str)
def test_several_tokens_do_not_go_with_truncated_distributions(
    changes: dict[str, Any], expected: str, tmp_path: Path
):
    with pytest.raises(UserError, match=expected):
        tiny_config(tmp_path, changes)
