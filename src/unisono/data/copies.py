"""Find equal samples by their hashes: by sorting, so that memory is a few times that of the hashes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from unisono.data.scan import NUM_EXAMPLES, Hashes
from unisono.data.store import Flags, Ints

_BLOCK = 1 << 18
Pairs = list[tuple[int, int]]


@dataclass(frozen=True, eq=False)
class Sorted:
    """Hashes in ascending order, and the sample that each is of; of equal ones the first sample comes first."""

    hashes: Hashes
    samples: Ints

    def find(self, hashes: Hashes) -> Ints:
        """Return the first sample with each of some hashes, -1 where there is none."""
        places = np.minimum(np.searchsorted(self.hashes, hashes), len(self.hashes) - 1)
        return np.where(self.hashes[places] == hashes, self.samples[places], -1)

    def repeating(self, ignored: Flags | None = None) -> Flags:
        """Flag the samples whose hash an earlier one has; empty hashes and ``ignored`` samples do not count."""
        flags = np.zeros(len(self.samples), np.bool_)
        before = np.zeros(1, self.hashes.dtype)
        for begin in range(0, len(self.samples), _BLOCK):
            hashes, samples = self.hashes[begin : begin + _BLOCK], self.samples[begin : begin + _BLOCK]
            counts = hashes != b""
            if ignored is not None:
                counts &= ~ignored[samples]
            hashes, samples = hashes[counts], samples[counts]
            if len(hashes):
                flags[samples] = hashes == np.concatenate([before, hashes[:-1]])
                before = hashes[-1:]
        return flags


def sort(hashes: Hashes) -> Sorted:
    """Sort the hashes of at least one sample."""
    samples = np.argsort(hashes, kind="stable")
    return Sorted(hashes[samples], samples)


def first_pairs(places: Ints) -> Pairs:
    """Pair the first few samples that have a place (not -1) with it."""
    found = np.flatnonzero(places >= 0)[:NUM_EXAMPLES]
    return list(zip(found.tolist(), places[found].tolist()))


def repeats(flags: Flags, hashes: Hashes, among: Sorted) -> Pairs:
    """Pair the first few flagged samples with the first one that has the same hash."""
    found = np.flatnonzero(flags)[:NUM_EXAMPLES]
    return list(zip(found.tolist(), among.find(hashes[found]).tolist()))
