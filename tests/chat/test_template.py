"""What a chat template does not write is refused or named: a table of templates by a table of messages and keys."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from jetrl.chat import template
from jetrl.chat.fields import message_of
from jetrl.chat.messages import TurnEncoder, encode_solution
from jetrl.chat.prompts import encode_problem, encode_prompt, opened_text
from jetrl.config import TaskConfig
from jetrl.errors import Notice, UserError
from jetrl.types import Completion, Problem

OPEN = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TOOLS = "{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools>{% endif %}"
CALLS = (
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} {{ c.function.arguments | tojson }}</call>"
    "{% endfor %}"
)


def every(text: str) -> str:
    return "{% for m in messages %}" + text + "{% endfor %}"


def said(text: str = "{{ m.content }}") -> str:
    return "<|im_start|>{{ m.role }}\n" + text + "<|im_end|>\n"


TEMPLATES = {
    "chatml": every(said()) + OPEN,
    "llama3": "<s>" + every("<|{{ m.role }}|>\n\n{{ m.content | trim }}<|eot|>")
    + "{% if add_generation_prompt %}<|assistant|>\n\n{% endif %}",
    "qwen2.5": TOOLS + every(
        "{% if m.role == 'tool' %}<|im_start|>user\n<result>{{ m.content }}</result><|im_end|>\n{% else %}"
        + said("{{ m.content }}" + CALLS) + "{% endif %}"
    ) + OPEN,
    "qwen3": TOOLS + every(
        "{% set text = m.content.split('</think>')[-1] if m.role == 'assistant' else m.content %}"
        "{% set thought = '<think>\n' + m.reasoning_content + '\n</think>\n\n' "
        "if m.reasoning_content and loop.last else '' %}" + said("{{ thought }}{{ text }}" + CALLS)
    ) + OPEN + "{% if add_generation_prompt and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}",
    "prefills": every(said("{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}"))
    + "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}",
    "no system": every("{% if m.role != 'system' %}" + said() + "{% endif %}") + OPEN,
    "no tool": every("{% if m.role in ('system', 'user', 'assistant') %}" + said() + "{% endif %}") + OPEN,
    "refuses tool": every("{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}" + said()) + OPEN,
    "first only": "{{ messages[0].content }}|" + OPEN,
    "last only": "{{ messages[-1].content }}|" + OPEN,
    "users first": "{% for m in messages if m.role != 'assistant' %}" + said() + "{% endfor %}"
    "{% for m in messages if m.role == 'assistant' %}" + said() + "{% endfor %}" + OPEN,
    "trims": every(said("{{ m.content | trim }}")) + OPEN,
    "escapes": every(said("{{ m.content | e }}")) + OPEN,
    "upper": every(said("{{ m.content | upper if m.role != 'assistant' else m.content }}")) + OPEN,
    "cuts": every(said("{{ m.content[:4] if m.role != 'assistant' else m.content }}")) + OPEN,
    "repeats": every(said("{{ m.content }}{{ m.content if m.role != 'assistant' }}")) + OPEN,
    "system again": every(said()) + "{{ messages[0].content }}" + OPEN,
    "backwards": "{% for m in messages | reverse %}" + said() + "{% endfor %}" + OPEN,
    "last user": every("{% if m.role != 'user' or loop.last %}" + said() + "{% endif %}") + OPEN,
    "names": every(said("{{ m.name or '' }}: {{ m.content }}")) + OPEN,
}
TEXTS = {"user": " q <5> & 'x'\n", "system": "be <brief> & good ", "tool": "RESULT <42> & so\n", "critic": "no <&> "}
CALL = {"role": "assistant", "content": "", "tool_calls": [
    {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}}]}
PROMPTS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": TEXTS["user"]}],
    "system": [{"role": "system", "content": TEXTS["system"]}, {"role": "user", "content": TEXTS["user"]}],
    "talk": [{"role": "user", "content": "first <1>"}, {"role": "assistant", "content": "<think>so</think>yes & no"},
             {"role": "user", "content": "second <2>"}],
    "named": [{"role": "user", "content": "add", "name": "bob-the-first"}],
    "calls": [{"role": "user", "content": "add 2"}, CALL, {"role": "tool", "content": "is 5", "tool_call_id": "c1"}],
    "thought": [{"role": "user", "content": "add"}, {"role": "assistant", "content": "5", "reasoning_content": "hmm?"},
                {"role": "user", "content": "again"}],
}


class Chars:
    """A tokenizer of characters that renders templates as transformers does."""

    eos_token, eos_token_id, bos_token, bos_token_id = "\x01", 1, "\x02", None
    name_or_path = "acme/chat"

    def __init__(self, chat_template: str) -> None:
        self.chat_template = chat_template

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [*([2] if add_special_tokens and self.bos_token_id else []), *map(ord, text)]

    def decode(self, tokens: list[int], **_: Any) -> str:
        return "".join(map(chr, tokens))

    def apply_chat_template(self, messages: Any, **variables: Any) -> str:
        from transformers.utils.chat_template_utils import render_jinja_template

        variables.pop("tokenize")
        rendered = render_jinja_template(
            conversations=[messages], chat_template=self.chat_template, tools=variables.pop("tools", None), **variables
        )
        return rendered[0][0]


def leaves(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [text for key, each in value.items() if key not in ("role", "type") for text in leaves(each)]
    if isinstance(value, list):
        return [text for each in value for text in leaves(each)]
    return [str(value)] if str(value).strip() else []


def told(call: Any) -> tuple[str, str]:
    """What comes of a call: the text, and what was said; a refusal is said too."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            text = call()
        except UserError as error:
            return "", str(error)
    return "".join(map(chr, text)), "\n".join(str(w.message) for w in caught if issubclass(w.category, Notice))


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_every_text_of_a_prompt_comes_out_once_and_in_order_or_is_named(name: str, prompt: str) -> None:
    tokenizer, messages = Chars(TEMPLATES[name]), PROMPTS[prompt]
    config = TaskConfig(name="addition", max_prompt_length=9999)
    text, said = told(lambda: encode_problem(Problem("p", tuple(messages), ""), tokenizer, config))
    if not text:  # refused: by role and template, and the first thing that is lost is enough
        assert ("acme/chat" in said and "of role '" in said) or "roles [" in said
        return
    at = 0
    for message in messages:
        for key, value in message.items():
            for leaf in leaves(value) if key != "role" else ():
                found = text.find(leaf, at if key == "content" else 0)
                fine = found >= 0 and (key != "content" or text.count(leaf) == 1)
                named = f"role {message['role']!r}" in said or "roles [" in said
                assert fine or named, f"{leaf!r} of {message['role']}.{key} is lost: {text!r}, told: {said!r}"
                at = found + len(leaf) if fine and key == "content" else at


