"""The permutation that is never stored: a bijection for any size, even, and the same for ever."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.data.feistel import MAX_BITS, Feistel, permuted

SEEDS = st.integers(0, 2**64 - 1)
BILLION = 10**9
FROZEN = {
    (0, 0): [6, 8, 7, 9, 5, 1, 3, 2, 4, 0],
    (0, 1): [6, 2, 8, 0, 7, 4, 3, 5, 9, 1],
    (7, 0): [9, 5, 4, 3, 2, 0, 8, 1, 7, 6],
}
FROZEN_BILLION = [381304547, 130516419, 450034313]


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1])
def test_every_small_permutation_is_one(seed: int) -> None:
    for num_samples in range(1, 301):
        values = permuted(np.arange(num_samples), num_samples, seed, num_samples % 7)
        assert np.array_equal(np.sort(values), np.arange(num_samples))


@settings(max_examples=60)
@given(st.integers(1, 3000), SEEDS, st.integers(0, 10**6))
def test_a_permutation_is_one_and_can_be_turned_back(num_samples: int, seed: int, epoch: int) -> None:
    places = np.arange(num_samples)
    feistel = Feistel(num_samples, seed, epoch)
    values = feistel.at(places)
    assert np.array_equal(np.sort(values), places)
    assert np.array_equal(feistel.place_of(values), places)
    assert np.array_equal(feistel.at(places[::-3]), values[::-3]), "a place is computed for itself"


@settings(max_examples=40)
@given(st.integers(1, 2**MAX_BITS), SEEDS, st.lists(st.integers(0, 2**MAX_BITS), min_size=1, max_size=50))
def test_any_size_can_be_turned_back(num_samples: int, seed: int, wishes: list[int]) -> None:
    places = np.array([wish % num_samples for wish in wishes])
    feistel = Feistel(num_samples, seed)
    values = feistel.at(places)
    assert values.min() >= 0 and values.max() < num_samples
    assert np.array_equal(feistel.place_of(values), places)


def test_a_billion_places_are_told_apart() -> None:
    """Without the 8 GB of all places: what has an inverse on each slice meets no other value, in or out of it."""
    feistel = Feistel(BILLION, 5, 1)
    scattered = np.unique(permuted(np.arange(10**6), BILLION, 99))
    for places in (np.arange(10**6), np.arange(BILLION - 10**6, BILLION), scattered):
        values = feistel.at(places)
        assert len(np.unique(values)) == len(places)
        assert np.array_equal(feistel.place_of(values), places)


def test_epochs_seeds_and_sources_have_their_own() -> None:
    places = np.arange(200)
    paths = [(0, 0), (0, 1), (1, 0), (1, 1), (0,), (0, 0, 0), (2**63, 5)]
    orders = [permuted(places, 200, *path) for path in paths]
    for first, second in itertools.combinations(orders, 2):
        assert (first == second).sum() < 10, "about one place in 200 agrees by chance"


@pytest.mark.parametrize("num_samples", [1000, 4096, 10**6, BILLION])
def test_values_do_not_follow_their_places(num_samples: int) -> None:
    """No correlation with the place, the neighbour or the next epoch: standard deviation 1 / sqrt(10**5) = 0.003."""
    places = np.arange(min(num_samples, 10**5))
    values, later = (permuted(places, num_samples, 3, epoch).astype(np.float64) for epoch in (0, 1))
    bound = 5 / np.sqrt(len(places))
    for first, second in ((places, values), (values[1:], values[:-1]), (values, later)):
        assert abs(np.corrcoef(first, second)[0, 1]) < bound
    thirds = np.bincount((values * 3 // num_samples).astype(int), minlength=3)
    assert abs(thirds / len(places) - 1 / 3).max() < bound


@pytest.mark.parametrize("num_samples", [2, 3, 4, 5, 6])
def test_no_order_of_a_few_is_preferred(num_samples: int) -> None:
    """Chi-square over all orders; beyond 5 standard deviations once in millions."""
    count = len(list(itertools.permutations(range(num_samples))))
    num_trials = max(2000, 8 * count)
    seen = Counter(tuple(permuted(np.arange(num_samples), num_samples, seed, 0).tolist()) for seed in range(num_trials))
    expected = num_trials / count
    chi_square = sum((found - expected) ** 2 / expected for found in seen.values()) + (count - len(seen)) * expected
    assert chi_square < count - 1 + 5 * np.sqrt(2 * (count - 1))


def test_no_place_is_preferred() -> None:
    """Over 4000 seeds and epochs each of 8 samples comes first, and last, about 500 times (standard deviation 21)."""
    for place in (0, 7):
        by_seed = np.bincount([permuted(np.array([place]), 8, seed, 0)[0] for seed in range(4000)], minlength=8)
        by_epoch = np.bincount([permuted(np.array([place]), 8, 5, epoch)[0] for epoch in range(4000)], minlength=8)
        for counts in (by_seed, by_epoch):
            assert counts.min() > 400 and counts.max() < 600


def test_the_permutation_never_changes() -> None:
    """Old runs are resumed by new releases: these numbers are fixed for ever."""
    for (seed, epoch), expected in FROZEN.items():
        assert permuted(np.arange(10), 10, seed, epoch).tolist() == expected
    assert permuted(np.array([0, 1, 999_999_999]), BILLION, 7, 2).tolist() == FROZEN_BILLION


def test_what_is_no_place_is_refused() -> None:
    for wrong in (-1, 10):
        with pytest.raises(IndexError, match="outside"):
            permuted(np.array([0, wrong]), 10, 0, 0)
    for size in (0, 2**MAX_BITS + 1):
        with pytest.raises(ValueError, match="are possible"):
            Feistel(size, 0)
    with pytest.raises(OverflowError):
        Feistel(3, -1)
    assert permuted(np.zeros(0, np.int64), 10, 0).tolist() == []
