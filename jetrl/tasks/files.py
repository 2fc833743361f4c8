"""Problems from a jsonl or parquet file, or from a data set by name; verl's layout is read as it is.

The prompt is a column (a text or a list of chat messages) or made of several by a template. A `solution` column (a
text or a list of chat messages) is what `jetrl sft` trains on; all further columns reach reward functions by name.
Every epoch has its own order, from (seed, epoch).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jetrl.chat.fields import Message
from jetrl.chat.prompts import prompt_key
from jetrl.config import TaskConfig
from jetrl.config.task import MAX_DATA_GIB
from jetrl.errors import UserError, shown
from jetrl.hashing import stable_hash
from jetrl.rewards.function import RewardFunction
from jetrl.tasks.columns import Columns
from jetrl.tasks.datasets import read_dataset
from jetrl.tasks.given_rows import given_answer, messages_in
from jetrl.tasks.protocol import check_params, gold_params
from jetrl.tasks.row_files import read_jsonl, read_parquet
from jetrl.tasks.sieve import OF_CONVERSATIONS, OF_PROMPTS, Sieve
from jetrl.types import Problem
from jetrl.user_code.from_python import NOTHING, FromPython, GivenRows

_RESERVED = {"prompts", "completions", "completion_ids", "answer", "solution"}  # what reward functions get anyway


class FileTask:
    """Params: `gold_template`, `check_gold`. The keys of `[task]` say where problems come from."""

    name = "file"
    reward: RewardFunction | None = None

    def __init__(
        self, config: TaskConfig, seed: int, *, needs_answer: bool = True, hold_out: bool = True,
        fits: Callable[[Problem], bool] | None = None, own: FromPython = NOTHING, given: bool = False,
    ) -> None:
        """`needs_answer`: rows without an answer are mistakes. `hold_out`: without data for evaluation, some problems
        are kept for it. `fits`: whether a prompt is short enough; a problem whose prompt is not is left out.
        `own`: rows that a program gave. `given`: rows hold the answers to learn (`given_rows.py`)."""
        for old, key in (("prompt_key", "prompt_column"), ("answer_key", "answer_column")):
            if old in config.params:
                raise UserError(f"task.params.{old}: write task.{key} instead.")
        check_params(self.name, config.params, ("gold_template", "check_gold"))
        self.gold_template, self.check_gold = gold_params(config.params)
        self.seed = seed
        limit = OF_CONVERSATIONS if given else OF_PROMPTS
        sieves = [Sieve(fits, config.repeated_prompts == "drop", limit) for _ in range(2)]
        messages = config.messages_column if given else None
        source, problems = _training(config, needs_answer, sieves[0], own, messages)
        elsewhere = _evaluation(config, needs_answer, sieves[1], own, messages)
        held_out: list[Problem]
        if elsewhere is not None:
            where, held_out = elsewhere
            taken = {prompt_key(p) for p in held_out}
        elif hold_out:
            where = "the same data, chosen by hash of the prompt"
            held_out, taken = _split(problems, config.num_eval, source)
        else:
            where, held_out, taken = "", [], set()
        self._held_out = sorted(held_out, key=lambda p: (stable_hash("held out", prompt_key(p)), p.id))
        self._train = [p for p in problems if prompt_key(p) not in taken]
        if not self._train:
            raise UserError(f"{source}: {where} has all its prompts; none is left for training.")
        elsewhere_file = elsewhere is not None
        shared = len(problems) - len(self._train) - (0 if elsewhere_file else len(held_out))
        parts = [f"{source}: {_rows(len(self._train), 'training ')}"]
        if elsewhere_file:
            parts.append(f"{_rows(len(held_out))} for evaluation from {where}")
        else:
            parts[0] += f", {len(held_out)} held out for evaluation ({where})" if where else (
                ", none held out, because eval.eval_interval = 0")
        if shared:
            of = f"in {where}" if elsewhere_file else "among the held-out ones"
            parts.append(f"{_rows(shared, 'more ')} left out of training: their prompts are {of}")
        parts += [t for s, n in zip(sieves, (source, where), strict=True) if (t := s.describe(n))]
        self._description = "; ".join(parts)
        self.num_rows_read = len(problems) + sieves[0].overlong + sieves[0].repeated  # of the training data
        self._order = functools.lru_cache(maxsize=2)(self._permutation)

    @property
    def num_rows(self) -> int:
        """The rows of one epoch."""
        return len(self._train)

    def problem(self, index: int) -> Problem:
        """Row `index` of the epochs laid end to end, each epoch in its own order."""
        epoch, place = divmod(index, len(self._train))
        return self._train[self._order(epoch)[place]]

    def eval_problems(self, n: int) -> list[Problem]:
        """The first `n` held-out problems in the order of their hash, so that any number of them is a fair sample."""
        return self._held_out[:n]

    def training_problems(self) -> list[Problem]:
        """The rows of one epoch, in the order of the data."""
        return list(self._train)

    def all_problems(self) -> list[Problem]:
        """Every problem, those for training first."""
        return [*self._train, *self._held_out]

    def describe(self) -> str:
        """What is trained on and held out."""
        return self._description

    def _permutation(self, epoch: int) -> list[int]:
        return sorted(range(len(self._train)), key=lambda i: stable_hash("order", self.seed, epoch, i))


def _rows(count: int, kind: str = "") -> str:
    return f"{count} {kind}row" + "s" * (count != 1)


def _split(problems: list[Problem], num_eval: int, file: str) -> tuple[list[Problem], set[str]]:
    """The `num_eval` distinct prompts with the lowest hash are held out, each with its first row."""
    first = {prompt_key(p): p for p in reversed(problems)}
    if num_eval > len(first) // 2:
        raise UserError(
            f"task.num_eval = {num_eval}, but {file} has only {len(first)} different prompts, and at most half may be "
            "held out. Set task.eval_file or task.eval_split"
            + (f", or task.num_eval to at most {len(first) // 2}." if len(first) > 1 else ", or add problems.")
        )
    taken = sorted(first, key=lambda key: (stable_hash("held out", key), key))[:num_eval]
    return [first[key] for key in taken], set(taken)


def _training(
    config: TaskConfig, needs_answer: bool, sieve: Sieve, own: FromPython, messages: str | None
) -> tuple[str, list[Problem]]:
    """Where the training problems come from, in words, and the problems."""
    columns = Columns(
        config.prompt_column, config.answer_column, config.prompt_template, needs_answer=needs_answer,
        messages=messages,
    )
    if config.train_file is not None:
        if (given := own.rows_of("task.train_file", config.train_file)) is not None:
            return given.name, given_problems(given, columns, sieve)
        return config.train_file, read_problems(
            Path(config.train_file).expanduser(), columns, sieve, config.max_data_gib
        )
    assert config.dataset is not None
    name, subset, revision = config.dataset, config.dataset_config, config.dataset_revision
    return _named(name, subset, revision, config.train_split, columns, sieve, config.max_data_gib)


def _evaluation(
    config: TaskConfig, needs_answer: bool, sieve: Sieve, own: FromPython, messages: str | None
) -> tuple[str, list[Problem]] | None:
    """Likewise those for evaluation; None: they are held out of the training problems."""
    template = config.eval_prompt_template
    if template is None and config.eval_prompt_column is None:
        template = config.prompt_template
    columns = Columns(
        config.eval_prompt_column or config.prompt_column, config.eval_answer_column or config.answer_column, template,
        "eval_", needs_answer, messages,
    )
    if config.eval_file is not None:
        if (given := own.rows_of("task.eval_file", config.eval_file)) is not None:
            return given.name, given_problems(given, columns, sieve)
        path = Path(config.eval_file).expanduser()
        return config.eval_file, read_problems(path, columns, sieve, config.max_data_gib)
    if config.eval_split is None:
        return None
    if config.eval_dataset is not None:
        name, subset, revision = config.eval_dataset, config.eval_dataset_config, config.eval_dataset_revision
    else:
        assert config.dataset is not None
        name, subset, revision = config.dataset, config.dataset_config, config.dataset_revision
    return _named(name, subset, revision, config.eval_split, columns, sieve, config.max_data_gib)


def _named(
    name: str, subset: str | None, revision: str | None, split: str, columns: Columns, sieve: Sieve,
    gib: float,
) -> tuple[str, list[Problem]]:
    """A split of a data set: where it comes from, in words, and its problems, with their places as ids.

    Reward functions get something else under the names in `_RESERVED`, and nobody can rename a column on the hub: such
    columns are left out where they are neither prompt nor answer.
    """
    found = read_dataset(name, subset, revision, split, gib)
    hidden = _RESERVED - {"solution", columns.answer, *(column for column, _ in columns.needed())}
    rows = ({k: v for k, v in row.items() if k not in hidden} for row in found.rows)
    numbered = (_problem(row, f"{found.source}:{i}", columns, padded=True) for i, row in enumerate(rows, 1))
    problems = sieve.take(numbered, found.source)
    if not problems:
        raise UserError(f"{found.source}: it has no rows.")
    return found.source, problems


def given_problems(given: GivenRows, columns: Columns, sieve: Sieve) -> list[Problem]:
    """The problems of rows that a program gave, with the checks of a file's. Mistakes name the row, counted from 0."""
    numbered = (_problem(row, f"{given.name}[{i}]", columns, given.padded) for i, row in enumerate(given.rows))
    return sieve.take(numbered, given.name)