@pytest.mark.parametrize("role", ["user", "tool", "critic", "system"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_every_text_of_a_reply_is_read_or_is_named(name: str, role: str) -> None:
    encoder = TurnEncoder(Chars(TEMPLATES[name]), TaskConfig(name="addition", max_prompt_length=9999))
    opening, reply = [{"role": "user", "content": "opening-7"}], [{"role": role, "content": TEXTS[role]}]
    turn = Completion(0, (5,), (0.0,), "", "length", 0, "")
    text, said = told(lambda: encoder.later(Problem("p", "", ""), opening, reply, turn))
    fine = text.count(TEXTS[role]) == 1 and "opening-7" not in text
    about = (f"role {role!r}", "role 'user' more than once", "writes an assistant's turn")
    named = "acme/chat" in said and any(each in said for each in about)
    assert fine or named or "roles [" in said, f"{text!r}, told: {said!r}"


@pytest.mark.parametrize("messages", [
    [{"role": "tool", "content": "RESULT 42"}], [{"role": "user", "content": "go on"}, {"role": "tool", "content": "4"}]
])
def test_a_reply_that_the_policy_would_never_read_stops_the_run(messages: list[Any]) -> None:
    encoder = TurnEncoder(Chars(TEMPLATES["no tool"]), TaskConfig(name="addition"))
    turn = Completion(0, (5,), (0.0,), "", "stop", 0, "")
    with pytest.raises(UserError, match="reply: the chat template of acme/chat does not write the content .*'tool'.*"):
        encoder.later(Problem("p", "", ""), [{"role": "user", "content": "start 42 4"}], messages, turn)


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def calling(*calls: dict[str, Any], said: str = "so I call it", **keys: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "add them"}, {"role": "assistant", "content": said, "tool_calls": [*calls],
                                                      **keys}, {"role": "tool", "content": "the result: 5"}]


def each_call(text: str, which: str = "m.tool_calls or []") -> str:
    return every(said("{{ m.content }}{% for c in " + which + " %}" + text + "{% endfor %}")) + OPEN


WHOLE = "<call>{{ c.function | tojson }}</call>"
LOSES = {  # template, conversation, what is lost of it (None: nothing is)
    "all": (each_call(WHOLE), calling(call("add", a=1), call("SECOND", b=2)), None),
    "first call": (each_call(WHOLE, "(m.tool_calls or [])[:1]"), calling(call("add", a=1), call("SECOND", b=2)),
                   '.name of this message of role \'assistant\', such as tool_calls[1].function.name = "SECOND"'),
    "last call": (each_call(WHOLE, "(m.tool_calls or [])[-1:]"), calling(call("FIRST", a=1), call("add", a=1)),
                  'tool_calls[0].function.name = "FIRST"'),
    "second call twice": (
        each_call(WHOLE, "(m.tool_calls or [])[:1] * 2"), calling(call("add", a=1), call("add", a=1)),
        'tool_calls[1].function.name = "add"'),
    "an argument": (each_call("{{ c.function.name }}({{ c.function.arguments['a'] }})"),
                    calling(call("add", a=1), call("neg", b=2)), "tool_calls[1].function.arguments.b = 2"),
    "an argument of the same call": (
        each_call("{{ c.function.name }}({{ c.function.arguments['a'] }})"), calling(call("add", a="x", b="x")),
        'arguments.b = "x"'),
    "first argument": (
        each_call("{{ c.function.name }}({{ c.function.arguments | first }}={{ (c.function.arguments.values() | list)"
                  "[0] }})"), calling(call("add", a=11, b=22)), "arguments.b = 22"),
    "a null": (each_call("{{ c.function.name }}({% for k, v in c.function.arguments | items if v is not none %}"
                         "{{ k }}={{ v }}{% endfor %})"), calling(call("add", a=11, b=None)), "arguments.b = null"),
    "a false": (each_call("{{ c.function.name }}({% for k, v in c.function.arguments | items if k != 'b' %}"
                          "{{ k }}={{ v }}{% endfor %})"), calling(call("add", a=11, b=False)), "arguments.b = false"),
    "deep": (each_call("{{ c.function.name }}({{ c.function.arguments.a.x }})"),
             calling(call("add", a={"x": 1, "y": [2, 3]})), "arguments.a.y[0] = 2"),
    "one name": (every("{% if m.name == 'bob' %}{{ m.name }}{% endif %}" + said()) + OPEN,
                 [{"role": "user", "content": "add", "name": "alice"}], 'name = "alice"'),
    "short name": (every("{% if m.name | length > 2 %}{{ m.name }}{% endif %}" + said()) + OPEN,
                   [{"role": "user", "content": "add", "name": "us"}], 'name = "us"'),
    "thinking of the last": (
        every(said("{{ (m.reasoning_content or '') if loop.last else '' }}{{ m.content }}")) + OPEN,
        [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "reasoning_content": "hm"}] * 2,
        'reasoning_content = "hm"'),
    "numbers": (each_call("{{ c.function.name }}{{ c.function.arguments.values() | list }}"),
                calling(call("add", a=1, b=2.5, c=True, d=None, e="x y")), None),
    "coder": (each_call("<function={{ c.function.name }}>{% for k, v in c.function.arguments | items %}<parameter={{ k "
                        "}}>\n{{ v | tojson if v is mapping else v | string }}\n</parameter>{% endfor %}</function>"),
              calling(call("add", a=1, b={"x": "y"}, c=' "quoted" ')), None),
}


