"""Read one source file from its first record to its last, whatever its form.

A file whose content is not what its name says (gzip without .gz, Parquet named .jsonl, UTF-16) is refused by name.
UTF-8 only; a byte-order mark is dropped at the start of the file and nowhere else.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from unisono.data.source.arrow import read_parquet
from unisono.data.source.datasets import read_dataset
from unisono.data.source.files import SourceFile
from unisono.data.source.json_array import is_array, read_array
from unisono.data.source.json_lines import read_json_lines
from unisono.data.source.names import Kind
from unisono.data.source.plain import read_text
from unisono.data.source.raw import MAX_RECORD_BYTES, Raw
from unisono.data.source.shards import read_shard
from unisono.data.source.stream import Digest, FileBytes, open_bytes, open_content, random_access
from unisono.data.source.table import read_table
from unisono.errors import DataError

_HEAD_BYTES = 512
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
    (b"BZh", "a bzip2 archive"),
    (b"\xfd7zXZ\x00", "an xz archive"),
    (b"ARROW1", "an Arrow file"),
)
_NEEDED: dict[Kind, str] = {
    "jsonl": "JSON in UTF-8",
    "json": "JSON in UTF-8",
    "csv": "CSV in UTF-8",
    "tsv": "TSV in UTF-8",
    "text": "text in UTF-8",
    "parquet": "a Parquet file",
    "tar": "a tar archive",
}


def read_records(
    file: SourceFile, digest: Digest | None = None, *, scratch: Path | None = None, limit_bytes: int = MAX_RECORD_BYTES
) -> Iterator[Raw]:
    """Yield every record of a file in order, unusable ones too; DataError when the file as a whole is unusable.

    By the end the digest has got every byte of the file once, as it lies there. Arrays and Parquet files that are
    compressed or remote are unpacked into an unnamed file in ``scratch``; OutputError when there is no room.
    """
    if file.kind == "dataset":
        yield from read_dataset(file.name, digest, limit_bytes)
        return
    size = file.num_bytes if file.is_remote else None
    with open_bytes(file.name, size, digest, is_remote=file.is_remote) as source:
        if file.kind in ("json", "parquet"):
            with random_access(source, file.name, file.compression, digest, scratch) as content:
                yield from _read_at_random(file, content, source, limit_bytes)
        else:
            yield from _read_through(file, open_content(source, file.name, file.compression), source, limit_bytes)


def _read_at_random(file: SourceFile, content: BinaryIO, source: FileBytes, limit_bytes: int) -> Iterator[Raw]:
    file_bytes = source.size or source.num_bytes
    head = content.read(_HEAD_BYTES)
    content.seek(_check_head(head, file))
    if file.kind == "parquet":
        yield from read_parquet(content, file.name, limit_bytes, file_bytes)
    elif is_array(content):
        yield from read_array(content, file.name, limit_bytes, file_bytes)
    else:
        # Not an array: one record a line, as in .jsonl. What was unpacked first has been read as far as it lies there.
        is_unpacked = bool(file.compression) or file.is_remote
        again = FileBytes(content, file.name, source.size, None, is_remote=False)
        lines = io.BufferedReader(again, io.DEFAULT_BUFFER_SIZE)
        yield from read_json_lines(lines, source if is_unpacked else again, limit_bytes)


def _read_through(file: SourceFile, content: io.BufferedReader, source: FileBytes, limit_bytes: int) -> Iterator[Raw]:
    head = b""
    while len(head) < _HEAD_BYTES and len(head) < len(head := content.peek(_HEAD_BYTES)):
        pass  # a peek reads at most once
    content.read(_check_head(head, file))
    if file.kind == "jsonl":
        yield from read_json_lines(content, source, limit_bytes)
    elif file.kind in ("csv", "tsv"):
        yield from read_table(content, source, file.name, "," if file.kind == "csv" else "\t", limit_bytes)
    elif file.kind == "text":
        yield from read_text(content, source, limit_bytes)
    else:
        yield from read_shard(content, source, file.name, limit_bytes)


def _check_head(head: bytes, file: SourceFile) -> int:
    """Return how many bytes the mark at the start has; DataError when the content is not what the name says."""
    found = next((name for signature, name in _SIGNATURES if head.startswith(signature)), "")
    if not found and head[257:262] == b"ustar":
        found = "a tar archive"
    if not found and file.kind not in ("tar", "parquet") and (head[:1] == b"\x00" or head[1:2] == b"\x00"):
        found = "UTF-16"
    needed = _NEEDED[file.kind]
    if file.kind == "parquet" and found != needed:
        raise DataError(f"the file is {found or 'no Parquet file'}; its name says Parquet", where=file.name)
    if found and found != needed:
        raise DataError(f"the file is {found}; {needed} is needed", where=file.name, hint=_hint(found, needed))
    return len(_BOM) if head.startswith(_BOM) and file.kind != "tar" else 0


def _hint(found: str, needed: str) -> str:
    if found.startswith("UTF-"):
        return f"convert it to {needed}"
    endings = {"a gzip archive": ".gz", "a zstandard archive": ".zst", "a Parquet file": ".parquet"}
    if found in endings:
        return f"is its name right? it should end in {endings[found]}"
    return "its name should say what it is" if found == "a tar archive" else "unpack it"
