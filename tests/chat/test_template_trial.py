"""Chat templates of others: time, memory and length are tried in a process of its own."""

from __future__ import annotations

import ast
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from jetrl.chat import template_child, template_trial
from jetrl.chat.template import Template
from jetrl.chat.template_trial import rendered, require_bounded
from jetrl.errors import UserError
from jetrl.user_code import time_limit

MESSAGES = [{"role": "user", "content": "hi"}]
GOOD = "{% for m in messages %}{{ m.role }}: {{ m.content | tojson }}{% endfor %}{{ eos_token }}"
MANY = "{% for i in range(99999) %}"
LOOPS = MANY * 3 + "{% endfor %}" * 3
BAD = {
    "loops": LOOPS,
    "writes": MANY * 2 + "x" * 99 + "{% endfor %}" * 2,
    "constant": "{{ 'a' * 5000000000 }}",
    "computed": "{{ messages[0].content * 5000000000 }}",
    "format": "{{ '%5000000000d' | format(1) }}",
    "doubles": "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "later": "{% if messages | length > 1 %}" + LOOPS + "{% endif %}",
    "longer": "{% if messages[0].content | length > 9 %}" + LOOPS + "{% endif %}",
    "power": "{{ 99 ** (99 ** 99) }}",
    "in_a_macro": "{% macro f() %}" + LOOPS + "{% endmacro %}{{ f() }}",
}
TOLD = "does not end within 1 s|needs more than 2 GiB|writes more than"


def tokenizer(template: object) -> SimpleNamespace:
    return SimpleNamespace(chat_template=template, special_tokens_map={"eos_token": "<eos>"})


@pytest.mark.parametrize("name", BAD)
def test_templates_that_need_too_much_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_trial, "SECONDS", 1)
    template = BAD[name]
    with pytest.raises(UserError, match=rf"chat template ({TOLD}).*for a first prompt. Use the tokenizer of another"):
        require_bounded(tokenizer(template), MESSAGES)
    with pytest.raises(UserError, match="chat template"):
        # nothing was kept, and several are tried each
        Template(tokenizer({"default": template}), {}).render(MESSAGES, "p/1")


@pytest.mark.parametrize("template", [
    GOOD, "{{ raise_exception('no') }}", "{{ broken", "{{ messages[0].__class__ }}", None,
    "{% generation %}{{ strftime_now('%Y') }}{% endgeneration %}{% break %}",
])
def test_what_a_template_does_wrong_is_left_to_its_rendering(template: str | None) -> None:
    require_bounded(tokenizer(template), MESSAGES, {"enable_thinking": False})


def test_a_template_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    template = GOOD + "tried once"
    started = time.perf_counter()
    require_bounded(tokenizer(template), MESSAGES)
    assert time.perf_counter() - started < 20
    monkeypatch.setattr(template_trial, "_try", None)
    started = time.perf_counter()
    for _ in range(1000):
        require_bounded(tokenizer(template), MESSAGES)
    assert time.perf_counter() - started < 0.5, "some microseconds for each prompt"


class Hungry(SimpleNamespace):
    """A tokenizer whose template passes the trial and fails on what is not the data's: on markers, other roles, ..."""

    def apply_chat_template(self, messages: list[dict[str, str]], **variables: object) -> str:
        if messages == MESSAGES and not variables.get("enable_thinking"):
            return "hi"
        if self.kind is MemoryError:
            raise MemoryError
        while True:
            pass


@pytest.mark.parametrize("kind", [MemoryError, TimeoutError], ids=["memory", "time"])
@pytest.mark.parametrize("call", ["prompt", "opened", "reply", "render"])
def test_a_limit_that_a_check_meets_ends_the_run_at_once(
    kind: type[Exception], call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One limit of time, not one for each check; and a message that says what it was."""
    monkeypatch.setattr(template_trial, "MOST_SECONDS", 0.2)
    template = Template(Hungry(chat_template=GOOD, kind=kind), {"enable_thinking": False})
    calls = {
        "prompt": lambda: template.prompt(MESSAGES, "p/1"), "opened": lambda: template.opened(MESSAGES),
        "reply": lambda: template.reply(MESSAGES, MESSAGES, "p/1"),
        "render": lambda: template.render([*MESSAGES, *MESSAGES], "p/1"),
    }
    started = time.perf_counter()
    with pytest.raises(UserError, match="chat template (does not end within 0.2 s|needs more memory than is)"):
        calls[call]()
    assert time.perf_counter() - started < 3.0


def test_an_error_without_a_text_is_named_by_its_kind() -> None:
    def fails(*_: object, **__: object) -> str:
        raise KeyError

    broken = SimpleNamespace(chat_template=GOOD, apply_chat_template=fails)
    with pytest.raises(UserError, match=r"fails on messages with roles \['user'\]: KeyError$"):
        Template(broken, {}).render(MESSAGES, "p/1")


class Late(SimpleNamespace):
    """A tokenizer whose template passes the trial, and writes or loops afterwards."""

    def apply_chat_template(self, *_: object, **__: object) -> str:
        end = time.monotonic() + self.seconds
        while time.monotonic() < end:
            pass
        return "x" * self.length


def late(seconds: float = 0.0, length: int = 5) -> Late:
    return Late(chat_template=GOOD, seconds=seconds, length=length)


def test_prompts_of_the_run_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the main thread and in others, as environments have them; what follows is not touched."""
    monkeypatch.setattr(template_trial, "MOST_CHARACTERS", 5)
    monkeypatch.setattr(template_trial, "MOST_SECONDS", 0.2)
    assert rendered(late(), MESSAGES) == "xxxxx"
    with pytest.raises(UserError, match="writes 6 characters for one prompt"):
        rendered(late(length=6), MESSAGES)
    with pytest.raises(UserError, match=r"Problem p/1: .* does not end within 0.2 s. Use the tokenizer"):
        Template(late(seconds=30.0), {}).render(MESSAGES, "p/1")
    with ThreadPoolExecutor(4) as pool:
        found = [pool.submit(rendered, late(seconds), MESSAGES) for seconds in (30.0, 0.0, 30.0, 0.0)]
        assert [type(one.exception()) for one in found] == [UserError, type(None)] * 2
        assert list(pool.map(lambda _: rendered(late(), MESSAGES), range(50))) == ["xxxxx"] * 50


def test_a_limit_ends_with_its_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is late at the very end raises nothing afterwards."""
    monkeypatch.setattr(time_limit, "_PERIOD", 0.01)
    raised = 0
    for _ in range(30):
        try:
            with time_limit.time_limit(0.02):
                end = time.monotonic() + 0.03
                while time.monotonic() < end:
                    pass
        except time_limit.TooSlow:
            raised += 1
    for _ in range(10_000):
        pass
    assert raised
    assert not time_limit._WATCH.deadlines
    started = time.perf_counter()
    for _ in range(10_000):
        with time_limit.time_limit(60.0):
            pass
    assert time.perf_counter() - started < 1.0, "some microseconds for each prompt"


def test_no_template_is_rendered_elsewhere() -> None:
    found = [
        (path.name, node.name)
        for path in Path(template_child.__file__).parents[1].rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and ".apply_chat_template(" in ast.unparse(node)
    ]
    assert found == [("template_trial.py", "rendered")]
