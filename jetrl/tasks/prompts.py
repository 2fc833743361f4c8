"""Prompts as token ids: by the tokenizer's chat template, or as plain text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jetrl.config import TaskConfig
from jetrl.errors import UserError
from jetrl.tasks.protocol import shorten
from jetrl.tasks.template_trial import rendered
from jetrl.types import Problem

Message = Mapping[str, str]  # role and content, as chat templates read them

_DROP = ' (task.overlong_prompts = "drop" leaves out all such rows of the data)'


class OverlongPrompt(UserError):
    """A prompt has more tokens than `task.max_prompt_length`."""


def encode_problem(problem: Problem, tokenizer: Any, config: TaskConfig) -> list[int]:
    """The prompt as token ids: by the chat template with the assistant's turn opened, or as plain text."""
    chat = uses_chat_template(config.chat_template, tokenizer)
    if chat:
        text = render(chat_messages(problem, config), tokenizer, problem.id, config.chat_template_kwargs)
    else:
        text = _plain_text(problem, config)
    # A template writes its own special tokens; adding them again would give two of the beginning of sequence.
    tokens = encode_text(text, tokenizer, f"Problem {problem.id}", "prompt", add_special_tokens=not chat)
    if not tokens:
        raise UserError(f"Problem {problem.id}: the prompt {text!r} has no tokens. Remove it or write a prompt.")
    if not chat and tokens[-1] == tokenizer.eos_token_id:
        raise UserError(
            f"Problem {problem.id}: the prompt ends in the end-of-sequence token {tokenizer.eos_token!r}, so there is "
            "nothing to complete. Use a tokenizer that does not append it, or remove it from the prompt."
        )
    if len(tokens) > config.max_prompt_length:
        raise OverlongPrompt(
            f"Problem {problem.id}: the prompt has {len(tokens)} tokens, task.max_prompt_length is "
            f"{config.max_prompt_length}. Raise it or leave this problem out{_DROP if config.name == 'file' else ''}; "
            f"prompts are never cut. The prompt begins: {shorten(text)!r}"
        )
    return tokens


def prompt_key(problem: Problem) -> str:
    """What makes two prompts the same: the text, or the messages' roles and texts; white space at the ends aside."""
    if isinstance(problem.prompt, str):
        return problem.prompt.strip()
    return json.dumps([[m["role"], m["content"].strip()] for m in problem.prompt])


def uses_chat_template(setting: bool | str, tokenizer: Any) -> bool:
    """What `task.chat_template` means for this tokenizer: "auto" is true where it has a template."""
    present = getattr(tokenizer, "chat_template", None) is not None
    if setting is True and not present:
        raise UserError(
            "task.chat_template = true, but the tokenizer has no chat template. Use a chat model's tokenizer, or set "
            "task.chat_template = false for plain text."
        )
    return present if setting == "auto" else bool(setting)


def chat_messages(problem: Problem, config: TaskConfig) -> list[Message]:
    """The prompt as chat messages, after `task.system_prompt` where one is set."""
    prompt = problem.prompt
    messages: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if config.system_prompt is not None:
        if messages[0]["role"] == "system":
            raise UserError(
                f"Problem {problem.id}: it has a system message of its own, and task.system_prompt is set too. "
                "Remove one of the two."
            )
        messages.insert(0, {"role": "system", "content": config.system_prompt})
    return messages


def render(
    messages: Sequence[Message], tokenizer: Any, problem_id: str, variables: Mapping[str, Any] | None = None
) -> str:
    """What the chat template writes for the messages, with the assistant's next turn opened. It sees `variables`, as in
    `enable_thinking = false`; one that it does not read changes nothing."""
    try:
        return rendered(tokenizer, messages, variables)
    except UserError as error:
        raise UserError(f"Problem {problem_id}: {error}") from error
    except Exception as error:  # jinja's errors: templates raise their own for roles that they do not know
        roles = [m["role"] for m in messages]
        raise UserError(
            f"Problem {problem_id}: the tokenizer's chat template fails on messages with roles {roles}: {error}"
        ) from error


def encode_text(text: str, tokenizer: Any, where: str, kind: str, *, add_special_tokens: bool = False) -> list[int]:
    """Token ids of a text. A failure of the tokenizer names the place and what kind of text it was."""
    try:
        return list(tokenizer.encode(text, add_special_tokens=add_special_tokens))
    except Exception as error:  # the tokenizers library raises bare Exception, e.g. for a character without a token
        raise UserError(
            f"{where}: the tokenizer cannot encode the {kind} {shorten(text)!r}: {error}. Use a tokenizer that knows "
            f"these characters, or change the {kind}."
        ) from error


def _plain_text(problem: Problem, config: TaskConfig) -> str:
    for key in ("system_prompt", "chat_template_kwargs"):
        if getattr(config, key):
            raise UserError(
                f"task.{key} has no effect on plain-text prompts, and no chat template is in use. Remove it, or use a "
                "tokenizer with a chat template."
            )
    if not isinstance(problem.prompt, str):
        raise UserError(
            f"Problem {problem.id}: the prompt is a list of chat messages, but no chat template is in use. Use a "
            "tokenizer with a chat template (and task.chat_template not false), or make the prompt a text."
        )
    return problem.prompt


