"""The built-in environments: the calculator and its warm start, and another attempt at the task's own problems."""

import pytest

from jetrl.chat.messages import TurnEncoder, encode_solution
from jetrl.chat.tokenizer import VOCABULARY, arithmetic_tokenizer
from jetrl.config import TaskConfig
from jetrl.environments.calculator import calculate
from jetrl.environments.conversations import build_pool
from jetrl.environments.environment import load_environment
from jetrl.environments.retry import Retry, score_answer
from jetrl.errors import UserError
from jetrl.rewards.text import last_integer
from jetrl.tasks.addition import AdditionTask, tool_solution, uses_tool, worked_solution
from jetrl.tasks.gold import check_gold
from jetrl.tasks.gym import GymTask
from jetrl.types import Completion

TOKENIZER = arithmetic_tokenizer()
STOP = (">",)


def addition(**params):
    return AdditionTask({"digits": [3], **params}, 0, TOKENIZER)


@pytest.mark.parametrize(
    ("turn", "reply"),
    [
        ("<348+275>", "=623."), ("8+5=<348-375>", "=-27."), ("<12*12>", "=144."), ("<<1+2>", "=3."), ("<007+1>", "=8."),
        ("<1+2", "=?."), ("1+2>", "=?."), ("<1+2+3>", "=?."), ("<1/2>", "=?."), ("<>", "=?."), ("<-1+2>", "=?."),
        ("<1+1234567890123456789>", "=?."), ("<1+\u0663>", "=?."), (">", "=?."),
    ],
)
def test_calls_and_their_replies(turn, reply):
    assert calculate(turn) == reply


def play(talks, key, problem, turns):
    """The replies of the pool to turns that end at `>`, or with the end of sequence."""
    talks.start(key, problem)
    replies = list(talks.poll(True))
    for text in turns:
        tokens = (*TOKENIZER.encode(text), *(() if text.endswith(STOP) else (TOKENIZER.eos_token_id,)))
        talks.act(key, Completion(0, tokens, (0.0,) * len(tokens), text, "stop", 0, ""))
        replies += talks.poll(True)
    talks.close(key)
    return replies


def calculator_pool(task):
    factory = load_environment("calculator", {}, task.reward)
    return build_pool(factory, TOKENIZER, TaskConfig(name="addition"))


def test_only_the_last_turn_counts():
    task = addition()
    problem, talks = task.problem(0), calculator_pool(task)
    good, call = f"#{problem.answer}", f"<{problem.prompt[:-1]}>"
    ends = [play(talks, i, problem, turns)[-1] for i, turns in enumerate([
        (good,), (call, good), (call, "#1"), (f"{good}>", "1"), (f"#1>{good}",), (problem.solution,), ("<1+1",),
    ])]
    assert [(r.reward, r.done) for r in ends] == [(r, True) for r in (1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 0.0)]
    first, reply, _ = play(talks, 9, problem, (call, good))
    assert (first.text, reply.text, reply.reward) == (problem.prompt, f"={problem.answer}.", None)
    talks.shutdown()


def test_the_warm_start_shows_what_a_rollout_holds():
    task = addition(digits=[2, 3], use_tool=1.0)
    talks, encoder = calculator_pool(task), TurnEncoder(TOKENIZER, TaskConfig(name="addition"))
    for i in range(8):
        problem = task.problem(i)
        parts = encode_solution(problem, encoder, STOP)
        assert [author for author, _ in parts] == ["policy", "environment", "policy"]
        texts = [text for author, text in problem.solution if author == "policy"]
        replies = play(talks, i, problem, texts)
        assert replies[1].tokens == parts[1][1] == tuple(VOCABULARY[c] for c in f"={problem.answer}.")
        assert [r.reward for r in replies] == [None, None, 1.0]
        assert parts[0][1] == tuple(TOKENIZER.encode(texts[0]))  # it ends at the stop string, without eos
        assert parts[2][1] == (*TOKENIZER.encode(texts[1]), TOKENIZER.eos_token_id)
    talks.shutdown()


