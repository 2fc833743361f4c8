"""A program of its own: renders a chat template of others within limits, and ends with a status that says how it went.

`chat/template_trial.py` starts it. It imports the standard library and jinja2 only, so that it takes a tenth of a
second. Standard input: JSON with `template`, `conversations` (lists of messages), `variables` and the limits.
"""

from __future__ import annotations

import json
import sys
from typing import Any

MEMORY, LENGTH, TIME = 3, 4, 5  # statuses; 0 and 1 (an error here) leave what there is to tell to the real rendering
_OF_TEMPLATES = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


class TooLong(Exception):
    """A template has written more than a prompt may have."""


def main() -> int:
    """Render each conversation; the first limit that is met decides."""
    from jinja2 import TemplateError

    given = json.load(sys.stdin)
    _limit(given["seconds"], given["bytes"])
    for messages in given["conversations"]:
        try:
            _render(given["template"], messages, given["variables"], given["length"])
        except MemoryError:
            return MEMORY
        except TooLong:
            return LENGTH
        except (*_OF_TEMPLATES, TemplateError):
            continue
    return 0


def _limit(seconds: int, size: int) -> None:
    try:
        import resource
    except ImportError:  # not a Unix: the time limit of the parent remains
        return
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _render(template: str, messages: Any, variables: Any, most: int) -> None:
    """As transformers does it: the same kind of environment, names and filters."""
    from jinja2 import ext, sandbox

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[ext.loopcontrols]
    )

    def fail(message: str) -> None:
        raise ValueError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, **_: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)

    environment.filters["tojson"] = tojson
    environment.globals.update(raise_exception=fail, strftime_now=lambda form: form)
    source = template.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    length = 0
    pieces = environment.from_string(source).generate(messages=messages, add_generation_prompt=True, **variables)
    for piece in pieces:
        length += len(piece)
        if length > most:
            raise TooLong


if __name__ == "__main__":
    sys.exit(main())
