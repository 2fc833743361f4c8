"""Several reward functions, weights, None, async functions: sums and statistics by hand, and who is blamed."""

import asyncio
import math
import re
import statistics
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import tiny_run

from jetrl.chat.tokenizer import arithmetic_tokenizer
from jetrl.config import TaskConfig, parse_config
from jetrl.environments.environment import load_environment
from jetrl.errors import OutOfMemory, UserError
from jetrl.report.recorder import read_metrics, read_samples
from jetrl.rewards.calls import WeightedReward, distinct_names, reward_name
from jetrl.rewards.loading import import_function, import_reward, needs_answer
from jetrl.rewards.results import tell_state
from jetrl.rewards.score import call_reward, score
from jetrl.rewards.text import exact_match
from jetrl.rl.selection import differs
from jetrl.rounding import all_equal
from jetrl.tasks.addition import AdditionTask
from jetrl.tasks.gold import check_gold
from jetrl.types import Group, Problem, Prompt, Segment, Trajectory

RL = parse_config({
    "name": "t", "model": {"arch": {"model_type": "qwen3"}, "tokenizer": "builtin:arithmetic"},
    "task": {"name": "addition"}, "rollout": {"max_response_length": 20}, "rl": {"overlong_buffer_len": 4},
})


def constant(*values):
    return lambda completions: list(values)


def weighted(*pairs):
    functions, weights = zip(*pairs, strict=True)
    return WeightedReward(functions, weights, tuple(f"f{i}" for i in range(len(pairs))))


def items(*texts):
    return [(Problem(f"id-{i}", "p", "a"), text, (7,)) for i, text in enumerate(texts)]


def group(*texts, index=0, length=3):
    answers = [Segment("policy", (7,) * length, text, (0.0,) * length) for text in texts]
    opening = Segment("environment", (1,), "p")
    return Group(
        Prompt(index, Problem(f"id-{index}", "p", "a"), (1,)),
        tuple(Trajectory((opening, a), "stop", "") for a in answers),
    )


def test_sums_and_statistics_by_hand():
    reward = weighted((constant(1.0, 0.0, None, None), 2.0), (constant(0.5, None, -1.0, None), -0.25))
    assert call_reward(reward, items(*"abcd")) == [2.0 - 0.125, 0.0, 0.25, None]
    found = score([group("a", "b"), group("c", "d", index=1)], reward, RL)
    assert [g.rewards for g in found.groups] == [(1.875, 0.0), (0.25,)]
    assert [(g.prompt.index, [t.segments[-1].text for t in g.trajectories]) for g in found.unscored] == [(1, ["d"])]
    assert found.unscored[0].trajectories[0].error == "no reward function scored it" and not found.unscored[0].rewards
    assert [g.scores for g in found.groups] == [{"f0": (1.0, 0.0), "f1": (0.5, None)}, {"f0": (None,), "f1": (-1.0,)}]
    assert found.stats == {
        "reward/f0/mean": 0.5, "reward/f0/std": math.sqrt(0.5), "reward/f1/mean": -0.25,
        "reward/f1/std": statistics.stdev([0.5, -1.0]), "reward/num_errors": 1.0, "reward/min": 0.0,
        "reward/max": 1.875, "reward/overlong_penalty_mean": 0.0, "reward/before_penalty_min": 0.0,
        "reward/before_penalty_max": 1.875,
    }


