"""The data of a step: refill takes further prompts of the stream, is bounded, resumes to the bit; mistakes save."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rewards.test_reward_calls import RL, group, weighted
from tiny import numbers, tiny_run, weights_hash

from jetrl.errors import UserError
from jetrl.report.recorder import read_eval_samples, read_held_out, read_samples
from jetrl.rewards.score import score
from jetrl.rl.selection import reward_stats
from jetrl.run.checkpoint import checkpoint
from jetrl.run.evaluation import _evenly
from jetrl.run.gather import scoring_stats

# Rewards differ within a group only for problems whose answer is a multiple of N.
REWARD = """\
def reward(completions, answer, **_):
    return [float(int(a) % {every} == 0 and i % 2) for i, (c, a) in enumerate(zip(completions, answer))]
"""


def changes(folder: Path, every: int, **more: Any) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"every_{every}.py").write_text(REWARD.format(every=every))
    return {
        "rl.dynamic_sampling": "refill", "task.reward": f"{folder}/every_{every}.py:reward", "eval.eval_interval": 0,
        "task.params.check_gold": False,
    } | {key.replace("__", "."): value for key, value in more.items()}


def test_further_prompts_until_enough_groups_carry_a_signal(tmp_path: Path) -> None:
    run_dir = tiny_run(tmp_path, changes(tmp_path, 3))
    rows, sampled = numbers(run_dir)[1:], 0
    for step, row in enumerate(rows, 1):
        groups: dict[int, list[dict[str, Any]]] = {}
        for sample in read_samples(run_dir):
            if sample["step"] == step:
                groups.setdefault(sample["group"], []).append(sample)
        count = int(row["rollout/num_prompts_sampled"])
        assert sorted(groups) == list(range(sampled, sampled + count)), "the stream goes on where the last step ended"
        sampled += count
        learnt = [g for g in sorted(groups) if any(s["advantage"] for s in groups[g])]
        with_signal = [g for g in sorted(groups) if len({s["reward"] for s in groups[g]}) > 1]
        assert learnt == with_signal[:4] and len(learnt) == 4
        assert row["reward/num_groups_dropped"] == count - 4 and row["parity/logprob_abs_diff_max"] == 0.0
        assert row["reward/frac_zero_std"] == (count - len(with_signal)) / count
    assert max(row["rollout/refill_rounds"] for row in rows) > 1


def test_tokens_of_a_prompt_do_not_depend_on_the_rounds(tmp_path: Path) -> None:
    """A request's stream is named by its place among the step's requests, in whatever round it runs."""
    plain = tiny_run(tmp_path / "a", changes(tmp_path, 1, train__steps=1, rollout__prompts_per_step=16))
    refilled = tiny_run(tmp_path / "b", changes(tmp_path, 4, train__steps=1))
    tokens = {(s["group"], i % 4): s["tokens"] for i, s in enumerate(read_samples(plain))}
    rows = list(read_samples(refilled))
    assert len(rows) > 16
    for i, sample in enumerate(rows):
        if sample["group"] < 16:
            assert sample["tokens"] == tokens[sample["group"], i % 4]


def test_the_bound_with_some_groups_and_with_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = changes(tmp_path, 6, rl__max_refill_rounds=2, train__steps=2)
    run_dir = tiny_run(tmp_path / "a", few)
    rows = numbers(run_dir)[1:]
    dropped = [row["rollout/num_prompts_sampled"] - row["reward/num_groups_dropped"] for row in rows]
    assert all(row["rollout/refill_rounds"] == 3 for row in rows) and all(1 <= kept < 4 for kept in dropped), dropped
    assert f"{int(dropped[0])} of 4 groups carry a signal after 3 rounds" in " ".join(capsys.readouterr().out.split())
    none = changes(tmp_path, 100_000, rl__max_refill_rounds=2)
    with pytest.raises(UserError, match=r"none of 12 prompts in 3 rounds .*Make the task easier or harder"):
        tiny_run(tmp_path / "b", none)
    saved = checkpoint.load(tmp_path / "b" / "runs" / "tiny" / "checkpoints" / "step_000000")
    assert saved.step == 0 and saved.num_prompts == 0, "the step that found nothing is not counted"


def test_a_stopped_run_resumes_to_the_bit(tmp_path: Path) -> None:
    refill = changes(tmp_path, 3)
    straight = tiny_run(tmp_path / "a", refill)
    tiny_run(tmp_path / "b", refill | {"train.steps": 2})
    resumed = tiny_run(tmp_path / "b", refill | {"checkpoint.resume": "auto"})
    assert numbers(resumed) == numbers(straight) and weights_hash(resumed, 4) == weights_hash(straight, 4)
    assert list(read_samples(resumed)) == list(read_samples(straight))


def _logging(completions: list[str], log_metric: Any) -> list[Any]:
    log_metric("lengths", sum(map(len, completions)) / len(completions))
    return [None if c == "none" else {"score": float(len(c)), "acc": len(c) > 1} for c in completions]


def test_metrics_of_rounds_are_those_of_one_scoring_of_all() -> None:
    """Every key: a mean of the rounds' means would differ, as they have 16, 1 and 2 completions."""
    texts = ["a"] * 16, ["bcdef"], ["none", "gh"]
    groups = [group(*some, index=i, length=17 + i) for i, some in enumerate(texts)]
    reward = weighted((_logging, 1.0), (lambda completions: [float("e" in c) for c in completions], 0.5))
    rounds = [score([one], reward, RL) for one in groups]
    together = scoring_stats([score(groups, reward, RL)])
    found = scoring_stats(rounds)
    assert found == pytest.approx(together, rel=1e-12) and found.keys() == together.keys()
    assert found["reward/f1/mean"] == 2 / 19 and found["reward/frac_unscored"] == 0.0  # "none" has a score by f1
    assert found["reward/f0/acc"] == 2 / 18 and found["reward/lengths"] == (16 * 1 + 5 + 2 * 3) / 19
    assert {"reward/f0/std", "reward/overlong_penalty_mean", "reward/num_errors", "reward/min"} <= found.keys()
    one = [score([group(*["a"] * 16)], lambda completions: [0.5] * 16, RL), score([group("b")], lambda **_: [0.0], RL)]
    both = [replace(g, rewards=g.rewards) for s in one for g in s.groups]
    assert reward_stats(both)["reward/mean"] == 8 / 17


