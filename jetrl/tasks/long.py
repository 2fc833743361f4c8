"""Tasks that are long by nature, made on the fly with worked solutions: the answer must write every step.

| task | compact prompt | worked solution |
|---|---|---|
| `chain` (many-step arithmetic) | `17+5-3=` | `17+5=22;22-3=19#19` |
| `sorting` (insertion sort) | `41,08,93?` | `41;08,41;08,41,93#08,41,93` |
| `tracking` (a row of cells, swaps of two) | `12345:13,24?` | `32145;34125#34125` |
| `recurrence` (rounds of times a, plus the round, modulo 1000) | `623*7:2?` | `623*7=361+1=362;362*7=534+2=536#536` |

The answer stands after `#`; the steps before it are separated by `;`. How long a problem is says `steps` (operations,
numbers, swaps, rounds), or `tokens`, the length of the worked solution with the run's tokenizer: 1024, 4096, 8192.
Sorting is short to ask and long to answer, as its solution grows with the square of the numbers. A recurrence is
shorter still to ask, and each step follows from the one before it: what it takes is not to fail in any of hundreds of
steps.

Compact style is for `builtin:arithmetic`. Question style, for models that read English, asks for the same answer in
words. Values stay small (chain: 0 to 99), so that the difficulty is the length and not the arithmetic.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from jetrl.chat.tokenizer import is_arithmetic
from jetrl.errors import UserError
from jetrl.hashing import stable_hash
from jetrl.rewards.function import RewardFunction, completion_text
from jetrl.tasks.addition import share
from jetrl.tasks.protocol import check_params, gold_params
from jetrl.types import Problem

HELD_OUT_SHARE = 16  # one problem in this many is held out
CELLS = 5  # of tracking
FACTORS = (3, 7, 9, 11, 13, 17, 19)  # of a recurrence: none has a factor in common with 1000
MAX_STEPS = 4096
STYLES, CREDITS = ("auto", "compact", "question"), ("answer", "steps")


@dataclass(frozen=True, slots=True)
class Drawn:
    """A problem in both styles. `steps` are what the right solution writes before the answer; `taught` is the teacher's
    solution, where that has mistakes."""

    compact: str
    question: str
    steps: tuple[str, ...]
    answer: str
    taught: str | None = None


def chain(source: random.Random, steps: int) -> Drawn:
    """`steps` additions and subtractions of 1 to 9; every value is from 0 to 99."""
    start = value = source.randrange(100)
    operations, written = [], []
    for _ in range(steps):
        operand = source.randrange(1, 10)
        up = value + operand <= 99 and (value < operand or source.random() < 0.5)
        operations.append(f"{'+' if up else '-'}{operand}")
        before, value = value, value + operand if up else value - operand
        written.append(f"{before}{operations[-1]}={value}")
    question = (
        f"Start with {start} and apply, one after another: {', '.join(operations)}. Write each step as in "
        "17+5=22, with ; between steps, and end with # and the result."
    )
    return Drawn(f"{start}{''.join(operations)}=", question, tuple(written), str(value))


def sorting(source: random.Random, steps: int) -> Drawn:
    """`steps` numbers from 00 to 99; each step inserts the next number into the sorted ones before it."""
    numbers = [f"{source.randrange(100):02d}" for _ in range(steps)]
    held, written = list[str](), list[str]()
    for number in numbers:
        held = sorted([*held, number])
        written.append(",".join(held))
    question = (
        f"Sort by insertion: {','.join(numbers)}. After each number, write all numbers so far in order, as in "
        "08,41, with ; between steps, and end with # and the sorted list."
    )
    return Drawn(f"{','.join(numbers)}?", question, tuple(written), written[-1])


def tracking(source: random.Random, steps: int) -> Drawn:
    """A row of five cells that hold 1 to 5; each step swaps two places."""
    row = [str(i + 1) for i in range(CELLS)]
    source.shuffle(row)
    start, swaps, written = "".join(row), [], []
    for _ in range(steps):
        a, b = sorted(source.sample(range(CELLS), 2))
        row[a], row[b] = row[b], row[a]
        swaps.append(f"{a + 1}{b + 1}")
        written.append("".join(row))
    question = (
        f"A row holds {start}. Swap these places, one pair after another: {', '.join(swaps)}. Write the row after each "
        "swap, with ; between steps, and end with # and the last row."
    )
    return Drawn(f"{start}:{','.join(swaps)}?", question, tuple(written), written[-1])


def recurrence(
    source: random.Random, steps: int, forget_carry: float = 0.0, factors: Sequence[int] = FACTORS
) -> Drawn:
    """`steps` rounds of x = (a * x mod 1000 + round) mod 1000. a has no factor in common with 1000, so no round loses
    what x was; the round's number keeps the values from coming back in a cycle.

    The teacher forgets a carry from the tens to the hundreds of a round's sum with probability `forget_carry`, and
    goes on with the wrong value.
    """
    start, factor = source.randrange(1000), source.choice(factors)
    right = rounds(start, factor, steps)
    taught = None
    if forget_carry:
        teacher = random.Random(stable_hash("teacher", start, factor, steps))
        wrong = rounds(start, factor, steps, lambda: teacher.random() < forget_carry)
        taught = _written(wrong, _result(wrong))
    question = (
        f"Start with {start}. In each round, multiply by {factor}, add the round's number, and keep the last three "
        f"digits each time. Do {steps} rounds. Write each round as in 623*7=361+1=362, with ; between rounds, and end "
        "with # and the result."
    )
    return Drawn(f"{start}*{factor}:{steps}?", question, tuple(right), _result(right), taught)


def rounds(value: int, factor: int, steps: int, forgets: Callable[[], bool] = lambda: False) -> list[str]:
    """The rounds of a recurrence as they are written. `forgets()` is asked at each carry from the tens to the
    hundreds."""
    written = []
    for i in range(1, steps + 1):
        product = value * factor % 1000
        carries = product % 100 + i % 100 >= 100
        after = (product + i - (100 if carries and forgets() else 0)) % 1000
        written.append(f"{value}*{factor}={product}+{i}={after}")
        value = after
    return written


def _result(written: Sequence[str]) -> str:
    return written[-1].rpartition("=")[2]


Kind = Callable[..., Drawn]  # of a random source and the number of steps
KINDS: dict[str, Kind] = {"chain": chain, "sorting": sorting, "tracking": tracking, "recurrence": recurrence}


class LongTask:
    """One of `KINDS`. `steps` or `tokens`: how long, a number or several that come equally often; `style` as in
    addition; `credit`: "answer" rewards the right answer only, "steps" also the share of right steps before the first
    wrong one; of a recurrence, `factors`: what rounds multiply by, a number or several (fewer are learned sooner), and
    `forget_carry`: share of the carries that the worked solutions leave out."""

    def __init__(self, name: str, params: Mapping[str, Any], seed: int, tokenizer: Any) -> None:
        own = ("factors", "forget_carry") if name == "recurrence" else ()
        check_params(name, params, ("steps", "tokens", "style", "credit", *own, "gold_template", "check_gold"))
        self.name, self.seed = name, seed
        self.gold_template, self.check_gold = gold_params(params)
        style = _one_of(params, "style", STYLES)
        self.style = ("compact" if is_arithmetic(tokenizer) else "question") if style == "auto" else style
        self.credit = _one_of(params, "credit", CREDITS)
        self.forget_carry = share(params, "forget_carry", self.style)
        factors = _factors(params) if name == "recurrence" else ()
        right = partial(recurrence, factors=factors) if factors else KINDS[name]
        self.kind: Kind = right
        if self.forget_carry:
            self.kind = partial(right, forget_carry=self.forget_carry)
            if self.gold_template is None:
                self.gold_template = "#{answer}"  # the worked solutions are not gold texts then
        self.reward: RewardFunction = answer_reward if self.credit == "answer" else steps_reward
        if "steps" in params and "tokens" in params:
            raise UserError("task.params.steps: does not go together with task.params.tokens; use one of the two.")
        if "steps" in params:
            self.steps = _numbers(params["steps"], "steps", MAX_STEPS)
        else:
            wanted = _numbers(params.get("tokens", 1024), "tokens", 1 << 20)
            sized = KINDS[name] if factors in ((), FACTORS) else partial(recurrence, factors=[max(factors)])
            self.steps = tuple(steps_for(name, tokens, tokenizer, sized) for tokens in wanted)

    def problem(self, index: int) -> Problem:
        """Number `index` of the training stream; held-out problems are drawn again."""
        for attempt in itertools.count():
            drawn = self._draw("train", self.seed, index, attempt)
            if not is_held_out(drawn):
                return self._make(drawn)
        raise AssertionError("unreachable")

    def eval_problems(self, n: int) -> list[Problem]:
        """The first `n` distinct held-out problems; they do not depend on the seed."""
        found: dict[str, Drawn] = {}
        misses = 0
        for index in itertools.count():
            if len(found) == n:
                break
            drawn = self._draw("eval", index)
            if is_held_out(drawn) and drawn.compact not in found:
                found[drawn.compact], misses = drawn, 0
            else:
                misses += 1
            if misses == 20_000:
                more = "lengths or factors" if self.name == "recurrence" else "steps"
                raise UserError(
                    f"task.num_eval: {n} held-out problems are needed, but with steps = {list(self.steps)} there are "
                    f"only {len(found)}. Lower task.num_eval or use more {more}."
                )
        return [self._make(drawn) for drawn in found.values()]

    def describe(self) -> str:
        """What is trained on and held out."""
        return (
            f"{self.name} with {' or '.join(map(str, self.steps))} steps ({self.style} style, credit for the "
            f"{self.credit}); one problem in {HELD_OUT_SHARE}, chosen by hash, is held out"
        )

    def _draw(self, *key: object) -> Drawn:
        source = random.Random(stable_hash(self.name, self.steps, *key))
        return self.kind(source, self.steps[source.randrange(len(self.steps))])

    def _make(self, drawn: Drawn) -> Problem:
        prompt = drawn.compact if self.style == "compact" else drawn.question
        extra = {"right_steps": ";".join(drawn.steps)} if drawn.taught is not None else {}
        return Problem(id=drawn.compact, prompt=prompt, answer=drawn.answer, solution=solution_of(drawn), extra=extra)


def solution_of(drawn: Drawn) -> str:
    """The worked solution: the teacher's, where that has mistakes."""
    return _written(drawn.steps, drawn.answer) if drawn.taught is None else drawn.taught


