"""What a rendering holds, told by one with markers and by one with another value."""

from __future__ import annotations

from typing import Any

import pytest

from jetrl.chat.template_values import SURE, Difference, Skeleton, changed, forms, leaves, marked

TALK = [
    {"role": "user", "content": "add 2", "name": "bob"},
    {"role": "assistant", "content": " ", "tool_calls": [
        {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": [True, None, 0.5, ""]}}}]},
]


def test_leaves_and_markers() -> None:
    assert list(leaves({"a": {"b": [1, {}]}, "c": []})) == [("a", "b", 0), ("a", "b", 1), ("c",)]
    shown = marked(TALK, None)
    call = ("tool_calls", 0, "function")
    places = [(0, "content"), (0, "name"), (1, *call, "name"), (1, *call, "arguments", "a"),
              (1, *call, "arguments", "b", 2)]
    assert list(shown.places.values()) == places, "no roles, types, truths, nulls and empty texts"
    arguments = shown.messages[1]["tool_calls"][0]["function"]["arguments"]
    assert type(arguments["a"]) is int and type(arguments["b"][2]) is float and arguments["b"][:2] == [True, None]
    assert (0, "content") not in marked(TALK, 0).places.values(), "the stand-in for the policy's turn"
    assert TALK[0]["name"] == "bob"


@pytest.mark.parametrize("value", ["us", "Zebra 9", "+", "?!", "\u00e9t\u00e9", " a\n", "\u4e2d", 1, 9, 0.5, True, None,
                                   ""])
def test_another_value_is_of_the_same_kind(value: Any) -> None:
    other = changed({"x": [value]}, ("x", 0))["x"][0]
    assert other != value
    if isinstance(value, str) and value.strip():
        assert len(other) == len(value) and [c.isspace() for c in other] == [c.isspace() for c in value]
    elif value is not None:
        assert type(other) is type(value)


DIFFERENCES = [
    ("<us> user", "<vt> user", "us", 1), ("<> user", "<> user", "us", -1),
    ("(us) us", "(us) vt", "us", 5), ("aaa", "aaab", "aaa", -1), ("x a(1) y", "x b(2) y", "a(1)", 2), ("", "", "a", -1),
]


@pytest.mark.parametrize(("text", "other", "value", "place"), DIFFERENCES)
def test_a_value_is_looked_for_where_the_renderings_differ(text: str, other: str, value: str, place: int) -> None:
    assert Difference.of(text, other).find(value) == place


def skeleton_of(template: str, talk: list[dict[str, Any]]) -> Skeleton:
    shown = marked(talk, None)
    return Skeleton.of(template.format(*(m["content"] for m in shown.messages)), shown.places)


def test_a_rendering_is_the_skeleton_with_the_values_in_their_places() -> None:
    talk = [{"role": "user", "content": "one"}, {"role": "user", "content": ' say "two"\n'}]
    skeleton = skeleton_of("<u>{}<u>{}<a>", talk)
    assert skeleton.written == {(0, "content"), (1, "content")}
    assert skeleton.fits('<u>one<u> say "two"\n<a>', talk, trims=False)
    assert skeleton.fits('<u>one<u> say \\"two\\"\\n<a>', talk, trims=False), "as JSON"
    assert not skeleton.fits('<u>one<u>say "two"<a>', talk, trims=False)
    assert skeleton.fits('<u>one<u>say "two"<a>', talk, trims=True)
    for text in ('<u>one<u> say "two"\n<a>.', '<u><u> say "two"\n<a>', '<u>one<a>', '<u> say "two"\n<u>one<a>', ""):
        assert not skeleton.fits(text, talk, trims=True)


def test_a_short_value_counts_with_what_stands_on_both_sides_of_it() -> None:
    talk = [{"role": "user", "content": "us"}]
    skeleton = skeleton_of("[user says:]{}[over and out]", talk)
    place = (0, "content")
    assert [len(side) for side in skeleton.sides(place)] == [len("[user says:]"), len("[over and out]")]
    assert skeleton.shows("x[user says:]us[over and out]x", place, "us")
    assert not skeleton.shows("x[user says:][over and out]x", place, "us")
    assert not skeleton_of("{}", talk).shows("user", place, "us"), "by chance"
    assert skeleton_of("{}", talk).shows("x" + "u" * SURE, place, "u" * SURE)


def test_forms_of_values() -> None:
    assert forms(2, trims=False) == {"2"} and forms(0.5, trims=True) == {"0.5"}
    assert forms(' "\u00e9"', trims=False) == {' "\u00e9"', ' \\"\u00e9\\"', ' \\"\\u00e9\\"'}
    assert '"\u00e9"' in forms(' "\u00e9"', trims=True)