@pytest.mark.parametrize("known", [[], ["bob"]], ids=["alone", "after others"])
@pytest.mark.parametrize("name", LOSES)
def test_what_is_lost_of_one_message_is_told_whatever_other_messages_are_like(name: str, known: list[str]) -> None:
    """Each value counts: that a template writes the first call says nothing of the second."""
    source, messages, lost = LOSES[name]
    tokenizer, config = Chars(source), TaskConfig(name="addition", max_prompt_length=9999)
    for who in known:  # conversations of the same roles of which nothing is lost
        same = [{**m, "name": who} if m.get("name") else m for m in messages]
        if lost is None or "name" in messages[0]:
            told(lambda same=same: encode_problem(Problem("k", tuple(same), ""), tokenizer, config))
        else:
            first = [{**m, "tool_calls": [call("add", a=7)]} if "tool_calls" in m else m for m in messages]
            told(lambda first=first: encode_problem(Problem("k", tuple(first), ""), tokenizer, config))
    text, said = told(lambda: encode_problem(Problem("p", tuple(messages), ""), tokenizer, config))
    assert text
    if lost is None:
        assert said == ""
    elif not (known and name in ("deep", "thinking of the last")):  # there the others have lost it, too
        assert "acme/chat does not write" in said and lost in said


@pytest.mark.parametrize("name", ["first call", "an argument", "second call twice", "deep", "all"])
def test_what_a_worked_solution_would_lose_is_told_before_it_is_taught(name: str) -> None:
    source, messages, lost = LOSES[name]
    problem = Problem("p", (messages[0],), "", solution=(messages[1],))
    encoder = TurnEncoder(Chars(source), TaskConfig(name="addition", max_prompt_length=9999))
    parts: list[Any] = []
    _, said = told(lambda: parts.extend(encode_solution(problem, encoder)) or ())
    assert (said == "") if lost is None else (lost in said and "the worked solution: the chat template" in said)
    assert "".join(map(chr, parts[0][1])).startswith("so I call it<call>" if name == "all" else "so I call it")


