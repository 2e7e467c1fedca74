"""Which samples make up an update: a pure function of (data, weights, seed, epoch, update, global batch).

World size, micro-batch, packing, strategy and restarts do not enter (law 3 of the design). Nothing is stored for each
sample: permutations are computed place by place (see ``feistel``), so a billion samples need no memory.

Each source is an endless sequence of its samples: one permutation of all of them after the other. With weight w and N
samples, epoch e takes the next ``floor((e + 1) w N) - floor(e w N)`` of it. After any number of epochs the samples of a
source have therefore been used equally often, give or take one. The samples of several sources are mixed by a
permutation of the whole epoch; a single source needs none. The last update of an epoch is the rest, however small, and
is trained with its true divisor.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from unisono.data.feistel import permuted

Indices = NDArray[np.int64]

ORDER_VERSION = 2  # a run that was begun with another order cannot be resumed with this one
_BLOCK = 1 << 16  # samples whose lengths are looked at together
_SOURCE, _EPOCH = 0, 1  # what a permutation is of


@dataclass(frozen=True)
class Update:
    """One optimizer update: its number (from 1), its epoch (from 0) and its samples.

    ``samples`` are indices over the sources laid end to end: sample i of a source is ``i`` more than the sizes of all
    sources before it.
    """

    number: int
    epoch: int
    samples: Indices


@dataclass(frozen=True)
class _Source:
    """One source: its place among the sources, its first index, its size, its samples per epoch."""

    number: int
    offset: int
    size: int
    per_epoch: Fraction

    def start(self, epoch: int) -> int:
        """Return how many samples all earlier epochs have taken."""
        return int(epoch * self.per_epoch)

    def count(self, epoch: int) -> int:
        """Count the samples of an epoch."""
        return self.start(epoch + 1) - self.start(epoch)

    def samples(self, positions: Indices, seed: int, shuffle: bool) -> Indices:
        """Return the indices at ``positions`` of the endless sequence."""
        passes, places = np.divmod(positions, self.size)
        if shuffle:
            for number in np.unique(passes).tolist():
                here = passes == number
                places[here] = permuted(places[here], self.size, seed, _SOURCE, self.number, number)
        return places + self.offset


class Order:
    """The samples of every update of a run.

    ``sizes``: samples of each source. ``weights``: how often each sample of a source is seen in an epoch (1 = once,
    0.5 = another half each epoch), taken as the decimal number that it is written as; without them, once. Exactly one
    of ``global_size`` (samples per update) and ``global_tokens`` (an update takes samples while they fit, and always at
    least one) is given; only the latter needs ``lengths``, which returns the tokens of the samples that it is asked
    for. Without ``shuffle`` the sources come one after the other, each in its own order.

    Memory is of the order of an update with ``global_size``. With ``global_tokens`` an epoch's lengths are read once,
    a block at a time, when its first update or a later epoch is asked for, and only where it is cut is kept.
    ValueError for sizes, weights or batches that make no order.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        weights: Sequence[float] | None = None,
        lengths: Callable[[Indices], Indices] | None = None,
        global_size: int | None,
        global_tokens: int | None,
        seed: int,
        shuffle: bool = True,
    ) -> None:
        if (global_size is None) == (global_tokens is None):
            raise ValueError("exactly one of global_size and global_tokens is needed")
        if (global_size or global_tokens or 0) < 1:
            raise ValueError("an update needs at least one sample or token")
        if global_tokens is not None and lengths is None:
            raise ValueError("global_tokens needs the lengths of the samples")
        self._sources = _sources(sizes, weights)
        self._global_size = global_size
        self._global_tokens = global_tokens
        self._lengths = lengths
        self._seed = seed
        self._shuffle = shuffle
        self._is_uniform = all(source.per_epoch.denominator == 1 for source in self._sources)
        self._first_update: list[int] = [0]  # of each epoch seen so far; the next epoch's first comes last
        self._cuts: list[Indices] = []  # with global_tokens: the slots where each epoch seen so far is cut

    def num_updates(self, epochs: int) -> int:
        """Count the updates of the first ``epochs`` epochs."""
        if self._global_size is not None and self._is_uniform:
            return epochs * -(-self._num_slots(0) // self._global_size)
        while len(self._first_update) <= epochs:
            epoch = len(self._first_update) - 1
            if self._global_size is not None:
                count = -(-self._num_slots(epoch) // self._global_size)
            else:
                self._cuts.append(self._cut(epoch))
                count = len(self._cuts[epoch]) - 1
            self._first_update.append(self._first_update[-1] + count)
        return self._first_update[epochs]

    def num_samples(self, epochs: int) -> int:
        """Count the samples of the first ``epochs`` epochs."""
        return sum(source.start(epochs) for source in self._sources)

    def update(self, number: int) -> Update:
        """Return update ``number``, counted from 1."""
        if number < 1:
            raise IndexError(f"updates are counted from 1, and {number} is asked for")
        epoch, place = self._locate(number - 1)
        if self._global_size is not None:
            start = place * self._global_size
            stop = min(start + self._global_size, self._num_slots(epoch))
        else:
            start, stop = self._cuts[epoch][place : place + 2].tolist()
        return Update(number, epoch, self._samples(epoch, start, stop))

    def _locate(self, index: int) -> tuple[int, int]:
        """Return an update's epoch and its place there."""
        if self._global_size is not None and self._is_uniform:
            return divmod(index, self.num_updates(1))
        while self._first_update[-1] <= index:
            self.num_updates(len(self._first_update))
        epoch = bisect_right(self._first_update, index) - 1
        return epoch, index - self._first_update[epoch]

    def _num_slots(self, epoch: int) -> int:
        return sum(source.count(epoch) for source in self._sources)

    def _samples(self, epoch: int, start: int, stop: int) -> Indices:
        """Return the samples in an epoch's slots ``start`` to ``stop``."""
        slots = np.arange(start, stop, dtype=np.int64)
        if self._shuffle and len(self._sources) > 1:
            slots = permuted(slots, self._num_slots(epoch), self._seed, _EPOCH, epoch)
        samples = np.empty_like(slots)
        first = 0  # of this source's places in the epoch
        for source in self._sources:
            last = first + source.count(epoch)
            here = (slots >= first) & (slots < last)
            positions = slots[here] + (source.start(epoch) - first)
            samples[here] = source.samples(positions, self._seed, self._shuffle)
            first = last
        return samples

    def _cut(self, epoch: int) -> Indices:
        """Return the slots where an epoch is cut into updates of at most ``global_tokens``: first, ..., end."""
        assert self._global_tokens is not None
        cuts = [0]
        tokens = 0  # of the update that is still open
        for start, ends in self._ends(epoch):
            done = 0
            before = -tokens  # what the open update counts from, in terms of this block
            while done < len(ends):
                fits = int(np.searchsorted(ends, before + self._global_tokens, side="right"))
                if fits == len(ends):
                    break
                if start + fits == cuts[-1]:
                    fits += 1  # one sample alone is too long
                cuts.append(start + fits)
                done, before = fits, int(ends[fits - 1]) if fits else 0
            tokens = int(ends[-1]) - before
        end = self._num_slots(epoch)
        return np.asarray(cuts if cuts[-1] == end else [*cuts, end], np.int64)

    def _ends(self, epoch: int) -> Iterator[tuple[int, Indices]]:
        """Yield an epoch's blocks: the first slot of each, and its samples' lengths summed up."""
        assert self._lengths is not None
        end = self._num_slots(epoch)
        for start in range(0, end, _BLOCK):
            samples = self._samples(epoch, start, min(start + _BLOCK, end))
            yield start, np.cumsum(self._lengths(samples), dtype=np.int64)


def _sources(sizes: Sequence[int], weights: Sequence[float] | None) -> list[_Source]:
    """Lay the sources end to end; ValueError for an empty one, a wrong weight, an epoch that could be empty."""
    if len(sizes) == 0 or min(sizes) < 1:
        raise ValueError(f"an order needs at least one sample in each source, and the sizes are {list(sizes)}")
    given = [1.0] * len(sizes) if weights is None else [float(weight) for weight in weights]
    if len(given) != len(sizes) or not all(0 < weight < float("inf") for weight in given):
        raise ValueError(f"{len(sizes)} sources need as many weights above 0, and the weights are {given}")
    offsets = accumulate(sizes, initial=0)
    parts = [Fraction(repr(weight)) * int(size) for weight, size in zip(given, sizes)]
    if sum(map(int, parts)) < 1:
        raise ValueError(f"an epoch would have less than one sample: the sizes are {list(sizes)}, the weights {given}")
    return [_Source(k, offset, int(size), part) for k, (offset, size, part) in enumerate(zip(offsets, sizes, parts))]
