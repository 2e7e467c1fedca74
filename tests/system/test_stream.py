"""Streamed training: the same on any number of processes, and a killed run goes on as if nothing had been."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.runs import (
    assert_same_weights,
    ids_of,
    make_run,
    read_lines,
    train_until_killed,
    train_whole,
    updates_of,
)

pytestmark = pytest.mark.timeout(100)


def stream_run(folder: Path, tiny: Path, name: str) -> Path:
    """Write a run over two files with a bad record; an update has 4 samples, an epoch 5 updates and a rest."""
    file = make_run(
        folder,
        tiny,
        name=name,
        num_samples=20,
        batch={"global_size": 4},
        length={"updates": 9},
        data={"mode": "stream", "shuffle_window": 6, "on_error": "skip"},
    )
    second = folder / "second.jsonl"
    turns = [{"role": "user", "content": "more?"}, {"role": "assistant", "content": "no"}]
    second.write_text(json.dumps({"messages": turns}) + "\n[1]\n", encoding="utf-8")
    values = json.loads(file.read_text())
    values["data"]["train"].append(str(second))
    file.write_text(json.dumps(values))
    return file


def test_b28_one_two_and_three_processes_stream_the_same(tmp_path: Path, tiny: Path) -> None:
    runs = {}
    for world in (1, 2, 3):
        said = train_whole(world, stream_run(tmp_path, tiny, f"run{world}"))
        assert "2 file(s) streamed, records of the shape messages" in said and "9 updates, streamed" in said
        runs[world] = tmp_path / f"run{world}"
    first = ids_of(runs[1])
    epoch = [record for update in range(1, 7) for record in first[update]]
    assert len(epoch) == len(set(epoch)) == 21, "every record that can be used, once"
    assert [len(first[update]) for update in range(1, 10)] == [4, 4, 4, 4, 4, 1, 4, 4, 4]
    for world in (2, 3):
        assert ids_of(runs[world]) == first
        losses = [(line["loss"], line["num_targets"]) for line in updates_of(runs[world]) if "loss" in line]
        expected = [(line["loss"], line["num_targets"]) for line in updates_of(runs[1]) if "loss" in line]
        assert losses == [pytest.approx(pair, abs=1e-5) for pair in expected]
        assert read_lines(runs[world] / "left_out.jsonl") == read_lines(runs[1] / "left_out.jsonl")
    assert [Path(line["place"]).name for line in read_lines(runs[1] / "left_out.jsonl")] == ["second.jsonl:2"]


@pytest.mark.parametrize("update", [3, 6])
def test_b30_a_killed_stream_goes_on_bitwise(tmp_path: Path, tiny: Path, update: int) -> None:
    whole = stream_run(tmp_path, tiny, "whole")
    train_whole(2, whole)
    killed = stream_run(tmp_path, tiny, "killed")
    train_until_killed(2, killed, update)
    said = train_whole(2, killed)
    assert "resumed" in said
    assert ids_of(tmp_path / "killed") == ids_of(tmp_path / "whole")
    assert_same_weights(tmp_path / "killed", tmp_path / "whole")
    assert read_lines(tmp_path / "killed" / "left_out.jsonl") == read_lines(tmp_path / "whole" / "left_out.jsonl")