def test_sums_keep_the_sizes_of_their_terms():
    """0.1 + 0.2 - 0.3 is no other reward than 0: neither with weights, nor by an environment's turns, nor with a
    penalty for long answers."""
    parts = [(constant(0.1, 0.0), 1.0), (constant(0.2, 0.0), 1.0), (constant(0.3, 0.0), -1.0)]
    ours = score([group("a", "b")], weighted(*parts), None)
    assert ours.groups[0].rewards[0] != ours.groups[0].rewards[1] == 0.0 and not differs(ours.groups[0])
    assert ours.groups[0].sizes == pytest.approx((0.6, 0.0)) and ours.groups[0].sizes == ours.groups[0].signal_sizes
    assert ours.stats["reward/min"] == ours.stats["reward/max"], "one number"
    named = score([group("a", "b")], weighted(*parts), None, signal="f0").groups[0]
    assert differs(named) and named.signal_sizes == (0.1, 0.0)
    plain = group("a", "b")
    talk = Trajectory((plain.trajectories[0].segments[0], *(
        Segment("policy", (3,), "x", (-1.0,), reward=part) for part in (0.1, 0.2, -0.3)
    )), "stop", "")
    rest = Trajectory((talk.segments[0], Segment("policy", (3,), "x", (-1.0,), reward=0.0)), "stop", "")
    (given,) = score([Group(plain.prompt, (talk, rest))], None, None, conversations=True).groups
    assert given.rewards[0] != given.rewards[1] and not differs(given)
    paid = score([group("a", "b", length=18)], constant(0.3, 0.1 + 0.2), RL).groups[0]
    assert all_equal(paid.rewards, max(paid.sizes)) and paid.sizes == pytest.approx((0.8, 0.8))
    one = score([group("a", "b")], weighted((constant(0.1 + 0.2, 0.3), 1.0), (constant(0.0, 1.0), 0.0)), None)
    assert one.stats["reward/f0/std"] == 0.0, "equal, for the hint about rewards that never move"


def test_a_group_without_any_score_is_gone_from_training_and_evaluation():
    groups = [group("a", "b"), group("c", index=1)]
    reward = constant(None, None, 1.0)
    trained, evaluated = score(groups, reward, RL), score(groups, reward, None)
    for one in (trained, evaluated):
        assert [(g.prompt.index, g.rewards) for g in one.groups] == [(1, (1.0,))] and one.num_unscored == 2
    assert trained.stats["reward/min"] == 1.0 and evaluated.stats["reward/num_errors"] == 2.0
    empty = score([groups[0]], constant(None, None), RL)
    assert not empty.groups and empty.num_unscored == 2 and "reward/min" not in empty.stats


def test_the_overlong_penalty_is_paid_on_the_sum_and_not_by_what_is_not_scored():
    found = score([group("a", "b", length=18)], constant(1.0, None), RL)
    assert found.groups[0].rewards == (0.5,) and found.stats["reward/overlong_penalty_mean"] == -0.5


def test_async_functions_run_together_and_on_one_loop():
    loops, met = [], asyncio.Event()

    async def first(completions):
        loops.append(asyncio.get_running_loop())
        await asyncio.wait_for(met.wait(), 5)  # only the other one, at the same time, ends this
        return [1.0 for _ in completions]

    async def second(completions):
        met.set()
        await asyncio.sleep(0)
        return [0.5 for _ in completions]

    reward = weighted((first, 1.0), (second, 2.0), (constant(0.25, 0.25), 1.0))
    assert call_reward(reward, items("a", "b")) == [2.25, 2.25]
    found = []
    thread = threading.Thread(target=lambda: found.append(call_reward(reward, items("a", "b"))))
    thread.start()
    thread.join()

    async def inside_a_loop():  # as in a notebook
        return call_reward(reward, items("a", "b"))

    assert asyncio.run(inside_a_loop()) == found[0] == [2.25, 2.25]
    assert len(loops) == 3 and len(set(loops)) == 1


def test_who_is_to_blame():
    async def broken(completions):
        await asyncio.sleep(0)
        raise KeyError("gone")

    async def leaves(completions):
        raise SystemExit(3)

    async def text(completions):
        return "text"

    good = constant(1.0)
    for function, message in (
        (broken, r"broken raised KeyError: 'gone' \(.*test_reward_calls.py, line \d+\)"),
        (leaves, r"leaves raised SystemExit: 3"), (text, r"text must return a list of numbers, got str"),
        (constant(math.nan), r"<lambda> returned nan for completion 'x' of problem id-0"),
        (constant(1.0, 2.0), r"returned 2 scores for 1 completions"),
        (lambda completions, level: [1.0], r"needs level, but the problems have only: prompts"),
    ):
        with pytest.raises(UserError, match=message):
            call_reward(weighted((good, 1.0), (function, 1.0)), items("x"))
        assert call_reward(weighted((good, 1.0)), items("x")) == [1.0], "the loop lives on"


