"""CSV and TSV: the first row names the fields, every value is a text.

"007" stays "007" and an empty cell is an empty text: types are never inferred. A row with another number of fields is
unusable. Quotes follow RFC 4180, for TSV too; what breaks them (or a row over the limit, which is mostly a quote that
is never closed) makes the rest of the file uncertain, so the file is refused there.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator
from typing import BinaryIO

from unisono.data.source.raw import Raw, not_utf8, unusable
from unisono.data.source.stream import FileBytes
from unisono.errors import DataError


class _Lines:
    """The physical lines of a file as the parser takes them; knows where the row began and whether it is UTF-8."""

    def __init__(self, content: BinaryIO, name: str, limit_bytes: int) -> None:
        self._content = content
        self._name = name
        self._limit_bytes = limit_bytes
        self._row_bytes = 0
        self.number = 0
        self.first = 0
        self.problem = ""

    def begin_row(self) -> None:
        """Note that what comes next is another row."""
        self.first = self.number + 1
        self._row_bytes = 0
        self.problem = ""

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self._content.readline(self._limit_bytes + 1)
        if not line:
            raise StopIteration
        self.number += 1
        self._row_bytes += len(line)
        if self._row_bytes > self._limit_bytes:
            raise DataError(
                f"the row that begins here is longer than {self._limit_bytes:,} bytes",
                where=f"{self._name}:{self.first}",
                hint="a closing quote may be missing",
            )
        try:
            return line.decode("utf-8")
        except UnicodeDecodeError as wrong:
            self.problem = self.problem or not_utf8(line, wrong.start)
            return line.decode("utf-8", "surrogateescape")  # so that the quotes still count; the row is not used


def read_table(content: BinaryIO, source: FileBytes, name: str, delimiter: str, limit_bytes: int) -> Iterator[Raw]:
    """Yield the rows below the header, each at the line where it begins."""
    # The parser's own limit is one for the whole process, and too low for long texts.
    csv.field_size_limit(max(csv.field_size_limit(), limit_bytes))
    lines = _Lines(content, name, limit_bytes)
    rows = _rows(lines, delimiter, name)
    header = next(rows, None)
    if header is None:
        return
    _check_header(header, lines, name, delimiter)
    for row in rows:
        place = str(lines.first)
        if lines.problem:
            yield unusable(place, lines.problem, source.num_bytes)
        elif len(row) != len(header):
            problem = f"the number of fields is {len(row)}, and the header names {len(header)}"
            yield unusable(place, problem, source.num_bytes)
        else:
            yield Raw(place, None, dict(zip(header, row)), "", source.num_bytes)


def _rows(lines: _Lines, delimiter: str, name: str) -> Iterator[list[str]]:
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    while True:
        lines.begin_row()
        try:
            row = next(reader, None)
        except csv.Error as error:
            raise DataError(
                f"the quotes or line ends of the row that begins here are wrong: {error}",
                where=f"{name}:{lines.first}",
                hint='a text with quotes, separators or line ends stands in quotes: "He said ""yes"", twice"',
            ) from error
        if row is None:
            return
        if row:
            yield row


def _check_header(header: list[str], lines: _Lines, name: str, delimiter: str) -> None:
    where = f"{name}:{lines.first}"
    if lines.problem:
        raise DataError(f"the header {lines.problem}", where=where)
    if "" in header:
        raise DataError(f"field {header.index('') + 1} of the header has no name", where=where)
    twice = [field for field, count in Counter(header).items() if count > 1]
    if twice:
        raise DataError(f"the header names {twice[0]!r} twice", where=where)
    other = [sign for sign in (",", ";", "\t") if sign != delimiter and sign in header[0]]
    if len(header) == 1 and other:
        raise DataError(
            f"the fields of the header are separated by {other[0]!r}; {delimiter!r} is needed",
            where=where,
            hint="commas for .csv, tabs for .tsv",
        )
