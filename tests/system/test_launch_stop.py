"""Launchers of their own that are stopped, killed, hung up and started together."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from support.launching import MODULES, alive, all_exist, start_fake, wait_until
from support.ranks import free_port
from unisono.stopping import AGAIN

Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Start]:
    """Start marked launchers; afterwards nothing with the mark may be alive."""
    monkeypatch.setenv("PYTHONPATH", MODULES)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    mark = str(tmp_path)
    launchers: list[subprocess.Popen[bytes]] = []

    def launch(plan: str, **how: int) -> subprocess.Popen[bytes]:
        launchers.append(start_fake(plan, mark=mark, output=tmp_path / f"output{len(launchers)}", **how))
        return launchers[-1]

    try:
        yield launch
        wait_until(lambda: alive(mark) == [], 15, f"the end of {alive(mark)}")
    finally:
        for launcher in launchers:
            launcher.kill()
            launcher.wait()
        for line in alive(mark):
            psutil.Process(int(line.split()[0])).kill()


def notes(folder: Path, ranks: int = 2) -> list[Path]:
    """Make the folder in which ranks tell that they run, and name their files."""
    folder.mkdir()
    return [folder / f"rank{rank}.json" for rank in range(ranks)]


def test_b64_signals_end_everything_and_b66_a_killed_job_starts_again_at_once(start: Start, tmp_path: Path) -> None:
    """Four jobs at once: SIGINT to the group, SIGTERM or SIGKILL to the launcher alone, SIGHUP under nohup.

    The ranks of the second do not listen. The killed one is started again at once, on the same port.
    """
    port = free_port()
    files = [notes(tmp_path / name) for name in ("int", "term", "kill", "nohup", "again")]
    folders = [ranks[0].parent for ranks in files]
    interrupted = start(f"all:helper all:note:{folders[0]} all:sleep:100")
    terminated = start(f"all:deaf all:note:{folders[1]} all:sleep:100")
    killed = start(f"all:note:{folders[2]} all:sleep:100", port=port)
    with hang_up_ignored():
        detached = start(f"all:note:{folders[3]} all:sleep:100")
    wait_until(all_exist([file for ranks in files[:4] for file in ranks]), 90, "the start of four jobs")

    os.killpg(interrupted.pid, signal.SIGINT)
    terminated.send_signal(signal.SIGTERM)
    killed.kill()
    detached.send_signal(signal.SIGHUP)
    again = start(f"all:note:{folders[4]}", port=port)
    told = time.monotonic()
    assert interrupted.wait(15) == AGAIN
    time.sleep(max(0.0, told + 1.5 - time.monotonic()))  # a second request, not the first one again
    assert terminated.poll() is None, "its ranks do not listen, and have time"
    terminated.send_signal(signal.SIGTERM)
    assert terminated.wait(15 - (time.monotonic() - told)) == 143
    lost = [json.loads(file.read_text())["pid"] for file in files[2]]
    wait_until(lambda: all(map(has_ended, lost)), 15, "the end of the ranks whose launcher was killed")
    assert again.wait(30) == 0
    assert all_exist(files[4])()
    assert "Traceback" not in (tmp_path / "output0").read_text()
    assert "stopped by SIGTERM; all ranks have ended" in (tmp_path / "output1").read_text()

    assert detached.poll() is None
    detached.send_signal(signal.SIGTERM)
    assert detached.wait(15) == AGAIN


def test_b45_two_jobs_at_once_do_not_meet(start: Start, tmp_path: Path) -> None:
    files = [notes(tmp_path / name) for name in ("one", "two")]
    jobs = [start(f"all:note:{ranks[0].parent} all:reduce:{ranks[0].parent}") for ranks in files]
    assert [job.wait(100) for job in jobs] == [0, 0]
    about = [json.loads(ranks[0].read_text())["environment"] for ranks in files]
    assert about[0]["TORCHELASTIC_RUN_ID"] != about[1]["TORCHELASTIC_RUN_ID"]
    assert all((ranks[0].parent / f"sum{rank}").read_text().startswith("3") for ranks in files for rank in range(2))


@contextmanager
def hang_up_ignored() -> Iterator[None]:
    """Start programs as nohup does."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def has_ended(pid: int) -> bool:
    """Tell whether a process has ended, though nobody may have taken note of it."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
