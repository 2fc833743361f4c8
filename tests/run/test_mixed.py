"""Distillation on given answers beside the policy's own: which rows, what they add to the loss, resuming, refusals."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks

from jetrl.api import load_model
from jetrl.errors import UserError
from jetrl.parallel.world import World
from jetrl.report.recorder import read_metrics
from jetrl.run.loop import StopRequest, run
from jetrl.run.mixed import divided
from jetrl.run.prepare import prepare
from jetrl.run.replay import record
from jetrl.run.replay.checks import replay
from jetrl.tasks.task import sample
from jetrl.types import Problem, Prompt
from tests.tiny import ARCH, numbers, saved, tiny_config, tiny_run, whole_and_resumed

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_run(tmp_path_factory.mktemp("teacher"), {
        "train.steps": 1, "checkpoint.save_interval": 1, "eval.eval_interval": 0, "precision": "bf16",
    })
    return folder / "checkpoints" / "step_000001" / "model"


def mixing(teacher: Path, **more: Any) -> dict[str, Any]:
    """A student of one layer; one of four prompts has its answer given."""
    return {
        "rl.algo": "distill", "teacher.path": str(teacher), "model.arch": ARCH | {"num_hidden_layers": 1},
        "eval.eval_interval": 0, "teacher.top_k": 3, "teacher.given_fraction": 0.25, "precision": "bf16",
        "train.max_tokens_per_gpu": 64, "rollout.max_response_length": 32,
    } | more


def test_which_rows_are_given_is_a_function_of_seed_and_place(tmp_path: Path) -> None:
    prompts = [Prompt(i, Problem("", "", ""), ()) for i in range(40, 56)]

    def given(seed: int) -> list[int]:
        changes = {"seed": seed, "rollout.prompts_per_step": 16}
        own, others = divided(prompts, tiny_config(tmp_path, mixing(Path("x"), **changes)))
        assert sorted(p.index for p in (*own, *others)) == list(range(40, 56)) and len(others) == 4
        assert [p.index for p in own] == sorted(p.index for p in own)
        return [p.index for p in others]

    assert given(1) == given(1) != given(2)
    assert divided(prompts, tiny_config(tmp_path)) == (prompts, [])


def whole_kl(policy: Any, teacher: Any, tokens: list[int], start: int, top: int) -> list[float]:
    """The KL over the teacher's `top` tokens and the rest at the tokens from `start` on, from whole softmaxes."""
    from jetrl.kernels.attention.ops import varlen_plan
    from jetrl.types import ForwardBatch

    def logprobs(model: Any) -> torch.Tensor:
        ids, edges = torch.tensor(tokens), torch.tensor([0, len(tokens)], dtype=torch.int32)
        batch = ForwardBatch(ids, torch.arange(len(ids)), varlen_plan(edges, (len(tokens),), ()), "train")
        return torch.log_softmax(model.logits(model(batch)).double(), 1)[start - 1 : -1]

    with torch.no_grad():
        p, q = logprobs(policy.model), logprobs(teacher.model)
    ids = q.topk(top, dim=1).indices
    p, q = p.gather(1, ids), q.gather(1, ids)
    rest_p, rest_q = 1 - p.exp().sum(1), 1 - q.exp().sum(1)
    return ((p.exp() * (p - q)).sum(1) + rest_p * (rest_p / rest_q).log()).tolist()


def test_given_tokens_count_as_the_policys_own(teacher: Path, tmp_path: Path) -> None:
    """The mean KL of step 1 is that of all tokens, own and given, by a plain formula."""
    changes = mixing(teacher, **{"train.steps": 1, "checkpoint.save_interval": 1})
    run_dir = tiny_run(tmp_path, changes)
    (row,) = read_metrics(run_dir)[1:]
    student = load_model(run_dir / "checkpoints" / "step_000000", "bf16", "cpu")
    judge = load_model(teacher, "bf16", "cpu")
    own = [one for group in record.read(run_dir, 1).learnt for one in group.trajectories]
    config = tiny_config(tmp_path, changes)
    plan = prepare(config)
    assert plan.mixed_answers is not None
    (prompt,) = divided(sample(plan.task, plan.tokenizer, 0, 4, config), config)[1]
    answer = plan.mixed_answers.trajectory(prompt.problem)
    assert plan.tokenizer.decode(answer.segments[1].tokens[:-1].tolist()) == prompt.problem.solution
    found: list[float] = []
    for one in (*own, answer):
        before, drawn = (segment.tokens.tolist() for segment in one.segments)
        found += whole_kl(student, judge, before + drawn, len(before), 3)
    assert len(own) == 12 and row["data/num_given"] == 1 and row["data/num_given_tokens"] == len(drawn)
    assert row["policy/teacher_kl_top_k"] == pytest.approx(math.fsum(found) / len(found), rel=1e-4)
    assert row["parity/logprob_abs_diff_max"] == 0.0


