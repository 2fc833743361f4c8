"""`jetrl.Trainer` and `jetrl.train`: the bits of the command, step by step, callbacks, resume, and mistakes."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import numbers, tiny_config, tiny_data, tiny_run, weights_hash

import jetrl
from jetrl import UserError
from jetrl.api import export_checkpoint
from jetrl.callbacks import Callback
from jetrl.program import program
from jetrl.report.recorder import read_samples
from jetrl.trainer import Trainer
from jetrl.user_code.from_python import rows_given, same_objects


def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """`tiny.REWARD`."""
    return [len(set(c) & set(a)) / len(set(a)) for c, a in zip(completions, answer, strict=True)]


def recipe(folder: Path, changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """The tiny recipe, whose reward comes from Python."""
    data = tiny_data(folder)
    del data["task"]["reward"]
    for key, value in (changes or {}).items():
        *path, last = key.split(".")
        at = data
        for part in path:
            at = at.setdefault(part, {})
        at[last] = value
    return data


class Failing(Exception):
    """No object should be like this one."""

    def __repr__(self) -> str:
        raise KeyError

    __str__ = __repr__


def deep(levels: int) -> list[Any]:
    nested: list[Any] = []
    for _ in range(levels):
        nested = [nested]
    return nested


def gives(error: BaseException) -> Iterator[dict[str, str]]:
    yield {"prompt": "1+1=", "answer": "2"}
    raise error


ROWS = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(20)]
DEEP = deep(5000)
HOLDS_ITSELF: dict[str, Any] = {"a": 1}
HOLDS_ITSELF["b"] = HOLDS_ITSELF


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run(tmp_path_factory.mktemp("command"))


@pytest.fixture(autouse=True)
def process() -> Iterator[None]:
    """A library call leaves the process as it was."""
    def read() -> Any:
        return (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), torch.is_grad_enabled(),
                torch.get_default_dtype(), Path.cwd(), os._exit, signal.getsignal(signal.SIGINT),
                signal.getsignal(signal.SIGTERM))

    before = read()
    yield
    assert read() == before


def same(run_dir: Path, other: Path, step: int = 4) -> None:
    assert numbers(run_dir) == numbers(other)
    assert list(read_samples(run_dir)) == list(read_samples(other))
    assert weights_hash(run_dir, step) == weights_hash(other, step)


def test_train_has_the_bits_of_the_command(tmp_path: Path, command: Path) -> None:
    result = jetrl.train(recipe(tmp_path), reward=reward, verbose=False)
    assert result.run_dir == tmp_path / "runs" / "tiny" and result.step == 4 and result.finished
    same(result.run_dir, command)
    assert result.metrics["reward/mean"] == result.rows()[-1]["reward/mean"]
    assert (result.run_dir / "report.html").is_file()
    assert f'reward = "<python>:{__name__}:reward"' in (result.run_dir / "config.toml").read_text()
    assert result.model is not None
    for folder in (result.model, result.model.parent, result.run_dir):
        policy = jetrl.load_model(folder)
        assert len(policy.generate(["1+1="], max_tokens=8)) == 1 and "precision fp8 (as " in policy.formats


def test_step_by_step_with_looks_in_between_has_the_same_bits(tmp_path: Path, command: Path) -> None:
    """The program's own settings of torch, evaluations, generations and saves between steps change no bit."""
    before_all, threads = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    torch.use_deterministic_algorithms(False)
    seen = []
    with Trainer(recipe(tmp_path), reward=reward, verbose=False) as trainer:
        for done in trainer:
            seen.append(done.step)
            before = trainer.policy.generate(["1+2="], seed=3, max_tokens=8)
            assert trainer.policy.generate(["1+2="], seed=3, max_tokens=8) == before
            assert len(trainer.samples()) == 16 and trainer.samples()[0]["reward"] is not None
            if done.step == 2:
                evaluated = {k: v for k, v in done.metrics.items() if k.startswith("eval/")}
                assert evaluated.items() <= trainer.evaluate().items() and evaluated
            if done.step == 3:
                assert trainer.save().is_dir()
                assert (trainer.run_dir / "checkpoints" / "step_000003").is_dir()
            with torch.no_grad():  # the program's own work
                torch.set_num_threads(2)
    assert seen == [1, 2, 3, 4]
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(before_all)
    same(trainer.run_dir, command)


