"""How long samples are: counted a block at a time, so that memory follows the longest sample and not their number."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from unisono.data.store import Ints, TokenStore

_BLOCK = 1 << 18
_NUM_BINS = 10
_BAR_WIDTH = 40


@dataclass(frozen=True)
class Bin:
    """Samples of ``begin`` to ``end - 1`` tokens."""

    begin: int
    end: int
    samples: int


@dataclass(frozen=True)
class LengthStats:
    """Tokens of a sample. histogram: ranges of ``begin`` to ``end - 1`` tokens with their ``samples``."""

    shortest: int
    median: float
    p95: float
    longest: int
    mean: float
    histogram: list[Bin]


@dataclass(frozen=True, eq=False)
class Lengths:
    """How many samples have which length; ``counts[n]`` of them have n tokens, and at least one the most."""

    counts: Ints

    @property
    def num_samples(self) -> int:
        """Count the samples."""
        return int(self.counts.sum())

    @property
    def num_tokens(self) -> int:
        """Count the tokens of all samples."""
        return int(self.counts @ np.arange(len(self.counts)))

    @property
    def shortest(self) -> int:
        """Tokens of the shortest sample."""
        return int(np.flatnonzero(self.counts)[0])

    @property
    def longest(self) -> int:
        """Tokens of the longest sample."""
        return len(self.counts) - 1

    @property
    def mean(self) -> float:
        """Tokens of a sample on average."""
        return self.num_tokens / self.num_samples

    def percentile(self, percent: float) -> float:
        """Return the length that ``percent`` of the samples do not exceed, between two samples by their distance."""
        ends = np.cumsum(self.counts)
        place = (self.num_samples - 1) * percent / 100
        below = int(np.searchsorted(ends, int(place), side="right"))
        above = int(np.searchsorted(ends, min(int(place) + 1, self.num_samples - 1), side="right"))
        return below + (place - int(place)) * (above - below)

    def bins(self) -> list[Bin]:
        """Count the samples in ten ranges of about the same width."""
        low, high = self.shortest, self.longest
        edges = np.linspace(low, high + 1, min(_NUM_BINS, high - low + 1) + 1).astype(int).tolist()
        return [Bin(begin, end, int(self.counts[begin:end].sum())) for begin, end in pairwise(edges)]

    def summary(self) -> LengthStats:
        """Sum up the distribution."""
        return LengthStats(
            shortest=self.shortest,
            median=self.percentile(50),
            p95=self.percentile(95),
            longest=self.longest,
            mean=self.mean,
            histogram=self.bins(),
        )


def lines_of(lengths: LengthStats) -> list[str]:
    """Draw the ranges, one line each, then median, 95 % and longest."""
    most = max(one.samples for one in lengths.histogram)
    width = len(f"{lengths.longest:,}")
    lines = [
        f"{one.begin:>{width},} to {one.end - 1:>{width},}  {_bar(one.samples / most)} {one.samples:,}"
        for one in lengths.histogram
    ]
    lines.append(
        f"median {lengths.median:,.0f}, 95 % up to {lengths.p95:,.0f}, longest {lengths.longest:,}, "
        f"mean {lengths.mean:,.1f}"
    )
    return lines


def count_lengths(stores: Iterable[TokenStore]) -> Lengths:
    """Count the lengths of all samples of some stores, of which at least one has a sample."""
    counts = np.zeros(1, np.int64)
    for store in stores:
        for block in blocks(len(store)):
            more = np.bincount(store.lengths[block])
            if len(more) > len(counts):
                counts, more = more, counts
            counts[: len(more)] += more
    return Lengths(counts)


def blocks(num_samples: int) -> Iterable[Ints]:
    """Yield the numbers of all samples, some at a time."""
    return (np.arange(start, min(start + _BLOCK, num_samples)) for start in range(0, num_samples, _BLOCK))


def _bar(share: float) -> str:
    return f"{'█' * round(_BAR_WIDTH * share):<{_BAR_WIDTH}}"