def test_a_full_gpu_is_told_apart():
    def full(completions):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(OutOfMemory, match=r"full raised OutOfMemoryError: CUDA out of memory\. \(.*, line \d+\)"):
        call_reward(full, items("x"))


def test_ctrl_c_in_a_function_is_no_mistake_of_it():
    def interrupted(completions):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        call_reward(weighted((interrupted, 1.0), (constant(1.0), 1.0)), items("x"))


def test_functions_get_the_columns_that_they_name():
    seen = {}

    def one(completions, level):
        seen["one"] = level
        return [0.0] * len(completions)

    def other(prompts, completions, **columns):
        seen["other"] = sorted(columns)
        return [0.0] * len(completions)

    problem = Problem("i", "p", "a", extra={"level": 3})
    call_reward(weighted((one, 1.0), (other, 1.0)), [(problem, "x", (1,))])
    assert seen == {"one": [3], "other": ["answer", "completion_ids", "level"]}


FILE = """\
def right(completions, answer): return [float(c == a) for c, a in zip(completions, answer)]
def short(completions, **_): return [-len(c) for c in completions]
def maybe(completions, answer=None): return [None for _ in completions]
async def judge(completions): return [1.0 for _ in completions]
async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str == ground_truth), "acc": 1}
"""


def loaded(tmp_path, *names, **more):
    (tmp_path / "mine.py").write_text(FILE)
    given = [f"{tmp_path}/mine.py:{name}" for name in names]
    return import_reward(TaskConfig(name="addition", reward=given[0] if len(given) == 1 else tuple(given), **more))


def test_functions_by_name_with_weights(tmp_path):
    both = loaded(tmp_path, "right", "short", reward_weights=(1.0, 0.1))
    assert both.names == ("right", "short") and call_reward(both, items("a", "bcd")) == [1.0 - 0.1, -0.1 * 3]
    assert reward_name(both) == f"{tmp_path}/mine.py:right and {tmp_path}/mine.py:short"
    assert call_reward(loaded(tmp_path, "right", reward_weights=(3.0,)), items("a")) == [3.0]
    assert import_reward(TaskConfig(name="addition")) is None
    assert not isinstance(loaded(tmp_path, "right"), WeightedReward)
    assert call_reward(loaded(tmp_path, "judge"), items("a", "b")) == [1.0, 1.0]
    assert distinct_names(["f", "g", "f", "f"]) == ("f", "g", "f_2", "f_3")
    assert distinct_names(["reward", "f", "reward"]) == ("reward_1", "f", "reward_2"), '"reward" is their sum'
    assert distinct_names(["reward"]) == ("reward",), "alone it is the reward"


def test_verls_async_compute_score(tmp_path):
    (tmp_path / "mine.py").write_text(FILE)
    assert call_reward(import_function(f"{tmp_path}/mine.py:compute_score"), items("a", "b")) == [1.0, 0.0]
    assert call_reward(loaded(tmp_path, "compute_score", "judge"), items("a", "b")) == [2.0, 1.0]


@pytest.mark.parametrize(
    ("names", "needed"),
    [(["right"], True), (["short"], False), (["maybe"], False), (["short", "right"], True), (["short", "judge"], False),
     (["compute_score"], True)],
)
def test_who_needs_answers(tmp_path, names, needed):
    assert needs_answer(loaded(tmp_path, *names)) is needed
    assert not needs_answer(None)


def test_gold_answers_must_please_one_of_several():
    tokenizer = arithmetic_tokenizer()
    task = AdditionTask({"gold_template": "{answer}"}, 0, tokenizer)
    costly = weighted((exact_match, 1.0), (lambda completions: [-5.0] * len(completions), 1.0))
    assert check_gold(task, costly, tokenizer) == 8
    with pytest.raises(UserError, match="earns no reward"):
        check_gold(task, weighted((exact_match, -1.0), (constant(*[0.0] * 8), 1.0)), tokenizer)