def test_log_probs_of_the_policy_are_those_that_it_generates(tmp_path: Path) -> None:
    with Trainer(recipe(tmp_path, {"train.steps": 1}), reward=reward, verbose=False) as trainer:
        first = trainer.policy.generate(["12+34="], max_tokens=6)[0]
        trainer.step()
        [after] = trainer.policy.generate(["12+34="], max_tokens=6)
        assert after.logprobs != first.logprobs, "the policy is the current one"
        tokens = trainer.policy.tokenizer.encode("12+34=", add_special_tokens=False)
        found = trainer.policy.logprobs([*tokens, *after.tokens])[len(tokens) - 1 :]
        assert found.tolist() == list(after.logprobs)


def test_rows_from_python_have_the_bits_of_a_file(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}+{i + 3}=", "answer": str(2 * i + 3), "note": i} for i in range(12, 40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {"task.name": "file", "task.params": None, "train.steps": 2}
    deterministic = torch.are_deterministic_algorithms_enabled()
    by_file = tiny_run(tmp_path / "file", changes | {"task.train_file": str(tmp_path / "rows.jsonl")})
    torch.use_deterministic_algorithms(deterministic)  # the command leaves them on
    arguments: dict[str, Any] = {"reward": reward, "overrides": {"train.steps": 2}, "verbose": False}
    for name, given in (("list", rows), ("generator", (row for row in rows))):
        result = jetrl.train(recipe(tmp_path / name), dataset=given, **arguments)
        same(result.run_dir, by_file, 2)
    told = (result.run_dir / "config.toml").read_text()
    assert 'train_file = "<python>"' in told and "digits" not in told

    changed = [*rows[:-1], rows[-1] | {"answer": "0"}]
    with pytest.raises(UserError, match=r"task.train_file \(rows from Python\): the content has changed"):
        Trainer(result.run_dir, resume=True, dataset=changed, **arguments)
    with pytest.raises(UserError, match=r"given the rows of the data from Python.*dataset=\.\.\."):
        Trainer(result.run_dir, resume=True, **arguments)
    more = arguments | {"overrides": {"train.steps": 3}}
    assert Trainer(result.run_dir, resume=True, dataset=rows, **more).train().step == 3


