"""Long tasks: right solutions by independent recomputation, lengths, held-out problems, rewards."""

from __future__ import annotations

import re
import tomllib
from dataclasses import replace
from math import gcd
from pathlib import Path
from typing import Any

import pytest

from jetrl.chat.tokenizer import CHARACTERS, arithmetic_tokenizer
from jetrl.config import load_config
from jetrl.config.shipped import find_recipe
from jetrl.config.task import LONG
from jetrl.errors import UserError
from jetrl.rewards.score import call_reward
from jetrl.tasks import long
from jetrl.tasks.gold import check_gold, gold_text
from jetrl.tasks.long import CELLS, FACTORS, KINDS, LongTask, answer_reward, rounds, steps_for, steps_reward
from jetrl.tasks.task import build_task
from jetrl.types import Problem

TOKENIZER = arithmetic_tokenizer()
ROUND = re.compile(r"(\d+)\*(\d+)=(\d+)\+(\d+)=(\d+)")


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
    if name == "recurrence":
        start, factor, steps = map(int, re.fullmatch(r"(\d+)\*(\d+):(\d+)\?", prompt).groups())
        closed = start * factor**steps + sum(i * factor ** (steps - i) for i in range(1, steps + 1))
        return str(closed % 1000), steps
    start, swaps = prompt.rstrip("?").split(":")
    place = {value: i for i, value in enumerate(start)}  # value -> where it is
    for swap in swaps.split(","):
        a, b = (int(c) - 1 for c in swap)
        place = {value: {a: b, b: a}.get(i, i) for value, i in place.items()}
    return "".join(sorted(place, key=place.__getitem__)), swaps.count(",") + 1


def rounds_of(solution: str) -> tuple[list[tuple[int, ...]], int]:
    """(value, factor, product, number, next value) of each round of a recurrence, and the answer behind them."""
    before, answer = solution.split("#")
    return [tuple(map(int, ROUND.fullmatch(text).groups())) for text in before.split(";")], int(answer)


def carries(a: int, b: int) -> bool:
    """Whether a + b carries from the tens to the hundreds: the hundreds are then not those of a and b."""
    return (a + b) // 100 != a // 100 + b // 100


def score(made: LongTask, problem: Problem, *texts: str) -> list[float | None]:
    """The rewards as a run calls them: with the problem's columns."""
    return call_reward(made.reward, [(problem, text, ()) for text in texts])


def test_the_settings_know_every_kind() -> None:
    assert set(LONG) == set(KINDS)


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
        assert p.extra == {}
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
    asked = {p.id for p in short.eval_problems(30)}
    drawn = {short._draw("train", 0, i, 0).compact for i in range(3000)}
    assert drawn & asked and not seen & asked, "some were drawn, and none was kept"


def test_every_round_of_a_recurrence_follows_from_the_last() -> None:
    factors, carried = set(), 0
    made = task("recurrence", steps=250)
    for p in map(made.problem, range(60)):
        value, factor, steps = map(int, re.fullmatch(r"(\d+)\*(\d+):(\d+)\?", p.prompt).groups())
        rows, answer = rounds_of(p.solution)
        assert len(rows) == steps == 250 and value < 1000
        for i, (before, by, product, number, after) in enumerate(rows, 1):
            assert (before, by, number) == (value, factor, i)
            assert product == before * by % 1000 and after == (product + i) % 1000
            carried += carries(product, i)
            value = after
        assert p.answer == str(value) and answer == value
        factors.add(factor)
    assert factors == set(FACTORS) and all(gcd(factor, 1000) == 1 for factor in factors)
    assert 0.4 < carried / (60 * 250) < 0.6, "there are carries, and rounds without"


@pytest.mark.parametrize("more", [{}, {"forget_carry": 0.5}], ids=["right", "forgetful"])
def test_a_recurrence_multiplies_by_the_given_factors(more: dict[str, Any]) -> None:
    for given, wanted in ((3, {3}), ([7, 21], {7, 21}), (list(FACTORS), set(FACTORS))):
        made = task("recurrence", steps=40, factors=given, **more)
        problems = [*map(made.problem, range(60)), *made.eval_problems(20)]
        assert {int(re.split(r"[*:]", p.prompt)[1]) for p in problems} == wanted
        assert all(f"*{re.split(r'[*:]', p.prompt)[1]}=" in p.solution for p in problems)
    plain = task("recurrence", steps=40, **more)
    assert problems[:60] == [*map(plain.problem, range(60))], "the default is all of them"


@pytest.mark.parametrize("factors", [3, 999, [999, 1, 3], [1, 999]], ids=str)
def test_lengths_in_tokens_are_those_with_the_largest_of_the_given_factors(factors: Any) -> None:
    made = LongTask("recurrence", {"tokens": 2048, "factors": factors, "forget_carry": 0.1}, 0, TOKENIZER)
    lengths = [len(TOKENIZER.encode(made.problem(i).solution)) for i in range(60)]
    assert 0.9 * 2048 < min(lengths) <= max(lengths) < 1.12 * 2048
    assert steps_for("recurrence", 2048, TOKENIZER) != made.steps[0]


