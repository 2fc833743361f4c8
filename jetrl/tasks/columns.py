"""Which columns of a row are the prompt and the answer, and prompts made of several columns by a template."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from string import Formatter
from typing import Any

from jetrl.errors import UserError, shorten, shown


@dataclass(frozen=True, slots=True)
class Columns:
    """Names of columns; with a template, prompts come from it. `keys` is the prefix of the names of `[task]`'s keys."""

    prompt: str = "prompt"
    answer: str = "answer"
    template: str | None = None
    keys: str = ""  # "eval_" for the keys of the evaluation data
    needs_answer: bool = True  # whether a row without an answer is a mistake
    messages: str | None = None  # of whole conversations, where rows hold the answers to learn

    def needed(self) -> list[tuple[str, str]]:
        """The columns that a row must have, each with the key that names it."""
        answer = [(self.answer, f"task.{self.keys}answer_column")] if self.needs_answer else []
        if self.template is None:
            return [(self.prompt, f"task.{self.keys}prompt_column"), *answer]
        key = f"task.{self.keys}prompt_template"
        fields = [name for _, name in self._parts(self.template) if name is not None]
        if not fields:
            raise UserError(f"{key} = {self.template!r}: it names no column, so all prompts would be the same. "
                            'Write {question}, for example, for the column "question".')
        return [*((name, key) for name in dict.fromkeys(fields)), *answer]

    def prompt_of(self, row: Mapping[str, Any], where: str) -> Any:
        """The value of the prompt's column, or what the template makes of the row, which has all needed columns."""
        if self.template is None:
            return row[self.prompt]
        text = []
        for literal, name in self._parts(self.template):
            text.append(literal)
            if name is None:
                continue
            value = row[name]
            if isinstance(value, bool) or not isinstance(value, (str, int, float)):
                raise UserError(f"{where}: column {name!r} must be a string or a number to go into "
                                f"task.{self.keys}prompt_template, got {shown(value)}.")
            text.append(str(value))
        return "".join(text)

    def _parts(self, template: str) -> list[tuple[str, str | None]]:
        """(text, name of the column after it) of a template. A name is a whole column name: no indices, no format."""
        key = f"task.{self.keys}prompt_template = {shorten(template)!r}"
        cure = "Write {column} for a column of the row, and {{ and }} for braces."
        try:
            parts = list(Formatter().parse(template))
        except ValueError as error:
            raise UserError(f"{key}: {error}. {cure}") from error
        for _, name, form, conversion in parts:
            if name is not None and (not name or form or conversion):
                raise UserError(f"{key}: a field is the plain name of a column. {cure}")
        return [(literal, name) for literal, name, _, _ in parts]
