"""Reward functions: what they are given, what of their results is accepted, and the numbers made of them."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from jetrl.chat.tokenizer import arithmetic_tokenizer
from jetrl.config import TaskConfig, parse_config
from jetrl.errors import UserError
from jetrl.rewards.loading import import_function, import_reward
from jetrl.rewards.score import call_reward, overlong_penalty, score
from jetrl.rewards.text import exact_match, last_integer
from jetrl.tasks.addition import AdditionTask
from jetrl.tasks.gold import check_gold, gold_text, required_reward
from jetrl.types import Group, Problem, Prompt, Segment, Trajectory

RL = parse_config({"name": "t", "device": "cpu", "model": {"path": "m"}, "task": {"name": "addition"}})


def group(texts, prompt="p", answer="a", lengths=None, **extra):
    lengths = lengths or [3] * len(texts)
    opening = Segment("environment", (1,), "p")
    answers = [
        Segment("policy", (7,) * n, text, (0.0,) * n) for text, n in zip(texts, lengths, strict=True)
    ]
    trajectories = tuple(Trajectory((opening, segment), "stop", "") for segment in answers)
    return Group(Prompt(0, Problem("id-1", prompt, answer, extra=extra), (1,)), trajectories)


def conversation(*turns, end="stop", prompt=""):
    """A group of one conversation: (text, reward) of the policy's turns, texts of the environment between them."""
    segments = [Segment("environment", (1, 2), "opening")]
    for turn in turns:
        if isinstance(turn, str):
            segments.append(Segment("environment", (5, 6), turn))
        else:
            segments.append(Segment("policy", (7, 8, 9), turn[0], (0.0,) * 3, turn[1]))
    return Group(Prompt(0, Problem("c", prompt, "42"), ()), (Trajectory(tuple(segments), end, ""),))


def found(scored):
    assert not scored.unscored
    return scored.groups, scored.stats


def constant(*values):
    return lambda completions: list(values)


def items(*texts):
    return [(Problem("id-1", "p", "a"), text, (7,)) for text in texts]


def test_rewards_and_metrics_by_hand():
    groups = [group(["1", "2"]), group(["3", "4"])]
    scored, stats = found(score(groups, constant(1.0, 0.0, 0.5, 0.5), None))
    assert [g.rewards for g in scored] == [(1.0, 0.0), (0.5, 0.5)]
    assert stats == {"reward/min": 0.0, "reward/max": 1.0, "reward/num_errors": 0.0}
    assert [g.trajectories for g in scored] == [g.trajectories for g in groups]


def test_a_conversation_earns_the_sum_of_what_its_environment_gave():
    groups = [conversation(("a", 0.1), "higher", ("b", 0.2), "lower", ("c", 0.7)), conversation(("a", -1.0))]
    scored, stats = found(score(groups, None, None, conversations=True))
    assert [g.rewards for g in scored] == [(math.fsum([0.1, 0.2, 0.7]),), (-1.0,)]
    assert stats == {"reward/min": -1.0, "reward/max": 1.0, "reward/num_errors": 0.0}


def test_a_reward_function_gets_the_whole_conversation_and_replaces_the_environments_rewards():
    seen = {}

    def judge(prompts, completions, completion_ids):
        seen.update(prompts=prompts, completions=completions, ids=completion_ids)
        return [0.25] * len(completions)

    groups = [conversation(("a", 5.0), "higher", ("42", 0.0)), conversation(("b", 1.0), prompt="given")]
    scored, _ = found(score(groups, judge, None, conversations=True))
    assert [g.rewards for g in scored] == [(0.25,), (0.25,)]
    assert seen["prompts"] == ["opening", "given"]  # an environment without a prompt in the data makes it
    assert seen["completions"] == [
        [
            {"role": "assistant", "content": "a"}, {"role": "user", "content": "higher"},
            {"role": "assistant", "content": "42"},
        ],
        [{"role": "assistant", "content": "b"}],
    ]
    assert seen["ids"] == [[7, 8, 9, 5, 6, 7, 8, 9], [7, 8, 9]]
    # Ours read the policy's last turn, also where the environment has the last word.
    ends = [conversation(("1", 0.0), "no", ("42", 0.0)), conversation(("42", 0.0), "more?", end="turns")]
    assert [g.rewards for g in score(ends, exact_match, None, conversations=True).groups] == [(1.0,), (1.0,)]