def test_seconds_next_to_rollouts_add_up() -> None:
    one = score([group("a")], lambda completions: [1.0], RL)
    assert scoring_stats([replace(one, beside=1.5), replace(one, beside=2.0)])["perf/reward_beside_s"] == 3.5
    assert "perf/reward_beside_s" not in scoring_stats([one])


def evaluated(folder: Path, reward: str, **more: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "some.py").write_text(reward)
    return tiny_run(folder, {
        "task.reward": f"{folder}/some.py:some", "task.params.check_gold": False, "train.steps": 1, "task.num_eval": 8,
    } | {key.replace("__", "."): value for key, value in more.items()})


SOME = """
def some(completions, answer, **_):
    return [None if int(a) % 3 else float(int(a) % 2) for a in answer]

def other(completions, **_):
    return [0.25] * len(completions)
"""


def test_what_is_not_scored_does_not_count_in_an_evaluation(tmp_path: Path) -> None:
    run_dir = evaluated(tmp_path, SOME)
    row, held = numbers(run_dir)[0], read_held_out(run_dir)[0]
    rewards = [value for values in held["rewards"] for value in values]
    given = [value for value in rewards if value is not None]
    assert len(rewards) == 8 and 0 < len(given) < 8
    assert row["eval/addition/avg@1"] == row["eval/addition/pass@1"] == sum(given) / len(given)
    assert row["eval/addition/num_unscored"] == 8 - len(given) and row["eval/addition/num_completions"] == 8
    kept = list(read_eval_samples(run_dir))
    assert len(kept) == 16 and {s["step"] for s in kept} == {0, 1}  # two evaluations, of 8 problems each
    assert [s["reward"] for s in kept if s["step"] == 0] == rewards
    assert all(s["advantage"] is None and len(s["tokens"]) == len(s["logprobs"]) for s in kept)


def test_an_evaluation_without_any_score_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Evaluation: Reward function .*some: not one of 8 completions could be scored"):
        evaluated(tmp_path, "def some(completions):\n    return [None] * len(completions)\n")


def test_what_decides_is_one_function_of_several(tmp_path: Path) -> None:
    """Its score is the evaluation's, what it does not score is not scored, and each function is told apart."""
    run_dir = evaluated(
        tmp_path, SOME, rl__signal="some", eval__num_samples_kept=3, eval__pass_reward=0.5,
        task__reward=(f"{tmp_path}/some.py:some", f"{tmp_path}/some.py:other"), task__reward_weights=(0.2, 1.0),
    )
    row = numbers(run_dir)[0]
    given = [v for values in read_held_out(run_dir)[0]["rewards"] for v in values if v is not None]
    assert set(given) <= {0.0, 1.0} and len(given) < 8
    assert row["eval/addition/avg@1"] == row["eval/addition/pass@1"] == row["eval/addition/some/avg@1"]
    assert row["eval/addition/other/avg@1"] == 0.25
    kept = list(read_eval_samples(run_dir))
    assert [s["step"] for s in kept] == [0] * 3 + [1] * 3 and [s["group"] for s in kept] == [0, 2, 5] * 2
    for sample in (*kept, *read_samples(run_dir)):
        assert set(sample["rewards"]) == {"some", "other"} and sample["rewards"]["other"] == 0.25
        assert (sample["reward"] is None) == (sample["rewards"]["some"] is None)


