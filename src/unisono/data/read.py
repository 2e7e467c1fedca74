"""Records from JSON Lines (.jsonl, .ndjson) and JSON (.json, an array of objects), one at a time.

UTF-8 only; a byte-order mark is dropped at the start of the file and nowhere else; other encodings are refused by
name. Lines end at newline bytes only: U+2028 and U+0085 are ordinary characters inside a text. Nothing is mended:
what cannot be read is reported with its physical line.
"""

from __future__ import annotations

import json
import mmap
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from unisono.errors import DataError

MAX_RECORD_BYTES = 64 * 2**20
_LARGE_BYTES = 2**20
_PIECE_BYTES = 2**16
LINE_ENDINGS = (".jsonl", ".ndjson")
_BOM = b"\xef\xbb\xbf"
_SIGNATURES = (
    (b"\xff\xfe\x00\x00", "UTF-32"),
    (b"\x00\x00\xfe\xff", "UTF-32"),
    (b"\xff\xfe", "UTF-16"),
    (b"\xfe\xff", "UTF-16"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"PK\x03\x04", "a zip archive"),
    (b"PAR1", "a Parquet file"),
    (b"(\xb5/\xfd", "a zstandard archive"),
)
_GAP = re.compile(rb"[ \t\r\n]*(,[ \t\r\n]*)?")
_SCALAR = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[^,\[\]{}" \t\r\n]+', re.DOTALL)
_ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_BRACKET_OR_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}"]', re.DOTALL)


@dataclass(frozen=True)
class Raw:
    """What stands at one place of a file: an object, or the reason why it cannot be used."""

    line: int
    value: dict[str, Any] | None
    problem: str
    end_bytes: int


def read_records(path: Path, limit_bytes: int = MAX_RECORD_BYTES) -> Iterator[Raw]:
    """Yield every record of a file in order, unusable ones too; DataError when the file as a whole is unusable."""
    kind = path.suffix.lower()
    if kind not in (*LINE_ENDINGS, ".json"):
        raise DataError(
            f"files of the kind {kind or 'without a suffix'!r} are not read; .jsonl and .json are", where=str(path)
        )
    with path.open("rb") as file:
        start = _skip_mark(file, path)
        if kind == ".json" and _first_character(file) == b"[":
            yield from _read_array(file, path, start, limit_bytes)
        else:
            yield from _read_lines(file, start, limit_bytes)


def check_file(path: Path) -> None:
    """Refuse a path that is not a readable file."""
    if not path.exists():
        raise DataError(
            "the file does not exist", where=str(path), hint="data paths are relative to the working folder"
        )
    if not path.is_file():
        raise DataError("is a folder; a .jsonl or .json file is needed", where=str(path))
    try:
        path.open("rb").close()
    except OSError as error:
        raise DataError(f"the file cannot be opened: {error.strerror}", where=str(path)) from error


def _skip_mark(file: BinaryIO, path: Path) -> int:
    head = file.read(16)
    for signature, name in _SIGNATURES:
        if head.startswith(signature):
            raise DataError(
                f"the file is {name}; JSON in UTF-8 is needed", where=str(path), hint="convert it to UTF-8 JSON"
            )
    if head[:1] == b"\x00" or head[1:2] == b"\x00":
        raise DataError("the file is UTF-16; UTF-8 is needed", where=str(path), hint="convert it to UTF-8 JSON")
    start = len(_BOM) if head.startswith(_BOM) else 0
    file.seek(start)
    return start


def _first_character(file: BinaryIO) -> bytes:
    """Return the first byte that is no white space, leaving the position as it was."""
    place = file.tell()
    while (byte := file.read(1)).isspace():
        pass
    file.seek(place)
    return byte


def _read_lines(file: BinaryIO, start: int, limit_bytes: int) -> Iterator[Raw]:
    end = start
    number = 0
    while line := file.readline(limit_bytes + 1):
        number += 1
        end += len(line)
        if len(line) > limit_bytes and not line.endswith(b"\n"):
            while rest := file.readline(_PIECE_BYTES):
                end += len(rest)
                if rest.endswith(b"\n"):
                    break
            yield Raw(number, None, _too_big(limit_bytes), end)
        elif not line.isspace():
            yield _parse(line, number, end)


def _read_array(file: BinaryIO, path: Path, start: int, limit_bytes: int) -> Iterator[Raw]:
    """Walk over the elements of the array; the file is mapped, so that only the pages in use are in memory."""
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        place = data.find(b"[", start) + 1
        line, counted = 1, 0
        first = True
        while True:
            begin, comma = _next_element(data, place)
            line += _count_newlines(data, counted, begin)
            counted = begin
            if begin == len(data):
                yield Raw(line, None, "the JSON array is cut off: its closing bracket is missing", begin)
                return
            if data[begin : begin + 1] == b"]" and (first or not comma):
                _check_end(data, begin + 1, path, line)
                return
            if comma == first:
                what = "a comma too many" if first else "a comma is missing before this record"
                raise DataError(what, where=f"{path}:{line}")
            end = _element_end(data, begin)
            if end is None:
                yield Raw(line, None, "the record is cut off: the file ends inside it", len(data))
                return
            if end - begin > limit_bytes:
                yield Raw(line, None, _too_big(limit_bytes), end)
            else:
                yield _parse(data[begin:end], line, end)
            place, first = end, False


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


def _check_end(data: mmap.mmap, place: int, path: Path, line: int) -> None:
    end, comma = _next_element(data, place)
    if comma or end != len(data):
        line += _count_newlines(data, place, end)
        raise DataError("something follows the closing bracket of the JSON array", where=f"{path}:{line}")


def _parse(text: bytes, line: int, end: int) -> Raw:
    try:
        value = orjson.loads(text) if len(text) <= _LARGE_BYTES else _load_large(text)
    except orjson.JSONDecodeError as error:
        return Raw(line, None, _explain(text, error), end)
    if not isinstance(value, dict):
        kind = {list: "a list", str: "a text", bool: "true or false", type(None): "null"}.get(type(value), "a number")
        return Raw(line, None, f"is {kind}, not an object", end)
    return Raw(line, value, "", end)


def _load_large(text: bytes) -> Any:
    """Parse as orjson does, in a few times the memory of the text instead of twelve times."""
    try:
        value = json.loads(text.decode("utf-8"), parse_constant=_refuse_constant)
        if _ESCAPED_SURROGATE.search(text):
            orjson.dumps(value)  # refuses lone ones, which the standard parser lets pass
    except (ValueError, TypeError, RecursionError) as error:
        raise orjson.JSONDecodeError(str(error), "", 0) from error
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _explain(text: bytes, error: orjson.JSONDecodeError) -> str:
    try:
        text.decode("utf-8")
    except UnicodeDecodeError as wrong:
        return f"is not UTF-8: byte 0x{text[wrong.start]:02x} at byte {wrong.start + 1} of the record"
    if "surrogate" in error.msg:
        return f"holds half of a surrogate pair, which is no character (column {error.colno})"
    if text.strip() == b"[":
        return "is not a JSON object; a file that is one JSON array must be named .json"
    return f"is not valid JSON: {error.msg} (column {error.colno}); a line cut in half looks like this too"


def _too_big(limit_bytes: int) -> str:
    return f"is longer than {limit_bytes:,} bytes, the most that one record may have"
