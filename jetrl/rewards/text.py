"""Rewards that compare text or numbers: `exact_match`, `last_integer`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from jetrl.errors import UserError
from jetrl.rewards.function import completion_text

_NUMBER = re.compile(r"(?<![0-9.])-?[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?")
_MAX_NUMBER = 1000  # characters; Python refuses to read integers of more than some thousand digits


def exact_match(completions: Sequence[Any], answer: Sequence[str], **_: Any) -> list[float]:
    """1 where the whole completion is the answer, white space at the ends aside; else 0."""
    return [float(completion_text(c).strip() == a.strip()) for c, a in zip(completions, answer, strict=True)]


def last_integer(completions: Sequence[Any], answer: Sequence[str], **_: Any) -> list[float]:
    """1 where the last number of the completion is the answer, an integer; `1,234` and `1234.0` are 1234."""
    return [float(_last_number(completion_text(c)) == _gold(a)) for c, a in zip(completions, answer, strict=True)]


def _gold(answer: str) -> int:
    try:
        return int(answer.replace(",", ""))
    except ValueError:
        raise UserError(
            f"jetrl.rewards.text:last_integer: the answer {answer!r} is not an integer. Use another reward function."
        ) from None


def _last_number(text: str) -> int | None:
    found = _NUMBER.findall(text)
    if not found:
        return None
    whole, _, fraction = found[-1].replace(",", "").partition(".")
    return int(whole) if not fraction.strip("0") and len(whole) <= _MAX_NUMBER else None