def test_a_solution_whose_content_the_template_leaves_out_is_refused() -> None:
    source = each_call(WHOLE).replace("{{ m.content }}", "{{ m.content if not m.tool_calls else '' }}")
    messages = LOSES["all"][1]
    problem = Problem("p", (messages[0],), "", solution=(messages[1],))
    encoder = TurnEncoder(Chars(source), TaskConfig(name="addition"))
    with pytest.raises(UserError, match="worked solution: .*does not write the content .* Write the whole turn as its"):
        encode_solution(problem, encoder)


@pytest.mark.parametrize("name", ["first call", "an argument", "one name"])
def test_what_is_lost_of_a_reply_is_told_too(name: str) -> None:
    source, messages, lost = LOSES[name]
    encoder = TurnEncoder(Chars(source), TaskConfig(name="addition", max_prompt_length=9999))
    turn = Completion(0, (5,), (0.0,), "", "stop", 0, "")
    _, said = told(lambda: encoder.later(Problem("p", "", ""), [{"role": "user", "content": "go"}], messages, turn))
    assert lost is not None and lost in said and "reply: the chat template" in said


SHORT = "{% for m in messages %}{% if CONDITION %}" + said() + "{% endif %}{% endfor %}" + OPEN
DROPS = {
    "by length": ("loop.first or m.content | length > 2", ["q", "us"]),
    "between others": ("m.content | length > 2", ["long one", "us", "long two"]),
    "by what it says": ("m.content != 'us'", ["long one", "us"]),
    "twice the same": ("loop.first or m.content != 'go on, please, now'", ["go on, please, now"] * 2),
    "signs": ("m.content | length > 2", ["what? ++", "+"]),
    "long ones": ("m.content | length < 99", ["short", "x " * 99]),
}


