"""Prompts as token ids: by the tokenizer's chat template, or as plain text.

All text of a run and of the API becomes tokens here, in `encode_text`: a plain prompt with the special tokens that the
tokenizer adds (BOS, for some), everything else without.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from jetrl.chat.fields import Message, message_of
from jetrl.chat.template import Template, source_of, tell
from jetrl.config import TaskConfig
from jetrl.errors import UserError, reason, shorten
from jetrl.types import Problem

_DROP = ' (task.overlong_prompts = "drop" leaves out all such rows of the data)'


class OverlongPrompt(UserError):
    """A prompt has more tokens than `task.max_prompt_length`."""


def encode_problem(problem: Problem, tokenizer: Any, config: TaskConfig) -> list[int]:
    """The prompt as token ids: by the chat template with the assistant's turn opened, or as plain text."""
    where = f"Problem {problem.id}"
    if uses_chat_template(config.chat_template, tokenizer):
        messages = chat_messages(problem, config)
        template = Template(tokenizer, config.chat_template_kwargs)
        text = template.prompt(messages, problem.id, config.system_prompt is not None)
        tokens = encode_rendered(text, tokenizer, where)
    else:
        text = _plain_text(problem, config)
        tokens = encode_plain(text, tokenizer, where)
    if len(tokens) > config.max_prompt_length:
        raise OverlongPrompt(
            f"{where}: the prompt has {len(tokens)} tokens, task.max_prompt_length is "
            f"{config.max_prompt_length}. Raise it or leave this problem out{_DROP if config.name == 'file' else ''}; "
            f"prompts are never cut. The prompt begins: {shorten(text)!r}"
        )
    return tokens


def encode_rendered(text: str, tokenizer: Any, where: str) -> list[int]:
    """Token ids of what a chat template wrote. It writes its own special tokens: adding them again would give two of
    the beginning of sequence. Where it writes none, and the tokenizer adds one to plain text, that is reported once."""
    tokens = _not_empty(encode_text(text, tokenizer, where, "prompt"), text, where)
    if (bos := added_bos(tokenizer)) is not None and tokens[0] != bos:
        tell(
            tokenizer, f"{where}: {source_of(tokenizer)} does not begin prompts with {tokenizer.bos_token!r}, which "
            "the tokenizer puts in front of plain text. The policy reads the prompt without it. If the model was "
            "trained with it, put {{ bos_token }} in front of the template.", "bos",
        )
    return tokens


def encode_prompt(tokenizer: Any, name: str, prompt: str | Sequence[Message]) -> list[int]:
    """Token ids of a prompt of the API, as a run makes them: a plain text, or messages by the chat template. `name` is
    the argument, for messages."""
    if isinstance(prompt, str):
        return encode_plain(prompt, tokenizer, name)
    if not uses_chat_template("auto", tokenizer):
        raise UserError(f"{name}: is a list of chat messages, and the tokenizer has no chat template. Give a string.")
    try:
        messages = [message_of(message) for message in prompt]
    except ValueError as error:
        raise UserError(f"{name}: {error}. Write {{'role': 'user', 'content': 'the text'}}.") from error
    return encode_rendered(Template(tokenizer, {}).prompt(messages, name), tokenizer, name)


def encode_plain(text: str, tokenizer: Any, where: str) -> list[int]:
    """Token ids of a plain-text prompt, with the special tokens that the tokenizer adds."""
    tokens = _not_empty(encode_text(text, tokenizer, where, "prompt", add_special_tokens=True), text, where)
    if tokens[-1] == tokenizer.eos_token_id:
        raise UserError(
            f"{where}: the prompt ends in the end-of-sequence token {tokenizer.eos_token!r}, so there is "
            "nothing to complete. Use a tokenizer that does not append it, or remove it from the prompt."
        )
    return tokens


def _not_empty(tokens: list[int], text: str, where: str) -> list[int]:
    if not tokens:
        raise UserError(f"{where}: the prompt {text!r} has no tokens. Remove it or write a prompt.")
    return tokens


def added_bos(tokenizer: Any) -> int | None:
    """The beginning-of-sequence token that the tokenizer puts in front of plain text; None where it adds none."""
    bos = getattr(tokenizer, "bos_token_id", None)
    return bos if bos is not None and encode_text("", tokenizer, "", "", add_special_tokens=True)[:1] == [bos] else None


def opened_text(problem: Problem, tokenizer: Any, config: TaskConfig) -> str | None:
    """What the chat template has written of the policy's turn, such as `<think>`: "" for nothing and for plain text,
    None where it cannot be known."""
    if not uses_chat_template(config.chat_template, tokenizer):
        return ""
    return Template(tokenizer, config.chat_template_kwargs).opened(chat_messages(problem, config))


def prompt_key(problem: Problem) -> str:
    """What makes two prompts the same: the text, or the messages' roles, texts (white space at the ends aside) and
    further values."""
    if isinstance(problem.prompt, str):
        return problem.prompt.strip()
    parts = []
    for message in problem.prompt:
        further = {k: v for k, v in message.items() if k not in ("role", "content")}
        own = [message["role"], message["content"].strip()]
        parts.append([*own, json.dumps(further, sort_keys=True, ensure_ascii=False)] if further else own)
    return json.dumps(parts)


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


def encode_text(text: str, tokenizer: Any, where: str, kind: str, *, add_special_tokens: bool = False) -> list[int]:
    """Token ids of a text. A failure of the tokenizer names the place and what kind of text it was."""
    try:
        return list(tokenizer.encode(text, add_special_tokens=add_special_tokens))
    except Exception as error:  # the tokenizers library raises bare Exception, e.g. for a character without a token
        raise UserError(
            f"{where}: the tokenizer cannot encode the {kind} {shorten(text)!r}: {reason(error)}. Use a tokenizer that "
            f"knows these characters, or change the {kind}."
        ) from error


def decoded(tokenizer: Any, tokens: Sequence[int]) -> str:
    """The text of tokens as the model reads them: special ones included, spaces as they are."""
    return str(tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))


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
            "tokenizer with a chat template (and task.chat_template not false), or make the prompt a string."
        )
    return problem.prompt


