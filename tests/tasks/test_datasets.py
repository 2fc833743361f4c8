"""Data sets by name: splits, configurations, columns, revisions, and what is said where one is missing."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hub_server import ONE, TWO, Hub, Repo, serving, use, write_cache

from jetrl.config import TaskConfig
from jetrl.errors import UserError
from jetrl.huggingface import hub
from jetrl.tasks.datasets import read_dataset
from jetrl.tasks.files import FileTask

datasets = pytest.importorskip("datasets")
CARD = b"""---
license: mit
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: [main/test-0.jsonl]
- config_name: other
  data_files: other/*.jsonl
- config_name: folder
  data_dir: data
---
# Sums
"""


def rows(tag: str, n: int = 4, **more: Any) -> bytes:
    made = ({"question": f"{tag} {i}", "answer": i} | more for i in range(n))
    return "".join(json.dumps(row) + "\n" for row in made).encode()


FILES = {
    "README.md": CARD, "main/train-0.jsonl": rows("a"), "main/train-1.jsonl": rows("b"), "main/test-0.jsonl": rows("t"),
    "other/x.jsonl": rows("o"), "data/train.jsonl": rows("d"), "data/test.jsonl": rows("e"), "picture.png": b"1",
}
PLAIN = {"data/train.jsonl": rows("p"), "data/test.jsonl": rows("q"), "picture.png": b"x"}
MAIN = {"dataset": "acme/sums", "dataset_config": "main", "prompt_column": "question"}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "arrow")
    return tmp_path / "cache"


@pytest.fixture
def server(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    served = Hub()
    served.repos["dataset", "acme/sums"] = Repo({ONE: FILES})
    served.repos["dataset", "acme/plain"] = Repo({ONE: PLAIN})
    with serving(served) as address:
        use(monkeypatch, cache, address)
        yield served


@pytest.fixture
def offline(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache that is written by hand, without network."""
    use(monkeypatch, cache, offline=True)
    write_cache(cache, "acme/sums", FILES, kind="dataset")
    write_cache(cache, "acme/plain", PLAIN, kind="dataset")
    return cache


def task(**keys: Any) -> FileTask:
    return FileTask(TaskConfig(name="file", **keys), 0)


def trained(made: FileTask, n: int) -> set[Any]:
    return {made.problem(i).prompt for i in range(n)}


def held_out(made: FileTask) -> set[Any]:
    return {problem.prompt for problem in made.eval_problems(99)}


@pytest.mark.parametrize("where", ["server", "offline"])
def test_splits_of_a_configuration(where: str, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(where)
    made = task(**MAIN, eval_split="test")
    assert trained(made, 8) == {f"{tag} {i}" for tag in "ab" for i in range(4)}
    assert held_out(made) == {f"t {i}" for i in range(4)}
    ids = {problem.id for problem in made.all_problems()}
    assert len(ids) == 12 and "acme/sums (main), train:8" in ids
    assert made.describe() == (
        "acme/sums (main), train: 8 training rows; 4 rows for evaluation from acme/sums (main), test"
    )


def test_only_the_files_of_the_configuration_are_downloaded(server: Hub, cache: Path) -> None:
    task(**MAIN | {"dataset_config": "other"}, num_eval=2)
    names = {path.name for path in (cache / "datasets--acme--sums" / "snapshots").rglob("*") if path.is_file()}
    assert names == {"README.md", "x.jsonl"}
    assert held_out(task(**MAIN | {"dataset_config": "folder"}, eval_split="test")) == {f"e {i}" for i in range(4)}
    task(dataset="acme/plain", prompt_column="question", num_eval=2)
    names = {path.name for path in (cache / "datasets--acme--plain" / "snapshots").rglob("*") if path.is_file()}
    assert names == {"train.jsonl", "test.jsonl"}, "a data set without a card"


def test_rows_come_in_order_however_many_are_read_at_once(offline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jetrl.tasks.datasets._ROWS_AT_ONCE", 3)
    found = read_dataset("acme/sums", "main", None, "train")
    assert [row["question"] for row in found.rows] == [f"{tag} {i}" for tag in "ab" for i in range(4)]


def test_another_data_set_for_evaluation(offline: Path) -> None:
    made = task(
        dataset="acme/plain", prompt_template="<{question}>", train_split="test", eval_dataset="acme/sums",
        eval_dataset_config="other", eval_split="train", eval_prompt_column="question", num_eval=2,
    )
    assert trained(made, 4) == {f"<q {i}>" for i in range(4)} and held_out(made) == {f"o {i}" for i in range(4)}


def test_problems_are_held_out_where_there_is_no_split_for_evaluation(offline: Path) -> None:
    made = task(dataset="acme/plain", prompt_column="question", num_eval=2)
    assert len(held_out(made)) == 2 and len(trained(made, 2)) == 2 and not held_out(made) & trained(made, 2)


def test_a_folder_of_data_files(tmp_path: Path) -> None:
    for name, data in FILES.items():
        (tmp_path / "sums" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "sums" / name).write_bytes(data)
    made = task(**MAIN | {"dataset": str(tmp_path / "sums")}, eval_split="test")
    assert held_out(made) == {f"t {i}" for i in range(4)}
    with pytest.raises(UserError, match="is a folder on disk, so the revision v1 has no effect"):
        task(**MAIN | {"dataset": str(tmp_path / "sums")}, dataset_revision="v1")


def test_parquet_with_messages_and_verls_answers(tmp_path: Path) -> None:
    from pyarrow import Table, parquet

    row = {"prompt": [{"role": "user", "content": "1+1?"}], "reward_model": {"ground_truth": "2"}, "data_source": "x"}
    (tmp_path / "verl").mkdir()
    more = [row | {"prompt": [{"role": "user", "content": f"{i}?"}]} for i in range(3)]
    parquet.write_table(Table.from_pylist([row, *more]), tmp_path / "verl" / "train.parquet")
    made = task(dataset=str(tmp_path / "verl"), num_eval=1)
    (problem,) = (p for p in made.all_problems() if p.prompt[0]["content"] == "1+1?")  # type: ignore[index]
    assert problem.answer == "2" and problem.extra["data_source"] == "x"


def test_a_revision(server: Hub) -> None:
    repo = server.repos["dataset", "acme/plain"]
    repo.commits[TWO], repo.refs["v2"] = PLAIN | {"data/train.jsonl": rows("new")}, TWO
    keys = {"dataset": "acme/plain", "prompt_column": "question", "eval_split": "test"}
    assert trained(task(**keys, dataset_revision="v2"), 4) == {f"new {i}" for i in range(4)}
    assert trained(task(**keys), 4) == {f"p {i}" for i in range(4)}
    with pytest.raises(UserError, match=r"acme/plain has no revision 'v3'.*http\S+/datasets/acme/plain"):
        task(**keys, dataset_revision="v3")
    server.asked.clear()
    task(**keys, dataset_revision=TWO)
    assert not server.asked, "a commit that is in the cache was asked for"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"dataset_config": "nope"}, r"acme/sums: it has no configuration 'nope'; it has: main, other, folder. Set"),
        ({"dataset_config": None}, "acme/sums: its configuration must be named; it has: main, other, folder"),
        ({"train_split": "valid"}, r"acme/sums \(main\) has no split 'valid'; it has: train, test. Set task.tra"),
        ({"eval_split": "dev"}, r"acme/sums \(main\) has no split 'dev'; it has: train, test"),
        ({"prompt_column": "q"}, r"acme/sums \(main\), train:1: column 'q' is missing; the row has: 'question',"),
        ({"answer_column": "gold"}, "column 'gold' is missing; the row has: 'question'. Set task.answer_column"),
        ({"prompt_column": "prompt", "prompt_template": "{q}"}, "column 'q' is missing.*Set task.prompt_template"),
        ({"dataset": "acme/nothing"}, "datasets--acme--nothing into"),
        ({"dataset": "gsm8k"}, "those have one slash, as in openai/gsm8k"),
        ({"dataset": __file__}, "is a file. Give it as task.train_file"),
    ],
)
def test_what_a_data_set_does_not_have(offline: Path, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        task(**{k: v for k, v in {**MAIN, **keys}.items() if v is not None and (k, v) != ("prompt_column", "prompt")})


def test_data_that_cannot_be_read(server: Hub) -> None:
    served = {"broken": {"train.jsonl": b"{nope"}, "script": {"script.py": b"", "x.png": b"1"}}
    for name, files in served.items():
        server.repos["dataset", f"acme/{name}"] = Repo({ONE: files})
    with pytest.raises(UserError, match="acme/broken: the library datasets cannot read it: .*JSON parse error"):
        task(dataset="acme/broken")
    with pytest.raises(UserError, match="acme/script has no data files that can be read.*It has: script.py, x.png"):
        task(dataset="acme/script")
    with pytest.raises(UserError, match="the hub has no data set of that name"):
        task(dataset="acme/nothing")


def test_half_a_download_is_completed_or_named(server: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task(**MAIN, eval_split="test")
    folder = cache / "datasets--acme--sums" / "snapshots" / ONE
    (folder / "main" / "train-1.jsonl").unlink()
    with monkeypatch.context() as away:
        use(away, cache, offline=True)
        with pytest.raises(UserError, match=r"lacks main/train-1.jsonl.*hf download acme/sums --repo-type dataset"):
            task(**MAIN, eval_split="test")
    assert len(trained(task(**MAIN, eval_split="test", dataset_revision=ONE), 8)) == 8


def test_columns_that_rewards_have_by_another_meaning_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    made = rows("x", gold="g", completions=["c"], solution=5, level=1)
    (tmp_path / "set" / "train.jsonl").write_bytes(made)
    keys = {"dataset": str(tmp_path / "set"), "prompt_column": "question", "num_eval": 1}
    problem = task(**keys, answer_column="solution").problem(0)
    assert (problem.answer, problem.solution, problem.extra) == ("5", None, {"gold": "g", "level": 1})


def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"acme/sums: data sets by name.*pip install 'jetrl\[data\]'"):
        task(**MAIN)


def test_a_broken_card(offline: Path) -> None:
    write_cache(offline, "acme/card", {"README.md": b"---\n{\n---\n", "train.jsonl": rows("x")}, kind="dataset")
    with pytest.raises(UserError, match=r"README.md: its head is not valid YAML"):
        task(dataset="acme/card")
    assert hub.fetch("acme/card", None, "dataset", ["*.jsonl"]).commit == ONE
    for path in ("/etc/passwd", "../x.jsonl", "https://x.jsonl"):
        write_cache(offline, f"acme/out{len(path)}", {"README.md": card_of(path), "x.jsonl": b""}, kind="dataset")
        with pytest.raises(UserError, match=f"card names {path}, which is outside of it"):
            task(dataset=f"acme/out{len(path)}")
    write_cache(offline, "acme/gone", {"README.md": card_of("y-*.jsonl"), "x.jsonl": rows("x")}, kind="dataset")
    with pytest.raises(UserError, match="its card names y-.*.jsonl, and .* has no such file"):
        task(dataset="acme/gone")


def card_of(path: str) -> bytes:
    return f"---\nconfigs:\n- config_name: default\n  data_files: {path!r}\n---\n".encode()


@pytest.mark.parametrize(
    ("file", "data"),
    [
        ("a.csv", b"question,answer\nx,1\ny,2\n"), ("a.tsv", b"question\tanswer\nx\t1\ny\t2\n"),
        ("a.json", b'{"rows": [{"question": "x", "answer": 1}, {"question": "y", "answer": 2}]}'),
    ],
)
def test_other_formats_of_files(offline: Path, file: str, data: bytes) -> None:
    more = b"  field: rows\n" if file.endswith("json") else b""
    card = card_of(file).replace(b"  data_files", more + b"  data_files")
    write_cache(offline, "acme/other", {"README.md": card, file: data}, kind="dataset")
    made = task(dataset="acme/other", prompt_column="question", num_eval=1)
    assert {(problem.prompt, problem.answer) for problem in made.all_problems()} == {("x", "1"), ("y", "2")}


@pytest.mark.parametrize("damaged", [False, True])
def test_what_cannot_be_read_names_the_data_set(cache: Path, tmp_path: Path, damaged: bool) -> None:
    """Damaged pages; and a day beyond those of Python, which the library reads and Python does not."""
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    folder = tmp_path / "own"
    folder.mkdir()
    texts = [f"{i}+1=" for i in range(3000)]
    days = pa.array([2**40] * len(texts), pa.timestamp("s"))
    parquet.write_table(pa.table({"prompt": texts, "answer": texts, "day": days}), folder / "train.parquet")
    if damaged:
        content = bytearray((folder / "train.parquet").read_bytes())
        content[200:260] = bytes(byte ^ 0xFF for byte in content[200:260])
        (folder / "train.parquet").write_bytes(content)
    with pytest.raises(UserError, match=f"{folder}.*(cannot read it|cannot be read): "):
        task(dataset=str(folder), num_eval=2)