@pytest.mark.parametrize("name", DROPS)
@pytest.mark.parametrize("role", ["user", "tool", "assistant"])
def test_a_text_that_is_dropped_for_what_it_says_is_told_as_that(name: str, role: str) -> None:
    """Not as white space, nor as other words, though its letters stand elsewhere in the prompt."""
    condition, texts = DROPS[name]
    tokenizer, config = Chars(SHORT.replace("CONDITION", condition)), TaskConfig(name="addition", max_prompt_length=999)
    messages = [{"role": "user", "content": texts[0]}, *({"role": role, "content": text} for text in texts[1:])]
    for i in range(2):  # one of the same kind, of which nothing is lost, comes first
        kept = [{"role": m["role"], "content": f"a longer one {i} {k}"} for k, m in enumerate(messages)]
        assert told(lambda kept=kept: encode_problem(Problem("k", tuple(kept), ""), tokenizer, config))[1] == ""
    text, said = told(lambda: encode_problem(Problem("p", tuple(messages), ""), tokenizer, config))
    assert "does not write the content of" in said and f"role {role!r}" in said
    assert "white space" not in said and "other words" not in said
    assert (text == "") == (role != "assistant"), "refused, but for turns of the policy"
    assert "another role" not in said


@pytest.mark.parametrize("role", ["user", "tool", "assistant", "system"])
@pytest.mark.parametrize("condition", ["m.content | length < 9", "m.content[:1] != 'j'", "m.content[0] in 'stu'"])
def test_a_text_that_is_written_is_not_said_to_be_lost(condition: str, role: str) -> None:
    """Though a marker in its place would be."""
    tokenizer, config = Chars(SHORT.replace("CONDITION", condition)), TaskConfig(name="addition", max_prompt_length=999)
    talk = [{"role": role, "content": "so"}, {"role": "user", "content": "use it"}]
    text, said = told(lambda: encode_problem(Problem("p", tuple(talk), ""), tokenizer, config))
    assert "\nso<|im_end|>" in text and "\nuse it<|im_end|>" in text and said == ""
    config = TaskConfig(name="addition", max_prompt_length=999, system_prompt="tell")
    text, said = told(lambda: encode_problem(Problem("p", "use it", ""), tokenizer, config))
    assert "\ntell<|im_end|>" in text and said == ""


def test_thinking_that_a_template_takes_out_is_told_once_and_is_no_mistake() -> None:
    tokenizer, config = Chars(TEMPLATES["qwen3"]), TaskConfig(name="addition", max_prompt_length=999)
    ask = {"role": "user", "content": "now add the two"}
    said = []
    for text in ("<think>so</think>yes", "<think>only this</think>", "<think>again</think>no", "<think>x</think>"):
        talk = [ask, {"role": "assistant", "content": text}, ask]
        said.append(told(lambda talk=talk: encode_problem(Problem("p", tuple(talk), ""), tokenizer, config))[1])
    assert "in other words" in said[0] and "the policy never reads it" in said[1] and said[2:] == ["", ""]


def test_a_system_prompt_without_a_system_role_is_refused_as_for_plain_text() -> None:
    config = TaskConfig(name="addition", system_prompt="BE BRIEF")
    with pytest.raises(UserError, match="task.system_prompt has no effect: the chat template of acme/chat does not wr"):
        encode_problem(Problem("p", "1+1=", ""), Chars(TEMPLATES["no system"]), config)


HOW = [
    ("backwards", "in another order than the messages'"), ("repeats", "more than once"),
    ("system again", "more than once"), ("upper", "in other words"), ("escapes", "in other words"),
    ("cuts", "in other words"), ("trims", "strips white space from"),
]


