"""A file that is one JSON array of records, walked over without parsing it as a whole.

The file is mapped, so that only the pages in use are in memory. What stands between the records must be right: a
comma too many or too few is refused with its line.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator
from typing import BinaryIO

from unisono.data.source.raw import Raw, too_big, unusable
from unisono.errors import DataError

_PIECE_BYTES = 2**16
_GAP = re.compile(rb"[ \t\r\n]*(,[ \t\r\n]*)?")
_SCALAR = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[^,\[\]{}" \t\r\n]+', re.DOTALL)
_BRACKET_OR_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}"]', re.DOTALL)


def is_array(content: BinaryIO) -> bool:
    """Say whether the first byte that is no white space opens an array, leaving the position as it was."""
    place = content.tell()
    while (byte := content.read(1)).isspace():
        pass
    content.seek(place)
    return byte == b"["


def read_array(content: BinaryIO, name: str, limit_bytes: int, file_bytes: int) -> Iterator[Raw]:
    """Yield the elements, unparsed, each at its line. ``file_bytes``: the size as the file lies there."""
    with mmap.mmap(content.fileno(), 0, access=mmap.ACCESS_READ) as data:
        place = data.find(b"[", content.tell()) + 1
        line, counted, is_first = 1, 0, True
        while True:
            begin, comma = _next_element(data, place)
            line += _count_newlines(data, counted, begin)
            counted = begin
            if begin == len(data):
                problem = "the JSON array is cut off: its closing bracket is missing"
                yield unusable(str(line), problem, file_bytes)
                return
            if data[begin : begin + 1] == b"]" and (is_first or not comma):
                _check_end(data, begin + 1, name, line)
                return
            if comma == is_first:
                what = "a comma too many" if is_first else "a comma is missing before this record"
                raise DataError(what, where=f"{name}:{line}")
            end = _element_end(data, begin)
            if end is None:
                yield unusable(str(line), "the record is cut off: the file ends inside it", file_bytes)
                return
            read_bytes = file_bytes * end // len(data)
            if end - begin > limit_bytes:
                yield unusable(str(line), too_big(limit_bytes), read_bytes)
            else:
                yield Raw(str(line), data[begin:end], None, "", read_bytes)
            place, is_first = end, False


def _count_newlines(data: mmap.mmap, begin: int, end: int) -> int:
    """Count piecewise: a slice of a map is a copy, and records can be large."""
    return sum(data[at : min(at + _PIECE_BYTES, end)].count(b"\n") for at in range(begin, end, _PIECE_BYTES))


def _next_element(data: mmap.mmap, place: int) -> tuple[int, bool]:
    """Return where the next element (or the closing bracket) begins, and whether a comma stands before it."""
    gap = _GAP.match(data, place)
    assert gap is not None, "the pattern matches the empty string"
    return gap.end(), gap.group(1) is not None


def _element_end(data: mmap.mmap, begin: int) -> int | None:
    """Return the place after the element that begins here, or None when the file ends inside it."""
    if data[begin : begin + 1] not in (b"{", b"["):
        scalar = _SCALAR.match(data, begin)
        return scalar.end() if scalar else None
    depth = 0
    for match in _BRACKET_OR_STRING.finditer(data, begin):
        token = match.group() if match.end() - match.start() == 1 else b""
        if token == b'"':
            return None
        depth += (token in (b"{", b"[")) - (token in (b"}", b"]"))
        if depth == 0:
            return match.end()
    return None


def _check_end(data: mmap.mmap, place: int, name: str, line: int) -> None:
    end, comma = _next_element(data, place)
    if comma or end != len(data):
        line += _count_newlines(data, place, end)
        raise DataError("something follows the closing bracket of the JSON array", where=f"{name}:{line}")
