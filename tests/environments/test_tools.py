"""The environment `tools`: results, failures as texts for the model, state, time limits, templates."""

import re
import time
import warnings
from pathlib import Path

import pytest
from byte_tokenizer import CHAT, HERMES, byte_tokenizer

from jetrl.chat.prompts import encode_problem
from jetrl.config import TaskConfig, parse_config
from jetrl.config.paths import absolute_paths
from jetrl.environments.conversations import build_pool
from jetrl.environments.tool_schemas import load_tools
from jetrl.environments.tools import tools_factory, with_tools
from jetrl.errors import UserError
from jetrl.types import Completion, Problem

FILE = '''
import asyncio
import time


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def echo(text: str):
    """Say it again.

    Args:
        text: What to say.
    """
    if text == "raise":
        raise ValueError("no such thing")
    if text == "exit":
        raise SystemExit(3)
    return {"dict": {"a": [1, None]}, "set": {1}, "none": None, "lone": "a\\ud800"}.get(text, text)


def sleep(seconds: float):
    """Sleep.

    Args:
        seconds: How long.
    """
    time.sleep(seconds)
    return "slept"


async def wait(seconds: float):
    """Wait.

    Args:
        seconds: How long.
    """
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        CANCELLED.append(seconds)
        raise
    return "waited"


class Notes:
    def __init__(self, problem):
        self.kept = [problem["answer"]]

    def keep(self, text: str, seconds: float = 0.0) -> list[str]:
        """Keep a note.

        Args:
            text: The note.
            seconds: How long it takes.
        """
        time.sleep(seconds)
        self.kept.append(text)
        return self.kept

    async def close(self):
        CLOSED.append(self.kept)


CANCELLED, CLOSED = [], []
'''


@pytest.fixture
def made(tmp_path):
    """A function from settings to a pool; `module` is that of the tools."""
    file = tmp_path / "my_tools.py"
    file.write_text(FILE)
    pools = []

    def make(*names, tokenizer=None, task=None, timeout=10.0, **params):
        config = config_of([f"{file}:{name}" for name in names], task, timeout, params)
        tokenizer = byte_tokenizer() if tokenizer is None else tokenizer
        factory = tools_factory(config, tokenizer)
        pools.append(build_pool(factory, tokenizer, config.task, timeout=timeout))
        return pools[-1]

    yield make
    for pool in pools:
        pool.shutdown()


def config_of(names, task=None, timeout=10.0, params=None):
    return parse_config({
        "name": "t", "model": {"arch": {"model_type": "qwen3"}, "tokenizer": "x"},
        "task": {"name": "addition", "max_prompt_length": 4096} | (task or {}),
        "environment": {"name": "tools", "tools": names, "timeout": timeout, "params": params or {}},
    })


PROBLEM = Problem("p/1", "What is 2 + 3?", "5")


def begin(pool, key=0):
    pool.start(key, PROBLEM)
    (reply,) = pool.poll(True)
    assert not reply.failure, reply.error
    return reply


def say(pool, text, key=0):
    pool.act(key, Completion(key, tuple(text.encode()), (), text, "stop", 0, ""))
    (reply,) = pool.poll(True)
    return reply


