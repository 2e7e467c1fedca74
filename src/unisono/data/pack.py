"""How one rank's samples of an update are cut into micro-batches.

A micro-batch is a memory knob: whatever the cut, the update is the same. Samples are never split, lost or repeated.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


def pack(lengths: Indices, budget: int) -> list[Indices]:
    """Cut into packed rows of at most ``budget`` tokens: first fit, longest first.

    Returns places in ``range(len(lengths))``. A sample longer than the budget gets a row of its own.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for place in np.argsort(-lengths, kind="stable"):
        length = int(lengths[place])
        found = next((k for k, free in enumerate(room) if free >= length), None)
        if found is None:
            bins.append([])
            room.append(budget)
            found = len(bins) - 1
        bins[found].append(int(place))
        room[found] -= length
    return [np.asarray(row, np.int64) for row in bins]


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
