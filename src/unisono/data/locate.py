"""From the numbers of records to the places in their files: a store keeps numbers only."""

from __future__ import annotations

from collections.abc import Callable, Collection

from unisono.data.job import Job
from unisono.data.prepare import Part
from unisono.data.source.read import read_records


def places(part: Part, records: Collection[int], tick: Callable[[], None]) -> dict[int, str]:
    """Return ``file:place`` of some records by reading the files again, up to the last of them.

    ``tick`` is called for each record that is read.
    """
    found: dict[int, str] = {}
    wanted = set(records)
    number = 0
    job: Job = part.job
    for file in job.files:
        if len(found) == len(wanted):
            break
        for raw in read_records(file, scratch=part.folder):
            if number in wanted:
                found[number] = f"{file.name}:{raw.place}"
            number += 1
            tick()
            if len(found) == len(wanted):
                break
    return found
