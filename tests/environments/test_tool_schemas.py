"""Schemas from functions and classes, what is refused by function and argument, and checks of arguments."""

import json

import pytest

from jetrl.environments.tool_schemas import load_tools
from jetrl.errors import UserError

FILE = '''
from __future__ import annotations

import enum
from typing import Any, Literal

import torch


class Unit(enum.Enum):
    CELSIUS = "celsius"
    KELVIN = "kelvin"


def weather(city: str, days: int = 1, unit: Unit = Unit.KELVIN, near: list[float] | None = None) -> dict:
    """The weather.

    Args:
        city: Name of the city.
        days: How many days.
        unit: Of the temperature.
        near: Longitude and latitude.
    """
    return [city, days, unit, near]


def count(words: dict[str, int], mode: Literal["a", "b"], pair: tuple[int, str] = (1, "x"), flag: bool = False,
          anything: Any = None):
    """Count.

    Args:
        words: Words.
        mode: A mode.
        pair: A pair.
        flag: A flag.
        anything: Any value.
    """


class Notes:
    """Keeps notes."""

    def __init__(self, size: int = 3):
        self.kept = []

    def close(self):
        """No tool."""

    def add(self, text: str) -> int:
        """Add a note.

        Args:
            text: The note.
        """

    async def all(self) -> list[str]:
        """All notes."""

    def helper(self):
        pass

    def _hidden(self):
        """Hidden."""


class Empty:
    def f(self):
        pass


class Needs(Notes):
    def __init__(self, problem, server: str):
        pass


def add(text: str):
    """Another add.

    Args:
        text: A text.
    """


def no_hint(a):
    """It.

    Args:
        a: A value.
    """


def no_doc(a: int):
    pass


def argument_without_doc(a: int, b: int):
    """It.

    Args:
        a: A value.
    """


def of_class(a: int, b: Notes):
    """It.

    Args:
        a: A value.
        b: A value.
    """


def of_tensor(b: torch.Tensor):
    """It.

    Args:
        b: A value.
    """


def unknown(b: Nowhere):
    """It.

    Args:
        b: A value.
    """


def many(*rest: int):
    """It.

    Args:
        rest: Values.
    """


def by_place(a: int, /):
    """It.

    Args:
        a: A value.
    """


THREE = 3
'''


@pytest.fixture
def load(tmp_path):
    file = tmp_path / "my_tools.py"
    file.write_text(FILE)
    return lambda *names: load_tools([f"{file}:{name}" for name in names])


def test_a_schema_is_what_templates_show(load):
    (tool,) = load("weather")
    assert tool.schema["type"] == "function" and tool.schema["function"]["name"] == tool.name == "weather"
    parameters = tool.schema["function"]["parameters"]
    assert parameters["properties"]["city"] == {"type": "string", "description": "Name of the city."}
    assert parameters["properties"]["unit"]["enum"] == ["celsius", "kelvin"] and parameters["required"] == ["city"]
    assert json.loads(json.dumps(tool.schema)) == tool.schema


def test_a_class_has_a_tool_for_each_public_method_with_a_docstring(load):
    tools = load("Notes", "weather")
    assert [(t.name, t.is_async, t.owner is not None) for t in tools] == [
        ("add", False, True), ("all", True, True), ("weather", False, False)
    ]
    assert list(tools[0].schema["function"]["parameters"]["properties"]) == ["text"]


def test_one_name_alone_may_be_a_text(tmp_path):
    (tmp_path / "my_tools.py").write_text(FILE)
    assert [t.name for t in load_tools(f"{tmp_path}/my_tools.py:weather")] == ["weather"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["no_hint"], r"environment\.tools: .*:no_hint: the argument 'a' has no type hint.*a: str"),
        (["no_doc"], r":no_doc: .*no docstring"),
        (["argument_without_doc"], r":argument_without_doc: .*no description for the argument 'b'"),
        (["of_class"], r":of_class: the argument 'b' has the type Notes, which a model cannot write as JSON"),
        (["of_tensor"], r":of_tensor: the argument 'b' has the type Tensor, which a model cannot write as JSON"),
        (["unknown"], r":unknown: its type hints cannot be read: NameError: .*Nowhere"),
        (["many"], r":many: the argument 'rest' cannot be given by name"),
        (["by_place"], r":by_place: the argument 'a' cannot be given by name"),
        (["Notes", "add"], r"two tools have the name 'add'"),
        (["Empty"], r"the class .*:Empty has no tools: a tool is a public method with a docstring"),
        (["Needs"], r"Needs\(problem\).*give its parameter 'server' a default"),
        (["THREE"], r":THREE is of type int, not a Python function or a class"),
        (["wether"], r"environment\.tools: .* has no 'wether'; its functions: .*weather"),
    ],
)
def test_what_is_refused_names_function_and_argument(load, names, message):
    with pytest.raises(UserError, match=f"(?s){message}"):
        load(*names)


def test_arguments_become_what_the_function_takes(load):
    weather, count = load("weather", "count")
    values, wrong = weather.read({"city": "Rome", "days": 2, "unit": "celsius", "near": [1, 2.5]}, False)
    assert not wrong and weather.function(**values)[2].name == "CELSIUS" and values["near"] == [1.0, 2.5]
    assert weather.read({"city": "Rome", "near": None}, False) == ({"city": "Rome", "near": None}, [])
    given = {"words": {"a": 1}, "mode": "b", "pair": [1, "x"], "flag": True, "anything": [None, {}]}
    assert count.read(given, False) == (given | {"pair": (1, "x")}, [])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "the argument 'city' is missing"),
        ({"city": "x", "town": 1}, "there is no argument 'town'; arguments: city, days, unit, near"),
        ({"city": 3}, "the argument 'city': Input should be a valid string, got 3"),
        ({"city": "x", "days": "5"}, "the argument 'days': Input should be a valid integer, got \"5\""),
        ({"city": "x", "days": True}, "the argument 'days': Input should be a valid integer, got true"),
        ({"city": "x", "days": 1.5}, "the argument 'days'"),
        ({"city": "x", "unit": "feet"}, "the argument 'unit': Input should be 'celsius' or 'kelvin', got \"feet\""),
        ({"city": "x", "near": [1, "y"]}, "the argument 'near'[1]: Input should be a valid number, got [1, \"y\"]"),
        ({"city": None}, "the argument 'city'"),
    ],
    ids=str,
)
def test_wrong_arguments(load, given, message):
    (tool,) = load("weather")
    _, wrong = tool.read(given, False)
    assert len(wrong) == 1 and message in wrong[0]


def test_all_mistakes_of_a_call_are_told_at_once(load):
    assert len(load("weather")[0].read({"town": 1, "days": "x"}, False)[1]) == 3


def test_plain_values_have_the_types_of_the_schema(load):
    weather, count = load("weather", "count")
    values, wrong = weather.read({"city": "5", "days": "2", "unit": "kelvin", "near": "[1, 2]"}, True)
    assert (values["city"], values["days"], values["unit"].name, values["near"], wrong) == (
        "5", 2, "KELVIN", [1.0, 2.0], []
    )
    given = {"words": '{"a": 1}', "mode": "a", "flag": "true", "anything": "free text"}
    assert count.read(given, True) == ({"words": {"a": 1}, "mode": "a", "flag": True, "anything": "free text"}, [])
    assert "got \"two\"" in weather.read({"city": "x", "days": "two"}, True)[1][0]
