"""A run that is hit goes on by itself: killed ranks, a poisonous batch, numbers that are gone, too little memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.launching import MARK, MODULES, alive
from support.runs import assert_same_weights, ids_of, make_run, train_whole, updates_of
from unisono.config.load import load
from unisono.launch import run

WHAT_MAY_DIFFER = {"seconds", "tokens_per_second", "seconds_by_cause"}


def launch(file: Path, fault: str, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> int:
    """Launch a run with a fault; afterwards nothing of it is alive."""
    told = {"PYTHONPATH": MODULES, MARK: file.parent, "FAULT": fault, "FAULT_TIME": file.parent / "moment"}
    for name, value in told.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    code = run(load(file, overrides), overrides, module="support.faulty_train")
    assert alive(str(file.parent)) == []
    return code


def test_a_killed_rank_costs_nothing_but_time(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = make_run(tmp_path, tiny, checkpoint={"every": 1}, launch={"ranks": 2, "max_restarts": 1})
    train_whole(2, file, f"run.output_dir={tmp_path}/whole")
    assert launch(file, "killed_once@1", monkeypatch) == 0
    ours, whole = updates_of(tmp_path / "run"), updates_of(tmp_path / "whole")
    for line in [*ours, *whole]:
        for key in WHAT_MAY_DIFFER:
            del line[key]
    assert ours == whole and ids_of(tmp_path / "run") == ids_of(tmp_path / "whole")
    assert_same_weights(tmp_path / "run", tmp_path / "whole")


@pytest.mark.faults
def test_a_poisonous_batch_is_named_and_can_be_left_out(
    tiny: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = make_run(tmp_path, tiny, checkpoint={"every": 1}, launch={"ranks": 2, "max_restarts": 5})
    assert launch(file, "poison@1", monkeypatch) == 6
    said = capfd.readouterr().err
    assert "update 4 has failed 3 times" in said and "--skip-update 4" in said
    (samples,) = (line for line in said.splitlines() if "has failed 3 times" in line)
    reference = train_whole(1, file, f"run.output_dir={tmp_path}/whole")
    assert reference and ", ".join(map(str, ids_of(tmp_path / "whole")[4])) in samples
    assert launch(file, "poison@1", monkeypatch, "optim.skip_updates=[4]") == 0
    lines = updates_of(tmp_path / "run")
    assert [line["update"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert lines[3]["loss"] is None and not lines[3]["stepped"] and lines[4]["loss"] is not None
    assert ids_of(tmp_path / "run") == ids_of(tmp_path / "whole")


def test_too_little_memory_halves_the_micro_batch_and_changes_nothing(
    tiny: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault: a micro-batch of more than 150 tokens does not fit on rank 1."""
    file = make_run(
        tmp_path, tiny, batch={"global_size": 8, "micro_tokens": 256}, launch={"ranks": 2, "max_restarts": 0}
    )
    train_whole(2, file, f"run.output_dir={tmp_path}/whole")
    assert launch(file, "no_room@1", monkeypatch) == 0
    said = capfd.readouterr().err
    assert "out of memory with batch.micro_tokens 256" in said
    assert "put batch.micro_tokens=128 into the run file" in said.splitlines()[-1]
    ours, whole = updates_of(tmp_path / "run"), updates_of(tmp_path / "whole")
    assert [line["num_targets"] for line in ours] == [line["num_targets"] for line in whole]
    assert [line["loss"] for line in ours] == pytest.approx([line["loss"] for line in whole], rel=0, abs=1e-5)


@pytest.mark.faults
def test_rewinding(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates 4 and 5 are bad: the weights are those of checkpoint 2 again, and updates 3 to 5 are left out."""
    asked = {"on_nonfinite": "rewind", "max_nonfinite": 2}
    file = make_run(
        tmp_path,
        tiny,
        length={"updates": 8},
        optim={"schedule": "constant", **asked},
        checkpoint={"every": 2},
        launch={"ranks": 2, "max_restarts": 0},
    )
    assert launch(file, "nan_in_two@1", monkeypatch) == 0
    lines = updates_of(tmp_path / "run")
    assert [line["stepped"] for line in lines] == [True] * 3 + [False] * 2 + [True] * 3
    other = make_run(
        tmp_path / "other",
        tiny,
        length={"updates": 8},
        optim={"schedule": "constant", "skip_updates": [3, 4, 5]},
        launch={"ranks": 2},
    )
    train_whole(2, other)
    assert_same_weights(tmp_path / "run", tmp_path / "other/run")
