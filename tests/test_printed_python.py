"""Every block of Python that a page prints runs as it is printed: the recipe's sizes are tiny, and what a block takes
for granted (a server, a model of yours) is made here. A new block needs a case."""

from __future__ import annotations

import asyncio
import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import ARCH, tiny_run
from torch import nn

import jetrl
from jetrl import api
from jetrl.config import load_config, shipped, to_toml
from jetrl.environments.tool_schemas import load_tools
from jetrl.rewards.results import Log
from jetrl.rewards.score import call_reward
from jetrl.types import Problem

ROOT = Path(__file__).parents[1]
Names = dict[str, Any]


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.M | re.S)


def run(page: str, number: int, names: Names | None = None) -> Names:
    """The names that a block leaves, run with these."""
    names = {} if names is None else names
    exec(compile(blocks(page)[number], f"{page}, block {number + 1}", "exec"), names)
    return names


@pytest.fixture
def quickstart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to run in, in which the quickstart is a run of seconds."""
    changes = {
        "sft.steps": 2, "sft.batch_size": 4, "sft.warmup_steps": 0, "sft.cache_dir": str(tmp_path / "cache"),
        "task.num_eval": 4, "rollout.prompts_per_step": 2, "rollout.group_size": 2, "train.steps": 3,
        "train.warmup_steps": 0, "eval.eval_interval": 10, "num_threads": 1,
    } | {f"model.arch.{key}": value for key, value in ARCH.items()} | {"model.arch.max_position_embeddings": 128}
    overrides = [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in changes.items()]
    config = load_config(shipped.FOLDER / "quickstart.toml", overrides)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "quickstart.toml").write_text(to_toml(config))
    monkeypatch.setattr(shipped, "FOLDER", tmp_path / "recipes")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path


def test_python_the_first_run_and_going_on(quickstart: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = run("docs/PYTHON.md", 0)
    assert names["result"].finished and names["result"].step == 20
    assert str(names["result"].run_dir) in capsys.readouterr().out
    run("docs/PYTHON.md", 3, names)
    assert names["trainer"].steps_done == 20
    names["trainer"].close()


def test_python_step_by_step_and_callbacks(quickstart: Path) -> None:
    names = run("docs/PYTHON.md", 1, {"jetrl": jetrl})
    assert names["done"].step == 3 and names["trainer"].result.finished
    run("docs/PYTHON.md", 2, names)
    assert jetrl.train("quickstart", callbacks=[names["Watch"]()], verbose=False).finished


def test_python_linears_in_a_loop() -> None:
    model = nn.Sequential(nn.Linear(128, 128))
    names: Names = {"jetrl": jetrl, "my_model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1)}
    names["loss"] = types.SimpleNamespace(backward=lambda: names["model"](torch.ones(2, 128)).sum().backward())
    run("docs/PYTHON.md", 4, names)
    assert isinstance(names["model"][0], api.FP8Linear)


def test_python_some_parameters_frozen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = jetrl.load_model(tiny_run(tmp_path, {"train.steps": 1}), masters=True)
    before = sum(p.requires_grad for p in policy.model.parameters())
    loads = types.SimpleNamespace(load_model=lambda name, masters: policy)
    optimizer = run("docs/PYTHON.md", 5, {"jetrl": loads, "torch": torch})["optimizer"]
    assert 0 < len(optimizer.param_groups[0]["params"]) < before


def scores(function: Callable[..., Any], completions: list[Any], **columns: Any) -> list[float | None]:
    """What a reward function gives these completions of one problem."""
    problem = Problem("id", "What is 1+1?", "2", extra=columns)
    return call_reward(function, [(problem, one, (1,)) for one in completions])


@pytest.mark.parametrize("page", ["docs/REWARDS.md", "README.md"])
def test_reward_plain(page: str) -> None:
    assert scores(run(page, 0)["reward"], ["It is 2.", "3"]) == [1.0, 0.0]


def test_rewards_prefilled() -> None:
    thinks = run("docs/REWARDS.md", 1)["thinks"]
    assert scores(thinks, ["hm</think>2", "2"], prefilled="<think>") == [1.0, 0.0]
    assert scores(thinks, ["<think>hm</think>2"], prefilled=None) == [1.0]


def test_rewards_logging() -> None:
    reward = run("docs/REWARDS.md", 2)["reward"]
    assert scores(reward, ["It is 2", "3"]) == [1.0, 0.0]
    log = Log("reward", 2)
    reward(completions=["It is 2", "3"], answer=["2", "2"], **log.arguments())
    found = log.scores([1.0, 0.0], [{}, {}])
    assert found.logged == {"mean_words": (4.0, 2)} and found.extra == {"first_word": ("It", "3")}


def test_rewards_async() -> None:
    async def ask(prompt: str, completion: str) -> float:
        await asyncio.sleep(0)
        return float(len(completion))

    assert scores(run("docs/REWARDS.md", 3, {"ask": ask})["judge"], ["a", "abc"]) == [1.0, 3.0]


TALK = [
    {"role": "assistant", "content": "call"}, {"role": "tool", "content": "[]"},
    {"role": "assistant", "content": "call"}, {"role": "tool", "content": "Error: x raised y"},
]


def test_environments_rewards_of_conversations() -> None:
    assert scores(run("docs/ENVIRONMENTS.md", 2)["short_talks"], [TALK, TALK[:1]]) == [0.5, 1.0]
    assert scores(run("docs/ENVIRONMENTS.md", 4)["calls_that_worked"], [TALK, TALK[:1]]) == [1.0, 0.0]


def test_environments_tools(tmp_path: Path) -> None:
    given = "PAGES = ['Berlin', 'Bern', 'Paris']\nasync def rate_of(currency): return 2.0\n"
    (tmp_path / "printed.py").write_text(given + blocks("docs/ENVIRONMENTS.md")[3])
    search, convert = load_tools([f"{tmp_path}/printed.py:search", f"{tmp_path}/printed.py:convert"])
    arguments, wrong = search.read({"query": "ber"}, False)
    assert not wrong and search.function(**arguments) == ["Berlin", "Bern"]
    arguments, wrong = convert.read({"amount": 3, "currency": "USD"}, False)
    assert not wrong and asyncio.run(convert.function(**arguments)) == {"amount": 6.0, "currency": "USD"}


def test_readme_environment() -> None:
    room = run("README.md", 1)["Guess"]()
    assert room.reset({"seed": 101}) and room.step("no") == ("Wrong. Guess again.", 0.0, False)
    assert room.step("1") == ("", 1.0, True)


def test_python_sampling_and_log_probs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_run(tmp_path, {"train.steps": 1})
    load = jetrl.load_model
    policy = load(folder)
    encoded = types.SimpleNamespace(input_ids=policy.tokenizer.encode("1+2="))
    small = types.SimpleNamespace(
        generate=lambda prompts, **more: policy.generate(["1+2="], **more), logprobs=policy.logprobs,
        tokenizer=lambda text: encoded,
    )  # its tokenizer knows digits only
    monkeypatch.setattr(jetrl, "load_model", lambda name, precision: small)
    code = blocks("docs/PYTHON.md")[6]
    assert code.count("\njetrl.mismatch_metrics(") == 1
    names: Names = {}
    code = code.replace("\njetrl.mismatch_metrics(", "\ngap = jetrl.mismatch_metrics(")
    exec(compile(code, "PYTHON.md", "exec"), names)
    assert names["gap"] == 0.0


def test_every_block_has_a_case() -> None:
    """Those of `test_reward_plain`, and in tests/test_docs.py the first two of ENVIRONMENTS.md, are counted by hand."""
    source = Path(__file__).read_text()
    for page, more in (("docs/PYTHON.md", set()), ("docs/REWARDS.md", {0}), ("docs/ENVIRONMENTS.md", {0, 1}),
                       ("README.md", {0})):
        cases = {int(n) for n in re.findall(rf'run\("{page}", (\d)', source)}
        cases |= {int(n) for n in re.findall(rf'blocks\("{page}"\)\[(\d)\]', source)} | more
        assert cases >= set(range(len(blocks(page)))), f"{page}: a block without a case"
