"""Rows of files within a limit of memory: small files that stand for huge rows are refused, and say how to go on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jetrl.errors import UserError
from jetrl.tasks import row_files
from jetrl.tasks.files import read_problems
from jetrl.tasks.parquet_pages import Page, pages_of
from jetrl.tasks.row_files import read_jsonl, read_parquet
from jetrl.untrusted import GIB, MOST_LINE

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
REFUSED = r"its rows need (more than|at least) .*task.max_data_gib is"


def write(path: Path, columns: dict[str, object], **options: object) -> Path:
    parquet.write_table(pa.table(columns), path, **options)
    return path


def test_repeated_texts_are_refused_before_they_are_made(tmp_path: Path) -> None:
    """A dictionary holds a text once: 1 MB stands for 7 GB. In a process that has memory for a part of them only."""
    text = pa.array(["x" * 10**6])
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 7000, pa.int32()), text)
    path = write(tmp_path / "bomb.parquet", {"prompt": column, "answer": ["1"] * 7000}, store_schema=False)
    assert path.stat().st_size < 2 * 10**6
    program = f"""
import pyarrow.parquet, resource
from pathlib import Path
from jetrl.errors import UserError
from jetrl.tasks.row_files import read_parquet
held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    list(read_parquet(Path({str(path)!r}), 0.25))
except UserError as error:
    print(error)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - held)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    told, kib = done.stdout.splitlines()
    assert "bomb.parquet: its rows need more than 0.25 GiB of memory, and task.max_data_gib is 0.25" in told
    assert int(kib) < 0.6 * 2**20, "rows beyond the limit were made"


def test_lists_of_repeated_texts_and_many_rows_are_refused(tmp_path: Path) -> None:
    messages = [[{"role": "user", "content": "y" * 10**5}]] * 4000
    path = write(tmp_path / "nested.parquet", {"prompt": messages, "answer": ["1"] * 4000})
    assert path.stat().st_size < 10**6
    with pytest.raises(UserError, match=REFUSED):
        list(read_parquet(path, 0.05))
    rows = write(tmp_path / "rows.parquet", {"prompt": pa.array([1] * 10**6)})
    with pytest.raises(UserError, match=r"at least 0.3 GiB \(it has 1,000,000 rows\)"):
        next(read_parquet(rows, 0.25))
    packed = write(tmp_path / "packed.parquet", {"p": ["z" * 10**8]}, compression="zstd", use_dictionary=False)
    assert packed.stat().st_size < 10**5
    with pytest.raises(UserError, match="at least 0.3 GiB"):
        next(read_parquet(packed, 0.05))


@pytest.mark.parametrize("options", [{}, {"use_dictionary": False}, {"row_group_size": 7}, {"compression": "gzip"}])
@pytest.mark.parametrize("per_batch", [1, 3, 4096])
def test_batches_give_the_rows_of_the_table(
    tmp_path: Path, options: dict[str, object], per_batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_files, "_MOST_ROWS", per_batch)
    table = {"prompt": [[{"role": "user", "content": f"q{i % 3}"}] for i in range(20)], "answer": list(range(20))}
    path = write(tmp_path / "a.parquet", table, **options)
    assert list(read_parquet(path, 1.0)) == list(enumerate(parquet.read_table(path).to_pylist(), 1))
    assert list(read_parquet(write(tmp_path / "none.parquet", {"prompt": pa.array([], pa.string())}), 1.0)) == []


@pytest.mark.parametrize("size", [10, 300, 70_000])
@pytest.mark.parametrize("options", [{}, {"compression": "none"}, {"data_page_version": "2.0"}])
def test_pages_are_read_from_their_headers(tmp_path: Path, size: int, options: dict[str, object]) -> None:
    columns = {"p": ["x" * size] * 9, "q": [1.5] * 9, "r": [[i] for i in range(9)]}
    path = write(tmp_path / "a.parquet", columns, **options)
    group = parquet.ParquetFile(path).metadata.row_group(0)
    with path.open("rb") as file:
        texts, numbers, lists = (list(pages_of(file, group.column(i))) for i in range(3))
        assert texts[0] == Page(True, size + 4, 0)  # with its length
        assert numbers[0] == Page(True, 8, 0)
        for pages in (texts, numbers, lists):
            assert sum(page.values for page in pages) == 9
        packed = group.column(0)
        file.seek(packed.dictionary_page_offset)
        head = file.read(3)
    broken = bytearray(path.read_bytes())
    at = broken.index(head, 4)
    broken[at : at + 3] = b"\x1b\xff\xff"
    path.write_bytes(broken)
    with path.open("rb") as file, pytest.raises(ValueError, match="header of a page"):
        list(pages_of(file, packed))


