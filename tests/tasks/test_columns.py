"""Columns of a row, and prompts made of several by a template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jetrl.config import TaskConfig
from jetrl.errors import UserError
from jetrl.tasks.columns import Columns
from jetrl.tasks.files import FileTask, read_problems

ROW: dict[str, Any] = {"question": "1+1", "unit": 3, "answer": "2", "a.b[0]": "x", "tags": ["t"], "none": None}


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        ("{question}\nAnswer with a number.", "1+1\nAnswer with a number."),
        ("{{{question}}} in {unit}: {question}", "{1+1} in 3: 1+1"),
        ("{a.b[0]}", "x"),  # a whole column name: no attribute of anything is read
    ],
)
def test_a_template_is_filled_with_columns(template: str, prompt: str) -> None:
    assert Columns(template=template).prompt_of(ROW, "here") == prompt


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("no column", r"task.prompt_template = 'no column': it names no column"),
        ("{question", r"task.prompt_template = '\{question': expected '\}'.*\{\{ and \}\} for braces"),
        ("{} {question}", "a field is the plain name of a column"),
        ("{question!r}", "a field is the plain name of a column"),
        ("{unit:.2f}", "a field is the plain name of a column"),
    ],
)
def test_templates_that_cannot_be_filled(template: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Columns(template=template).needed()


@pytest.mark.parametrize("column", ["tags", "none"])
def test_values_that_do_not_go_into_a_text(column: str) -> None:
    with pytest.raises(UserError, match=f"here: column '{column}' must be a string or a number to go into task.eval_"):
        Columns(template=f"{{{column}}}", keys="eval_").prompt_of(ROW, "here")


def file_of(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_template_on_a_file(tmp_path: Path) -> None:
    path = file_of(tmp_path / "a.jsonl", [ROW])
    (problem,) = read_problems(path, Columns(template="{question}?"))
    assert (problem.prompt, problem.answer) == ("1+1?", "2")
    assert problem.extra == {k: v for k, v in ROW.items() if k != "answer"}
    with pytest.raises(UserError, match=r"a.jsonl:1: column 'q' is missing; the row has: 'question'.*task.prompt_"):
        read_problems(path, Columns(template="{q}"))
    with pytest.raises(UserError, match=r"column 'gold' is missing.* Set task.eval_answer_column to what"):
        read_problems(path, Columns("question", "gold", keys="eval_"))


def test_a_column_solution_can_be_the_answer(tmp_path: Path) -> None:
    path = file_of(tmp_path / "a.jsonl", [{"prompt": "p", "solution": 7}])
    (problem,) = read_problems(path, Columns(answer="solution"))
    assert (problem.answer, problem.solution) == ("7", None)


def test_evaluation_data_has_columns_of_its_own_or_those_of_training(tmp_path: Path) -> None:
    train = file_of(tmp_path / "t.jsonl", [{"q": f"t{i}", "a": i} for i in range(4)])
    same = file_of(tmp_path / "same.jsonl", [{"q": "e", "a": 9}])
    other = file_of(tmp_path / "other.jsonl", [{"Problem": "e", "Answer": 9}])

    def prompts(**keys: str) -> list[Any]:
        settings = {"train_file": str(train), "prompt_template": "<{q}>", "answer_column": "a"} | keys
        return [(p.prompt, p.answer) for p in FileTask(TaskConfig(name="file", **settings), 0).eval_problems(9)]

    assert prompts(eval_file=str(same)) == [("<e>", "9")]
    columns = {"eval_file": str(other), "eval_answer_column": "Answer"}
    assert prompts(**columns, eval_prompt_column="Problem") == [("e", "9")]
    assert prompts(**columns, eval_prompt_template="{Problem}!") == [("e!", "9")]
    with pytest.raises(UserError, match=r"other.jsonl:1: column 'q' is missing.*Set task.eval_prompt_template"):
        prompts(**columns)
