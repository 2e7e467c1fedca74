"""A run that is hit goes on by itself: killed ranks, a poisonous batch, numbers that are gone, too little memory."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from support.launching import alive, tell_ranks
from support.runs import assert_same_weights, ids_of, make_run, numbers_of, train_whole, updates_of
from unisono.config.load import load
from unisono.launch import run


def launch(file: Path, fault: str, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> int:
    """Launch a run with a fault; afterwards nothing of it is alive."""
    tell_ranks(monkeypatch, file.parent, FAULT=fault, FAULT_TIME=file.parent / "moment")
    code = run(load(file, overrides), overrides, module="support.faulty_train")
    assert alive(str(file.parent)) == []
    return code


def test_a_killed_rank_costs_nothing_but_time(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = make_run(tmp_path, tiny, checkpoint={"every": 1}, launch={"ranks": 2, "max_restarts": 1})
    train_whole(2, file, f"run.output_dir={tmp_path}/whole")
    begin = time.time()
    assert launch(file, "killed_once@1", monkeypatch) == 0
    seconds = time.time() - begin
    ours, whole = numbers_of(tmp_path / "run"), numbers_of(tmp_path / "whole")
    assert ours == whole and ids_of(tmp_path / "run") == ids_of(tmp_path / "whole")
    assert_same_weights(tmp_path / "run", tmp_path / "whole")
    ledger = json.loads((tmp_path / "run/goodput.json").read_text())
    assert ledger["wall_seconds"] == pytest.approx(seconds, rel=0.01, abs=0.2)
    in_all = ledger["productive_seconds"] + sum(ledger["lost_seconds"].values())
    assert in_all == pytest.approx(ledger["wall_seconds"], rel=0.01) and ledger["num_updates"] == 6
    (fault,) = ledger["faults"]
    assert (fault["rank"], fault["exit_code"], fault["update"], fault["what"]) == (1, -9, 4, "SIGKILL")
    assert fault["updates_redone"] <= 1  # the newest checkpoint was still being written
    assert fault["recovery_seconds"] < 20
    assert ledger["lost_seconds"]["restart"] > 0
    alone = json.loads((tmp_path / "whole/goodput.json").read_text())  # without a launcher
    assert alone["faults"] == [] and alone["num_updates"] == 6 and alone["lost_seconds"]["restart"] == 0


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
    assert "the fullest micro-batch (" in said and "longest sample is record" in said, "before update 1"
    assert "put batch.micro_tokens=128 into the run file" in said
    ours, whole = updates_of(tmp_path / "run"), updates_of(tmp_path / "whole")
    assert [line["num_targets"] for line in ours] == [line["num_targets"] for line in whole]
    assert [line["loss"] for line in ours] == pytest.approx([line["loss"] for line in whole], rel=0, abs=1e-5)


def test_b48_a_sample_that_is_too_long_for_the_memory_is_named_before_update_1(
    tiny: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = make_run(tmp_path, tiny, data={"overlong": "error", "max_length": 400}, batch={"micro_tokens": 64})
    with (tmp_path / "data.jsonl").open("a") as data:
        turns = [{"role": "user", "content": "all?"}, {"role": "assistant", "content": "yes " * 60}]
        data.write(json.dumps({"messages": turns}) + "\n")
    assert launch(file, "no_room@0", monkeypatch, "launch.ranks=2") == 5
    said = capfd.readouterr().err
    (where,) = (line for line in said.splitlines() if "the fullest micro-batch (1 samples, 2" in line)
    assert "its longest sample is record 20" in where, said
    assert not updates_of(tmp_path / "run")


@pytest.mark.parametrize("world", [1, 3])
def test_b48_trying_the_fullest_micro_batch_changes_no_bit(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world: int
) -> None:
    file = make_run(tmp_path, tiny, launch={"ranks": world})
    assert "fits: " in train_whole(world, file)
    assert launch(file, "untried@all", monkeypatch, f"run.output_dir={tmp_path}/untried") == 0
    assert_same_weights(tmp_path / "run", tmp_path / "untried")


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
