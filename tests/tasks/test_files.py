"""File tasks: both layouts, epochs, held-out rows, and a message with file and line for every mistake."""

import json

import pytest

from jetrl.config import TaskConfig
from jetrl.errors import UserError
from jetrl.tasks.files import FileTask, read_problems


def write(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def rows(n, start=0):
    return [{"prompt": f"question {i}", "answer": i, "level": i % 3} for i in range(start, start + n)]


def task(path, seed=0, **settings):
    return FileTask(TaskConfig(name="file", train_file=str(path), **settings), seed)


def test_plain_layout(tmp_path):
    line = '{"prompt": "p\u2028q", "answer": 0.5, "solution": "s", "x": [1]}'
    path = write(tmp_path / "a.jsonl", [line, "", *rows(1)])
    first, second = read_problems(path)
    assert (first.prompt, first.answer, first.solution, first.extra) == ("p\u2028q", "0.5", "s", {"x": [1]})
    assert (first.id, second.id) == (f"{path}:1", f"{path}:3")
    assert (second.answer, second.solution, second.extra) == ("0", None, {"level": 0})


VERL = {
    "data_source": "gsm8k", "prompt": [{"role": "user", "content": "1+1?"}], "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"}, "extra_info": {"split": "train", "index": 0},
}


def test_verl_layout(tmp_path):
    (problem,) = read_problems(write(tmp_path / "a.jsonl", [VERL]))
    assert problem.prompt == ({"role": "user", "content": "1+1?"},)
    assert problem.answer == "2"
    assert problem.extra == {k: v for k, v in VERL.items() if k != "prompt"}


def test_parquet_is_read_like_jsonl(tmp_path):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pa.Table.from_pylist([VERL, VERL | {"data_source": "math"}]), tmp_path / "a.parquet")
    problems = read_problems(tmp_path / "a.parquet")
    (as_jsonl,) = read_problems(write(tmp_path / "a.jsonl", [VERL]))
    assert (problems[0].prompt, problems[0].answer, problems[0].extra) == (
        as_jsonl.prompt, as_jsonl.answer, as_jsonl.extra
    )
    assert problems[1].extra["data_source"] == "math"
    assert problems[1].id.endswith("a.parquet:2")


def test_broken_parquet_is_refused(tmp_path):
    pytest.importorskip("pyarrow")
    with pytest.raises(UserError, match="a.parquet: cannot be read as parquet"):
        read_problems(write(tmp_path / "a.parquet", ["no parquet"]))


def test_other_column_names(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"input": f"q{i}", "target": str(i)} for i in range(4)])
    problem = task(path, params={"prompt_key": "input", "answer_key": "target"}, num_eval=1).problem(0)
    assert problem.prompt == f"q{problem.answer}"
    with pytest.raises(UserError, match=r"a.jsonl:1: column 'prompt' is missing; the row has: 'input', 'target'"):
        read_problems(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "p", "answer": }', r":3: not valid JSON"),
        ('["p", "a"]', r":3: must be a JSON object"),
        ('{"prompt": "p"}', r":3: column 'answer' is missing; the row has: 'prompt'"),
        ('{"answer": "a"}', r":3: column 'prompt' is missing"),
        ('{"prompt": " ", "answer": "a"}', r":3: column 'prompt' must be a text"),
        ('{"prompt": [{"role": "user"}], "answer": "a"}', r":3: column 'prompt': a chat message needs"),
        ('{"prompt": "p", "answer": null}', r":3: column 'answer' must be a text or a number, got None"),
        ('{"prompt": "p", "answer": true}', r":3: column 'answer' must be a text or a number, got True"),
        ('{"prompt": "p", "reward_model": {"style": "rule"}}', r":3: column 'reward_model', entry 'ground_truth'"),
        ('{"prompt": "p", "answer": "a", "completions": 1}', r":3: reward functions get something else.*'completions'"),
        ('{"prompt": "p", "answer": "a", "solution": 1}', r":3: column 'solution' must be a text"),
    ],
)
def test_mistakes_name_file_and_line(tmp_path, line, message):
    with pytest.raises(UserError, match="a.jsonl" + message):
        read_problems(write(tmp_path / "a.jsonl", [*rows(2), line]))


def test_files_that_cannot_be_used(tmp_path):
    with pytest.raises(UserError, match="gone.jsonl: file not found"):
        read_problems(tmp_path / "gone.jsonl")
    with pytest.raises(UserError, match="empty.jsonl: the file has no problems"):
        read_problems(write(tmp_path / "empty.jsonl", ["", " "]))
    with pytest.raises(UserError, match="must be a .jsonl or .parquet"):
        read_problems(write(tmp_path / "a.csv", ["prompt,answer"]))
    (tmp_path / "latin.jsonl").write_bytes('{"prompt": "é"}'.encode("latin-1"))
    with pytest.raises(UserError, match="not UTF-8"):
        read_problems(tmp_path / "latin.jsonl")


def test_missing_pyarrow_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(UserError, match=r'pip install "jetrl\[data\]"'):
        read_problems(write(tmp_path / "a.parquet", ["x"]))


def test_an_epoch_is_a_permutation_and_epochs_differ(tmp_path):
    path = write(tmp_path / "a.jsonl", rows(40))
    stream = task(path, num_eval=10)
    epochs = [[stream.problem(e * 30 + i).answer for i in range(30)] for e in range(3)]
    assert all(sorted(e) == sorted(epochs[0]) and len(set(e)) == 30 for e in epochs)
    assert len({tuple(e) for e in epochs}) == 3
    again = task(path, num_eval=10)
    assert [again.problem(i).answer for i in reversed(range(90))] == [a for e in epochs for a in e][::-1]
    assert [task(path, 1, num_eval=10).problem(i).answer for i in range(30)] != epochs[0]


def test_split_by_hash_is_disjoint_also_for_repeated_prompts(tmp_path):
    path = write(tmp_path / "a.jsonl", rows(40) + [{"prompt": f"question {i} ", "answer": i} for i in range(40)])
    both = task(path, num_eval=10)
    held_out = both.eval_problems(10)
    trained = {both.problem(i).prompt.strip() for i in range(60)}
    assert len({p.prompt.strip() for p in held_out}) == 10
    assert len(trained) == 30 and not trained & {p.prompt.strip() for p in held_out}
    assert both.eval_problems(4) == held_out[:4] == task(path, 9, num_eval=10).eval_problems(4)
    assert "60 problems" in both.describe() and "20 rows left out" in both.describe()


def test_held_out_prompts_of_an_eval_file_leave_training(tmp_path):
    train, held_out = write(tmp_path / "t.jsonl", rows(20)), write(tmp_path / "e.jsonl", rows(10, start=15))
    both = task(train, eval_file=str(held_out), num_eval=4)
    assert {both.problem(i).answer for i in range(40)} == {str(i) for i in range(15)}
    assert {p.answer for p in both.eval_problems(100)} == {str(i) for i in range(15, 25)}
    assert "5 rows left out" in both.describe()
    with pytest.raises(UserError, match="none is left for training"):
        task(train, eval_file=str(train))


def test_too_small_for_a_split(tmp_path):
    with pytest.raises(UserError, match="task.num_eval = 128.*only 40 different prompts.*at most 20"):
        task(write(tmp_path / "a.jsonl", rows(40)))
