"""The rows of a jsonl or parquet file, within a limit of memory: a small file can stand for rows that fill a machine.

What rows take is estimated before they are made: the bytes of their texts and numbers, and `ROW_BYTES` and
`CELL_BYTES` for Python's objects. A limit counts the rows that were read so far, so that a file is refused at the batch
that goes beyond it. One batch is held in addition, about a sixteenth of the limit or one row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from jetrl.errors import UserError, shorten
from jetrl.requirements import install
from jetrl.untrusted import MOST_LINE, json_value

GIB = 1 << 30
ROW_BYTES, CELL_BYTES = 300, 60  # of a row's table, of a value in it
_MOST_ROWS, _BATCHES = 4096, 16  # in a batch of parquet; batches that the limit must have room for
Row = tuple[int, Mapping[str, Any]]


class Budget:
    """Memory for the rows of `source`; UserError where they need more than `gib`."""

    def __init__(self, source: object, gib: float) -> None:
        self.source, self.gib = source, gib
        self.left = self.limit = int(gib * GIB)

    def take(self, rows: int, cells: int, content: int) -> None:
        """Count rows with so many values and bytes of content."""
        self.left -= self.needs(rows, cells, content)
        if self.left < 0:
            self.refuse(f"more than {self.gib:g} GiB")

    @staticmethod
    def needs(rows: int, cells: int, content: int) -> int:
        return rows * ROW_BYTES + cells * CELL_BYTES + content

    def refuse(self, size: str) -> None:
        raise UserError(
            f"{self.source}: its rows need {size} of memory, and task.max_data_gib is {self.gib:g}. If the file is "
            "what you expect, and this machine has the memory, raise that; or take fewer rows or columns."
        )


def read_jsonl(path: Path, gib: float) -> Iterator[Row]:
    """Line numbers and rows. Empty lines are left out."""
    budget = Budget(path, gib)
    size = path.stat().st_size
    if size > budget.limit:
        budget.refuse(f"at least the {size / GIB:.1f} GiB that the file has")
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        try:
            row = json_value(line)
        except ValueError as error:
            raise UserError(f"{path}:{number}: not valid JSON ({error}): {shorten(line)}") from error
        if not isinstance(row, dict):
            raise UserError(f"{path}:{number}: must be a JSON object with the columns, got {shorten(line)}")
        budget.take(1, line.count(",") + 1, len(line))
        yield number, row


def _lines(path: Path) -> Iterator[str]:
    """Not `splitlines`: JSON texts may hold U+2028."""
    with path.open(encoding="utf-8-sig") as file:
        number = 1
        try:
            while line := file.readline(MOST_LINE + 1):
                if len(line) > MOST_LINE:
                    raise UserError(
                        f"{path}:{number}: the line has more than {MOST_LINE >> 20} MiB, the most that jetrl reads as "
                        f"one row. It begins: {shorten(line[:200])}"
                    )
                yield line.removesuffix("\n")
                number += 1
        except UnicodeDecodeError as error:
            raise UserError(f"{path}: not UTF-8 text ({error}). Write the file as UTF-8.") from error


def read_parquet(path: Path, gib: float) -> Iterator[Row]:
    """Row numbers and rows, read batch by batch."""
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise UserError(f"{path}: reading parquet needs pyarrow; run: {install('data')}") from error
    budget = Budget(path, gib)
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(_batch_size(path, file.metadata, budget)):
                budget.take(batch.num_rows, batch.num_rows * batch.num_columns, batch.nbytes)
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except ArrowException as error:
        raise UserError(f"{path}: cannot be read as parquet: {error}") from error
    except MemoryError as error:
        raise UserError(
            f"{path}: its rows need more memory than this machine has free. Take fewer rows or columns, or lower "
            f"task.max_data_gib (now {gib:g}), so that such a file is refused early."
        ) from error


def _batch_size(path: Path, metadata: Any, budget: Budget) -> int:
    """Rows to read at once. UserError where the file's own sizes are beyond the budget.

    A column may hold each value once, in a dictionary, however often it is repeated: rows of it are at most so many
    times the dictionary. Where that could be too much, batches are so small that one has a small part of the limit.
    """
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    columns = [[group.column(i) for i in range(group.num_columns)] for group in groups]
    chunks = [chunk for group in columns for chunk in group]
    content, cells = (sum(getattr(chunk, key) for chunk in chunks) for key in ("total_uncompressed_size", "num_values"))
    if (known := budget.needs(metadata.num_rows, cells, content)) > budget.limit:
        budget.refuse(f"at least {known / GIB:.1f} GiB (it has {metadata.num_rows:,} rows)")
    with path.open("rb") as file:
        largest = [[_dictionary_bytes(file, chunk) for chunk in group] for group in columns]
    worst = [[size * chunk.num_values for size, chunk in zip(*pair, strict=True)]
             for pair in zip(largest, columns, strict=True)]
    if sum(map(sum, worst)) <= budget.limit:
        return _MOST_ROWS
    per_row = max(sum(sizes) / max(1, group.num_rows) for sizes, group in zip(worst, groups, strict=True))
    return max(1, min(_MOST_ROWS, int(budget.limit / _BATCHES / per_row)))


def _dictionary_bytes(file: BinaryIO, chunk: Any) -> int:
    """Bytes of a column's dictionary, unpacked; 0 without one. The largest value cannot have more.

    From the header of its page, in Thrift's compact protocol: the fields 1 (kind of page) and 2 (bytes, unpacked), each
    a byte 0x15 and a zigzag number of 7 bits a byte. For any other header, the bytes of the whole column.
    """
    if not chunk.has_dictionary_page:
        return 0
    file.seek(chunk.dictionary_page_offset)
    header, at = file.read(16), 0
    numbers: list[int] = []
    while len(numbers) < 2 and at < len(header) and header[at] == 0x15:
        number, shift, at = 0, 0, at + 1
        while at < len(header):
            number, shift, at = number | (header[at] & 0x7F) << shift, shift + 7, at + 1
            if header[at - 1] < 0x80:
                break
        numbers.append(number >> 1)
    return numbers[1] if len(numbers) == 2 else int(chunk.total_uncompressed_size)
