"""Sums made on the fly, with worked solutions: the task of the tutorials. A model of a million weights can learn it.

Compact style, for `builtin:arithmetic`: `348+275=` is answered by one column a step from the right, each with the
carry that came in and a two-digit sum, and the answer after `#`:

    8+5+0=13;4+7+1=12;3+2+1=06#623

Columns have a fixed width, so that the model finds what it copies at a fixed distance. The warm start's teacher may
be one that forgets carries (`forget_carry`): imitation then learns the mistake too, and RL has something to unlearn.
For the environment `calculator`, a share of the worked solutions (`use_tool`) are conversations that call it:
`<348+275>`, its reply `=623.`, and `#623`.
Question style, for models that read English, asks in words and takes the last number of the reply.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

from jetrl.chat.tokenizer import is_arithmetic
from jetrl.environments.calculator import calculate
from jetrl.errors import UserError
from jetrl.hashing import stable_hash
from jetrl.rewards.function import RewardFunction, completion_text
from jetrl.rewards.text import last_integer
from jetrl.tasks.protocol import check_params, gold_params
from jetrl.types import Author, Problem

MAX_DIGITS = 18
HELD_OUT_SHARE = 16  # one pair of operands in this many is held out
STYLES = ("auto", "compact", "question")


class AdditionTask:
    """Two numbers with the same number of digits. `digits`: the lengths, equally often; `style`: how it is asked.

    `forget_carry`: share of the carries that the worked solutions (compact style) leave out; their sums are wrong then.
    `use_tool`: share of the sums whose worked solution asks the calculator instead; these are right.
    """

    name = "addition"

    def __init__(self, params: Mapping[str, Any], seed: int, tokenizer: Any) -> None:
        check_params(self.name, params, ("digits", "style", "forget_carry", "use_tool", "gold_template", "check_gold"))
        self.digits = _digits(params.get("digits", [2, 3]))
        self.seed = seed
        self.gold_template, self.check_gold = gold_params(params)
        style = params.get("style", "auto")
        if style not in STYLES:
            raise UserError(f"task.params.style: must be one of {', '.join(STYLES)}, got {style!r}.")
        self.style = ("compact" if is_arithmetic(tokenizer) else "question") if style == "auto" else style
        self.forget_carry = share(params, "forget_carry", self.style)
        self.use_tool = share(params, "use_tool", self.style)
        if self.forget_carry and self.gold_template is None:
            self.gold_template = "#{answer}"  # the worked solutions are not gold texts then
        self.reward: RewardFunction = compact_reward if self.style == "compact" else last_integer

    def problem(self, index: int) -> Problem:
        """Sum number `index` of the training stream; pairs that are held out are drawn again."""
        for attempt in itertools.count():
            a, b = self._draw("train", self.seed, index, attempt)
            if not is_held_out(a, b):
                return self._make(a, b)
        raise AssertionError("unreachable")

    def eval_problems(self, n: int) -> list[Problem]:
        """The first `n` distinct held-out sums; they do not depend on the seed."""
        found: dict[tuple[int, int], None] = {}
        misses = 0
        for index in itertools.count():
            if len(found) == n:
                break
            pair = self._draw("eval", index)
            if is_held_out(*pair) and pair not in found:
                found[pair], misses = None, 0
            else:
                misses += 1
            if misses == 20_000:
                raise UserError(
                    f"task.num_eval: {n} held-out sums are needed, but with digits = {list(self.digits)} there are "
                    f"only {len(found)}. Lower task.num_eval or use more digits."
                )
        return [self._make(a, b) for a, b in found]

    def describe(self) -> str:
        """What is trained on and held out."""
        return (
            f"addition of numbers with {' or '.join(map(str, self.digits))} digits ({self.style} style); one pair of "
            f"numbers in {HELD_OUT_SHARE}, chosen by hash, is held out"
        )

    def _draw(self, *key: object) -> tuple[int, int]:
        source = random.Random(stable_hash("addition", self.digits, *key))
        num_digits = self.digits[source.randrange(len(self.digits))]
        low = 10 ** (num_digits - 1) if num_digits > 1 else 0
        return source.randrange(low, 10**num_digits), source.randrange(low, 10**num_digits)

    def _make(self, a: int, b: int) -> Problem:
        if self.style == "compact":
            by_tool = uses_tool(a, b, self.use_tool)
            solution = tool_solution(a, b) if by_tool else worked_solution(a, b, self.forget_carry)
            return Problem(id=f"{a}+{b}", prompt=f"{a}+{b}=", answer=str(a + b), solution=solution)
        question = f"What is {a} + {b}? Work step by step, and end your reply with the sum."
        return Problem(id=f"{a}+{b}", prompt=question, answer=str(a + b), solution=f"{a} + {b} = {a + b}")


def worked_solution(a: int, b: int, forget_carry: float = 0.0) -> str:
    """Column by column from the right, `x+y+carry=two digits`, then `#` and the sum.

    Each carry is forgotten with probability `forget_carry` (a function of a and b: each sum has one solution).
    """
    teacher = random.Random(stable_hash("teacher", a, b))
    steps, written, carry, total = [], "", 0, 0
    for x, y in itertools.zip_longest(reversed(str(a)), reversed(str(b)), fillvalue="0"):
        carry = 0 if teacher.random() < forget_carry else carry
        total = int(x) + int(y) + carry
        steps.append(f"{x}+{y}+{carry}={total:02d}")
        written = str(total % 10) + written
        carry = total // 10
    return ";".join(steps) + "#" + (str(carry) if carry else "") + written


def tool_solution(a: int, b: int) -> tuple[tuple[Author, str], ...]:
    """The turns of a conversation with the environment `calculator`: a call, its reply, the answer."""
    call = f"<{a}+{b}>"
    return (("policy", call), ("environment", calculate(call)), ("policy", f"#{a + b}"))


def uses_tool(a: int, b: int, share: float) -> bool:
    """Whether the teacher asks the calculator for this sum: a given share of all sums, always the same ones."""
    return random.Random(stable_hash("tool", a, b)).random() < share


def is_held_out(a: int, b: int) -> bool:
    """Whether the pair is held out, in either order and whatever the seed."""
    return stable_hash("held out", min(a, b), max(a, b)) % HELD_OUT_SHARE == 0


def compact_reward(completions: Sequence[Any], answer: Sequence[str], **_: Any) -> list[float]:
    """1 where the text after the last `#` is the answer, to the character; else 0."""
    return [float(_behind_hash(completion_text(c)) == a) for c, a in zip(completions, answer, strict=True)]


def _behind_hash(text: str) -> str | None:
    _, mark, rest = text.rpartition("#")
    return rest if mark else None


def share(params: Mapping[str, Any], key: str, style: str) -> float:
    """A param of worked solutions, such as the share of carries that they forget."""
    value = params.get(key, 0.0)
    limit = "to below 1" if key == "forget_carry" else "to 1"
    if type(value) not in (int, float) or not 0 <= value <= 1 or (key == "forget_carry" and value == 1):
        raise UserError(f"task.params.{key}: must be a number from 0 {limit}, got {value!r}.")
    if value and style != "compact":
        what = "forget a carry" if key == "forget_carry" else "call the calculator"
        raise UserError(f'task.params.{key}: only worked solutions of style "compact" can {what}.')
    return float(value)


def _digits(value: Any) -> tuple[int, ...]:
    good = isinstance(value, (list, tuple)) and len(value) > 0
    if not good or any(type(d) is not int or not 1 <= d <= MAX_DIGITS for d in value):
        raise UserError(f"task.params.digits: must be a list of lengths from 1 to {MAX_DIGITS}, got {value!r}.")
    return tuple(value)
