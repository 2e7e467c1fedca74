"""One rank fails in the middle of a real run: it ends soon, says why, and leaves checkpoints and nothing else (B39)."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from support.launching import alive, tell_ranks
from support.runs import make_run
from unisono.checkpoint.manifest import newest_sound
from unisono.config.load import load
from unisono.drill.faults import AFTER, CHECKPOINTS, DONE, PLANTED
from unisono.launch import run
from unisono.pulse import BEFORE, WITHIN

SECONDS = 15.0


def launch(
    folder: Path, tiny: Path, fault: str, monkeypatch: pytest.MonkeyPatch, *overrides: str
) -> tuple[int, float, Path]:
    """Run two ranks with a fault; returns the exit code, the seconds from the fault to the end, and the run folder."""
    moment = folder / "moment"
    tell_ranks(monkeypatch, folder, FAULT=fault, FAULT_TIME=moment)
    file = make_run(
        folder,
        tiny,
        data={"validation": 0.2},
        validate={"every": 3},
        checkpoint={"every": 1},
        launch={"ranks": 2, "max_restarts": 0},
    )
    code = run(load(file, overrides), overrides, module="support.faulty_train")
    seconds = time.time() - float(moment.read_text()) if moment.exists() else 0.0
    assert alive(str(folder)) == []
    return code, seconds, folder / "run"


@pytest.mark.parametrize("phase", ["group", "fetch", "forward", "backward", "validation", "save", "log"])
def test_b39_a_failing_rank_ends_the_run(
    phase: str, tiny: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = 0 if phase == "log" else 1  # rank 0 is the one that writes lines
    code, seconds, folder = launch(tmp_path, tiny, f"{phase}@{rank}", monkeypatch)
    assert code == 1
    assert 0 < seconds < SECONDS
    printed = capfd.readouterr().err
    assert f"RuntimeError: planted in {phase}" in "\n".join(printed.splitlines()[-30:])
    assert f"rank {rank} of 2 failed" in printed
    if phase != "group":
        sound, passed_over = newest_sound(folder / "checkpoints")
        assert sound is not None and sound.name >= "update-00000001"
        assert passed_over == []


def test_b10_three_bad_updates_in_a_row_stop_the_run(
    tiny: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, folder = launch(tmp_path, tiny, "nan@1", monkeypatch, "optim.on_nonfinite=skip")
    printed = capfd.readouterr()
    assert code == 3
    assert "3 in a row" in printed.err
    assert "rank 1, samples [" in printed.err
    assert printed.out.count("left out on all ranks") == 2
    assert len((folder / "metrics.jsonl").read_text().splitlines()) <= 2


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["raise", "kill", "segv", "exit", "leave"])
@pytest.mark.parametrize("phase", [*BEFORE, *WITHIN, *AFTER])
def test_b39_every_kind_of_end_in_every_phase(
    phase: str,
    kind: str,
    tiny: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Within 15 s: a code that is not 0, the rank that was first and why, no process, the checkpoints sound."""
    rank = 0 if phase == "generation" else 1
    update = 0 if phase in BEFORE else 4
    fault, done = f"{kind}@{rank}:{update}:{phase}", tmp_path / "done"
    done.mkdir()
    tell_ranks(monkeypatch, tmp_path, **{PLANTED: fault, DONE: done, CHECKPOINTS: tmp_path / "run/checkpoints"})
    file = make_run(
        tmp_path,
        tiny,
        data={"validation": 0.2},
        length={"updates": 4},
        validate={"every": 2, "generate": 2},
        checkpoint={"every": 2, "mode": "wait"},
        launch={"ranks": 2, "max_restarts": 0},
    )
    code = run(load(file), module="unisono.drill.worker")
    seconds = time.time() - (done / fault).stat().st_mtime
    assert alive(str(tmp_path)) == []
    assert code == 1 and seconds < SECONDS
    printed = capfd.readouterr().err
    last = "\n".join(printed.splitlines()[-30:])
    words = {
        "raise": f"planted by the drill: {fault}",
        "kill": "SIGKILL",
        "segv": "SIGSEGV",
        "exit": "left by sys.exit(0) before its work was done",
        "leave": f"left with exit code 0 before its work was done, in {phase}",
    }
    assert f"rank {rank} of 2 failed (" in printed and words[kind] in last, last
    assert kind != "raise" or words[kind] in printed.splitlines()[-1], "the traceback is last on the screen"
    if update:
        sound, passed_over = newest_sound(tmp_path / "run/checkpoints")
        assert sound is not None and passed_over == []