def test_an_environment_may_call_it_itself(tmp_path):
    (tmp_path / "env.py").write_text(
        "class Env:\n    def __init__(self, reward): self.reward = reward\n    def reset(self, problem): return 'q'\n"
        "    def step(self, action):\n"
        "        (value,) = self.reward(prompts=['q'], completions=[action], answer=['a'])\n"
        "        return None, value, True\n"
    )
    reward = loaded(tmp_path, "right", "judge", reward_weights=(1.0, 0.5))
    assert load_environment(f"{tmp_path}/env.py:Env", {}, reward)().step("a") == (None, 1.5, True)
    retry = load_environment("retry", {"attempts": 1}, reward)()
    retry.reset({"id": "i", "prompt": "q", "answer": "a", "seed": 0, "index": 0})
    assert retry.step("a") == ("", 1.5, True)


def test_a_weight_that_makes_rewards_too_large_is_named() -> None:
    reward = weighted((constant(1.0, 1e30), 1.0), (constant(0.5, None), -1e31))
    with pytest.raises(UserError, match=r"^task.reward_weights: -1e\+31, the weight of f1, times its score 0.5"):
        call_reward(reward, items("a", "b"))


NO_SCORES = {
    "a number of torch": (torch.tensor(1.0), "must return a list of numbers, got Tensor"),
    "a text": ("1", "must return a list of numbers, got str"),
    "too many": ([1.0, 2.0], "returned 2 scores for 1 completions"),
    "a dict without a score": ([{"acc": 1}], "returned a dict without 'score'"),
    "a text in it": (["good"], r"returned 'good' \(str\), not a number\."),
    "NaN": ([math.nan], r"returned nan\. Return None"),
}


@pytest.mark.parametrize("case", NO_SCORES)
def test_an_environments_own_call_names_the_function_that_fails(case: str) -> None:
    """`reward` of a constructor: what is no score is the function's mistake, and not the environment's."""
    value, told = NO_SCORES[case]

    def broken(completions):
        return value

    with pytest.raises(UserError, match=rf"^Reward function \S*broken {told}"):
        weighted((constant(1.0), 1.0), (broken, 1.0))(completions=["x"])


RUN = """\
import asyncio

def digits(completions, answer, **_):
    return [len(set(c) & set(a)) / len(set(a)) for c, a in zip(completions, answer)]

async def odd(completions, **_):
    await asyncio.sleep(0.01)
    return [None if len(c) % 2 else 1.0 for c in completions]

def some(completions, **_):
    return [None if "1" in c else float(len(c)) for c in completions]
"""


def test_a_run_with_several_and_with_unscored_completions(tmp_path):
    (tmp_path / "several.py").write_text(RUN)
    at = f"{tmp_path}/several.py"
    run = tiny_run(tmp_path / "a", {"task.reward": [f"{at}:digits", f"{at}:odd"], "task.reward_weights": [1.0, 0.5],
                                    "train.steps": 2})
    for row in read_metrics(run)[1:]:
        assert row["reward/frac_unscored"] == 0.0 and 0 <= row["reward/digits/mean"] <= 1
        assert row["reward/odd/mean"] == 1.0 and row["reward/odd/std"] == 0.0
        assert row["reward/digits/mean"] <= row["reward/mean"] <= row["reward/digits/mean"] + 0.5
    run = tiny_run(tmp_path / "b", {"task.reward": f"{at}:some", "train.steps": 2,
                                    "task.params": {"digits": [2], "check_gold": False}})
    rows, samples = read_metrics(run), list(read_samples(run))
    for row in rows[1:]:
        own = [s for s in samples if s["step"] == row["step"]]
        left_out = [s for s in own if s["reward"] is None]
        assert len(own) == 16 and row["reward/frac_unscored"] == len(left_out) / 16
        assert all("1" in s["completion"] and "no reward function" in s["error"] for s in left_out)
        assert not any("1" in s["completion"] for s in own if s["reward"] is not None)
        assert row["reward/num_errors"] == len(left_out) and row["parity/logprob_abs_diff_max"] == 0.0
    assert any(row["reward/frac_unscored"] > 0 for row in rows[1:])
    (tmp_path / "none.py").write_text("def none(completions, **_): return [None] * len(completions)\n")
    with pytest.raises(UserError, match=r"Step 1: Reward function .*none: not one of 16 completions could be scored"):
        tiny_run(tmp_path / "c", {"task.reward": f"{tmp_path}/none.py:none", "eval.eval_interval": 0,
                                  "task.params": {"check_gold": False}})


