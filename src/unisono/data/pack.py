"""How one rank's samples of an update are cut into micro-batches.

A micro-batch is a memory knob: whatever the cut, the update is the same. Samples are never split, lost or repeated.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


def pack(lengths: Indices, budget: int) -> list[Indices]:
    """Cut into packed rows of at most ``budget`` tokens: best fit, longest first.

    Returns places in ``range(len(lengths))``. Each sample goes to the row that it fills best, the oldest of equals; the
    number of rows is at most 11/9 of the least possible and one more (Johnson et al. 1974, "Worst-case performance
    bounds for simple one-dimensional packing algorithms"). A sample longer than the budget gets a row of its own.
    What stays free in a row costs no compute: rows are not padded.
    """
    rows: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (free tokens, row) of the rows that have room, ascending
    falling = np.argsort(-lengths, kind="stable")
    for place, length in zip(falling.tolist(), lengths[falling].tolist()):
        found = bisect_left(rooms, (length, -1))
        if found == len(rooms):
            free, row = budget, len(rows)
            rows.append([])
        else:
            free, row = rooms.pop(found)
        rows[row].append(place)
        if free > length:
            insort(rooms, (free - length, row))
    return [np.asarray(row, np.int64) for row in rows]


def batch_padded(lengths: Indices, budget: int) -> list[Indices]:
    """Cut into padded batches with ``samples x longest <= budget``: longest first, so that neighbours are alike."""
    batches: list[list[int]] = []
    longest = 0
    for place in np.argsort(-lengths, kind="stable"):
        if not batches or (len(batches[-1]) + 1) * longest > budget:
            batches.append([])
            longest = int(lengths[place])
        batches[-1].append(int(place))
    return [np.asarray(batch, np.int64) for batch in batches]


def batch_by_count(lengths: Indices, size: int) -> list[Indices]:
    """Cut into batches of ``size`` samples, longest first; the last may be smaller."""
    places = np.argsort(-lengths, kind="stable").astype(np.int64)
    return [places[start : start + size] for start in range(0, len(places), size)]
