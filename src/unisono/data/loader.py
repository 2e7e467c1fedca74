"""The batches of a rank, update by update, built ahead by one thread.

Building a batch is copying a few thousand token ids out of a memory map; there are no worker processes to fork, to
lose or to signal. The position of a run is the update's number and nothing else, so what was built ahead and not
trained is never counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.data.collate import MicroBatch, collate, empty_micro_batch
from unisono.data.order import Order
from unisono.data.pack import batch_by_count, batch_padded, pack
from unisono.data.spread import CostModel, spread
from unisono.data.store import TokenStore

Indices = NDArray[np.int64]
FULLEST_WAYS = 8  # to look for the fullest micro-batch


@dataclass(frozen=True)
class Cut:
    """How samples become micro-batches: packed or padded rows, under a token budget or by count."""

    packed: bool
    micro_tokens: int
    micro_size: int | None = None

    def __call__(self, lengths: Indices) -> list[Indices]:
        """Cut one rank's samples into micro-batches."""
        if self.micro_size is not None:
            return batch_by_count(lengths, self.micro_size)
        return pack(lengths, self.micro_tokens) if self.packed else batch_padded(lengths, self.micro_tokens)

    def fullest(self, lengths: Indices) -> Indices:
        """Return the samples of a micro-batch with as many tokens as any: the longest, and what fits beside them.

        Filling a row to the brim is a knapsack; a few greedy ways come within some tokens of it.
        """
        by_length = np.argsort(lengths, kind="stable")[::-1]
        if self.micro_size is not None:
            return by_length[: self.micro_size]
        if not self.packed:
            left = len(lengths) - np.arange(len(lengths))
            rows_beside = np.minimum(left, np.maximum(1, self.micro_tokens // lengths[by_length]))
            first = int(np.argmax(rows_beside * lengths[by_length]))
            return by_length[first : first + int(rows_beside[first])]
        ascending = -lengths[by_length]  # as searchsorted wants it
        rows = [self._filled(ascending, first) for first in range(min(FULLEST_WAYS, len(by_length)))]
        return by_length[min(rows, key=lambda row: int(ascending[row].sum()))]

    def _filled(self, ascending: Indices, first: int) -> list[int]:
        """Fill a row, beginning with the place ``first``, always with the longest that fits; lengths are negative."""
        chosen, room = [first], self.micro_tokens + int(ascending[first])
        while (place := max(chosen[-1] + 1, int(np.searchsorted(ascending, -room)))) < len(ascending):
            chosen.append(place)
            room += int(ascending[place])
        return chosen


@dataclass(frozen=True)
class LeftOutRecord:
    """A record that a stream came by and left out: where it stands, and why."""

    place: str
    reason: str


@dataclass(frozen=True)
class UpdateBatch:
    """All that one rank needs for one update; the counts are global and known before backward.

    position: where a stream stands after it; None with prepared data, whose position is the update's number.
    """

    number: int
    epoch: int
    records: list[int]
    records_by_rank: list[list[int]]
    num_targets: int
    num_tokens: int
    micro_batches: list[MicroBatch]
    position: dict[str, Any] | None = None
    left_out: list[LeftOutRecord] = field(default_factory=list)


class Batches:
    """Builds the micro-batches of this rank for a set of samples.

    ``equal_counts``: give all ranks the same number of micro-batches (a sharded forward is collective); the missing
    ones carry no target. Without it a rank has at least one, so that it joins the gradient exchange.
    """

    def __init__(
        self, store: TokenStore, cut: Cut, cost: CostModel, *, rank: int, world: int, equal_counts: bool = False
    ) -> None:
        self._store = store
        self._cut = cut
        self._cost = cost
        self._rank = rank
        self._world = world
        self._equal_counts = equal_counts

    def build(self, number: int, epoch: int, samples: Indices) -> UpdateBatch:
        """Build this rank's part of the update over ``samples``."""
        store = self._store
        lengths, num_targets = store.lengths[samples], store.num_targets[samples]
        shares = spread(self._cost(lengths, num_targets), self._world)
        mine = shares[self._rank]
        rows = self._cut(lengths[mine])
        count = max(len(self._cut(lengths[share])) for share in shares) if self._equal_counts else 1
        micro = [collate(store, samples[mine[row]], packed=self._cut.packed) for row in rows]
        micro += [empty_micro_batch() for _ in range(max(count, 1) - len(micro))]
        records = store.record[samples]
        return UpdateBatch(
            number=number,
            epoch=epoch,
            records=records.tolist(),
            records_by_rank=[records[share].tolist() for share in shares],
            num_targets=int(num_targets.sum()),
            num_tokens=int(lengths.sum()),
            micro_batches=micro,
        )

    def fullest(self, global_size: int | None, global_tokens: int | None) -> tuple[MicroBatch, Indices]:
        """Return the micro-batch of this data that needs most memory, and its samples.

        The most loaded rank of an update has at most the mean and one sample more.
        """
        lengths = self._store.lengths[np.arange(len(self._store))]
        num_longest = min(len(lengths), global_size or 1)
        longest = np.partition(lengths, -num_longest)[-num_longest:]
        of_update = int(longest.sum()) if global_tokens is None else global_tokens
        most = of_update // self._world + int(longest.max())
        samples = replace(self._cut, micro_tokens=min(self._cut.micro_tokens, most)).fullest(lengths)
        return collate(self._store, samples, packed=self._cut.packed), samples

    def evaluation(self, chunk: int) -> Iterator[UpdateBatch]:
        """Yield the whole store once, in source order, ``chunk`` samples at a time, spread over the ranks."""
        for number, start in enumerate(range(0, len(self._store), chunk), 1):
            yield self.build(number, 0, np.arange(start, min(start + chunk, len(self._store))))


class OrderedUpdates:
    """Builds any update of a run over prepared data."""

    def __init__(self, order: Order, batches: Batches) -> None:
        self._order = order
        self._batches = batches

    def __call__(self, number: int) -> UpdateBatch:
        """Build update ``number``."""
        update = self._order.update(number)
        return self._batches.build(number, update.epoch, update.samples)


class Loader:
    """Yields the update batches ``first..last``, ``prefetch`` of them built ahead (0 = built when asked for).

    build: makes one update's batch; it is called in order, by one thread. listener: hears what that thread does.
    """

    def __init__(
        self,
        build: Callable[[int], UpdateBatch],
        *,
        first: int,
        last: int,
        prefetch: int,
        listener: Callable[[str], None] = lambda doing: None,
    ) -> None:
        self._make = build
        self._listener = listener
        self._numbers = iter(range(first, last + 1))
        self._prefetch = prefetch

    def __iter__(self) -> Iterator[UpdateBatch]:
        """Yield in order; an error of the building thread surfaces here."""
        if self._prefetch == 0:
            yield from map(self._build, self._numbers)
            return
        waiting: deque[Future[UpdateBatch]] = deque()
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches") as builder:
            try:
                for number in self._numbers:
                    waiting.append(builder.submit(self._build, number))
                    if len(waiting) > self._prefetch:
                        yield waiting.popleft().result()
                while waiting:
                    yield waiting.popleft().result()
            finally:
                for future in waiting:
                    future.cancel()

    def _build(self, number: int) -> UpdateBatch:
        self._listener(f"data.collate of update {number}")
        batch = self._make(number)
        self._listener("")
        return batch