@pytest.mark.parametrize(("name", "how"), HOW, ids=str)
def test_what_becomes_of_a_text_is_said(name: str, how: str) -> None:
    prompt, config = tuple(PROMPTS["system"]), TaskConfig(name="addition", max_prompt_length=999)
    assert how in told(lambda: encode_problem(Problem("p", prompt, ""), Chars(TEMPLATES[name]), config))[1]


def test_a_whole_message_that_is_lost_is_refused_with_its_keys() -> None:
    prompt = tuple(PROMPTS["calls"])
    with pytest.raises(UserError, match=r"nothing of this message of role 'assistant': neither tool_calls\[\].id nor "
                       r"tool_calls\[\].function.name nor tool_calls\[\].function.arguments"):
        encode_problem(Problem("p", prompt, ""), Chars(TEMPLATES["chatml"]), TaskConfig(name="addition"))


KEYWORDS: list[tuple[str, dict[str, Any], list[str]]] = [
    ("qwen3", {"enable_thinking": False}, []), ("qwen3", {"enable_thinking": True}, []),
    ("qwen2.5", {"enable_thinking": False}, ["enable_thinking"]), ("chatml", {"tools": [{"name": "add"}]}, ["tools"]),
    ("qwen2.5", {"tools": [{"name": "add", "about": {"unit": "cm", "n": 1}}]}, []),
    ("chatml", {"a": 1, "b": [], "c": "x", "d": True}, ["a", "b", "c", "d"]),
]


@pytest.mark.parametrize(("name", "keywords", "unread"), KEYWORDS, ids=str)
def test_a_keyword_that_changes_nothing_is_named_once(name: str, keywords: dict[str, Any], unread: list[str]) -> None:
    tokenizer = Chars(TEMPLATES[name])
    config = TaskConfig(name="addition", chat_template_kwargs=keywords, max_prompt_length=999)
    for again in (False, True):
        _, said = told(lambda: encode_problem(Problem("p", "1+1=", ""), tokenizer, config))
        wanted = [f"task.chat_template_kwargs.{key} changes nothing: the chat template of acme/chat" for key in unread]
        lines = [] if again else wanted
        assert [line.split(" does not")[0] for line in said.splitlines()] == lines


def test_a_part_of_a_keyword_that_is_not_read_is_named() -> None:
    names = Chars("{% for t in tools %}{{ t.name }}{% endfor %}" + TEMPLATES["chatml"])
    config = TaskConfig(name="addition", chat_template_kwargs={"tools": [{"name": "add", "about": "adds"}]})
    _, said = told(lambda: encode_problem(Problem("p", "1+1=", ""), names, config))
    assert said.startswith("task.chat_template_kwargs.tools[].about changes nothing") and said.count("\n") == 0


def test_what_is_told_is_told_once_and_findings_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, config = Chars(TEMPLATES["trims"]), TaskConfig(name="addition")
    renders = []
    plain = tokenizer.apply_chat_template
    monkeypatch.setattr(tokenizer, "apply_chat_template", lambda *a, **k: renders.append(1) or plain(*a, **k))
    said = [told(lambda n=n: encode_problem(Problem(f"p{n}", f"{n} ", ""), tokenizer, config))[1] for n in range(9)]
    assert "white space" in said[0] and not any(said[1:])
    assert len(renders) <= 9 + 2, "a prompt of a known kind is rendered once"


