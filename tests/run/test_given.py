"""Given answers as trajectories: what is learned of a conversation, by the chat template and as plain text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from byte_tokenizer import byte_tokenizer
from tiny import tiny_config

from jetrl.chat.prompts import OverlongPrompt, decoded
from jetrl.errors import UserError
from jetrl.run.given import GivenAnswers
from jetrl.tasks.given_rows import given_answer
from jetrl.types import Problem

# Writes only the last turn's thinking, as many templates do: an earlier rendering is no prefix of a later one.
THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def given(folder: Path, template: str | None = None, **changes: Any) -> GivenAnswers:
    config = tiny_config(folder, {
        "method": "sft", "rollout": {}, "task.max_prompt_length": None, "task.reward": None,
        "train.max_length": 60 if template is None else 400, "train.max_tokens_per_gpu": 400,
    } | changes)
    if template is None:
        from jetrl.chat.tokenizer import load_tokenizer

        tokenizer = load_tokenizer("builtin:arithmetic", None)
    else:
        tokenizer = byte_tokenizer(template or byte_tokenizer().chat_template)
    return GivenAnswers(config, tokenizer, frozenset({tokenizer.eos_token_id}))


def chat(*turns: tuple[str, str], **more: Any) -> Problem:
    row = {"messages": [{"role": role, "content": text} for role, text in turns]} | more
    found = given_answer(row, "row 1", "messages", "prompt", False)
    assert found is not None
    return found


def shown(answers: GivenAnswers, problem: Problem) -> str:
    """The text, with what is learned in brackets."""
    parts = answers.trajectory(problem).segments
    texts = [(one.author, decoded(answers.tokenizer, one.tokens.tolist())) for one in parts]
    return "".join(f"[{text}]" if author == "policy" else text for author, text in texts)


TALK = (("system", "S"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
START, END = "<|im_start|>", "<|im_end|>"
OPEN = f"{START}system\nS{END}\n{START}user\na{END}\n{START}assistant\n"
NEXT = f"\n{START}user\nc{END}\n{START}assistant\n"


@pytest.mark.parametrize(("on", "expected"), [
    ("assistant", f"{OPEN}[b{END}]{NEXT}[d{END}]"),
    ("last", f"{OPEN}b{END}{NEXT}[d{END}]"),
    ("all", f"{START}[{OPEN.removeprefix(START)}b{END}{NEXT}d{END}]"),
])
def test_what_is_learned_of_a_conversation(tmp_path: Path, on: str, expected: str):
    answers = given(tmp_path, "", **{"task.train_on": on})
    assert shown(answers, chat(*TALK)) == expected


def test_a_turn_of_weight_0_is_read_and_not_learned(tmp_path: Path):
    messages: list[dict[str, Any]] = [{"role": role, "content": text} for role, text in TALK]
    messages[2]["weight"] = 0
    weighed = given_answer({"messages": messages}, "row 1", "messages", "prompt", False)
    assert weighed is not None
    assert shown(given(tmp_path, ""), weighed) == f"{OPEN}b{END}{NEXT}[d{END}]"


def test_without_a_chat_template_messages_are_plain_text_and_turns_end_in_eos(tmp_path: Path):
    answers = given(tmp_path)
    problem = chat(("user", "1+2="), ("assistant", "3"), ("user", "4+5="), ("assistant", "9"))
    end = decoded(answers.tokenizer, [answers.tokenizer.eos_token_id])
    assert shown(answers, problem) == f"1+2=[3{end}]4+5=[9{end}]"


def test_a_template_that_changes_earlier_turns_changes_nothing_that_was_said(tmp_path: Path):
    """No rendering of THINKS is a prefix of the next one; each turn is learned as the policy would have drawn it."""
    talk = (("user", "a"), ("assistant", "<think>x</think>b"), ("user", "c"), ("assistant", "<think>y</think>d"))
    opened = f"{START}user\na{END}\n{START}assistant\n"
    text = shown(given(tmp_path, THINKS), chat(*talk))
    assert text == f"{opened}[<think>x</think>b{END}]{NEXT}[<think>y</think>d{END}]"


def test_tools_of_a_row_reach_the_chat_template(tmp_path: Path):
    answers = given(tmp_path, "")
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    plain, with_tools = chat(("user", "a"), ("assistant", "b")), chat(("user", "a"), ("assistant", "b"), tools=tools)
    assert '"add"' in shown(answers, with_tools) and '"add"' not in shown(answers, plain)
    assert shown(answers, chat(("user", "a"), ("assistant", "b"), tools='[{"name": "sub"}]')).count('"sub"') == 1


def test_too_long_and_nothing_to_learn_are_told_in_one_message(tmp_path: Path):
    answers = given(tmp_path)
    problem = Problem("row 7", "1+2=", "", "3" * 80)
    with pytest.raises(OverlongPrompt, match=r"row 7: the conversation has 85 tokens, and train.max_length is 60"):
        answers.trajectory(problem)
    with pytest.raises(UserError, match="row 7 has no answer to learn"):
        answers.trajectory(replace(problem, solution=None))
    last = given(tmp_path, "", **{"task.train_on": "last"})
    row = {"messages": [
        {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d", "weight": 0},
    ]}
    weighed = given_answer(row, "row 1", "messages", "prompt", False)
    assert weighed is not None
    with pytest.raises(UserError, match=r'nothing is left to learn: its last turn has weight 0, and task.train_on'):
        last.trajectory(weighed)
