"""reasoning-gym tasks: streams by index, held-out questions, the library's own scores."""

import sys

import pytest

from jetrl.chat.tokenizer import arithmetic_tokenizer
from jetrl.errors import UserError
from jetrl.tasks.gold import check_gold
from jetrl.tasks.gym import CHUNK_SIZE, GymTask

SMALL = {"dataset": "basic_arithmetic", "max_terms": 2, "max_digits": 1, "operators": ["+"], "allow_negation": False}


def task(seed=0, num_eval=8, **params):
    pytest.importorskip("reasoning_gym")
    return GymTask({"dataset": "basic_arithmetic", **params}, seed, num_eval)


def test_stream_is_a_function_of_seed_and_index():
    places = [0, 1, CHUNK_SIZE - 1, CHUNK_SIZE, 3 * CHUNK_SIZE + 7, 1 << 40]
    forward = [task(3).problem(i) for i in places]
    again = task(3)
    assert [again.problem(i) for i in reversed(places)] == forward[::-1]
    assert len({p.prompt for p in forward}) == len(places)
    assert all(a != b for a, b in zip(forward, [task(4).problem(i) for i in places], strict=True))


def test_held_out_questions_are_never_trained_on():
    # Sums of one-digit numbers: some hundred questions, so that without removal many would meet.
    small = task(num_eval=40, **SMALL)
    held_out = {p.prompt for p in small.eval_problems(40)}
    trained = {small.problem(i).prompt for i in range(1500)}
    assert len(held_out) == 40 and len(trained) > 150
    assert not held_out & trained
    assert task(7, num_eval=40, **SMALL).eval_problems(5) == small.eval_problems(40)[:5]


def test_scores_are_the_librarys():
    gym = task()
    problem = gym.problem(0)
    entry, answer = problem.extra["entry"], problem.answer
    texts = [answer, f"<answer> {answer} </answer>", f"<answer>1</answer> so <answer>{answer}</answer>.", "no", ""]
    assert gym.reward(completions=texts, entry=[entry] * 5) == [1.0, 1.0, 1.0, 0.0, 0.0]
    assert problem.prompt.startswith(entry["question"]) and "<answer>" in problem.prompt


def test_a_checker_that_fails_counts_as_an_error(monkeypatch):
    gym = task()

    def fail(answer, entry):
        raise ZeroDivisionError

    monkeypatch.setattr(gym._scorer, "score_answer", fail)
    assert gym.reward(completions=["1"], entry=[gym.problem(0).extra["entry"]]) == [None]


def test_gold_answers_pass_the_check():
    class Words:  # a tokenizer of code points; the built-in one has no letters
        encode = staticmethod(lambda text, add_special_tokens: list(map(ord, text)))
        decode = staticmethod(lambda tokens: "".join(map(chr, tokens)))

    gym = task()
    assert check_gold(gym, gym.reward, Words()) == 8


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"dataset": "basic_arithmetics"}, "did you mean 'basic_arithmetic'"),
        ({"dataset": ""}, "set the name of a reasoning-gym data set"),
        ({"max_term": 2}, "did you mean 'max_terms'"),
        ({"seed": 1}, "seeded by the run's seed"),
        ({"min_terms": 0}, "refuses.*min_terms must be positive"),
        ({"instruction": 3}, "must be a string"),
    ],
)
def test_bad_params_are_refused(params, message):
    with pytest.raises(UserError, match=message):
        pytest.importorskip("reasoning_gym")
        GymTask({"dataset": "basic_arithmetic", **params}, 0, 8)


def test_too_many_held_out_questions_are_refused():
    with pytest.raises(UserError, match="task.num_eval = 100, but 2100 draws .* gave only 1?[0-9] different questions"):
        task(num_eval=100, min_terms=1, **{**SMALL, "max_terms": 1})


def test_missing_library_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(UserError, match=r'pip install "jetrl\[gym\]"'):
        GymTask({"dataset": "basic_arithmetic"}, 0, 8)


def test_gym_tokenizer_is_not_the_built_in_one():
    with pytest.raises(Exception, match="UNK"):
        arithmetic_tokenizer().encode(task().problem(0).prompt)