def read_problems(
    path: Path, columns: Columns | None = None, sieve: Sieve | None = None, gib: float = MAX_DATA_GIB
) -> list[Problem]:
    """The problems of a `.jsonl` or `.parquet` file that pass the sieve (None: all). Mistakes name the file and the
    line (of parquet: the row). `gib`: task.max_data_gib."""
    if path.is_dir():
        inside = sorted(p.name for p in path.iterdir() if p.suffix in (".jsonl", ".parquet"))
        hint = f"Give one of its files: {', '.join(inside[:5])}{', ...' * (len(inside) > 5)}." if inside else (
            "It has no .jsonl or .parquet file, which is what is needed here.")
        raise UserError(f"{path}: is a folder, not a file. {hint} A whole folder can be task.dataset.")
    if not path.is_file():
        raise UserError(f"{path}: file not found (searched from {Path.cwd()}).")
    readers = {".jsonl": read_jsonl, ".parquet": read_parquet}
    if path.suffix not in readers:
        raise UserError(f"{path}: its name must end in .jsonl or .parquet.")
    columns = columns or Columns()
    padded = path.suffix == ".parquet"
    numbered = (_problem(row, f"{path}:{line}", columns, padded) for line, row in readers[path.suffix](path, gib))
    problems = (sieve or Sieve()).take(numbered, str(path))
    if not problems:
        raise UserError(f"{path}: the file has no problems.")
    return problems