def test_a_data_set_of_the_library_and_one_for_evaluation(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": f"{i}+{i + 3}=", "answer": str(2 * i + 3)} for i in range(12, 40)]
    of_library = datasets.Dataset.from_list(rows[:20])
    changes = {"task.num_eval": 3, "task.train_split": "train", "task.dataset": "a/b", "task.eval_split": "test",
               "task.name": "file", "task.eval_prompt_column": "question"}
    data = recipe(tmp_path, changes)
    del data["task"]["params"]
    with Trainer(data, reward=reward, dataset=of_library, eval_dataset=rows[20:], verbose=False,
                 overrides=["train.steps=1"]) as trainer:
        assert trainer.config.task.dataset is None and trainer.config.task.eval_prompt_column is None
        told = trainer._opened().session.task.describe()
        assert "dataset: 20 training rows; 8 rows for evaluation from eval_dataset" in told


def test_weights_of_several_rewards_and_their_names(tmp_path: Path) -> None:
    def short(completions: list[str], **_: Any) -> list[float]:
        return [-float(len(c)) for c in completions]

    result = jetrl.train(
        recipe(tmp_path), reward=[reward, short], overrides={"task.reward_weights": [1, 0.01], "train": {"steps": 1}},
        verbose=False,
    )
    name = "test_weights_of_several_rewards_and_their_names.short"
    assert f"reward/{name}/mean" in result.metrics and result.metrics[f"reward/{name}/mean"] < 0
    assert result.step == 1


class Guess:
    def __init__(self, low: int = 0) -> None:
        self.low = low

    def reset(self, problem: dict[str, Any]) -> str:
        return f"{self.low}+{problem['seed'] % 10}="

    def step(self, action: str) -> tuple[None, float, bool]:
        return None, float(len(set(action))), True


def test_an_environment_from_python(tmp_path: Path) -> None:
    data = recipe(tmp_path, {"task.name": "environment", "train.steps": 2})
    del data["task"]["params"]
    overrides = {"environment.params": {"low": 7}, "environment.at_limit": "zero"}
    result = jetrl.train(data, environment=Guess, overrides=overrides, verbose=False)
    assert result.finished and "7+" in next(read_samples(result.run_dir))["prompt"]
    assert f'name = "<python>:{__name__}:Guess"' in (result.run_dir / "config.toml").read_text()


def test_a_run_that_is_resumed_is_the_one_that_went_on(tmp_path: Path, command: Path) -> None:
    with Trainer(recipe(tmp_path), reward=reward, verbose=False) as trainer:
        assert trainer.step().step == 1 and not trainer.result.finished
    assert (trainer.run_dir / "checkpoints" / "step_000001").is_dir(), "closing saves the last finished step"
    with pytest.raises(UserError, match="already holds a run. Continue it with resume=True"):
        Trainer(recipe(tmp_path), reward=reward, verbose=False, run_dir=trainer.run_dir)
    with Trainer(trainer.run_dir, reward=reward, resume=True, verbose=False) as again:
        assert again.steps_done == 1 and [done.step for done in again] == [2, 3, 4]
    same(trainer.run_dir, command)
    with Trainer(recipe(tmp_path), reward=reward, resume="auto", verbose=False) as over, \
            pytest.raises(UserError, match="has done its 4 steps"):
        over.step()


def test_another_script_goes_on_with_a_run(tmp_path: Path) -> None:
    """The same functions, defined in another file or inside of another function, have the same names."""
    def elsewhere(function: Any, name: str, module: str = "other") -> Any:
        made = types.FunctionType(function.__code__, globals(), name, function.__defaults__)
        made.__module__, made.__qualname__ = module, f"main.<locals>.{name}"
        return made

    weights = {"task.reward_weights": [1.0, 0.5], "train.steps": 2, "train.lr_schedule": "constant"}
    changes = {"eval.eval_interval": 0}
    short = elsewhere(reward, "short")
    given: dict[str, Any] = {"reward": [reward, short], "dataset": ROWS, "verbose": False}
    done = jetrl.train(recipe(tmp_path, changes), overrides=weights, **given)
    again = {**given, "reward": [elsewhere(reward, "reward"), elsewhere(reward, "short", "third")],
             "dataset": (dict(reversed(row.items())) for row in ROWS)}
    with Trainer(done.run_dir, resume=True, overrides={"train.steps": 3}, **again) as trainer:
        assert [one.step for one in trainer] == [3]
        assert trainer.config.task.reward_weights == (1.0, 0.5)
        assert trainer.config.task.reward == ("<python>:other:main.reward", "<python>:third:main.short")
    for other in ([reward, elsewhere(reward, "long")], [short, reward], [reward]):
        with pytest.raises(UserError, match=r'task.reward = \["<python>:other:main.reward".* there, .* here|weights'):
            Trainer(done.run_dir, resume=True, overrides={"train.steps": 4}, **given | {"reward": other})
    assert same_objects("<python>:a:Guess", "<python>:b:main.Guess") and not same_objects("a.py:f", "b.py:f")


class Stops(Callback):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_start(self, trainer: Trainer) -> None:
        self.seen.append("start")

    def on_step(self, trainer: Trainer, step: int, metrics: Any) -> None:
        self.seen.append((step, metrics["reward/mean"]))
        if step == 3:
            trainer.stop()

    def on_evaluation(self, trainer: Trainer, step: int, metrics: Any) -> None:
        self.seen.append(("eval", step, sorted(metrics)))

    def on_end(self, trainer: Trainer) -> None:
        self.seen.append(("end", trainer.steps_done))


def test_callbacks_see_the_run_and_stop_it(tmp_path: Path, command: Path) -> None:
    stops = Stops()
    result = jetrl.train(recipe(tmp_path), reward=reward, callbacks=[stops], verbose=False)
    rows, keys = numbers(command), ["eval/addition/avg@1", "eval/addition/pass@1"]
    assert stops.seen == [
        "start", ("eval", 0, keys), (1, rows[1]["reward/mean"]), ("eval", 2, keys), (2, rows[2]["reward/mean"]),
        (3, rows[3]["reward/mean"]), ("end", 3),
    ]
    assert (result.step, result.finished) == (3, False)
    assert numbers(result.run_dir) == rows[:4] and weights_hash(result.run_dir, 3)


class Broken:
    def on_step(self, trainer: Trainer, step: int, metrics: Any) -> Any:
        if step == 1:
            return json.loads("{")
        return None


class Answers:
    def on_step(self, trainer: Trainer, step: int, metrics: Any) -> bool:
        return True


@pytest.mark.parametrize(("callback", "said"), [
    (Broken(), r"Callback Broken.on_step raised JSONDecodeError: .*\(.*test_trainer.py, line \d+\)"),
    (Answers(), r"Callback Answers.on_step \(.*line \d+\) returned True, but a callback returns nothing. To end"),
], ids=["raises", "returns"])
def test_a_callback_with_an_error_loses_no_step(tmp_path: Path, callback: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        jetrl.train(recipe(tmp_path), reward=reward, callbacks=[callback], verbose=False)
    assert (tmp_path / "runs" / "tiny" / "checkpoints" / "step_000001").is_dir()
    assert Trainer(tmp_path / "runs" / "tiny", reward=reward, resume=True, verbose=False).train().step == 4


def test_ctrl_c_finishes_and_saves_the_step(tmp_path: Path, command: Path) -> None:
    calls: list[int] = []

    def interrupted(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        calls.append(1)
        if len(calls) == 3:  # the gold answers, step 1, step 2
            os.kill(os.getpid(), signal.SIGINT)
        return reward(completions, answer)

    trainer = Trainer(recipe(tmp_path, {"eval.eval_interval": 0}), reward=interrupted, verbose=False)
    with pytest.raises(KeyboardInterrupt):
        for _ in trainer:
            pass
    stopped = trainer.steps_done
    assert 1 <= stopped < 4 and (trainer.run_dir / "checkpoints" / f"step_{stopped:06d}").is_dir()
    assert trainer.step().step == stopped + 1, "the program may go on"
    trainer.train()


def test_sigterm_saves_the_steps_before_and_reaches_the_program(tmp_path: Path) -> None:
    calls: list[int] = []
    got: list[int] = []

    def ended(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        calls.append(1)
        if len(calls) == 3:  # in step 2
            os.kill(os.getpid(), signal.SIGTERM)
        return reward(completions, answer)

    before = signal.signal(signal.SIGTERM, lambda number, frame: got.append(number))
    try:
        trainer = Trainer(recipe(tmp_path, {"eval.eval_interval": 0}), reward=ended, verbose=False)
        with pytest.raises(UserError, match="A signal ended the step; the steps before it are saved.*resume=True"):
            trainer.train()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert got == [signal.SIGTERM] and trainer.result.step == 1
    assert (trainer.run_dir / "checkpoints" / "step_000001").is_dir()


@pytest.mark.parametrize(("arguments", "said"), [
    ({"reward": 3}, r"reward = 3 \(int\): a reward is a function"),
    ({"reward": Guess}, r"Give an instance: Guess\(\)"),
    ({"reward": []}, "give at least one function"),
    ({"reward": [reward, "nowhere"]}, "nowhere"),
    ({"dataset": [{"question": "1+1=", "answer": "2"}]}, r"dataset\[0\]: column 'prompt' is missing; the row has: 'q"),
    ({"dataset": []}, "dataset has no rows"),
    ({"dataset": "openai/gsm8k"}, "give rows, not a name"),
    ({"dataset": {"train": []}}, "with the keys 'train', not rows"),
    ({"dataset": 3}, "cannot be read row by row"),
    ({"dataset": ["1+1="]}, r"dataset\[0\] is a str"),
    ({"dataset": [{"prompt": "1+1=", "answer": "2", "x": object()}]}, r"dataset\[0\]\['x'\] is a object"),
    ({"environment": Guess()}, "give the class"),
    ({"callbacks": [Stops]}, r"is the class Stops: give an instance"),
    ({"callbacks": [lambda trainer: None]}, "has no method that is called"),
    ({"callbacks": Stops()}, "give a list of callbacks"),
    ({"callbacks": [type("C", (), {"on_steps": lambda self: None})()]}, "has no method that is called"),
    ({"callbacks": [type("C", (Callback,), {"on_steps": lambda self: None})()]}, "on_steps is never called; did you m"),
    ({"callbacks": [type("C", (), {"on_step": lambda self, step: None})()]}, r"C.on_step \(.*\) cannot be called"),
    ({"overrides": {"train.stepps": 3}}, r"^overrides: train.stepps: unknown key; did you mean train.steps\?$"),
    ({"overrides": ["trian.lr=3"]}, r"^overrides: trian: unknown section; did you mean \[train\]\?$"),
    ({"overrides": {"train": {"lr": -1}}}, r"^overrides: train.lr: must be above 0, got -1$"),
    ({"overrides": {"train.lr": -1, "rl.algo": "x"}}, r"^the config has 2 errors:\n  overrides: .*\n  overrides: "),
    ({"run_dir": "a\0/b"}, "a path contains a NUL character"),
    ({"callbacks": [type("C", (), {"on_step": property(lambda self: {}["x"])})()]}, r"C\) raised KeyError: 'x' \("),
    ({"run_dir": "a b"}, r"^run_dir: name: must be letters"),
    ({"overrides": "train.steps=3"}, "give a dict such as"),
    ({"overrides": {"task.reward": "a:b"}}, "also given by the argument reward"),
    ({"overrides": {"name": "a"}, "run_dir": "b"}, "also given by run_dir"),
    ({"overrides": ["train.lr"]}, "is not an override"),
    ({"overrides": [3]}, "give a dict such as"),
    ({"overrides": {3: 4}}, "the key 3 is not a string"),
    ({"overrides": {"train.lr": Failing()}}, r"train.lr: must be a number, got <Failing, whose repr raises Key"),
    ({"overrides": {"task.params": DEEP}}, "overrides: its values cannot be read: .*nested more than 64 deep"),
    ({"overrides": {"task.params": HOLDS_ITSELF}}, "overrides: its values cannot be read: .*nested more than 64 deep"),
    ({"dataset": [{"prompt": "1+1=", "answer": "2", "x": DEEP}]}, r"dataset\[0\]\['x'\].*nested more than 64 deep"),
    ({"dataset": [{"prompt": "1+1=", "answer": "2", "x": HOLDS_ITSELF}]}, "more than 64 deep, or hold themselves"),
    ({"dataset": [{"prompt": "1+1=", "answer": Failing()}]}, r"\['answer'\] is a Failing \(<Failing, whose repr"),
    ({"dataset": [Failing()]}, r"dataset\[0\] is a Failing \(<Failing, whose repr raises KeyError>\)"),
    ({"dataset": gives(OSError("down"))}, rf"dataset\[1\]: reading it raised OSError: down \({__file__}, line \d+\)"),
    ({"dataset": gives(SystemExit(0))}, r"dataset\[1\]: reading it raised SystemExit: 0"),
    ({"dataset": gives(Failing())}, r"reading it raised Failing: \(its text cannot be read: __str__ raised KeyError"),
    ({"eval_dataset": gives(OSError("down")), "dataset": ROWS}, r"eval_dataset\[1\]: reading it raised OSError: down"),
    ({"reward": Failing()}, r"reward = <Failing, whose repr raises KeyError> \(Failing\): a reward is a function"),
    ({"reward": max}, "Python cannot tell the parameters of <python>:builtins:max"),
    ({"environment": Failing()}, "environment = <Failing, whose repr raises KeyError>.*give the class"),
    ({"callbacks": Failing()}, "callbacks = <Failing, whose repr raises KeyError>: give a list"),
    ({"callbacks": None}, "callbacks = None: give a list"),
    ({"run_dir": 3}, "run_dir = 3: give a folder"),
    ({"run_dir": Path(__file__) / "inside"}, r"cannot write .*inside: Not a directory"),
    ({"foo": 1}, r"have no argument 'foo'. Its arguments: recipe, reward, dataset,.*verbose"),
    ({"callback": []}, "have no argument 'callback'. Did you mean callbacks?"),
    ({"lr": 1e-5}, r"have no argument 'lr'. It is a setting: overrides={'train.lr': 1e-05}"),
    ({"seed": 3}, r"It is a setting: overrides={'seed': 3}"),
    ({"num_generations": 8}, r"is TRL's name; here it is rollout.group_size. Settings go into overrides"),
    ({"resume": Failing()}, "resume = <Failing, whose repr raises KeyError>: give True"),
    ({"resume": 3}, "resume = 3"),
    ({"resume": True}, "^resume=True: there is no run folder .* leave out resume to start"),
], ids=lambda value: value if isinstance(value, str) else ",".join(value))  # an object's text holds its address
def test_mistakes(tmp_path: Path, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        Trainer(recipe(tmp_path), **{"reward": reward, "verbose": False} | arguments)
    assert not (tmp_path / "runs" / "tiny" / "metrics.jsonl").exists()


def test_rows_count_against_the_limit_of_memory(tmp_path: Path) -> None:
    def endless() -> Iterator[dict[str, Any]]:
        for i in itertools.count():
            yield {"prompt": f"{i}+1=", "answer": str(i + 1), "note": f"{i}" * 10_000}

    arguments: dict[str, Any] = {"reward": reward, "verbose": False, "overrides": {"task.max_data_gib": 0.01}}
    for given in ({"dataset": endless()}, {"dataset": list(itertools.islice(endless(), 1000))},
                  {"dataset": ROWS, "eval_dataset": endless()},
                  {"dataset": [{"prompt": "a", "answer": "b", "x": np.zeros(2 << 20)}]},
                  {"dataset": [{"prompt": "a", "answer": "b", "x": [[0] * 1000] * 1000}]}):
        with pytest.raises(UserError, match="dataset: its rows need more than 0.01 GiB .* task.max_data_gib is 0.0"):
            Trainer(recipe(tmp_path), **given, **arguments)
    fits = {"prompt": "a", "answer": "b", "x": np.zeros(1 << 20)}  # counted by its bytes, not by its numbers
    assert len(rows_given([fits], "dataset", 0.01).rows) == 1


@pytest.mark.parametrize("error", [SystemExit(5), GeneratorExit(), OSError("full"), RecursionError(), Failing()])
def test_whatever_a_callback_raises_is_one_message(tmp_path: Path, error: BaseException) -> None:
    class Raises(Callback):
        def on_step(self, trainer: Any, step: int, metrics: Any) -> None:
            raise error

    with pytest.raises(UserError, match=rf"Raises.on_step raised {type(error).__name__}.* \({__file__}, line \d+\)"):
        jetrl.train(recipe(tmp_path), reward=reward, callbacks=[Raises()], verbose=False)
    assert (tmp_path / "runs" / "tiny" / "checkpoints" / "step_000001").is_dir()


def test_arguments_have_names(tmp_path: Path) -> None:
    for call in (Trainer, jetrl.train):
        with pytest.raises(UserError, match="recipe = None: give the name of a recipe"):
            call()
        with pytest.raises(UserError, match="give all arguments but the recipe by name, <function reward"):
            call(recipe(tmp_path), reward)  # type: ignore[arg-type]


def test_a_recipe_that_is_none(tmp_path: Path) -> None:
    for deep in (DEEP, HOLDS_ITSELF):
        with pytest.raises(UserError, match="recipe: its values cannot be read: .*nested more than 64 deep"):
            jetrl.train({"task": {"params": {"x": deep}}})
    for wrong, said in ((3, "recipe = 3"), ("quickstrat", "Did you mean quick"), (tmp_path / "no.toml", "no such")):
        with pytest.raises(UserError, match=said):
            Trainer(wrong, verbose=False)


def test_one_trainer_after_the_other_and_none_after_close(tmp_path: Path) -> None:
    first = Trainer(recipe(tmp_path, {"train.steps": 1}), reward=reward, verbose=False)
    with pytest.raises(UserError, match=r"tiny is still open.*close\(\)"):
        Trainer(recipe(tmp_path), reward=reward, verbose=False)
    first.close()
    for use in (first.step, first.evaluate, first.save, first.stop, lambda: first.policy, lambda: next(iter(first))):
        with pytest.raises(UserError, match="This Trainer is closed"):
            use()
    assert first.close().step == 0
    second = Trainer(recipe(tmp_path), reward=reward, verbose=False, overrides={"train.steps": 1})
    assert second.run_dir.name == "tiny-2" and second.train().finished


def test_a_program_in_other_settings_trains_the_same(tmp_path: Path, command: Path) -> None:
    with torch.no_grad():
        torch.set_default_dtype(torch.float64)
        try:
            result = jetrl.train(recipe(tmp_path), reward=reward, verbose=False)
        finally:
            torch.set_default_dtype(torch.float32)
    same(result.run_dir, command)
    with torch.inference_mode(), pytest.raises(UserError, match="torch.inference_mode"):
        Trainer(recipe(tmp_path / "b"), reward=reward, verbose=False)


def test_a_failing_reward_closes_the_trainer_and_saves(tmp_path: Path) -> None:
    calls: list[int] = []

    def fails(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        calls.append(1)
        if len(calls) == 4:
            raise RuntimeError("no server")
        return reward(completions, answer)

    trainer = Trainer(recipe(tmp_path, {"eval.eval_interval": 0}), reward=fails, verbose=False)
    with pytest.raises(UserError, match=r"raised RuntimeError: no server"):
        for _ in trainer:
            pass
    done = trainer.result.step
    assert done >= 1 and (trainer.run_dir / "checkpoints" / f"step_{done:06d}").is_dir()
    with pytest.raises(UserError, match=r"closed: a step failed \(UserError\)"):
        trainer.step()


def test_the_command_says_how_to_use_such_a_run(tmp_path: Path) -> None:
    result = jetrl.train(recipe(tmp_path, {"train.steps": 1}), reward=reward, verbose=False)
    def jetrl_(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "jetrl", *words], capture_output=True, text=True, check=False)

    failed = jetrl_("eval", str(result.run_dir))
    assert failed.returncode == 2 and "jetrl.Trainer(RUN, resume=True, reward=...)" in failed.stderr, failed.stderr
    named = jetrl_("eval", str(result.run_dir), f"task.reward={tmp_path}/reward.py:reward")
    assert named.returncode == 0, named.stderr
    assert jetrl_("parity", str(result.run_dir)).returncode == 0
    assert jetrl_("export", str(result.run_dir), str(tmp_path / "out")).returncode == 0


@pytest.mark.parametrize("place", ["checkpoints", "checkpoints/step_000004", "checkpoints/step_000004/model"])
def test_no_part_of_an_exported_run_is_a_link_out_of_it(tmp_path: Path, command: Path, place: str) -> None:
    """A run folder of others could hold any model of yours so. A link to the inside, or to the run, is fine."""
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    shutil.copytree(command, run)
    (run / place).rename(elsewhere)
    (run / place).symlink_to(elsewhere)
    with pytest.raises(UserError, match=rf"leads by a link to {elsewhere}.*name the file it leads to"):
        export_checkpoint(run, tmp_path / "out", False)
    assert not (tmp_path / "out").exists()
    if place.endswith("model"):  # it has to be in its checkpoint, whose files have hashes
        return
    (run / place).unlink()
    elsewhere.rename(run / "inner")
    (run / place).symlink_to(run / "inner")
    (tmp_path / "linked").symlink_to(run)
    assert (export_checkpoint(tmp_path / "linked", tmp_path / "out", False) / "model.safetensors").is_file()


def test_a_config_object_and_a_file(tmp_path: Path, command: Path) -> None:
    config = tiny_config(tmp_path)
    result = jetrl.train(config, verbose=False)
    same(result.run_dir, command)
    file = result.run_dir / "config.toml"
    assert jetrl.train(file, overrides={"train.steps": 1}, verbose=False, run_dir=tmp_path / "x").finished


def test_what_a_recipe_says_of_other_data_rewards_and_environments_gives_way(tmp_path: Path) -> None:
    """Keys that belong to what Python objects replace go with it; those that the program sets itself stay."""
    task = {"name": "file", "dataset": "openai/gsm8k", "dataset_config": "main", "train_split": "train",
            "eval_split": "test", "prompt_template": "{question}", "reward": ["a:f", "b:g"], "reward_weights": [1, 2]}
    data = tiny_data(tmp_path) | {"task": task, "environment": {"name": "retry", "params": {"attempts": 3}}}
    rows = [{"question": "1+1", "answer": "2"}]
    found = program(data, reward=reward, dataset=rows, environment=Guess).config
    assert found.task.reward_weights is None and found.environment.params == {}
    assert found.task.dataset is None and found.task.eval_split is None and found.task.prompt_template == "{question}"
    kept = program(data, reward=[reward, reward], overrides={"task.reward_weights": [3.0, 4.0]}).config.task
    assert kept.reward_weights == (3.0, 4.0) and kept.dataset == "openai/gsm8k" and kept.eval_split == "test"
    name = f"<python>:{__name__}:reward"
    assert kept.reward == (name, f"{name}_2")
    evaluated = program(data, reward=reward, eval_dataset=rows).config.task
    assert (evaluated.dataset, evaluated.eval_split, evaluated.eval_file) == ("openai/gsm8k", None, "<python>")


def test_the_example_trains_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("train_from_python", "examples/train_from_python.py")
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    assert example.main(2, tmp_path / "run").step == 2
    assert example.main(3, tmp_path / "run").finished
    told = capsys.readouterr().out
    assert "step 3: reward" in told and told.count("step 1: reward") == 1 and "12+23= " in told


TWO = """
import os, sys
import jetrl
from pathlib import Path
from test_trainer import recipe, reward

class Fails(jetrl.Callback):
    def on_step(self, trainer, step, metrics):
        if sys.argv[2] == "fail" and step == 3 and os.environ["RANK"] == "1":
            raise ValueError("mine")

result = jetrl.train(recipe(Path(sys.argv[1])), reward=reward, callbacks=[Fails()], verbose=False)
print("done", result.step, result.finished)
"""


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["well", "fail"])
def test_two_processes_of_torchrun(tmp_path: Path, ends: str) -> None:
    (tmp_path / "two.py").write_text(TWO)
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]  # on a free port
    where = os.pathsep.join([str(Path.cwd()), str(Path.cwd() / "tests")])
    done = subprocess.run(
        [sys.executable, *start, str(tmp_path / "two.py"), str(tmp_path), ends],
        capture_output=True, text=True, check=False, timeout=120,
        env=os.environ | {"PYTHONPATH": where, "OMP_NUM_THREADS": "1"},
    )
    if ends == "well":
        assert done.returncode == 0 and done.stdout.count("done 4 True") == 1, done.stderr
    else:
        assert done.returncode != 0 and "rank 1: Callback Fails.on_step raised ValueError: mine" in done.stderr
        assert (tmp_path / "runs" / "tiny" / "checkpoints" / "step_000003").is_dir(), "the last step is saved"


def test_a_step_whose_callback_failed_is_saved_and_the_next_one_can_follow(tmp_path: Path) -> None:
    with Trainer(recipe(tmp_path), reward=reward, callbacks=[Broken()], verbose=False) as trainer:
        with pytest.raises(UserError, match=r"Broken.on_step raised"):
            trainer.step()
        assert (trainer.run_dir / "checkpoints" / "step_000001").is_dir(), "at once, not when the run is closed"
        assert trainer.step().step == 2
