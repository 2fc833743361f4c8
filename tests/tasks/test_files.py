"""File tasks: both layouts, epochs, held-out rows, and a message with file and line for every mistake."""

import json

import pytest

from jetrl.chat.prompts import prompt_key
from jetrl.config import TaskConfig
from jetrl.environments.environment import messages_of, opening_of
from jetrl.errors import UserError
from jetrl.tasks.columns import Columns
from jetrl.tasks.files import FileTask, given_problems, read_problems
from jetrl.tasks.sieve import Sieve
from jetrl.types import Problem
from jetrl.user_code.from_python import rows_given


def write(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def rows(n, start=0):
    return [{"prompt": f"question {i}", "answer": i, "level": i % 3} for i in range(start, start + n)]


def task(path, seed=0, **settings):
    built = {key: settings.pop(key) for key in ("needs_answer", "hold_out", "fits") if key in settings}
    return FileTask(TaskConfig(name="file", train_file=str(path), **settings), seed, **built)


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


CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
TALK = [
    {"role": "user", "content": "add", "name": "bob"},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hmm"},
    {"role": "tool", "content": "5", "tool_call_id": "c1"},
]


def test_messages_keep_their_keys_in_jsonl_and_parquet_alike(tmp_path):
    """Arrow pads all messages, and all arguments, to the same keys with None: that is no text of the data's."""
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    other = [TALK[0], {**TALK[1], "tool_calls": [CALL | {"function": {"name": "neg", "arguments": {"x": 1}}}]}]
    table = [{"prompt": talk, "answer": "5", "solution": [{"role": "assistant", "content": "5"}]}
             for talk in (TALK, other)]
    parquet.write_table(pa.Table.from_pylist(table), tmp_path / "a.parquet")
    assert "'b': None" in str(parquet.read_table(tmp_path / "a.parquet").to_pylist()), "the padding is there"
    for path in (tmp_path / "a.parquet", write(tmp_path / "a.jsonl", table)):
        first, second = read_problems(path)
        assert first.prompt == (TALK[0], TALK[1] | {"content": ""}, TALK[2])
        assert second.prompt[1]["tool_calls"][0]["function"] == {"name": "neg", "arguments": {"x": 1}}
        assert first.solution == ({"role": "assistant", "content": "5"},)
        assert "None" not in first.prompt_text and '"name": "bob"' in first.prompt_text
        assert len({prompt_key(p) for p in (first, second)}) == 2, "prompts that differ in a call are two"


def nothing_given():
    """A message with a call whose argument is null: no padding, since nobody has padded."""
    arguments = {"a": 2, "unit": None, "more": [None, {"x": None}]}
    return {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}


def rows_with_null():
    return [{"prompt": [TALK[0], nothing_given(), TALK[2]], "answer": "5", "solution": [nothing_given()]}]


def of_python(tmp_path, rows):
    return given_problems(rows_given(rows, "dataset"), Columns(), Sieve())


def of_jsonl(tmp_path, rows):
    return read_problems(write(tmp_path / "a.jsonl", rows))


def of_an_environment(tmp_path, rows):
    (row,) = rows
    said, solution = opening_of(row["prompt"], "E.reset"), messages_of(row["solution"], "E.step")
    return [Problem("e", tuple(said), "5", tuple(solution))]


def of_a_dataset(tmp_path, rows):
    return of_python(tmp_path, pytest.importorskip("datasets").Dataset.from_list(rows))


@pytest.mark.parametrize("source", [of_python, of_jsonl, of_an_environment])
def test_a_null_that_the_data_has_is_kept_whoever_gives_it(tmp_path, source):
    (problem,) = source(tmp_path, rows_with_null())
    assert problem.prompt[1] == problem.solution[0] == nothing_given()


def test_a_dataset_from_python_is_padded(tmp_path):
    row = {"prompt": [{"role": "user", "content": "add"}, {"role": "assistant", "content": "", "tool_calls": [CALL]}]}
    other = {"prompt": [{"role": "user", "content": "add", "name": "bob"}]}
    one, two = of_a_dataset(tmp_path, [row | {"answer": "5"}, other | {"answer": "6"}])
    assert "None" not in str(one.prompt) + str(two.prompt)
    assert one.prompt == tuple(row["prompt"])


def test_what_makes_two_prompts_the_same_is_as_before_without_further_keys():
    plain = Problem("p", ({"role": "user", "content": " q "},), "")
    assert prompt_key(plain) == '[["user", "q"]]', "another key would hold out other problems"
    named = Problem("p", ({"role": "user", "content": "q", "name": "bob"},), "")
    assert prompt_key(named) != prompt_key(plain)


def test_a_whole_conversation_may_be_the_solution(tmp_path):
    talk = [{"role": "assistant", "content": "", "tool_calls": [CALL]}, TALK[2], {"role": "assistant", "content": "5"}]
    (problem,) = read_problems(write(tmp_path / "a.jsonl", [{"prompt": "add", "answer": "5", "solution": talk}]))
    assert problem.solution == tuple(talk)
    for wrong in (talk[:2], talk[1:], [talk[0], talk[2]], []):
        path = write(tmp_path / "a.jsonl", [{"prompt": "add", "answer": "5", "solution": wrong}])
        with pytest.raises(UserError, match=r"a.jsonl:1: column 'solution'"):
            read_problems(path)


def test_broken_parquet_is_refused(tmp_path):
    pytest.importorskip("pyarrow")
    with pytest.raises(UserError, match="a.parquet: its rows cannot be read"):
        read_problems(write(tmp_path / "a.parquet", ["no parquet"]))


def test_other_column_names(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"input": f"q{i}", "target": str(i)} for i in range(4)])
    problem = task(path, prompt_column="input", answer_column="target", num_eval=1).problem(0)
    assert problem.prompt == f"q{problem.answer}"
    with pytest.raises(UserError, match=r"a.jsonl:1: column 'prompt' is missing; the row has: 'input', 'target'"):
        read_problems(path)
    with pytest.raises(UserError, match="task.params.prompt_key: write task.prompt_column instead"):
        task(path, params={"prompt_key": "input"})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "p", "answer": }', r":3: not valid JSON"),
        ('["p", "a"]', r":3: must be a JSON object"),
        ('{"prompt": "p"}', r":3: column 'answer' is missing; the row has: 'prompt'"),
        ('{"answer": "a"}', r":3: column 'prompt' is missing"),
        ('{"prompt": " ", "answer": "a"}', r":3: column 'prompt' must be a string"),
        ('{"prompt": [{"role": "user"}], "answer": "a"}', r":3: column 'prompt': a chat message needs"),
        ('{"prompt": "p", "answer": null}', r":3: column 'answer' must be a string or a number, got None"),
        ('{"prompt": "p", "answer": true}', r":3: column 'answer' must be a string or a number, got True"),
        ('{"prompt": "p", "reward_model": {"style": "rule"}}', r":3: column 'reward_model', entry 'ground_truth'"),
        ('{"prompt": "p", "answer": "a", "completions": 1}', r":3: reward functions get another value.*'completions'"),
        ('{"prompt": "p", "answer": "a", "solution": 1}', r":3: column 'solution' must be a string"),
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
    with pytest.raises(UserError, match="its name must end in .jsonl or .parquet"):
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
    assert both.describe() == (
        f"{path}: 60 training rows, 10 held out for evaluation (the same data, chosen by hash of the prompt); 10 more "
        "rows left out of training: their prompts are among the held-out ones"
    )
    assert (both.num_rows_read, both.num_rows) == (80, 60)
    plain = task(write(tmp_path / "b.jsonl", rows(40)), num_eval=10)
    assert plain.describe() == (
        f"{tmp_path}/b.jsonl: 30 training rows, 10 held out for evaluation (the same data, chosen by hash of the "
        "prompt)"
    )


