"""Values of the user's, whichever library made them: a missing one is None, and never the number under its mask."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from jetrl.environments.environment import BadReply, step_of
from jetrl.errors import UserError
from jetrl.rewards.calls import WeightedReward
from jetrl.rewards.results import Log, as_list, plain, plain_number
from jetrl.rewards.score import call_reward
from jetrl.rl import own, own_terms
from jetrl.rl.losses import Denominators
from jetrl.rl.surrogate import Clip
from jetrl.types import Problem
from jetrl.values import entries_of, is_single, value_of

pa, pd = pytest.importorskip("pyarrow"), pytest.importorskip("pandas")
masked_tensor = torch.masked.masked_tensor


class Quantity:
    """As astropy has it: a number with a mask."""

    ndim, mask = 0, True

    def item(self) -> float:
        return 7.0


def boxed(value: Any) -> np.ndarray:
    box = np.empty((), dtype=object)
    box[()] = value
    return box


MISSING = {
    "None": None,
    "ma.masked": np.ma.masked,
    "ma of no dimension": np.ma.array(1.0, mask=True),
    "ma of one entry": np.ma.array([1.0], mask=[True]),
    "ma of integers": np.ma.array(1, mask=True),
    "entry of an ma": np.ma.array([1.0, 2.0], mask=[True, False])[0],
    "entry of an ma of objects": np.ma.array([[1], 2], dtype=object, mask=[True, False])[0],
    "field of a masked record": np.ma.array([(1.0, 2)], dtype=[("a", "f8"), ("b", "i4")], mask=[(1, 0)])[0]["a"],
    "masked, boxed": boxed(np.ma.masked),
    "None, boxed": np.array(None),
    "boxed twice": boxed(boxed(np.ma.array(1.0, mask=True))),
    "pandas NA": pd.NA,
    "pandas NaT": pd.NaT,
    "numpy NaT": np.datetime64("NaT"),
    "entry of a pandas array": pd.array([1, None], dtype="Int64")[1],
    "Arrow null": pa.scalar(None),
    "Arrow null of a type": pa.array([1.0, None])[1],
    "masked tensor": masked_tensor(torch.tensor(1.0), torch.tensor(False)),
    "with a mask": Quantity(),
}
THERE = {
    "ma": np.ma.array(0.5, mask=False), "ma without mask": np.ma.array(0.5), "numpy": np.float32(0.5),
    "numpy of no dimension": np.array(0.5), "torch": torch.tensor(0.5), "boxed": boxed(torch.tensor(0.5)),
    "Arrow": pa.scalar(0.5), "masked tensor": masked_tensor(torch.tensor(0.5), torch.tensor(True)),
}
ROWS = {  # both first entries are missing
    "list": lambda: [np.ma.masked, 1.0],
    "ma": lambda: np.ma.array([5.0, 1.0], mask=[True, False]),
    "ma column": lambda: np.ma.array([[5.0], [1.0]], mask=[[True], [False]]),
    "ma of objects": lambda: np.ma.array([{"score": 5.0}, {"score": 1.0}], dtype=object, mask=[True, False]),
    "array of objects": lambda: np.array([np.ma.masked, 1.0], dtype=object),
    "Series": lambda: pd.Series([None, 1.0], dtype="Float64"),
    "pandas array": lambda: pd.array([None, 1], dtype="Int64"),
    "Arrow": lambda: pa.array([None, 1.0]),
    "Arrow chunks": lambda: pa.chunked_array([[None], [1.0]], pa.float64()),
    "Arrow structs": lambda: pa.array([{"score": None}, {"score": 1.0}]),
    "Arrow struct null": lambda: pa.array([None, {"score": 1.0}]),
    "masked tensor": lambda: masked_tensor(torch.tensor([5.0, 1.0]), torch.tensor([False, True])),
    "dicts": lambda: [{"score": np.ma.masked}, {"score": np.ma.array(1.0)}],
}
NO_ROWS = {
    "nested": lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
    "nested, jagged": lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged),
    "meta": lambda: torch.ones(2, device="meta"),
    "NaN": lambda: torch.tensor([math.nan, 1.0]),
    "masked single": lambda: np.ma.masked,
}


def items(count: int) -> list[Any]:
    return [(Problem(id=str(i), prompt="q", answer="1"), "a", (1,)) for i in range(count)]


@pytest.mark.parametrize("case", MISSING)
def test_a_missing_value_is_none_wherever_it_arrives(case: str) -> None:
    value = MISSING[case]
    assert value_of(value) is None and plain_number(value) is None and plain(value) is None
    assert step_of(("x", value, True), "E.step")[1] is None
    assert call_reward(lambda completions: [value, 1.0], items(2)) == [None, 1.0]
    assert call_reward(lambda completions: [{"score": value}, 1.0], items(2)) == [None, 1.0]
    weighted = WeightedReward((lambda completions: [value, 1.0], lambda completions: [1, 1]), (1.0, 0.0), ("a", "b"))
    assert weighted(completions=["x", "y"]) == [None, 1.0] == call_reward(weighted, items(2))
    log = Log("f", 2)
    log.log_metric("seen", value)
    log.log_extra("column", [value, 2.0])
    found = log.scores([1.0, 1.0], [{"acc": value}, {"acc": 0.5}])
    assert not found.logged and found.extra == {"acc": (None, 0.5), "column": (None, 2.0)}
    assert found.numbers == {"acc": (None, 0.5)}
    with pytest.raises(BadReply, match="done"):
        step_of(("x", 1.0, value), "E.step")


@pytest.mark.parametrize("case", THERE)
def test_a_value_that_is_there_is_pythons(case: str) -> None:
    value = THERE[case]
    assert is_single(value) and value_of(value) == 0.5 and type(value_of(value)) is float
    assert step_of(("x", value, True), "E.step")[1] == 0.5
    assert call_reward(lambda completions: [value], items(1)) == [0.5]


@pytest.mark.parametrize("case", ROWS)
def test_missing_entries_of_a_result_are_not_scored(case: str) -> None:
    assert call_reward(lambda completions: ROWS[case](), items(2)) == [None, 1.0]


@pytest.mark.parametrize("case", NO_ROWS)
def test_what_cannot_be_read_is_one_message(case: str) -> None:
    with pytest.raises(UserError, match=r"^Reward function .*(must return a list|not a number|returned nan)"):
        call_reward(lambda completions: NO_ROWS[case](), items(2))


def test_values_with_several_entries_stay() -> None:
    several = np.ma.array([1.0, 2.0], mask=True)
    assert value_of(several) is several and not is_single(several)
    assert entries_of(several) == [np.ma.masked, np.ma.masked] and as_list((1, 2)) == [1, 2]
    assert value_of("text") == "text" and math.isnan(value_of(math.nan))


@pytest.mark.parametrize("case", MISSING)
def test_an_advantage_is_never_missing(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own, "_functions", {})
    own.put("rl.adv_estimator", "m:f", lambda groups, config: [[MISSING[case]]])
    scored = own.Scored(SimpleNamespace(num_policy_tokens=1), 1.0, (1.0,), True)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"^rl.adv_estimator: m:f .*returned (a missing value|None) .* as an advantage"):
        own.advantages("m:f", [[scored]], SimpleNamespace(ratio="token"))


@pytest.mark.parametrize("value", [1e39, -1e300, (1e39,), 10**400, np.float64(4e38)], ids=repr)
def test_an_advantage_is_a_number_of_float32(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own, "_functions", {})
    own.put("rl.adv_estimator", "m:f", lambda groups, config: [[value]])
    scored = own.Scored(SimpleNamespace(num_policy_tokens=1), 1.0, (1.0,), True)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"^rl.adv_estimator: m:f .* as an advantage"):
        own.advantages("m:f", [[scored]], SimpleNamespace(ratio="token"))


@pytest.mark.parametrize("make", [
    lambda like: masked_tensor(like, torch.ones_like(like, dtype=torch.bool)),
    lambda like: like.to_sparse(),
    lambda like: torch.nested.nested_tensor([like]),
], ids=["masked", "sparse", "nested"])
def test_a_surrogate_and_an_aggregation_have_every_entry(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own, "_functions", {})
    own.put("rl.surrogate", "m:f", lambda ratio, logprobs, adv, clip: make(ratio.detach()))
    own.put("rl.loss_agg", "m:f", lambda ids, denominators: make(torch.ones(2)))
    two = torch.tensor([0.1, 0.2])
    with pytest.raises(UserError, match=r"^rl.surrogate: m:f .*must return a tensor"):
        own_terms.token_losses("m:f", two, two, two, Clip(0.2, 0.2, None))
    with pytest.raises(UserError, match=r"^rl.loss_agg: m:f .*must return a tensor"):
        own_terms.token_weights("m:f", torch.tensor([0, 1]), Denominators(2, 2, (1, 1), 4))