@pytest.mark.parametrize(("factors", "message"), [
    ([], "must be a number from 1 to 999"), (0, "must be a number from 1 to 999"), (1001, "from 1 to 999"),
    ("3", "must be a number from 1 to 999"), ([3, 4], "4 has a factor in common with 1000. Use odd numbers"),
    (15, "15 has a factor in common"),
])
def test_factors_that_a_recurrence_cannot_have(factors: Any, message: str) -> None:
    with pytest.raises(UserError, match=f"task.params.factors: .*{message}|task.params.factors: {message}"):
        task("recurrence", factors=factors)


def test_only_a_recurrence_has_factors() -> None:
    with pytest.raises(UserError, match="factors"):
        task("chain", factors=3)
    with pytest.raises(UserError, match="there are only 76. Lower task.num_eval or use more lengths or factors"):
        task("recurrence", steps=1, factors=3).eval_problems(1000)
    with pytest.raises(UserError, match=r"there are only \d+. Lower task.num_eval or use more steps\.$"):
        task("tracking", steps=1).eval_problems(1000)


@pytest.mark.parametrize("given", [0.03, 0.3, 0.9])
def test_a_forgetful_teacher_leaves_out_its_share_of_carries_and_nothing_else(given: float) -> None:
    made = task("recurrence", steps=250, forget_carry=given)
    misled, asked = 0, list[list[bool]]()  # of each problem, for each of its carries: was it left out?
    for p in map(made.problem, range(60)):
        value, factor, _ = map(int, re.fullmatch(r"(\d+)\*(\d+):(\d+)\?", p.prompt).groups())
        rows, answer = rounds_of(p.solution)
        assert len(rows) == 250
        asked.append([])
        for i, (before, by, product, number, after) in enumerate(rows, 1):
            assert (before, by, number, product) == (value, factor, i, value * factor % 1000), "from the wrong value on"
            right = (product + i) % 1000
            if after != right:
                assert after == (right - 100) % 1000 and carries(product, i)
            if carries(product, i):
                asked[-1].append(after != right)
            value = after
        assert answer == value and p.answer == solved("recurrence", p.prompt)[0]
        misled += answer != int(p.answer)
    carried = sum(map(len, asked))
    assert carried > 5000 and abs(sum(map(sum, asked)) / carried - given) < 0.025
    assert len({tuple(left_out[:80]) for left_out in asked}) > 40, "not the same carries in every problem"
    assert misled > 45, "the teacher's answer is wrong in most problems"


def test_a_problem_is_worked_alike_wherever_it_is_drawn() -> None:
    one, other = (task("recurrence", seed, steps=60, forget_carry=0.5) for seed in (0, 1))
    first, second = ({p.id: p for p in map(made.problem, range(800))} for made in (one, other))
    both = first.keys() & second.keys()
    assert len(both) > 30 and first.keys() != second.keys()
    assert all(first[key] == second[key] for key in both)


@pytest.mark.parametrize("lengths", [{"steps": 40}, {"steps": [20, 60]}, {"tokens": 700}], ids=str)
def test_a_forgetful_teacher_changes_no_problem(lengths: dict[str, Any]) -> None:
    plain, taught = (LongTask("recurrence", lengths | more, 3, TOKENIZER) for more in ({}, {"forget_carry": 0.5}))
    assert plain.steps == taught.steps
    for right, wrong in (
        ([plain.problem(i) for i in range(100)], [taught.problem(i) for i in range(100)]),
        (plain.eval_problems(50), taught.eval_problems(50)),
    ):
        assert right == [replace(p, solution=f"{p.extra['right_steps']}#{p.answer}", extra={}) for p in wrong]
        assert sum(a.solution != b.solution for a, b in zip(right, wrong, strict=True)) > len(right) / 2


def test_rewards_measure_against_the_right_steps_and_not_against_the_teachers() -> None:
    by_answer, by_steps = (task("recurrence", steps=60, forget_carry=0.8, credit=c) for c in ("answer", "steps"))
    firsts, lucky = set(), 0
    for index in range(20):
        p = by_steps.problem(index)
        assert p == by_answer.problem(index)
        right, taught = p.extra["right_steps"].split(";"), p.solution.split("#")[0].split(";")
        assert len(right) == len(taught) == 60
        first = next(i for i in range(60) if right[i] != taught[i])  # each of these problems has a mistake
        firsts.add(first)
        chance = p.solution.endswith("#" + p.answer)  # two mistakes can cancel; a right answer earns 1 then
        lucky += chance
        whole = ";".join(right) + "#" + p.answer
        assert whole == task("recurrence", steps=60).problem(index).solution
        texts = (whole, p.solution, ";".join(right[:7]), ";".join(right) + f"#{(int(p.answer) + 1) % 1000}", "")
        assert score(by_answer, p, *texts) == [1, chance, 0, 0, 0]
        assert score(by_steps, p, *texts) == [1, 1 if chance else first / 61, 7 / 61, 60 / 61, 0]
    assert len(firsts) > 3 and min(firsts) > 0 and lucky < 5