def call(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def results(pool, text, key=0):
    reply = say(pool, text, key)
    assert not reply.failure, reply.error
    return [message["content"] for message in reply.messages]


def test_a_conversation(made):
    pool = made("add", "echo")
    tokenizer = byte_tokenizer()
    opening = tokenizer.decode(list(begin(pool).tokens))
    assert '"name": "add"' in opening and '"description": "The second."' in opening
    assert opening.endswith("<|im_start|>user\nWhat is 2 + 3?<|im_end|>\n<|im_start|>assistant\n")
    reply = say(pool, "I call it.\n" + call("add", '{"a": 2, "b": 3}') + call("echo", '{"text": "hi"}'))
    assert reply.messages == (
        {"role": "tool", "name": "add", "content": "5"}, {"role": "tool", "name": "echo", "content": "hi"}
    )
    assert tokenizer.decode(list(reply.tokens)) == (
        "<|im_end|>\n<|im_start|>tool\n5<|im_end|>\n<|im_start|>tool\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    end = say(pool, "It is 5.")
    assert end.done and not end.messages and not end.reward


SHOWN = {  # how a template shows tools -> what it does not show of their schemas
    "{{ t | tojson }}": "", "{{ t.function | tojson }}": "",
    "{{ t.function.name }}": "function.description, function.parameters.type, function.parameters.properties.a.type",
    "{{ t.function.name }}: {{ t.function.description }} {{ t.function.parameters | tojson }}": "function.return.type",
}


@pytest.mark.parametrize("shown", SHOWN)
def test_nobody_is_told_to_remove_what_he_has_not_written(made, shown):
    """The schemas and the names of results are jetrl's: what a template leaves out of them is at most one line."""
    template = HERMES.replace("{{ t | tojson }}", shown)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        pool = made("add", tokenizer=byte_tokenizer(template))
        begin(pool)
        assert results(pool, call("add", '{"a": 2, "b": 3}')) == ["5"]
    said = [str(one.message) for one in told]
    assert "chat_template_kwargs" not in str(said) and "role 'tool'" not in str(said)
    if SHOWN[shown]:
        assert len(said) == 1 and said[0].startswith("environment.tools: the tokenizer's chat template does not show")
        assert f"never reads {SHOWN[shown]}" in said[0]
    else:
        assert said == []


def test_a_name_that_the_data_gives_a_result_is_told(made):
    talk = [{"role": "user", "content": "add"}, {"role": "assistant", "content": "yes"},
            {"role": "tool", "name": "add", "content": "5"}]
    with pytest.warns(UserWarning, match="does not write name of this message of role 'tool', such as name = \"add\""):
        encode_problem(Problem("p", tuple(talk), ""), byte_tokenizer(), TaskConfig(name="addition"))


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (call("echo", '{"text": "dict"}'), '{"a": [1, null]}'),
        (call("echo", '{"text": "none"}'), "null"),
        (call("echo", '{"text": "ü"}'), "ü"),
        (call("echo", '{"text": "lone"}'), "a?"),
        (call("ad", '{"a": 1}'), "Error: there is no tool 'ad'. Did you mean 'add'? Tools: add, echo."),
        (call("weather", "{}"), "Error: there is no tool 'weather'. Tools: add, echo."),
        (call("add", '{"a": 1'), "Error: the call is not valid JSON: Expecting ',' delimiter at character 39."),
        (call("add", '{"a": "1", "c": 1}'),
         "Error: add was not called: there is no argument 'c'; arguments: a, b; the argument 'b' is missing; the "
         "argument 'a': Input should be a valid integer, got \"1\"."),
        (call("add", "[]"), 'Error: "arguments" must be an object: a call must have the form {"name": ..., '
                            '"arguments": {...}}.'),
        (call("echo", '{"text": "raise"}'), "Error: echo raised ValueError: no such thing"),
        (call("echo", '{"text": "' + "x" * 500 + '"}'), "x" * 300 + "\n[cut: the first 300 of 500 characters]"),
    ],
)
def test_results_and_failures_are_texts_for_the_model(made, text, content):
    pool = made("add", "echo", max_output_chars=300)
    begin(pool)
    assert results(pool, text) == [content]
    assert results(pool, call("add", '{"a": 1, "b": 1}')) == ["2"], "and the conversation goes on"


def test_mistakes_of_the_tools_author_fail_the_conversation(made):
    pool = made("echo")
    begin(pool)
    reply = say(pool, call("echo", '{"text": "set"}'))
    assert reply.failure == "error" and "echo returned a set that is neither a string nor JSON" in reply.error
    begin(pool, 1)
    reply = say(pool, call("echo", '{"text": "exit"}'), 1)
    assert reply.failure == "error" and "SystemExit: 3" in reply.error


