"""Sessions: trees of exact tokens, with answers that a test makes up."""

from __future__ import annotations

import random
from typing import Any

import pytest
from byte_tokenizer import byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from jetrl.serve.calls import calls_of, for_template, form_of
from jetrl.serve.link import Flight
from jetrl.serve.refusal import Refused
from jetrl.serve.service import About, Choice, Service
from jetrl.serve.sessions import Session, Sessions
from jetrl.serve.wire import Ask, chat_ask, completion_ask

TOKENIZER = byte_tokenizer(added=("<tool_call>", "</tool_call>"))
ABOUT = About("m", TOKENIZER, len(TOKENIZER), 100_000, "digest", 4)
TOOLS = [{"type": "function", "function": {
    "name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
}}]


def ask_of(messages: list[dict[str, Any]], **more: Any) -> Ask:
    return chat_ask({"messages": messages, "max_tokens": 50, **more}, "m", ABOUT.vocab_size)


def answered(
    service: Service, session: Session, ask: Ask, texts: dict[int, str] | None = None, **more: Any
) -> list[Choice]:
    """The choices of an ask with answers: texts by index, or random tokens, a function of the request's id alone."""
    choices = service.choices(ask, session, **more)
    for choice in choices:
        draw = random.Random(choice.id)
        drawn = [draw.randrange(256) for _ in range(draw.randint(1, 12))]  # mostly no valid text
        if texts is not None:
            drawn = TOKENIZER.encode(texts[choice.index])
        text, stopped = TOKENIZER.decode(drawn), draw.random() < 0.7
        drawn += [TOKENIZER.eos_token_id] if stopped else []
        choice.flight = Flight(choice.id, drawn, [-draw.random() for _ in drawn], {
            "tokens": drawn, "logprobs": [-draw.random() for _ in drawn], "text": text,
            "finish": "stop" if stopped else "length", "version": 4, "digest": "digest",
        })
    service.note(ask, session, choices)
    return choices


def message_of(service: Service, ask: Ask, choice: Choice) -> dict[str, Any]:
    """As a client sends an answer back, with keys of its library and without white space."""
    message, _ = service.said(ask, choice)
    return message | {"content": (message["content"] or "").strip() or None, "annotations": [], "audio": None}


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9))
def test_random_trees_of_turns(seed: int) -> None:
    """Forks, edits, several choices and repeated requests: prompts begin with exact tokens, and each drawn token is
    trained once."""
    draw, service, session = random.Random(seed), Service(ABOUT), Session("s")
    talks: list[tuple[list[dict[str, Any]], list[int]]] = [([], [])]  # messages, and their exact tokens
    paths: dict[int, list[int]] = {}
    for step in range(draw.randint(1, 12)):
        before, exact = draw.choice(talks)
        edited = bool(before) and draw.random() < 0.2
        if edited:
            before = [{**before[0], "content": f"edited {step}"}, *before[1:]]
        messages = [*before, {"role": draw.choice(("user", "tool")), "content": f"said {draw.randrange(3)}"}]
        ask = ask_of(messages, n=draw.randint(1, 2))
        choices = answered(service, session, ask)
        if draw.random() < 0.3:  # a repeated attempt has the same names, and adds nothing
            count = len(session.turns)
            again = answered(service, session, ask, names=[[c.name for c in choices]])
            assert [c.prompt for c in again] == [c.prompt for c in choices] and len(session.turns) == count
        for choice in choices:
            whole = [*choice.prompt, *choice.landed.tokens]
            if edited:
                assert choice.parent is None
            else:
                assert whole[: len(exact)] == exact
            paths[choice.id] = whole
            if any(turn.id == choice.id for turn in session.turns) and _is_first(service, ask, choices, choice):
                talks.append(([*messages, message_of(service, ask, choice)], whole))
    trained = [one.turn.id for row in session.rows() for one in row if one.trained]
    assert sorted(trained) == sorted(paths) == sorted(turn.id for turn in session.turns)
    for row in session.rows():
        tokens = [t for one in row for t in (one.turn.drawn if one.by_policy else one.turn.before).tolist()]
        assert tokens == paths[row[-1].turn.id]
    assert session.num_forked == len(session.rows()) - 1
    found = session.to_json()
    assert found["num_turns"] == len(paths) and len(found["rows"]) == len(session.rows())


def _is_first(service: Service, ask: Ask, choices: list[Choice], choice: Choice) -> bool:
    """Of answers with one text, the first goes on."""
    texts = [message_of(service, ask, each)["content"] for each in choices]
    return texts.index(texts[choice.index]) == choice.index


def test_an_answer_goes_on_from_its_exact_tokens_and_ends_once() -> None:
    service, session = Service(ABOUT), Session("s")
    first = ask_of([{"role": "user", "content": "a"}])
    (one,) = answered(service, session, first)
    more = [*first.messages, message_of(service, first, one), {"role": "user", "content": "b"}]
    (two,) = answered(service, session, ask_of(more))
    tail = "\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
    end = [] if one.landed.done["finish"] == "stop" else [TOKENIZER.eos_token_id]  # type: ignore[index]
    assert list(two.prompt) == [*one.prompt, *one.landed.tokens, *end, *TOKENIZER.encode(tail)]
    other = ask_of(more, chat_template_kwargs={"x": 1})  # another template is another conversation
    assert answered(service, session, other)[0].parent is None
    assert answered(service, Session("other"), ask_of(more))[0].parent is None


