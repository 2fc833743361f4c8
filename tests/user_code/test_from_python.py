"""Objects in place of names: what they are called, the content of rows, and what is said where they are missing."""

from __future__ import annotations

import datetime
import functools
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch

from jetrl.config import TaskConfig
from jetrl.environments.environment import load_environment
from jetrl.errors import UserError
from jetrl.rewards.loading import import_reward
from jetrl.tasks.files import FileTask
from jetrl.user_code.from_python import MARK, FromPython, name_of, rows_given
from jetrl.user_code.importing import import_attribute

ROW: dict[str, Any] = {
    "prompt": "1+1=", "answer": "2", "when": datetime.date(2026, 1, 1), "raw": b"ab", "price": Decimal("1.5"),
    "list": [1, {"a": None}], "array": np.arange(3), "number": np.float32(0.5), "tensor": torch.zeros(2),
}


class Scorer:
    def score(self, completions: list[str], **_: Any) -> list[float]:
        return [0.0] * len(completions)

    def __call__(self, completions: list[str], **_: Any) -> list[float]:
        return [1.0] * len(completions)


def test_names() -> None:
    def inner() -> None: ...

    here = f"<python>:{__name__}"
    assert name_of(inner) == f"{here}:test_names.inner"
    assert name_of(Scorer().score) == f"{here}:Scorer.score" and name_of(Scorer()) == f"{here}:Scorer"
    assert name_of(lambda: 0) == f"{here}:test_names.<lambda>"
    assert name_of(functools.partial(inner)) == "<python>:functools:partial"


@pytest.mark.parametrize("key", ROW)
def test_the_digest_sees_every_column(key: str) -> None:
    first, again = rows_given([ROW], "dataset"), rows_given(iter([dict(reversed(ROW.items()))]), "dataset")
    assert first.digest == again.digest and len(first.digest) == 64, "the order of columns does not count"
    changed = {k: v for k, v in ROW.items() if k != key}
    assert rows_given([changed], "dataset").digest != first.digest
    assert rows_given([ROW, ROW], "dataset").digest != first.digest


def test_objects_are_found_by_their_names() -> None:
    scorer = Scorer()
    name = name_of(scorer)
    own = FromPython({name: scorer, "<python>:m:E": type("E", (), {"reset": Scorer.score, "step": Scorer.score})})
    config = TaskConfig(name="addition", reward=name)
    assert import_reward(config, own) is scorer
    assert load_environment("<python>:m:E", {}, None, own).name == "E"
    with pytest.raises(UserError, match=r"task.reward = '<python>:.*:Scorer': this run was given .*:Scorer from"):
        import_reward(config)
    with pytest.raises(UserError, match=r"jetrl.Trainer\(RUN, resume=True, environment=...\)"):
        load_environment("<python>:m:E", {})
    with pytest.raises(UserError, match="rollout.engine = '<python>:m:E': cannot be given from Python"):
        import_attribute("<python>:m:E", "rollout.engine", "class")


def test_rows_pass_the_checks_of_a_file() -> None:
    config = TaskConfig(name="file", train_file=MARK)
    with pytest.raises(UserError, match=r"task.train_file = '<python>': this run was given the rows .* dataset=\.\.\."):
        FileTask(config, 0)
    for row, said in (
        ({"prompt": 3, "answer": "2"}, r"dataset\[1\]: column 'prompt' must be a string or chat messages"),
        ({"prompt": "a", "answer": None}, r"dataset\[1\]: column 'answer' must be a string or a number"),
        ({"prompt": "a", "answer": "2", "completions": 1}, "rename this column"),
    ):
        own = FromPython(rows={"task.train_file": rows_given([{"prompt": "1+1=", "answer": "2"}, row], "dataset")})
        with pytest.raises(UserError, match=said):
            FileTask(config, 0, own=own, hold_out=False)