def test_a_reward_function_sees_the_roles_that_the_environment_gave():
    said = ({"role": "tool", "content": "3"}, {"role": "user", "content": "go on"})
    talk = conversation(("a", 0.0), "3go on", ("b", 0.0))
    (trajectory,) = talk.trajectories
    opening, first, theirs, last = trajectory.segments
    segments = (opening, first, replace(theirs, messages=said), last)
    seen = []

    def judge(completions):
        seen.extend(completions)
        return [0.0]

    score([replace(talk, trajectories=(replace(trajectory, segments=segments),))], judge, None, conversations=True)
    assert seen == [[{"role": "assistant", "content": "a"}, *said, {"role": "assistant", "content": "b"}]]


def test_what_ran_into_a_limit_may_get_nothing():
    groups = [conversation(("a", 1.0), end=end) for end in ("stop", "length", "turns")]
    keep, zero = (
        [g.rewards for g in score(groups, None, None, conversations=True, at_limit=limit).groups]
        for limit in ("keep", "zero")
    )
    assert (keep, zero) == ([(1.0,)] * 3, [(1.0,), (0.0,), (0.0,)])


def test_what_an_environment_did_not_score_has_no_reward():
    """None is not 0: not in training, and not at a limit either, unless `at_limit` says that such a one earns 0."""
    groups = [
        conversation(("a", None), "go on", ("b", None)), conversation(("a", 0.0), "go on", ("b", None)),
        conversation(("a", None), end="length"), conversation(("a", None), "more", ("b", 0.5), end="turns"),
    ]
    keep, zero = (score(groups, None, RL, conversations=True, at_limit=limit) for limit in ("keep", "zero"))
    assert [g.rewards for g in keep.groups] == [(0.0,), (0.5,)] and len(keep.unscored) == 2
    assert keep.stats["reward/num_errors"] == 2.0
    assert [g.rewards for g in zero.groups] == [(0.0,), (0.0,), (0.0,)] and len(zero.unscored) == 1
    assert all(t.given == () for g in zero.groups[1:] for t in g.trajectories)


def test_groups_that_lost_trajectories_keep_their_places():
    lost = group(["x"])
    groups = [group(["1", "2"]), Group(lost.prompt, ()), group(["3"])]
    scored, _ = found(score(groups, constant(1.0, 2.0, 3.0), None))
    assert [g.rewards for g in scored] == [(1.0, 2.0), (), (3.0,)]
    assert found(score([Group(lost.prompt, ())], None, None)) == ([Group(lost.prompt, ())], {"reward/num_errors": 0.0})


def test_none_counts_as_an_error_and_not_as_zero():
    """In an evaluation (without a config) as in training."""
    scored = score([group(["1", "2", "3"])], constant(None, 0.0, 1.0), None)
    assert scored.groups[0].rewards == (0.0, 1.0) and scored.num_unscored == 1
    assert scored.stats["reward/num_errors"] == 1.0


def test_functions_get_the_columns_that_they_name():
    seen = {}

    def picky(completions, answer, level, absent=5):
        seen.update(completions=completions, answer=answer, level=level, absent=absent)
        return [0.0] * 3

    def greedy(prompts, completions, **columns):
        seen.update(columns, prompts=prompts)
        return [0.0] * 3

    groups = [group(["x", "y"], level=2), group(["z"], answer="b", other="o")]
    score(groups, picky, None)
    assert seen == {
        "completions": ["x", "y", "z"], "answer": ["a", "a", "b"], "level": [2, 2, None], "absent": 5
    }
    score(groups, greedy, None)
    assert seen["prompts"] == ["p"] * 3 and seen["other"] == [None, None, "o"] and "solution" not in seen
    assert seen["completion_ids"] == [[7] * 3] * 3
    assert {type(token) for ids in seen["completion_ids"] for token in ids} == {int}


def test_a_reward_sees_what_the_template_has_opened_of_the_policys_turn():
    """`<think>` that the prompt ends with is in no completion: a function that needs it takes the column."""
    def anchored(completions, prefilled):
        return [float((p + c).startswith("<think>")) for c, p in zip(completions, prefilled, strict=True)]

    one = group(["x</think>y"])
    opening, answer = one.trajectories[0].segments
    opened = replace(one, trajectories=(replace(one.trajectories[0], segments=(replace(
        opening, opened="<think>\n"), answer)),))
    (scored,) = score([opened], anchored, None).groups
    assert scored.rewards == (1.0,)
    assert score([one], anchored, None).groups[0].rewards == (0.0,)
    own = group(["x"], prefilled="mine")
    assert score([own], lambda completions, prefilled: [float(p == "mine") for p in prefilled], None).groups[0].rewards

    talk = Problem("t", "q", "2", ({"role": "assistant", "content": "a"}, {"role": "tool", "content": "b"},
                                   {"role": "assistant", "content": "#2"}))
    assert gold_text(AdditionTask({}, 0, arithmetic_tokenizer()), talk, exact_match) == "#2"