def test_clients_that_send_ids_have_trees_too() -> None:
    service, session = Service(ABOUT), Session("s")

    def complete(tokens: list[int]) -> Choice:
        ask = completion_ask({"prompt": tokens, "max_tokens": 9}, "m", ABOUT.vocab_size)
        return answered(service, session, ask)[0]

    one = complete([1, 2, 3])
    two = complete([1, 2, 3, *one.landed.tokens, 7])
    fork = complete([1, 2, 3, *one.landed.tokens, 8])
    cut = complete([1, 2, 3, *one.landed.tokens[:-1], 9, 9])
    assert two.parent is fork.parent is session.turns[0] and cut.parent is None
    assert [[one.trained for one in row] for row in session.rows()] == [
        [False, True, False, True], [False, False, False, True], [False, True]
    ]


CALL = 'One moment. <tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n</tool_call>'


def test_calls_of_tools_go_out_and_come_back() -> None:
    service, session = Service(ABOUT), Session("s")
    first = ask_of([{"role": "user", "content": "a"}], tools=TOOLS, n=2, stream=True)
    one, two = answered(service, session, first, {0: CALL, 1: "no <tool_call>{broken</tool_call>"})
    message, finish = service.said(first, one)
    assert finish == "tool_calls" and message["content"] == "One moment. "
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": 1, "b": "é"}'} and call["type"] == "function"
    assert service.said(first, two)[0]["content"] == "no <tool_call>{broken</tool_call>"
    assert "tool_calls" not in service.said(first, two)[0]
    more = [*first.messages, message_of(service, first, one), {
        "role": "tool", "tool_call_id": call["id"], "content": "3",
    }]
    (after,) = answered(service, session, ask_of(more, tools=TOOLS))
    assert list(after.prompt)[: len(one.prompt) + len(one.landed.tokens)] == [*one.prompt, *one.landed.tokens]
    assert TOKENIZER.decode(after.prompt).endswith("<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n")


def test_a_stream_holds_calls_back() -> None:
    service = Service(ABOUT)
    ask = ask_of([{"role": "user", "content": "a"}], tools=TOOLS, stream=True)
    (choice,) = service.choices(ask)
    tokens, text, calls, ends = TOKENIZER.encode(CALL), "", list[Any](), list[Any]()
    choice.flight = Flight(choice.id)
    for count in range(1, len(tokens) + 1):
        choice.flight.tokens, choice.flight.logprobs = tokens[:count], [-1.0] * count
        if count == len(tokens):
            choice.flight.done = {"text": CALL, "finish": "stop", "version": 4, "digest": "digest"}
        for chunk in service.news(ask, [choice], "id", "chat"):
            (one,) = chunk["choices"]
            text += one["delta"]["content"]
            calls += one["delta"].get("tool_calls", [])
            ends.append(one["finish_reason"])
    assert text == "One moment. " and ends[-1] == "tool_calls" and set(ends[:-1]) == {None}
    assert calls == [{"index": 0, **call} for call in service.said(ask, choice)[0]["tool_calls"]]


def test_calls_in_other_forms() -> None:
    values = "<parameter=a>\n1\n</parameter><parameter=b>\n2\n</parameter>"
    coder = f"<tool_call><function=add>{values}</function></tool_call>"
    text, (call,) = calls_of(coder, "qwen3_coder", TOOLS, 1)
    assert text == "" and call["function"]["arguments"] == '{"a": 1, "b": "2"}'  # by the schema
    text, (call,) = calls_of('{"name": "add", "parameters": {"a": 1}}', "llama3", TOOLS, 1)
    assert text == "" and call["function"]["arguments"] == '{"a": 1}'
    assert calls_of(CALL, "hermes", (), 1) == (CALL, []) and calls_of(CALL, None, TOOLS, 1) == (CALL, [])
    thought = f"<think>{CALL}</think>{CALL}"
    assert calls_of(thought, "hermes", TOOLS, 1)[0] == f"<think>{CALL}</think>One moment. "
    assert form_of(TOKENIZER) == "hermes" and form_of(byte_tokenizer(None)) is None
    (message,) = for_template([{"role": "assistant", "content": "", "tool_calls": [
        {"function": {"name": "f", "arguments": '{"a": [1]}'}}, {"function": {"name": "f", "arguments": "{broken"}}, 3,
    ]}])
    assert [c["function"]["arguments"] for c in message["tool_calls"][:2]] == [{"a": [1]}, "{broken"]


def test_rewards_and_ends() -> None:
    sessions = Sessions(most=2)
    one = sessions.use("a")
    for wrong in (float("nan"), float("inf"), "1", None, True):
        with pytest.raises(Refused, match="finite number"):
            one.set_reward(wrong)
    one.set_reward(0)
    with pytest.raises(Refused, match="has a reward already") as second:
        one.set_reward(1)
    assert second.value.status == 409 and one.reward == 0.0
    sessions.use("b")
    with pytest.raises(Refused, match="2 sessions are open") as full:
        sessions.use("c")
    assert full.value.status == 429
    sessions.use("a").used = -1e9
    sessions.use("b").used = -1e9
    sessions._open["a"].open_requests = 1  # in use, however old
    assert sessions.use("c").id == "c" and len(sessions) == 2
    for gone, status in (("b", 410), ("d", 404)):
        with pytest.raises(Refused) as caught:
            sessions.use(gone, make=False)
        assert caught.value.status == status
    for name in ("", "x" * 201, "a\nb"):
        with pytest.raises(Refused, match="printable"):
            sessions.use(name)
    assert sessions.close("a").reward == 0.0
    with pytest.raises(Refused, match="has ended"):
        sessions.use("a")
