"""What is said about where a run's seconds went, on runs that are made up."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.verdict import LEAST_UPDATES, Setting, judge, slowness

SETTING = Setting(gradient_bytes=540_000_000, prefetch=2)


def line(update: int, compute: list[float], waits: list[float] | None = None, **causes: float) -> dict[str, Any]:
    """An update of rank 0's: what the causes leave of the second it took is forward and backward."""
    rest = 1.0 - sum(causes.values())
    return {
        "update": update,
        "stepped": True,
        "seconds": 1.0,
        "seconds_by_cause": {"forward": rest / 3, "backward": rest * 2 / 3, **causes},
        "seconds_by_rank": {"compute": compute, "data": waits or [0.0] * len(compute)},
    }


def noisy(num_updates: int, num_ranks: int, sigma: float, seed: int) -> np.ndarray:
    """Compute seconds by update and rank, around 0.8 s."""
    return 0.8 * np.exp(np.random.default_rng(seed).normal(0.0, sigma, (num_updates, num_ranks)))


def lines_of(compute: np.ndarray, **causes: float) -> list[dict[str, Any]]:
    return [line(update, list(row), **causes) for update, row in enumerate(compute, 1)]


def test_nothing_stands_out() -> None:
    for ranks, communication, among in ((2, 0.02, ""), (1, 0.0, ""), (2, 0.0, "which this strategy does not tell")):
        lines = lines_of(noisy(40, ranks, 0.01, 0), optimizer=0.05, communication=communication)
        (found,) = judge(lines, SETTING)
        assert found.words.endswith("forward and backward") == (not among) and among in found.words
    (found,) = judge(lines_of(noisy(40, 2, 0.01, 0), optimizer=0.05, communication=0.02), SETTING)
    assert found.kind == "nothing" and found.share == pytest.approx(0.93)
    assert found.words == "nothing stands out: 93% of the time is forward and backward"


def test_exposed_communication() -> None:
    (found,) = judge(lines_of(noisy(40, 2, 0.01, 0), communication=0.12), SETTING)
    assert found.words.startswith("12% exposed communication: 540 MB of gradients an update; a larger batch.global")
    (small,) = judge(lines_of(noisy(40, 2, 0.01, 0), communication=0.12), Setting(540, 2))
    assert "less than 1 MB of gradients" in small.words


def test_waiting_for_data_of_any_rank() -> None:
    """The ranks wait for each other: what the slowest loader takes counts, rank 0's or not."""
    slow = [line(update, [0.9, 0.9], [0.0, 0.08]) for update in range(1, 21)]
    (found,) = judge(slow, SETTING)
    assert found.kind == "data" and found.share == pytest.approx(0.08)
    assert found.words.startswith("8% waiting for data: raise data.prefetch (now 2)")


def test_the_first_update_is_left_out() -> None:
    first = line(1, [9.0, 0.1], [8.0, 0.0], data=0.9)
    found = judge([first, *lines_of(noisy(20, 2, 0.01, 0))], SETTING)
    assert [finding.kind for finding in found] == ["nothing"]


def test_a_rank_that_became_slow() -> None:
    compute = noisy(1000, 4, 0.02, 1)
    compute[409:, 2] *= 1.09
    (found,) = judge(lines_of(compute), SETTING)
    assert found.kind == "slow rank" and found.share == pytest.approx(0.8 * 0.09 * 0.59, abs=0.005)
    head, _, rest = found.words.partition(" since update ")
    assert head == "rank 2 is 9% slower than the others" and abs(int(rest.split(":")[0]) - 410) <= 5


def test_of_two_ranks_one_has_always_been_slow() -> None:
    compute = noisy(60, 2, 0.002, 2)
    compute[:, 0] *= 1.5
    (found,) = judge(lines_of(compute), SETTING)
    assert found.words.startswith("rank 0 is 50% slower than the other: ") and "since" not in found.words


def test_samples_that_are_uneven() -> None:
    (found,) = judge(lines_of(noisy(200, 4, 0.3, 3)), SETTING)
    assert found.kind == "waiting" and "waiting for the slowest rank, ever another one" in found.words


def test_the_dearest_comes_first() -> None:
    compute = noisy(100, 2, 0.01, 4)
    compute[50:, 1] *= 1.2
    found = judge(lines_of(compute, optimizer=0.3, communication=0.2), SETTING)
    assert [finding.kind for finding in found] == ["optimizer", "communication", "slow rank"]


def test_only_the_same_ranks_are_compared() -> None:
    """A run that went on with fewer ranks is judged by them; updates that were left out do not count."""
    before, after = noisy(60, 3, 0.01, 5), noisy(30, 2, 0.01, 6)
    before[:, 1] *= 3
    lines = [*lines_of(before), *lines_of(after)]
    assert [finding.kind for finding in judge(lines, SETTING)] == ["nothing"]
    gone = [each | {"stepped": False} for each in lines[60 + LEAST_UPDATES :]]
    assert [finding.kind for finding in judge(lines[: 60 + LEAST_UPDATES] + gone, SETTING)] == ["too short"]


@pytest.mark.parametrize("number", range(LEAST_UPDATES + 1))
def test_too_short(number: int) -> None:
    (found,) = judge(lines_of(noisy(number, 2, 0.01, 0)), SETTING)
    assert found.kind == "too short" and f"{max(0, number - 1)} updates besides the first" in found.words


@settings(max_examples=25)
@given(st.integers(0, 10**6), st.integers(10, 800), st.floats(0.06, 1.0), st.floats(0, 0.01), st.floats(0.05, 0.95))
def test_a_change_is_found_where_it_is(seed: int, number: int, size: float, sigma: float, where: float) -> None:
    """On noise that is small against the change, with one update in twenty that took ten times as long."""
    random = np.random.default_rng(seed)
    place = min(max(5, int(number * where)), number - 5)
    excess = random.normal(0.0, sigma, number) + np.where(np.arange(number) >= place, size, 0.0)
    excess[random.permutation(number)[: number // 20]] += 9.0
    found = slowness(excess)
    if number >= 40:  # of fewer, five updates may be the odd ones
        assert found is not None and found.place is not None
    if found is not None and found.place is not None:
        assert abs(found.place - place) <= max(3, number // 50) and found.share == pytest.approx(size, abs=0.05)


@settings(max_examples=100)
@given(st.integers(0, 10**6), st.integers(10, 1500), st.floats(0.0, 0.5), st.sampled_from(["normal", "heavy"]))
def test_noise_is_no_change(seed: int, number: int, sigma: float, kind: str) -> None:
    random = np.random.default_rng(seed)
    noise = random.standard_t(2, number) if kind == "heavy" else random.normal(0.0, 1.0, number)
    assert slowness(sigma * noise) is None


@given(st.lists(st.floats(-0.9, 100), min_size=10, max_size=300))
def test_any_series_is_judged(excess: list[float]) -> None:
    found = slowness(np.array(excess))
    assert found is None or (found.share > 0 and (found.place is None or 0 < found.place < len(excess)))
