"""The batches of a rank: every sample once over all ranks, the same update whatever the world, cut and prefetch."""

from __future__ import annotations

import threading
import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.updates import MemoryStore, make_store
from unisono.data.collate import MicroBatch, collate, empty_micro_batch
from unisono.data.loader import Batches, Cut, Loader, OrderedUpdates, UpdateBatch
from unisono.data.order import Order
from unisono.data.spread import CostModel

COST = CostModel(1 / 384, 1.0)
SHAPES = st.lists(st.tuples(st.integers(1, 12), st.integers(0, 20)), min_size=1, max_size=16)
CUTS = st.builds(Cut, packed=st.booleans(), micro_tokens=st.integers(1, 60), micro_size=st.sampled_from([None, 1, 3]))


def documents(batch: MicroBatch) -> list[tuple[tuple[int, ...], int]]:
    """Take a micro-batch apart: (token ids, number of targets) of each document, padding left out."""
    ids, positions = batch.input_ids.flatten().tolist(), batch.position_ids.flatten().tolist()
    mask = [True] * len(ids) if batch.attention_mask is None else batch.attention_mask.flatten().tolist()
    targets = set((batch.predictors + 1).tolist())
    found, start = [], 0
    for length in batch.document_lengths:
        span = range(start, start + length)
        if mask[start]:
            assert [positions[k] for k in span] == list(range(length)), "positions restart with each document"
            assert all(mask[k] for k in span)
            found.append((tuple(ids[k] for k in span), sum(k in targets for k in span)))
        else:
            assert not any(mask[k] for k in span) and not targets & set(span)
        start += length
    assert start == len(ids)
    return found


@settings(max_examples=60)
@given(SHAPES, CUTS, st.integers(1, 4), st.booleans())
def test_every_sample_is_trained_once(shapes: list[tuple[int, int]], cut: Cut, world: int, equal: bool) -> None:
    store = make_store(shapes)
    samples = np.arange(len(store))[::-1]
    ranks = [
        Batches(store, cut, COST, rank=rank, world=world, equal_counts=equal).build(1, 0, samples)
        for rank in range(world)
    ]
    trained = [document for batch in ranks for micro in batch.micro_batches for document in documents(micro)]
    expected = Counter((tuple(i.tolist()), int(m.sum())) for i, m in zip(store.ids, store.masks))
    expected.update([((0,), 0)] * sum(micro.num_tokens == 0 for batch in ranks for micro in batch.micro_batches))
    assert Counter(trained) == expected
    assert all(len(batch.micro_batches) > 0 for batch in ranks), "a rank without samples takes part all the same"
    if equal:
        assert len({len(batch.micro_batches) for batch in ranks}) == 1
    for batch in ranks:
        assert batch.records == samples.tolist()
        assert batch.num_targets == sum(int(m.sum()) for m in store.masks)
        assert batch.num_tokens == sum(map(len, store.ids))
        assert batch.records_by_rank == ranks[0].records_by_rank
    assert sorted(sum((m.num_targets for m in b.micro_batches), 0) for b in ranks) == sorted(
        sum(int(store.masks[k].sum()) for k in share) for share in ranks[0].records_by_rank
    )


@settings(max_examples=40)
@given(SHAPES, st.booleans(), st.integers(20, 80))
def test_a_micro_batch_holds_its_budget(shapes: list[tuple[int, int]], packed: bool, budget: int) -> None:
    store = make_store(shapes)
    batches = Batches(store, Cut(packed, budget), COST, rank=0, world=1)
    for micro in batches.build(1, 0, np.arange(len(store))).micro_batches:
        assert micro.input_ids.numel() <= budget or len(documents(micro)) == 1


@settings(max_examples=30)
@given(SHAPES, st.integers(1, 6), st.integers(2, 5))
def test_the_samples_of_an_update_do_not_depend_on_the_world(
    shapes: list[tuple[int, int]], size: int, world: int
) -> None:
    alone = run_of(shapes, size, rank=0, world=1)
    for rank in (0, world - 1):
        assert [b.records for b in run_of(shapes, size, rank=rank, world=world)] == [b.records for b in alone]


def run_of(shapes: list[tuple[int, int]], size: int, *, rank: int, world: int, prefetch: int = 0) -> list[UpdateBatch]:
    """All batches of two epochs."""
    store = make_store(shapes)
    order = Order([len(store)], global_size=size, global_tokens=None, seed=5)
    batches = Batches(store, Cut(True, 64), COST, rank=rank, world=world)
    return list(Loader(OrderedUpdates(order, batches), first=1, last=order.num_updates(2), prefetch=prefetch))


