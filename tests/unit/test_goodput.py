"""The ledger of time: every second has a cause, what was done twice counts once, and faults have their price."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.goodput import CAUSES, account
from unisono.ledger import FILE, LAUNCH, SUMMARY, LaunchLedger, RankLedger, read_ledger

Line = dict[str, Any]


class Diary:
    """Writes lines at moments that a test chooses."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.lines: list[Line] = []
        self.launch = "a"

    def after(self, seconds: float, kind: str, **values: object) -> None:
        self.now += seconds
        self.lines.append({"time": self.now, "launch": self.launch, "kind": kind, **values})

    def ready(self, *, after: tuple[float, float, float], update: int = 0) -> None:
        """Launch, start the ranks, and have them ready to go on after ``update``."""
        for seconds, kind in zip(after, ("launch", "start", "session")):
            self.after(seconds, kind, **({"update": update} if kind == "session" else {}))

    def updates(self, *numbers: int, seconds: float = 10.0, data: float = 0.0) -> None:
        for number in numbers:
            self.after(seconds, "update", update=number, data=data)

    def fault(self, seconds: float, *, is_hang: bool = False, update: int = 0) -> None:
        values = {"rank": 1, "exit_code": 4 if is_hang else -9, "is_hang": is_hang, "update": update, "what": "x"}
        self.after(seconds, "fault", **values)


def test_a_quiet_run():
    diary = Diary()
    diary.ready(after=(0, 2, 5))
    diary.updates(1, 2, data=1.0)
    diary.after(3, "validation", update=2)
    diary.after(1, "checkpoint", update=2)
    diary.after(0.5, "close", update=2)
    diary.after(4, "end", code=0)
    found = account(diary.lines)
    assert found.wall_seconds == 35.5 and found.productive_seconds == 18 and found.num_updates == 2
    assert found.lost_seconds == dict.fromkeys(CAUSES, 0.0) | {
        "start": 7.0,
        "data": 2.0,
        "validation": 3.0,
        "checkpoint": 1.0,
        "finish": 4.5,
    }
    (said,) = found.sentences()
    assert "goodput 50.7%" in said and "start 7.0 s" in said and "restart" not in said


def test_a_fault_costs_what_was_done_twice_and_the_way_back():
    diary = Diary()
    diary.ready(after=(0, 2, 5))
    diary.updates(1, 2, 3)
    diary.fault(7, update=4)
    diary.after(1, "start")
    diary.after(6, "session", update=1)
    diary.updates(2, 3, 4)
    diary.after(0, "close", update=4)
    diary.after(0, "end", code=0)
    found = account(diary.lines)
    assert found.productive_seconds == 40
    assert found.lost_seconds["redone"] == 27 and found.lost_seconds["restart"] == 7
    (fault,) = found.faults
    assert (fault.update, fault.rank, fault.updates_redone, fault.recovery_seconds) == (4, 1, 2, 37.0)
    assert list(found.sentences())[1] == (
        "1 fault: 2 updates done again; at most 37.0 s from a fault to the next new update"
    )


def test_a_hang_is_told_from_work_that_was_lost():
    diary = Diary()
    diary.ready(after=(0, 1, 1))
    diary.updates(1)
    diary.fault(120, is_hang=True)
    diary.after(1, "end", code=4)
    found = account(diary.lines)
    assert found.lost_seconds["hang"] == 120 and found.lost_seconds["redone"] == 0
    assert found.faults[0].recovery_seconds is None and found.faults[0].updates_redone is None


def test_time_between_launches_is_nobodys():
    diary = Diary()
    for launch, resumed in (("a", 0), ("b", 1)):
        diary.launch = launch
        diary.ready(after=(3600, 1, 1), update=resumed)
        diary.updates(resumed + 1)
        diary.after(0, "end", code=75)
    found = account(diary.lines)
    assert (found.away_seconds, found.wall_seconds, found.num_launches, found.num_updates) == (3600, 24, 2, 2)


MOMENTS = st.lists(
    st.tuples(
        st.floats(0, 100),
        st.sampled_from(["update", "update", "update", "validation", "checkpoint", "fault", "hang", "stop"]),
        st.integers(0, 3),
    ),
    max_size=40,
)


