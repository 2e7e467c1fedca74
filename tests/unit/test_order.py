"""Which samples make up an update: cuts, several sources, and what they do not depend on."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.data.order import Order

LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=60)
SEEDS = st.integers(0, 2**63 - 1)
SOURCES = st.lists(
    st.tuples(st.integers(1, 25), st.sampled_from([0.1, 0.3, 0.5, 1, 1.7, 2, 3])), min_size=1, max_size=4
)
FROZEN = [[3, 0, 2, 5], [1, 7, 4], [4, 6, 1, 8], [2, 3, 0]]


def test_b29_every_epoch_has_its_own_order() -> None:
    order = Order([10], global_size=2, global_tokens=None, seed=0)
    epochs = [[order.update(5 * epoch + k + 1).samples.tolist() for k in range(5)] for epoch in range(3)]
    flat = [[place for update in epoch for place in update] for epoch in epochs]
    assert all(sorted(ids) == list(range(10)) for ids in flat)
    assert len({tuple(ids) for ids in flat}) == 3
    again = Order([10], global_size=2, global_tokens=None, seed=0)
    assert [[again.update(5 * e + k + 1).samples.tolist() for k in range(5)] for e in range(3)] == epochs
    other = Order([10], global_size=2, global_tokens=None, seed=1)
    assert other.update(1).samples.tolist() != epochs[0][0]


@given(LENGTHS, st.integers(1, 70), SEEDS, st.integers(1, 3))
def test_each_sample_comes_once_an_epoch(lengths: list[int], size: int, seed: int, epochs: int) -> None:
    order = Order([len(lengths)], global_size=size, global_tokens=None, seed=seed)
    total = order.num_updates(epochs)
    assert total == epochs * -(-len(lengths) // size)
    _check_epochs(order, total, epochs, len(lengths))
    assert all(len(order.update(number).samples) <= size for number in range(1, total + 1))


@given(LENGTHS, st.integers(1, 120), SEEDS, st.integers(1, 3))
def test_a_token_budget_is_held_and_filled(lengths: list[int], budget: int, seed: int, epochs: int) -> None:
    tokens = np.array(lengths)
    order = Order([len(tokens)], lengths=tokens.take, global_size=None, global_tokens=budget, seed=seed)
    total = order.num_updates(epochs)
    _check_epochs(order, total, epochs, len(lengths))
    for number in range(1, total + 1):
        update = order.update(number)
        used = tokens[update.samples].sum()
        assert used <= budget or len(update.samples) == 1
        if number < total and order.update(number + 1).epoch == update.epoch:
            assert used + tokens[order.update(number + 1).samples[0]] > budget, "the next sample would have fitted"


def _check_epochs(order: Order, total: int, epochs: int, num_samples: int) -> None:
    """Every epoch is a permutation; numbers and epochs run on."""
    seen: dict[int, list[int]] = {}
    for number in range(1, total + 1):
        update = order.update(number)
        assert update.number == number and len(update.samples) > 0
        seen.setdefault(update.epoch, []).extend(update.samples.tolist())
    assert list(seen) == list(range(epochs))
    assert all(sorted(ids) == list(range(num_samples)) for ids in seen.values())


@given(LENGTHS, st.sampled_from([(3, None), (None, 40)]), st.data())
def test_an_update_does_not_depend_on_what_was_asked_before(
    lengths: list[int], batch: tuple[int | None, int | None], data: st.DataObject
) -> None:
    """A resumed run asks for update u first; it must get what an uninterrupted one gets."""
    tokens, (size, budget) = np.array(lengths), batch
    whole = Order([len(tokens)], lengths=tokens.take, global_size=size, global_tokens=budget, seed=3)
    expected = [whole.update(number) for number in range(1, whole.num_updates(3) + 1)]
    start = data.draw(st.integers(0, len(expected) - 1))
    resumed = Order([len(tokens)], lengths=tokens.take, global_size=size, global_tokens=budget, seed=3)
    for there in expected[start:]:
        here = resumed.update(there.number)
        assert (here.epoch, here.samples.tolist()) == (there.epoch, there.samples.tolist())


def test_without_shuffling_the_order_is_the_files() -> None:
    order = Order([5], global_size=2, global_tokens=None, seed=9, shuffle=False)
    assert [order.update(number).samples.tolist() for number in range(1, 5)] == [[0, 1], [2, 3], [4], [0, 1]]


def test_b04_the_rest_of_an_epoch_is_an_update() -> None:
    seven = Order([7], global_size=4, global_tokens=None, seed=0)
    assert seven.num_updates(2) == 4
    assert [(u.epoch, len(u.samples)) for u in map(seven.update, range(1, 5))] == [(0, 4), (0, 3), (1, 4), (1, 3)]
    three = Order([3], global_size=4, global_tokens=None, seed=0)
    assert three.num_updates(1) == 1 and len(three.update(1).samples) == 3


@pytest.mark.parametrize("batch", [(None, None), (4, 100)])
def test_the_size_of_an_update_is_given_once(batch: tuple[int | None, int | None]) -> None:
    with pytest.raises(ValueError, match="exactly one"):
        Order([3], global_size=batch[0], global_tokens=batch[1], seed=0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"sizes": []}, "at least one sample"),
        ({"sizes": [3, 0]}, "at least one sample"),
        ({"global_size": 0}, "at least one sample or token"),
        ({"global_size": None, "global_tokens": 8}, "needs the lengths"),
        ({"weights": [1.0, 2.0]}, "weights"),
        ({"weights": [0.0]}, "weights"),
        ({"weights": [float("nan")]}, "weights"),
        ({"weights": [float("inf")]}, "weights"),
        ({"weights": [0.3]}, "less than one sample"),
    ],
)
def test_an_order_that_makes_no_sense_is_refused(wrong: dict[str, object], message: str) -> None:
    given = {"sizes": [3], "global_size": 1, "global_tokens": None, "seed": 0} | wrong
    with pytest.raises(ValueError, match=message):
        Order(given.pop("sizes"), **given)  # type: ignore[arg-type]


def test_there_is_no_update_before_the_first() -> None:
    with pytest.raises(IndexError, match="counted from 1"):
        Order([3], global_size=1, global_tokens=None, seed=0).update(0)


def test_the_order_never_changes() -> None:
    """Old runs are resumed by new releases: these numbers are fixed for ever."""
    order = Order([5, 4], weights=[1, 0.5], global_size=4, global_tokens=None, seed=7)
    assert [order.update(number).samples.tolist() for number in range(1, 5)] == FROZEN


def epochs_of(order: Order, num_epochs: int) -> list[list[int]]:
    """The samples of each epoch, and a check of the numbers."""
    epochs: list[list[int]] = [[] for _ in range(num_epochs)]
    for number in range(1, order.num_updates(num_epochs) + 1):
        update = order.update(number)
        assert update.number == number and len(update.samples) > 0
        epochs[update.epoch].extend(update.samples.tolist())
    assert order.update(order.num_updates(num_epochs) + 1).epoch == num_epochs
    return epochs


@settings(max_examples=60)
@given(SOURCES, SEEDS, st.booleans(), st.sampled_from([(4, None), (None, 60)]))
def test_every_sample_of_a_source_is_used_equally_often(
    sources: list[tuple[int, float]], seed: int, shuffle: bool, batch: tuple[int | None, int | None]
) -> None:
    """An epoch has what is due to the sample; after each epoch two samples of a source differ by one use at most."""
    sizes, weights = [size for size, _ in sources], [weight for _, weight in sources]
    if sum(int(Fraction(str(weight)) * size) for size, weight in sources) < 1:
        sizes[0], weights[0] = 10, 1
    tokens = np.arange(sum(sizes)) % 23 + 1
    order = Order(
        sizes,
        weights=weights,
        lengths=tokens.take,
        global_size=batch[0],
        global_tokens=batch[1],
        seed=seed,
        shuffle=shuffle,
    )
    uses = Counter[int]()
    for epoch, samples in enumerate(epochs_of(order, 5)):
        first = 0
        uses.update(samples)
        for size, weight in zip(sizes, weights):
            due = Fraction(str(weight)) * size
            mine = range(first, first + size)
            count = int((epoch + 1) * due) - int(epoch * due)
            assert sum(sample in mine for sample in samples) == count
            assert max(uses[k] for k in mine) - min(uses[k] for k in mine) <= 1
            if not shuffle and count:
                assert [k for k in samples if k in mine] == [
                    first + place % size for place in range(int(epoch * due), int((epoch + 1) * due))
                ]
            first += size
        if not shuffle:
            source = np.searchsorted(np.cumsum(sizes), samples, side="right")
            assert (np.diff(source) >= 0).all(), "one source after the other"


def test_weights_are_the_decimals_that_are_written() -> None:
    """0.3 is a little less than 3/10 as a binary number: 0.3 of 10 samples are 3, in every epoch."""
    order = Order([10], weights=[0.3], global_size=99, global_tokens=None, seed=0)
    assert [len(order.update(number).samples) for number in range(1, 41)] == [3] * 40


@settings(max_examples=40)
@given(st.integers(1, 40), SEEDS, st.sampled_from([0.5, 1.0, 2.0, 2.5]))
def test_a_single_source_is_even_at_any_time(size: int, seed: int, weight: float) -> None:
    order = Order([size], weights=[weight], global_size=3, global_tokens=None, seed=seed) if size > 1 else None
    uses = np.zeros(size, np.int64)
    for number in range(1, order.num_updates(4) + 1 if order else 0):
        assert order is not None
        for sample in order.update(number).samples:
            uses[sample] += 1
            assert uses.max() - uses.min() <= 1


def test_sources_are_mixed() -> None:
    """Each tenth of an epoch has about its share of a source: 300 of 1000, standard deviation 14."""
    order = Order([7000, 1500], weights=[1, 2], global_size=1000, global_tokens=None, seed=3)
    counts = [int((order.update(number).samples >= 7000).sum()) for number in range(1, 11)]
    assert sum(counts) == 3000 and min(counts) > 230 and max(counts) < 370


def test_cuts_do_not_depend_on_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = np.random.default_rng(0).integers(1, 40, 500)
    tokens[[3, 77, 78]] = 900

    def updates() -> list[list[int]]:
        order = Order([500], lengths=tokens.take, global_size=None, global_tokens=100, seed=2)
        return [order.update(number).samples.tolist() for number in range(1, order.num_updates(2) + 1)]

    whole = updates()
    for block in (1, 2, 7, 64, 500):
        monkeypatch.setattr("unisono.data.order._BLOCK", block)
        assert updates() == whole


@pytest.mark.parametrize("weights", [None, [1, 0.37]])
def test_a_billion_samples_need_no_memory(weights: list[float] | None) -> None:
    """8 GB as an array; the peak is that of one update."""
    sizes = [10**9] if weights is None else [6 * 10**8, 4 * 10**8]
    tracemalloc.start()
    try:
        order = Order(sizes, weights=weights, global_size=64, global_tokens=None, seed=0)
        for number in (1, 10**6, order.num_updates(3)):
            samples = order.update(number).samples
            assert len(set(samples.tolist())) == len(samples) and samples.max() < 10**9
        large = Order(sizes, weights=weights, global_size=10**6, global_tokens=None, seed=0).update(300).samples
        assert len(np.unique(large)) == 10**6
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 200e6
