"""Where each second of two real ranks goes: a rank that is slow, a loader that is, and neither."""

from __future__ import annotations

import contextlib
import io
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.ranks import run_ranks
from support.runs import make_run, read_lines, updates_of
from unisono.pulse import Pulse

SLOW_SINCE = 13


@dataclass(frozen=True)
class Load:
    """What is added to a run: seconds of every forward, of every one of rank 1's from SLOW_SINCE on, of every read."""

    forward: float
    slow: float = 0.0
    read: float = 0.0


class Busy(Pulse):
    """A pulse under which forward takes its time."""

    seconds = slow = 0.0

    def at(self, phase: str) -> None:
        super().at(phase)
        if phase == "forward":
            time.sleep(self.seconds + (self.slow if self._beat.update >= SLOW_SINCE else 0.0))


def train_under(rank: int, world: int, run_file: Path, load: Load) -> str:
    """Train on this rank; returns what it said."""
    from unisono import train
    from unisono.data.store import Store

    Busy.seconds, Busy.slow = load.forward, load.slow if rank == 1 else 0.0
    read = Store.sample

    def sample(self: Store, index: int) -> Any:
        time.sleep(load.read)
        return read(self, index)

    Store.sample = sample  # type: ignore[method-assign]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        train.start([str(run_file)], Busy)
    return said.getvalue()


def run_under(folder: Path, tiny: Path, load: Load, num_updates: int, prefetch: int = 2) -> tuple[dict[str, Any], str]:
    """Train on two ranks; returns the verdict line and what rank 0 said; all seconds are accounted for."""
    file = make_run(
        folder,
        tiny,
        length={"updates": num_updates},
        data={"prefetch": prefetch},
        checkpoint={"every": 100},
    )
    said = run_ranks(train_under, 2, file, load)[0]
    lines, updates = read_lines(folder / "run/metrics.jsonl"), updates_of(folder / "run")
    assert len(updates) == num_updates
    for line in updates:
        causes = line["seconds_by_cause"]
        assert sum(causes.values()) == pytest.approx(line["seconds"], rel=0.01)
        assert {"communication", "waiting"} <= causes.keys() and min(causes.values()) >= 0
        assert [len(seconds) for seconds in line["seconds_by_rank"].values()] == [2, 2]
    assert lines[-1]["kind"] == "verdict" and lines[-1]["update"] == num_updates
    for finding in lines[-1]["findings"]:
        assert f"verdict: {finding['words']}\n" in said
    return lines[-1], said


def test_a_slow_rank_is_waited_for_and_named(tiny: Path, tmp_path: Path) -> None:
    """Rank 1 computes 60 ms, and 120 ms from update 13 on."""
    verdict, _ = run_under(tmp_path, tiny, Load(0.06, slow=0.06), 26)
    updates = updates_of(tmp_path / "run")
    waits = sorted(line["seconds_by_cause"]["waiting"] for line in updates[SLOW_SINCE - 1 :])
    assert 0.04 < waits[len(waits) // 2] < 0.08
    before = sorted(line["seconds_by_cause"]["waiting"] for line in updates[1 : SLOW_SINCE - 1])
    assert before[len(before) // 2] < 0.03
    theirs = read_lines(tmp_path / "run/events/rank1.jsonl")
    slow = sorted(
        line["spans"]["waiting"] for line in theirs if line.get("update", 0) >= SLOW_SINCE and "kind" not in line
    )
    assert slow[len(slow) // 2] < 0.01, "nobody is slower"
    (finding,) = [finding for finding in verdict["findings"] if finding["kind"] == "slow rank"]
    head, _, update = finding["words"].partition(":")[0].partition(" slower than the other since update ")
    assert head.startswith("rank 1 is ") and abs(int(update) - SLOW_SINCE) <= 2
    assert 60 < int(head.split()[-1].rstrip("%")) < 120


def test_a_slow_loader_is_named(tiny: Path, tmp_path: Path) -> None:
    """A sample is read in 40 ms, and nothing is built ahead; forward takes 100 ms."""
    verdict, said = run_under(tmp_path, tiny, Load(0.1, read=0.04), 14, prefetch=0)
    dearest = verdict["findings"][0]
    assert dearest["kind"] == "data" and 0.15 < dearest["share"] < 0.45
    assert "waiting for data: raise data.prefetch (now 0)" in said


def test_nothing_stands_out(tiny: Path, tmp_path: Path) -> None:
    """Forward takes 200 ms on both."""
    verdict, said = run_under(tmp_path, tiny, Load(0.2), 13)
    (finding,) = verdict["findings"]
    assert finding["kind"] == "nothing" and finding["share"] > 0.8
    assert "verdict: nothing stands out: 9" in said
