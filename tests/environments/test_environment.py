"""Environments by name, their parameters, and what is accepted of what they return."""

import math
import random

import numpy as np
import pytest

from jetrl.environments.calculator import Calculator
from jetrl.environments.environment import BadReply, load_environment, messages_of, opening_of, problem_mapping, step_of
from jetrl.errors import UserError
from jetrl.rewards.text import exact_match
from jetrl.tasks.environment_task import EnvironmentTask, problem_seed
from jetrl.types import Problem

GUESS = '''
import random

class GuessNumber:
    def __init__(self, low=1, high=100):
        self.low, self.high = low, high

    def reset(self, problem):
        self.secret = random.Random(problem["seed"]).randint(self.low, self.high)
        return "Guess my number."

    def step(self, action):
        return ("", 1.0, True) if int(action) == self.secret else ("no", 0.0, False)

class NoStep:
    def reset(self, problem): return "x"

class OddReset:
    def reset(self): return "x"
    def step(self, action): return "", 0.0, True

class Needs:
    def __init__(self, server): ...
    def reset(self, problem): return "x"
    def step(self, action): return "", 0.0, True

class Anything(Needs):
    def __init__(self, **options): self.options = options

class Scores(Needs):
    def __init__(self, reward): self.reward = reward

class Size(Needs):
    def __init__(self, reward=2.0): self.reward = reward

number = 3
'''


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(GUESS)
    return path


def test_a_class_in_a_file_of_the_users(file):
    factory = load_environment(f"{file}:GuessNumber", {"high": 9})
    one, other = factory(), factory()
    assert one is not other and factory.name == "GuessNumber"
    assert one.reset({"seed": 5}) == "Guess my number."
    assert one.secret == random.Random(5).randint(1, 9)
    assert not factory.is_async("step") and not factory.can_close


def test_the_tasks_reward_goes_to_constructors_that_ask_for_it(file):
    assert load_environment(f"{file}:Scores", {}, exact_match)().reward is exact_match
    assert load_environment(f"{file}:Size", {}, exact_match)().reward == 2.0  # the user's own parameter
    assert load_environment(f"{file}:Anything", {"a": 1}, exact_match)().options == {"a": 1}
    assert load_environment("calculator", {}, exact_match).kind is Calculator
    assert load_environment("retry", {"attempts": 3}, exact_match)().left == 3


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("calculater", {}, r"environment.name = 'calculater'.*Did you mean 'calculator'\?"),
        ("xyz", {}, "Built in: calculator, command, retry.*path/to/file.py:Class"),
        ("{}:Guess", {}, "environment.name: .*has no 'Guess'; its classes: GuessNumber, NoStep"),
        ("{}:number", {}, "is of type int, not a class"),
        ("{}:NoStep", {}, r"NoStep has no method step\(self, action\)"),
        ("{}:OddReset", {}, r"write OddReset.reset\(self, problem\) \(.*line \d+\): too many"),
        ("{}:GuessNumber", {"hihg": 3}, r"environment.params.hihg: GuessNumber \(.* has no such.*did you mean 'high'"),
        ("{}:GuessNumber", {"xyz": 3}, "environment.params.xyz: .*known: low, high"),
        ("{}:Needs", {}, r"environment.params.server: Needs \(.*line \d+\) needs this parameter"),
        ("{}:Scores", {}, "this task has none. Set task.reward"),
        ("retry", {}, "Retry scores answers with the task's reward, and this task has none"),
        ("gone.py:X", {}, "environment.name: file gone.py not found"),
        ("no_such_module_here:X", {}, "environment.name: cannot import.*write no_such_module_here.py:Class"),
    ],
)
def test_names_and_parameters_that_lead_nowhere(file, name, params, message):
    with pytest.raises(UserError, match=message):
        load_environment(name.format(file), params)


@pytest.mark.parametrize(
    ("params", "message"),
    [({"attempts": 0}, "attempts: must be an integer of at least 1, got 0"), ({"feedback": ""}, "params.feedback")],
)
def test_parameters_of_built_in_environments_are_checked_at_once(params, message):
    with pytest.raises(UserError, match=message):
        load_environment("retry", params, exact_match)


