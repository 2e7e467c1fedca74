"""Launches of fake ranks: in this process, or in one that can be killed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

import unisono
from unisono.config.load import Loaded
from unisono.config.schema import RunConfig

MARK = "UNISONO_TEST_MARK"
# what the ranks of a launch find: the tests, and the very unisono that is under test
MODULES = os.pathsep.join([str(Path(__file__).parents[1]), str(Path(unisono.__file__).parents[1])])
_PROGRAM = """
import sys
from support.launching import run_fake
sys.exit(run_fake(sys.argv[1], ranks=int(sys.argv[2]), restarts=int(sys.argv[3]), port=int(sys.argv[4])))
"""


def tell_ranks(monkeypatch: pytest.MonkeyPatch, folder: Path, **told: object) -> None:
    """Set the environment of a launch in this process: the modules under test, ``folder`` as its mark, and ``told``."""
    for name, value in {"PYTHONPATH": MODULES, MARK: folder, **told}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def fake_config(*, ranks: int | str, restarts: int = 0, port: int = 0, **launch: object) -> RunConfig:
    """Make the run file of a launch of fake ranks."""
    return RunConfig.model_validate(
        {
            "run": {"output_dir": "unused"},
            "model": {"path": "starter"},
            "data": {"train": ["unused.jsonl"]},
            "batch": {"global_size": 8},
            "length": {"updates": 1},
            "launch": {"ranks": ranks, "max_restarts": restarts, "port": port, "allocator": "none", **launch},
        }
    )


def run_fake(
    plan: str,
    *,
    ranks: int = 2,
    prepare: Callable[[RunConfig], object] = lambda config: None,
    **launch: int,
) -> int:
    """Launch fake ranks that follow ``plan`` (steps apart by spaces) and return the exit code."""
    from unisono.launch import run

    loaded = Loaded(fake_config(ranks=ranks, **launch), {}, Path("run.yaml"))
    return run(loaded, plan.split(), module="support.fake_worker", prepare=prepare)


def start_fake(
    plan: str, *, ranks: int = 2, restarts: int = 0, port: int = 0, mark: str, output: Path
) -> subprocess.Popen[bytes]:
    """Start a launcher of its own for ``run_fake``; all that it starts carries ``mark`` and writes to ``output``."""
    with output.open("w") as file:
        return subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, plan, str(ranks), str(restarts), str(port)],
            env={**os.environ, MARK: mark},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def alive(mark: str) -> list[str]:
    """Name the processes that carry ``mark``."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"{process.pid} {' '.join(process.cmdline())}")
        except psutil.Error:
            continue
    return found


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Wait for ``condition``; fail with ``what`` after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen in {seconds:.0f} s"
        time.sleep(0.05)


def all_exist(files: Sequence[Path]) -> Callable[[], bool]:
    """Make a condition: every file is there."""
    return lambda: all(file.exists() for file in files)