def test_problems_without_right_steps_are_measured_against_their_solutions() -> None:
    columns = {"answer": ["19", "19"], "solution": ["17+5=22;22-3=19#19", "17+5=21;21-3=18#18"]}
    text = "17+5=22;22-3=19;"
    assert steps_reward([text] * 2, **columns) == [2 / 3, 0.0]
    assert steps_reward([text] * 2, **columns, right_steps=[None, "17+5=22;22-3=19"]) == [2 / 3, 2 / 3]


@pytest.mark.parametrize("credit", ["answer", "steps"])
def test_a_forgetful_teacher_is_no_source_of_gold_texts(credit: str) -> None:
    made = task("recurrence", steps=60, forget_carry=0.9, credit=credit)
    assert made.gold_template == "#{answer}"
    texts = [gold_text(made, made.problem(i), made.reward) for i in range(8)]
    assert texts == [f"#{made.problem(i).answer}" for i in range(8)]
    assert check_gold(made, made.reward, TOKENIZER) == 8
    assert task("recurrence", forget_carry=0.9, gold_template="= {answer}").gold_template == "= {answer}"
    assert task("recurrence").gold_template is None is task("recurrence", forget_carry=0).gold_template
    made.gold_template = None
    if credit == "answer":  # the worked solutions, which would stop the run
        with pytest.raises(UserError, match="earns no reward"):
            check_gold(made, made.reward, TOKENIZER)


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


def test_a_recurrence_by_hand_and_in_words() -> None:
    assert rounds(623, 7, 2) == ["623*7=361+1=362", "362*7=534+2=536"]
    assert rounds(266, 3, 2, lambda: True) == ["266*3=798+1=799", "799*3=397+2=399"]  # no carry to forget
    assert rounds(333, 3, 2, lambda: True) == ["333*3=999+1=900", "900*3=700+2=702"]
    words, signs = task("recurrence", style="question"), task("recurrence")
    for asked, p in ((words.problem(i), signs.problem(i)) for i in range(20)):
        assert re.findall(r"\d+", asked.prompt) == [*re.findall(r"\d+", p.prompt), "623", "7", "361", "1", "362"]
        assert replace(asked, prompt=p.prompt) == p


def test_worked_solutions_of_the_recipe_fit_its_lengths() -> None:
    config = load_config(find_recipe("long_answers"))
    made = build_task(config.task, config.seed, TOKENIZER)
    problems = [*(made.problem(i) for i in range(200)), *made.eval_problems(config.task.num_eval)]
    lengths = [len(TOKENIZER.encode(p.solution)) + 1 for p in problems]  # with the token that ends it
    assert 3500 < min(lengths) <= max(lengths) <= config.rollout.max_response_length
    assert max(len(TOKENIZER.encode(p.prompt)) for p in problems) <= config.task.max_prompt_length


def test_what_is_printed_of_these_tasks() -> None:
    page = (Path(__file__).parents[2] / "docs" / "MODELS_AND_DATA.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| .*?`(\S+)` -> `(\S+)` \|$", page, re.M)
    assert [name for name, *_ in rows] == ["addition", *KINDS]
    for name, prompt, solution in rows[1:]:
        answer, steps = solved(name, prompt)
        assert solution.endswith("#" + answer) and solution.count(";") + 1 == steps
        assert f"`{prompt}` | `{solution}`" in long.__doc__
    (printed,) = re.findall(r'^name = "recurrence"\n\n(\[task\.params\]\n.*?)^```', page, re.M | re.S)
    made = LongTask("recurrence", tomllib.loads(printed)["task"]["params"], 0, TOKENIZER)
    assert f"or steps = {made.steps[0]}\n" in printed and made.forget_carry > 0


@pytest.mark.parametrize("params, message", [
    ({"steps": 0}, "must be a number from 1"), ({"steps": []}, "must be a number"),
    ({"tokens": 3}, "one step of chain"),
    ({"steps": 3, "tokens": 100}, "use one of the two"), ({"credit": "half"}, "one of answer, steps"),
    ({"stepz": 3}, "did you mean 'steps'"), ({"steps": True}, "must be a number"),
])
def test_bad_params(params: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        LongTask("chain", params, 0, TOKENIZER)


@pytest.mark.parametrize("value", [1, 1.0, -0.1, 1.5, "x", None, True, float("nan")])
def test_bad_shares_of_forgotten_carries(value: object) -> None:
    with pytest.raises(UserError, match=r"task\.params\.forget_carry: must be a number from 0 to below 1, got "):
        task("recurrence", forget_carry=value)


def test_who_can_forget_carries() -> None:
    assert task("recurrence", forget_carry=0.5).forget_carry == 0.5
    with pytest.raises(UserError, match='forget_carry: only worked solutions of style "compact" can forget a carry'):
        task("recurrence", forget_carry=0.5, style="question")
    for name in set(KINDS) - {"recurrence"}:
        with pytest.raises(UserError, match=f"forget_carry: task '{name}' has no such parameter"):
            task(name, forget_carry=0.5)


def test_more_held_out_problems_than_there_are() -> None:
    with pytest.raises(UserError, match="Lower task.num_eval"):
        task("tracking", steps=1).eval_problems(5000)
