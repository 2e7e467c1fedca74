"""Asked to stop, by a signal to anybody or by a file: the update in work ends and all is saved (B65)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from support.launching import MARK, MODULES, alive, wait_until
from support.runs import assert_same_weights, ids_of, make_run, numbers_of, read_lines, train_whole
from unisono.stopping import AGAIN

PROGRAM = """
import sys
from pathlib import Path
from unisono.config.load import load
from unisono.launch import run
sys.exit(run(load(Path(sys.argv[1]), sys.argv[2:]), sys.argv[2:], module="support.faulty_train"))
"""
SECONDS = 15.0
Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture(scope="module")
def whole(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody stopped; returns its folder."""
    folder = tmp_path_factory.mktemp("whole")
    train_whole(2, make_slow_run(folder, tiny))
    return folder / "run"


def make_slow_run(folder: Path, tiny: Path) -> Path:
    return make_run(
        folder,
        tiny,
        length={"updates": 12},
        data={"validation": 0.3, "prefetch": 2},
        validate={"every": 4},
        checkpoint={"every": 5},
        launch={"ranks": 2, "max_restarts": 0},
    )


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a launcher in a group of its own; ``fault`` as ``support.faulty_train`` knows it."""
    launchers = []

    def launch(file: Path, fault: str, *overrides: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "PYTHONPATH": MODULES, MARK: str(tmp_path), "FAULT": fault}
        environment["FAULT_TIME"] = str(tmp_path / "moment")
        with (tmp_path / "output").open("ab") as out:
            launcher = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(file), *overrides],
                env=environment,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        launchers.append(launcher)
        return launcher

    yield launch
    for launcher in launchers:
        if launcher.poll() is None:
            os.killpg(launcher.pid, signal.SIGKILL)
            launcher.wait()
    for line in alive(str(tmp_path)):
        psutil.Process(int(line.split()[0])).kill()


def ranks_of(launcher: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The ranks of a launcher, in order."""
    children = psutil.Process(launcher.pid).children(recursive=True)
    ranks = [child for child in children if "unisono.worker" in child.cmdline()]
    return sorted(ranks, key=lambda rank: int(rank.environ()["RANK"]))


def has_update(run: Path, update: int) -> Callable[[], bool]:
    file = run / "metrics.jsonl"
    return lambda: file.exists() and f'{{"update":{update},' in file.read_text()


def to_group(launcher: subprocess.Popen[bytes], signum: signal.Signals) -> None:
    os.killpg(launcher.pid, signum)
    for rank in ranks_of(launcher):
        rank.send_signal(signum)  # ranks are in sessions of their own, as under a batch system everybody is told


WAYS: dict[str, Callable[[subprocess.Popen[bytes], Path], object]] = {
    "SIGTERM to all": lambda launcher, run: to_group(launcher, signal.SIGTERM),
    "SIGINT to all": lambda launcher, run: to_group(launcher, signal.SIGINT),
    "SIGTERM to the launcher": lambda launcher, run: launcher.send_signal(signal.SIGTERM),
    "SIGHUP to the launcher": lambda launcher, run: launcher.send_signal(signal.SIGHUP),
    "SIGUSR1 to rank 1": lambda launcher, run: ranks_of(launcher)[1].send_signal(signal.SIGUSR1),
    "SIGTERM to rank 0": lambda launcher, run: ranks_of(launcher)[0].send_signal(signal.SIGTERM),
    "a file": lambda launcher, run: (run / "stop").touch(),
}


IN_SHORT = {"SIGTERM to all", "a file"}  # the others are for `make faults`


