"""Problems from a jsonl or parquet file with the columns `prompt` and `answer`; verl's layout is read as it is.

`prompt` is a text or a list of chat messages. A `solution` column (text) is what `jetrl sft` trains on; all further
columns reach reward functions by name. Every epoch has an order of its own, from (seed, epoch).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jetrl.config import TaskConfig
from jetrl.errors import UserError
from jetrl.requirements import install
from jetrl.tasks.protocol import RewardFunction, check_params, gold_params, shorten, stable_hash
from jetrl.types import Problem

_RESERVED = {"prompts", "completions", "completion_ids", "answer", "solution"}  # what reward functions get anyway


class FileTask:
    """Params: `prompt_key`, `answer_key` (names of the two columns), `gold_template`, `check_gold`."""

    name = "file"
    reward: RewardFunction | None = None

    def __init__(self, config: TaskConfig, seed: int) -> None:
        params = config.params
        check_params(self.name, params, ("prompt_key", "answer_key", "gold_template", "check_gold"))
        self.gold_template, self.check_gold = gold_params(params)
        self.seed = seed
        keys = _key(params, "prompt_key", "prompt"), _key(params, "answer_key", "answer")
        assert config.train_file is not None
        problems = read_problems(Path(config.train_file).expanduser(), *keys)
        if config.eval_file is not None:
            held_out = read_problems(Path(config.eval_file).expanduser(), *keys)
            taken = {prompt_key(p) for p in held_out}
        else:
            held_out, taken = _split(problems, config.num_eval, config.train_file)
        self._held_out = sorted(held_out, key=lambda p: (stable_hash("held out", prompt_key(p)), p.id))
        self._train = [p for p in problems if prompt_key(p) not in taken]
        if not self._train:
            raise UserError(f"{config.train_file}: {config.eval_file} has all its prompts; none is left for training.")
        removed = len(problems) - len(self._train)
        where = config.eval_file if config.eval_file is not None else "the same file, chosen by hash of the prompt"
        self._description = (
            f"{len(self._train)} problems from {config.train_file}; {len(held_out)} held out, from {where}; "
            f"{removed} rows left out of training, because their prompts are held out"
        )
        self._order = functools.lru_cache(maxsize=2)(self._permutation)

    def problem(self, index: int) -> Problem:
        """Row `index` of the epochs laid end to end, each epoch in its own order."""
        epoch, place = divmod(index, len(self._train))
        return self._train[self._order(epoch)[place]]

    def eval_problems(self, n: int) -> list[Problem]:
        """The first `n` held-out problems in the order of their hash, so that any number of them is a fair sample."""
        return self._held_out[:n]

    def all_problems(self) -> list[Problem]:
        """Every problem, those for training first."""
        return [*self._train, *self._held_out]

    def describe(self) -> str:
        """What is trained on and held out."""
        return self._description

    def _permutation(self, epoch: int) -> list[int]:
        return sorted(range(len(self._train)), key=lambda i: stable_hash("order", self.seed, epoch, i))


def _split(problems: list[Problem], num_eval: int, file: str) -> tuple[list[Problem], set[str]]:
    """The `num_eval` distinct prompts with the lowest hash are held out, with their first row each."""
    first = {prompt_key(p): p for p in reversed(problems)}
    if num_eval > len(first) // 2:
        raise UserError(
            f"task.num_eval = {num_eval}, but {file} has only {len(first)} different prompts, and at most half may be "
            "held out. Set task.eval_file"
            + (f", or task.num_eval to at most {len(first) // 2}." if len(first) > 1 else ", or add problems.")
        )
    taken = sorted(first, key=lambda key: (stable_hash("held out", key), key))[:num_eval]
    return [first[key] for key in taken], set(taken)


def prompt_key(problem: Problem) -> str:
    """What makes two prompts the same: the text, or the messages' roles and texts; white space at the ends aside."""
    if isinstance(problem.prompt, str):
        return problem.prompt.strip()
    return json.dumps([[m["role"], m["content"].strip()] for m in problem.prompt])


