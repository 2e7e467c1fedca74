"""Which rank trains which sample: nothing lost, the same everywhere, balanced by cost."""

from __future__ import annotations

import itertools
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.data.spread import CostModel, spread

COSTS = st.lists(st.floats(0.5, 1e6), min_size=0, max_size=80)


@given(COSTS, st.integers(1, 9))
def test_each_sample_has_one_rank(costs: list[float], world: int) -> None:
    shares = spread(np.array(costs), world)
    assert len(shares) == world
    assert sorted(int(place) for share in shares for place in share) == list(range(len(costs)))
    assert all((np.diff(share) > 0).all() for share in shares), "places ascend within a rank"


@given(COSTS, st.integers(1, 9))
def test_no_rank_is_idle_while_another_has_two(costs: list[float], world: int) -> None:
    counts = [len(share) for share in spread(np.array(costs), world)]
    assert sum(count > 0 for count in counts) == min(world, len(costs))


@given(COSTS, st.integers(1, 9))
def test_all_ranks_compute_the_same(costs: list[float], world: int) -> None:
    first, second = (spread(np.array(costs), world) for _ in range(2))
    assert [share.tolist() for share in first] == [share.tolist() for share in second]


@settings(max_examples=60)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=7), st.integers(2, 3))
def test_the_most_loaded_rank_is_within_a_third_of_the_best(costs: list[int], world: int) -> None:
    """Graham's bound, against all ways to spread."""
    values = np.array(costs, np.float64)
    ways = itertools.product(range(world), repeat=len(costs))
    best = min(np.bincount(way, weights=values).max() for way in ways)
    assert max(values[share].sum() for share in spread(values, world)) <= best * 4 / 3 + 1e-9


@pytest.mark.parametrize("world", range(2, 9))
@pytest.mark.parametrize("num_samples", [64, 256])
def test_heavy_tailed_lengths_are_balanced(world: int, num_samples: int) -> None:
    """Within 3 % of the mean, unless one sample alone is more than a rank's fair share."""
    cost = CostModel(quadratic=1 / (12 * 576), target=49152 / (12 * 576 * 30))
    for seed in range(40):
        generator = np.random.default_rng(seed)
        lengths = np.minimum(np.exp(generator.normal(5.0, 1.0, num_samples)).astype(np.int64) + 1, 4096)
        costs = cost(lengths, (lengths * generator.uniform(0.1, 1.0, num_samples)).astype(np.int64))
        most = max(costs[share].sum() for share in spread(costs, world))
        assert most <= 1.03 * max(costs.sum() / world, costs.max()), f"seed {seed}: {most / (costs.sum() / world):.3f}"


def greedy(costs: np.ndarray, world: int) -> np.ndarray:
    loads = np.zeros(world)
    for cost in -np.sort(-costs):
        loads[loads.argmin()] += cost
    return loads


@given(COSTS, st.integers(1, 9))
def test_never_worse_than_longest_first(costs: list[float], world: int) -> None:
    values = np.array(costs)
    most = max(values[share].sum() for share in spread(values, world))
    assert most <= greedy(values, world).max() * (1 + 1e-9)


def test_an_exchange_mends_what_longest_first_cannot() -> None:
    values = np.array([7.0, 7, 6, 6, 5, 5, 4, 4, 4])
    assert greedy(values, 4).max() == 15
    assert max(values[share].sum() for share in spread(values, 4)) < 15


@given(st.lists(st.sampled_from([1.0, 2.0, 2.5, 7.0, 40.0]), min_size=1, max_size=40), st.integers(1, 9), st.randoms())
def test_the_loads_do_not_depend_on_the_order(costs: list[float], world: int, dice: Random) -> None:
    shuffled = costs.copy()
    dice.shuffle(shuffled)
    one, other = (
        [float(np.array(values)[share].sum()) for share in spread(np.array(values), world)]
        for values in (costs, shuffled)
    )
    assert one == other


def test_cost_is_what_the_layers_do() -> None:
    """Multiply-adds of a two-layer decoder, counted by hand, over those of a token in the linear layers."""
    width, layers, vocabulary, tokens, targets = 32, 2, 264, 100, 40
    linear, attention, head = 12 * width**2 * layers, width * layers, width * vocabulary
    by_hand = (tokens * linear + tokens**2 * attention + targets * head) / linear
    cost = CostModel(1 / (12 * width), vocabulary / (12 * width * layers))
    assert cost(np.array([tokens]), np.array([targets]))[0] == pytest.approx(by_hand)
