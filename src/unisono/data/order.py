"""Which samples make up an update: a pure function of (data, seed, epoch, update, global batch).

World size, micro-batch, packing, strategy and restarts do not enter (law 3 of the design). An epoch is a
permutation of all samples, cut into updates; the last update of an epoch is the rest, however small, and is
trained with its true divisor.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Update:
    """One optimizer update: its number (from 1), its epoch (from 0) and its samples' indices in the store."""

    number: int
    epoch: int
    samples: Indices


def permutation(num_samples: int, seed: int, epoch: int) -> Indices:
    """Return a permutation of ``range(num_samples)`` that depends on nothing but the arguments.

    Samples are sorted by a keyed 64-bit mix of their index. The mix is a bijection, so there are no ties, and it is
    our own, so that a new numpy release cannot change the order of an old run.
    """
    key = _mix(_mix(np.array([seed], np.uint64)) ^ np.uint64(epoch + 1))
    keys = _mix(np.arange(num_samples, dtype=np.uint64) ^ key)
    return np.argsort(keys, kind="stable").astype(np.int64)


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix 64 bits by splitmix64's finalizer (Steele, Lea and Flood 2014, "Fast splittable generators")."""
    with np.errstate(over="ignore"):
        values = values + np.uint64(0x9E3779B97F4A7C15)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed: NDArray[np.uint64] = values ^ (values >> np.uint64(31))
        return mixed


class Order:
    """The samples of every update of a run.

    ``lengths`` are the tokens of each sample; exactly one of ``global_size`` (samples per update) and
    ``global_tokens`` (an update takes samples while they fit, and always at least one) is given.
    """

    def __init__(
        self,
        lengths: Indices,
        *,
        global_size: int | None,
        global_tokens: int | None,
        seed: int,
        shuffle: bool = True,
    ) -> None:
        if (global_size is None) == (global_tokens is None):
            raise ValueError("exactly one of global_size and global_tokens is needed")
        if len(lengths) == 0:
            raise ValueError("an order needs at least one sample")
        self._lengths = np.asarray(lengths, np.int64)
        self._global_size = global_size
        self._global_tokens = global_tokens
        self._seed = seed
        self._shuffle = shuffle
        self._first_update: list[int] = [0]  # of each epoch seen so far; the next epoch's first comes last
        self._epoch: tuple[int, Indices, Indices] | None = None

    def num_updates(self, epochs: int) -> int:
        """Count the updates of the first ``epochs`` epochs."""
        if self._global_size is not None:
            return epochs * -(-len(self._lengths) // self._global_size)
        while len(self._first_update) <= epochs:
            _, cuts = self._load_epoch(len(self._first_update) - 1)
            self._first_update.append(self._first_update[-1] + len(cuts) - 1)
        return self._first_update[epochs]

    def update(self, number: int) -> Update:
        """Return update ``number``, counted from 1."""
        epoch, place = self._locate(number - 1)
        samples, cuts = self._load_epoch(epoch)
        return Update(number, epoch, samples[cuts[place] : cuts[place + 1]])

    def _locate(self, index: int) -> tuple[int, int]:
        if self._global_size is not None:
            return divmod(index, self.num_updates(1))
        epoch = 0
        while self.num_updates(epoch + 1) <= index:
            epoch += 1
        return epoch, index - self._first_update[epoch]

    def _load_epoch(self, epoch: int) -> tuple[Indices, Indices]:
        """Return the epoch's permutation and the places where it is cut into updates."""
        if self._epoch is None or self._epoch[0] != epoch:
            count = len(self._lengths)
            samples = permutation(count, self._seed, epoch) if self._shuffle else np.arange(count)
            self._epoch = (epoch, samples, self._cuts(samples))
        return self._epoch[1], self._epoch[2]

    def _cuts(self, samples: Indices) -> Indices:
        count = len(samples)
        if self._global_size is not None:
            return np.append(np.arange(0, count, self._global_size), count)
        assert self._global_tokens is not None
        ends = np.cumsum(self._lengths[samples])
        cuts = [0]
        while cuts[-1] < count:
            before = ends[cuts[-1] - 1] if cuts[-1] else 0
            fits = int(np.searchsorted(ends, before + self._global_tokens, side="right"))
            cuts.append(max(fits, cuts[-1] + 1))
        return np.asarray(cuts, np.int64)