def test_many_slow_calls_take_the_time_of_one():
    async def slow(completions):
        await asyncio.gather(*(asyncio.sleep(0.2) for _ in completions))
        return [1.0] * len(completions)

    start = time.monotonic()
    call_reward(weighted((slow, 1.0), (slow, 1.0)), items(*"abcdefgh"))
    assert time.monotonic() - start < 1.0  # one after the other: 3.2 seconds


def test_what_the_page_on_rewards_prints_runs():
    page = (Path(__file__).parents[2] / "docs" / "REWARDS.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    first, logs, judge = [block for block in blocks if "prefilled" not in block]
    names = {"asyncio": asyncio}
    exec(logs, names)  # noqa: S102
    logged = score([group("a b", "c")], names["reward"], RL)
    assert logged.stats["reward/mean_words"] == 1.5 and logged.groups[0].extra == {"first_word": ("a", "c")}
    exec(first, names)  # noqa: S102
    assert call_reward(names["reward"], items("xay", "b")) == [1.0, 0.0]

    async def ask(prompt, completion):
        await asyncio.sleep(0)
        return float(prompt == "p" and completion == "b")

    names["ask"] = ask
    exec(judge, names)  # noqa: S102
    both = WeightedReward((names["reward"], names["judge"]), (1.0, 0.5), ("reward", "judge"))
    assert call_reward(both, items("a", "b")) == [1.0, 0.5]


def test_a_weight_of_0_scores_nothing():
    """Its function is logged only: what it says never makes a number of what the others did not score."""
    reward = weighted((constant(None, 1.0), 1.0), (constant(0.3, 0.3), 0.0))
    assert call_reward(reward, items("a", "b")) == [None, 1.0]
    found = score([group("a", "b")], reward, RL)
    assert found.groups[0].rewards == (1.0,) and found.num_unscored == 1 and found.stats["reward/f1/mean"] == 0.3
    assert reward(completions=["a", "b"]) == [None, 1.0]  # for an environment that scores by itself


def test_what_the_deciding_function_did_not_score_is_not_scored():
    reward = weighted((constant(None, 1.0, 0.0), 1.0), (constant(0.3, 0.3, 0.5), 0.1))
    found = score([group("a", "b", "c")], reward, RL, signal="f0")
    assert found.groups[0].signals == (1.0, 0.0) and found.groups[0].rewards == (1.03, 0.05) and found.num_unscored == 1
    assert [g.scores for g in found.unscored] == [{"f0": (None,), "f1": (0.3,)}]
    both = score([group("a", "b", "c")], reward, RL)
    assert both.groups[0].signals == both.groups[0].rewards == (0.03, 1.03, 0.05)
    shaped = weighted((constant(0.0, 0.0), 1.0), (constant(0.2, 0.23), 0.1))
    (one,) = score([group("a", "b")], shaped, RL, signal="f0").groups
    assert one.deciding == (0.0, 0.0) and one.rewards[0] != one.rewards[1]


def test_signals_are_the_sums_before_the_overlong_penalty():
    (one,) = score([group("a", "b", length=18)], constant(1.0, 0.0), RL).groups
    assert one.rewards == (0.5, -0.5) and one.signals == (1.0, 0.0)


def test_the_name_of_the_deciding_function_is_checked(tmp_path):
    (tmp_path / "two.py").write_text("def right(completions):\n    pass\n\ndef short(completions):\n    pass\n")
    reward = tuple(f"{tmp_path}/two.py:{name}" for name in ("right", "short"))
    with pytest.raises(UserError, match=r"rl.signal = 'rigth': no reward function has this name.*'right', 'short'"):
        tiny_run(tmp_path, {"task.reward": reward, "rl.signal": "rigth"})


def test_verls_dicts_are_scores_and_metrics():
    def rows(completions):
        return [{"score": 0.5, "acc": True, "pred": "42"}, {"score": None, "acc": 0}, 1.0]

    found = score([group("a", "b", "c")], rows, RL)
    assert found.groups[0].rewards == (0.5, 1.0) and found.stats["reward/rows/acc"] == 0.5
    assert "reward/rows/pred" not in found.stats
    assert found.groups[0].extra == {"acc": (True, None), "pred": ("42", None)}
    assert found.unscored[0].extra == {"acc": (0,), "pred": (None,)}
    with pytest.raises(UserError, match="returned a dict without 'score'"):
        call_reward(lambda completions: [{"acc": 1}], items("a"))
    with pytest.raises(UserError, match="uses the name 'mean', which is one of jetrl's own"):
        call_reward(lambda completions: [{"score": 1, "mean": 1}], items("a"))


def test_trls_parameters_are_given_to_functions_that_name_them():
    seen = []

    def logs(completions, trainer_state, log_metric, log_extra, **columns):
        seen.append((trainer_state.global_step, trainer_state.max_steps, sorted(columns)))
        log_metric("accuracy", 0.25)
        log_metric("accuracy", np.float32(0.75))
        log_extra("thought", [c.upper() for c in completions])
        log_extra("odd", [math.nan, {1: (2, None)}])
        return [1.0, 2.0]

    tell_state(3, 10)
    found = score([group("a", "b")], logs, RL)
    assert seen == [(3, 10, ["answer", "completion_ids", "prefilled", "prompts"])]
    assert found.stats["reward/accuracy"] == 0.5
    assert found.groups[0].extra == {"thought": ("A", "B"), "odd": ("nan", {"1": [2, None]})}

    def everything(**columns):
        assert "log_metric" not in columns
        return [0.0] * len(columns["completions"])

    assert call_reward(everything, items("a")) == [0.0]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda log_metric, log_extra: log_metric("mean", 1), "log_metric uses the name 'mean'"),
        (lambda log_metric, log_extra: log_metric("x", math.inf), "needs a finite number, got inf"),
        (lambda log_metric, log_extra: log_metric("x", "1"), "needs a finite number, got '1'"),
        (lambda log_metric, log_extra: log_metric(3, 1.0), "needs a name that is a string, got 3"),
        (lambda log_metric, log_extra: log_extra("x", ["a", "b"]), "for each of 1 completions, got 2 values"),
        (lambda log_metric, log_extra: log_extra("x", "a"), "for each of 1 completions, got no list"),
    ],
)
def test_what_is_logged_is_checked(wrong, message):
    def logs(completions, log_metric, log_extra):
        wrong(log_metric, log_extra)
        return [1.0]

    with pytest.raises(UserError, match=message):
        call_reward(logs, items("a"))


