"""Whom the watch blames for a hang, and whom it leaves in peace."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono import pulse
from unisono.launch.watch import describe, judge
from unisono.pulse import Beat, open_pulse, page_of, read_beat

PHASES = ["start", "prepare", "group", "load", "resume", "validation", "checkpoint", "other", "data", "forward"]
PHASES += ["backward", "exchange", "optimizer", "export", "something new"]
NOW = 1000.0


def at(phase: str, deadline: float, done: int = 11, beside: str = "") -> Beat:
    return Beat(phase, NOW - 100, deadline, done, done + 1, [7, 3], beside)


def test_the_rank_that_others_wait_for_is_named() -> None:
    beats = {0: at("backward", NOW - 50), 1: at("data", NOW - 1, beside="data.collate of update 12")}
    hang = judge(beats, NOW)
    assert hang is not None and hang.culprits == (1,)
    said = describe(hang, beats, NOW)
    missed = "rank 1 did not arrive at the gradient exchange of update 12"
    assert said.splitlines()[0] == f"hang: {missed}; it is in data.collate of update 12 for 100 s"
    assert "samples of update 12: 7, 3" in said and "rank 0: backward of update 12 for 100 s, 11 updates done" in said


def test_who_waits_is_excused_while_the_other_has_time() -> None:
    assert judge({0: at("exchange", NOW - 50), 1: at("forward", NOW + 1)}, NOW) is None
    assert judge({0: at("exchange", NOW - 50), 1: at("backward", NOW + 1)}, NOW) is None, "it has not come so far"
    assert judge({0: at("data", NOW + 50), 1: at("validation", NOW + 1)}, NOW) is None


def test_all_at_the_same_place() -> None:
    beats = {rank: at("exchange", NOW - 1) for rank in range(3)}
    hang = judge(beats, NOW)
    assert hang is not None and hang.culprits == (0, 1, 2)
    assert describe(hang, beats, NOW).startswith("hang: all ranks are in the exchange of losses and norms of update 12")
    alone = {0: at("forward", NOW - 1)}
    assert describe(judge(alone, NOW) or pytest.fail("no hang"), alone, NOW).startswith("hang: rank 0 is in forward of")


@given(st.lists(st.tuples(st.sampled_from(PHASES), st.integers(0, 2), st.booleans()), min_size=1, max_size=6))
def test_never_a_verdict_while_somebody_has_time_who_is_behind(ranks: list[tuple[str, int, bool]]) -> None:
    beats = {k: at(phase, NOW - 1 if late else NOW + 1, done) for k, (phase, done, late) in enumerate(ranks)}
    hang = judge(beats, NOW)
    if hang is None:
        assert not all(late for _, _, late in ranks), "all are late, and nobody is told"
        return
    assert all(beats[rank].deadline < NOW for rank in hang.culprits)
    assert describe(hang, beats, NOW).startswith("hang: ")


def test_deadlines_are_learned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(pulse.time, "monotonic", lambda: clock[0])
    for name, value in {pulse.FOLDER: str(tmp_path), pulse.FLOOR: "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    told = open_pulse()
    assert read_beat(page_of(tmp_path, 1)) is None

    def beat(phase: str, after: float) -> Beat:
        clock[0] += after
        told.at(phase)
        return read_beat(page_of(tmp_path, 1)) or pytest.fail("nothing told")

    assert beat("forward", 1).deadline == 1 + 20, "the first time has ten times the floor"
    assert beat("backward", 0.5).phase == "backward"
    assert beat("forward", 0.01).deadline - clock[0] == pytest.approx(5.0), "ten times its longest so far"
    beat("backward", 0.1)
    assert beat("forward", 3).deadline - clock[0] == pytest.approx(5.0)
    beat("backward", 0.1)
    assert beat("backward", 0.05).deadline - clock[0] == pytest.approx(30.0)
    told.begin(4, range(1000))
    told.finished(3)
    told.beside("data.collate of update 5")
    last = read_beat(page_of(tmp_path, 1))
    assert last is not None and (last.update, last.done, len(last.records)) == (4, 3, pulse.MAX_IDS)
    assert last.beside == "data.collate of update 5" and os.path.getsize(page_of(tmp_path, 1)) == 4096
