"""Long tasks: right solutions by independent recomputation, lengths, held-out problems, rewards."""

from __future__ import annotations

import re

import pytest

from jetrl.errors import UserError
from jetrl.tasks.long import CELLS, KINDS, LongTask, answer_reward, steps_for, steps_reward
from jetrl.tasks.tokenizer import CHARACTERS, arithmetic_tokenizer

TOKENIZER = arithmetic_tokenizer()


def task(name: str, seed: int = 0, **params) -> LongTask:
    return LongTask(name, {"steps": 12} | params, seed, TOKENIZER)


def solved(name: str, prompt: str) -> tuple[str, int]:
    """Answer and number of steps of a compact prompt, computed in another way than the task does."""
    if name == "chain":
        value, parts = int(re.match(r"\d+", prompt)[0]), re.findall(r"([+-])(\d)", prompt)
        return str(value + sum(int(sign + digit) for sign, digit in parts)), len(parts)
    if name == "sorting":
        numbers = [int(n) for n in prompt.rstrip("?").split(",")]
        counts = [numbers.count(v) for v in range(100)]
        return ",".join(f"{v:02d}" for v in range(100) for _ in range(counts[v])), len(numbers)
    start, swaps = prompt.rstrip("?").split(":")
    place = {value: i for i, value in enumerate(start)}  # value -> where it is
    for swap in swaps.split(","):
        a, b = (int(c) - 1 for c in swap)
        place = {value: {a: b, b: a}.get(i, i) for value, i in place.items()}
    return "".join(sorted(place, key=place.__getitem__)), swaps.count(",") + 1


@pytest.mark.parametrize("name", KINDS)
def test_answers_are_right_and_solutions_earn_the_reward(name: str) -> None:
    made = task(name)
    for index in range(40):
        p = made.problem(index)
        answer, steps = solved(name, p.prompt)
        assert p.answer == answer and steps == 12
        assert p.solution.count(";") == 11 and p.solution.endswith("#" + answer)
        assert set(p.prompt + p.solution) <= set(CHARACTERS)
        columns = {"answer": [p.answer], "solution": [p.solution]}
        assert answer_reward([p.solution], **columns) == steps_reward([p.solution], **columns) == [1.0]
    assert made.problem(3) == made.problem(3) != made.problem(4)
    assert made.problem(3) != task(name, seed=1).problem(3)


def test_every_step_of_a_chain_and_of_a_row_follows_from_the_last() -> None:
    for index in range(20):
        value = int(re.match(r"\d+", (p := task("chain").problem(index)).prompt)[0])
        for step in p.solution.split("#")[0].split(";"):
            before, sign, operand, after = re.fullmatch(r"(\d+)([+-])(\d)=(\d+)", step).groups()
            assert int(before) == value and 0 <= int(after) <= 99
            value += int(sign + operand)
            assert value == int(after)
        rows = task("tracking").problem(index).solution.split("#")[0].split(";")
        assert all(sum(a != b for a, b in zip(x, y, strict=True)) == 2 for x, y in zip(rows, rows[1:], strict=False))
        assert all(sorted(row) == [str(i + 1) for i in range(CELLS)] for row in rows)


@pytest.mark.parametrize("name", KINDS)
def test_held_out_problems_are_never_trained_on_and_are_those_of_any_seed(name: str) -> None:
    held = task(name).eval_problems(30)
    assert held == task(name, seed=5).eval_problems(30) and len({p.id for p in held}) == 30
    short = task(name, steps=1 if name == "chain" else 2)  # few problems, so that a leak would show
    seen = {short.problem(i).id for i in range(3000)}
    assert not seen & {p.id for p in short.eval_problems(3)}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("tokens", [1024, 4096, 8192])
def test_lengths_in_tokens(name: str, tokens: int) -> None:
    steps = steps_for(name, tokens, TOKENIZER)
    made = LongTask(name, {"tokens": tokens}, 0, TOKENIZER)
    assert made.steps == (steps,)
    for index in range(3):
        assert 0.88 * tokens < len(TOKENIZER.encode(made.problem(index).solution)) < 1.12 * tokens


def test_credit_for_steps_by_hand() -> None:
    columns = {"answer": ["19"], "solution": ["17+5=22;22-3=19#19"]}
    for text, answer, steps in [
        ("17+5=22;22-3=19#19", 1, 1.0), ("#19", 1, 1.0), ("17 + 5 = 22; 22-3=18 # 18", 0, 1 / 3),
        ("17+5=22;22-3=19#18", 0, 2 / 3), ("17+5=21;22-3=19", 0, 0.0), ("", 0, 0.0), ("#19#18", 0, 0.0),
    ]:
        assert answer_reward([text], **columns) == [answer], text
        assert steps_reward([text], **columns) == [steps], text


def test_question_style_and_several_lengths() -> None:
    made = task("tracking", steps=[2, 4], style="question")
    problems = [made.problem(i) for i in range(60)]
    lengths = {p.solution.count(";") + 1 for p in problems}
    assert lengths == {2, 4} and all("Swap these places" in p.prompt for p in problems)
    assert "2 or 4 steps (question style" in made.describe()


@pytest.mark.parametrize("params, message", [
    ({"steps": 0}, "must be a number from 1"), ({"steps": []}, "must be a number"),
    ({"tokens": 3}, "one step of chain"),
    ({"steps": 3, "tokens": 100}, "take one of the two"), ({"credit": "half"}, "one of answer, steps"),
    ({"stepz": 3}, "did you mean 'steps'"), ({"steps": True}, "must be a number"),
])
def test_bad_params(params: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        LongTask("chain", params, 0, TOKENIZER)


def test_more_held_out_problems_than_there_are() -> None:
    with pytest.raises(UserError, match="Lower task.num_eval"):
        task("tracking", steps=1).eval_problems(5000)