def test_a_stopped_run_resumes_to_the_bit(teacher: Path, tmp_path: Path) -> None:
    """In two updates a step, beside rewards and a reference policy."""
    changes = mixing(teacher, **{"rl.algo": "grpo", "rl.kl_coef": 0.01, "rl.updates_per_step": 2,
                                 "teacher.given_fraction": 0.5, "train.share_prompts": True})
    whole = whole_and_resumed(tmp_path, changes)
    assert {row["data/num_given"] for row in numbers(whole)[1:]} == {2.0}
    with pytest.raises(UserError, match="with teacher.given_fraction = 0.5 a step has given answers"):
        replay(whole, 4, "update")
    assert replay(whole, 3, "rollout").same  # the step after a checkpoint


def rank_run(world: World, folder: Path, changes: dict[str, Any]) -> bool:
    with StopRequest(world) as stop:
        return run(tiny_config(folder / str(world.rank), changes), folder / "runs" / "tiny", ["test"], stop)


@pytest.mark.slow
def test_two_ranks_make_the_update_of_one(teacher: Path, tmp_path: Path) -> None:
    changes = mixing(teacher, **{"train.reduction": "fixed", "train.steps": 2, "teacher.given_fraction": 0.5})
    alone = tiny_run(tmp_path / "alone", changes)
    assert run_ranks(rank_run, 2, tmp_path, changes) == [True, True]
    run_dir = tmp_path / "runs" / "tiny"
    assert numbers(alone) == numbers(run_dir)
    assert all(torch.equal(value, saved(run_dir, 2)[name]) for name, value in saved(alone, 2).items())


@pytest.mark.parametrize(("changes", "said"), [
    ({"teacher.top_k": 0}, "teacher.given_fraction: has no effect while teacher.top_k = 0"),
    ({"teacher.given_fraction": 0.1}, "0.1 of rollout.prompts_per_step = 4 is 0 rows"),
    ({"teacher.given_fraction": 0.9}, "0.9 of rollout.prompts_per_step = 4 is 4 rows"),
    ({"rl.algo": "ppo"}, "given answers do not go with rl.adv_estimator; choose an rl.algo without a critic"),
    ({"environment.name": "calculator", "environment.max_turns": 2}, "do not go with environment.name"),
], ids=str)
def test_settings_that_do_not_go_with_given_answers(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        tiny_config(tmp_path, mixing(Path("x")) | changes)


def test_rows_without_an_answer_are_refused_at_the_start(teacher: Path, tmp_path: Path) -> None:
    (tmp_path / "sums.jsonl").write_text('{"prompt": "1+1=", "answer": "2", "solution": "2"}\n'
                                         + '{"prompt": "2+1=", "answer": "3"}\n' * 9)
    changes = {"task.name": "file", "task.params": None, "task.train_file": str(tmp_path / "sums.jsonl")}
    with pytest.raises(UserError, match=r"teacher.given_fraction = 0.25: problem .* has no answer that could be given"):
        prepare(tiny_config(tmp_path, mixing(teacher) | changes))
    (tmp_path / "sums.jsonl").write_text('{"prompt": "1+1=", "answer": "2", "solution": "2"}\n' * 9
                                         + '{"prompt": "2+1=", "answer": "3", "solution": "' + "3" * 999 + '"}\n')
    with pytest.raises(UserError, match="the conversation has 100. tokens"):  # of a row that some later step would give
        prepare(tiny_config(tmp_path, mixing(teacher) | changes))