def test_held_out_prompts_of_an_eval_file_leave_training(tmp_path):
    train, held_out = write(tmp_path / "t.jsonl", rows(20)), write(tmp_path / "e.jsonl", rows(10, start=15))
    both = task(train, eval_file=str(held_out), num_eval=4)
    assert {both.problem(i).answer for i in range(40)} == {str(i) for i in range(15)}
    assert {p.answer for p in both.eval_problems(100)} == {str(i) for i in range(15, 25)}
    assert both.describe() == (
        f"{train}: 15 training rows; 10 rows for evaluation from {held_out}; 5 more rows left out of training: their "
        f"prompts are in {held_out}"
    )
    with pytest.raises(UserError, match="none is left for training"):
        task(train, eval_file=str(train))


def test_too_small_for_a_split(tmp_path):
    with pytest.raises(UserError, match="task.num_eval = 128.*only 40 different prompts.*at most 20"):
        task(write(tmp_path / "a.jsonl", rows(40)))


def test_answers_are_demanded_only_where_they_are_read(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"prompt": "p"}, {"prompt": "q", "answer": None}, {"prompt": "r", "answer": 3},
                                        {"prompt": "s", "reward_model": {"style": "model"}}])
    with pytest.raises(UserError, match="a.jsonl:1: column 'answer' is missing; the row has: 'prompt'"):
        read_problems(path)
    found = read_problems(path, Columns(needs_answer=False))
    assert [p.answer for p in found] == ["", "", "3", ""]
    assert {task(path, num_eval=1, needs_answer=False).problem(i).answer for i in range(3)} <= {"", "3"}
    write(path, [{"prompt": "p", "answer": ["a"]}])  # what is there must still be one
    with pytest.raises(UserError, match="column 'answer' must be a string or a number"):
        read_problems(path, Columns(needs_answer=False))