def test_a_tool_with_state_lives_as_long_as_its_conversation(made):
    pool = made("Notes")
    begin(pool, 0)
    begin(pool, 1)
    assert results(pool, call("keep", '{"text": "a"}'), 0) == ['["5", "a"]']
    assert results(pool, call("keep", '{"text": "b"}') + call("keep", '{"text": "c"}'), 1) == [
        '["5", "b"]', '["5", "b", "c"]'
    ]
    assert results(pool, call("keep", '{"text": "d"}'), 0) == ['["5", "a", "d"]']
    closed = pool.factory.params["kit"].tools["keep"].function.__globals__["CLOSED"]
    pool.close(0)
    pool.close(1)
    pool.shutdown()
    assert sorted(closed) == [["5", "a", "d"], ["5", "b", "c"]]


def test_a_slow_call_is_told_to_the_model(made):
    pool = made("sleep", "wait", "Notes", tool_timeout=0.2)
    begin(pool)
    start = time.monotonic()
    late = "took longer than 0.2 seconds."
    assert results(pool, call("sleep", '{"seconds": 5}') + call("wait", '{"seconds": 6}')) == [
        f"Error: sleep {late}", f"Error: wait {late}"
    ]
    assert results(pool, call("keep", '{"text": "a", "seconds": 5}')) == [f"Error: keep {late}"]
    busy = ["Error: keep was not called: an earlier call has not come back."]
    assert results(pool, call("keep", '{"text": "b"}')) == busy
    assert results(pool, call("wait", '{"seconds": 0}')) == ["waited"] and time.monotonic() - start < 4
    scope = pool.factory.params["kit"].tools["keep"].function.__globals__
    assert scope["CANCELLED"] == [6.0]
    pool.close(0)
    pool.shutdown()
    assert scope["CLOSED"] == [], "an object that is out of our hands is not closed"


@pytest.mark.parametrize("name", ["sleep", "wait"])
def test_without_a_limit_of_its_own_the_turns_limit_holds(made, name):
    pool = made(name, timeout=0.3)
    begin(pool)
    reply = say(pool, call(name, '{"seconds": 3}'))
    assert reply.failure == "timeout" and "environment.timeout = 0.3" in reply.error


LLAMA = CHAT.replace("FORM", '<|python_tag|>{"name": n, "parameters": p}')
CODER = CHAT.replace("FORM", "<tool_call><function=NAME>")


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (HERMES, call("add", '{"a": 1, "b": 2}')), (LLAMA, '{"name": "add", "parameters": {"a": 1, "b": 2}}'),
        (CODER, "<tool_call><function=add><parameter=a>1</parameter><parameter=b>2</parameter></function></tool_call>"),
    ],
)
def test_the_form_of_calls_is_that_of_the_template(made, template, text):
    pool = made("add", tokenizer=byte_tokenizer(template))
    begin(pool)
    assert results(pool, text) == ["3"]


def test_a_template_may_be_for_tools_only(made):
    """As those called `tool_use`, which fail where there are none."""
    template = "{% if not tools %}{{ none | length }}{% endif %}" + HERMES
    begin(made("add", tokenizer=byte_tokenizer(template)))