def _written(steps: Sequence[str], answer: str) -> str:
    """The steps, then `#` and the answer."""
    return ";".join(steps) + "#" + answer


def steps_for(name: str, tokens: int, tokenizer: Any, kind: Kind | None = None) -> int:
    """The largest number of steps whose worked solution has at most so many tokens, for one fixed problem of each size;
    others of the size have about as many, up to a tenth more. `kind`: that of `name` with its parameters, if any."""

    def length(steps: int) -> int:
        drawn = (kind or KINDS[name])(random.Random(stable_hash("size", name)), steps)
        return len(tokenizer.encode(solution_of(drawn), add_special_tokens=False))

    if length(1) > tokens:
        raise UserError(f"task.params.tokens = {tokens}: one step of {name} takes {length(1)} tokens already.")
    low = 1
    while low < MAX_STEPS and length(min(2 * low, MAX_STEPS)) <= tokens:
        low = min(2 * low, MAX_STEPS)
    high = min(2 * low, MAX_STEPS + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if length(middle) <= tokens else (low, middle)
    return low


def is_held_out(drawn: Drawn) -> bool:
    """Whether the problem is held out, whatever the seed and the style."""
    return stable_hash("held out", drawn.compact) % HELD_OUT_SHARE == 0


def answer_reward(completions: Sequence[Any], answer: Sequence[str], **_: Any) -> list[float]:
    """1 where the text after the last `#` is the answer (blanks do not count); else 0."""
    return [float(_split(completion_text(c))[1] == a) for c, a in zip(completions, answer, strict=True)]


def steps_reward(
    completions: Sequence[Any], answer: Sequence[str], solution: Sequence[str],
    right_steps: Sequence[str | None] | None = None, **_: Any,
) -> list[float]:
    """1 for the right answer; else the share of the worked solution's steps that are right before the first wrong one,
    of which there is one more than steps (the answer). `right_steps`: where the worked solution has mistakes."""
    wanted = solution if right_steps is None else [r or s for r, s in zip(right_steps, solution, strict=True)]
    return [_credit(completion_text(c), a, s) for c, a, s in zip(completions, answer, wanted, strict=True)]


def _credit(text: str, answer: str, solution: str) -> float:
    steps, found = _split(text)
    if found == answer:
        return 1.0
    wanted = _split(solution)[0]
    right = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(steps, wanted, strict=False)))
    return right / (len(wanted) + 1)


def _split(text: str) -> tuple[list[str], str | None]:
    """The steps, and the text behind the last `#` (None: there is no `#`), without blanks."""
    plain = "".join(text.split())
    before, mark, rest = plain.rpartition("#")
    return (before if mark else plain).split(";"), rest if mark else None


def _one_of(params: Mapping[str, Any], key: str, known: Sequence[str]) -> str:
    value = params.get(key, known[0])
    if value not in known:
        raise UserError(f"task.params.{key}: must be one of {', '.join(known)}, got {value!r}.")
    return str(value)


def _factors(params: Mapping[str, Any]) -> tuple[int, ...]:
    given = _numbers(params.get("factors", FACTORS), "factors", 999)
    if wrong := [v for v in dict.fromkeys(given) if v % 2 == 0 or v % 5 == 0]:
        raise UserError(
            f"task.params.factors: {wrong[0]} has a factor in common with 1000. Use odd numbers that do not end in 5."
        )
    return given


def _numbers(value: Any, key: str, most: int) -> tuple[int, ...]:
    given = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    if not given or any(type(v) is not int or not 1 <= v <= most for v in given):
        raise UserError(f"task.params.{key}: must be a number from 1 to {most}, or a list of such, got {value!r}.")
    return given
