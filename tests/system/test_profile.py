"""A profile of a few updates: a trace and a table a rank, and not a number of the run is another."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from support.ranks import RankFailed
from support.runs import assert_same_weights, make_run, numbers_of, train_whole

SPANS = {"data", "forward", "backward", "exchange", "optimizer", "other"}


@pytest.fixture(scope="module")
def runs(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """A run of two ranks that was looked at, one that was not, and what the first one said."""
    folder = tmp_path_factory.mktemp("profile")
    seen, alone = (make_run(folder, tiny, name=name) for name in ("seen", "alone"))
    said = train_whole(2, seen, "log.profile=3..4")
    assert "the traces of all ranks" not in train_whole(2, alone)
    return folder / "seen", folder / "alone", said


def trace_of(run: Path, rank: int) -> list[dict[str, Any]]:
    """The events of a trace that have a duration."""
    events = json.loads(gzip.decompress((run / f"profile/rank{rank}.json.gz").read_bytes()))["traceEvents"]
    return [event for event in events if event.get("ph") == "X"]


def test_each_rank_has_a_trace_that_names_the_spans(runs: tuple[Path, Path, str]) -> None:
    run, _, _ = runs
    files = ["rank0.json.gz", "rank0.txt", "rank1.json.gz", "rank1.txt"]
    assert sorted(path.name for path in (run / "profile").iterdir()) == files
    for rank in range(2):
        events = trace_of(run, rank)
        names = [event["name"] for event in events if event.get("cat") == "user_annotation"]
        assert set(names) >= SPANS
        assert names.count("optimizer") == 2, "two updates were asked for"
        assert "checkpoint" in names, "update 4 is saved, update 2 was saved before"
        (first, *_) = (event for event in events if event["name"] == "forward")
        inside = [e["name"] for e in events if first["ts"] <= e["ts"] <= first["ts"] + first["dur"]]
        assert "aten::mm" in inside or "aten::addmm" in inside


def test_the_costliest_operators_are_shown(runs: tuple[Path, Path, str]) -> None:
    run, _, said = runs
    table = (run / "profile/rank0.txt").read_text()
    assert table in said and str(run / "profile") in said
    heading, *rows = table.splitlines()
    assert heading.split()[:3] == ["operator", "CPU", "ms"] and 5 < len(rows) <= 15
    costs = [float(row.split()[-3]) for row in rows]
    assert costs == sorted(costs, reverse=True) and costs[0] > 0
    assert not {row.split()[0] for row in rows} & SPANS


def test_not_a_number_is_another(runs: tuple[Path, Path, str]) -> None:
    seen, alone, _ = runs
    assert numbers_of(seen) == numbers_of(alone)
    assert_same_weights(seen, alone)
    assert not (alone / "profile").exists()


def test_updates_beyond_an_epoch_are_refused(tiny: Path, tmp_path: Path) -> None:
    """How many updates an epoch has is known when the data is prepared."""
    file = make_run(tmp_path, tiny, length={"epochs": 1}, log={"profile": "9..11"})
    with pytest.raises(RankFailed, match=r"ConfigError: log.profile is 9..11, but the run has 10 updates"):
        train_whole(1, file)