def read_problems(path: Path, prompt: str = "prompt", answer: str = "answer") -> list[Problem]:
    """All problems of a `.jsonl` or `.parquet` file. Mistakes name the file and the line (of parquet: the row)."""
    if not path.is_file():
        raise UserError(f"{path}: file not found (searched from {Path.cwd()}).")
    readers = {".jsonl": _read_jsonl, ".parquet": _read_parquet}
    if path.suffix not in readers:
        raise UserError(f"{path}: must be a .jsonl or .parquet file, by its name.")
    problems = [_problem(row, f"{path}:{line}", prompt, answer) for line, row in readers[path.suffix](path)]
    if not problems:
        raise UserError(f"{path}: the file has no problems.")
    return problems


def _read_jsonl(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # not splitlines: JSON texts may hold U+2028
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text ({error}). Write the file as UTF-8.") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}:{number}: not valid JSON ({error}): {shorten(line)}") from error
        if not isinstance(row, dict):
            raise UserError(f"{path}:{number}: must be a JSON object with the columns, got {shorten(line)}")
        yield number, row


def _read_parquet(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise UserError(f"{path}: reading parquet needs pyarrow; run: {install('data')}") from error
    try:
        rows = parquet.read_table(path).to_pylist()
    except ArrowException as error:
        raise UserError(f"{path}: cannot be read as parquet: {error}") from error
    yield from enumerate(rows, 1)


def _problem(row: Mapping[str, Any], where: str, prompt: str, answer: str) -> Problem:
    for key in (prompt, answer):
        if key not in row and not (key == "answer" and "reward_model" in row):
            raise UserError(
                f"{where}: column {key!r} is missing; the row has: {', '.join(map(repr, row)) or 'nothing'}. Set "
                "task.params.prompt_key and task.params.answer_key if the columns have other names."
            )
    solution = row.get("solution")
    if solution is not None and not isinstance(solution, str):
        raise UserError(f"{where}: column 'solution' must be a text, got {shorten(repr(solution))}.")
    extra = {k: v for k, v in row.items() if k not in (prompt, answer, "solution")}
    if hidden := sorted(_RESERVED & extra.keys()):
        raise UserError(f"{where}: reward functions get something else by the name of column {hidden[0]!r}; rename it.")
    return Problem(
        id=where, prompt=_prompt(row[prompt], where, prompt), answer=_answer(row, where, answer), solution=solution,
        extra=extra,
    )


def _prompt(value: Any, where: str, key: str) -> str | tuple[Mapping[str, str], ...]:
    if isinstance(value, str) and value.strip():
        return value
    if not isinstance(value, list) or not value:
        raise UserError(f"{where}: column {key!r} must be a text or chat messages, got {shorten(repr(value))}.")
    for message in value:
        fields = [message.get(field) for field in ("role", "content")] if isinstance(message, dict) else [None]
        if not all(isinstance(field, str) for field in fields):
            raise UserError(
                f"{where}: column {key!r}: a chat message needs the texts 'role' and 'content', got "
                f"{shorten(repr(message))}."
            )
    return tuple({"role": m["role"], "content": m["content"]} for m in value)


def _answer(row: Mapping[str, Any], where: str, key: str) -> str:
    value, name = row.get(key), f"column {key!r}"
    if key not in row:
        layout, name = row["reward_model"], "column 'reward_model', entry 'ground_truth'"
        value = layout.get("ground_truth") if isinstance(layout, dict) else None
    if isinstance(value, bool) or not isinstance(value, (str, int, float)) or not str(value).strip():
        raise UserError(f"{where}: {name} must be a text or a number, got {shorten(repr(value))}.")
    return str(value)


def _key(params: Mapping[str, Any], name: str, default: str) -> str:
    value = params.get(name, default)
    if not isinstance(value, str) or not value:
        raise UserError(f"task.params.{name}: must be the name of a column, got {value!r}.")
    return value