@pytest.mark.parametrize("name", ["trims", "qwen2.5", "qwen3"])
def test_conversations_with_calls_cost_one_rendering_each(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those whose thinking is taken out, one more for each text that is not there."""
    tokenizer, config, renders = Chars(TEMPLATES[name]), TaskConfig(name="addition", max_prompt_length=9999), []
    plain = tokenizer.apply_chat_template
    monkeypatch.setattr(tokenizer, "apply_chat_template", lambda *a, **k: renders.append(1) or plain(*a, **k))

    def cost(i: int, thought: str) -> int:
        renders.clear()
        talk = calling(call("add", a=i, b="x"), call("neg", a=i * 0.5), said=f"{thought} I call both for number {i}")
        told(lambda: encode_problem(Problem("p", (*talk, talk[0]), ""), tokenizer, config))
        return len(renders)

    assert cost(1, "") > 1
    assert [cost(i, "") for i in range(2, 6)] == [1] * 4
    if name == "qwen3":
        assert [cost(i, "<think>so</think>") for i in range(6, 9)] == [2] * 3


def test_a_prompt_without_the_bos_that_the_tokenizer_adds_is_told_once() -> None:
    tokenizer, config = Chars(TEMPLATES["chatml"]), TaskConfig(name="addition")
    tokenizer.bos_token_id = 2
    said = [told(lambda: encode_problem(Problem("p", "1", ""), tokenizer, config))[1] for _ in range(2)]
    assert "does not begin prompts with '\\x02'" in said[0] and not said[1]
    tokenizer.chat_template = "\x02" + TEMPLATES["chatml"]
    assert told(lambda: encode_problem(Problem("p", "1", ""), tokenizer, config))[1] == ""
    assert encode_prompt(tokenizer, "prompts[0]", "ab") == [2, 97, 98]
    assert encode_prompt(tokenizer, "x", [{"role": "user", "content": "q"}])[:3] == [2, ord("<"), ord("|")]


OPENED = [
    ("chatml", {}, ""), ("llama3", {}, ""), ("qwen3", {}, ""), ("prefills", {}, "<think>\n"),
    ("qwen3", {"enable_thinking": False}, "<think>\n\n</think>\n\n"), ("backwards", {}, None),
]


@pytest.mark.parametrize(("name", "keywords", "opened"), OPENED, ids=str)
@pytest.mark.parametrize("prompt", ["one", "system"])
def test_what_the_template_has_opened_of_the_policys_turn(
    name: str, keywords: dict[str, Any], opened: str | None, prompt: str
) -> None:
    config = TaskConfig(name="addition", chat_template_kwargs=keywords)
    assert opened_text(Problem("p", tuple(PROMPTS[prompt]), ""), Chars(TEMPLATES[name]), config) == opened
    assert opened_text(Problem("p", "1", ""), Chars(TEMPLATES[name]), TaskConfig(name="addition", chat_template=False)
                       ) == ""


@pytest.mark.parametrize(("parts", "kinds"), [
    ([{"type": "image_url", "image_url": {"url": "a.png"}}, {"type": "text", "text": "What?"}], "image_url, text"),
    (({"type": "image"},), "image"), ([], "none with a type"),
])
def test_images_are_refused_by_name(parts: Any, kinds: str) -> None:
    with pytest.raises(ValueError) as error:
        message_of({"role": "user", "content": parts})
    assert str(error.value) == (
        f"'content' of a chat message is a list of parts ({kinds}), and jetrl reads text only, no images: give the "
        "text alone, as a string"
    )


def test_messages_of_tables_lose_their_padding_and_nothing_else() -> None:
    padded = {"role": "assistant", "content": None, "name": None, "tool_calls": [
        {"id": "c", "function": {"name": "add", "arguments": {"a": 1, "b": None}}}]}
    for padding, kept in ((True, {"a": 1}), (False, {"a": 1, "b": None})):
        assert message_of(padded, padded=padding) == {"role": "assistant", "content": "", "tool_calls": [
            {"id": "c", "function": {"name": "add", "arguments": kept}}]}
    for wrong in ({"role": "user", "content": None}, {"role": "user"}, {"content": "x"}, {"role": "", "content": "x"},
                  "text", {"role": "user", "content": "x", 3: "y"}, {"role": "user", "content": "x", "y": b""}):
        with pytest.raises(ValueError, match="chat message"):
            message_of(wrong)


def test_a_template_is_named_by_its_tokenizer() -> None:
    assert template.source_of(Chars("")) == "the chat template of acme/chat"
    assert template.source_of(object()) == "the tokenizer's chat template"