def test_evaluation_sees_the_whole_store_once() -> None:
    store = make_store([(3, k) for k in range(1, 12)])
    seen = [
        record
        for rank in range(3)
        for batch in Batches(store, Cut(True, 30), COST, rank=rank, world=3).evaluation(4)
        for record in batch.records_by_rank[rank]
    ]
    assert sorted(seen) == list(range(11))


def test_padding_is_no_target_and_the_first_token_neither() -> None:
    store = MemoryStore(
        [np.array([7, 8, 9], np.int32), np.array([5, 6], np.int32)],
        [np.array([True, False, True]), np.array([False, True])],
    )
    store.masks[0][0] = True  # a store that says so is not believed: nothing comes before the first token
    padded = collate(store, np.array([0, 1]), packed=False)
    assert padded.input_ids.tolist() == [[7, 8, 9], [5, 6, 0]]
    assert padded.attention_mask is not None
    assert padded.attention_mask.tolist() == [[True, True, True], [True, True, False]]
    assert padded.document_lengths == (3, 2, 1)
    assert (padded.predictors.tolist(), padded.target_ids.tolist()) == ([1, 3], [9, 6])
    packed = collate(store, np.array([0, 1]), packed=True)
    assert packed.attention_mask is None and packed.document_lengths == (3, 2)
    assert packed.position_ids.tolist() == [[0, 1, 2, 0, 1]]
    assert (packed.predictors.tolist(), packed.target_ids.tolist()) == ([1, 3], [9, 6])


def test_an_empty_micro_batch_has_no_target() -> None:
    empty = empty_micro_batch()
    assert (empty.num_targets, empty.num_tokens, empty.input_ids.shape) == (0, 0, (1, 1))


def test_prefetch_changes_nothing() -> None:
    shapes = [(3, k) for k in range(1, 12)]
    asked = [(b.number, b.epoch, b.records) for b in run_of(shapes, 2, rank=0, world=2)]
    for prefetch in (1, 2, 50):
        ahead = run_of(shapes, 2, rank=0, world=2, prefetch=prefetch)
        assert [(b.number, b.epoch, b.records) for b in ahead] == asked
    assert [number for number, _, _ in asked] == list(range(1, 13))
    assert [epoch for _, epoch, _ in asked] == [0] * 6 + [1] * 6


class Watched:
    """Stands in for Batches: notes what is built, and fails where told."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.built: list[int] = []
        self.fails_at = fails_at

    def build(self, number: int, epoch: int, samples: np.ndarray) -> int:
        if number == self.fails_at:
            raise OSError("the disk is gone")
        self.built.append(number)
        return number


def loader(batches: Watched, prefetch: int, first: int = 1) -> Loader:
    order = Order([100], global_size=1, global_tokens=None, seed=0)
    return Loader(OrderedUpdates(order, batches), first=first, last=100, prefetch=prefetch)  # type: ignore[arg-type]


@pytest.mark.parametrize("prefetch", [0, 3])
def test_no_more_is_built_ahead_than_asked(prefetch: int) -> None:
    batches = Watched()
    iterator = iter(loader(batches, prefetch, first=41))
    assert next(iterator) == 41
    deadline = time.monotonic() + 5
    while len(batches.built) < 1 + prefetch and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.02)
    assert batches.built == list(range(41, 42 + prefetch))
    iterator.close()  # type: ignore[attr-defined]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("batches")]


@pytest.mark.parametrize("prefetch", [0, 3])
def test_an_error_while_building_surfaces_in_its_place(prefetch: int) -> None:
    seen: list[object] = []
    with pytest.raises(OSError, match="the disk is gone"):
        seen.extend(loader(Watched(fails_at=5), prefetch))
    assert seen == [1, 2, 3, 4]


def test_a_finished_run_has_no_batches_left() -> None:
    assert list(loader(Watched(), 2, first=101)) == []


@settings(max_examples=200)
@given(st.lists(st.integers(1, 70), min_size=1, max_size=30), CUTS, st.integers(0, 2**32))
def test_no_micro_batch_is_much_fuller_than_the_fullest(lengths: list[int], cut: Cut, seed: int) -> None:
    def tokens(rows: np.ndarray) -> int:
        return int(rows.sum() if cut.packed else len(rows) * rows.max())

    every = np.array(lengths)
    most = every[cut.fullest(every)]
    if cut.micro_size is None:
        assert tokens(most) <= max(cut.micro_tokens, every.max())
    subset = np.random.default_rng(seed).permutation(every)[: 1 + seed % len(every)]
    fullest = max(tokens(subset[rows]) for rows in cut(subset))
    exact = cut.micro_size is not None or not cut.packed
    assert tokens(most) >= (fullest if exact else 0.8 * fullest)
