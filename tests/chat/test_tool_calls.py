"""Calls in the text of a turn: each form, several in one turn, broken ones, and what is no call."""

import json

import pytest

from jetrl.chat.tool_calls import ToolCall, answer_part, format_of, read_calls


def hermes(text):
    return read_calls(text, "hermes")


def call(name, plain=False, **arguments):
    return ToolCall(name, arguments, plain)


ONE = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, "x"]}}\n</tool_call>'


def test_hermes():
    assert hermes(ONE) == [call("add", a=1, b=[2, "x"])]
    assert hermes(f"I look it up.\n{ONE}\n{ONE.replace('add', 'sub')} ") == [
        call("add", a=1, b=[2, "x"]), call("sub", a=1, b=[2, "x"])
    ]
    assert hermes('<tool_call>{"arguments":{},"name":"now"}</tool_call>') == [call("now")]
    assert hermes("The answer is 4.") == hermes("") == hermes('{"name": "add", "arguments": {}}') == []


def test_a_text_argument_may_hold_the_tags():
    text = "a </tool_call> and <tool_call> b"
    written = f"<tool_call>{json.dumps({'name': 'say', 'arguments': {'text': text}})}</tool_call>"
    assert hermes(written + ONE) == [call("say", text=text), call("add", a=1, b=[2, "x"])]


def test_a_call_that_is_complete_but_not_closed_counts():
    """`rollout.stop = ["</tool_call>"]` keeps the string in the text; other limits may cut it off."""
    assert hermes(ONE.removesuffix("\n</tool_call>")) == [call("add", a=1, b=[2, "x"])]


@pytest.mark.parametrize(
    ("inside", "name", "error"),
    [
        ('{"name": "add", "arguments": {"a": 1}', "", "not valid JSON: Expecting ',' delimiter at character 38"),
        ("{'name': 'add'}", "", "not valid JSON: Expecting property name"),
        ('{"name": "add", "arguments": {"a": NaN}}', "", "not valid JSON: NaN is not JSON"),
        ("add(1)", "", "not valid JSON: Expecting value at character 1"),
        ("", "", "not valid JSON: Expecting value"),
        ('{"name": "add", "arguments": {}} please', "", "there is more behind it ('please')"),
        ('[{"name": "add", "arguments": {}}]', "", 'must have the form {"name": ..., "arguments": {...}}'),
        ('{"arguments": {}}', "", "must have the form"),
        ('{"name": 3, "arguments": {}}', "", "must have the form"),
        ('{"name": "add"}', "add", '"arguments" is missing'),
        ('{"name": "add", "parameters": {}}', "add", '"arguments" is missing'),
        ('{"name": "add", "arguments": "{\\"a\\": 1}"}', "add", '"arguments" must be an object'),
        ('{"name": "add", "arguments": {"a": ' + "9" * 5000 + "}}", "", "not valid JSON: Exceeds the limit"),
        ('{"name": "add", "arguments": ' + "[" * 100_000, "", "not valid JSON"),
    ],
    ids=lambda value: value[:40],
)
def test_broken_calls_say_what_is_wrong_and_the_next_one_is_read(inside, name, error):
    broken, good = hermes(f"<tool_call>{inside}</tool_call>{ONE}")
    assert (broken.name, broken.arguments, good) == (name, {}, call("add", a=1, b=[2, "x"]))
    assert error in broken.error


def test_a_turn_that_was_cut_off_in_a_call():
    (cut,) = hermes('Let me see. <tool_call>\n{"name": "search", "argum')
    assert "Unterminated string" in cut.error and "not closed by </tool_call>" in cut.error
    (empty,) = hermes("<tool_call>")
    assert "not closed" in empty.error


def test_llama3():
    text = '{"name": "add", "parameters": {"a": 1}}'
    for written in (text, f"<|python_tag|>{text}", f"  {text}\n", text.replace("parameters", "arguments"),
                    f"I call it. <|python_tag|>{text}"):
        assert read_calls(written, "llama3") == [call("add", a=1)], written
    assert read_calls(f"{text}; {text}", "llama3") == [call("add", a=1)] * 2
    for answer in ("4", "", f"The call would be {text}", '{"answer": 4}', '{"name": "Bob", "age": 4}', "[1]"):
        assert read_calls(answer, "llama3") == [], answer
    (broken,) = read_calls('{"name": "add", "parameters": {"a": }', "llama3")
    assert "not valid JSON: Expecting value" in broken.error
    (other,) = read_calls('<|python_tag|>search.call(query="x")', "llama3")
    assert "not valid JSON" in other.error
    (nameless,) = read_calls('<|python_tag|>{"name": "add"}', "llama3")
    assert nameless == ToolCall("add", error=nameless.error) and '"parameters" is missing' in nameless.error
    first, second = read_calls(f"{text};{text[:-1]}", "llama3")
    assert first == call("add", a=1) and second.error


def test_qwen3_coder():
    text = (
        "Let me see.\n<tool_call>\n<function=write>\n<parameter=path>\na.py\n</parameter>\n<parameter=text>\nif x:\n"
        "    y()\n\n</parameter>\n</function>\n</tool_call>"
    )
    assert read_calls(text, "qwen3_coder") == [call("write", True, path="a.py", text="if x:\n    y()\n")]
    short = "<tool_call><function=now></function></tool_call>"
    assert read_calls(short + text, "qwen3_coder") == [
        call("now", True), call("write", True, path="a.py", text="if x:\n    y()\n")
    ]
    assert read_calls("4", "qwen3_coder") == []
    for broken, error in (
        ("<tool_call>now()</tool_call>", "does not begin with <function=NAME>"),
        ("<tool_call><function=now>", "has the form"),
        ("<tool_call><function=now><parameter=a>1</function></tool_call>", "has the form"),
        ("<tool_call><function=now>1</function></tool_call>", "has the form"),
        ("<tool_call><function=f><parameter=a>1</parameter><parameter=a>2</parameter></function></tool_call>", "twice"),
    ):
        (found,) = read_calls(broken, "qwen3_coder")
        assert error in found.error and found.arguments == {}, broken


def test_what_is_thought_is_no_call():
    assert hermes(f"<think>\nPerhaps {ONE}?\n</think>\n\nIt is 4.") == []
    assert hermes(f"Perhaps {ONE}?\n</think>\n\nIt is 4.") == [], "the template has opened the thinking"
    assert hermes(f"<think>\nI need it.\n</think>\n\n{ONE}") == [call("add", a=1, b=[2, "x"])]
    assert hermes(f"<think>\nPerhaps {ONE}") == [], "cut off while it thinks"
    assert answer_part("4") == "4"


def test_the_form_is_read_from_the_template():
    for name in ('"name"', r'\"name\"', "'name'"):
        assert format_of(f"... within <tool_call>{{{name}: n, ...}}</tool_call> tags ...") == "hermes"
    assert format_of("<tool_call>\n<function=example>") == "qwen3_coder"
    assert format_of("<|python_tag|>") == format_of('Environment: ipython {"name": n, "parameters": p}') == "llama3"
    for other in ("[TOOL_CALLS]", "", "<seed:tool_call><function=f>", "<tool_call>name\n<arg_key>a</arg_key>"):
        assert format_of(other) is None, other
