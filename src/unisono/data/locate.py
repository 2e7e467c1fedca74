"""Back to the source files: a store keeps the numbers of records only, not their places and texts."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator

from unisono.data.prepare import Part
from unisono.data.source.read import read_records
from unisono.errors import DataError


def places(part: Part, records: Collection[int], tick: Callable[[], None]) -> dict[int, str]:
    """Return ``file:place`` of some records by reading the files again, up to the last of them.

    ``tick`` is called for each record that is read. DataError when they are not there any more.
    """
    found: dict[int, str] = {}
    wanted = set(records)
    number = 0
    for file in part.job.files:
        if len(found) == len(wanted):
            break
        for raw in read_records(file, scratch=part.folder):
            if number in wanted:
                found[number] = f"{file.name}:{raw.place}"
            number += 1
            tick()
            if len(found) == len(wanted):
                break
    if len(found) < len(wanted):
        names = ", ".join(file.name for file in part.job.files)
        raise DataError("the files were changed while they were looked at", where=names, hint="start again")
    return found


def first_texts(part: Part, num_records: int, tick: Callable[[], None]) -> Iterator[tuple[int, bytes]]:
    """Yield the number of each of the first records of a part, and its content as it stands in the file.

    Records that are no JSON lines are given as JSON. What cannot be read is left out.
    """
    number = 0
    for file in part.job.files:
        for raw in read_records(file, scratch=part.folder):
            if number == num_records:
                return
            tick()
            if raw.text is not None:
                yield number, raw.text
            elif raw.value is not None:
                yield number, json.dumps(raw.value, ensure_ascii=False, default=str).encode("utf-8", "replace")
            number += 1