def test_nothing_is_held_out_while_evaluation_is_off(tmp_path):
    path = write(tmp_path / "a.jsonl", rows(3))
    with pytest.raises(UserError, match="only 3 different prompts"):
        task(path)
    whole = task(path, hold_out=False)
    assert {whole.problem(i).answer for i in range(3)} == {"0", "1", "2"} and whole.eval_problems(9) == []
    assert whole.describe() == f"{path}: 3 training rows, none held out, because eval.eval_interval = 0"
    named = task(path, hold_out=False, eval_file=str(write(tmp_path / "e.jsonl", rows(1))))  # yours is left out still
    assert {named.problem(i).answer for i in range(4)} == {"1", "2"} and len(named.eval_problems(9)) == 1


def test_overlong_prompts_are_dropped_and_counted(tmp_path):
    def short(problem):
        return len(problem.prompt) < len("question 10")

    path = write(tmp_path / "a.jsonl", rows(14))
    found = task(path, num_eval=3, fits=short)
    assert len(found.all_problems()) == 10 and len(found.eval_problems(9)) == 3
    assert f"{path}: 7 training rows, 3 held out for evaluation" in found.describe() and found.num_rows_read == 14
    assert f"; 4 rows of {path} left out: longer prompts than task.max_prompt_length" in found.describe()
    with pytest.raises(UserError, match=r"a.jsonl: all 14 prompts are longer.*Raise task.max_prompt_length"):
        task(path, num_eval=3, fits=lambda problem: False)
    assert "left out:" not in task(path, hold_out=False, fits=lambda problem: True).describe()


def test_repeated_prompts_are_dropped_and_counted(tmp_path):
    path = write(tmp_path / "a.jsonl", [*rows(4), {"prompt": " question 1\n", "answer": 1},
                                        {"prompt": "question 2", "answer": "other"}])
    assert len(task(path, hold_out=False).all_problems()) == 6
    found = task(path, hold_out=False, repeated_prompts="drop")
    assert [p.answer for p in sorted(found.all_problems(), key=lambda p: p.id)] == ["0", "1", "2", "3"]
    assert found.describe().endswith(
        f"; 2 rows of {path} left out: repeated prompts (1 of them with another answer)"
    )


def test_a_folder_is_told_as_one(tmp_path):
    with pytest.raises(UserError, match=r"is a folder, not a file. It has no .jsonl or .parquet file.*task.dataset"):
        task(tmp_path)
    write(tmp_path / "b.jsonl", [])
    write(tmp_path / "a.parquet", [])
    with pytest.raises(UserError, match=r"is a folder, not a file. Give one of its files: a.parquet, b.jsonl. A whole"):
        task(tmp_path)


def test_a_sieve_looks_for_repeats_first_and_counts_each_row_once():
    problems = [Problem(str(i), prompt, "a") for i, prompt in enumerate(["long", "x", "long", "x ", "y"])]
    sieve = Sieve(lambda problem: len(problem.prompt) < 4, distinct=True)
    assert [p.id for p in sieve.take(iter(problems), "s")] == ["1", "4"]
    assert (sieve.overlong, sieve.repeated, sieve.contradicting) == (1, 2, 0)
    assert sieve.describe("s") == (
        "1 row of s left out: longer prompts than task.max_prompt_length; 2 rows of s left out: repeated prompts"
    )
    assert Sieve().take(iter(problems), "s") == problems and Sieve().take(iter([]), "s") == []
