"""How large the pages of a parquet file are, from their headers: a library unpacks one whole before it gives a row.

The file's own metadata has the sizes of columns only, and is what a file claims; by the headers its pages are unpacked.
They are written in Thrift's compact protocol, of which this reads what they consist of.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

_DICTIONARY = 2  # a kind of page
_BOOLEANS, _BYTE, _INTEGERS, _DOUBLE, _BINARY, _STRUCT = (1, 2), 3, (4, 5, 6), 7, 8, 12  # kinds of fields
_DEEPEST = 8  # structs in each other


@dataclass(frozen=True, slots=True)
class Page:
    """`size`: bytes, unpacked. `values`: 0 of a dictionary, whose values the data pages repeat."""

    is_dictionary: bool
    size: int
    values: int


def pages_of(file: BinaryIO, chunk: Any) -> Iterator[Page]:
    """The pages of a column in a row group, in order. ValueError for headers that are none."""
    place = chunk.data_page_offset
    if chunk.has_dictionary_page and chunk.dictionary_page_offset:
        place = min(place, chunk.dictionary_page_offset)
    end = place + chunk.total_compressed_size
    left = chunk.num_values  # some writers count bytes behind the last page as the column's
    while left > 0 and place < end:
        file.seek(place)
        header = _struct(file)
        data = header.get(5) or header.get(8)  # of the first or second form of a data page
        numbers: list[Any] = [header.get(1), header.get(2), header.get(3), data.get(1) if isinstance(data, dict) else 0]
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError(f"no header of a page at byte {place}")
        kind, size, packed, values = numbers
        yield Page(kind == _DICTIONARY, size, values)
        left -= values
        place = file.tell() + packed


def _struct(file: BinaryIO, depth: int = 0) -> dict[int, Any]:
    """The fields of a struct by their numbers: integers, booleans and structs. Others are skipped."""
    found: dict[int, Any] = {}
    number = 0
    while head := _byte(file):
        kind = head & 15
        number = number + (head >> 4) if head >> 4 else _integer(file)
        if kind in _BOOLEANS:
            found[number] = kind == _BOOLEANS[0]
        elif kind == _BYTE:
            found[number] = _byte(file)
        elif kind in _INTEGERS:
            found[number] = _integer(file)
        elif kind in (_DOUBLE, _BINARY):
            file.seek(8 if kind == _DOUBLE else _unsigned(file), os.SEEK_CUR)
        elif kind == _STRUCT and depth < _DEEPEST:
            found[number] = _struct(file, depth + 1)
        else:
            raise ValueError(f"no header of a page before byte {file.tell()}")
    return found


def _byte(file: BinaryIO) -> int:
    if not (read := file.read(1)):
        raise ValueError("the header of a page is cut off")
    return read[0]


def _unsigned(file: BinaryIO) -> int:
    number = shift = 0
    while shift < 64:
        byte = _byte(file)
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number
        shift += 7
    raise ValueError("a number in the header of a page is too long")


def _integer(file: BinaryIO) -> int:
    """Zigzag: 0, -1, 1, -2, ... as 0, 1, 2, 3, ..."""
    number = _unsigned(file)
    return (number >> 1) ^ -(number & 1)