def test_share_of_the_teachers_calls():
    assert tool_solution(348, 275) == (("policy", "<348+275>"), ("environment", "=623."), ("policy", "#623"))
    pairs = [(a, b) for a in range(100, 1000, 13) for b in range(100, 1000, 17)]
    calls = sum(uses_tool(a, b, 0.3) for a, b in pairs)
    assert abs(calls / len(pairs) - 0.3) < 0.03  # standard deviation 0.0076
    assert not any(uses_tool(a, b, 0.0) for a, b in pairs) and all(uses_tool(a, b, 1.0) for a, b in pairs)
    task, by_hand = addition(use_tool=0.3, forget_carry=0.9), addition(forget_carry=0.9)
    for i in range(60):
        a, b = map(int, task.problem(i).id.split("+"))
        expected = tool_solution(a, b) if uses_tool(a, b, 0.3) else worked_solution(a, b, 0.9)
        assert task.problem(i).solution == expected
        assert task.problem(i).prompt == by_hand.problem(i).prompt  # the sums are those of a teacher without a tool


def test_gold_texts_of_conversations_are_their_last_turns():
    task = addition(use_tool=1.0)
    assert check_gold(task, task.reward, TOKENIZER) == 8
    assert check_gold(task, None, TOKENIZER) == 0


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"use_tool": 1.5}, "task.params.use_tool: must be a number from 0 to 1, got 1.5"),
        ({"use_tool": True}, "use_tool"),
        ({"use_tool": 0.5, "style": "question"}, 'of style "compact" can call the calculator'),
        ({"forget_carry": 1}, "forget_carry: must be a number from 0 to below 1"),
    ],
)
def test_bad_shares_are_refused(params, message):
    with pytest.raises(UserError, match=message):
        addition(**params)


def test_retry_gives_feedback_and_another_attempt():
    task = addition()
    factory = load_environment("retry", {"attempts": 3, "feedback": "?"}, task.reward)
    talks = build_pool(factory, TOKENIZER, TaskConfig(name="addition"))
    problem = task.problem(0)
    good = f"#{problem.answer}"
    replies = play(talks, 0, problem, ["#1", good])
    assert [(r.text, r.reward, r.done) for r in replies] == [
        (problem.prompt, None, False), ("?", None, False), ("", 1.0, True)
    ]
    assert [r.done for r in play(talks, 1, problem, [good])] == [False, True]
    replies = play(talks, 2, problem, ["#1", "#2", "#3"])
    found = [(r.text, r.reward, r.done) for r in replies[1:]]
    assert found == [("?", None, False), ("?", None, False), ("", 0.0, True)]
    talks.shutdown()


def test_retry_with_the_checkers_of_reasoning_gym():
    pytest.importorskip("reasoning_gym")
    task = GymTask({"dataset": "basic_arithmetic"}, 0, 4)
    problem = task.problem(0)
    asked = {**problem.extra, "id": problem.id, "prompt": problem.prompt, "answer": problem.answer, "seed": 1}
    retry = Retry(task.reward)
    assert retry.reset(asked) == problem.prompt
    assert retry.step("<answer>no</answer>") == ("This answer is wrong. Try again.", None, False)
    assert retry.step(f"so <answer>{problem.answer}</answer>") == ("", 1.0, True)


def test_answers_are_scored_with_the_columns_of_their_problem():
    def by_level(prompts, completions, answer, level):
        assert prompts == [[{"role": "user", "content": "q"}]]
        assert completions == [[{"role": "assistant", "content": "a"}]]
        return [None if level == [0] else 0.5]

    asked = {"id": "1", "prompt": [{"role": "user", "content": "q"}], "answer": "a", "seed": 3, "level": 2}
    assert score_answer(by_level, asked, "a") == 0.5
    assert score_answer(by_level, asked | {"level": 0}, "a") is None  # could not be scored
    retry = Retry(by_level)
    retry.reset(asked | {"level": 0})
    assert retry.step("a") == ("", None, True)  # nor can it be called wrong


def test_a_reward_that_cannot_be_used_stops_the_run():
    factory = load_environment("retry", {"feedback": "?"}, last_integer)
    talks = build_pool(factory, TOKENIZER, TaskConfig(name="addition"))
    problem = addition().problem(0)
    talks.start(0, type(problem)("1", "1+1=", "1/2"))
    talks.poll(True)
    talks.act(0, Completion(0, (5, 1), (0.0, 0.0), "3", "stop", 0, ""))
    with pytest.raises(UserError, match="the answer '1/2' is not an integer"):
        talks.poll(True)
    talks.shutdown()
