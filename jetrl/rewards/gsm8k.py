r"""The reward for answers that are one number, as GSM8K's: a `\boxed{}`, a `#### 72`, or the last number of the text.

GSM8K's column `answer` holds a worked solution that ends in `#### 72`; what follows the sign is the answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from jetrl.errors import UserError, shorten
from jetrl.rewards.function import completion_text

MARK = "####"
# A number with its sign, dollar sign and thousands commas. A minus after a digit, a letter or a bracket is a
# difference, and one before a space is a bullet.
_NUMBER = re.compile(
    r"(?<![\w.])(?:(?<![)\]}])[-\u2212])?(?:\\?\$\s?[-\u2212]?)?(?:\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)"
)
_BOX = "\\boxed{"


def gsm8k_reward(completions: Sequence[Any], answer: Sequence[str], **_: Any) -> list[float]:
    """1 where the completion's number equals that of the answer, else 0; without a number in it, 0.

    `1,234`, `$1,234.00` and `1234.` are the same number; 0.5 and 1/2 are not.
    """
    return [float(final_number(completion_text(c)) == _gold(a)) for c, a in zip(completions, answer, strict=True)]


def gold_answer(answer: str) -> str:
    """What follows the last `####` of a GSM8K answer, without thousands commas; another answer as it is."""
    _, mark, last = answer.rpartition(MARK)
    if not mark:
        return answer
    last = last.strip()
    return last.replace(",", "") if _NUMBER.fullmatch(last) else last


gsm8k_reward.gold_template = "#### {answer}"  # type: ignore[attr-defined]  # both are read by rewards.gold_text
gsm8k_reward.gold_answer = gold_answer  # type: ignore[attr-defined]


def final_number(text: str) -> str | None:
    """The number that a text ends in, in plain digits: in its last box, else after its last `####`, else the last."""
    if (start := text.rfind(_BOX)) >= 0:
        found = _NUMBER.findall(_in_braces(text, start + len(_BOX)))
    elif MARK in text:
        found = _NUMBER.findall(text.rpartition(MARK)[2])[:1]
    else:
        found = _NUMBER.findall(text)
    return _plain(found[-1]) if found else None


def _in_braces(text: str, start: int) -> str:
    """The text between an open brace and the one that closes it; if none does, the rest."""
    depth = 1
    for end in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if not depth:
            return text[start:end]
    return text[start:]


def _plain(number: str) -> str:
    """`-$1,234.50` -> `-1234.5`; zero has no sign."""
    whole, _, fraction = re.sub(r"[^\d.]", "", number).partition(".")
    digits = whole.lstrip("0") or "0"
    fraction = fraction.rstrip("0")
    value = f"{digits}.{fraction}" if fraction else digits
    return f"-{value}" if re.search("[-\u2212]", number) and value != "0" else value


def _gold(answer: str) -> str:
    if (number := final_number(gold_answer(answer))) is None:
        raise UserError(
            f"jetrl.rewards.gsm8k:gsm8k_reward: the answer {shorten(answer)!r} holds no number. Use another reward "
            "function, or leave this row out."
        )
    return number
