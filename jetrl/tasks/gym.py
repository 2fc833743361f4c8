"""Tasks of the reasoning-gym library: endless generated puzzles with checkers. Needs the extra `gym`.

`params = {dataset = "basic_arithmetic", ...}`; further keys go to that data set. The library's data sets are indexed by
seed + index, so the stream is cut into chunks with seeds far from each other.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jetrl.errors import UserError, reason
from jetrl.hashing import stable_hash
from jetrl.requirements import install
from jetrl.rewards.function import completion_text
from jetrl.tasks.protocol import check_params, gold_params
from jetrl.types import Problem

CHUNK_SIZE = 512  # problems from one seed
MAX_REDRAWS = 100
INSTRUCTION = "Put your final answer between <answer> and </answer>."
_OWN_PARAMS = ("dataset", "instruction", "gold_template", "check_gold")
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class GymTask:
    """Params in addition to the data set's: `dataset`, `instruction` (appended), `gold_template`, `check_gold`."""

    name = "gym"

    def __init__(self, params: Mapping[str, Any], seed: int, num_eval: int) -> None:
        template, self.check_gold = gold_params(params)
        self.gold_template: str | None = template or "<answer>{answer}</answer>"
        self.dataset = params.get("dataset", "")
        self.instruction = params.get("instruction", INSTRUCTION)
        if not isinstance(self.instruction, str):
            raise UserError(f"task.params.instruction: must be a string, got {self.instruction!r}.")
        self.seed = seed
        self._options = {k: v for k, v in params.items() if k not in _OWN_PARAMS}
        self._create = _creator(self.dataset, self._options)
        self._chunk = functools.lru_cache(maxsize=8)(self._make_chunk)
        self._scorer = self._chunk("eval", 0)
        self._held_out = self._draw_held_out(num_eval)
        self._held_out_questions = {str(p.extra["entry"]["question"]) for p in self._held_out}

    def problem(self, index: int) -> Problem:
        """Number `index` of the training stream; held-out questions are drawn again, from another stream of seeds."""
        for attempt in range(MAX_REDRAWS):
            entry = self._entry(("train", self.seed, attempt), index)
            if entry["question"] not in self._held_out_questions:
                return self._make(entry, f"{self.dataset}/{self.seed}/{index}")
        raise UserError(
            f"task.params.dataset = {self.dataset!r}: in {MAX_REDRAWS} draws every question was among the "
            f"{len(self._held_out)} held-out ones. Lower task.num_eval or set parameters that make the data set larger."
        )

    def eval_problems(self, n: int) -> list[Problem]:
        """The first `n` held-out problems; they do not depend on the seed."""
        assert n <= len(self._held_out), f"{n} held-out problems, but the task was built with {len(self._held_out)}"
        return self._held_out[:n]

    def describe(self) -> str:
        """What is trained on and held out."""
        return (
            f"reasoning-gym {self.dataset}, made on the fly; {len(self._held_out)} questions from other seeds are held "
            "out and never trained on"
        )

    def reward(self, completions: Sequence[Any], entry: Sequence[Any], **_: Any) -> list[float | None]:
        """The data set's own score of the text between the last answer tags; without tags, of the whole completion."""
        return [self._score(completion_text(c), e) for c, e in zip(completions, entry, strict=True)]

    def _score(self, text: str, entry: Mapping[str, Any]) -> float | None:
        tagged = _ANSWER.findall(text)
        try:
            return float(self._scorer.score_answer((tagged[-1] if tagged else text).strip(), dict(entry)))
        except Exception:  # checkers of the library fail on odd answers; None counts it as an error
            return None

    def _draw_held_out(self, num: int) -> list[Problem]:
        found: dict[str, Problem] = {}
        draws = 20 * num + 100
        for index in range(draws):
            if len(found) == num:
                break
            entry = self._entry(("eval",), index)
            if entry["question"] not in found:
                found[entry["question"]] = self._make(entry, f"{self.dataset}/eval/{index}")
        if len(found) < num:
            raise UserError(
                f"task.num_eval = {num}, but {draws} draws of reasoning-gym {self.dataset} gave only {len(found)} "
                "different questions. Lower task.num_eval or set parameters that make the data set larger."
            )
        return list(found.values())

    def _entry(self, stream: tuple[object, ...], index: int) -> dict[str, Any]:
        chunk, place = divmod(index, CHUNK_SIZE)
        return self._chunk(*stream, chunk)[place]

    def _make_chunk(self, *key: object) -> Any:
        return self._create(seed=stable_hash("gym", self.dataset, *key) % 2**31)  # numpy takes seeds below 2**32

    def _make(self, entry: dict[str, Any], identity: str) -> Problem:
        prompt = entry["question"] + ("\n\n" + self.instruction if self.instruction else "")
        answer = "" if entry["answer"] is None else str(entry["answer"])  # None: many answers are right
        return Problem(id=identity, prompt=prompt, answer=answer, extra={"entry": entry})


def _creator(dataset: Any, options: Mapping[str, Any]) -> functools.partial[Any]:
    """`create(seed=...)` of one data set, after checks of its name and options."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise UserError(f"task.name = 'gym' needs reasoning-gym; run: {install('gym')}") from error
    if dataset not in DATASETS:
        check_params("gym", {str(dataset): None} if dataset else {}, DATASETS)
        raise UserError("task.params.dataset: set the name of a reasoning-gym data set, such as 'basic_arithmetic'.")
    for key in ("seed", "size"):
        if key in options:
            raise UserError(f"task.params.{key}: the stream is endless and seeded by the run's seed; remove this key.")
    known = [k for k in inspect.signature(DATASETS[dataset][1]).parameters if k not in ("seed", "size")]
    check_params("gym", options, [*known, *_OWN_PARAMS])
    create = functools.partial(reasoning_gym.create_dataset, dataset, size=CHUNK_SIZE, **options)
    try:
        create(seed=0)
    except (AssertionError, ValueError, TypeError) as error:  # how its configs refuse values
        raise UserError(f"task.params: reasoning-gym {dataset} refuses {dict(options)}: {reason(error)}") from error
    return create