def test_completions_are_kept_evenly_over_the_problems() -> None:
    assert _evenly(8, 0) == ([], 0) and _evenly(0, 4) == ([], 0)
    assert _evenly(8, 3) == ([0, 2, 5], 1) and _evenly(4, 3) == ([0, 1, 2], 1) and _evenly(3, 8) == ([0, 1, 2], 2)


def test_a_mistake_in_an_evaluation_keeps_the_step_before_it(tmp_path: Path) -> None:
    """The reward raises in the evaluation after step 2: its row, samples and weights are there, and the run goes on."""
    (tmp_path / "held.py").write_text(
        "calls = 0\n\ndef reward(completions, answer, **_):\n    global calls\n    calls += 1\n"
        "    if calls == 4:\n        raise RuntimeError('no such file')\n"
        "    return [len(set(c) & set(a)) / len(set(a)) for c, a in zip(completions, answer)]\n"
    )  # calls: evaluation, steps 1 and 2, evaluation
    held = {"task.reward": f"{tmp_path}/held.py:reward", "checkpoint.save_interval": 50,
            "task.params.check_gold": False}
    with pytest.raises(UserError, match="no such file"):
        tiny_run(tmp_path, held)
    run_dir = tmp_path / "runs" / "tiny"
    assert [row["step"] for row in numbers(run_dir)] == [0, 1, 2]
    assert {sample["step"] for sample in read_samples(run_dir)} == {1, 2}
    (tmp_path / "held.py").write_text((tmp_path / "held.py").read_text().replace("calls == 4", "calls == 0"))  # fixed
    resumed = numbers(tiny_run(tmp_path, held | {"checkpoint.resume": "auto"}))
    assert [row["step"] for row in resumed] == [0, 1, 2, 3, 4]
    assert any(key.startswith("eval/") for key in resumed[2]), "the evaluation is made when the run is resumed"


def test_a_mistake_in_a_step_saves_the_steps_before(tmp_path: Path) -> None:
    """A reward that raises in step 3 stops the run with its message; the run goes on from step 2 once it is fixed."""
    (tmp_path / "late.py").write_text(
        "calls = 0\n\ndef reward(completions, answer, **_):\n    global calls\n    calls += 1\n"
        "    if calls == 3:\n        raise RuntimeError('disk on fire')\n"
        "    return [len(set(c) & set(a)) / len(set(a)) for c, a in zip(completions, answer)]\n"
    )
    late = {"task.reward": f"{tmp_path}/late.py:reward", "eval.eval_interval": 0, "checkpoint.save_interval": 50,
            "task.params.check_gold": False}
    with pytest.raises(UserError, match="disk on fire"):
        tiny_run(tmp_path, late)
    newest = checkpoint.newest(tmp_path / "runs" / "tiny" / "checkpoints")
    assert newest is not None and newest.name == "step_000002"
    rows = numbers(tiny_run(tmp_path, late | {"checkpoint.resume": "auto"}))
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]


def test_refill_takes_the_place_of_groups_outside_the_loss(tmp_path: Path) -> None:
    """Most answers are cut off: a step learns from as many groups as it wants, each with an answer in the loss."""
    (tmp_path / "mine.py").write_text(
        "def digits(completions, **_):\n    return [sum(map(ord, c)) % 11 / 10 for c in completions]\n"
    )
    short = {
        "rl.dynamic_sampling": "refill", "rl.mask_truncated": True, "rl.max_refill_rounds": 20, "train.steps": 1,
        "task.reward": f"{tmp_path}/mine.py:digits", "task.params": {"digits": [2], "check_gold": False},
        "rollout.max_response_length": 2, "eval.eval_interval": 0,
    }
    run_dir = tiny_run(tmp_path, short)
    row, rows = numbers(run_dir)[1], [one for one in read_samples(run_dir) if one["step"] == 1]
    learnt = {one["group"] for one in rows if one["advantage"] is not None}
    assert row["rollout/refill_rounds"] > 1 and row["response_length/frac_truncated"] > 0.5
    assert len(learnt) == 4, "rollout.prompts_per_step"
    dropped = {one["group"] for one in rows} - learnt
    assert row["reward/num_groups_dropped"] == len(dropped)
