"""Names of files: braces, globs, and the kind that a suffix promises.

A name that exists as it is written is that file, whatever signs are in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal
from urllib.parse import urlsplit

from unisono.errors import DataError

Kind = Literal["jsonl", "json", "csv", "tsv", "parquet", "text", "tar", "dataset"]
Compression = Literal["", "gzip", "zstd"]

MAX_NAMES = 1_000_000
REMOTE_SCHEMES = ("s3", "gs", "gcs", "http", "https", "hf")
HUB = "hub://"
_SUFFIXES: dict[str, Kind] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".txt": "text",
    ".tar": "tar",
}
_COMPRESSIONS: dict[str, Compression] = {".gz": "gzip", ".zst": "zstd"}
_BRACES = re.compile(r"\{(-?\d+)\.\.(-?\d+)\}|\{([^{}]*,[^{}]*)\}")
_URL = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE)


def scheme(name: str) -> str:
    """Return the scheme of a URL in small letters, or nothing for a path."""
    match = _URL.match(name)
    return match.group(1).lower() if match else ""


def kind_of(name: str) -> tuple[Kind, Compression]:
    """Say what a file is by its suffixes; DataError when they are of no known kind."""
    path = (urlsplit(name).path if scheme(name) in ("http", "https") else name).lower()
    base = path.rsplit("/", 1)[-1]
    if base.endswith(".tgz"):
        return "tar", "gzip"
    compression: Compression = ""
    for suffix, meaning in _COMPRESSIONS.items():
        if base.endswith(suffix):
            base, compression = base[: -len(suffix)], meaning
    dot = base.rfind(".")
    suffix = base[dot:] if dot >= 0 else ""
    if suffix not in _SUFFIXES:
        raise DataError(
            f"files of the kind {suffix or 'without a suffix'!r} are not read; {', '.join(_SUFFIXES)} are, "
            f"each also with {' or '.join(_COMPRESSIONS)} behind it",
            where=name,
        )
    return _SUFFIXES[suffix], compression


def expand_braces(name: str) -> Iterator[str]:
    """Yield every name that ``{000..099}`` and ``{a,b}`` stand for, in the order written, as a shell does."""
    names = _num_names(name)
    if names > MAX_NAMES:
        raise DataError(f"the braces stand for {names:,} names; at most {MAX_NAMES:,} are taken", where=name)
    yield from _expand(name)


def _num_names(name: str) -> int:
    number = 1
    for match in _BRACES.finditer(name):
        first, last, listed = match.groups()
        number *= abs(int(last) - int(first)) + 1 if listed is None else listed.count(",") + 1
    return number


def _expand(name: str) -> Iterator[str]:
    match = _BRACES.search(name)
    if match is None:
        yield name
        return
    first, last, listed = match.groups()
    for choice in listed.split(",") if listed is not None else _range(first, last):
        for rest in _expand(name[match.end() :]):
            yield name[: match.start()] + choice + rest


def _range(first: str, last: str) -> Iterator[str]:
    """Count from one bound to the other, with leading zeros if a bound has them."""
    is_padded = any(len(bound.lstrip("-")) > 1 and bound.lstrip("-").startswith("0") for bound in (first, last))
    width = max(len(first), len(last)) if is_padded else 0
    step = 1 if int(first) <= int(last) else -1
    for number in range(int(first), int(last) + step, step):
        yield f"{number:0{width}d}"


def is_glob(name: str) -> bool:
    """Say whether a name has signs that stand for others; a ``?`` in a web address begins its query."""
    return any(sign in name for sign in ("*[" if scheme(name) in ("http", "https") else "*?["))
