"""What stands at one place of a file, and the strict parsing of its JSON.

``parse`` is pure and may run in other processes than the reading. It takes UTF-8 only and refuses what is no JSON
object: lists, numbers, NaN, halves of surrogate pairs, torn lines.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import orjson

MAX_RECORD_BYTES = 64 * 2**20
_LARGE_BYTES = 2**20
_ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


@dataclass(frozen=True)
class Raw:
    """What stands at one place of a file: JSON that is not parsed yet, a record, or the reason why there is none.

    ``place`` is what follows the file's name for a person: a line, ``row 12``, a member's name. ``end_bytes`` is how
    far the file has been read, of its bytes as they lie there, compressed or not.
    """

    place: str
    text: bytes | None
    value: dict[str, Any] | None
    problem: str
    end_bytes: int


def parse(raw: Raw) -> Raw:
    """Turn ``text`` into ``value`` or ``problem``; anything else is returned as it is."""
    text = raw.text
    if text is None:
        return raw
    try:
        value = orjson.loads(text) if len(text) <= _LARGE_BYTES else _load_large(text)
    except orjson.JSONDecodeError as error:
        return Raw(raw.place, None, None, _explain(text, error), raw.end_bytes)
    if not isinstance(value, dict):
        kind = {list: "a list", str: "a text", bool: "true or false", type(None): "null"}.get(type(value), "a number")
        return Raw(raw.place, None, None, f"is {kind}, not an object", raw.end_bytes)
    return Raw(raw.place, None, value, "", raw.end_bytes)


def unusable(place: str, problem: str, end_bytes: int) -> Raw:
    """Make the entry of a record that cannot be used."""
    return Raw(place, None, None, problem, end_bytes)


def too_big(limit_bytes: int) -> str:
    """Say that a record is over the limit."""
    return f"is longer than {limit_bytes:,} bytes, the most that one record may have"


def decode(content: bytes) -> tuple[str, str]:
    """Return a text and an empty reason, or an empty text and why the bytes are none."""
    try:
        return content.decode("utf-8"), ""
    except UnicodeDecodeError as wrong:
        return "", not_utf8(content, wrong.start)


def not_utf8(content: bytes, at: int) -> str:
    """Say which byte of a record is not UTF-8."""
    return f"is not UTF-8: byte 0x{content[at]:02x} at byte {at + 1} of the record"


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
    _, problem = decode(text)
    if problem:
        return problem
    if "surrogate" in error.msg:
        return f"holds half of a surrogate pair, which is no character (column {error.colno})"
    if text.strip() == b"[":
        return "is not a JSON object; a file that is one JSON array must be named .json"
    return f"is not valid JSON: {error.msg} (column {error.colno}); a line cut in half looks like this too"
