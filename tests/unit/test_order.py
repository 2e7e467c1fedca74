"""Which samples make up an update: permutations, cuts, and what they do not depend on."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.data.order import Order, permutation

LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=60)
SEEDS = st.integers(0, 2**63 - 1)
FROZEN = {
    (0, 0): [8, 3, 0, 1, 5, 2, 7, 4, 9, 6],
    (0, 1): [5, 9, 4, 8, 2, 1, 7, 3, 0, 6],
    (7, 0): [7, 2, 6, 8, 0, 4, 9, 1, 3, 5],
}


@given(st.integers(0, 300), SEEDS, st.integers(0, 10**6))
def test_a_permutation_is_one(num_samples: int, seed: int, epoch: int) -> None:
    assert sorted(permutation(num_samples, seed, epoch).tolist()) == list(range(num_samples))


def test_the_permutation_never_changes() -> None:
    """Old runs are resumed by new releases: these numbers are fixed for ever."""
    for (seed, epoch), expected in FROZEN.items():
        assert permutation(10, seed, epoch).tolist() == expected


def test_a_permutation_prefers_no_place() -> None:
    """Over 4000 seeds each of 8 samples comes first about 500 times (standard deviation 21)."""
    first = np.bincount([permutation(8, seed, 0)[0] for seed in range(4000)], minlength=8)
    assert first.min() > 400 and first.max() < 600
    successor = np.bincount([permutation(8, 5, epoch)[7] for epoch in range(4000)], minlength=8)
    assert successor.min() > 400 and successor.max() < 600


def test_b29_every_epoch_has_its_own_order() -> None:
    lengths = np.ones(10, np.int64)
    order = Order(lengths, global_size=2, global_tokens=None, seed=0)
    epochs = [[order.update(5 * epoch + k + 1).samples.tolist() for k in range(5)] for epoch in range(3)]
    flat = [[place for update in epoch for place in update] for epoch in epochs]
    assert all(sorted(ids) == list(range(10)) for ids in flat)
    assert len({tuple(ids) for ids in flat}) == 3
    again = Order(lengths, global_size=2, global_tokens=None, seed=0)
    assert [[again.update(5 * e + k + 1).samples.tolist() for k in range(5)] for e in range(3)] == epochs
    other = Order(lengths, global_size=2, global_tokens=None, seed=1)
    assert other.update(1).samples.tolist() != epochs[0][0]


@given(LENGTHS, st.integers(1, 70), SEEDS, st.integers(1, 3))
def test_each_sample_comes_once_an_epoch(lengths: list[int], size: int, seed: int, epochs: int) -> None:
    order = Order(np.array(lengths), global_size=size, global_tokens=None, seed=seed)
    total = order.num_updates(epochs)
    assert total == epochs * -(-len(lengths) // size)
    _check_epochs(order, total, epochs, len(lengths))
    assert all(len(order.update(number).samples) <= size for number in range(1, total + 1))


@given(LENGTHS, st.integers(1, 120), SEEDS, st.integers(1, 3))
def test_a_token_budget_is_held_and_filled(lengths: list[int], budget: int, seed: int, epochs: int) -> None:
    tokens = np.array(lengths)
    order = Order(tokens, global_size=None, global_tokens=budget, seed=seed)
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
    whole = Order(tokens, global_size=size, global_tokens=budget, seed=3)
    expected = [whole.update(number) for number in range(1, whole.num_updates(3) + 1)]
    start = data.draw(st.integers(0, len(expected) - 1))
    resumed = Order(tokens, global_size=size, global_tokens=budget, seed=3)
    for there in expected[start:]:
        here = resumed.update(there.number)
        assert (here.epoch, here.samples.tolist()) == (there.epoch, there.samples.tolist())


def test_without_shuffling_the_order_is_the_files() -> None:
    order = Order(np.ones(5, np.int64), global_size=2, global_tokens=None, seed=9, shuffle=False)
    assert [order.update(number).samples.tolist() for number in range(1, 5)] == [[0, 1], [2, 3], [4], [0, 1]]


def test_b04_the_rest_of_an_epoch_is_an_update() -> None:
    seven = Order(np.ones(7, np.int64), global_size=4, global_tokens=None, seed=0)
    assert seven.num_updates(2) == 4
    assert [(u.epoch, len(u.samples)) for u in map(seven.update, range(1, 5))] == [(0, 4), (0, 3), (1, 4), (1, 3)]
    three = Order(np.ones(3, np.int64), global_size=4, global_tokens=None, seed=0)
    assert three.num_updates(1) == 1 and len(three.update(1).samples) == 3


@pytest.mark.parametrize("batch", [(None, None), (4, 100)])
def test_the_size_of_an_update_is_given_once(batch: tuple[int | None, int | None]) -> None:
    with pytest.raises(ValueError, match="exactly one"):
        Order(np.ones(3, np.int64), global_size=batch[0], global_tokens=batch[1], seed=0)


def test_an_order_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        Order(np.zeros(0, np.int64), global_size=1, global_tokens=None, seed=0)