@pytest.mark.parametrize(
    "result",
    [np.array(1.0), torch.tensor(0.5), np.float64(1.0), {0.1, 0.2}, frozenset([1.0, 2.0]), {"score": 1.0}, {},
     (x for x in (1.0, 2.0)), "12", b"12", None, 1, object(), zip([1], [2], strict=True), {1.0: 2.0}.keys()],
    ids=lambda value: type(value).__name__,
)
def test_each_result_that_is_no_list_has_one_message(result):
    with pytest.raises(UserError, match=rf"must return a list of numbers, got {type(result).__name__}"):
        call_reward(lambda completions: result, items("a", "b"))


@pytest.mark.parametrize("result", [[1, 2], (1, 2), np.array([1.0, 2.0]), torch.tensor([1.0, 2.0]), range(1, 3)])
def test_results_in_an_order_are_lists(result):
    assert call_reward(lambda completions: result, items("a", "b")) == [1.0, 2.0]


def test_an_error_names_the_users_line_and_not_the_librarys(tmp_path):
    file = tmp_path / "parses.py"
    file.write_text("import json\n\ndef help(text):\n    return json.loads(text)\n\ndef f(completions):\n"
                    "    return [help(c) for c in completions]\n")
    with pytest.raises(UserError, match=rf"raised JSONDecodeError: .* \({file}, line 4\)\. Fix it"):
        call_reward(import_function(f"{file}:f"), items("a"))
