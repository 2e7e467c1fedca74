"""The forms of data, written by other libraries than the ones that read them."""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
import tarfile
from collections.abc import Callable

import pyarrow as pa
import pyarrow.parquet as pq

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd


def _zstandard(content: bytes) -> bytes:
    """Compress as the zstd command does: with a checksum, which the library leaves out unless asked."""
    return zstd.compress(content, options={zstd.CompressionParameter.checksum_flag: 1})


PACK: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzip.compress, ".zst": _zstandard}


def table(records: list[dict[str, object]], delimiter: str = ",") -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, delimiter=delimiter, quoting=csv.QUOTE_ALL)
    writer.writerow(records[0])
    writer.writerows(record.values() for record in records)
    return text.getvalue().encode()


def parquet(records: list[dict[str, object]] | pa.Table) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(records) if isinstance(records, list) else records, file, row_group_size=2)
    return file.getvalue()


def tar(members: dict[str, bytes], form: int = tarfile.PAX_FORMAT) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=form) as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return file.getvalue()


def shard(records: list[dict[str, object]]) -> bytes:
    return tar({f"{i:06d}.json": json.dumps(record).encode() for i, record in enumerate(records)})


def json_lines(records: list[dict[str, object]]) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


WRITE: dict[str, Callable[[list[dict[str, object]]], bytes]] = {
    "jsonl": json_lines,
    "json": lambda records: json.dumps(records).encode(),
    "csv": table,
    "tsv": lambda records: table(records, "\t"),
    "parquet": parquet,
    "tar": shard,
}
