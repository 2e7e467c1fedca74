"""Records from Arrow tables: Parquet files, and the data sets that `datasets` keeps.

JSON's types only: texts, numbers, true and false, null, lists and structs. A column of another type (dates, decimals,
bytes, maps) is refused by name: how it would be written as text is not ours to guess.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any, BinaryIO

from unisono.data.source.libraries import load_library
from unisono.data.source.raw import Raw, too_big, unusable
from unisono.errors import DataError

_BATCH_BYTES = 8 * 2**20
_BATCH_ROWS = 1024


def read_parquet(content: BinaryIO, name: str, limit_bytes: int, file_bytes: int) -> Iterator[Raw]:
    """Yield the rows of a Parquet file, some at a time. ``file_bytes``: its size as it lies there, for the progress."""
    arrow = load_library("pyarrow", "parquet", name)
    parquet = load_library("pyarrow.parquet", "parquet", name)
    number = 0
    try:
        file = parquet.ParquetFile(content)
        check_columns(arrow, file.schema_arrow, name)
        num_rows = max(1, file.metadata.num_rows)
        for group in range(file.num_row_groups):
            facts = file.metadata.row_group(group)
            row_bytes = max(1, facts.total_byte_size // max(1, facts.num_rows))
            size = min(_BATCH_ROWS, max(1, _BATCH_BYTES // row_bytes))
            for batch in file.iter_batches(batch_size=size, row_groups=[group]):
                number += batch.num_rows
                yield from read_batch(batch, number - batch.num_rows, limit_bytes, file_bytes * number // num_rows)
    except (arrow.ArrowException, OSError, EOFError, UnicodeDecodeError) as error:
        raise damaged(name, number, error) from error
    if number != file.metadata.num_rows:
        raise DataError(f"the file has {number:,} rows, and says that it has {file.metadata.num_rows:,}", where=name)


def damaged(name: str, number: int, error: BaseException) -> DataError:
    """Say that a table cannot be read on."""
    reason = " ".join(str(error).split())
    return DataError(f"the file is damaged or cut off after row {number}: {reason}", where=name, hint="make it again")


def read_batch(batch: Any, num_before: int, limit_bytes: int, end_bytes: int) -> Iterator[Raw]:
    """Yield the rows of a record batch; one whose texts are not UTF-8 or that is over the limit is unusable."""
    try:
        rows = batch.to_pylist()
    except UnicodeDecodeError:
        for i in range(batch.num_rows):
            yield _read_row(batch.slice(i, 1), num_before + i + 1, end_bytes)
        return
    may_be_big = batch.nbytes > limit_bytes
    for i, row in enumerate(rows, num_before + 1):
        if may_be_big and len(json.dumps(row, ensure_ascii=False).encode()) > limit_bytes:
            yield unusable(f"row {i}", too_big(limit_bytes), end_bytes)
        else:
            yield Raw(f"row {i}", None, row, "", end_bytes)


def _read_row(row: Any, number: int, end_bytes: int) -> Raw:
    try:
        (value,) = row.to_pylist()
    except UnicodeDecodeError as error:
        return unusable(f"row {number}", f"is not UTF-8: byte 0x{error.object[error.start]:02x} in a text", end_bytes)
    return Raw(f"row {number}", None, value, "", end_bytes)


def check_columns(arrow: Any, schema: Any, name: str) -> None:
    """Refuse columns whose type JSON does not have, and columns of one name; all of them in one error."""
    wrong = [f"{column.name!r} is {column.type}" for column in schema if not _is_json(arrow.types, column.type)]
    if wrong:
        raise DataError(
            f"columns of a type that a record cannot have: {'; '.join(wrong)}",
            where=name,
            hint="leave them out or write them as text; texts, numbers, booleans, lists and structs are read",
        )
    twice = [column for column, count in Counter(schema.names).items() if count > 1]
    if twice:
        raise DataError(f"several columns have the name {twice[0]!r}", where=name)


def _is_json(types: Any, kind: Any) -> bool:
    if types.is_dictionary(kind):
        return _is_json(types, kind.value_type)
    if types.is_struct(kind):
        names = [field.name for field in kind]
        return len(set(names)) == len(names) and all(_is_json(types, field.type) for field in kind)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _is_json(types, kind.value_type)
    plain = (
        types.is_string,
        types.is_large_string,
        types.is_string_view,
        types.is_integer,
        types.is_floating,
        types.is_boolean,
        types.is_null,
    )
    return any(test(kind) for test in plain)
