"""What ranks tell each other with an update, and what becomes of it: waiting and communication, told apart."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unisono.metrics.record import Spans
from unisono.outcome import UpdateResult, Word
from unisono.strategy.ddp import ready
from unisono.strategy.ddp.ready import Readiness

seconds = st.floats(0, 1e3)
words = st.builds(Word, st.booleans(), st.booleans(), seconds, seconds, seconds)


def result_of(told: list[Word]) -> UpdateResult:
    return UpdateResult(loss=1.0, grad_norm=1.0, stepped=True, is_sound=True, bad_ranks=[], words=told)


@given(words)
def test_a_word_arrives_as_it_was_said(word: Word) -> None:
    assert Word.of(word.values()) == word


@given(st.lists(words, min_size=1, max_size=5))
def test_exposed_seconds_are_waiting_or_communication(told: list[Word]) -> None:
    result = result_of(told)
    slowest = max(range(len(told)), key=lambda rank: told[rank].own_seconds)
    for rank, word in enumerate(told):
        idle = result.idle(rank)
        if word.exposed_seconds:
            assert math.isclose(sum(idle.values()), word.exposed_seconds) and min(idle.values()) >= 0
        else:
            assert idle == {}
    assert result.idle(slowest).get("waiting", 0.0) == 0.0


def test_the_slowest_rank_is_waited_for() -> None:
    """Rank 1 computes 2 s longer, and rank 2 waits 1 s for its data: 0.5 s are left for the exchange of all."""
    told = [Word(False, False, 3.0, 0.0, 2.5), Word(False, True, 5.0, 0.0, 0.5), Word(False, False, 3.0, 1.0, 1.5)]
    result = result_of(told)
    assert [result.idle(rank)["waiting"] for rank in range(3)] == [2.0, 0.0, 1.0]
    assert [result.idle(rank)["communication"] for rank in range(3)] == [0.5, 0.5, 0.5]
    assert result.stop_wanted and not result.save_wanted and result.own_seconds == [3.0, 5.0, 4.0]


def test_the_last_gradient_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(ready.time, "perf_counter", lambda: now[0])
    readiness = Readiness(torch.device("cpu"))
    for begin, moments, end, expected in ((0, (1, 2, 5), 9, 4), (20, (21,), 21, 0), (30, (), 33, 3)):
        now[0] = begin
        readiness.begin()
        assert not readiness.used
        for moment in moments:
            now[0] = moment
            readiness.gradient(torch.zeros(1))
        now[0] = end
        readiness.over()
        assert readiness.seconds_after() == expected and len(readiness.used) == len(moments)


def test_given_seconds_leave_the_sum_as_it_is() -> None:
    spans = Spans()
    spans.enter("backward")
    spans.give("backward", {"communication": 0.25, "waiting": 0.5})
    total, parts = spans.take_update()
    assert (parts["communication"], parts["waiting"]) == (0.25, 0.5)
    assert sum(parts.values()) == pytest.approx(total, abs=1e-9)
    assert spans.take()[1].keys() == {"backward", "other"}, "they are given once"
