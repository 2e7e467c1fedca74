"""The drill and the rehearsal: what they say of a run that is right, and that they see what is wrong."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from support.launching import alive, tell_ranks
from support.runs import make_run
from unisono.config.load import load
from unisono.drill.drill import drill
from unisono.drill.faults import KINDS, Fault, parse
from unisono.drill.rehearse import rehearse
from unisono.drill.scratch import Scratch
from unisono.errors import ConfigError, OutputError

WRONG_MODULE = ("support.wrong_train", "support.wrong_train")
ADAPTER = {"rank": 4, "dropout": 0.2}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tell_ranks(monkeypatch, tmp_path)


def try_drill(file: Path, *inject: str) -> tuple[int, str]:
    """Drill, and check that nothing is left of it; returns the code and what was said."""
    before, said = sorted(file.parent.iterdir()), []
    code = drill(load(file), [], inject, said.append)
    assert sorted(file.parent.iterdir()) == before and alive(str(file.parent)) == []
    return code, "\n".join(said)


def try_rehearsal(file: Path) -> tuple[int, str]:
    before, said = sorted(file.parent.iterdir()), []
    code = rehearse(load(file), [], said.append)
    assert sorted(file.parent.iterdir()) == before and alive(str(file.parent)) == []
    return code, "\n".join(said)


def two_ranks(tmp_path: Path, tiny: Path, **sections: object) -> Path:
    file = make_run(tmp_path, tiny, **{"launch": {"ranks": 2}, "length": {"epochs": 3}, **sections})
    (tmp_path / "cache").mkdir(exist_ok=True)  # of prepared data, which stays
    return file


def test_faults_are_read_and_all_that_is_wrong_is_said() -> None:
    assert parse("kill@1:3:backward", ranks=2) == Fault("kill", 1, 3, "backward")
    assert str(parse("enospc@0:2:checkpoint", ranks=1)) == "enospc@0:2:checkpoint"
    for text, expected in {
        "burn@7:x:coffee": ["no fault 'burn'", "no rank '7': 0 to 1", "'x' is not", "no phase 'coffee'"],
        "kill": ["no rank ''", "no phase ''"],
        "torn@0:1:forward": ["torn is a fault of the phase checkpoint"],
        "nan@0:1:backward": ["nan is a fault of the phase forward"],
        "kill@0:3:load": ["load comes before any update: 0"],
        "kill@0:0:forward": ["forward comes with updates 1, 2"],
        "kill@0:1:forward:x": ["no phase"],
    }.items():
        with pytest.raises(ConfigError) as raised:
            parse(text, ranks=2)
        for part in expected:
            assert part in str(raised.value)


def test_a_drill_of_a_run_that_is_right(tiny: Path, tmp_path: Path) -> None:
    code, said = try_drill(two_ranks(tmp_path, tiny, model={"lora": ADAPTER}), "exit@1:3:backward")
    assert code == 0, said
    assert "drill: passed. 1 fault happened; the samples of all 5 updates are the same" in said
    assert "and so are the final weights" in said


@pytest.mark.faults
def test_a_fault_that_never_comes_is_no_success(tiny: Path, tmp_path: Path) -> None:
    file = two_ranks(tmp_path, tiny, launch={"ranks": 1})
    code, said = try_drill(file, "poison@0:2:forward", "kill@0:4:forward")
    assert code == 1 and "kill@0:4:forward did not happen" in said


def test_a_fault_that_cannot_come_is_refused(tiny: Path, tmp_path: Path) -> None:
    file = two_ranks(tmp_path, tiny, launch={"ranks": 1})
    for inject, message in {
        "kill@0:2:validation": "data.validation is not set",
        "kill@0:2:generation": "data.validation is not set",
    }.items():
        with pytest.raises(ConfigError, match=message):
            try_drill(file, inject)
    with pytest.raises(ConfigError, match=r"there is a fault in update 4"):
        try_drill(file, "kill@0:2:export", "kill@0:4:forward")


@pytest.mark.faults
@pytest.mark.timeout(300)
def test_the_standard_drill(tiny: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, said = try_drill(two_ranks(tmp_path, tiny, model={"lora": ADAPTER}))
    assert code == 0 and "drill: passed. 5 faults happened" in said, said
    assert "unisono: 4 faults:" in capfd.readouterr().err, "being asked to stop is none"


@pytest.mark.faults
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("stop", "hang")])
def test_every_kind(tiny: Path, tmp_path: Path, kind: str) -> None:
    phase = {"torn": "checkpoint", "enospc": "checkpoint", "nan": "forward"}.get(kind, "optimizer")
    file = two_ranks(tmp_path, tiny, batch={"global_size": 2, "micro_tokens": 128})
    code, said = try_drill(file, f"{kind}@1:2:{phase}" if kind != "torn" else "torn@0:2:checkpoint")
    assert code == 0, said
    ends = {"poison": "code 6", "nan": "code 3"}
    assert (f"it ended with {ends[kind]}" in said) if kind in ends else ("all 4 updates" in said)


@pytest.mark.faults
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "faults", [["kill@1:3:validation", "raise@0:5:generation"], ["torn@0:1:checkpoint"], ["exit@1:3:export"]]
)
def test_faults_after_an_update(tiny: Path, tmp_path: Path, faults: list[str]) -> None:
    file = two_ranks(tmp_path, tiny, data={"validation": 0.2}, validate={"every": 2, "generate": 2})
    code, said = try_drill(file, *faults)
    assert code == 0, said


@pytest.mark.faults
@pytest.mark.timeout(300)
def test_three_faults_of_one_update_are_poison_to_the_run_and_right(tiny: Path, tmp_path: Path) -> None:
    file = two_ranks(tmp_path, tiny, launch={"ranks": 1}, optim={"warmup": 20})
    code, said = try_drill(file, "raise@0:2:forward", "kill@0:2:backward", "raise@0:2:optimizer")
    assert code == 0 and "it ended with code 6, as it must" in said, said


@pytest.mark.faults
@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", ["skip", "rewind"])
def test_a_nan_that_is_left_out(tiny: Path, tmp_path: Path, how: str) -> None:
    code, said = try_drill(two_ranks(tmp_path, tiny, optim={"on_nonfinite": how}), "nan@1:2:forward")
    assert code == 0 and "and so are the final weights" in said, said


@pytest.mark.parametrize(
    "wrong",
    [
        "reseeds by the start",
        pytest.param("begins the order anew", marks=pytest.mark.faults),
        pytest.param("forgets the moments", marks=pytest.mark.faults),
    ],
)
def test_a_drill_sees_a_trainer_that_resumes_wrongly(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    monkeypatch.setattr(Scratch, "modules", WRONG_MODULE)
    monkeypatch.setenv("WRONG", wrong)
    code, said = try_drill(two_ranks(tmp_path, tiny, model={"lora": ADAPTER}), "kill@1:5:backward")
    assert code == 1 and "drill: NOT as it must be" in said and "the final weights differ" in said


def test_a_rehearsal_of_a_run_that_is_right(tiny: Path, tmp_path: Path) -> None:
    settings = {"optim": {"warmup": 20, "skip_updates": [1, 4]}, "validate": {"every": 4, "generate": 2}}
    file = two_ranks(tmp_path, tiny, data={"validation": 0.2}, **settings)
    code, said = try_rehearsal(file)
    assert code == 0, said
    lines = said.splitlines()
    assert lines[-1].startswith("ready: about ") and "24 updates" in lines[-1] and "GiB" in lines[-1]
    assert any(line.startswith("ok      killed in update 4") for line in lines)
    assert any(line.startswith("ok      update 1 on 2 ranks and on one") for line in lines)


@pytest.mark.faults
@pytest.mark.parametrize("wrong", ["exchanges nothing", "mean of means"])
def test_a_rehearsal_sees_ranks_that_do_not_add_up(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    monkeypatch.setattr(Scratch, "modules", WRONG_MODULE)
    monkeypatch.setenv("WRONG", wrong)
    code, said = try_rehearsal(two_ranks(tmp_path, tiny))
    assert code == 1 and "NOT OK  update 1 on 2 ranks and on one" in said and "\nnot ready: " in said


@pytest.mark.faults
def test_a_rehearsal_counts_the_room_for_all_checkpoints(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("unisono.drill.rehearse.shutil.disk_usage", lambda _: usage._replace(free=10_000))
    code, said = try_rehearsal(two_ranks(tmp_path, tiny, launch={"ranks": 1}))
    assert code == 1 and "NOT OK  disk: 3 checkpoints" in said


def test_where_no_folder_can_be_made(tiny: Path, tmp_path: Path) -> None:
    file = two_ranks(tmp_path, tiny)
    with pytest.raises(OutputError, match=r"cannot be|no folder can be made"):
        rehearse(load(file, ["run.output_dir=/proc/no/run"]), ["run.output_dir=/proc/no/run"], print)


def test_a_run_that_fails_by_itself_is_not_ready(tiny: Path, tmp_path: Path) -> None:
    file = two_ranks(tmp_path, tiny, optim={"lr": 1e30, "warmup": 0})
    code, said = try_rehearsal(file)
    assert code == 1 and "not ready: the rehearsal ended with exit code 3" in said
