"""`unisono tune`: its statistic, its list of settings, its order of trials; and the whole of it on two real ranks."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.tune.statistic import NOISE, is_hopeless, judge, log_ratio, student


@pytest.mark.parametrize(
    ("share", "freedom", "t"),
    [
        (0.95, 1, 12.706),
        (0.95, 2, 4.303),
        (0.95, 5, 2.571),
        (0.99, 3, 5.841),
        (0.90, 10, 1.812),
        (0.999, 30, 3.646),
    ],
)
def test_students_t_is_that_of_the_tables(share: float, freedom: int, t: float) -> None:
    assert student(share, freedom) == pytest.approx(t, abs=6e-4)


@pytest.mark.parametrize(("pairs", "tried"), [(2, 1), (4, 1), (6, 8), (6, 1)])
def test_noise_alone_is_kept_no_more_often_than_said(pairs: int, tried: int) -> None:
    """Half of the noise's share: a setting must be faster to be kept, not only different."""
    generator, rounds = random.Random(pairs * 100 + tried), 4000 // tried

    def kept() -> bool:
        noise = [generator.gauss(0.0, 0.03) for _ in range(pairs)]
        return not is_hopeless(noise) and judge(noise, tried).is_gain

    share = sum(any(kept() for _ in range(tried)) for _ in range(rounds)) / rounds
    assert share <= NOISE / 2 + 4 * math.sqrt(NOISE / 2 / rounds)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), tried=st.integers(1, 12), drift=st.floats(-0.01, 0.01))
def test_a_tenth_in_small_noise_is_kept_and_its_loss_is_not(seed: int, tried: int, drift: float) -> None:
    """Also on a machine that grows slower or faster by up to 1 % a run: the order within a pair changes."""
    generator = random.Random(seed)
    speed = [math.exp(drift * run + generator.uniform(-0.005, 0.005)) for run in range(12)]
    pairs = [math.log(1.10) + (-1) ** k * math.log(speed[2 * k + 1] / speed[2 * k]) for k in range(6)]
    found = judge(pairs, tried)
    assert found.is_gain and found.low <= found.mean <= found.high and found.mean == pytest.approx(1.10, rel=0.006)
    lost = judge([-each for each in pairs], tried)
    assert not lost.is_gain and is_hopeless([-each for each in pairs])
    assert (lost.low, lost.high) == pytest.approx((1 / found.high, 1 / found.low))


def test_a_gain_that_is_not_worth_a_line_is_not_kept() -> None:
    assert judge([0.005, 0.0051, 0.0049, 0.005], 1).low > 1
    assert not judge([0.005, 0.0051, 0.0049, 0.005], 1).is_gain
    with pytest.raises(ValueError, match="1 pairs say nothing"):
        judge([0.5], 1)


@given(seconds=st.lists(st.floats(0.01, 100), min_size=3, max_size=9), factor=st.floats(0.1, 10))
def test_a_disturbed_update_weighs_nothing(seconds: list[float], factor: float) -> None:
    faster = [each / factor for each in seconds]
    faster[0] *= 1000
    assert log_ratio(seconds, faster) == pytest.approx(math.log(factor), abs=1e-9)