BIG = "x" * 10**6
# small files of many MB of rows, without a dictionary
BOMBS: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "plain": ({"p": [BIG] * 200}, {}),
    "binary": ({"p": [BIG.encode()] * 200}, {"compression": "gzip"}),
    "large text": ({"p": pa.array([BIG] * 200, pa.large_string())}, {"row_group_size": 50}),
    "lists": ({"p": [[BIG[:1000]] * 1000] * 200}, {}),
    "structs": ({"p": [{"a": {"b": BIG}}] * 200}, {}),
    "prefixes": ({"p": [BIG] * 2000}, {"column_encoding": "DELTA_BYTE_ARRAY"}),
    "lengths": ({"p": [BIG] * 200}, {"column_encoding": "DELTA_LENGTH_BYTE_ARRAY"}),
    "short, then long": ({"p": ["x"] * 50_000 + [BIG] * 200}, {}),
    "long, then short": ({"p": [BIG] * 200 + ["x"] * 50_000}, {"data_page_version": "2.0"}),
    "many numbers": ({"p": [[0] * 10**6] * 20}, {}),
}


@pytest.mark.parametrize("gib", [0.0625, 0.25])
@pytest.mark.parametrize("kind", BOMBS)
def test_memory_stays_near_the_limit(tmp_path: Path, kind: str, gib: float) -> None:
    """Whether the rows are refused or read: what is held at any time is about the limit at most."""
    columns, options = BOMBS[kind]
    path = write(tmp_path / "a.parquet", columns, **{"compression": "zstd", "use_dictionary": False, **options})
    assert path.stat().st_size < 10**6
    program = f"""
import resource
import pyarrow.parquet
from pathlib import Path
from jetrl.errors import UserError
from jetrl.tasks.row_files import read_parquet
held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
rows, told = [], ""
try:
    for row in read_parquet(Path({str(path)!r}), {gib}):
        rows.append(row)
except UserError as error:
    told = str(error)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - held, len(rows), told)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    kib, rows, told = done.stdout.split(" ", 2)
    assert "task.max_data_gib" in told or int(rows) == len(columns["p"])  # type: ignore[arg-type]
    assert int(kib) / 2**20 < 1.5 * gib + 0.05


DAMAGED = {"pages": (4, 400), "metadata": (-400, -40), "end": (-4, None), "all": (0, None)}


@pytest.mark.parametrize("compression", ["snappy", "zstd", "gzip", "none"])
@pytest.mark.parametrize("part", DAMAGED)
def test_a_damaged_file_is_named_with_the_cure(tmp_path: Path, part: str, compression: str) -> None:
    texts = [f"{i}+1=" for i in range(3000)]
    path = write(tmp_path / "a.parquet", {"prompt": texts, "answer": texts}, compression=compression)
    content, (first, last) = bytearray(path.read_bytes()), DAMAGED[part]
    content[first:last] = bytes(byte ^ 0xFF for byte in content[first:last])
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"a.parquet: .*(damaged|task.max_data_gib)"):
        list(read_parquet(path, 1.0))


def test_what_the_library_cannot_read_is_one_message(tmp_path: Path) -> None:
    deep, kind = 1, pa.int8()
    for _ in range(120):
        deep, kind = [deep], pa.list_(kind)  # type: ignore[assignment]
    day = pa.array([2**40], pa.timestamp("s"))  # beyond the years of Python
    texts = pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff")])
    for name, column in {"deep": pa.array([deep], kind), "day": day, "text": texts}.items():
        path = write(tmp_path / f"{name}.parquet", {"p": column})
        with pytest.raises(UserError, match=f"{name}.parquet: its rows cannot be read.* damaged"):
            list(read_parquet(path, 1.0))


def test_lines_are_bounded(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a\xe2\x80\xa8b", "answer": "1"}\r\n\n{"prompt": "c", "answer": 2}')
    assert [(n, row["prompt"]) for n, row in read_jsonl(path, 1.0)] == [(1, "a\u2028b"), (3, "c")]
    with pytest.raises(UserError, match=r"a.jsonl: its rows need more than 5e-07 GiB .*task.max_data_gib"):
        list(read_jsonl(path, 5e-7))
    with pytest.raises(UserError, match=r"at least the 0.0 GiB that the file has"):
        next(read_jsonl(path, 10 / GIB))
    path.write_text('{"prompt": 1}\n"' + "x" * MOST_LINE + '"\n')
    with pytest.raises(UserError, match=r"a.jsonl:2: the line has more than 64 MiB"):
        list(read_jsonl(path, 1.0))
    path.write_text('{"prompt": ' + "[" * 1000 + "]" * 1000 + "}\n")
    with pytest.raises(UserError, match=r"a.jsonl:1: not valid JSON \(lists or tables are nested"):
        list(read_jsonl(path, 1.0))


def test_the_setting_reaches_the_readers(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"q{i}", "answer": "1"}) + "\n" for i in range(50)))
    assert len(read_problems(path)) == 50
    with pytest.raises(UserError, match="task.max_data_gib is 1e-06"):
        read_problems(path, gib=1e-6)