def test_chat_prompts_give_chat_completions():
    def last_role(prompts, completions):
        assert prompts == [[{"role": "user", "content": "q"}]]
        assert completions == [[{"role": "assistant", "content": "5"}]]
        return [1.0]

    chat = group(["5"], prompt=({"role": "user", "content": "q"},), answer="5")
    assert score([chat], last_role, None).groups[0].rewards == (1.0,)
    assert score([chat], exact_match, None).groups[0].rewards == (1.0,)


@pytest.mark.parametrize("value", [1, True, 1.0, np.float32(1), np.bool_(True), torch.tensor(1.0)])
def test_numbers_of_other_types_are_accepted(value):
    assert call_reward(constant(value), items("x")) == [1.0]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1.0], "returned 1 scores for 2 completions"),
        ([1.0, "1"], r"returned '1' \(str\), not a number, for completion 'y' of problem id-1"),
        ([1.0, math.nan], "returned nan for completion 'y'"),
        ([math.inf, 1.0], "returned inf for completion 'x'"),
        ([np.zeros(2), 1.0], "not a number"),
        ([torch.zeros(2), 1.0], "not a number"),
    ],
)
def test_bad_results_are_refused(values, message):
    with pytest.raises(UserError, match=message):
        call_reward(constant(*values), items("x", "y"))


def test_results_that_are_no_list_are_refused():
    with pytest.raises(UserError, match="must return a list of numbers, got float"):
        call_reward(lambda completions: 1.0, items("x"))


def test_a_function_that_raises_is_named_with_its_cause():
    def broken(completions):
        raise KeyError("gone")

    with pytest.raises(UserError, match=r"test_rewards.*broken raised KeyError: 'gone'") as caught:
        call_reward(broken, items("x"))
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_missing_column_is_named_with_those_present():
    with pytest.raises(UserError, match="needs level, but the problems have only: prompts, completions"):
        call_reward(lambda completions, level: [1.0], items("x"))


def test_overlong_penalty_is_dapos():
    # Buffer of 4 below 20: free up to 16, then linear down to -factor at 20.
    lengths = [0, 16, 17, 18, 20]
    assert [overlong_penalty(n, 20, 4, 1.0) for n in lengths] == [0.0, 0.0, -0.25, -0.5, -1.0]
    assert overlong_penalty(18, 20, 4, 0.5) == -0.25
    with pytest.raises(UserError, match="from 1 to rollout.max_response_length = 20, got 21"):
        overlong_penalty(5, 20, 21, 1.0)


def test_overlong_penalty_in_scores():
    config = parse_config({
        "name": "t", "model": {"arch": {"model_type": "qwen3"}, "tokenizer": "builtin:arithmetic"},
        "task": {"name": "addition"}, "rollout": {"max_response_length": 20}, "rl": {"overlong_buffer_len": 4},
    })
    scored, stats = found(score([group(["x", "y"], lengths=[16, 18])], constant(1.0, 1.0), config))
    assert scored[0].rewards == (1.0, 0.5)
    assert stats["reward/overlong_penalty_mean"] == -0.25
    talk = conversation(*[("a", 1.0), "b"] * 3, ("c", 0.0))  # 18 tokens behind the prompt, 12 of them the policy's
    assert score([talk], None, config, conversations=True).groups[0].rewards == (2.5,)
    assert score([group(["x", "y"], lengths=[16, 18])], constant(1.0, 1.0), None).groups[0].rewards == (1.0, 1.0)


@pytest.mark.parametrize(
    ("text", "score_"),
    [
        ("it is 1234", 1.0), ("1,234.", 1.0), ("= 1234.00", 1.0), ("1234.5", 0.0), ("-1234", 0.0), ("5000-1234", 1.0),
        ("1234 and 5", 0.0), ("none", 0.0), ("", 0.0), ("9" * 5000, 0.0), ("1, 2, 1234", 1.0), ("٣", 0.0),
    ],
)
def test_last_integer(text, score_):
    assert last_integer(completions=[text], answer=["1,234"]) == [score_]


def test_last_integer_refuses_other_answers():
    with pytest.raises(UserError, match="the answer '1/2' is not an integer"):
        call_reward(last_integer, [(Problem("i", "p", "1/2"), "1", (1,))])


def test_exact_match():
    assert exact_match(completions=[" a\n", "A", "a b"], answer=["a", "a", "a"]) == [1.0, 0.0, 0.0]


