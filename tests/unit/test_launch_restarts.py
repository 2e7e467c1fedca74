"""The budget of restarts, its refilling, what no restart can mend, and a smaller budget after out of memory."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.launching import fake_config
from unisono.config.check import check
from unisono.errors import ConfigError
from unisono.launch.failure import Failure
from unisono.launch.ranks import Machine, decide_ranks
from unisono.launch.restarts import OUT_OF_MEMORY, POISON, Restarts
from unisono.pulse import Beat


def died(code: int = 1, retry: tuple[str, ...] = ()) -> list[Failure]:
    return [Failure(0, code, 1.0, "it broke", True, retry)]


def at(done: int, update: int) -> list[Beat]:
    return [Beat(done=done, update=update, records=[7, 8]), Beat(done=done, update=update)]


def test_the_budget_is_for_failures_without_progress() -> None:
    restarts = Restarts(2)
    for done in (0, 0, 3, 5, 5, 9):
        assert restarts.decide(died(), at(done, 0)).again
    assert restarts.decide(died(), at(9, 0)).again
    last = restarts.decide(died(), at(9, 0))
    assert (last.again, last.code) == (False, 1) and "2 of 2 restarts used" in last.fate


def test_what_a_restart_cannot_mend() -> None:
    for code in (2, 3):
        decision = Restarts(5).decide(died(code), at(0, 0))
        assert (decision.again, decision.code) == (False, code)


def test_an_update_that_fails_three_times_is_named() -> None:
    """Other faults between them do not hide it."""
    restarts = Restarts(4)
    for _ in range(2):
        assert restarts.decide(died(), at(11, 12)).again
        assert restarts.decide(died(), at(10, 11)).again
    poison = restarts.decide(died(), at(11, 12))
    assert (poison.again, poison.code) == (False, POISON)
    assert "update 12 has failed 3 times" in poison.fate and "7, 8" in poison.fate and "--skip-update 12" in poison.fate


def test_out_of_memory_starts_again_with_less_and_costs_no_restart() -> None:
    restarts = Restarts(0)
    for tokens in (1024, 512):
        decision = restarts.decide(died(OUT_OF_MEMORY, (f"batch.micro_tokens={tokens}",)), at(0, 1))
        assert decision.again and decision.overrides == (f"batch.micro_tokens={tokens}",)
    assert restarts.overrides == ("batch.micro_tokens=512",)
    assert restarts.decide(died(OUT_OF_MEMORY), at(0, 1)).code == OUT_OF_MEMORY


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20), st.sampled_from([1, -9, 4])), max_size=200))
def test_it_always_ends(history: list[tuple[int, int, int]]) -> None:
    """Without progress there are at most budget + 1 attempts in a row."""
    restarts, furthest, in_a_row = Restarts(3), 0, 0
    for done, update, code in history:
        in_a_row = 1 if done > furthest else in_a_row + 1
        furthest = max(furthest, done)
        if not restarts.decide(died(code), at(done, update)).again:
            break
        assert in_a_row <= 4


def test_a_range_of_ranks() -> None:
    config = fake_config(ranks="2-4")
    assert decide_ranks(config, Machine(gpus=8, cores=1)) == 4
    assert decide_ranks(config, Machine(gpus=3, cores=1)) == 3
    assert decide_ranks(config, Machine(gpus=0, cores=3)) == 3
    assert decide_ranks(config, Machine(gpus=1, cores=1)) == 2, "not fewer than the range says"
    assert [decide_ranks(config, Machine(gpus=4, cores=1), fewer=n) for n in range(4)] == [4, 3, 2, 2]
    with pytest.raises(ConfigError, match=r"launch\.ranks is 4-2"):
        check(fake_config(ranks="4-2"))