def _problem(row: Mapping[str, Any], where: str, columns: Columns, padded: bool = False) -> Problem:
    """`padded`: the row comes from a table of Arrow (`chat.message_of`)."""
    prompt, answer = columns.prompt, columns.answer
    if columns.messages is not None:
        found = given_answer(row, where, columns.messages, prompt, padded)
        if found is not None:
            return found
    for key, setting in columns.needed():
        if key not in row and not (key == "answer" and "reward_model" in row):
            raise UserError(
                f"{where}: column {key!r} is missing; the row has: {', '.join(map(repr, row)) or 'nothing'}. Set "
                f"{setting} to what the data has."
            )
    solution = _solution(row.get("solution"), where, padded) if answer != "solution" else None
    taken = (answer, "solution") if columns.template is not None else (prompt, answer, "solution")
    extra = {k: v for k, v in row.items() if k not in taken}
    if hidden := sorted(_RESERVED & extra.keys()):
        raise UserError(f"{where}: reward functions get another value as {hidden[0]!r}; rename this column.")
    value = _prompt(columns.prompt_of(row, where), where, prompt, padded)
    gold = _answer(row, where, answer, columns.needs_answer)
    return Problem(id=where, prompt=value, answer=gold, solution=solution, extra=extra)


def _prompt(value: Any, where: str, key: str, padded: bool) -> str | tuple[Message, ...]:
    if isinstance(value, str) and value.strip():
        return value
    if not isinstance(value, list) or not value:
        raise UserError(f"{where}: column {key!r} must be a string or chat messages, got {shown(value)}.")
    return messages_in(value, where, key, padded)


def _solution(value: Any, where: str, padded: bool) -> str | tuple[Message, ...] | None:
    """A worked solution: a text, or a whole conversation behind the prompt, which the assistant begins and ends."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise UserError(f"{where}: column 'solution' must be a string or chat messages, got {shown(value)}.")
    messages = messages_in(value, where, "solution", padded)
    own = [message["role"] == "assistant" for message in messages]
    if not (own[0] and own[-1]) or any(a and b for a, b in itertools.pairwise(own)):
        raise UserError(
            f"{where}: column 'solution': the assistant must begin and end the conversation, and another role must "
            f"answer between two of its messages; the roles are {', '.join(m['role'] for m in messages)}."
        )
    return messages


def _answer(row: Mapping[str, Any], where: str, key: str, needed: bool) -> str:
    value, name = row.get(key), f"column {key!r}"
    if key not in row:
        layout, name = row.get("reward_model"), "column 'reward_model', entry 'ground_truth'"
        value = layout.get("ground_truth") if isinstance(layout, dict) else None
    if value is None and not needed:
        return ""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)) or not str(value).strip():
        raise UserError(f"{where}: {name} must be a string or a number, got {shown(value)}.")
    return str(value)