def test_functions_from_files_and_modules(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def twice(completions):\n    return [2.0 * len(c) for c in completions]\nnumber = 3\n")
    twice = import_function(f"{file}:twice")
    assert call_reward(twice, items("abc")) == [6.0]
    assert import_function("jetrl.rewards.text:exact_match") is exact_match
    assert import_reward(TaskConfig(name="addition", reward=f"{file}:twice"))(["a"]) == [2.0]
    none, own = SimpleNamespace(name="file", reward=None), SimpleNamespace(name="addition", reward=exact_match)
    assert required_reward(own, None) is exact_match and required_reward(own, last_integer) is last_integer
    with pytest.raises(UserError, match="no reward of its own.*exact_match"):
        required_reward(none, None)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mine", "write module:function"),
        ("{}/gone.py:f", "gone.py not found"),
        ("{}/mine.py:f", "has no 'f'; its functions: g, async_one"),
        ("{}/mine.py:number", "is of type int, not a function"),
        ("{}/broken.py:f", "cannot be loaded: ZeroDivisionError"),
        ("no_such_module_here:f", "cannot import no_such_module_here.*write no_such_module_here.py:f"),
    ],
)
def test_names_that_lead_nowhere(tmp_path, name, message):
    (tmp_path / "mine.py").write_text("number = 3\ndef g(): ...\nasync def async_one(): ...\n")
    (tmp_path / "broken.py").write_text("1 / 0\n")
    with pytest.raises(UserError, match=message):
        import_function(name.format(tmp_path))


def test_verls_compute_score_is_adapted(tmp_path):
    file = tmp_path / "verl_like.py"
    file.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return {'score': float(solution_str == ground_truth) + extra_info['bonus'], 'acc': data_source}\n"
    )
    reward = import_function(f"{file}:compute_score")
    groups = [group(["a", "b"], data_source="d", extra_info={"bonus": 0.5})]
    assert score(groups, reward, None).groups[0].rewards == (1.5, 0.5)


def test_check_gold_passes_what_is_right_and_stops_what_is_not():
    tokenizer = arithmetic_tokenizer()
    task = AdditionTask({}, 0, tokenizer)
    assert check_gold(task, task.reward, tokenizer) == 8
    with pytest.raises(UserError, match=r"problem \d+\+\d+ earns no reward") as caught:
        check_gold(task, exact_match, tokenizer)
    problem = task.problem(0)
    for part in (repr(problem.prompt), repr(problem.solution), repr(problem.answer), "score: 0.0", "exact_match"):
        assert part in str(caught.value)
    with pytest.raises(UserError, match="score: None"):
        check_gold(task, lambda completions: [None] * len(completions), tokenizer)
    assert check_gold(AdditionTask({"gold_template": "{answer}"}, 0, tokenizer), exact_match, tokenizer) == 8
    assert check_gold(AdditionTask({"check_gold": False}, 0, tokenizer), exact_match, tokenizer) == 0


def test_check_gold_sees_what_the_tokenizer_does_to_the_text():
    class Lossy:
        encode = staticmethod(lambda text, add_special_tokens: [ord(c) for c in text if c != "#"])
        decode = staticmethod(lambda tokens: "".join(map(chr, tokens)))

    task = AdditionTask({}, 0, arithmetic_tokenizer())
    with pytest.raises(UserError, match="earns no reward"):
        check_gold(task, task.reward, Lossy())


def test_a_reward_may_be_zero_for_right_and_less_for_wrong() -> None:
    task = AdditionTask({"digits": [2]}, 0, arithmetic_tokenizer())

    def penalty(completions, answer, **_):  # type: ignore[no-untyped-def]
        return [0.0 if text.endswith(str(a)) else -1.0 for text, a in zip(completions, answer, strict=True)]

    assert check_gold(task, penalty, arithmetic_tokenizer()) == 8
    with pytest.raises(UserError, match="earns no reward"):
        check_gold(task, lambda completions, **_: [-1.0] * len(completions), arithmetic_tokenizer())


def test_check_gold_gives_a_conversations_reward_what_the_run_gives_it() -> None:
    """A function that reads messages would fail on a text, and stop the run before its first step."""
    task = AdditionTask({"digits": [2]}, 0, arithmetic_tokenizer())

    def last(completions, answer, **_):  # type: ignore[no-untyped-def]
        return [float(talk[-1]["content"].endswith(a)) for talk, a in zip(completions, answer, strict=True)]

    assert check_gold(task, last, arithmetic_tokenizer(), conversations=True) == 8
    with pytest.raises(UserError, match=r"(?s)gold text: '.*score: 0\.0"):
        check_gold(task, lambda completions, **_: [0.0 for talk in completions if talk[0]["role"]],
                   arithmetic_tokenizer(), conversations=True)
