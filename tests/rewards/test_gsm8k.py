"""GSM8K's answers and what models write: numbers by hand, in every form that was seen."""

import json

import pytest

from jetrl.config import TaskConfig
from jetrl.errors import UserError
from jetrl.rewards.calls import WeightedReward
from jetrl.rewards.gsm8k import final_number, gold_answer, gsm8k_reward
from jetrl.rewards.mathematics import math_reward
from jetrl.rewards.score import call_reward
from jetrl.tasks.files import FileTask
from jetrl.tasks.gold import gold_text
from jetrl.types import Problem

# The form of GSM8K's column `answer`: steps with calculator annotations, then the result.
EGGS = (
    "Janet sells 16 - 3 - 4 = <<16-3-4=9>>9 duck eggs a day.\n"
    "She makes 9 * 2 = $<<9*2=18>>18 every day at the farmer's market.\n#### 18"
)
HOUSE = "The house is worth 80000*1.5=$<<80000*1.5=120000>>120,000 more.\nSo he made $70,000\n#### 70,000"


@pytest.mark.parametrize(
    ("answer", "gold"),
    [(EGGS, "18"), (HOUSE, "70000"), ("#### -5", "-5"), ("#### 12.50", "12.50"), ("#### $1,234.00", "$1234.00"),
     ("72", "72"), ("1,234", "1,234"), ("a #### b, c", "b, c"), ("x\n####72", "72")],
)
def test_the_answer_of_a_row(answer, gold):
    assert gold_answer(answer) == gold


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("She earns $18 a day.", "18"), ("so 9 * 2 = 18.", "18"), ("**18**", "18"), ("The answer is 18", "18"),
        ("It costs $1,234.00", "1234"), ("1,234,567.50 in all", "1234567.5"), ("007", "7"), ("0.50", "0.5"),
        (".5", "0.5"), ("a loss of -5", "-5"), ("a loss of \u22125 degrees", "-5"), ("it is -$1,200.", "-1200"),
        ("$-3", "-3"), ("-0", "0"), ("10-3=7", "7"), ("20-5", "5"), ("(2)-5", "5"), ("- 4 eggs", "4"), ("18%", "18"),
        ("18km", "18"), ("3 apples, 4 pears", "4"), ("1,2,3", "3"), ("between 5 and 7", "7"), ("H2O", None),
        ("none at all", None), ("", None),
        # a box goes first, and the last one
        ("\\boxed{18}. Check: 9 * 2", "18"), ("\\boxed{1} or \\boxed{\\$1,234.00}", "1234"),
        ("\\boxed{72 \\text{ dollars}} a week of 7 days", "72"), ("\\boxed{\\text{about } 72}", "72"),
        ("\\boxed{x} 5", None), ("\\boxed{18", "18"), ("\\boxed{-\\$5}", "-5"),
        # then what follows the sign
        ("9 * 2 = 18\n#### 18\nI took 2 steps", "18"), ("#### none", None), ("#### 5 #### 6", "6"),
        ("9" * 5000, "9" * 5000),
    ],
)
def test_the_number_of_a_completion(text, number):
    assert final_number(text) == number


def test_rewards_of_real_looking_rows():
    wrong = ["19", "18.5", "-18", "no idea", "180", "\\boxed{9}. So 18"]
    right = ["18", "\\boxed{18}", "#### 18", "That is $18.00 every day.",
             "<think>9 * 3 = 27, no: 2</think>\nShe makes 18."]
    assert gsm8k_reward(completions=right, answer=[EGGS] * len(right)) == [1.0] * len(right)
    assert gsm8k_reward(completions=wrong, answer=[EGGS] * len(wrong)) == [0.0] * len(wrong)
    assert gsm8k_reward(completions=["it made 70000 dollars"], answer=[HOUSE]) == [1.0]
    assert gsm8k_reward(completions=[[{"role": "assistant", "content": "18"}]], answer=["18"]) == [1.0]
    with pytest.raises(UserError, match="the answer 'many' holds no number"):
        call_reward(gsm8k_reward, [(Problem("i", "p", "many"), "1", (1,))])


def test_gold_texts_earn_the_reward(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"q{i}", "answer": a}) + "\n" for i, a in enumerate((EGGS, HOUSE))))
    task = FileTask(TaskConfig(name="file", train_file=str(file)), 0, hold_out=False)
    several = WeightedReward((lambda completions: [0.0], gsm8k_reward), (1.0, 1.0), ("a", "b"))
    for i in range(2):
        problem = task.problem(i)
        for reward in (gsm8k_reward, several):
            text = gold_text(task, problem, reward)
            assert text in ("#### 18", "#### 70000") and gsm8k_reward([text], [problem.answer]) == [1.0]
        assert gold_text(task, problem, math_reward) in (r"\boxed{18}", r"\boxed{70000}")


def test_math_reward_reads_the_same_gold_answers():
    pytest.importorskip("math_verify")
    texts = ["\\boxed{18}", "\\boxed{9}", "$70000$", "\\boxed{140000/2}"]
    assert math_reward(completions=texts, answer=[EGGS, EGGS, HOUSE, HOUSE]) == [1.0, 0.0, 1.0, 1.0]
