"""Chat templates of others, rendered within limits: `rendered` is the only caller of `apply_chat_template`.

transformers renders templates in a sandbox, which keeps them from files and from Python, but neither from loops
without end nor from texts that fill the memory. So a template is first rendered in a process of its own, with limits of
time, memory and length. One that passes is rendered in the run itself: there loops end after `MOST_SECONDS`, and the
length is bounded, but a single huge multiplication that comes with later prompts only is not caught.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jetrl.chat import template_child
from jetrl.errors import UserError
from jetrl.user_code.time_limit import TooSlow, time_limit

SECONDS, BYTES = 10, 2 << 30  # CPU time and address space of the trial
MOST_CHARACTERS, MOST_SECONDS = 64 << 20, 60.0  # of one rendered prompt
_MORE = "and as many words as one prompt may have more than another " * 20  # some loop for long texts only
_PATIENCE = 60.0  # seconds until a trial that does not even get CPU time is ended
_CURE = "Use the tokenizer of another model, or correct the template; task.chat_template = false does without."


def rendered(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None = None,
    opened: bool = True,
) -> str:
    """What the tokenizer's chat template writes for the messages, with the assistant's next turn `opened`. UserError
    if it needs too much; errors of the template pass."""
    require_bounded(tokenizer, messages, variables)
    copies = [dict(message) for message in messages]  # a template may change what it gets
    try:
        with time_limit(MOST_SECONDS):
            text = tokenizer.apply_chat_template(
                copies, add_generation_prompt=opened, tokenize=False, **(variables or {})
            )
    except TooSlow:
        raise UserError(f"The tokenizer's chat template does not end within {MOST_SECONDS:g} s. {_CURE}") from None
    except MemoryError:
        raise UserError(f"The tokenizer's chat template needs more memory than is free. {_CURE}") from None
    if len(text) > MOST_CHARACTERS:
        raise UserError(f"The tokenizer's chat template writes {len(text):,} characters for one prompt. {_CURE}")
    return text


def require_bounded(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None = None
) -> None:
    """UserError if the tokenizer's template needs too much for these messages, or for a conversation that begins with
    them. Each template of a process is tried once."""
    found = getattr(tokenizer, "chat_template", None)
    templates = tuple(found.values()) if isinstance(found, Mapping) else (found,)
    for template in templates:
        if isinstance(template, str) and template not in _PASSED:
            special = getattr(tokenizer, "special_tokens_map", None) or {}
            known = {key: value for key, value in special.items() if isinstance(value, str)}
            _try(template, list(messages), known | dict(variables or {}))
            _PASSED.add(template)


_PASSED: set[str] = set()


def _try(template: str, messages: list[Mapping[str, Any]], variables: Mapping[str, Any]) -> None:
    turn = [{"role": "assistant", "content": "a"}]
    later = [[*messages, *turn, {"role": role, "content": "b"}] for role in ("user", "tool")]
    longer = [{**message, "content": f"{message.get('content', '')} {_MORE}"} for message in messages]
    given = json.dumps({
        "template": template, "conversations": [messages, *later, longer], "variables": variables, "seconds": SECONDS,
        "bytes": BYTES, "length": MOST_CHARACTERS,
    }, default=str)
    program = [sys.executable, "-P", str(Path(template_child.__file__))]
    try:
        status = subprocess.run(
            program, input=given.encode(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=_PATIENCE,
            check=False,
        ).returncode
    except subprocess.TimeoutExpired:
        status = template_child.TIME
    why = {
        template_child.MEMORY: f"needs more than {BYTES >> 30} GiB of memory",
        template_child.LENGTH: f"writes more than {MOST_CHARACTERS:,} characters",
        template_child.TIME: f"does not end within {_PATIENCE:.0f} s",
        -getattr(signal, "SIGXCPU", 0): f"does not end within {SECONDS} s",
        -getattr(signal, "SIGKILL", 0): f"does not end within {SECONDS} s, or was ended for its memory",
    }
    if status not in (0, 1):
        reason = why.get(status, f"ends the program that renders it (status {status})")
        raise UserError(f"The tokenizer's chat template {reason} for a first prompt. {_CURE}")