@pytest.mark.parametrize("special", [True, False])
def test_tags_that_are_tokens_stay_in_the_text(made, special):
    """What the engine decodes for `act` holds them, whether the tokenizer calls them special or not."""
    tokenizer = byte_tokenizer(added=("<tool_call>", "</tool_call>"), special=special)
    pool = made("add", tokenizer=tokenizer)
    begin(pool)
    tokens = tokenizer.encode(call("add", '{"a": 2, "b": 2}'), add_special_tokens=False)
    assert {tokenizer.convert_tokens_to_ids(tag) for tag in ("<tool_call>", "</tool_call>")} <= set(tokens)
    text = tokenizer.decode(list(tokens))  # as engine/engine.py does
    pool.act(0, Completion(0, tuple(tokens), (), text, "stop", 0, ""))
    assert pool.poll(True)[0].messages[0]["content"] == "4"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tokenizer": byte_tokenizer(None)}, "shows the tools through a chat template, and none is in use"),
        ({"task": {"chat_template": False}}, "shows the tools through a chat template, and none is in use"),
        ({"tokenizer": byte_tokenizer(CHAT.partition("{% endif %}")[2])},
         r"chat template does not show the tool 'add' to the model: it does not read `tools`"),
        ({"tokenizer": byte_tokenizer(HERMES.replace("in messages", "in messages if m.role != 'tool'"))},
         "does not write messages of the role `tool`"),
        ({"tokenizer": byte_tokenizer(CHAT)}, r"params\.call_format: .* form that is not known"),
        ({"call_format": "mistral"}, r"params\.call_format: must be auto, hermes, llama3, qwen3_coder, got 'mistral'"),
        ({"max_output_chars": 0}, r"params\.max_output_chars: must be an integer of at least 1, got 0"),
        ({"tool_timeout": 11}, r"params\.tool_timeout: .*at most environment\.timeout = 10, got 11"),
        ({"tool_timeot": 1}, r"params\.tool_timeot: .* known: call_format, max_output_chars, tool_timeout"),
        ({"task": {"chat_template_kwargs": {"tools": []}}}, r"chat_template_kwargs\.tools: .*Remove one"),
    ],
)
def test_what_cannot_work_is_refused_before_the_run(made, settings, message):
    with pytest.raises(UserError, match=message):
        made("add", **settings)


def test_tools_may_be_described_by_hand_to_a_model_whose_template_knows_none(made):
    tokenizer = byte_tokenizer(CHAT.partition("{% endif %}")[2])
    pool = made("add", tokenizer=tokenizer, task={"system_prompt": "You may call add(a, b)."}, call_format="hermes")
    assert "You may call add" in tokenizer.decode(list(begin(pool).tokens))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"environment": {"name": "tools"}}, r"environment\.tools: is needed"),
        ({"environment": {"name": "retry", "tools": ["a.py:f"]}}, r'environment\.tools: has no effect with .*"retry"'),
        ({"environment": {"tools": ["a.py:f"]}}, r"environment\.tools"),
        ({"environment": {"name": "tools", "tools": ["a.py:f"]}, "task": {"name": "environment"}},
         r'task\.name: "environment" has no prompts'),
    ],
)
def test_settings_that_contradict_each_other(changes, message):
    data = {"name": "t", "model": {"arch": {"model_type": "qwen3"}, "tokenizer": "x"}, "task": {"name": "addition"}}
    with pytest.raises(UserError, match=message):
        parse_config(data | changes)


def test_the_warm_start_reads_the_schemas_too(tmp_path):
    (tmp_path / "my_tools.py").write_text(FILE)
    config = config_of([f"{tmp_path}/my_tools.py:add"], {"chat_template_kwargs": {"x": 1}})
    shown = with_tools(config).task.chat_template_kwargs
    assert shown["x"] == 1 and [t["function"]["name"] for t in shown["tools"]] == ["add"]
    other = config.model_copy(update={"environment": config.environment.model_copy(update={"tools": None})})
    assert with_tools(other) is other


def test_the_tools_that_the_docs_print_have_schemas(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "ENVIRONMENTS.md").read_text(encoding="utf-8")
    printed = re.findall(r"^```py(?:thon)?\n(.*?)^```", page.partition("## Tools of real models")[2], re.M | re.S)
    (tmp_path / "my_tools.py").write_text("\n".join(printed))
    names = re.search(r'^`tools = \["my_tools.py:(\w+)", "my_tools.py:(\w+)"\]`', page, re.M).groups()
    tools = load_tools([f"{tmp_path}/my_tools.py:{name}" for name in (*names, "convert")])
    assert [tool.name for tool in tools] == ["write", "read", "search", "convert"] and tools[-1].is_async


def test_paths_of_tools_become_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my_tools.py").write_text(FILE)
    changed = absolute_paths(config_of(["my_tools.py:add", "package.module:f"]))
    assert changed.environment.tools == (f"{tmp_path}/my_tools.py:add", "package.module:f")