@pytest.mark.parametrize("way", [pytest.param(w, marks=[] if w in IN_SHORT else pytest.mark.faults) for w in WAYS])
def test_b65_asked_to_stop_it_saves_and_goes_on(
    way: str, tiny: Path, whole: Path, tmp_path: Path, start: Start
) -> None:
    file, run = make_slow_run(tmp_path, tiny), tmp_path / "run"
    launcher = start(file, "slow@all")
    wait_until(has_update(run, 2), 60, "update 2")
    asked = time.monotonic()
    WAYS[way](launcher, run)
    assert launcher.wait(30) == AGAIN
    assert time.monotonic() - asked < SECONDS
    wait_until(lambda: alive(str(tmp_path)) == [], 5, "the end of all")
    said = (tmp_path / "output").read_text()
    done = max(line["update"] for line in numbers_of(run))
    assert f"update {done} is saved; the same command goes on from there" in said and "Traceback" not in said
    assert 2 <= done < 12 and (run / f"checkpoints/update-{done:08d}/manifest.json").exists()
    assert not (run / "stop").exists()
    assert f"resumed update-{done:08d}: {done} of 12" in train_whole(2, file)
    assert numbers_of(run) == numbers_of(whole) and ids_of(run) == ids_of(whole)
    assert_same_weights(run, whole)


@pytest.mark.parametrize(
    "phase",
    ["validation", pytest.param("save", marks=pytest.mark.faults), pytest.param("load", marks=pytest.mark.faults)],
)
def test_b65_in_any_phase(phase: str, tiny: Path, whole: Path, tmp_path: Path, start: Start) -> None:
    file, run = make_slow_run(tmp_path, tiny), tmp_path / "run"
    launcher = start(file, f"slow_{phase}@all")
    moment = tmp_path / "moment"
    wait_until(moment.exists, 60, phase)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(30) == AGAIN
    wait_until(lambda: alive(str(tmp_path)) == [], 5, "the end of all")
    if phase == "validation":
        lines = [line["kind"] for line in read_lines(run / "metrics.jsonl") if "kind" in line]
        assert lines == ["summary"], "it was cut short"
    train_whole(2, file)
    assert numbers_of(run) == numbers_of(whole) and ids_of(run) == ids_of(whole)
    assert_same_weights(run, whole)


@pytest.mark.faults
def test_b65_told_twice_it_leaves_at_once(tiny: Path, tmp_path: Path, start: Start) -> None:
    file, run = make_slow_run(tmp_path, tiny), tmp_path / "run"
    launcher = start(file, "very_slow@all", "checkpoint.every=1")
    wait_until(lambda: (run / "checkpoints/update-00000001/manifest.json").exists(), 60, "a checkpoint")
    time.sleep(0.5)
    launcher.send_signal(signal.SIGTERM)
    time.sleep(1.2)
    assert launcher.poll() is None, "an update takes ten seconds here"
    asked = time.monotonic()
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(30) == 128 + signal.SIGTERM
    assert time.monotonic() - asked < 5
    wait_until(lambda: alive(str(tmp_path)) == [], 5, "the end of all")
    assert "resumed update-00000001" in train_whole(
        2, file, "length.updates=2", "checkpoint.allow_changes=[updates in all]"
    )


@pytest.mark.faults
def test_b65_under_torchrun(tiny: Path, whole: Path, tmp_path: Path) -> None:
    """torchrun passes SIGTERM on and gives thirty seconds; its own exit code is always 1."""
    file, run = make_slow_run(tmp_path, tiny), tmp_path / "run"
    environment = {**os.environ, "PYTHONPATH": MODULES, MARK: str(tmp_path), "FAULT": "slow@all", "FAULT_TIME": "x"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    output = (tmp_path / "output").open("wb")
    launcher = subprocess.Popen(
        [*command, "-m", "support.faulty_train", str(file)],
        env=environment,
        stdout=output,
        stderr=output,
    )
    try:
        wait_until(has_update(run, 2), 60, "update 2")
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(30) == 1
    finally:
        launcher.kill()
        launcher.wait()
        output.close()
    done = max(line["update"] for line in numbers_of(run))
    assert f"resumed update-{done:08d}" in train_whole(2, file)
    assert numbers_of(run) == numbers_of(whole)
    assert_same_weights(run, whole)