def test_messages_in_their_three_forms():
    user = {"role": "user", "content": "hi"}
    tool = {"role": "tool", "content": "", "name": "t"}
    assert messages_of("hi", "X.step") == messages_of(user, "X.step") == messages_of([user], "X.step") == [user]
    assert messages_of((user, tool), "X.step") == [user, tool]
    assert messages_of("", "X.step") == messages_of(None, "X.step") == messages_of([], "X.step") == []


@pytest.mark.parametrize(
    "value",
    [3, {"role": "user"}, [{"role": "user", "content": 3}], ["hi"], [{"role": "user", "content": "a", "x": {1}}]],
)
def test_other_messages_are_refused(value):
    with pytest.raises(BadReply, match="X.step.*(chat message|'role' and).*got"):
        messages_of(value, "X.step")


def test_an_opening_needs_a_message():
    assert opening_of("go", "X.reset") == [{"role": "user", "content": "go"}]
    with pytest.raises(BadReply, match=r"X.reset must return at least one message.*got '' \(str\)"):
        opening_of("", "X.reset")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (("", None, True), ([], None, True)),
        ((None, 1, True), ([], 1.0, True)),
        (["", np.float32(0.5), np.bool_(True)], ([], 0.5, True)),
        (({"role": "tool", "content": "7"}, -1.5, False), ([{"role": "tool", "content": "7"}], -1.5, False)),
    ],
)
def test_steps_that_are_accepted(value, expected):
    messages, reward, done = step_of(value, "X.step")
    assert (messages, reward, done) == expected and type(reward) in (float, type(None)) and type(done) is bool


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("done", r"X.step must return three values: messages, reward, done; got 'done' \(str\)"),
        (("a", 0.0), "three values"),
        (None, "three values"),
        (("a", "1", False), r"the reward \(the second value\) must be a number or None, got '1' \(str\)"),
        (("a", math.nan, False), "must be a finite number, got nan"),
        (("a", -math.inf, False), "must be a finite number, got -inf"),
        (("a", 10**400, True), "must be a finite number, got 1000"),
        (("a", 0.0, 1), r"done \(the third value\) must be True or False, got 1 \(int\)"),
        (("", 0.0, False), "returned no message, but done = False"),
        ((3, 0.0, True), "X.step must return messages"),
    ],
)
def test_steps_that_are_refused(value, message):
    with pytest.raises(BadReply, match=message):
        step_of(value, "X.step")


def test_what_reset_is_given():
    problem = Problem("id-1", ({"role": "user", "content": "q"},), "a", extra={"level": 2, "seed": 9, "index": 4})
    given = problem_mapping(problem)
    assert given == {
        "id": "id-1", "prompt": [{"role": "user", "content": "q"}], "answer": "a", "level": 2, "seed": 9, "index": 4
    }
    plain = Problem("id-1", "q", "a")
    assert problem_mapping(plain)["seed"] == problem_mapping(plain)["seed"] != problem_mapping(Problem("2", "q", "a"))


def test_a_stream_of_seeds_with_held_out_ones():
    task, other = EnvironmentTask({}, 3, "GuessNumber"), EnvironmentTask({}, 4, "GuessNumber")
    problem = task.problem(7)
    assert (problem.id, problem.prompt, problem.answer) == ("GuessNumber/3/7", "", "")
    assert problem.extra == {"seed": problem_seed(3, 7), "index": 7}
    assert problem.extra["seed"] != other.problem(7).extra["seed"]
    assert task.eval_problems(5) == other.eval_problems(9)[:5]
    # Whole ranges, so that no hash can put a held-out seed into training.
    assert all(task.problem(i).extra["seed"] < 2**30 for i in range(200))
    assert all(2**30 <= p.extra["seed"] < 2**31 for p in task.eval_problems(200))
    with pytest.raises(UserError, match="task.params.digits: task 'environment' has no such parameter"):
        EnvironmentTask({"digits": 3}, 0, "x")
