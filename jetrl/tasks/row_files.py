"""The rows of a jsonl or parquet file, within a limit of memory: a small file can stand for rows that fill a machine.

What rows take is estimated before they are made (`untrusted.Budget`). A limit counts the rows that were read so far,
so that a file is refused at the batch that goes beyond it. One batch is held in addition: at most 64 rows, and so few
that they take a sixteenth of the limit if they are as large as those of the largest page; or one row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jetrl.errors import UserError, shorten
from jetrl.requirements import install
from jetrl.tasks.parquet_pages import Page, pages_of
from jetrl.untrusted import GIB, MOST_LINE, Budget, json_value

_MOST_ROWS, _BATCHES = 64, 16  # in a batch of parquet (more is no faster); batches that the limit must have room for
Row = tuple[int, Mapping[str, Any]]


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
    """Row numbers and rows, read batch by batch. UserError for a file that the library cannot read, or in which it
    finds values that Python does not have."""
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise UserError(f"{path}: reading parquet needs pyarrow; run: {install('data')}") from error
    budget = Budget(path, gib)
    number = 0
    with read_by_library(budget):
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(_batch_size(path, file.metadata, budget)):
                budget.take(batch.num_rows, batch.num_rows * batch.num_columns, batch.nbytes)
                for row in batch.to_pylist():
                    number += 1
                    yield number, row


@contextmanager
def read_by_library(budget: Budget) -> Iterator[None]:
    """What a library raises about the content of `budget.source` becomes a UserError; errors of the disk stay."""
    try:
        yield
    except UserError:
        raise
    except MemoryError as error:
        raise UserError(
            f"{budget.source}: its rows need more memory than this machine has free. Use fewer rows or columns, or "
            f"lower task.max_data_gib (now {budget.gib:g}), so that they are refused early."
        ) from error
    except Exception as error:  # pyarrow has errors of its own, and an OSError without a number for damaged pages
        if isinstance(error, OSError) and error.errno is not None:
            raise
        reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise UserError(
            f"{budget.source}: its rows cannot be read: {reason}. It is damaged, or has values that Python lacks. "
            "Write it again, or fetch it again."
        ) from error


def _batch_size(path: Path, metadata: Any, budget: Budget) -> int:
    """Rows to read at once. UserError where the sizes that the file states are beyond the budget.

    The library unpacks a page, which can take it twice, and makes a batch of rows before anything can be counted. So
    the largest page has to fit in next to the rows, and a batch has a small part of the limit where rows are largest.
    """
    content = cells = largest = 0
    per_row = 1.0
    with path.open("rb") as file:
        for group in map(metadata.row_group, range(metadata.num_row_groups)):
            in_group = 0.0
            for column in map(group.column, range(group.num_columns)):
                pages = list(pages_of(file, column))
                content += sum(page.size for page in pages)
                cells += column.num_values
                largest = max([largest, *(page.size for page in pages)])
                in_group += _most_bytes(column, pages) * column.num_values / max(1, group.num_rows)
            per_row = max(per_row, in_group)
    if (known := budget.needs(metadata.num_rows, cells, content + 2 * largest)) > budget.limit:
        budget.refuse(f"at least {known / GIB:.1f} GiB (it has {metadata.num_rows:,} rows)")
    return max(1, min(_MOST_ROWS, int(budget.limit / _BATCHES / per_row)))


def _most_bytes(column: Any, pages: Sequence[Page]) -> float:
    """The most that one of the column's values takes, on average over a page.

    A dictionary holds each value once, however often it is repeated, and DELTA_BYTE_ARRAY leaves out what a text has in
    common with the one before: there a value may be as large as all of the page.
    """
    shared = "DELTA_BYTE_ARRAY" in column.encodings
    return max((page.size if page.is_dictionary or shared else page.size / max(1, page.values) for page in pages),
               default=0.0)
