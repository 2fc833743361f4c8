"""Messages name ways of the command line, such as --resume. To a program they name the arguments of `jetrl.Trainer`.

One table for all messages: what raises one need not know who called. tests/test_phrases.py looks for options that a
message names and the table lacks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from jetrl.errors import UserError

# In whole commands, such as `jetrl train RECIPE --dry-run`, options stay as they are.
_COMMANDS = re.compile(r"`jetrl [^`]*`")
IN_PYTHON = (
    (re.compile(r"; --debug shows the whole\s+traceback"), ""),  # Python shows the cause itself
    (re.compile(r"leave out --resume\b"), "leave out resume"),
    (re.compile(r"--resume\b"), "resume=True"),
    (re.compile(r"\bcheckpoint\.resume=auto\b"), 'resume="auto"'),
    (re.compile(r"\bResume with the run's own config\.toml\b"), "Resume from the run folder, with the same objects"),
    (re.compile(r"\bchoose another name=\.\.\."), "choose another run_dir"),
    (re.compile(r"\bchoose another output_dir\b", re.IGNORECASE), "choose another run_dir"),
    (re.compile(r"--nproc (\d+)"), r"torchrun --nproc-per-node \1"),
    (re.compile(r"--nproc(?![\w-])"), "torchrun"),
    (re.compile(r"--dry-run device=cpu"), "`jetrl train RECIPE --dry-run device=cpu`"),
)


def some(names: list[str]) -> str:
    """The first of many names, as text."""
    shown = ", ".join(names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"


def in_python(text: str) -> str:
    """A message of the command line, as a program should read it."""
    commands = _COMMANDS.findall(text)
    parts = _COMMANDS.split(text)
    for pattern, words in IN_PYTHON:
        parts = [pattern.sub(words, part) for part in parts]
    return "".join(part + command for part, command in zip(parts, [*commands, ""], strict=True))


@contextmanager
def for_python() -> Iterator[None]:
    """Mistakes that leave this context name what a program can do."""
    try:
        yield
    except UserError as error:
        error.args = (in_python(str(error)), *error.args[1:])
        raise
