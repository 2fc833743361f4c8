"""Chat templates of others: time, memory and length are tried in a process of its own."""

from __future__ import annotations

import ast
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from jetrl.errors import UserError
from jetrl.tasks import template_child, template_trial
from jetrl.tasks.prompts import render
from jetrl.tasks.template_trial import require_bounded, require_length

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
        render(MESSAGES, tokenizer({"default": template}), "p/1")  # nothing was kept, and several are tried each


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


def test_length_of_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_trial, "MOST_CHARACTERS", 5)
    assert require_length("12345") == "12345"
    with pytest.raises(UserError, match="writes 6 characters for one prompt"):
        require_length("123456")


def test_no_template_is_rendered_without_a_trial() -> None:
    """Whatever function calls transformers' `apply_chat_template` calls `require_bounded` before, and checks the
    length."""
    found = 0
    for path in Path(template_child.__file__).parents[1].rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and ".apply_chat_template(" in (text := ast.unparse(node)):
                found += 1
                assert "require_bounded(" in text and "require_length(" in text, f"{path}: {node.name}"
    assert found