@given(MOMENTS)
def test_the_causes_always_add_up_and_each_update_counts_once(moments: list[tuple[float, str, int]]):
    diary, done, productive = Diary(), 0, {}

    def begin(kinds: tuple[str, ...], back: int) -> int:
        for kind in kinds:
            diary.after(1, kind)
        resumed = max(0, done - back)
        diary.after(1, "session", update=resumed)
        for number in [n for n in productive if n > resumed]:
            del productive[number]
        return resumed

    done = begin(("launch", "start"), 0)
    for seconds, kind, back in moments:
        if kind == "update":
            done += 1
            diary.updates(done, seconds=seconds, data=seconds / 4)
            productive[done] = seconds * 0.75
        elif kind in ("fault", "hang"):
            diary.fault(seconds, is_hang=kind == "hang")
            done = begin(("start",), back)
        elif kind == "stop":
            diary.after(seconds, "end", code=75)
            diary.launch += "x"
            diary.now += 50
            done = begin(("launch", "start"), back)
        else:
            diary.after(seconds, kind, update=done)
    found = account(diary.lines)
    assert found.productive_seconds + sum(found.lost_seconds.values()) == pytest.approx(found.wall_seconds)
    assert found.wall_seconds + found.away_seconds == pytest.approx(diary.now - diary.lines[0]["time"])
    assert found.productive_seconds == pytest.approx(sum(productive.values()))
    assert found.num_updates == len(productive)
    assert all(fault.updates_redone is not None for fault in found.faults)


def test_the_launcher_writes_nothing_into_a_folder_that_is_not_its_own(tmp_path: Path):
    theirs = json.dumps({"time": 1.0, "launch": "other", "kind": "launch"}) + "\n"
    (tmp_path / FILE).write_text(theirs)
    ledger = LaunchLedger(tmp_path, began=2.0)
    ledger.note("start")
    assert list(ledger.close(2)) == []
    assert (tmp_path / FILE).read_text() == theirs and not (tmp_path / SUMMARY).exists()
    gone = LaunchLedger(tmp_path / "not there", began=2.0)
    gone.note("start")
    assert list(gone.close(2)) == [] and not (tmp_path / "not there").exists()


def test_both_sides_write_one_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    launcher = LaunchLedger(tmp_path, began=1.0)
    launcher.note("start")
    monkeypatch.setenv(LAUNCH, launcher.for_ranks())
    rank = RankLedger(tmp_path)
    assert [line["kind"] for line in read_ledger(tmp_path)] == ["launch", "start"], "if the launcher is killed"
    rank.note("session", update=0)
    rank.note("update", update=1, data=0.0)
    assert list(rank.close()) == []
    with (tmp_path / FILE).open("a") as file:
        file.write('{"time": 12')  # as a power cut leaves it
    (said,) = launcher.close(0)
    assert said.startswith("goodput ")
    assert [line["kind"] for line in read_ledger(tmp_path)] == ["launch", "start", "session", "update", "end"]
    assert json.loads((tmp_path / SUMMARY).read_text())["num_updates"] == 1


def test_a_disk_that_is_full_is_said_and_hides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    launcher = LaunchLedger(tmp_path, began=1.0)
    monkeypatch.setenv(LAUNCH, launcher.for_ranks())
    rank = RankLedger(tmp_path)
    rank.note("session", update=0)
    assert list(rank.close()) == []

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("unisono.ledger._append", full)
    launcher.note("fault")
    (said,) = launcher.close(0)
    assert "cannot be written: No space left on device" in said


def test_recovery_leaves_out_the_time_between_launches():
    diary = Diary()
    diary.ready(after=(0, 1, 1))
    diary.fault(5)
    diary.after(2, "end", code=1)
    diary.launch = "b"
    diary.ready(after=(40_000, 1, 1))
    diary.updates(1)
    assert account(diary.lines).faults[0].recovery_seconds == 14


def test_when_a_process_began():
    code = "import time; begun = time.time(); from unisono.ledger import process_began; print(begun - process_began())"
    before = time.time()
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert 0 <= float(said) < time.time() - before
