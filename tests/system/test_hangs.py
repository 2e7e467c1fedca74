"""A rank that hangs is named, with its place, its samples and its stack; and the run goes on without a person."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from support.launching import alive, tell_ranks
from support.runs import assert_same_weights, make_run, train_whole
from unisono.config.load import load
from unisono.launch import run

HANG_SECONDS = 2.0
SENTENCES = {
    "collate": "rank 1 did not arrive at the gradient exchange of update 4; it is in data.collate of update 4 for",
    "forward": "rank 1 did not arrive at the gradient exchange of update 4; it is in forward of update 4 for",
    "backward": "all ranks are in the gradient exchange of update 4 for",
    "optimizer": "did not arrive at",
    "validation": "all ranks are in the validation after update 4 for",
}
SHORT = {"collate", "forward"}


def launch(file: Path, fault: str, monkeypatch: pytest.MonkeyPatch) -> tuple[int, float]:
    """Run with a fault; returns the exit code and the seconds from the fault to the end."""
    moment = file.parent / "moment"
    tell_ranks(monkeypatch, file.parent, FAULT=fault, FAULT_TIME=moment)
    code = run(load(file, []), [], module="support.faulty_train")
    assert alive(str(file.parent)) == []
    return code, time.time() - float(moment.read_text())


@pytest.mark.parametrize(
    "phase", [pytest.param(each, marks=[] if each in SHORT else pytest.mark.faults) for each in SENTENCES]
)
def test_a_hang_is_named(
    phase: str, tiny: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = make_run(
        tmp_path,
        tiny,
        data={"validation": 0.2, "prefetch": 0 if phase == "collate" else 2},
        validate={"every": 2},
        launch={"ranks": 2, "max_restarts": 0, "hang_seconds": HANG_SECONDS, "timeout_seconds": 300},
    )
    code, seconds = launch(file, f"hang_{phase}@1", monkeypatch)
    said = capfd.readouterr().err
    assert code == 4 and SENTENCES[phase] in said, said
    assert HANG_SECONDS <= seconds < 10 * HANG_SECONDS + 15
    assert "samples of update" in said and "rank 0: " in said
    stacks = said.partition("\nstacks of rank ")[2]
    assert "in hang" in stacks, "the function that hangs is in a stack"
    if "rank 1 did not arrive" in said:
        assert "in hang" in stacks.partition("\nstacks of rank 1")[2], "the culprit's is the last on the screen"


@pytest.mark.faults
def test_a_run_goes_on_after_a_hang(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = make_run(
        tmp_path,
        tiny,
        checkpoint={"every": 1},
        launch={"ranks": 2, "max_restarts": 1, "hang_seconds": HANG_SECONDS, "timeout_seconds": 300},
    )
    assert launch(file, "hang_once@0", monkeypatch)[0] == 0
    train_whole(2, file, f"run.output_dir={tmp_path}/whole")
    assert_same_weights(tmp_path / "run", tmp_path / "whole")


def test_a_slow_rank_is_reported_and_left_alone(
    tiny: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = make_run(
        tmp_path, tiny, length={"updates": 8}, launch={"ranks": 2, "max_restarts": 0, "hang_seconds": HANG_SECONDS}
    )
    assert launch(file, "slow@1", monkeypatch)[0] == 0
    (line,) = (line for line in capfd.readouterr().out.splitlines() if "is slow" in line)
    assert line.startswith("rank 1 is slow: 0.2")
