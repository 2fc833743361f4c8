"""Addition: right sums and workings, held-out pairs never trained on, streams from (seed, index) alone."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetrl.chat.tokenizer import arithmetic_tokenizer
from jetrl.errors import UserError
from jetrl.tasks.addition import AdditionTask, is_held_out, worked_solution
from jetrl.tasks.gold import check_gold

TOKENIZER = arithmetic_tokenizer()


def task(seed=0, **params):
    return AdditionTask(params, seed, TOKENIZER)


def operands(problem):
    return tuple(int(n) for n in re.findall(r"\d+", problem.id))


def test_worked_solution_by_hand():
    assert worked_solution(348, 275) == "8+5+0=13;4+7+1=12;3+2+1=06#623"
    assert worked_solution(999, 999) == "9+9+0=18;9+9+1=19;9+9+1=19#1998"
    assert worked_solution(12, 5) == "2+5+0=07;1+0+0=01#17"


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_every_step_of_the_working_is_true_and_gives_the_sum(a, b):
    working, _, answer = worked_solution(a, b).partition("#")
    carry, digits = 0, ""
    for step in working.split(";"):
        x, y, c, total = map(int, re.fullmatch(r"(\d)\+(\d)\+(\d)=(\d\d)", step).groups())
        assert (c, x + y + c) == (carry, total)
        carry, digits = total // 10, str(total % 10) + digits
    assert int(f"{carry}{digits}") == a + b == int(answer)


def test_problems_are_what_they_say():
    stream = [task(digits=[2, 3]).problem(i) for i in range(300)]
    for problem in stream:
        a, b = operands(problem)
        assert len(str(a)) == len(str(b)) and len(str(a)) in (2, 3)
        assert (problem.prompt, problem.answer) == (f"{a}+{b}=", str(a + b))
        assert len(problem.solution) + 1 <= 40
        assert TOKENIZER.decode(TOKENIZER.encode(problem.solution)) == problem.solution
    lengths = [len(str(operands(p)[0])) for p in stream]
    assert 110 < lengths.count(2) < 190  # each length as often: 150 expected, standard deviation 8.7


def test_stream_is_a_function_of_seed_and_index():
    forward = [task(3).problem(i) for i in range(50)]
    assert [task(3).problem(i) for i in reversed(range(50))] == forward[::-1]
    other = [task(4).problem(i) for i in range(50)]
    assert sum(p == q for p, q in zip(forward, other, strict=True)) <= 2
    assert task(3).problem(1 << 40) == task(3).problem(1 << 40)


def test_held_out_sums_are_never_trained_on():
    # Two digits: 8100 pairs, of which 6000 draws see most, so that a leak would show.
    small = task(digits=[2])
    held_out = {operands(p) for p in small.eval_problems(200)}
    assert len(held_out) == 200
    trained = {operands(small.problem(i)) for i in range(6000)}
    assert len(trained) > 3500
    assert not held_out & trained and not {(b, a) for a, b in held_out} & trained
    assert all(is_held_out(*pair) and is_held_out(*pair[::-1]) for pair in held_out)
    assert not any(is_held_out(*pair) for pair in trained)


def test_held_out_set_is_the_same_for_every_seed_and_a_prefix_of_a_larger_one():
    assert task(1).eval_problems(20) == task(2).eval_problems(50)[:20]


def test_share_of_held_out_pairs():
    share = sum(is_held_out(a, b) for a in range(100, 200) for b in range(500, 600)) / 10_000
    assert abs(share - 1 / 16) < 0.01  # standard deviation 0.0024


def test_too_many_held_out_sums_are_refused():
    with pytest.raises(UserError, match=r"task.num_eval: 50 held-out sums.*digits = \[1\].*only \d+\b"):
        task(digits=[1]).eval_problems(50)


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("8+5+0=13#623", 1.0), ("#623", 1.0), ("#1#623", 1.0), ("623", 0.0), ("#623#", 0.0), ("#0623", 0.0),
        ("#623 ", 0.0), ("#62", 0.0), ("", 0.0), ("#623<eos>", 0.0),
    ],
)
def test_compact_reward(text, reward):
    assert task().reward(completions=[text, "#5"], answer=["623", "5"], prompts=["", ""]) == [reward, 1.0]


def test_question_style():
    question = task(style="question")
    problem = question.problem(0)
    a, b = operands(problem)
    assert f"{a} + {b}" in problem.prompt
    chat = [{"role": "assistant", "content": f"It is {a + b}."}]
    scores = question.reward(completions=[problem.solution, chat, f"{a + b} or 1"], answer=[problem.answer] * 3)
    assert scores == [1.0, 1.0, 0.0]


def test_auto_style_follows_the_tokenizer():
    class Other:
        def get_vocab(self):
            return {"a": 0}

    assert task().style == "compact"
    assert AdditionTask({}, 0, Other()).style == "question"


@pytest.mark.parametrize("digits", [[], [0], [19], ["2"], 3, [True], [2.0]])
def test_bad_digits_are_refused(digits):
    with pytest.raises(UserError, match="task.params.digits"):
        task(digits=digits)


def test_bad_style_is_refused():
    with pytest.raises(UserError, match="auto, compact, question, got 'short'"):
        task(style="short")


def test_forgetful_teacher_leaves_out_its_share_of_carries_and_nothing_else() -> None:
    assert worked_solution(348, 275) == "8+5+0=13;4+7+1=12;3+2+1=06#623"
    pairs = [(a, b) for a in range(100, 1000, 13) for b in range(100, 1000, 17) if (a % 10) + (b % 10) >= 10]
    forgotten = sum(f";{a // 10 % 10}+{b // 10 % 10}+0=" in worked_solution(a, b, 0.6) for a, b in pairs)
    assert abs(forgotten / len(pairs) - 0.6) < 0.05
    for a, b in pairs[:50]:
        assert worked_solution(a, b, 0.6) == worked_solution(a, b, 0.6)  # the same sum is always worked alike
        assert worked_solution(a, b).endswith(f"#{a + b}")


def test_forgetful_teacher_is_no_source_of_gold_texts() -> None:
    task = AdditionTask({"digits": [3], "forget_carry": 0.9}, 0, arithmetic_tokenizer())
    assert check_gold(task, task.reward, arithmetic_tokenizer()) == 8
    with pytest.raises(UserError, match="forget_carry"):
        AdditionTask({"forget_carry": 1.5}, 0, arithmetic_tokenizer())
